"""The steps that the procedures of handlers yield, each with the answer that it expects. Pure.

A worker performs them against the server, a simulator in memory. Each step can be repeated without harm. A step that
writes conditionally names the revision it replaces: the record or dead letter must still have it, 0 for none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from jetspark.app.handlers.lanes import WorkItem
from jetspark.app.stored_events import DeadLetterRef, FailureCause
from jetspark.core.step_runner import ReadClock, Steps

__all__ = [
    "Acknowledge",
    "AttemptsRecord",
    "CloseDeadLetter",
    "DropAttempts",
    "DropParked",
    "DropSeparateBody",
    "EndTransaction",
    "FindDeadLetter",
    "FindRetry",
    "HandlerStep",
    "HandlerSteps",
    "KeyStep",
    "NextDeadLetter",
    "ParkedRecord",
    "PauseHandler",
    "ReadAttempts",
    "ReadParked",
    "ReportDropped",
    "RequestRedrive",
    "StepAnswer",
    "StoreStep",
    "WriteAttempts",
    "WriteDeadLetter",
    "WriteParked",
    "WriteSchedule",
]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ParkedRecord:
    """The record of a parked key: the event it waits for, and the record's revision."""

    head: int
    revision: int
    waiting: tuple[int, ...]
    """Events that the key was parked for. They wait for a retry and may have no dead letter. Those before the head are
    done; those after it were overtaken when an earlier event was redelivered and failed as well."""


@dataclass(frozen=True, slots=True)
class AttemptsRecord:
    """The number of attempts made before, and the failure of the last one, if it is known."""

    attempts: int
    cause: FailureCause | None


@dataclass(frozen=True, slots=True)
class FindDeadLetter:
    """Read the dead letter of an event. [DeadLetterRef or None]"""

    item: WorkItem


@dataclass(frozen=True, slots=True)
class WriteDeadLetter:
    """Store a dead letter, if ``revision`` is still the last one of its subject. [True if it was stored]"""

    item: WorkItem
    cause: FailureCause | None
    behind: int | None
    """The event that its key waits for; None if the event itself failed."""
    revision: int


@dataclass(frozen=True, slots=True)
class CloseDeadLetter:
    """Replace a dead letter by a marker that it is done, if it still has this revision. [True if it was replaced]"""

    item: WorkItem
    revision: int


@dataclass(frozen=True, slots=True)
class FindRetry:
    """Look in the retry stream for the same redrive of the event with more attempts than it came with. [bool]"""

    item: WorkItem


@dataclass(frozen=True, slots=True)
class WriteSchedule:
    """Store the event with its attempts, due after this time; replaces an earlier schedule of it. [None]"""

    item: WorkItem
    seconds: float
    cause: FailureCause | None = field(default=None, compare=False)
    """The failure of the last attempt, shown in lists of retries."""


@dataclass(frozen=True, slots=True)
class NextDeadLetter:
    """Find the dead letter of a key with the lowest sequence that is not closed. [DeadLetterRef or None]"""

    key: str


@dataclass(frozen=True, slots=True)
class RequestRedrive:
    """Store the request to handle a dead letter again, unless the same request is stored already. [None]"""

    dead_letter: DeadLetterRef


@dataclass(frozen=True, slots=True)
class ReadParked:
    """Read the record of a parked key. [ParkedRecord or None]"""

    key: str


@dataclass(frozen=True, slots=True)
class WriteParked:
    """Record that the key waits for ``head``, if the record still has this revision. [True if it was written]"""

    key: str
    head: int
    revision: int
    waiting: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropParked:
    """Remove the record, if it still has this revision. [True if it was removed]"""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class ReadAttempts:
    """Read the record of an event's attempts. [AttemptsRecord or None]"""

    item: WorkItem


@dataclass(frozen=True, slots=True)
class WriteAttempts:
    """Record the item's attempts, and the failure of the last one. [None]"""

    item: WorkItem
    cause: FailureCause | None


@dataclass(frozen=True, slots=True)
class DropAttempts:
    """Remove the record of an event's attempts. [None]"""

    item: WorkItem


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Acknowledge the message. [True if the server has confirmed it, which is asked for only if ``surely``]"""

    item: WorkItem
    surely: bool = False


@dataclass(frozen=True, slots=True)
class DropSeparateBody:
    """Remove the body that was stored apart, because it was too large, of an event that is done. [None]"""

    item: WorkItem


@dataclass(frozen=True, slots=True)
class ReportDropped:
    """Log and report that an event is given up without a dead letter, since its handler has none. [None]"""

    item: WorkItem
    cause: FailureCause


@dataclass(frozen=True, slots=True)
class EndTransaction:
    """Keep the transactions of earlier attempts from committing. [True if one committed; its events are published]

    An attempt may have failed because the answer to its commit did not arrive in time.
    """

    item: WorkItem


@dataclass(frozen=True, slots=True)
class PauseHandler:
    """The breaker has opened: pause the handler's consumers, of events and of retries, for every worker. [None]"""


KeyStep: TypeAlias = ReadParked | WriteParked | DropParked | NextDeadLetter | RequestRedrive
"""Steps on the record of a parked key and on its dead letters, which operators take as well."""
StoreStep: TypeAlias = (
    KeyStep
    | FindDeadLetter
    | WriteDeadLetter
    | CloseDeadLetter
    | FindRetry
    | WriteSchedule
    | ReadAttempts
    | WriteAttempts
    | DropAttempts
    | DropSeparateBody
)
"""Steps on records and dead letters."""
HandlerStep: TypeAlias = StoreStep | ReadClock | Acknowledge | ReportDropped | EndTransaction | PauseHandler
StepAnswer: TypeAlias = bool | float | DeadLetterRef | ParkedRecord | AttemptsRecord | None
HandlerSteps: TypeAlias = Steps[HandlerStep, R]
