"""Time with asyncio: the event loop's clock, and sleeping; and chance, which a loop in a test may decide as well."""

from __future__ import annotations

import asyncio
import random

__all__ = ["now", "rng", "sleep"]

sleep = asyncio.sleep


def now() -> float:
    """Seconds on the clock of the running loop: the one deadlines are given in."""
    return asyncio.get_running_loop().time()


def rng() -> random.Random:
    """Where chance comes from: the running loop's own, as ``VirtualLoop`` has, or the operating system's."""
    try:
        found: random.Random | None = getattr(asyncio.get_running_loop(), "rng", None)
    except RuntimeError:  # no loop runs
        found = None
    return found or random.SystemRandom()
