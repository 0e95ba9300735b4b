"""Run the callbacks of subscriptions in asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from jetspark.aio.message import Message
from jetspark.aio.transport import Transport

__all__ = ["Callback", "CallbackRunner", "call"]

Callback = Callable[[Message], Awaitable[Any] | None]


async def call(callback: Callback, message: Message) -> None:
    result = callback(message)
    if result is not None:
        await result


class CallbackRunner:
    """Runs the callbacks of one subscription in a task of its own."""

    def __init__(self, transport: Transport, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self.task = transport.loop.create_task(work(), name=name)

    async def join(self, deadline: float) -> bool:
        """Wait for the end; True when it came before the deadline. Called by its own callback, it returns at once."""
        if self.task is asyncio.current_task():
            return True
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.shield(self.task)
        except TimeoutError:
            return False
        return True
