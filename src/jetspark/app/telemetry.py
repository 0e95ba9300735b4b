"""Reports of handlers as plain data: for your own metrics, traces and logs.

::

    class Metrics(HandlerObserver):
        def on_finished(self, attempt: HandlerAttempt, result: AttemptResult) -> None:
            counts[attempt.handler, result.outcome] += 1

    app.observe(Metrics())

Without an observer no report is made. Observers are called in the worker's event loop, and for an attempt in the task
that runs the handler: they must not wait. An error of an observer is logged, once for each method, and affects no
event.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from jetspark.app.contracts.envelope import Decoded

__all__ = ["AttemptOutcome", "AttemptResult", "DeadLetterChange", "HandlerAttempt", "HandlerObserver", "HeldEvents"]

AttemptOutcome: TypeAlias = Literal["done", "skipped", "retry", "dead_letter", "dropped", "given_back"]
"""``dropped`` is given up by a handler without dead letters; ``given_back`` is cancelled by the end of the worker, or
with another worker by now."""


class HandlerAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a handler with one event."""

    app: str
    handler: str
    event_type: str | None
    """None for a message that is not an event, or breaks its contract: no handler is called with it."""
    event_id: str | None
    key: str | None
    stream: str
    sequence: int
    """The event's sequence in its stream; the same for each attempt."""
    attempt: int
    """1 for the first start."""
    redrives: int
    """How often the event was redriven from the dead letters."""
    correlation_id: str | None
    decoded: Decoded | None
    """The event with its envelope."""

    @property
    def traceparent(self) -> str | None:
        """The trace the event is part of, in W3C form: the parent of a span for this attempt."""
        return None if self.decoded is None else self.decoded.traceparent


class AttemptResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an attempt, and the outcome for its event."""

    outcome: AttemptOutcome
    seconds: float
    """The duration of the handler's own code, including the publishing of the events that it returned."""
    error: BaseException | None = None
    """The error that it raised, such as ``Skip`` or ``HandlerTimeout``."""
    retry_in_s: float | None = None
    """The delay of a ``retry``."""


class DeadLetterChange(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter was written, or closed because its event is done.

    ``dropped`` is an event without a dead letter, because its handler has ``dead_letter=False``: its workers died, or
    its delivery was ended elsewhere. An event that is dropped after an attempt of this worker is that attempt's
    outcome.
    """

    app: str
    handler: str
    key: str | None
    stream: str
    sequence: int
    status: Literal["open", "behind", "closed", "dropped"]
    error: str | None
    """The type of the error, of an open dead letter and of a dropped event."""
    attempts: int


class HeldEvents(msgspec.Struct, frozen=True, kw_only=True):
    """The events that a worker holds: received from the server, and not acknowledged."""

    app: str
    handler: str
    events: int
    oldest_s: float
    """How long the oldest of them has been held."""
    running: int
    """Events in an attempt, or in the steps after it."""
    awaited: int
    """Events that other workers had first and that hold back later ones of their keys here."""
    pulled: int
    """Messages besides ``events`` that wait until the worker has looked up the events of other workers."""
    stalled: tuple[str, ...]
    """Keys that make no progress, and why: the log has the same text, as an error."""


class HandlerObserver:
    """Override the methods that you need. A batch handler reports each event of its batch."""

    def on_started(self, attempt: HandlerAttempt) -> None:
        """The handler is about to be called, in the task that calls this."""

    def on_finished(self, attempt: HandlerAttempt, result: AttemptResult) -> None:
        """Called once the outcome is decided and stored; in the task that called :meth:`on_started`."""

    def on_dead_letter(self, change: DeadLetterChange) -> None:
        """A dead letter was written or closed by this worker, or dropped outside of an attempt."""

    def on_held(self, held: HeldEvents) -> None:
        """Several times within the time after which an event without progress counts as stalled, also while nothing is
        held."""

    def on_paused(self, handler: str, seconds: float) -> None:
        """This worker has paused the handler for every worker: its breaker opened."""
