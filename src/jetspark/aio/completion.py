"""Generators that must run up to their first yield, and work that a cancellation must not stop half-way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["begun", "is_interrupt", "run_to_completion"]

G = TypeVar("G", bound=AsyncGenerator[Any, None])


def begun(generator: G) -> G:
    """Run the generator up to its first yield, which must not await, and return it.

    Python closes a generator that was never started without running its ``finally``, and without the loop's hooks.
    """
    with suppress(StopIteration):
        generator.asend(None).send(None)
    return generator


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
