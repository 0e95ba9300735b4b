"""The receiving end of a pull consumer, with asyncio. :mod:`jetspark.jetstream.pull` decides what to request when."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from jetspark.aio.context import DriverContext
from jetspark.aio.message_condition import MessageCondition
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.aio.transport import Transport
from jetspark.aio.transport_calls import drain, when_there_is_room
from jetspark.errors import BufferFull, ConnectionClosed, JetSparkError
from jetspark.jetstream.acks import NAK, mark_answered
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.pull import Ask, Fetch, Flow, Puller, Wait
from jetspark.jetstream.pull_source import LEAVING_S, QUIET_S, SourceBase, SourceReaderBase

__all__ = ["Source"]

_logger = logging.getLogger("jetspark.aio")


class SourceReader(SourceReaderBase[JetStreamMessage]):
    """The reader of a source's subscription."""

    async def read_up(self, deadline: float) -> bool:
        """Return at once: a drain need not wait, because unread messages are redelivered."""
        return True


class Source(SourceBase[JetStreamMessage]):
    """One puller with its subscription; readers wait here for its messages."""

    _transport: Transport
    _arrivals: MessageCondition

    def __init__(
        self,
        context: DriverContext,
        info: ConsumerInfo,
        make_puller: Callable[[str, str], Puller[JetStreamMessage]] = Puller,
    ) -> None:
        self._timeout_s = context.timeout_s
        super().__init__(
            context.transport,
            info,
            context.api.prefix,
            make_puller,
            arrivals=MessageCondition(context.transport),
            reader_class=SourceReader,
            message_class=JetStreamMessage,
        )

    async def perform(self, reader: Fetch[JetStreamMessage] | Flow[JetStreamMessage]) -> Wait | int | None:
        """Perform a reader's next step, with its pull requests and waiting; returns the step."""
        has_asked = False
        with self._transport.lock:
            if self.state.pending or self.state.is_finished:
                # Another thread has read messages and not delivered them yet. A wait for the network would miss its
                # wake-up.
                self.on_arrival()
            try:
                while isinstance(step := reader.step(self._now(), self.session), Ask):
                    has_asked = True
                    await self._send(step, reader.deadline)
                # A source that was closed during the request has notified its waiters already.
                if not isinstance(step, Wait) or (self._is_closed and isinstance(reader, Flow)):
                    return step
                waiting = self._arrivals.begin()
            finally:
                # Flush now, with the acks gathered so far: a reader that never pauses would delay the request.
                if has_asked:
                    self._transport.flush()
        if not await self._arrivals.wait(waiting, step.until):
            with self._transport.lock:
                self.puller.on_time(self._now())
        return step

    async def _send(self, ask: Ask, deadline: float | None) -> None:
        """Send a pull request, unless there is no room in the send buffer until the deadline."""
        publish, subject = self._connection.publish, self.puller.subject
        if ask.acknowledges is not None:
            subject = ask.acknowledges.reply
        try:
            try:
                publish(subject, ask.body, ask.reply)
            except BufferFull:
                await when_there_is_room(self._transport, partial(publish, subject, ask.body, ask.reply), deadline)
            if ask.acknowledges is not None:
                mark_answered(ask.acknowledges)
        except TimeoutError:
            self.puller.withdraw(ask)
        except BaseException:
            self.puller.withdraw(ask)
            raise

    async def close(self) -> None:
        """Unsubscribe, and nak the messages that no reader took."""
        with self._transport.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._arrivals.notify_all()
        try:
            await self._let_finish()
            await drain(self._transport, self.state, self._timeout_s)
            await self._give_back()
        except ConnectionClosed:
            pass  # the owner closed it, or the end was reported; unread messages are redelivered after ack_wait
        except JetSparkError as error:
            _logger.warning("pull %s: close failed; unread messages are redelivered: %s", self.puller.subject, error)
        except BaseException:
            self._leave_at_once()
            raise

    async def _let_finish(self) -> None:
        """Wait for the messages of outstanding pull requests: those in transit at the UNSUB would be redelivered only
        after ack_wait."""
        puller, state = self.puller, self.state
        give_up_at = self._now() + LEAVING_S
        while puller.owed and self._connection.is_connected and self._now() < give_up_at:
            before = state.received
            with self._transport.lock:
                puller.wake_at = 1
                waiting = self._arrivals.begin()
            await self._arrivals.wait(waiting, self._now() + QUIET_S)
            if state.received == before:
                break

    async def _give_back(self) -> None:
        connection = self._connection
        # In threads: with self._transport.lock:
        if self.state.pending:
            self.on_arrival()
        replies = self.puller.release()
        if not self._has_acks or connection.is_closed:
            return
        for reply in replies:
            try:
                connection.publish_raw(reply, NAK)
            except BufferFull:
                await when_there_is_room(self._transport, partial(connection.publish_raw, reply, NAK))
        self._transport.flush()
