"""Where pulled messages arrive, with asyncio. What to ask for and when is decided in :mod:`jetspark.jetstream.pull`."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable

from jetspark.aio.context import DriverContext
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
    """One puller with its subscription."""

    def __init__(
        self,
        context: DriverContext,
        info: ConsumerInfo,
        make_puller: Callable[[str, str], Puller[JetStreamMessage]] = Puller,
    ) -> None:
        link = self._link = context.link
        self.loop, self._connection = link.loop, link.connection
        _sweep(link)
        subject = f"{context.api.prefix}.CONSUMER.MSG.NEXT.{info.stream_name}.{info.name}"
        inbox = link.new_inbox()
        self.puller = make_puller(inbox, subject)
        self.puller.idle_s = getattr(link.loop, "idle_s", 0.0)
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
        self._has_acks = info.config.ack_policy != "none"
        self._timeout_s = context.timeout_s
        self._waiters: list[asyncio.Future[bool]] = []
        self._is_closed = False

    @property
    def session(self) -> int | None:
        connection = self._connection
        return connection.sessions if connection.is_connected else None

    async def perform(self, reader: Fetch[JetStreamMessage] | Flow[JetStreamMessage]) -> Wait | int | None:
        """A step of a reader's, with the asking and waiting it wants; returns what step it was."""
        while isinstance(step := reader.step(self.loop.time(), self.session), Ask):
            await self.send(step, reader.deadline)
        # One that was closed while it asked has woken its waiters already.
        if isinstance(step, Wait) and not (self._is_closed and isinstance(reader, Flow)):
            await self.wait(step)
        return step

    async def send(self, ask: Ask, deadline: float | None = None) -> None:
        """Ask, unless there is no room for the question until the deadline."""
        connection = self._connection
        try:
            try:
                connection.publish(self.puller.subject, ask.body, ask.reply)
            except BufferFull:
                await self._link.when_there_is_room(
                    lambda: connection.publish(self.puller.subject, ask.body, ask.reply), deadline
                )
        except TimeoutError:
            self.puller.take_back(ask)
        except BaseException:
            self.puller.take_back(ask)
            raise
        # At once, with the acks gathered so far: a reader that never pauses would otherwise hold it back.
        self._link.flush()

    async def wait(self, wait: Wait) -> None:
        waiter: asyncio.Future[bool] = self.loop.create_future()
        self._waiters.append(waiter)
        timer = None if wait.until is None else self.loop.call_at(wait.until, _time_is_up, waiter)
        try:
            if not await waiter:
                self.puller.on_time(self.loop.time())
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def on_arrival(self) -> None:
        if self.puller.on_replies(self.state, self.loop.time()):
            self._wake()

    async def close(self) -> None:
        """Unsubscribe, and say nak to what nobody took."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake()
        puller, state = self.puller, self.state
        try:
            # What the server has sent off to us when it hears UNSUB is lost until ack_wait is over; so let it finish.
            give_up_at = self.loop.time() + LEAVING_S
            while puller.owed and self._connection.is_connected and self.loop.time() < give_up_at:
                before = state.received
                puller.wake_at = 1
                await self.wait(Wait(self.loop.time() + QUIET_S))
                if state.received == before:
                    break
            await self._link.drain(state, self._timeout_s)
            if state.pending:
                self.on_arrival()
            await self._give_back()
        except ConnectionClosed:
            pass  # by its owner, who knows, or for good, which was told; what nobody took comes after its ack_wait
        except JetSparkError as error:
            _logger.warning("leaving %s: %s", puller.subject, error)
        except BaseException:
            self._leave_at_once()
            raise

    def _leave_at_once(self) -> None:
        """Cancelled while leaving: wait for nothing. What is still on its way comes again after its ack_wait."""
        if self._connection.is_closed:
            return
        self._link.unsubscribe(self.state)
        replies = self.puller.release() if self._has_acks else []
        try:
            for reply in replies:
                self._connection.publish_raw(reply, NAK)
        except BufferFull:
            pass  # then these come again after their ack_wait, too

    def leave(self) -> None:
        """Unsubscribe, with nothing to give back: what is on its way is not wanted."""
        self._is_closed = True
        if not self._connection.is_closed:
            self._link.unsubscribe(self.state)

    async def _give_back(self) -> None:
        connection = self._connection
        replies = self.puller.release()
        if not self._has_acks or connection.is_closed:
            return
        for reply in replies:
            try:
                connection.publish_raw(reply, NAK)
            except BufferFull:
                await self._link.when_there_is_room(lambda reply=reply: connection.publish_raw(reply, NAK))  # type: ignore[misc]
        self._link.flush()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(True)


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
            self._link.unsubscribe(self.state)

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
            link.unsubscribe(state)


def _time_is_up(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
