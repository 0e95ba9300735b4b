"""How far a reader is behind: what to count on the server, and what the counts mean. Pure.

A reader is behind by the messages that it has not processed and that it will process without help. They are in several
places, and each place is a :class:`Part`: a consumer has messages that it has not delivered and messages that are
delivered and not acknowledged; a handler also has scheduled retries, and so on.

A measurement is a generator. It yields a :class:`Probe` and receives a :class:`Counted`, or None where the probe could
not be answered, for lack of a right for instance. One probe is one direct get: the server answers with the first
message on a filter from a sequence on, and with the number of messages behind it.

Two numbers of the server look like lag and are not. The last sequence of the stream minus the ack floor counts
messages that the consumer's filter excludes and messages that were deleted, and the floor stays behind a message that
``max_deliver`` has given up. And ``num_pending`` leaves out messages that are delivered and not acknowledged. For a
handler that reads the whole stream it also counts events of other types.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

from jetspark.app.handlers.inheritance import filters_of
from jetspark.core.headers import last_value
from jetspark.core.numbers import UINT64
from jetspark.core.subjects import is_subset
from jetspark.errors import MessageNotFound
from jetspark.jetstream.info import ConsumerInfo, StoredMessage, StreamInfo
from jetspark.jetstream.operations import Api, Operation, direct_get
from jetspark.jetstream.wire import number_in, time_text
from jetspark.state.scan import messages_from

__all__ = [
    "NOTHING",
    "Counted",
    "HandlerSources",
    "HandlerWaits",
    "LagSource",
    "MeasuredLag",
    "Part",
    "PositionReader",
    "Probe",
    "Probing",
    "ask",
    "measure_consumer",
    "measure_handler",
    "measure_reader",
    "waits_of",
]

T = TypeVar("T")


class Probe(NamedTuple):
    """A question about the messages of a stream on a filter, from a sequence on."""

    stream: str
    sequence: int
    subject: str
    is_counted: bool = True
    """False if only the first message matters. The number takes a consumer where direct get is not allowed."""


class Counted(NamedTuple):
    """The answer to a probe."""

    messages: int | None = 0
    """None if they were not counted."""
    first: int = 0
    """Sequence of the first message; 0 without messages."""
    stored: datetime.datetime | None = None
    """When the first message was stored."""
    subject: str = ""
    """The subject of the first message."""

    def joined(self, other: Counted) -> Counted:
        """The answer for both filters, which have no subject in common."""
        messages = None if self.messages is None or other.messages is None else self.messages + other.messages
        known = [each for each in (self, other) if each.first]
        earliest = min(known, key=lambda each: each.first, default=self)
        return earliest._replace(messages=messages)


Probing: TypeAlias = Generator[Probe, Counted | None, T]

NOTHING = Counted()


class Part(NamedTuple):
    """Messages in one of the places where they wait."""

    messages: int = 0
    oldest: datetime.datetime | None = None
    """When the oldest of them was stored; None if it is unknown."""
    first: int = 0
    """Sequence of the oldest in its stream; 0 if unknown."""

    def joined(self, other: Part) -> Part:
        """Both together. The age of the oldest is unknown if that of either is."""
        if not self.messages or not other.messages:
            return self if self.messages else other
        if self.oldest is None or other.oldest is None:
            return Part(self.messages + other.messages)
        oldest = self if self.oldest <= other.oldest else other
        return Part(self.messages + other.messages, oldest.oldest, oldest.first)


@dataclass(slots=True)
class MeasuredLag:
    """The parts by which a reader is behind, and where it is."""

    parts: dict[str, Part] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    position: int = 0
    """The last sequence that was read."""
    progress: int = 0
    """Grows by one or more with each message that is read, and not with messages that are removed."""
    identity: tuple[str, ...] = ()
    """Another stream, consumer or bucket has another identity: its numbers do not continue the earlier ones."""
    is_paused: bool = False

    def add(self, name: str, part: Part) -> None:
        self.parts[name] = self.parts.get(name, Part()).joined(part)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def messages(self) -> int:
        return sum(part.messages for part in self.parts.values())

    @property
    def has_ages(self) -> bool:
        return all(part.oldest is not None for part in self.parts.values() if part.messages)

    @property
    def underway(self) -> int:
        """Messages that can be done without progress: they were read before."""
        return sum(part.messages for name, part in self.parts.items() if name != "waiting")


class LagSource(NamedTuple):
    """A reader to be measured."""

    kind: str
    name: str
    stream: str
    measurement: Probing[MeasuredLag] | str
    """The reason, if its lag is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionReader:
    """A reader that keeps its own position: an archive, a Spark query, or a program of yours."""

    kind: str
    name: str
    stream: str
    next: int
    """The first sequence that it has not read."""
    created: str | None = None
    """Creation time of the stream that it reads; None to accept any stream of this name."""
    filters: tuple[str, ...] = ()
    """The subjects that it reads; empty for the whole stream."""
    notes: tuple[str, ...] = ()
    """Remarks for the report."""


