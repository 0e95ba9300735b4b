"""A clock that moves only on request, for a batcher on asyncio or on threads."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

__all__ = ["FakeClock"]


class FakeTimer:
    __slots__ = ("call", "is_cancelled")

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeClock:
    """Time passes only in :meth:`advance`."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._count = 0
        self._waiting: dict[threading.Condition, int] = {}
        self._lock = threading.Lock()

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, call: Callable[[], None]) -> FakeTimer:
        """As ``call_at`` of an event loop."""
        timer = FakeTimer(call)
        with self._lock:
            self._count += 1
            heapq.heappush(self._timers, (when, self._count, timer))
        return timer

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        """As ``condition.wait``: until it is notified, or time has moved on. The caller holds its lock."""
        with self._lock:
            self._waiting[condition] = self._waiting.get(condition, 0) + 1
        try:
            # Checked after this waiter is registered: a later `advance` will wake it.
            if until is None or until > self._now:
                condition.wait()
        finally:
            with self._lock:
                self._waiting[condition] -= 1
                if not self._waiting[condition]:
                    del self._waiting[condition]

    def advance(self, seconds: float) -> None:
        """Let time pass: timers are called in their order, and waiting threads wake to check again."""
        end = self._now + seconds
        while (timer := self._next(end)) is not None:
            timer.call()
        self._now = end
        with self._lock:
            conditions = list(self._waiting)
        for condition in conditions:
            with condition:
                condition.notify_all()

    def _next(self, end: float) -> FakeTimer | None:
        with self._lock:
            while self._timers and self._timers[0][0] <= end:
                when, _, timer = heapq.heappop(self._timers)
                if not timer.is_cancelled:
                    self._now = max(self._now, when)
                    return timer
        return None
