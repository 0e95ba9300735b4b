"""Waiting for what arrives, from threads: one that waits reads, unless another one does."""

from __future__ import annotations

import time

from jetspark.blocking.transport import Link
from jetspark.blocking.waiter import Waiter

__all__ = ["Arrivals"]

# The system's calls do not take any number for "for ever".
LONGEST_WAIT_S = 3600.0


class Arrivals:
    """Threads that wait for the messages of one source."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: list[Waiter] = []

    def begin(self) -> tuple[Waiter, bool]:
        """With the lock: begin to wait. From now on :meth:`notify_all` is heard, and this thread may be the one that
        reads: what it asks for afterwards is answered to itself."""
        waiter = Waiter()
        self._waiting.append(waiter)
        return waiter, self._link.take_over()

    def wait(self, begun: tuple[Waiter, bool], until: float | None) -> bool:
        """Without the lock: whether it was woken before its time was up."""
        waiter, is_reading = begun
        latest = time.monotonic() + LONGEST_WAIT_S
        deadline = latest if until is None else min(until, latest)
        try:
            self._link.read_for(waiter, deadline, is_reading=is_reading)
            waiter.wait(deadline - time.monotonic())
            return True
        except TimeoutError:
            return False
        finally:
            with self._link.lock:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)

    def notify_all(self) -> None:
        """With the lock."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.set_result(None)