class HandlerWaits(NamedTuple):
    """Events of a handler that left its consumer and are not done. Each of them is in one of these."""

    scheduled: Part = Part()
    """They have a scheduled retry."""
    behind_retry: Part = Part()
    """They have a dead letter, and follow by themselves: an earlier event of their key is retried or redriven."""
    dead_letters: Part = Part()
    """They wait until an operator redrives or discards an open dead letter: their own, or an earlier one of their
    key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSources:
    """The sources of a handler's lag, as they were read."""

    events: Sequence[ConsumerInfo]
    """Its consumer, or those of its partitions."""
    filters: Sequence[str] = ()
    """The subjects of its events: its consumer may deliver others as well."""
    retries: Sequence[tuple[ConsumerInfo, str]] = ()
    """Its consumers of the retry stream, each with the subject of the retries that are due."""
    advisories: ConsumerInfo | None = None
    copied: tuple[str, int] | None = None
    """With partitions: the application's stream, and the last sequence of it that was copied."""
    waits: HandlerWaits = field(default_factory=lambda: HandlerWaits())
    notes: Sequence[str] = ()


def ask(api: Api, probe: Probe, *, is_direct: bool) -> Operation[Counted]:
    """Answer a probe.

    Args:
        is_direct: The stream allows direct gets. Others take one request for the first message, and a consumer that
            exists for a moment for the number.
    """
    query = {"seq": probe.sequence, "next_by_subj": probe.subject}
    try:
        if not is_direct:
            stored = yield from api.get_message(probe.stream, query, direct=False)
            filters = [probe.subject]
            counting = messages_from(api, probe.stream, probe.sequence, filters) if probe.is_counted else None
            messages = (yield from counting) if counting else None
            return Counted(messages, stored.sequence, stored.timestamp, stored.subject)
        answer = yield direct_get(api.prefix, probe.stream, query | {"batch": 1})
        stored = StoredMessage.from_direct(answer)
    except MessageNotFound:
        return NOTHING
    behind = number_in(last_value(answer.raw_headers, "Nats-Num-Pending") or "0")
    return Counted(behind + 1, stored.sequence, stored.timestamp, stored.subject)


def measure_reader(reader: PositionReader, info: StreamInfo) -> Probing[MeasuredLag]:
    """The lag of a reader that keeps its own position."""
    created = time_text(info.created) if info.created is not None else ""
    found = MeasuredLag(notes=list(reader.notes), position=reader.next - 1, identity=(reader.stream, created))
    start = reader.next
    if reader.created is not None and _moment(reader.created) != _moment(created):
        found.note(f"its position is of stream {reader.stream} as it was created at {reader.created}; all is counted")
        start, found.position = 1, 0
    found.progress = found.position
    if start > info.state.last_sequence:
        found.add("waiting", Part())
        return found
    counted = yield from _count(reader.stream, start, reader.filters or (">",))
    if counted is None or counted.messages is None:
        first = max(start, info.state.first_sequence)
        found.add("waiting", Part(max(0, info.state.last_sequence + 1 - first)))
        found.note("counted by sequences, which is an upper bound")
    else:
        found.add("waiting", Part(counted.messages, counted.stored, counted.first))
    return found


def _origin_time(subject: str) -> datetime.datetime | None:
    """When the event of a retry or dead letter was stored: the subject ends with its origin."""
    last = subject.rsplit(".", 1)[-1]
    return datetime.datetime.fromtimestamp(int(last) / 1e6, datetime.UTC) if last.isdecimal() else None


def measure_consumer(
    info: ConsumerInfo, filters: Sequence[str] = (), *, is_of_retries: bool = False
) -> Probing[MeasuredLag]:
    """The lag of one consumer.

    Args:
        is_of_retries: The age of a message is that of the event in it.
        filters: Count only messages on these subjects. If the consumer delivers others as well, messages in flight are
            an upper bound: the server does not tell which of those it has delivered are unacknowledged.
    """
    stream, reached, floor = info.stream_name, info.delivered.stream_sequence, info.ack_floor.stream_sequence
    own = filters_of(info.config)
    wanted = tuple(filters) or own
    is_exact = all(any(is_subset(each, other) for other in wanted) for each in own)
    found = MeasuredLag(
        position=reached,
        progress=info.delivered.consumer_sequence,
        identity=(stream, info.name, str(info.created)),
        is_paused=info.is_paused,
    )
    found.add("waiting", Part())
    found.add("in_flight", Part())

    def part(messages: int, counted: Counted) -> Part:
        oldest = _origin_time(counted.subject) if is_of_retries else counted.stored
        return Part(messages, oldest, counted.first)

    is_stuck = (info.config.max_deliver or 0) > 0 and floor < reached and not info.ack_pending
    if not info.pending and not info.ack_pending and not is_stuck:
        return found
    # The later range first: a message that is stored between the two answers does not seem to be in flight.
    later = yield from _count(stream, reached + 1, wanted, is_counted=not is_exact)
    if later is None or (later.messages is None and not is_exact):
        found.add("waiting", Part(info.pending))
        if info.pending and not is_exact:
            found.note("other messages of the stream are counted too")
    elif later.first and info.pending:
        found.add("waiting", part(info.pending if is_exact else later.messages or 0, later))
    if not info.ack_pending and not is_stuck:
        return found
    sooner = yield from _count(stream, floor + 1, wanted, is_counted=not is_exact)
    if is_stuck:
        if sooner is not None and 0 < sooner.first <= reached:
            found.note(f"max_deliver={info.config.max_deliver}: the server gave up messages from {sooner.first} on")
        return found
    if sooner is None or later is None:
        found.add("in_flight", Part(info.ack_pending))
    elif sooner.first and sooner.first <= reached:
        between = info.ack_pending
        if sooner.messages is not None and later.messages is not None:
            between = min(between, sooner.messages - later.messages)
        found.add("in_flight", part(max(0, between), sooner))
    return found


