"""The clock protocol of the blocking driver, also satisfied by :class:`jetspark.testing.FakeClock`."""

from __future__ import annotations

import threading
from typing import Protocol

__all__ = ["WaitingClock"]


class WaitingClock(Protocol):
    def now(self) -> float: ...

    def wait(self, condition: threading.Condition, until: float | None, /) -> None:
        """Wait until the condition is notified or the time ``until`` has come; the caller holds its lock."""
