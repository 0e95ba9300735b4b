"""Reading a subscription with asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from jetspark.aio.message import Message
from jetspark.aio.waits import Waits
from jetspark.core.client_base import SubscriptionBase
from jetspark.core.numbers import check_timeout, timeout_of
from jetspark.core.subscription import SubscriptionState
from jetspark.errors import ConnectionClosed, RequestTimeout

if TYPE_CHECKING:
    from jetspark.aio.client import Client

__all__ = ["Callback", "Subscription"]

Callback = Callable[[Message], Awaitable[Any] | None]


class Subscription(SubscriptionBase):
    """Messages on a subject: iterate with ``async for``, or take one with :meth:`next`.

    At most once: a message is delivered if we are connected and subscribed when it is published. What a reader is
    too slow for is dropped beyond the subscription's bounds, counted in ``dropped`` and reported as
    :class:`~jetspark.SlowConsumer`. Iteration ends after ``unsubscribe``, ``drain`` or ``close``; it raises
    :class:`~jetspark.PermissionDenied` when the server did not allow the subscription.
    """

    def __init__(self, client: Client, callback: Callback | None) -> None:
        self._client = client
        self._callback = callback
        self._waiters = Waits()
        self._reader: asyncio.Task[None] | None = None

    def _attach(self, state: SubscriptionState) -> None:
        self._state = state
        if self._callback is not None:
            self._reader = asyncio.get_running_loop().create_task(
                self._call_back(self._callback), name=f"jetspark-callback-{state.subject}"
            )

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
            self._wake()  # a drain may wait for us

    async def next(self, timeout: float | None = None) -> Message:
        """The next message.

        Raises:
            RequestTimeout: None came within ``timeout`` seconds (None waits for ever).
            ConnectionClosed: The subscription is over and everything was read.
        """
        state = self._state
        check_timeout(timeout)
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
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
            self._wake()  # a drain may wait for this
        return message

    async def unsubscribe(self, max_messages: int = 0) -> None:
        """End now, or when ``max_messages`` have been received in all. What was received can still be read."""
        self._client._unsubscribe(self._state, max_messages)

    async def drain(self, timeout: float | None = None) -> None:
        """End without losing anything: the server stops sending, then the reader finishes what is here.

        Should the session end first, no more comes either: what was on its way is lost with it.

        Raises:
            RequestTimeout: The reader did not finish in time.
        """
        timeout = timeout_of(timeout, self._client.options.drain_timeout_s)
        try:
            async with asyncio.timeout(timeout):
                await self._client._drain_subscription(self._state, timeout)
                await self._read_up()
        except TimeoutError:
            raise RequestTimeout(
                f"drain of {self.subject!r}, {self.pending_messages} messages unread", timeout
            ) from None

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.unsubscribe()

    async def _read_up(self) -> None:
        if self._reader is asyncio.current_task():
            return  # a callback that drains: it goes on with what is here when it comes back
        if self._reader is not None:
            await asyncio.shield(self._reader)
        while self._state.pending:
            await self._waiters.wait()

    def _wake(self) -> None:
        self._waiters.wake()

    async def _call_back(self, callback: Callback) -> None:
        try:
            async for message in self:
                try:
                    result = callback(message)
                    if result is not None:
                        await result
                except Exception as error:
                    self._client._report(error)
        except Exception as error:
            self._client._report(error)
