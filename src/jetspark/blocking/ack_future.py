"""The future of ``publish_async`` for threads, and waiting for it.

Acknowledgement time-outs are noticed by the connection's thread, or by a thread that waits for a future or calls
``done()``. Callbacks run without the transport's lock, because a user's callback may wait for a thread that needs
it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from jetspark.blocking.runner import MachineRunner
from jetspark.blocking.transport import Transport
from jetspark.blocking.waiter import LONGEST_SLEEP_S, Waiter
from jetspark.core.numbers import check_timeout
from jetspark.errors import ConnectionLost, RequestTimeout
from jetspark.jetstream.info import PubAck
from jetspark.publish.window import HandleFacts, PublishWindow

__all__ = ["NOT_SENT", "AckFuture", "AckFutures", "error_of", "errors_of", "wait_for"]

_logger = logging.getLogger("jetspark.blocking")

Callback: TypeAlias = "Callable[[AckFuture], object]"


class AckFuture(HandleFacts):
    """A pending acknowledgement: :meth:`result` is the :class:`~jetspark.PubAck`.

    An error that was never retrieved is logged at ERROR to ``jetspark.blocking`` when the future is garbage-collected.
    """

    # concurrent.futures.Future has a condition of its own, which makes it twenty times as expensive to create.
    __slots__ = ("_ack", "_error", "_followers", "_home", "_is_seen", *HandleFacts.SLOTS)

    def __init__(self, home: AckFutures) -> None:
        self._home = home
        self._ack: PubAck | None = None
        self._error: Exception | None = None
        self._is_seen = False
        self._followers: list[Waiter | Callback] | None = None

    def done(self) -> bool:
        """True when the outcome of the message is known, or is known to be undeterminable."""
        if self._ack is None and self._error is None:
            self._home.look()
        return self._ack is not None or self._error is not None

    def cancelled(self) -> bool:
        """Always False: a message in transit cannot be recalled."""
        return False

    def result(self, timeout: float | None = None) -> PubAck:
        """Wait for the acknowledgement and return it.

        Raises:
            RequestTimeout: It has not come within ``timeout`` seconds and may still come. If the future is done: it has
                not come within the publisher's ``ack_timeout``.
            JetSparkError: The reason for the failure; see :class:`WindowedPublisher`.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error.with_traceback(None)  # futures may share the error; each raise starts its own traceback
        assert self._ack is not None
        return self._ack

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait like :meth:`result`, and return the error, or None when the message is stored."""
        if self._ack is None and self._error is None:
            self._wait(timeout)
        self._is_seen = True
        return self._error

    def add_done_callback(self, callback: Callback) -> None:
        """Call ``callback(future)`` exactly once, when the future is done; at once if it is done already.

        Callbacks run in the order they were added, usually on the thread that reads from the connection. They must not
        block that thread: hand work over to another thread, and neither publish nor wait. An exception of a callback is
        logged at ERROR to ``jetspark.blocking``.
        """
        self._home.look()
        transport = self._home.transport
        with transport.lock:
            is_done = self._ack is not None or self._error is not None
            if not is_done:
                transport.flush()
                self._follow(callback)
        if is_done:
            _call(callback, self)

    def set_result(self, result: PubAck, /) -> None:
        """Called by the publisher only."""
        self._ack = result
        if self._followers is not None:
            self._notify_followers(self._followers)

    def set_exception(self, exception: Exception, /) -> None:
        """Called by the publisher only."""
        self._error = exception
        if self._followers is not None:
            self._notify_followers(self._followers)

    def _notify_followers(self, followers: list[Waiter | Callback]) -> None:
        while followers:  # each is removed after its call, so an interrupted call continues with the rest
            each = followers[0]
            if isinstance(each, Waiter):
                each.set_result(None)
            else:
                self._home.due.append((each, self))
            del followers[0]
        self._followers = None

    def _wait(self, timeout: float | None) -> None:
        check_timeout(timeout)
        transport = self._home.transport
        with transport.lock:
            if self._ack is not None or self._error is not None:
                return
            transport.flush()
            arrived = Waiter()
            followers = self._follow(arrived)
        try:
            self._home.wait(arrived, math.inf if timeout is None else time.monotonic() + timeout, self._is_final)
        except TimeoutError:
            raise RequestTimeout("acknowledgement", timeout or 0) from None
        finally:
            with transport.lock:
                if arrived in followers:
                    followers.remove(arrived)

    def _follow(self, follower: Waiter | Callback) -> list[Waiter | Callback]:
        """With the lock: notify the follower when the future is done."""
        if self._followers is None:
            self._followers = []
        self._followers.append(follower)
        return self._followers

    def _is_final(self) -> bool:
        """True when the outcome is final. An acknowledgement may be lost to an interrupt of the thread that read it."""
        with self._home.transport.lock:
            if self._ack is None and self._error is None and not self._home.window.waits_for(self):
                self.set_exception(ConnectionLost("a thread was interrupted while it read the acknowledgement", 1))
            return self._ack is not None or self._error is not None

    def __del__(self) -> None:
        try:
            if self._error is not None and not self._is_seen:
                self._home.window.log_overlooked(_logger, self._error)
        except AttributeError:
            pass  # an interrupt came during __init__


class AckFutures:
    """The futures of one window: runs their due callbacks, and lets threads wait for one."""

    def __init__(self, transport: Transport, runner: MachineRunner[PublishWindow]) -> None:
        self.transport, self._runner, self.window = transport, runner, runner.machine
        self.due: list[tuple[Callback, AckFuture]] = []
        """Callbacks of completed futures; they are called without the lock."""

    def new(self) -> AckFuture:
        return AckFuture(self)

    def wait(self, waiter: Waiter, deadline: float, is_final: Callable[[], bool]) -> None:
        """Wait until the waiter is resolved or ``is_final`` returns True.

        Raises:
            TimeoutError: Neither happened until the deadline.
        """
        self.transport.check_may_wait("an acknowledgement")
        while True:
            self.look()
            try:
                # Not transport.wait_for(), which sleeps on the socket: it would miss an acknowledgement that another
                # thread has read and delivers only now.
                now, due_at = time.monotonic(), self._runner.due_at
                waiter.wait(min(deadline, math.inf if due_at is None else due_at, now + LONGEST_SLEEP_S) - now)
                return
            except TimeoutError:
                if is_final():
                    return
                if time.monotonic() >= deadline:
                    raise

    def look(self) -> None:
        """Fail the messages whose acknowledgement time-out has passed."""
        if self.transport.connection.is_closed:
            # Includes a forked process: its copy of the connection is closed, but it has no thread to report that.
            self._runner.on_time(time.monotonic())
        else:
            self._runner.run_due()

    def call_back(self) -> None:
        """Run the due callbacks. Called without the lock."""
        if self.due:
            with self.transport.lock:
                due, self.due = self.due, []
            for callback, future in due:
                _call(callback, future)


def _call(callback: Callback, future: AckFuture) -> None:
    try:
        callback(future)
    except Exception:
        _logger.exception("publish callback %r raised; later callbacks still run", callback)


# ---- waiting ---------------------------------------------------------------------------------------------------------


# A publish that raises one of these has sent nothing. An interrupted publish may have sent its message.
NOT_SENT = Exception


def wait_for(future: AckFuture, timeout_s: float, what: str) -> None:
    """Wait until the message is stored.

    Raises:
        RequestTimeout: No acknowledgement within ``timeout_s``.
    """
    future.result(timeout_s)


def error_of(future: AckFuture) -> Exception | None:
    """Wait for the acknowledgement; return its error, or None when the message is stored."""
    return future.exception()


def errors_of(futures: Sequence[AckFuture], timeout_s: float) -> list[BaseException | None]:
    """Return the error of each future without raising it; None if it succeeded or is still pending at the timeout."""
    deadline = time.monotonic() + timeout_s
    found: list[BaseException | None] = []
    for future in futures:
        try:
            found.append(future.exception(max(deadline - time.monotonic(), 0.0)))
        except RequestTimeout:
            found.append(None)
    return found
