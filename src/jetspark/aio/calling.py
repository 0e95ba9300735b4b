"""Calling a program back with messages, in a task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from jetspark.aio.message import Message
from jetspark.aio.transport import Link

__all__ = ["Callback", "Calling", "call"]

Callback = Callable[[Message], Awaitable[Any] | None]


async def call(callback: Callback, message: Message) -> None:
    result = callback(message)
    if result is not None:
        await result


class Calling:
    """Work that goes on beside the program's."""

    def __init__(self, link: Link, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self.task = link.loop.create_task(work(), name=name)

    async def join(self, deadline: float) -> bool:
        """Whether it has ended before the deadline. A callback does not wait for itself: it goes on when it is back."""
        if self.task is asyncio.current_task():
            return True
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.shield(self.task)
        except TimeoutError:
            return False
        return True
