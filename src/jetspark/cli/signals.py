"""SIGTERM and Ctrl-C: during the start of a command, and while its main thread only waits."""

from __future__ import annotations

import queue
import signal

__all__ = ["EndSignal", "EndedAtOnce", "end_at_once"]


class EndedAtOnce(BaseException):
    """SIGTERM came during the start. Not ``SystemExit``, which is an error while an application is loaded."""


class _EndAtOnce:
    ends_at_once = True
    """``App.run`` replaces a handler with this attribute, and does not call it."""

    def __init__(self) -> None:
        self.was_called = False

    def __call__(self, number: int, frame: object) -> None:
        self.was_called = True
        raise EndedAtOnce

    def check(self) -> None:
        """Raise ``EndedAtOnce`` if it was called. The code that it interrupted may have dropped the exception."""
        if self.was_called:
            raise EndedAtOnce


end_at_once = _EndAtOnce()
"""A handler of SIGTERM that ends the program before any work has begun."""


class EndSignal:
    """Receives SIGTERM and SIGINT from its creation on. Create it in the main thread."""

    def __init__(self) -> None:
        self.is_received = False
        # Not a threading.Event: Python runs the handler in the main thread, where `set()` deadlocks on the lock of the
        # Event whose `wait()` it has interrupted. `SimpleQueue.put` may interrupt a `get`.
        self._wake_ups: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a signal; False when none came in time."""
        if not self.is_received:
            try:
                self._wake_ups.get(timeout=timeout_s)
            except queue.Empty:
                pass
        return self.is_received

    def _on_signal(self, number: int, frame: object) -> None:
        self.is_received = True
        self._wake_ups.put(number)
