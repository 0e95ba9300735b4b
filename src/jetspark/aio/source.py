"""Where pulled messages arrive, with asyncio. What to ask for and when is decided in :mod:`jetspark.jetstream.pull`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from jetspark.aio.arrivals import Arrivals
from jetspark.aio.context import DriverContext
from jetspark.aio.link_calls import drain, when_there_is_room
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.aio.transport import Link
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
        """A drain does not wait for readers here: what they leave unread is delivered again."""
        return True


class Source(SourceBase[JetStreamMessage]):
    """One puller with its subscription, and those who wait for its messages."""

    _link: Link
    _arrivals: Arrivals

    def __init__(
        self,
        context: DriverContext,
        info: ConsumerInfo,
        make_puller: Callable[[str, str], Puller[JetStreamMessage]] = Puller,
    ) -> None:
        self._timeout_s = context.timeout_s
        super().__init__(
            context.link,
            info,
            context.api.prefix,
            make_puller,
            arrivals=Arrivals(context.link),
            reader_class=SourceReader,
            message_class=JetStreamMessage,
        )

    async def perform(self, reader: Fetch[JetStreamMessage] | Flow[JetStreamMessage]) -> Wait | int | None:
        """A step of a reader's, with the asking and waiting it wants; returns what step it was."""
        has_asked = False
        with self._link.lock:
            if self.state.pending or self.state.is_finished:
                # Read by another thread, which has not come to passing it on. Were we to wait for the network now, its
                # waking us would go unnoticed.
                self.on_arrival()
            try:
                while isinstance(step := reader.step(self._now(), self.session), Ask):
                    has_asked = True
                    await self._send(step, reader.deadline)
                # One that was closed while it asked has woken those who wait already.
                if not isinstance(step, Wait) or (self._is_closed and isinstance(reader, Flow)):
                    return step
                waiting = self._arrivals.begin()
            finally:
                # At once, with the acks gathered so far: a reader that never pauses would hold the question back.
                if has_asked:
                    self._link.flush()
        if not await self._arrivals.wait(waiting, step.until):
            with self._link.lock:
                self.puller.on_time(self._now())
        return step

    async def _send(self, ask: Ask, deadline: float | None) -> None:
        """Ask, unless there is no room for the question until the deadline."""
        publish, subject = self._connection.publish, self.puller.subject
        if ask.acknowledges is not None:
            subject = ask.acknowledges.reply
        try:
            try:
                publish(subject, ask.body, ask.reply)
            except BufferFull:
                await when_there_is_room(self._link, partial(publish, subject, ask.body, ask.reply), deadline)
            if ask.acknowledges is not None:
                mark_answered(ask.acknowledges)
        except TimeoutError:
            self.puller.withdraw(ask)
        except BaseException:
            self.puller.withdraw(ask)
            raise

    async def close(self) -> None:
        """Unsubscribe, and say nak to what nobody took."""
        with self._link.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._arrivals.notify_all()
        try:
            await self._let_finish()
            await drain(self._link, self.state, self._timeout_s)
            await self._give_back()
        except ConnectionClosed:
            pass  # by its owner, who knows, or for good, which was told; what nobody took comes after its ack_wait
        except JetSparkError as error:
            _logger.warning("leaving %s: %s", self.puller.subject, error)
        except BaseException:
            self._leave_at_once()
            raise

    async def _let_finish(self) -> None:
        """Until the server has sent what it was asked for: what is on its way when it hears UNSUB would be lost until
        ack_wait is over."""
        puller, state = self.puller, self.state
        give_up_at = self._now() + LEAVING_S
        while puller.owed and self._connection.is_connected and self._now() < give_up_at:
            before = state.received
            with self._link.lock:
                puller.wake_at = 1
                waiting = self._arrivals.begin()
            await self._arrivals.wait(waiting, self._now() + QUIET_S)
            if state.received == before:
                break

    async def _give_back(self) -> None:
        connection = self._connection
        # In threads: with self._link.lock:
        if self.state.pending:
            self.on_arrival()
        replies = self.puller.release()
        if not self._has_acks or connection.is_closed:
            return
        for reply in replies:
            try:
                connection.publish_raw(reply, NAK)
            except BufferFull:
                await when_there_is_room(self._link, partial(connection.publish_raw, reply, NAK))
        self._link.flush()
