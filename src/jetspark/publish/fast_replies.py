"""Answers to a fast batch: their inbox, their parsing, and the resulting losses, denials and doubts. Pure.

Inbox. ``FastInbox`` is a subscription for one batch, and the id of the batch is part of its subject.

Parsing. All answers arrive in that inbox and are told apart by their content alone. Errors come in two forms: "err" is
about one message of an open batch, and an error without a type answers a message that never became part of it. The
final acknowledgement has no type, but the batch's id. ``read_reply`` checks only the form; the batch checks the numbers
(``check_range``).

Losses. The server reports a gap or a refusal once, when it notices, and neither a ping nor an acknowledgement repeats
the report. So a report into a lost session stays unknown: all messages that were sent and not acknowledged then, and
that no later report mentions, are in doubt, and mostly stored. A new leader, on the other hand, knows only the stored
messages: it reports as gaps the losses and refusals that the old one had reported. ``FastLosses`` keeps the reports.

Denials. The connection receives the denial of a message by its subject. ``FastDenials`` has the denials of the batch's
own subjects since it began.

Invariants: a message is in at most one of ``gaps``, ``errors`` and ``doubts``, and is reported once, however often the
server reports it. An end of the batch is not a message, and in none of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from jetspark.core.connection import Connection
from jetspark.core.machine import Reader
from jetspark.core.message import CoreMessage, is_no_responders
from jetspark.core.subscription import SubscriptionState
from jetspark.errors import PermissionDenied, ProtocolError, ServerError, UsageError
from jetspark.jetstream import wire
from jetspark.jetstream.info import PubAck
from jetspark.publish.fast_options import Refusal

__all__ = [
    "FLOW_ACK",
    "MAX_REPORTS",
    "FastDenials",
    "FastInbox",
    "FastLosses",
    "FastReply",
    "FlowAck",
    "GapReport",
    "NobodyListens",
    "PlainAck",
    "StrayError",
    "check_range",
    "number",
    "position_of",
    "read_reply",
]

# ---- inbox -----------------------------------------------------------------------------------------------------------


class FastInbox:
    """A subscription for one batch alone, so that it can be ended together with the batch."""

    def __init__(self, connection: Connection, owner: Reader, batch_id: str | None) -> None:
        """``owner`` is woken when an answer has arrived; ``batch_id`` is the caller's choice, if any."""
        self.batch_id = batch_id or ""
        """Empty before the first message, unless the caller chose an id."""
        self.subscription: SubscriptionState | None = None
        """None before the first message, and when the batch is over."""
        self._connection, self._owner = connection, owner
        self._given_id = batch_id

    def open(self) -> str:
        """Subscribe, replacing an earlier subscription; returns the prefix of reply subjects, with the batch's id."""
        self.close()
        prefix, batch_id = self._connection.names.new_batch()
        if self._given_id is not None:
            prefix, batch_id = f"{prefix}.{batch_id}", self._given_id
        # Bounded by the messages sent: each has at most one answer.
        self.subscription = self._connection.subscribe(
            f"{prefix}.{batch_id}.>", is_unbounded=True, is_inbox=True, reader=self._owner
        )
        self.batch_id = batch_id
        return f"{prefix}.{batch_id}"

    def close(self) -> None:
        """End the subscription; allowed at any time."""
        subscription, self.subscription = self.subscription, None
        if subscription is not None and not subscription.is_finished and not self._connection.is_closed:
            self._connection.unsubscribe(subscription)


# ---- parsing ---------------------------------------------------------------------------------------------------------


FLOW_ACK = re.compile(rb'\{"type":"ack","seq":([0-9]{1,19}),"msgs":([0-9]{1,9})\}')
"""The server's form of an acknowledgement; nearly every answer has it, and is parsed without JSON."""


class FlowAck(NamedTuple):
    """The server has processed all messages up to a sequence; the next acknowledgement comes after ``msgs_per_ack``."""

    sequence: int
    msgs_per_ack: int


class GapReport(NamedTuple):
    """These sequences did not reach the batch."""

    missing: range


