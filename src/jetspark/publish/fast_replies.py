"""Answers to a fast batch: their inbox, what each one says, and what it leaves lost, denied or in doubt. Pure.

Arriving. ``FastInbox`` is a subscription for one batch, and the id of the batch is part of its subject.

Reading. Everything arrives in that inbox and is told apart by its content alone. Errors come in two shapes: "err" is
about one message of a batch that is open, and an error without a type is the answer to a message that never became
part of it. The final acknowledgement has no type, but the batch's id. ``read_reply`` checks the shape only; the batch
decides whether the numbers can be true (``check_range``).

Losses. The server reports a gap or a refusal once, at the moment it notices, and neither a ping nor an acknowledgement
brings the report again. So a report that went into a lost session stays unknown: all that was sent and not
acknowledged then, and that no later report is about, is in doubt, and mostly stored. A new leader, on the other hand,
knows what is stored and nothing else: it reports as a gap what the old one had reported or refused. ``FastLosses``
keeps the reports.

Denials. The connection hears of a denied message by its subject. ``FastDenials`` has those of the batch's own subjects
since it began.

Invariants: a message is in at most one of ``gaps``, ``errors`` and ``doubts``, and is reported once, however often the
server reports it. An end of the batch is no message, and in none of them.
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
    "place_of",
    "read_reply",
]

# ---- arriving --------------------------------------------------------------------------------------------------------


class FastInbox:
    """A subscription for one batch alone, so that interest can be dropped as soon as the batch is over."""

    def __init__(self, machine: Connection, owner: Reader, batch_id: str | None) -> None:
        """``owner`` is woken when something arrived; ``batch_id`` is the caller's choice, if there is one."""
        self.batch_id = batch_id or ""
        """Empty before the first message, unless the caller gave one."""
        self.subscription: SubscriptionState | None = None
        """None before the first message, and when the batch is over."""
        self._machine, self._owner = machine, owner
        self._given_id = batch_id

    def open(self) -> str:
        """Subscribe, anew if need be; returns the prefix of reply subjects, which ends with the batch's id."""
        self.close()
        prefix, batch_id = self._machine.names.new_batch()
        if self._given_id is not None:
            prefix, batch_id = f"{prefix}.{batch_id}", self._given_id
        # No more can arrive than was asked for: an answer a message at the very most.
        self.subscription = self._machine.subscribe(
            f"{prefix}.{batch_id}.>", is_unbounded=True, is_inbox=True, reader=self._owner
        )
        self.batch_id = batch_id
        return f"{prefix}.{batch_id}"

    def close(self) -> None:
        """Drop interest; right at any time."""
        subscription, self.subscription = self.subscription, None
        if subscription is not None and not subscription.is_finished and not self._machine.is_closed:
            self._machine.unsubscribe(subscription)


# ---- reading ---------------------------------------------------------------------------------------------------------


FLOW_ACK = re.compile(rb'\{"type":"ack","seq":([0-9]{1,19}),"msgs":([0-9]{1,9})\}')
"""An acknowledgement as the server writes it, and nearly every answer is one: read without JSON."""


class FlowAck(NamedTuple):
    """The server is done with all up to a sequence, and acknowledges after that many messages from now on."""

    sequence: int
    msgs_per_ack: int


class GapReport(NamedTuple):
    """These did not reach the batch."""

    missing: range


class NobodyListens(NamedTuple):
    """No stream took the message with this sequence and this :class:`~jetspark.publish.fast_sending.FrameKind`."""

    sequence: int
    operation: int


class StrayError(NamedTuple):
    """An error that is not about the batch's course: it never opened, is gone, or does not have this message."""

    sequence: int
    operation: int
    error: ServerError


class PlainAck(NamedTuple):
    """A stream stored the message like any other: it knows no batches."""

    stream: str


FastReply: TypeAlias = FlowAck | GapReport | NobodyListens | StrayError | PlainAck | Refusal | PubAck


def read_reply(message: CoreMessage) -> FastReply:
    """
    Raises:
        JetSparkError: It is no answer to a fast batch.
    """
    plain = FLOW_ACK.fullmatch(message.data)
    if plain is not None:
        return FlowAck(int(plain[1]), int(plain[2]))
    if is_no_responders(message):
        return NobodyListens(*place_of(message.subject))
    reply = wire.read_object(message.data)
    error = wire.error_of(reply)
    match reply.get("type"):
        case "ack":
            return FlowAck(number(reply, "seq"), number(reply, "msgs"))
        case "gap":
            # "last_seq" is the first that is missing, and "seq" the one that was received; for a ping, one above it.
            return GapReport(range(number(reply, "last_seq"), number(reply, "seq")))
        case "err" if error is not None:
            return Refusal(number(reply, "seq"), error)
        case _ if error is not None:
            return StrayError(*place_of(message.subject), error)
        case _ if isinstance(reply.get("batch"), str):
            return wire.decode(PubAck, reply)
        case None if isinstance(reply.get("seq"), int):
            return PlainAck(str(reply.get("stream")))
    raise no_answer(message)


