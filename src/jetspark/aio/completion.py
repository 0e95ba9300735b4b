"""Work that a cancellation must not stop half-way, with asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["is_interrupt", "run_to_completion"]

T = TypeVar("T")

# Strong references: the event loop keeps weak ones only.
_tasks: set[asyncio.Future[Any]] = set()


async def run_to_completion(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` to its end even if the caller is cancelled; a second cancellation stops waiting for it."""
    task = asyncio.ensure_future(work())
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # retrieved, because the caller receives the cancellation instead
        raise


def is_interrupt(error: BaseException) -> bool:
    """True if the error stopped work inside :func:`run_to_completion`; never so with asyncio."""
    return False
