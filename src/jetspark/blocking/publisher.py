# Generated from aio/publisher.py by tools/unasync.py; edit that file.
"""Windowed publishing from threads. Decisions are made in :mod:`jetspark.publish.window`; this adds waiting."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from jetspark.blocking.ack_future import AckFuture, AckFutures
from jetspark.blocking.runner import MachineRunner
from jetspark.blocking.transport_calls import when_there_is_room
from jetspark.blocking.waiter import Changed
from jetspark.core.headers import HeadersLike
from jetspark.core.numbers import check_timeout
from jetspark.core.transport import WRITE_AT_BYTES
from jetspark.errors import BufferFull, RequestTimeout
from jetspark.publish.window import DEFAULT_WINDOW, PublishWindow, WindowBase, WindowOptions

if TYPE_CHECKING:
    from jetspark.blocking.client import Client

__all__ = ["AckFuture", "WindowedPublisher"]


class WindowedPublisher(WindowBase):
    """Publishes to JetStream without waiting for each acknowledgement.

    Order is kept. At most ``max_outstanding`` messages wait for their acknowledgement at a time; then ``publish``
    waits for room, or raises :class:`~jetspark.WindowFull` with ``when_full="raise"``. Nothing is ever sent twice.
    Every future is resolved exactly once: with the :class:`~jetspark.PubAck`, or with

    * :class:`~jetspark.ServerError`, :class:`~jetspark.JetStreamUnavailable` (no stream stores the subject, or it has
      no leader), :class:`~jetspark.PermissionDenied`: nothing was stored;
    * :class:`~jetspark.ConnectionLost`: the session ended after the message was sent. Unsent messages are sent after
      the reconnect, and their futures stay pending;
    * :class:`~jetspark.RequestTimeout`: no answer within ``ack_timeout`` seconds of a session;
    * :class:`~jetspark.ConnectionClosed`, or the error that ended the connection.

    After the last three it is unknown whether the message was stored: publish it again with the same ``msg_id``.
    """

    _room: Changed
    _all_done: Changed

    def __init__(
        self,
        client: Client,
        options: WindowOptions = DEFAULT_WINDOW,
    ) -> None:
        transport = client._transport
        self._transport, self._connection, self._now = transport, transport.connection, transport.now
        self._runner: MachineRunner[PublishWindow] = MachineRunner(transport, self._on_step, self._call_back)
        self._window = self._runner.run(PublishWindow(transport.connection, self._runner, **asdict(options)))
        self._futures = AckFutures(transport, self._runner)
        self._room, self._all_done = Changed(transport.lock), Changed(transport.lock)

    def publish(
        self, subject: str, data: bytes = b"", headers: HeadersLike | None = None, timeout: float | None = None
    ) -> AckFuture:
        """Send a message and return the future of its acknowledgement.

        When this raises, the message is not sent. It waits for room, at most ``timeout`` seconds; None
        waits as long as the connection lasts.

        Raises:
            RequestTimeout: There was no room within ``timeout``.
            InvalidSubject, InvalidHeader, PayloadTooLarge: Before anything is sent.
            WindowFull: ``when_full="raise"``, and ``max_outstanding`` messages their acknowledgement.
            BufferFull: The send buffer is full and the connection has ``when_full="raise"``.
            ConnectionClosed: After ``close`` or ``drain``.
        """
        transport, runner = self._transport, self._runner
        deadline = None if timeout is None else transport.deadline(check_timeout(timeout))
        future = self._futures.new()
        with transport.lock:
            if (
                runner.due_at is None
            ):  # not for each message: the alarm is set for the oldest message's deadline or earlier
                runner.attach()
                runner.wake_at(self._now() + self._window.ack_timeout_s)
            try:
                if self._connection.out_bytes >= WRITE_AT_BYTES:
                    transport.write_and_wait(deadline)
                try:
                    is_accepted = self._window.publish(future, subject, data, headers, self._now())
                except BufferFull:
                    is_accepted = False
                if not is_accepted:
                    self._publish_later(future, subject, data, headers, deadline)
            except TimeoutError:
                raise RequestTimeout(f"publish to {subject!r}", timeout or 0, was_sent=False) from None
            if not transport.flush_is_scheduled:
                transport.flush_soon()
            return future

    def _publish_later(
        self, future: AckFuture, subject: str, data: bytes, headers: HeadersLike | None, deadline: float | None
    ) -> None:
        """Wait for room in the window and in the connection's buffer, then publish."""
        attempt = partial(self._attempt, future, subject, data, headers)
        while not when_there_is_room(self._transport, attempt, deadline):
            self._window.check_may_wait()
            if deadline is not None and self._now() >= deadline:
                raise TimeoutError
            self._runner.wait(deadline, self._room)

    def complete(self, timeout: float | None = None) -> None:
        """Return when no acknowledgement is outstanding. The outcome of each message is in its future only.

        Raises:
            RequestTimeout: Acknowledgements are outstanding after ``timeout`` seconds (None waits until all have come
                or passed their ``ack_timeout``).
        """
        check_timeout(timeout)
        deadline = None if timeout is None else self._transport.deadline(timeout)
        with self._transport.lock:
            while self._window.outstanding:
                if deadline is not None and self._now() >= deadline:
                    raise RequestTimeout(f"{self._window.outstanding} acknowledgements", timeout or 0)
                self._runner.wait(deadline, self._all_done)

    def _call_back(self) -> None:
        self._futures.call_back()
