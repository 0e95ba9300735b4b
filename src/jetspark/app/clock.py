"""The time of day, in one place: a test in virtual time has its own."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable

__all__ = ["HUNDRED_YEARS_S", "idle_s", "microseconds", "nanoseconds_now", "seconds_now", "utc_now"]

_EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)

HUNDRED_YEARS_S = 100 * 366 * 86_400
"""The longest delay of anything that can be delayed. A server's time ends in 2262, and Python's in 9999."""


def seconds_now() -> float:
    """Seconds since 1970, by the event loop where it has a time of day of its own, as ``VirtualLoop`` has."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return time.time()
    wall_time = getattr(loop, "wall_time", None)
    return time.time() if wall_time is None else float(wall_time())


def nanoseconds_now() -> Callable[[], int]:
    """A function for nanoseconds since 1970, by the loop that runs now; it is called for every id that is made."""
    wall_time: Callable[[], float] | None = getattr(asyncio.get_running_loop(), "wall_time", None)
    return time.time_ns if wall_time is None else lambda: int(wall_time() * 1e9)


def utc_now() -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds_now(), datetime.UTC)


def microseconds(moment: datetime.datetime) -> int:
    """Microseconds from 1970 to a moment."""
    return (moment - _EPOCH) // datetime.timedelta(microseconds=1)


def idle_s(seconds: float) -> float:
    """The polling interval of background work; longer on a virtual loop.

    Returns ``seconds``, or more on a virtual loop that asks for it: waiting is free there, and polling is not.
    """
    return max(seconds, getattr(asyncio.get_running_loop(), "idle_s", 0.0))
