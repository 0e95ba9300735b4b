"""One result handed from the connection's thread to the thread that waits for it."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["Waiter"]


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
        if self._done.locked():
            self._done.release()

    def done(self) -> bool:
        return not self._done.locked()

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
