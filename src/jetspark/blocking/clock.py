"""Time and randomness for threads; deadlines are given on this clock."""

from __future__ import annotations

from random import SystemRandom as rng
from time import monotonic as now
from time import sleep

__all__ = ["now", "rng", "sleep"]