def no_answer(message: CoreMessage) -> ProtocolError:
    return ProtocolError(f"an answer to a fast batch that is none: {message.data[:80]!r}")


def place_of(subject: str) -> tuple[int, int]:
    """Sequence and operation of the message whose reply subject this is; zeros if it is none of ours."""
    parts = subject.rsplit(".", 3)
    if len(parts) == 4 and parts[1].isdecimal() and parts[2].isdecimal():
        return int(parts[1]), int(parts[2])
    return 0, 0


def number(reply: dict[str, Any], name: str) -> int:
    """A number in an answer.

    Raises:
        ProtocolError: There is none of that name.
    """
    value = reply.get(name)
    if type(value) is not int:  # a bool is none, either
        raise ProtocolError(f"an answer to a fast batch without {name!r}: {reply}")
    return value


def check_range(answer: str, sequence: int, low: int, high: int) -> None:
    """Whether an answer is about messages that were sent.

    Raises:
        ProtocolError: It is not. Counting with such a number would open the window for ever, or take for stored what
            was never sent.
    """
    if not low <= sequence <= high:
        raise ProtocolError(f"{answer} of a fast batch for sequence {sequence}: expected {low} to {high}")


# ---- losses ----------------------------------------------------------------------------------------------------------


# Exact reports need memory. A batch with more separate losses than this has no use for going on.
MAX_REPORTS = 100_000


class FastLosses:
    """Of one batch."""

    def __init__(self) -> None:
        self.gaps: list[range] = []
        self.errors: list[Refusal] = []
        self.news: list[range | Refusal] = []
        """Gaps and errors that nobody was told yet."""
        self.ends: set[int] = set()
        """Sequences of ours that are no messages."""
        self._refused: set[int] = set()
        """Sequences of ``errors``."""
        self._gaps_end = 0
        """No gap reaches this sequence; most are looked for above it, which needs no search."""
        self._unheard: list[range] = []
        """What was under way each time a session was lost."""

    def add_gap(self, missing: range, sent: int) -> None:
        """The server reports these as missing; ``sent`` is the highest that it can have had.

        Raises:
            UsageError: There are too many losses to remember.
        """
        # A message too large for the stream is refused, never reaches the batch, and is in the next gap, too.
        refused = self._refused.intersection(range(missing.start, min(missing.stop, sent + 1)))
        known = [range(sequence, sequence + 1) for sequence in (*self.ends, *refused)]
        if missing.start < self._gaps_end:
            known += self.gaps  # a new leader repeats what the old one had said
        self._gaps_end = max(self._gaps_end, missing.stop)
        for part in _without(missing, known):
            self._report(self.gaps, part)

    def add_refusal(self, refusal: Refusal) -> None:
        """The server refused a message.

        Raises:
            UsageError: There are too many losses to remember.
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
        """What the server says of those sent and not acknowledged may be lost with the session."""
        first = max(acknowledged + 1, self._unheard[-1].stop if self._unheard else 1)
        if first <= sent:
            self._unheard.append(range(first, sent + 1))

    def begin_again(self) -> None:
        """Nothing was stored, and sequences are given anew: there is no doubt about those of before."""
        self._unheard.clear()

    # ---- facts -------------------------------------------------------------------------------------------------

    @property
    def doubts(self) -> list[range]:
        """Under way when a session was lost, and not reported since."""
        known = self._reported() if self._unheard else []
        return [part for unheard in self._unheard for part in _without(unheard, known)]

    def stored(self, last: int) -> int:
        """How many messages up to this sequence are stored for sure, once the server is done with all of them."""
        covered = [*self._reported(), *self._unheard]
        return sum(map(len, _without(range(1, last + 1), covered)))

    def explain(self, sequences: range) -> bool:
        """Whether each of these was reported, or is no message."""
        return not _without(sequences, self._reported())

    def _reported(self) -> list[range]:
        """Sequences that are surely not stored, or no messages."""
        return [*self.gaps, *(range(sequence, sequence + 1) for sequence in (*self._refused, *self.ends))]


def _without(numbers: range, others: Iterable[range]) -> list[range]:
    """The parts of a range that are in none of the others."""
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
        """``publishes_to`` tells whether the batch has sent messages to a subject."""
        self.publishes_to = publishes_to
        self.has_asked = False
        """A message may be missing, and the server was asked which ones it has."""
        self._connection, self._denials = connection, connection.denials
        self._before = self._seen = 0
        """How many denials there were on the connection before the batch, and when they were last looked at."""
        self._denials.watch(self)

    def begin(self) -> None:
        """The first message is about to be sent."""
        self._before = self._seen = self._denials.count
        self.has_asked = False

    def end(self) -> None:
        """The batch is over, and raises no denial of a message that is published later."""
        self._connection.leave_denials(self, self._before)

    def first(self) -> PermissionDenied | None:
        """The first one; the message may have been published before the batch."""
        return self._denials.since(self._before, self.publishes_to)

    def news(self) -> PermissionDenied | None:
        """The first one since the last look."""
        seen, self._seen = self._seen, self._denials.count
        return self._denials.since(seen, self.publishes_to)
