"""How one thread waits for another, without anything an interrupt could break.

A KeyboardInterrupt is raised on the main thread between two bytecodes, and also inside the functions of ``threading``:
``Event`` and ``Condition`` are written in Python, and an interrupt at the wrong place leaves their lock held for good.
What is here uses bare locks only, whose methods are one step each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["LONGEST_SLEEP_S", "Changed", "Waiter"]

# The main thread may be interrupted when it is about to wake others. So nobody sleeps longer than this without looking.
LONGEST_SLEEP_S = 1.0


class Waiter:
    """A future reduced to what a blocking call needs. A bare lock wakes faster than an Event, which is a lock, a
    condition and a list; request latency is made of such things."""

    __slots__ = ("_done", "_error", "_result")

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self._result: Any = None
        self._error: Exception | None = None

    def set_result(self, result: Any) -> None:
        self._result = result
        self._finish()

    def set_exception(self, error: Exception) -> None:
        self._error = error
        self._finish()

    def _finish(self) -> None:
        try:
            self._done.release()
        except RuntimeError:
            pass  # told twice: events that were interrupted on their way are passed on again

    def done(self) -> bool:
        return not self._done.locked()

    def look(self, timeout_s: float) -> bool:
        """Whether it is done within the time; it stays done for others."""
        if not self._done.acquire(timeout=max(timeout_s, 0)):
            return False
        self._finish()
        return True

    def wait(self, timeout_s: float) -> Any:
        """The result, once.

        Raises:
            TimeoutError: It was not there in time.
        """
        # A negative timeout would mean "for ever" to a lock.
        if not self._done.acquire(timeout=min(max(timeout_s, 0), threading.TIMEOUT_MAX)):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result


class Changed:
    """A condition: threads that hold ``lock`` give it up until another one says that something has changed."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._waiters: list[threading.Lock] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until something has changed; False when the time is up, or earlier: look, and wait again.

        The lock is given up meanwhile, and is held once afterwards.
        """
        lock, is_mine, waiter = self._lock, self._lock._is_owned, threading.Lock()
        once = (1, threading.get_ident())
        longest_s = LONGEST_SLEEP_S if timeout_s is None else min(max(timeout_s, 0.0), LONGEST_SLEEP_S)
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            lock._release_save()
            return waiter.acquire(timeout=longest_s)
        finally:
            # Twice: an interrupt can be in the way of one of them.
            try:
                if not is_mine():
                    lock._acquire_restore(once)
            finally:
                if not is_mine():
                    lock._acquire_restore(once)
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def wait_for(self, is_so: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Until ``is_so``; False when it is not within the time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_so():
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            self.wait(left_s)
        return True

    def notify_all(self) -> None:
        """With the lock."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.release()
