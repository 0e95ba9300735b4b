"""Reading a subscription with asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Unpack, cast

from jetspark.aio.message import Message
from jetspark.aio.transport import Link
from jetspark.aio.waits import Waits
from jetspark.core.arguments import function
from jetspark.core.client_base import SubscriptionBase
from jetspark.core.numbers import check_timeout, timeout_of
from jetspark.core.subscription import SubscriptionKind, SubscriptionState
from jetspark.errors import ConnectionClosed, RequestTimeout

__all__ = ["Callback", "Subscription", "SubscriptionReader", "subscribe"]

Callback = Callable[[Message], Awaitable[Any] | None]


def subscribe(
    link: Link, subject: str, queue: str = "", callback: Callback | None = None, **kind: Unpack[SubscriptionKind]
) -> Subscription:
    """Start receiving. ``kind`` is what :meth:`Connection.subscribe` takes beside the subject and the queue."""
    if callback is not None:
        function("callback", callback, "a function that takes a message")
    link.check_loop()
    reader = SubscriptionReader()
    reader.state = link.connection.subscribe(subject, queue, reader=reader, **kind)
    link.flush_soon()
    return Subscription(link, reader, callback)


class SubscriptionReader:
    """What the connection knows of a subscription: who waits for its messages, and who calls back with them."""

    state: SubscriptionState

    def __init__(self) -> None:
        self.waiters = Waits()
        self.task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        self.waiters.wake()

    @property
    def pending_messages(self) -> int:
        return len(self.state.pending)

    async def read_up(self, deadline: float) -> bool:
        if self.task is asyncio.current_task():
            return True  # a callback that drains: it goes on with what is here when it comes back
        try:
            async with asyncio.timeout_at(deadline):
                if self.task is not None:
                    await asyncio.shield(self.task)
                while self.state.pending:
                    await self.waiters.wait()
        except TimeoutError:
            return False
        return True


class Subscription(SubscriptionBase):
    """Messages on a subject: iterate with ``async for``, or take one with :meth:`next`.

    At most once: a message is delivered if we are connected and subscribed when it is published. What a reader is
    too slow for is dropped beyond the subscription's bounds, counted in ``dropped`` and reported as
    :class:`~jetspark.SlowConsumer`. Iteration ends after ``unsubscribe``, ``drain`` or ``close``; it raises
    :class:`~jetspark.PermissionDenied` when the server did not allow the subscription.
    """

    def __init__(self, link: Link, reader: SubscriptionReader, callback: Callback | None) -> None:
        self._link, self._reader = link, reader
        self._state, self._waiters = reader.state, reader.waiters
        if callback is not None:
            reader.task = link.loop.create_task(self._call_back(callback), name=f"jetspark-callback-{self.subject}")

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Message]:
        state = self._state
        pending = cast("deque[Message]", state.pending)
        try:
            while True:
                while pending:
                    yield pending.popleft()
                if state.is_finished:
                    if state.error is not None:
                        raise state.error
                    return
                await self._waiters.wait()
        finally:
            self._waiters.wake()  # a drain may wait for us

    async def next(self, timeout: float | None = None) -> Message:
        """The next message.

        Raises:
            RequestTimeout: None came within ``timeout`` seconds (None waits for ever).
            ConnectionClosed: The subscription is over and everything was read.
        """
        state = self._state
        check_timeout(timeout)
        deadline = None if timeout is None else self._link.deadline(timeout)
        while not state.pending:
            if state.is_finished:
                raise state.error or ConnectionClosed(f"the subscription to {state.subject!r} is over")
            try:
                async with asyncio.timeout_at(deadline):
                    await self._waiters.wait()
            except TimeoutError:
                raise RequestTimeout(f"next message on {state.subject!r}", timeout or 0) from None
        message = cast(Message, state.take())
        if state.is_finished and not state.pending:
            self._waiters.wake()  # a drain may wait for this
        return message

    async def unsubscribe(self, max_messages: int = 0) -> None:
        """End now, or when ``max_messages`` have been received in all. Messages received so far can still be read."""
        self._link.unsubscribe(self._state, max_messages)

    async def drain(self, timeout: float | None = None) -> None:
        """End without losing anything: the server stops sending, then the reader finishes what is here.

        Should the session end first, no more comes either: messages on their way are lost with it.

        Raises:
            RequestTimeout: The reader did not finish in time.
        """
        timeout = timeout_of(timeout, self._link.connection.options.drain_timeout_s)
        deadline = self._link.deadline(timeout)
        try:
            await self._link.drain(self._state, timeout)
            is_read = await self._reader.read_up(deadline)
        except RequestTimeout:
            is_read = False
        if not is_read:
            raise RequestTimeout(f"drain of {self.subject!r}, {self.pending_messages} messages unread", timeout)

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.unsubscribe()

    async def _call_back(self, callback: Callback) -> None:
        try:
            async for message in self:
                try:
                    result = callback(message)
                    if result is not None:
                        await result
                except Exception as error:
                    self._link.report(error)
        except Exception as error:
            self._link.report(error)
