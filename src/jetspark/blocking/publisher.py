"""Windowed publishing from threads. Decisions are made in :mod:`jetspark.publish.window`; this adds waiting.

The link's lock guards the window. A message that got no acknowledgement in time is given up by the connection's thread,
or by one that waits here or asks whether a future is done. Callbacks are called without the lock: what they do is not
ours, and may wait for a thread that wants it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from jetspark.blocking.runner import MachineRunner
from jetspark.blocking.transport import WRITE_AT_BYTES
from jetspark.blocking.waiter import LONGEST_SLEEP_S, Waiter
from jetspark.core.headers import HeadersLike
from jetspark.core.numbers import check_timeout
from jetspark.errors import BufferFull, ConnectionLost, RequestTimeout
from jetspark.jetstream.info import PubAck
from jetspark.publish.window import ACK_TIMEOUT_S, MAX_OUTSTANDING, PublishWindow, WhenFull

if TYPE_CHECKING:
    from jetspark.blocking.client import Client

__all__ = ["AckFuture", "WindowedPublisher"]

_logger = logging.getLogger("jetspark.blocking")

Callback: TypeAlias = "Callable[[AckFuture], object]"


class AckFuture:
    """An acknowledgement on its way: :meth:`result` is the :class:`~jetspark.PubAck`.

    A failure that nobody has looked at when the future goes away is logged, at ERROR to ``jetspark.blocking``.
    """

    # A concurrent.futures.Future has a condition of its own, which costs twenty times as much to make.
    __slots__ = ("_ack", "_error", "_followers", "_is_seen", "_publisher")

    def __init__(self, publisher: WindowedPublisher) -> None:
        self._publisher = publisher
        self._ack: PubAck | None = None
        self._error: Exception | None = None
        self._is_seen = False
        self._followers: list[Waiter | Callback] | None = None

    def done(self) -> bool:
        """Whether it is known what became of the message, or that it cannot be known."""
        if self._ack is None and self._error is None:
            self._publisher.look()
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
        self._publisher.look()
        link = self._publisher.link
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
                self._publisher.due.append((each, self))
            del followers[0]
        self._followers = None

    def _wait(self, timeout: float | None) -> None:
        check_timeout(timeout)
        link = self._publisher.link
        with link.lock:
            if self._ack is not None or self._error is not None:
                return
            link.flush()
            arrived = Waiter()
            followers = self._follow(arrived)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            self._publisher.wait(arrived, followers, deadline, self._is_settled)
        except TimeoutError:
            raise RequestTimeout("acknowledgement", timeout or 0) from None

    def _follow(self, follower: Waiter | Callback) -> list[Waiter | Callback]:
        """With the lock: tell it when the future is done."""
        if self._followers is None:
            self._followers = []
        self._followers.append(follower)
        return self._followers

    def _is_settled(self) -> bool:
        """Whether nothing more will come for it: the main thread may have been interrupted with it in hand."""
        with self._publisher.link.lock:
            if self._ack is None and self._error is None and not self._publisher.window.waits_for(self):
                self.set_exception(ConnectionLost("a thread was interrupted while it read the acknowledgement", 1))
            return self._ack is not None or self._error is not None

    def __del__(self) -> None:
        try:
            if self._error is not None and not self._is_seen and (count := self._publisher.window.overlooked()):
                # Its words only: a handler that keeps records would keep its traceback and all that is in its frames.
                _logger.error("%d failed publishes nobody looked at; the last: %s", count, str(self._error))
        except AttributeError:
            pass  # an interrupt came while it was made


class WindowedPublisher:
    """Publishes to JetStream without waiting for each acknowledgement, from any number of threads.

    The guarantees are those of :class:`jetspark.aio.publisher.WindowedPublisher`.
    """

    def __init__(
        self,
        client: Client,
        *,
        max_outstanding: int = MAX_OUTSTANDING,
        ack_timeout: float = ACK_TIMEOUT_S,
        when_full: WhenFull = "wait",
    ) -> None:
        link = client._link
        self.link, self._connection = link, link.connection
        self._runner: MachineRunner[PublishWindow] = MachineRunner(link, self._on_step, self._call_due)
        self.window = self._runner.run(
            PublishWindow(
                link.connection,
                self._runner,
                max_outstanding=max_outstanding,
                ack_timeout=ack_timeout,
                when_full=when_full,
            )
        )
        self._waiting_for_room: list[Waiter] = []
        self._waiting_for_all: list[Waiter] = []
        self.due: list[tuple[Callback, AckFuture]] = []
        """Callbacks whose futures are done; called when the lock is free."""

    @property
    def outstanding(self) -> int:
        """Messages accepted whose acknowledgement has not come."""
        return self.window.outstanding

    def publish(
        self, subject: str, data: bytes = b"", headers: HeadersLike | None = None, timeout: float | None = None
    ) -> AckFuture:
        """Send a message; the future tells what became of it.

        When this raises, the message is not sent. It waits for room, at most ``timeout`` seconds; None waits as long as
        the connection lasts.

        Raises:
            RequestTimeout: There was no room within ``timeout``.
            InvalidSubject, InvalidHeader, PayloadTooLarge: Before anything is sent.
            WindowFull: ``when_full="raise"``, and ``max_outstanding`` messages wait.
            BufferFull: The network takes no more and the connection's ``when_full="raise"``.
            ConnectionClosed: After ``close`` or ``drain``.
        """
        connection, link = self._connection, self.link
        future = AckFuture(self)
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                with link.lock:
                    if connection.out_bytes >= WRITE_AT_BYTES:
                        link.write_and_wait(deadline)
                    if self._accept(future, subject, data, headers, deadline):
                        link.flush_soon()
                        return future
                self.look()
                with link.lock:
                    if not self.window.is_full:
                        continue
                    self.window.check_may_wait()
                    link.flush()
                    room = Waiter()
                    self._waiting_for_room.append(room)
                self.wait(room, self._waiting_for_room, deadline)
        except TimeoutError:
            raise RequestTimeout(f"publish to {subject!r}", timeout or 0, was_sent=False) from None

    def _accept(
        self, future: AckFuture, subject: str, data: bytes, headers: HeadersLike | None, deadline: float | None
    ) -> bool:
        runner = self._runner
        if runner.due_at is None:  # not for each message: the alarm stands at the oldest one's deadline, or before it
            runner.attach()
            runner.wake_at(time.monotonic() + self.window.ack_timeout_s)
        try:
            return self.window.publish(future, subject, data, headers, time.monotonic())
        except BufferFull:
            is_accepted: bool = self.link.when_there_is_room(
                partial(self._attempt, future, subject, data, headers), deadline
            )
            return is_accepted

    def _attempt(self, future: AckFuture, subject: str, data: bytes, headers: HeadersLike | None) -> bool:
        return self.window.publish(future, subject, data, headers, time.monotonic())

    def complete(self, timeout: float | None = None) -> None:
        """Return when nothing is outstanding. What became of each message is in its future, and only there.

        Raises:
            RequestTimeout: Some still are after ``timeout`` seconds (None waits as long as ``ack_timeout`` lets it).
        """
        check_timeout(timeout)
        link = self.link
        with link.lock:
            if not self.window.outstanding:
                return
            link.flush()
            done = Waiter()
            self._waiting_for_all.append(done)
        try:
            self.wait(done, self._waiting_for_all, None if timeout is None else time.monotonic() + timeout)
        except TimeoutError:
            raise RequestTimeout(f"{self.window.outstanding} acknowledgements", timeout or 0) from None

    # ---- waiting: for the futures, too -------------------------------------------------------------------------

    def wait(
        self,
        waiter: Waiter,
        waiting: list[Any],
        deadline: float | None,
        is_settled: Callable[[], bool] | None = None,
    ) -> None:
        """Until the waiter is told, or it ``is_settled``, or ``TimeoutError``.

        The waiter is in ``waiting``, and is not when this has ended.
        """
        try:
            self.link.check_may_wait("an acknowledgement")
            self._wait_until(waiter, math.inf if deadline is None else deadline, is_settled)
        finally:
            with self.link.lock:
                if waiter in waiting:
                    waiting.remove(waiter)

    def _wait_until(self, waiter: Waiter, deadline: float, is_settled: Callable[[], bool] | None) -> None:
        while True:
            self.look()
            try:
                # Not link.wait_for, which sleeps on the socket: it does not notice an acknowledgement that another
                # thread has read and hands out only now.
                now, due_at = time.monotonic(), self._runner.due_at
                waiter.wait(min(deadline, math.inf if due_at is None else due_at, now + LONGEST_SLEEP_S) - now)
                return
            except TimeoutError:
                if is_settled is not None and is_settled():
                    return
                if time.monotonic() >= deadline:
                    raise

    def look(self) -> None:
        """Give up what got no acknowledgement in time, if there may be any."""
        if self._connection.is_closed:
            # Also in a forked process, whose copy of the connection is closed, and where no thread tells of it.
            self._runner.on_time(time.monotonic())
        else:
            self._runner.look()

    # ---- what the runner calls ---------------------------------------------------------------------------------

    def _on_step(self) -> None:
        """After each call into the window, with the lock."""
        # Only those for whom it has changed: with a window of thousands, acknowledgements come far more often.
        if self._waiting_for_room and not self.window.is_full:
            _wake_all(self._waiting_for_room)
        if self._waiting_for_all and not self.window.outstanding:
            _wake_all(self._waiting_for_all)
        if self._connection.is_closed:
            self._runner.detach()

    def _call_due(self) -> None:
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


def _wake_all(waiting: list[Waiter]) -> None:
    for waiter in waiting:
        waiter.set_result(None)
    waiting.clear()
