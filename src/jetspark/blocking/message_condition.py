"""A condition variable for the messages of one source, for threads: a waiting thread reads, unless another one does."""

from __future__ import annotations

import time

from jetspark.blocking.transport import Transport
from jetspark.blocking.waiter import Waiter

__all__ = ["MessageCondition"]

# System calls have no value for an unlimited wait.
LONGEST_WAIT_S = 3600.0


class MessageCondition:
    """Threads that wait for the messages of one source."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._waiting: list[Waiter] = []

    def begin(self) -> tuple[Waiter, bool]:
        """With the lock: register as a waiter and, if no other thread reads, as the reader.

        Notifications count from now on, and this thread itself receives the reply to a request it sends afterwards.
        """
        waiter = Waiter()
        self._waiting.append(waiter)
        return waiter, self._transport.take_over()

    def wait(self, begun: tuple[Waiter, bool], until: float | None) -> bool:
        """Without the lock: wait for a message; True when woken before ``until``."""
        waiter, is_reading = begun
        latest = time.monotonic() + LONGEST_WAIT_S
        deadline = latest if until is None else min(until, latest)
        try:
            self._transport.read_for(waiter, deadline, is_reading=is_reading)
            waiter.wait(deadline - time.monotonic())
            return True
        except TimeoutError:
            return False
        finally:
            with self._transport.lock:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)

    def notify_all(self) -> None:
        """Wake all waiters. Called with the lock."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.set_result(None)
