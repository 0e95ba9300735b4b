"""Where pulled messages arrive, with asyncio. What to ask for and when is decided in :mod:`jetspark.jetstream.pull`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial

from jetspark.aio.arrivals import Arrivals
from jetspark.aio.context import DriverContext
from jetspark.aio.link_calls import drain, new_inbox, unsubscribe, when_there_is_room
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.aio.transport import Link
from jetspark.core.subscription import SubscriptionState
from jetspark.errors import BufferFull, ConnectionClosed, JetSparkError
from jetspark.jetstream.acks import NAK
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.pull import LEAVING_S, QUIET_S, Ask, Fetch, Flow, Puller, Wait

__all__ = ["Source"]

_logger = logging.getLogger("jetspark.aio")


class Source:
    """One puller with its subscription. With threads, the link's lock guards both."""

    def __init__(
        self,
        context: DriverContext,
        info: ConsumerInfo,
        make_puller: Callable[[str, str], Puller[JetStreamMessage]] = Puller,
    ) -> None:
        link = self._link = context.link
        self._connection, self._now = link.connection, link.now
        self._arrivals = Arrivals(link)
        self._has_acks = info.config.ack_policy != "none"
        self._timeout_s = context.timeout_s
        self._is_closed = False
        subject = f"{context.api.prefix}.CONSUMER.MSG.NEXT.{info.stream_name}.{info.name}"
        # In threads: with link.lock:
        _sweep(link)
        inbox = new_inbox(link)
        self.puller = make_puller(inbox, subject)
        self.puller.idle_s = link.idle_s
        reader = _SourceReader(link, self)
        # Bounded by what is asked for; a bound that drops would lose messages until their ack_wait is over.
        self.state = reader.state = link.connection.subscribe(
            f"{inbox}.*",
            is_unbounded=True,
            reader=reader,
            message_class=JetStreamMessage,
            answers_to=subject,
            follows_sessions=True,
        )

    @property
    def session(self) -> int | None:
        connection = self._connection
        return connection.sessions if connection.is_connected else None

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
        publish = self._connection.publish
        try:
            try:
                publish(self.puller.subject, ask.body, ask.reply)
            except BufferFull:
                attempt = partial(publish, self.puller.subject, ask.body, ask.reply)
                await when_there_is_room(self._link, attempt, deadline)
        except TimeoutError:
            self.puller.take_back(ask)
        except BaseException:
            self.puller.take_back(ask)
            raise

    def on_arrival(self) -> None:
        """Have the puller take what has arrived."""
        # In threads: with self._link.lock, self._link.doubt:
        if self.puller.on_replies(self.state, self._now()):
            self._arrivals.wake()

    async def close(self) -> None:
        """Unsubscribe, and say nak to what nobody took."""
        with self._link.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._arrivals.wake()
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

    def _leave_at_once(self) -> None:
        """Cancelled while leaving: wait for nothing. What is still on its way comes again after its ack_wait."""
        if self._connection.is_closed:
            return
        unsubscribe(self._link, self.state)
        # In threads: with self._link.lock:
        replies = self.puller.release() if self._has_acks else []
        try:
            for reply in replies:
                self._connection.publish_raw(reply, NAK)
        except BufferFull:
            pass  # then these come again after their ack_wait, too
        self._link.flush_soon()

    def leave(self) -> None:
        """Unsubscribe, with nothing to give back: what is on its way is not wanted."""
        self._is_closed = True
        if not self._connection.is_closed:
            unsubscribe(self._link, self.state)

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


class _SourceReader:
    """The reader of a source's subscription. The connection keeps it, and it must not keep the source: a source that
    nobody uses any more has to go, and its subscription with it."""

    state: SubscriptionState | None = None

    def __init__(self, link: Link, source: Source) -> None:
        self._link = link
        self._source = weakref.ref(source)

    @property
    def is_abandoned(self) -> bool:
        return self._source() is None

    def wake(self) -> None:
        source = self._source()
        if source is not None:
            source.on_arrival()
        elif self.state is not None and not self.state.is_finished:
            unsubscribe(self._link, self.state)

    @property
    def pending_messages(self) -> int:
        source = self._source()
        return len(source.puller.buffer) if source is not None else 0

    async def read_up(self, deadline: float) -> bool:
        """A drain does not wait for readers here: what they leave unread is delivered again."""
        return True


def _sweep(link: Link) -> None:
    """End the subscriptions of sources that are gone; a garbage collector tells nobody at a time that would suit."""
    for state in link.connection.subscriptions:
        if isinstance(state.reader, _SourceReader) and state.reader.is_abandoned:
            link.connection.unsubscribe(state)
