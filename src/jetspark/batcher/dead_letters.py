"""Dead letters: items that cannot be written are written to another sink, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from jetspark.batcher.effects import SinkSteps, WallTime, Write, WriteDeadLetters
from jetspark.batcher.retry import IsRetryable

__all__ = ["DeadLetter", "DeadLetters"]

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)  # with slots, Python 3.11 refuses `DeadLetter[str](...)`
class DeadLetter(Generic[T_co]):
    """An item that could not be written, with its error and the time (seconds since 1970)."""

    item: T_co
    error: Exception
    time: float

    @property
    def reason(self) -> str:
        """The error in one line."""
        return f"{type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetters:
    """Writes failed items to the sink for dead letters."""

    when: IsRetryable | None
    split: bool

    def write(self, batch: Sequence[Any], judge: IsRetryable) -> SinkSteps:
        pieces = [list(batch)]
        dead: list[DeadLetter[Any]] = []
        first: Exception | None = None
        while pieces:
            piece = pieces.pop()
            failure: Exception | None = None
            try:
                yield Write(list(piece))
            except Exception as error:
                if self.when is not None and not self.when(error):
                    raise
                failure = error
            if failure is None:
                continue
            first = first or failure
            # No item is at fault in an outage, so every half of the batch would fail, too.
            if self.split and len(piece) > 1 and not judge(failure):
                middle = len(piece) // 2
                pieces += [piece[middle:], piece[:middle]]  # the first half comes first, so order is kept
            else:
                now = yield WallTime()
                dead += [DeadLetter(item, failure, now) for item in piece]
        if first is not None:
            try:
                yield WriteDeadLetters(dead)
            except Exception:
                raise first  # noqa: B904 - the error of the dead-letter sink is its context
