"""Windowed publishing from threads. Decisions are made in :mod:`jetspark.publish.window`; this adds waiting.

The link's lock guards the window. Nobody watches the clock for messages that nobody waits for: a message that got no
acknowledgement in time is given up when a thread next waits here or asks whether a future is done. A callback is
somebody who waits without a thread, so while there are any, a timer looks at the clock for them. Callbacks are called
without the lock: what they do is not ours, and may wait for a thread that wants it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from jetspark.blocking.transport import WRITE_AT_BYTES
from jetspark.blocking.waiter import LONGEST_SLEEP_S, Waiter
from jetspark.core.events import ConnectionEvent
from jetspark.core.headers import HeadersLike
from jetspark.core.numbers import check_timeout
from jetspark.core.subscription import SubscriptionState
from jetspark.errors import BufferFull, ConnectionLost, RequestTimeout
from jetspark.jetstream.info import PubAck
from jetspark.publish.window import ACK_TIMEOUT_S, MAX_OUTSTANDING, WhenFull, Window

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
            self._publisher._give_up_late_ones()
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
            self._publisher._wait_for_ack(self, timeout)
        self._is_seen = True
        return self._error

    def add_done_callback(self, callback: Callback) -> None:
        """Have ``callback(future)`` called, exactly once, when the future is done; now, if it is.

        Callbacks are called in the order they were added, usually on the thread that reads from the connection, which
        must not be kept: pass on what is to be done, and neither publish nor wait there. What a callback raises is
        logged, at ERROR to ``jetspark.blocking``.
        """
        if not self._publisher._call_when_done(self, callback):
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
                self._publisher._due.append((each, self))
            del followers[0]
        self._followers = None

    def __del__(self) -> None:
        try:
            if self._error is not None and not self._is_seen and (count := self._publisher._window.overlooked()):
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
        self._client, self._machine, self._link = client, client._machine, client._link
        self._window = Window(
            client._machine, self, max_outstanding=max_outstanding, ack_timeout=ack_timeout, when_full=when_full
        )
        self._waiting_for_room: list[Waiter] = []
        self._waiting_for_all: list[Waiter] = []
        self._due: list[tuple[Callback, AckFuture]] = []
        self._callbacks = 0
        """How many are to be called some time, those due included."""
        self._timer: threading.Timer | None = None
        self._is_listening = False
        self._next_look = 0.0

    @property
    def outstanding(self) -> int:
        """Messages accepted whose acknowledgement has not come."""
        return self._window.outstanding

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
        machine, link = self._machine, self._link
        future = AckFuture(self)
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                with link.lock:
                    if machine.out_bytes >= WRITE_AT_BYTES:
                        link.make_room(deadline)
                    if self._accept(future, subject, data, headers, deadline):
                        link.flush_soon()
                        return future
                self._give_up_late_ones()
                with link.lock:
                    if not self._window.is_full:
                        continue
                    self._window.check_may_wait()
                    link.flush()
                    room = Waiter()
                    self._waiting_for_room.append(room)
                self._wait(room, self._waiting_for_room, deadline)
        except TimeoutError:
            raise RequestTimeout(f"publish to {subject!r}", timeout or 0, was_sent=False) from None

    def _accept(
        self, future: AckFuture, subject: str, data: bytes, headers: HeadersLike | None, deadline: float | None
    ) -> bool:
        if not self._is_listening:
            self._client._listeners.append(self._on_event)
            self._is_listening = True
        try:
            return self._window.publish(future, subject, data, headers, time.monotonic())
        except BufferFull:
            is_accepted: bool = self._client._when_there_is_room(
                partial(self._attempt, future, subject, data, headers), deadline
            )
            return is_accepted

    def _attempt(self, future: AckFuture, subject: str, data: bytes, headers: HeadersLike | None) -> bool:
        return self._window.publish(future, subject, data, headers, time.monotonic())

    def complete(self, timeout: float | None = None) -> None:
        """Return when nothing is outstanding. What became of each message is in its future, and only there.

        Raises:
            RequestTimeout: Some still are after ``timeout`` seconds (None waits as long as ``ack_timeout`` lets it).
        """
        check_timeout(timeout)
        link = self._link
        with link.lock:
            if not self._window.outstanding:
                return
            link.flush()
            done = Waiter()
            self._waiting_for_all.append(done)
        try:
            self._wait(done, self._waiting_for_all, None if timeout is None else time.monotonic() + timeout)
        except TimeoutError:
            raise RequestTimeout(f"{self._window.outstanding} acknowledgements", timeout or 0) from None

    # ---- waiting -----------------------------------------------------------------------------------------------

    def _wait_for_ack(self, future: AckFuture, timeout: float | None) -> None:
        check_timeout(timeout)
        with self._link.lock:
            if future._ack is not None or future._error is not None:
                return
            self._link.flush()
            arrived = Waiter()
            if future._followers is None:
                future._followers = []
            future._followers.append(arrived)
            followers = future._followers
        try:
            self._wait(arrived, followers, None if timeout is None else time.monotonic() + timeout, future)
        except TimeoutError:
            raise RequestTimeout("acknowledgement", timeout or 0) from None

    def _wait(
        self, waiter: Waiter, waiting: list[Any], deadline: float | None, future: AckFuture | None = None
    ) -> None:
        """Until the waiter is told, or ``TimeoutError``; it is in ``waiting``, and is not when this has ended."""
        try:
            self._link.check_may_wait("an acknowledgement")
            self._wait_until(waiter, math.inf if deadline is None else deadline, future)
        finally:
            with self._link.lock:
                if waiter in waiting:
                    waiting.remove(waiter)

    def _wait_until(self, waiter: Waiter, deadline: float, future: AckFuture | None) -> None:
        while True:
            self._give_up_late_ones()
            try:
                # Not link.wait_for, which sleeps on the socket: it does not notice an acknowledgement that another
                # thread has read and hands out only now.
                now = time.monotonic()
                waiter.wait(min(deadline, self._next_look, now + LONGEST_SLEEP_S) - now)
                return
            except TimeoutError:
                if future is not None and self._is_settled(future):
                    return
                if time.monotonic() >= deadline:
                    raise

    def _is_settled(self, future: AckFuture) -> bool:
        """Whether nothing more will come for it: the main thread may have been interrupted with it in hand."""
        with self._link.lock:
            if future._ack is None and future._error is None and not self._window.waits_for(future):
                future.set_exception(ConnectionLost("a thread was interrupted while it read the acknowledgement", 1))
            return future._ack is not None or future._error is not None

    def _give_up_late_ones(self) -> None:
        now = time.monotonic()
        if now < self._next_look and not self._machine.is_closed:
            return
        with self._link.lock, self._link.doubt:
            self._window.on_time(now)
            # Without a session or a message no deadline can be nearer than that of one that is sent right now.
            deadline = self._window.next_deadline()
            self._next_look = now + self._window.ack_timeout_s if deadline is None else deadline
            self._wake_waiters()
        if self._due:
            self._call_due()

    # ---- callbacks ---------------------------------------------------------------------------------------------

    def _call_when_done(self, future: AckFuture, callback: Callback) -> bool:
        """False when it is done already."""
        self._give_up_late_ones()
        with self._link.lock:
            if future._ack is not None or future._error is not None:
                return False
            self._link.flush()
            if future._followers is None:
                future._followers = []
            future._followers.append(callback)
            self._callbacks += 1
            if self._timer is None:
                self._set_timer()
        return True

    def _call_due(self) -> None:
        """Without the lock."""
        with self._link.lock:
            due, self._due = self._due, []
            self._callbacks -= len(due)
        for callback, future in due:
            _call(callback, future)

    def _set_timer(self) -> None:
        # It is not cancelled when nothing is left to wait for, but comes to its end: threads cost more than waiting.
        self._timer = threading.Timer(max(0.0, self._next_look - time.monotonic()), self._on_timer)
        self._timer.name, self._timer.daemon = "jetspark-acks", True
        self._timer.start()

    def _on_timer(self) -> None:
        self._give_up_late_ones()
        with self._link.lock:
            self._timer = None
            if self._callbacks and not self._machine.is_closed:
                self._set_timer()

    # ---- what others tell us -----------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Acknowledgements have arrived: all of a chunk at once."""
        with self._link.lock:
            self._window.on_acks()
            self._wake_waiters()
        if self._due:
            self._call_due()

    def _on_event(self, event: ConnectionEvent) -> None:
        with self._link.lock:
            self._window.on_event(event, time.monotonic())
            self._wake_waiters()
            if self._timer is not None and self._machine.is_closed:
                self._timer.cancel()
        if self._due:
            self._call_due()

    def _wake_waiters(self) -> None:
        if self._waiting_for_room and not self._window.is_full:
            _wake_all(self._waiting_for_room)
        if self._waiting_for_all and not self._window.outstanding:
            _wake_all(self._waiting_for_all)

    # ---- what draining a connection asks of every reader -------------------------------------------------------

    @property
    def _state(self) -> SubscriptionState:
        assert self._window.inbox is not None
        return self._window.inbox

    @property
    def pending_messages(self) -> int:
        return 0

    def _read_up(self, deadline: float) -> bool:
        """Acknowledgements are read as they come."""
        return True


def _call(callback: Callback, future: AckFuture) -> None:
    try:
        callback(future)
    except Exception:
        _logger.exception("a callback of a publish failed: %r", callback)


def _wake_all(waiting: list[Waiter]) -> None:
    for waiter in waiting:
        waiter.set_result(None)
    waiting.clear()
