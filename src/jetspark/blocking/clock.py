"""Time for threads: the clock that deadlines are given in, and sleeping."""

from __future__ import annotations

from time import monotonic as now
from time import sleep

__all__ = ["now", "sleep"]
