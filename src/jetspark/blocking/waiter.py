"""Waiting of one thread for another, in a way that an interrupt cannot break.

A KeyboardInterrupt is raised on the main thread between two bytecodes, and also inside the functions of ``threading``:
``Event`` and ``Condition`` are written in Python, and an interrupt at the wrong place leaves their lock held for good.
This module uses only bare locks, whose methods are atomic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["LONGEST_SLEEP_S", "Changed", "Waiter"]

# An interrupt can stop the main thread before it wakes others. So no thread sleeps longer than this without a check.
LONGEST_SLEEP_S = 1.0


class Waiter:
    """A minimal future for a blocking call. A bare lock wakes faster than an ``Event``, which consists of a lock, a
    condition and a list; the difference shows in request latency."""

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
            pass  # resolved twice: events whose delivery was interrupted are delivered again

    def done(self) -> bool:
        return not self._done.locked()

    def look(self, timeout_s: float) -> bool:
        """Wait; True when done within ``timeout_s``. Other waiters still see it as done."""
        if not self._done.acquire(timeout=max(timeout_s, 0)):
            return False
        self._finish()
        return True

    def wait(self, timeout_s: float) -> Any:
        """Wait for the result and return it; only one call receives it.

        Raises:
            TimeoutError: No result within ``timeout_s``.
        """
        # A negative timeout would mean an unlimited wait to a lock.
        if not self._done.acquire(timeout=min(max(timeout_s, 0), threading.TIMEOUT_MAX)):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result


class Changed:
    """A condition variable: threads that hold ``lock`` release it and wait until another one calls
    :meth:`notify_all`."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._waiters: list[threading.Lock] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for :meth:`notify_all`; False after ``timeout_s`` or earlier, so check the condition and wait again.

        The lock is released during the wait, and held exactly once afterwards.
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
            # Twice, because an interrupt can prevent the first attempt.
            try:
                if not is_mine():
                    lock._acquire_restore(once)
            finally:
                if not is_mine():
                    lock._acquire_restore(once)
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def wait_for(self, is_so: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until ``is_so`` returns a true value; False after ``timeout_s``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_so():
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            self.wait(left_s)
        return True

    def notify_all(self) -> None:
        """Wake all waiters. Called with the lock."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.release()