class NobodyListens(NamedTuple):
    """No stream received the message with this sequence and :class:`~jetspark.publish.fast_sending.FrameKind`."""

    sequence: int
    operation: int


class StrayError(NamedTuple):
    """An error outside of a batch's course: it was never opened, is gone, or does not have this message."""

    sequence: int
    operation: int
    error: ServerError


class PlainAck(NamedTuple):
    """A stream without batch support stored the message as a plain one."""

    stream: str


FastReply: TypeAlias = FlowAck | GapReport | NobodyListens | StrayError | PlainAck | Refusal | PubAck


def read_reply(message: CoreMessage) -> FastReply:
    """
    Raises:
        JetSparkError: The message is not an answer to a fast batch.
    """
    plain = FLOW_ACK.fullmatch(message.data)
    if plain is not None:
        return FlowAck(int(plain[1]), int(plain[2]))
    if is_no_responders(message):
        return NobodyListens(*position_of(message.subject))
    reply = wire.read_object(message.data)
    error = wire.error_of(reply)
    match reply.get("type"):
        case "ack":
            return FlowAck(number(reply, "seq"), number(reply, "msgs"))
        case "gap":
            # "last_seq" is the first missing sequence, and "seq" the received one; for a ping, one above it.
            return GapReport(range(number(reply, "last_seq"), number(reply, "seq")))
        case "err" if error is not None:
            return Refusal(number(reply, "seq"), error)
        case _ if error is not None:
            return StrayError(*position_of(message.subject), error)
        case _ if isinstance(reply.get("batch"), str):
            return wire.decode(PubAck, reply)
        case None if isinstance(reply.get("seq"), int):
            return PlainAck(str(reply.get("stream")))
    raise no_answer(message)


def no_answer(message: CoreMessage) -> ProtocolError:
    return ProtocolError(f"not an answer to a fast batch: {message.data[:80]!r}")


def position_of(subject: str) -> tuple[int, int]:
    """Sequence and operation of the message with this reply subject; zeros for a subject of another form."""
    parts = subject.rsplit(".", 3)
    if len(parts) == 4 and parts[1].isdecimal() and parts[2].isdecimal():
        return int(parts[1]), int(parts[2])
    return 0, 0


def number(reply: dict[str, Any], name: str) -> int:
    """A number in an answer.

    Raises:
        ProtocolError: The answer has no number of that name.
    """
    value = reply.get(name)
    if type(value) is not int:  # excludes bool
        raise ProtocolError(f"an answer to a fast batch without {name!r}: {reply}")
    return value


def check_range(answer: str, sequence: int, low: int, high: int) -> None:
    """Check that an answer is about messages that were sent.

    Raises:
        ProtocolError: It is not. Such a number would open the window without end, or count messages as stored that
            were never sent.
    """
    if not low <= sequence <= high:
        raise ProtocolError(f"{answer} of a fast batch for sequence {sequence}: expected {low} to {high}")


# ---- losses ----------------------------------------------------------------------------------------------------------


# Exact reports need memory. A batch with more separate losses than this fails.
MAX_REPORTS = 100_000


