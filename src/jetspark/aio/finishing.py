"""Work that must not stop half-way, with asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["is_interrupt", "see_through"]

T = TypeVar("T")

# The loop itself would let go of them.
_tasks: set[asyncio.Future[Any]] = set()


async def see_through(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Do it to its end, even if cancelled meanwhile; a second cancellation no longer waits for that end."""
    task = asyncio.ensure_future(work())
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # the cancellation is what the caller gets to see
        raise


def is_interrupt(error: BaseException) -> bool:
    """Whether the error has stopped something half-way that :func:`see_through` was to do: here it never does."""
    return False
