"""A rate limit: a write waits until a token bucket has one token for each of its items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jetspark.batcher.effects import SinkSteps, Write
from jetspark.core.numbers import rate, whole
from jetspark.core.step_runner import ReadClock, Sleep

__all__ = ["TokenBucket"]


class TokenBucket:
    """One token per item: ``items_per_s`` are added each second, and the bucket holds at most ``burst``.

    Each write takes its tokens at once, in order, and then waits for the time at which they become available; so the
    balance may be negative. A write larger than the bucket waits until the bucket is full, and later writes wait for
    its excess. In any ``t`` seconds at most ``burst + items_per_s * t`` items begin, plus the excess of one such batch.
    """

    def __init__(self, *, items_per_s: float, burst: int | None) -> None:
        self.items_per_s = rate("items_per_s", items_per_s)
        self.burst = max(1, math.ceil(items_per_s)) if burst is None else whole("burst", burst, instead="or None")
        self._tokens = float(self.burst)
        self._filled_at: float | None = None

    def take(self, count: int, now: float) -> float:
        """Take ``count`` tokens; returns the seconds to wait before using them."""
        if self._filled_at is not None:
            now = max(now, self._filled_at)  # a user's clock may jump back
            self._tokens = min(float(self.burst), self._tokens + (now - self._filled_at) * self.items_per_s)
        self._filled_at = now
        missing = min(count, self.burst) - self._tokens
        self._tokens -= count
        return max(0.0, missing / self.items_per_s)

    def give_back(self, count: int) -> None:
        """Return unused tokens."""
        self._tokens = min(float(self.burst), self._tokens + count)

    def write(self, batch: Sequence[Any]) -> SinkSteps:
        count = len(batch)
        wait_s = self.take(count, (yield ReadClock()))
        if wait_s > 0:
            try:
                yield Sleep(wait_s)
            except BaseException:
                self.give_back(count)
                raise
        yield Write(batch)
