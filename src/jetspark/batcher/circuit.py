"""A circuit breaker: a sink that fails again and again is left alone for a while."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from jetspark.batcher.effects import SinkSteps, Write
from jetspark.batcher.retry import IsRetryable
from jetspark.core.numbers import seconds_above_0, whole
from jetspark.core.step_runner import ReadClock
from jetspark.errors import CircuitOpen

__all__ = ["Circuit", "CircuitState"]

CircuitState: TypeAlias = Literal["closed", "open", "half-open"]


class Circuit:
    """Leaves a sink alone that fails again and again.

    ::

        closed ──`failures` in a row   ──> open ──open_s later──> half-open: one write is let through
          ^                                     ^                        │ success │ failure
          └─────────────────────────────────────┼────────────────────────┘         │
                                                └──────────────────────────────────┘

    Each move begins a new generation, and only writes of the present one move it on: those that began before an outage
    was noticed tell nothing new about it.
    """

    def __init__(self, *, failures: int, open_s: float) -> None:
        whole("failures", failures)
        seconds_above_0("open_s", open_s)
        self.failures, self.open_s = failures, open_s
        self.state: CircuitState = "closed"
        self._generation = 0
        self._failed = 0
        """In a row."""
        self._opened_at = 0.0
        self._is_trying = False

    def enter(self, now: float) -> int:
        """Begin a write; returns the generation it belongs to.

        Raises:
            CircuitOpen: Not now.
        """
        if self.state == "open":
            left_s = self._opened_at + self.open_s - now
            if left_s > 0:
                raise CircuitOpen(left_s)
            self._move("half-open")
        if self.state == "half-open":
            if self._is_trying:
                raise CircuitOpen(self.open_s)  # as long as it will be if the trial fails
            self._is_trying = True
        return self._generation

    def on_success(self, generation: int) -> None:
        if generation == self._generation:
            self._failed = 0
            if self.state == "half-open":
                self._move("closed")

    def on_failure(self, generation: int, now: float) -> None:
        if generation != self._generation:
            return
        self._failed += 1
        if self.state == "half-open" or self._failed >= self.failures:
            self._opened_at = now
            self._move("open")

    def on_nothing(self, generation: int) -> None:
        """The write failed, and not because of the sink: it was no trial."""
        if generation == self._generation:
            self._is_trying = False

    def _move(self, state: CircuitState) -> None:
        self.state = state
        self._generation += 1
        self._is_trying = False

    def write(self, batch: Sequence[Any], judge: IsRetryable) -> SinkSteps:
        generation = self.enter((yield ReadClock()))
        try:
            yield Write(batch)
        except BaseException as error:
            # An error that no retry would mend is the batch's, not the sink's: an item at fault, looked for by halving
            # its batch, must not look like an outage. A write that was cancelled took too long for somebody.
            if isinstance(error, Exception) and not judge(error):
                self.on_nothing(generation)
            else:
                self.on_failure(generation, (yield ReadClock()))
            raise
        self.on_success(generation)
