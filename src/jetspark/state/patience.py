"""How long a procedure goes on while nothing gets further. Pure: the clock is the driver's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from jetspark.core.backoff import Backoff
from jetspark.errors import JetSparkError
from jetspark.publish.steps import Procedure, RandomPause, ReadClock

__all__ = ["Persistence"]

T = TypeVar("T")

PAUSE = Backoff(first_s=0.02, max_s=2.0)


class Persistence:
    """Pauses that grow, until there was no progress for ``patience_s`` seconds."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._until: float | None = None
        self._failures = 0

    def progress(self) -> Procedure[None]:
        """The time begins anew. Call it first, too."""
        self._until = (yield ReadClock()) + self._patience_s
        self._failures = 0

    def pause(self, reason: Exception) -> Procedure[None]:
        """Wait a moment before the next attempt; or raise ``reason``, if the time is over."""
        now = yield ReadClock()
        if self._until is None:
            self._until = now + self._patience_s
        if now >= self._until:
            raise reason
        self._failures += 1
        yield RandomPause(PAUSE.wait_s(self._failures))

    def attempt(self, act: Callable[[], Procedure[T]]) -> Procedure[T]:
        """Do something that may be done twice, again and again while its error may pass."""
        while True:
            try:
                return (yield from act())
            except JetSparkError as error:
                if not error.may_pass:
                    raise
                reason = error
            yield from self.pause(reason)
