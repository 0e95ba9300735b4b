"""Time with asyncio: the event loop's clock, and sleeping."""

from __future__ import annotations

import asyncio

__all__ = ["now", "sleep"]

sleep = asyncio.sleep


def now() -> float:
    """Seconds on the clock of the running loop: the one deadlines are given in."""
    return asyncio.get_running_loop().time()
