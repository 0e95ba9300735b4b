"""Time for threads: the clock that deadlines are given in, and sleeping; and chance."""

from __future__ import annotations

from random import SystemRandom as rng
from time import monotonic as now
from time import sleep

__all__ = ["now", "rng", "sleep"]
