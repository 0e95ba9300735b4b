"""The lock of a blocking batcher, optimised for many threads that each hold it for a microsecond."""

from __future__ import annotations

import time
from _thread import RLock

__all__ = ["TurnLock"]

# Any sleep releases the GIL, for which the owner of the lock may be waiting. Linux adds some 50 us.
PAUSE_S = 10e-6


class TurnLock(RLock):  # type: ignore[misc]  # it is not final
    """A lock that knows its owner. A thread that finds it taken sleeps and tries again instead of queueing.

    A queueing thread gets the lock while it still waits for the GIL. The thread that has the GIL then finds the lock
    taken at its next item, and queues, too. From then on every item costs a thread switch: 8 to 13 us instead of 0.6,
    measured with eight threads that add to one batcher, on idle processors. A thread that takes only a free lock
    already has the GIL when it gets the lock.
    """

    def __enter__(self) -> bool:  # type: ignore[override]  # takes no arguments, as with RLock itself
        """Take the lock. Must not be nested: an interrupt in here releases the lock completely."""
        try:
            if not self.acquire(False):
                self.wait()
        except BaseException:  # an interrupt, perhaps after the lock was taken
            if self._is_owned():  # type: ignore[attr-defined]  # typeshed lacks it
                self.release()
            raise
        return True

    def wait(self) -> None:
        """Poll until the lock is free, and take it."""
        while not self.acquire(False):
            time.sleep(PAUSE_S)
