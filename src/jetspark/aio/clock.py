"""Time and randomness with asyncio. A test's event loop can control both."""

from __future__ import annotations

import asyncio
import random

__all__ = ["now", "rng", "sleep"]

sleep = asyncio.sleep


def now() -> float:
    """Seconds on the running loop's clock, on which all deadlines are given."""
    return asyncio.get_running_loop().time()


def rng() -> random.Random:
    """The running loop's random generator if it has one, as ``VirtualLoop`` does; else the operating system's."""
    try:
        found: random.Random | None = getattr(asyncio.get_running_loop(), "rng", None)
    except RuntimeError:  # no loop runs
        found = None
    return found or random.SystemRandom()