class FastLosses:
    """The losses of one batch."""

    def __init__(self) -> None:
        self.gaps: list[range] = []
        self.errors: list[Refusal] = []
        self.news: list[range | Refusal] = []
        """Gaps and errors not yet passed to the program's callbacks."""
        self.ends: set[int] = set()
        """Sequences of ends of the batch, which are not messages."""
        self._refused: set[int] = set()
        """Sequences of ``errors``."""
        self._gaps_end = 0
        """The end of the highest gap; most sequences to look up are above it, which needs no search."""
        self._unheard: list[range] = []
        """The unacknowledged sequences at each loss of a session."""

    def add_gap(self, missing: range, sent: int) -> None:
        """Record a gap that the server reports; ``sent`` is the highest sequence that it can have received.

        Raises:
            UsageError: There are too many losses to keep.
        """
        # A message too large for the stream is refused, never reaches the batch, and is in the next gap, too.
        refused = self._refused.intersection(range(missing.start, min(missing.stop, sent + 1)))
        known = [range(sequence, sequence + 1) for sequence in (*self.ends, *refused)]
        if missing.start < self._gaps_end:
            known += self.gaps  # a new leader repeats the reports of the old one
        self._gaps_end = max(self._gaps_end, missing.stop)
        for part in _without(missing, known):
            self._report(self.gaps, part)

    def add_refusal(self, refusal: Refusal) -> None:
        """Record a refused message.

        Raises:
            UsageError: There are too many losses to keep.
        """
        sequence = refusal.sequence
        is_in_gap = sequence < self._gaps_end and any(sequence in each for each in self.gaps)
        if sequence not in self._refused and sequence not in self.ends and not is_in_gap:
            self._refused.add(sequence)
            self._report(self.errors, refusal)

    def _report(self, reports: list[Any], entry: range | Refusal) -> None:
        if len(reports) >= MAX_REPORTS:
            raise UsageError(f"more than {MAX_REPORTS} losses in one batch")
        reports.append(entry)
        self.news.append(entry)

    def lose_session(self, acknowledged: int, sent: int) -> None:
        """Put unacknowledged messages in doubt: reports about them may be lost with the session."""
        first = max(acknowledged + 1, self._unheard[-1].stop if self._unheard else 1)
        if first <= sent:
            self._unheard.append(range(first, sent + 1))

    def begin_again(self) -> None:
        """Clear the doubts: nothing was stored, and sequences start again."""
        self._unheard.clear()

    # ---- facts -------------------------------------------------------------------------------------------------

    @property
    def doubts(self) -> list[range]:
        """The sequences on their way when a session was lost, without the ones reported since."""
        known = self._reported() if self._unheard else []
        return [part for unheard in self._unheard for part in _without(unheard, known)]

    def stored(self, last: int) -> int:
        """Number of messages up to this sequence that are stored for sure, once the server has processed all of
        them."""
        covered = [*self._reported(), *self._unheard]
        return sum(map(len, _without(range(1, last + 1), covered)))

    def explain(self, sequences: range) -> bool:
        """True if each of these sequences was reported, or is not a message."""
        return not _without(sequences, self._reported())

    def _reported(self) -> list[range]:
        """Sequences that are certainly not stored, or not messages."""
        return [*self.gaps, *(range(sequence, sequence + 1) for sequence in (*self._refused, *self.ends))]


def _without(numbers: range, others: Iterable[range]) -> list[range]:
    """The parts of a range outside of the other ranges."""
    parts, start = [], numbers.start
    for other in sorted(others, key=lambda each: each.start):
        if other.stop > start and other.start < numbers.stop:
            parts.append(range(start, other.start))
            start = max(start, other.stop)
    parts.append(range(start, numbers.stop))
    return [part for part in parts if part]


# ---- denials ---------------------------------------------------------------------------------------------------------


class FastDenials:
    """The denials of a batch's own subjects since it began."""

    def __init__(self, connection: Connection, publishes_to: Callable[[str], bool]) -> None:
        """``publishes_to`` is true for subjects of the batch's messages."""
        self.publishes_to = publishes_to
        self.has_asked = False
        """A message may be missing, and the server was asked for the received ones."""
        self._connection, self._denials = connection, connection.denials
        self._before = self._seen = 0
        """The connection's number of denials at the start of the batch, and at the last call of :meth:`news`."""
        self._denials.watch(self)

    def begin(self) -> None:
        """Start counting, before the first message is sent."""
        self._before = self._seen = self._denials.count
        self.has_asked = False

    def end(self) -> None:
        """Stop claiming denials: the batch is over, and raises no denial of a later message."""
        self._connection.leave_denials(self, self._before)

    def first(self) -> PermissionDenied | None:
        """The first denial; its message may have been published before the batch."""
        return self._denials.since(self._before, self.publishes_to)

    def news(self) -> PermissionDenied | None:
        """The first denial since the last call."""
        seen, self._seen = self._seen, self._denials.count
        return self._denials.since(seen, self.publishes_to)
