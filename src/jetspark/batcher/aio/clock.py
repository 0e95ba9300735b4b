"""The clock protocol of the asyncio driver, satisfied by event loops and :class:`jetspark.testing.FakeClock`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["LoopTimer", "TimerClock"]


class LoopTimer(Protocol):
    def cancel(self) -> object: ...


class TimerClock(Protocol):
    def now(self) -> float: ...

    def call_at(self, when: float, call: Callable[[], None], /) -> LoopTimer: ...
