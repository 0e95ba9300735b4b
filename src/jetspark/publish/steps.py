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
    """A request with many answers, and the state of its answers."""

    @property
    def is_over(self) -> bool:
        """True after the last answer."""

    def request(self) -> Request: ...

    def accept_all(self, messages: Sequence[CoreMessage]) -> None:
        """Read answers, in their order. Messages behind the last answer are ignored."""

    def lost(self) -> None:
        """Record that the connection was lost, and with it the other answers."""


@dataclass(frozen=True, slots=True)
class AskMany:
    """Send the request of ``answers``, and pass the answers to it until it is over. There is no answer to the step."""

    answers: Answers


@dataclass(frozen=True, slots=True)
class IngestAll:
    """Store messages by one fast batch that continues after refusals. The answer is an :class:`IngestReport`."""

    items: Iterable[Item]


@dataclass(frozen=True, slots=True)
class IngestReport:
    """The result of a fast batch. Numbers are those of its messages, from 1."""

    acknowledged: int
    """The server has processed all messages up to this one."""
    missing: tuple[range, ...]
    """Messages that were lost on the way, or may be."""
    refusals: tuple[Refusal, ...]
    failure: JetSparkError | None = None
    """The reason of an early end. Messages without an acknowledgement may then be stored or not."""
    last_sequence: int = 0
    """The stream sequence of the last message stored, by the final acknowledgement; 0 without one."""


@dataclass(frozen=True, slots=True)
class PublishEach:
    """Publish messages, each with an acknowledgement of its own.

    The answer is a list with the error of each message, or None for a stored message.
    """

    items: Iterable[Item]


class PullSource(Protocol):
    """An open pull consumer."""

    puller: Puller[Any]


@dataclass(frozen=True, slots=True)
class OpenPull:
    """Subscribe to a pull consumer without acknowledgements. The answer is a :class:`PullSource`."""

    info: ConsumerInfo


@dataclass(frozen=True, slots=True)
class Pull:
    """Send the next request of ``reader``, and wait once for messages. The answer is a list, perhaps empty."""

    source: PullSource
    reader: Flow[Any]


@dataclass(frozen=True, slots=True)
class ClosePull:
    """Unsubscribe and delete the consumer. If that fails, the server removes the consumer after its idle time."""

    source: PullSource
    info: ConsumerInfo


Step: TypeAlias = (
    Request | Sleep | ReadClock | Connect | AskMany | IngestAll | PublishEach | OpenPull | Pull | ClosePull
)

Procedure: TypeAlias = Steps[Step, T]


class Pieces(Protocol):
    """A source that is read piece by piece: :meth:`next` until it returns None, and :meth:`close` in any case."""

    def next(self) -> Procedure[list[Any] | None]: ...

    def close(self) -> Procedure[None]: ...


def meaning(error: JetSparkError, *, renews: bool) -> JetSparkError:
    """The error as a procedure should see it: if connections are replaced, a closed one is only a lost one."""
    if renews and isinstance(error, ConnectionClosed):
        return ConnectionLost(f"the connection was closed: {error}")
    if renews and isinstance(error.__cause__, ConnectionClosed):  # of a batch in doubt
        error.__cause__ = ConnectionLost(f"the connection was closed: {error.__cause__}")
    return error
