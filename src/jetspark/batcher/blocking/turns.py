"""The lock of a batcher on threads, made for many threads that each hold it for a microsecond."""

from __future__ import annotations

import time
from _thread import RLock

__all__ = ["TurnLock"]

# Any sleep gives up the interpreter, which the thread that has the lock may be waiting for. Linux adds some 50 us.
PAUSE_S = 10e-6


class TurnLock(RLock):  # type: ignore[misc]  # it is not final
    """A lock that knows its owner. A thread that finds it taken sleeps and tries again; it does not queue for it.

    A thread that queues is given the lock while it still waits for the interpreter (the GIL). The thread that has the
    interpreter then finds the lock taken at its next item, and queues, too. From there on every item costs a change of
    threads: 8 to 13 us in place of 0.6, measured with eight threads that add to one batcher, on idle processors. A
    thread that takes only a free lock has the interpreter when it gets the lock.
    """

    def __enter__(self) -> bool:  # type: ignore[override]  # takes no arguments, as with RLock itself
        """Not for a thread that has the lock already: an interrupt in here gives it back."""
        try:
            if not self.acquire(False):
                self.wait()
        except BaseException:  # an interrupt, perhaps when the lock was taken already
            if self._is_owned():  # type: ignore[attr-defined]  # typeshed lacks it
                self.release()
            raise
        return True

    def wait(self) -> None:
        """Take the lock when it is free."""
        while not self.acquire(False):
            time.sleep(PAUSE_S)
