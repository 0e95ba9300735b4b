"""Windowed publishing with asyncio. Decisions are made in :mod:`jetspark.publish.window`; this adds waiting."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from jetspark.aio.runner import MachineRunner
from jetspark.aio.transport import WRITE_AT_BYTES
from jetspark.aio.waits import Waits
from jetspark.core.headers import HeadersLike
from jetspark.core.numbers import check_timeout
from jetspark.errors import BufferFull, RequestTimeout
from jetspark.jetstream.info import PubAck
from jetspark.publish.window import ACK_TIMEOUT_S, MAX_OUTSTANDING, PublishWindow, WhenFull

if TYPE_CHECKING:
    from jetspark.aio.client import Client

__all__ = ["AckFuture", "WindowedPublisher"]

_logger = logging.getLogger("jetspark.aio")


class AckFuture(asyncio.Future[PubAck]):
    """An acknowledgement on its way: await it for the :class:`~jetspark.PubAck`.

    It raises the server's error, or the reason why nobody knows: see :class:`WindowedPublisher`. A failure that nobody
    has looked at when the future goes away is logged, at ERROR to ``jetspark.aio``. Cancelling it takes nothing back:
    the message is on its way.
    """

    # It has no __init__ and no __del__: with both, making and dropping one took 2.0 µs in place of 0.5.
    __slots__ = ("_window",)

    _window: PublishWindow

    def set_exception(self, exception: type | BaseException, /) -> None:
        super().set_exception(exception)
        self.__class__ = _FailedAckFuture


class _FailedAckFuture(AckFuture):
    # asyncio would log a failure that nobody has looked at too, but each one with a stack, and a lost session can bring
    # thousands.
    __slots__ = ()

    def __del__(self) -> None:
        if self._log_traceback:
            self._log_traceback = False
            if count := self._window.overlooked():
                _logger.error("%d failed publishes nobody looked at; the last: %s", count, self.exception())


class WindowedPublisher:
    """Publishes to JetStream without waiting for each acknowledgement.

    Order is kept. At most ``max_outstanding`` messages wait for their acknowledgement at a time; then ``publish``
    waits for room, or raises :class:`~jetspark.WindowFull` with ``when_full="raise"``. Nothing is ever sent twice.
    Every future is resolved exactly once: with the :class:`~jetspark.PubAck`, or with

    * :class:`~jetspark.ServerError`, :class:`~jetspark.JetStreamUnavailable` (no stream stores the subject, or it has
      no leader), :class:`~jetspark.PermissionDenied`: nothing was stored;
    * :class:`~jetspark.ConnectionLost`: the session ended after the message had left. Those that had not left are
      sent after the reconnect, and their futures go on;
    * :class:`~jetspark.RequestTimeout`: no answer within ``ack_timeout`` seconds of a session;
    * :class:`~jetspark.ConnectionClosed`, or the error that ended the connection.

    After the last three it is unknown whether the message was stored: publish it again with the same ``msg_id``.
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
        self._link, self._connection, self._loop = link, link.connection, link.loop
        self._runner: MachineRunner[PublishWindow] = MachineRunner(link, self._on_step)
        self._window = self._runner.run(
            PublishWindow(
                link.connection,
                self._runner,
                max_outstanding=max_outstanding,
                ack_timeout=ack_timeout,
                when_full=when_full,
            )
        )
        self._waiting_for_room = Waits()
        self._waiting_for_all = Waits()

    @property
    def outstanding(self) -> int:
        """Messages accepted whose acknowledgement has not come."""
        return self._window.outstanding

    async def publish(
        self, subject: str, data: bytes = b"", headers: HeadersLike | None = None, timeout: float | None = None
    ) -> AckFuture:
        """Send a message; the future tells what became of it.

        When this raises or is cancelled, the message is not sent. It waits for room, at most ``timeout`` seconds; None
        waits as long as the connection lasts.

        Raises:
            RequestTimeout: There was no room within ``timeout``.
            InvalidSubject, InvalidHeader, PayloadTooLarge: Before anything is sent.
            WindowFull: ``when_full="raise"``, and ``max_outstanding`` messages wait.
            BufferFull: The network takes no more and the connection's ``when_full="raise"``.
            ConnectionClosed: After ``close`` or ``drain``.
        """
        connection, link, runner = self._connection, self._link, self._runner
        check_timeout(timeout)
        deadline = None if timeout is None else link.deadline(timeout)
        future = AckFuture(loop=self._loop)
        future._window = self._window
        try:
            if connection.out_bytes >= WRITE_AT_BYTES:
                await link.write_and_wait(deadline)
            try:
                is_accepted = self._window.publish(future, subject, data, headers, self._loop.time())
            except BufferFull:
                is_accepted = False
            if not is_accepted:
                await self._publish_later(future, subject, data, headers, deadline)
        except TimeoutError:
            raise RequestTimeout(f"publish to {subject!r}", timeout or 0, was_sent=False) from None
        if not link.flush_is_scheduled:
            link.flush_soon()
        if runner.due_at is None:  # not for each message: the alarm stands at the oldest one's deadline, or before it
            runner.attach()
            runner.wake_at(link.now() + self._window.ack_timeout_s)
        return future

    async def complete(self, timeout: float | None = None) -> None:
        """Return when nothing is outstanding. What became of each message is in its future, and only there.

        Raises:
            RequestTimeout: Some still are after ``timeout`` seconds (None waits as long as ``ack_timeout`` lets it).
        """
        check_timeout(timeout)
        try:
            async with asyncio.timeout(timeout):
                while self._window.outstanding:
                    self._link.flush()
                    await self._waiting_for_all.wait()
        except TimeoutError:
            what = f"{self._window.outstanding} acknowledgements"
            raise RequestTimeout(what, timeout or 0) from None

    async def _publish_later(
        self, future: AckFuture, subject: str, data: bytes, headers: HeadersLike | None, deadline: float | None
    ) -> None:
        """There was no room: in the window, or in the connection's buffer."""

        def attempt() -> bool:
            return self._window.publish(future, subject, data, headers, self._loop.time())

        async with asyncio.timeout_at(deadline):
            while not await self._link.when_there_is_room(attempt):
                self._window.check_may_wait()
                await self._waiting_for_room.wait()

    def _on_step(self) -> None:
        # Only those for whom it has changed: with a window of thousands, acknowledgements come far more often.
        if self._waiting_for_room and not self._window.is_full:
            self._waiting_for_room.wake()
        if self._waiting_for_all and not self._window.outstanding:
            self._waiting_for_all.wake()
        if self._connection.is_closed:
            self._runner.detach()
