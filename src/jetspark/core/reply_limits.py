"""When a request with many answers is over. Time is an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from jetspark.core.message import CoreMessage, is_no_responders
from jetspark.core.numbers import seconds_above_0, whole
from jetspark.errors import NoResponders

__all__ = ["Collector"]

M = TypeVar("M", bound=CoreMessage)


class Collector:
    """Decides, answer by answer, whether to wait for another one and for how long."""

    def __init__(self, subject: str, *, now: float, timeout_s: float, stall_s: float | None, max_messages: int) -> None:
        max_messages = whole("max_messages", max_messages, low=0)
        self._subject = subject
        self._deadline = now + seconds_above_0("timeout", timeout_s)
        self._stall_s = None if stall_s is None else seconds_above_0("stall", stall_s)
        self._stalls_at: float | None = None
        self._max_messages = max_messages
        self._received = 0

    def wait_s(self, now: float) -> float:
        """How long the next answer may take; 0 or less when no more is wanted."""
        if self._max_messages and self._received >= self._max_messages:
            return 0.0
        deadline = self._deadline if self._stalls_at is None else min(self._deadline, self._stalls_at)
        return deadline - now

    def accept(self, message: M, *, now: float, stop: Callable[[M], bool] | None) -> bool:
        """Whether this is an answer to pass on; False when it is the end.

        Raises:
            NoResponders: The server says that nobody listens.
        """
        if is_no_responders(message):
            raise NoResponders(self._subject)
        if stop is not None and stop(message):
            return False
        self._received += 1
        if self._stall_s is not None:
            self._stalls_at = now + self._stall_s
        return True
