"""Steps of procedures that publish many messages, collect many answers, or read through a pull consumer.

:mod:`jetspark.core.step_runner` states the contract between a procedure and its driver. The drivers are
``aio/steps.py`` and ``blocking/steps.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from jetspark.core.message import CoreMessage
from jetspark.core.step_runner import ReadClock, Sleep, Steps
from jetspark.errors import ConnectionClosed, ConnectionLost, JetSparkError
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.operations import Request
from jetspark.jetstream.pull import Flow, Puller
from jetspark.publish.fast_options import Refusal
from jetspark.publish.outgoing import Item

__all__ = [
    "Answers",
    "AskMany",
    "ClosePull",
    "Connect",
    "IngestAll",
    "IngestReport",
    "OpenPull",
    "Pieces",
    "Procedure",
    "PublishEach",
    "Pull",
    "PullSource",
    "Step",
    "meaning",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connect:
    """Have a connection that is open. The answer is its :class:`~jetspark.jetstream.operations.Api`.

    A runner that can make new connections makes one here, if the last one was closed for good.
    """


class Answers(Protocol):
    """A request that has many answers, and what they say."""

    @property
    def is_over(self) -> bool:
        """Whether the last answer was given."""

    def request(self) -> Request: ...

    def accept_all(self, messages: Sequence[CoreMessage]) -> None:
        """Take answers, in their order. What comes behind the last one is not looked at."""

    def lost(self) -> None:
        """The connection was lost: the other answers will not come."""


@dataclass(frozen=True, slots=True)
class AskMany:
    """Send the request of ``answers``, and give it the answers until it is over. There is nothing to send back."""

    answers: Answers


@dataclass(frozen=True, slots=True)
class IngestAll:
    """Store messages by one fast batch that goes on after refusals. The answer is an :class:`IngestReport`."""

    items: Iterable[Item]


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What became of a fast batch. Numbers are those of its messages, from 1."""

    acknowledged: int
    """The server is done with all messages up to this one."""
    missing: tuple[range, ...]
    """Messages that were lost on the way, or may be."""
    refusals: tuple[Refusal, ...]
    failure: JetSparkError | None = None
    """Why the batch ended before its time. What became of the messages that are not acknowledged is unknown then."""
    last_sequence: int = 0
    """The stream sequence of the last message that was stored, as the final acknowledgement says; 0 without one."""


@dataclass(frozen=True, slots=True)
class PublishEach:
    """Publish messages, each with an acknowledgement of its own.

    The answer is a list with the error of each message, or None for one that is stored.
    """

    items: Iterable[Item]


class PullSource(Protocol):
    """A pull consumer that is read."""

    puller: Puller[Any]


@dataclass(frozen=True, slots=True)
class OpenPull:
    """Subscribe to what is pulled from a consumer without acknowledgements. The answer is a :class:`PullSource`."""

    info: ConsumerInfo


@dataclass(frozen=True, slots=True)
class Pull:
    """Ask as ``reader`` says, and wait once if nothing is there. The answer is a list of messages, perhaps empty."""

    source: PullSource
    reader: Flow[Any]


@dataclass(frozen=True, slots=True)
class ClosePull:
    """Unsubscribe and delete the consumer. If that fails, the server forgets the consumer by itself."""

    source: PullSource
    info: ConsumerInfo


Step: TypeAlias = (
    Request | Sleep | ReadClock | Connect | AskMany | IngestAll | PublishEach | OpenPull | Pull | ClosePull
)

Procedure: TypeAlias = Steps[Step, T]


class Pieces(Protocol):
    """Something that is read piece by piece: :meth:`next` until it returns None, and :meth:`close` in any case."""

    def next(self) -> Procedure[list[Any] | None]: ...

    def close(self) -> Procedure[None]: ...


def meaning(error: JetSparkError, *, renews: bool) -> JetSparkError:
    """What an error means to a procedure: where the next connection is another one, the end of this one passes."""
    if renews and isinstance(error, ConnectionClosed):
        return ConnectionLost(f"the connection was closed: {error}")
    if renews and isinstance(error.__cause__, ConnectionClosed):  # of a batch in doubt
        error.__cause__ = ConnectionLost(f"the connection was closed: {error.__cause__}")
    return error
