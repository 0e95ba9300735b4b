"""What the blocking driver asks of a clock; :class:`jetspark.testing.FakeClock` can do it, too."""

from __future__ import annotations

import threading
from typing import Protocol

__all__ = ["WaitingClock"]


class WaitingClock(Protocol):
    def now(self) -> float: ...

    def wait(self, condition: threading.Condition, until: float | None, /) -> None:
        """Until the condition is notified or it is that time; the caller holds its lock."""
