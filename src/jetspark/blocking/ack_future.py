"""The future of ``publish_async`` for threads.

A message that got no acknowledgement in time is given up by the connection's thread, or by one that waits here or asks
whether a future is done. Callbacks are called without the link's lock: what they do is not ours, and may wait for a
thread that wants it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TypeAlias

from jetspark.blocking.runner import MachineRunner
from jetspark.blocking.transport import Link
from jetspark.blocking.waiter import LONGEST_SLEEP_S, Waiter
from jetspark.core.numbers import check_timeout
from jetspark.errors import ConnectionLost, RequestTimeout
from jetspark.jetstream.info import PubAck
from jetspark.publish.window import HandleFacts, PublishWindow

__all__ = ["AckFuture", "AckFutures"]

_logger = logging.getLogger("jetspark.blocking")

Callback: TypeAlias = "Callable[[AckFuture], object]"


class AckFuture(HandleFacts):
    """An acknowledgement on its way: :meth:`result` is the :class:`~jetspark.PubAck`.

    A failure that nobody has looked at when the future goes away is logged, at ERROR to ``jetspark.blocking``.
    """

    # A concurrent.futures.Future has a condition of its own, which costs twenty times as much to make.
    __slots__ = ("_ack", "_error", "_followers", "_home", "_is_seen", *HandleFacts.SLOTS)

    def __init__(self, home: AckFutures) -> None:
        self._home = home
        self._ack: PubAck | None = None
        self._error: Exception | None = None
        self._is_seen = False
        self._followers: list[Waiter | Callback] | None = None

    def done(self) -> bool:
        """Whether it is known what became of the message, or that it cannot be known."""
        if self._ack is None and self._error is None:
            self._home.look()
        return self._ack is not None or self._error is not None

    def cancelled(self) -> bool:
        """Never: a message that is on its way cannot be taken back."""
        return False

    def result(self, timeout: float | None = None) -> PubAck:
        """The acknowledgement; waits for it.

        Raises:
            RequestTimeout: It has not come within ``timeout`` seconds and may still; or, when the future is done,
                it has not come within the publisher's ``ack_timeout``.
            JetSparkError: What became of the message instead; see :class:`WindowedPublisher`.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error.with_traceback(None)  # many futures may share it; each has a trace of its own
        assert self._ack is not None
        return self._ack

    def exception(self, timeout: float | None = None) -> Exception | None:
        """What became of the message instead of an acknowledgement; waits like :meth:`result`."""
        if self._ack is None and self._error is None:
            self._wait(timeout)
        self._is_seen = True
        return self._error

    def add_done_callback(self, callback: Callback) -> None:
        """Have ``callback(future)`` called, exactly once, when the future is done; now, if it is.

        Callbacks are called in the order they were added, usually on the thread that reads from the connection, which
        must not be kept: pass on what is to be done, and neither publish nor wait there. What a callback raises is
        logged, at ERROR to ``jetspark.blocking``.
        """
        self._home.look()
        link = self._home.link
        with link.lock:
            is_done = self._ack is not None or self._error is not None
            if not is_done:
                link.flush()
                self._follow(callback)
        if is_done:
            _call(callback, self)

    def set_result(self, result: PubAck, /) -> None:
        """For the publisher."""
        self._ack = result
        if self._followers is not None:
            self._tell_followers(self._followers)

    def set_exception(self, exception: Exception, /) -> None:
        """For the publisher."""
        self._error = exception
        if self._followers is not None:
            self._tell_followers(self._followers)

    def _tell_followers(self, followers: list[Waiter | Callback]) -> None:
        while followers:  # one after the other: who was interrupted here goes on with the rest
            each = followers[0]
            if isinstance(each, Waiter):
                each.set_result(None)
            else:
                self._home.due.append((each, self))
            del followers[0]
        self._followers = None

    def _wait(self, timeout: float | None) -> None:
        check_timeout(timeout)
        link = self._home.link
        with link.lock:
            if self._ack is not None or self._error is not None:
                return
            link.flush()
            arrived = Waiter()
            followers = self._follow(arrived)
        try:
            self._home.wait(arrived, math.inf if timeout is None else time.monotonic() + timeout, self._is_settled)
        except TimeoutError:
            raise RequestTimeout("acknowledgement", timeout or 0) from None
        finally:
            with link.lock:
                if arrived in followers:
                    followers.remove(arrived)

    def _follow(self, follower: Waiter | Callback) -> list[Waiter | Callback]:
        """With the lock: tell it when the future is done."""
        if self._followers is None:
            self._followers = []
        self._followers.append(follower)
        return self._followers

    def _is_settled(self) -> bool:
        """Whether nothing more will come for it: the main thread may have been interrupted with it in hand."""
        with self._home.link.lock:
            if self._ack is None and self._error is None and not self._home.window.waits_for(self):
                self.set_exception(ConnectionLost("a thread was interrupted while it read the acknowledgement", 1))
            return self._ack is not None or self._error is not None

    def __del__(self) -> None:
        try:
            if self._error is not None and not self._is_seen:
                self._home.window.log_overlooked(_logger, self._error)
        except AttributeError:
            pass  # an interrupt came while it was made


class AckFutures:
    """The futures of one window: those whose callbacks are due, and the threads that wait for one."""

    def __init__(self, link: Link, runner: MachineRunner[PublishWindow]) -> None:
        self.link, self._runner, self.window = link, runner, runner.machine
        self.due: list[tuple[Callback, AckFuture]] = []
        """Callbacks whose futures are done; called when the lock is free."""

    def new(self) -> AckFuture:
        return AckFuture(self)

    def wait(self, waiter: Waiter, deadline: float, is_settled: Callable[[], bool]) -> None:
        """Until the waiter is told, or it ``is_settled``.

        Raises:
            TimeoutError: Neither until the deadline.
        """
        self.link.check_may_wait("an acknowledgement")
        while True:
            self.look()
            try:
                # Not link.wait_for, which sleeps on the socket: it does not notice an acknowledgement that another
                # thread has read and hands out only now.
                now, due_at = time.monotonic(), self._runner.due_at
                waiter.wait(min(deadline, math.inf if due_at is None else due_at, now + LONGEST_SLEEP_S) - now)
                return
            except TimeoutError:
                if is_settled():
                    return
                if time.monotonic() >= deadline:
                    raise

    def look(self) -> None:
        """Give up what got no acknowledgement in time, if there may be any."""
        if self.link.connection.is_closed:
            # Also in a forked process, whose copy of the connection is closed, and where no thread tells of it.
            self._runner.on_time(time.monotonic())
        else:
            self._runner.run_due()

    def call_back(self) -> None:
        """Without the lock."""
        if self.due:
            with self.link.lock:
                due, self.due = self.due, []
            for callback, future in due:
                _call(callback, future)


def _call(callback: Callback, future: AckFuture) -> None:
    try:
        callback(future)
    except Exception:
        _logger.exception("a callback of a publish failed: %r", callback)