def measure_handler(reading: HandlerSources) -> Probing[MeasuredLag]:
    """The lag of a handler, with all its consumers and its retries.

    The parts are disjoint as long as no event changes its place. While one does, it may be counted in both places.
    """
    found = MeasuredLag(notes=list(reading.notes))
    for info in reading.events:
        part = yield from measure_consumer(info, () if reading.copied else reading.filters)
        found.position += part.position
        found.progress += part.progress
        found.identity += part.identity
        found.is_paused |= part.is_paused
        _take(found, part, {"waiting": "waiting", "in_flight": "in_flight"})
    if reading.copied is not None:
        stream, sequence = reading.copied
        counted = yield from _count(stream, sequence + 1, reading.filters)
        if counted is None or counted.messages is None:
            found.note(f"events of {stream} that are not copied into the partitions yet could not be counted")
        else:
            found.add("uncopied", Part(counted.messages, counted.stored, counted.first))
    for info, subject in reading.retries:
        _take(
            found,
            (yield from measure_consumer(info, [subject], is_of_retries=True)),
            {"waiting": "due", "in_flight": "due"},
        )
    if reading.advisories is not None:
        part = yield from measure_consumer(reading.advisories)
        _take(found, part, {"waiting": "given_up", "in_flight": "given_up"})
    found.add("scheduled", reading.waits.scheduled)
    found.add("behind_retry", reading.waits.behind_retry)
    return found


def waits_of(scheduled: Iterable[str], letters: Iterable[tuple[str, bool]]) -> dict[str, HandlerWaits]:
    """The events that wait outside of the consumers, by handler.

    A dead letter that was redriven and failed with a retry is still there. It counts as the retry.

    Args:
        scheduled: The subjects of the scheduled retries: ``retry.<app>.<handler>.wait.<origin>``.
        letters: The subjects of the dead letters, ``dlq.<app>.<handler>.<key>.<origin>``, each with True if it is open.
    """
    retried = {_handler_and_origin(subject): subject for subject in scheduled}
    left = [(subject, is_open) for subject, is_open in letters if _handler_and_origin(subject) not in retried]
    stuck = {_handler_and_key(subject) for subject, is_open in left if is_open}
    found = defaultdict[str, HandlerWaits](HandlerWaits)
    for (handler, _), subject in retried.items():
        waits = found[handler]
        found[handler] = waits._replace(scheduled=waits.scheduled.joined(Part(1, _origin_time(subject))))
    for subject, _ in left:
        (handler, _), part = _handler_and_key(subject), Part(1, _origin_time(subject))
        waits = found[handler]
        if _handler_and_key(subject) in stuck:
            found[handler] = waits._replace(dead_letters=waits.dead_letters.joined(part))
        else:
            found[handler] = waits._replace(behind_retry=waits.behind_retry.joined(part))
    return dict(found)


def _handler_and_origin(subject: str) -> tuple[str, str]:
    handler, _, origin = subject.split(".", 4)[2:]
    return handler, origin


def _handler_and_key(subject: str) -> tuple[str, str]:
    handler, key = subject.split(".", 4)[2:4]
    return handler, key


def _take(found: MeasuredLag, part: MeasuredLag, names: Mapping[str, str]) -> None:
    for name, each in part.parts.items():
        found.add(names[name], each)
    for note in part.notes:
        found.note(note)


def _count(stream: str, sequence: int, filters: Sequence[str], *, is_counted: bool = True) -> Probing[Counted | None]:
    """Messages on any of some filters; None if a probe was not answered."""
    found = NOTHING
    unique = list(dict.fromkeys(filters))
    for subject in unique:
        if sequence > UINT64 or any(subject != other and is_subset(subject, other) for other in unique):
            continue
        answer = yield Probe(stream, sequence, subject, is_counted)
        if answer is None:
            return None
        found = found.joined(answer)
    return found


def _moment(text: str) -> datetime.datetime | str:
    try:
        return datetime.datetime.fromisoformat(text)
    except ValueError:
        return text
