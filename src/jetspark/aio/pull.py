"""Pulling with asyncio. What to ask for and when is decided in :mod:`jetspark.jetstream.pull`; this adds waiting."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Callable

from jetspark.aio.context import Context
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.aio.transport import Link
from jetspark.core.subscription import SubscriptionState
from jetspark.errors import BufferFull, ConnectionClosed, JetSparkError
from jetspark.jetstream.acks import NAK
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.pull import LEAVING_S, QUIET_S, Ask, Fetch, Flow, Priority, Puller, PullLimits, Wait

__all__ = ["Messages", "PullConsumer"]

_logger = logging.getLogger("jetspark.aio")


class PullConsumer:
    """The part of a consumer that receives: :meth:`fetch`, :meth:`next`, :meth:`messages`.

    At least once: a message that is not acked within the consumer's ``ack_wait_s`` is delivered again, here or to
    another client of the same consumer; ``metadata.delivered`` tells.
    """

    _context: Context
    cached_info: ConsumerInfo
    _source: Source | None = None

    async def fetch(
        self,
        n: int = 1,
        *,
        timeout: float = 5.0,
        max_bytes: int | None = None,
        no_wait: bool = False,
        group: str | None = None,
        min_pending: int | None = None,
        min_ack_pending: int | None = None,
        priority: int | None = None,
    ) -> list[JetStreamMessage]:
        """Up to ``n`` messages: as soon as they are there, or what came within ``timeout``, which may be nothing.

        Several fetches may run at once. Messages that arrive too late for one, or whose fetch was cancelled, are kept
        for the next; :meth:`close` gives them back to the server.

        Args:
            max_bytes: End before the messages are larger than this together, as the server counts (subject, reply
                subject and headers included).
            no_wait: Only what is there already.
            group: Of a consumer with priority groups; see there for ``min_pending``, ``min_ack_pending``, ``priority``.

        Raises:
            ConsumerNotFound: The consumer was deleted.
            JetStreamUnavailable: Nobody answered for the consumer all the time.
            ConfigError: The consumer does not allow so much in one request, or ``max_bytes`` is too small for any.
        """
        preferences = Priority(group=group, min_pending=min_pending, min_ack_pending=min_ack_pending, priority=priority)
        if self._source is None or self._source.state.is_finished:
            self._source = Source(self._context, self.cached_info)
        source = self._source
        fetch = Fetch(
            source.puller,
            n,
            now=source.loop.time(),
            timeout_s=timeout,
            max_bytes=max_bytes,
            no_wait=no_wait,
            priority=preferences if group is not None else None,
        )
        is_complete = False
        try:
            while (step := fetch.step(source.loop.time(), source.session)) is not None:
                if isinstance(step, Ask):
                    await source.send(step, fetch.deadline)
                else:
                    await source.wait(step)
            is_complete = True
        finally:
            fetch.leave(is_cancelled=not is_complete)
        return fetch.messages

    async def next(self, timeout: float = 5.0) -> JetStreamMessage | None:
        """The next message, or None when none came within ``timeout``. Errors are those of :meth:`fetch`."""
        messages = await self.fetch(1, timeout=timeout)
        return messages[0] if messages else None

    def messages(
        self,
        *,
        max_messages: int = 4096,
        max_bytes: int | None = None,
        expires: float = 30.0,
        heartbeat: float | None = None,
        group: str | None = None,
        min_pending: int | None = None,
        min_ack_pending: int | None = None,
        priority: int | None = None,
    ) -> Messages:
        """Every message, without end: ``async for message in consumer.messages()``.

        Asks ahead, so that the next messages are usually here already, and goes on through reconnects, restarts and
        leader changes. Leaving the loop gives back what was received ahead; to be sure that this is done before the
        program goes on, use ``async with consumer.messages() as messages``.

        Args:
            max_messages: How many may be received ahead of the reader, at most. It begins with 500. A reader that keeps
                up is given more at a time, a slow one as many as it takes in a second.
            max_bytes: How many bytes of them.
            expires: How long a request waits at the server before it is renewed.
            heartbeat: How often an idle server says that it is there; at most half of ``expires``.

        Raises:
            ConsumerNotFound: While iterating: the consumer was deleted.
            JetStreamUnavailable: While iterating: nobody has answered for the consumer for 20 seconds.
            ConnectionClosed: While iterating: the connection was closed.
        """
        limits = PullLimits(max_messages=max_messages, max_bytes=max_bytes, expires_s=expires, heartbeat_s=heartbeat)
        preferences = Priority(group=group, min_pending=min_pending, min_ack_pending=min_ack_pending, priority=priority)
        return Messages(self._context, self.cached_info, limits, preferences if group is not None else None)

    async def close(self) -> None:
        """Give back what fetches left behind. The consumer itself stays, and this object may be used again.

        A server that does not answer within the context's ``timeout`` is not waited for; what was left behind is
        delivered again when its ``ack_wait`` is over.
        """
        source, self._source = self._source, None
        if source is not None:
            await source.close()


class Messages:
    """A consumer's messages without end: an asynchronous iterator, and a context manager that ends it cleanly."""

    def __init__(self, context: Context, info: ConsumerInfo, limits: PullLimits, priority: Priority | None) -> None:
        self._context, self._info = context, info
        self._limits, self._priority = limits, priority
        self._source: Source | None = None
        self._flow: Flow[JetStreamMessage]
        self._is_managed = False
        self._is_closed = False

    def __aiter__(self) -> AsyncIterator[JetStreamMessage]:
        return self._iterate()

    async def __aenter__(self) -> Messages:
        self._is_managed = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop, and give back what was received and not handed out."""
        self._is_closed = True
        if self._source is not None:
            await self._source.close()

    async def _iterate(self) -> AsyncIterator[JetStreamMessage]:
        if self._is_closed:
            return
        if self._source is None:
            self._source = Source(self._context, self._info)
            self._flow = Flow(self._source.puller, self._limits, self._priority)
        source, flow = self._source, self._flow
        take = source.puller.buffer.popleft
        try:
            while not self._is_closed:
                step = flow.step(source.loop.time(), source.session)
                if isinstance(step, int):
                    for _ in range(step):
                        try:
                            message = take()
                        except IndexError:  # closed meanwhile
                            break
                        yield message
                elif isinstance(step, Ask):
                    await source.send(step)
                elif step is not None:
                    await source.wait(step)
        finally:
            if not self._is_managed:  # in `async with`, a loop that was left may be taken up again
                await self.close()


class Source:
    """One puller with its subscription."""

    def __init__(
        self,
        context: Context,
        info: ConsumerInfo,
        make_puller: Callable[[str, str], Puller[JetStreamMessage]] = Puller,
    ) -> None:
        link = self._link = context.link
        self.loop, self._connection = link.loop, link.connection
        _sweep(link)
        subject = f"{context.api.prefix}.CONSUMER.MSG.NEXT.{info.stream_name}.{info.name}"
        inbox = link.new_inbox()
        self.puller = make_puller(inbox, subject)
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
        if isinstance(step, Wait):
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
