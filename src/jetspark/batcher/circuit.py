"""A circuit breaker: writes to a sink that keeps failing are suspended for a while."""

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
    """Suspends writes to a sink that keeps failing.

    ::

        closed ──`failures` in a row   ──> open ──open_s later──> half-open: one write is let through
          ^                                     ^                        │ success │ failure
          └─────────────────────────────────────┼────────────────────────┘         │
                                                └──────────────────────────────────┘

    Each transition begins a new generation, and only the outcome of a write of the present generation counts: a write
    that began before the outage was noticed gives no new information.
    """

    def __init__(self, *, failures: int, open_s: float) -> None:
        whole("failures", failures)
        seconds_above_0("open_s", open_s)
        self.failures, self.open_s = failures, open_s
        self.state: CircuitState = "closed"
        self._generation = 0
        self._failed = 0
        """Consecutive failures."""
        self._opened_at = 0.0
        self._is_trying = False

    def enter(self, now: float) -> int:
        """Begin a write; returns the generation it belongs to.

        Raises:
            CircuitOpen: The circuit is open, or a trial write is running.
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
        """Record a write that failed because of its items; it does not count as a trial of the sink."""
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
            # A final error is the fault of an item, not of the sink: a search for that item by halving the batch must
            # not look like an outage. A cancelled write counts, because it took too long for its caller.
            if isinstance(error, Exception) and not judge(error):
                self.on_nothing(generation)
            else:
                self.on_failure(generation, (yield ReadClock()))
            raise
        self.on_success(generation)
