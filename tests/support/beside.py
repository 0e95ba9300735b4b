"""Work that goes on beside a test: faults that are made, traffic, witnesses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

__all__ = ["beside"]


@asynccontextmanager
async def beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Have endless work done until the block is left. If any of it fails the block is cancelled, and fails with it.

    A test that waits for what its helpers do would otherwise wait for ever for one that is gone.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
