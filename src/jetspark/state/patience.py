"""How long a procedure goes on while nothing gets further. Pure: the clock is the driver's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from jetspark.errors import (
    BatchCutShort,
    BatchInDoubt,
    ConnectionLost,
    JetSparkError,
    JetStreamUnavailable,
    RequestTimeout,
    ServerError,
    TooManyBatches,
)
from jetspark.publish.steps import Procedure, RandomPause, ReadClock

__all__ = ["Persistence", "passes"]

T = TypeVar("T")

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 2.0

# A leader is elected, the connection comes back, others end their batches.
_PASSING = (BatchCutShort, BatchInDoubt, ConnectionLost, JetStreamUnavailable, RequestTimeout, TooManyBatches)


def passes(error: BaseException) -> bool:
    """Whether doing the same again may help: nobody is there just now, or nobody leads."""
    return isinstance(error, _PASSING) or (isinstance(error, ServerError) and error.code == 503)


class Persistence:
    """Pauses that grow, until there was no progress for ``patience_s`` seconds."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._until: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def progress(self) -> Procedure[None]:
        """The time begins anew. Call it first, too."""
        self._until = (yield ReadClock()) + self._patience_s
        self._pause_s = FIRST_PAUSE_S

    def pause(self, reason: Exception) -> Procedure[None]:
        """Wait a moment before the next attempt; or raise ``reason``, if the time is over."""
        now = yield ReadClock()
        if self._until is None:
            self._until = now + self._patience_s
        if now >= self._until:
            raise reason
        yield RandomPause(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def attempt(self, act: Callable[[], Procedure[T]]) -> Procedure[T]:
        """Do something that may be done twice, again and again while its error may pass."""
        while True:
            try:
                return (yield from act())
            except JetSparkError as error:
                if not passes(error):
                    raise
                reason = error
            yield from self.pause(reason)
