"""What a reader's lag is, counted by brute force over a stream in memory."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspark.app.lag.measures import (
    NOTHING,
    Counted,
    HandlerSources,
    HandlerWaits,
    MeasuredLag,
    Part,
    PositionReader,
    Probe,
    Probing,
    measure_consumer,
    measure_handler,
    measure_reader,
    waits_of,
)
from jetspark.core.subjects import matches
from jetspark.jetstream.config import ConsumerConfig, StreamConfig
from jetspark.jetstream.info import ConsumerInfo, SequencePair, StreamInfo, StreamState

T = TypeVar("T")

START = datetime.datetime(2026, 3, 20, tzinfo=datetime.UTC)
CREATED = "2026-03-20T00:00:00Z"


def time_of(sequence: int) -> datetime.datetime:
    return START + datetime.timedelta(seconds=sequence)


@dataclass
class Stored:
    """A stream: subjects by sequence, deleted ones left out."""

    subjects: dict[int, str] = field(default_factory=dict)
    last: int = 0
    name: str = "S"
    asked: list[Probe] = field(default_factory=list)

    def of(self, filters: Sequence[str]) -> list[int]:
        return [number for number, subject in self.subjects.items() if any(matches(each, subject) for each in filters)]

    def answer(self, probe: Probe) -> Counted:
        assert probe.stream == self.name
        self.asked.append(probe)
        found = [number for number in self.of([probe.subject]) if number >= probe.sequence]
        return Counted(len(found), min(found), time_of(min(found)), self.subjects[min(found)]) if found else NOTHING

    @property
    def info(self) -> StreamInfo:
        state = StreamState(
            messages=len(self.subjects),
            first_sequence=min(self.subjects, default=self.last + 1),
            last_sequence=self.last,
        )
        return StreamInfo(config=StreamConfig(name=self.name), state=state, created=START)


def run(stored: Stored | dict[str, Stored], procedure: Probing[T], *, answers: bool = True) -> T:
    streams = stored if isinstance(stored, dict) else {stored.name: stored}
    try:
        probe = next(procedure)
        while True:
            probe = procedure.send(streams[probe.stream].answer(probe) if answers else None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def consumer(
    stored: Stored, filters: Sequence[str], delivered: int, unacknowledged: set[int], **config: int
) -> ConsumerInfo:
    """A consumer as nats-server describes it: the floor is before its lowest message in flight."""
    mine = stored.of(filters)
    pending = [number for number in mine if number in unacknowledged]
    return ConsumerInfo(
        stream_name=stored.name,
        name="c",
        config=ConsumerConfig(durable_name="c", filter_subjects=list(filters), **config),  # type: ignore[arg-type]
        delivered=SequencePair(stream_sequence=delivered),
        ack_floor=SequencePair(stream_sequence=min(pending) - 1 if pending else delivered),
        ack_pending=len(pending),
        pending=sum(number > delivered for number in mine),
    )


def parts(measured: MeasuredLag) -> dict[str, int]:
    return {name: part.messages for name, part in measured.parts.items() if part.messages}


SUBJECTS = ["a.x", "a.y", "b.x", "b.y", "c"]


@st.composite
def _streams(draw: st.DrawFn) -> Stored:
    subjects = draw(st.lists(st.sampled_from(SUBJECTS), max_size=30))
    deleted = draw(st.sets(st.integers(1, 30), max_size=20))
    stored = {number: each for number, each in enumerate(subjects, 1) if number not in deleted}
    return Stored(stored, len(subjects))


@given(_streams(), st.data())
def test_a_consumer_is_behind_by_what_is_not_delivered_and_what_is_not_acknowledged(
    stored: Stored, data: st.DataObject
) -> None:
    filters = data.draw(st.sampled_from([("a.*",), ("a.x", "b.*"), (">",), ("c",), ("a.x", "a.y")]))
    delivered = data.draw(st.integers(0, stored.last))
    mine = stored.of(filters)
    held = data.draw(st.sets(st.sampled_from([number for number in mine if number <= delivered] or [0])))
    measured = run(stored, measure_consumer(consumer(stored, filters, delivered, held)))

    behind = [number for number in mine if number > delivered or number in held]
    assert measured.messages == len(behind)
    oldest = [part.oldest for part in measured.parts.values() if part.messages]
    assert min(filter(None, oldest), default=None) == (time_of(min(behind)) if behind else None)
    assert measured.position == delivered


@given(_streams(), st.data())
def test_a_handler_that_reads_the_whole_stream_counts_its_own_events(stored: Stored, data: st.DataObject) -> None:
    events = data.draw(st.sampled_from([("a.*",), ("a.x", "b.*"), ("a.*", "a.x")]))
    delivered = data.draw(st.integers(0, stored.last))
    whole = [number for number in stored.subjects if number <= delivered]
    held = data.draw(st.sets(st.sampled_from(whole or [0])))
    info = consumer(stored, (">",), delivered, held)
    measured = run(stored, measure_handler(HandlerSources(events=[info], filters=events)))

    mine = stored.of(events)
    assert measured.parts["waiting"].messages == sum(number > delivered for number in mine)
    # Which of the delivered messages are unacknowledged is not known: the bound is tight if all of them are.
    truth = len(held.intersection(mine))
    in_flight = measured.parts["in_flight"].messages
    assert truth <= in_flight <= len(held)
    if held == {number for number in whole if number >= min(held, default=0)}:
        assert in_flight == truth


@given(_streams(), st.data())
def test_a_reader_is_behind_by_what_comes_from_its_position_on(stored: Stored, data: st.DataObject) -> None:
    filters = data.draw(st.sampled_from([(), ("a.*",), ("a.x", "b.*"), ("c", "b.y")]))
    start = data.draw(st.integers(1, stored.last + 1))
    reader = PositionReader(kind="archive", name="r", stream="S", next=start, created=CREATED, filters=filters)
    measured = run(stored, measure_reader(reader, stored.info))
    behind = [number for number in stored.of(filters or (">",)) if number >= start]
    found = measured.parts["waiting"]
    assert (found.messages, found.oldest) == (len(behind), time_of(behind[0]) if behind else None)
    assert (measured.position, measured.notes) == (start - 1, [])


def _numbered(*subjects: str) -> Stored:
    return Stored(dict(enumerate(subjects, 1)), len(subjects))


def test_a_consumer_that_is_not_behind_is_not_asked_about() -> None:
    stored = _numbered("a.x", "b.x")
    assert run(stored, measure_consumer(consumer(stored, ("a.*",), 2, set()))).messages == 0
    assert stored.asked == []


def test_messages_that_the_server_gave_up_are_noted_and_not_counted() -> None:
    """The ack floor stays before them, and by the floor the consumer would be behind for ever."""
    stored = _numbered("a", "a", "a", "a")
    info = consumer(stored, ("a",), 3, {2}, max_deliver=2)
    given_up = ConsumerInfo(
        **{name: getattr(info, name) for name in ("stream_name", "name", "config", "delivered", "ack_floor")},
        ack_pending=0,
        pending=1,
    )
    measured = run(stored, measure_consumer(given_up))
    assert parts(measured) == {"waiting": 1}
    assert measured.notes == ["max_deliver=2: the server gave up messages from 2 on"]


def test_a_position_of_an_earlier_stream_of_the_name_counts_for_nothing() -> None:
    stored = _numbered("a", "a", "a")
    reader = PositionReader(kind="spark", name="q", stream="S", next=3, created="2020-01-01T00:00:00Z")
    measured = run(stored, measure_reader(reader, stored.info))
    assert parts(measured) == {"waiting": 3}
    assert "as it was created at 2020-01-01" in measured.notes[0]


def test_times_of_creation_are_compared_as_times() -> None:
    """Positions of projections and offsets of Spark write the zone in different ways."""
    stored = _numbered("a", "a")
    reader = PositionReader(kind="spark", name="q", stream="S", next=2, created="2026-03-20T00:00:00+00:00")
    assert parts(run(stored, measure_reader(reader, stored.info))) == {"waiting": 1}


@pytest.mark.parametrize(
    ("filters", "expected", "note"),
    [((), {"waiting": 2, "in_flight": 1}, None), (("a",), {"waiting": 2, "in_flight": 1}, "other messages")],
)
def test_without_answers_the_numbers_of_the_server_are_left(
    filters: tuple[str, ...], expected: dict[str, int], note: str | None
) -> None:
    stored = _numbered("a", "a", "b")
    measured = run(stored, measure_consumer(consumer(stored, (">",), 1, {1}), filters), answers=False)
    assert parts(measured) == expected
    assert {part.oldest for part in measured.parts.values()} == {None}
    assert not measured.has_ages
    assert [each.partition(" of ")[0] for each in measured.notes] == ([note] if note else [])


def test_without_answers_a_reader_counts_sequences() -> None:
    stored = Stored({3: "a", 5: "a"}, 5)
    reader = PositionReader(kind="archive", name="r", stream="S", next=2)
    measured = run(stored, measure_reader(reader, stored.info), answers=False)
    assert parts(measured) == {"waiting": 3}
    assert measured.notes == ["counted by sequences, which is an upper bound"]


def test_the_parts_of_a_handler_add_up() -> None:
    events = _numbered("a", "a", "b", "a")
    retries = _numbered("r.wait.S.1.9", "r.due.S.1.9", "r.redrive.S.2.9", "r.due.S.3.60000000", "r.due.S.4.70000000")
    retries.name = "R"
    advisories = _numbered("adv")
    advisories.name = "A"
    waits = ConsumerInfo(
        stream_name="R",
        name="c",
        config=ConsumerConfig(durable_name="c", filter_subjects=["r.due.>", "r.redrive.>"]),
        delivered=SequencePair(stream_sequence=4),
        ack_floor=SequencePair(stream_sequence=2),
        ack_pending=2,  # the redrive, and one that is due
        pending=1,
    )
    scheduled = Part(1, time_of(1))
    reading = HandlerSources(
        events=[consumer(events, (">",), 2, {2})],
        filters=["a"],
        retries=[(waits, "r.due.>")],
        advisories=consumer(advisories, (">",), 0, set()),
        waits=HandlerWaits(scheduled, Part(5, time_of(3)), Part(7, time_of(1))),
    )
    measured = run({"S": events, "R": retries, "A": advisories}, measure_handler(reading))
    assert parts(measured) == {
        "waiting": 1,
        "in_flight": 1,
        "due": 2,
        "given_up": 1,
        "scheduled": 1,
        "behind_retry": 5,
    }
    assert measured.messages == 11
    # The age of a retry is that of its event: the first one is that with 60 million microseconds.
    assert measured.parts["due"].oldest == datetime.datetime(1970, 1, 1, 0, 1, tzinfo=datetime.UTC)
    assert measured.underway == 10


def test_partitions_are_added_up_with_the_events_that_are_not_copied_yet() -> None:
    origin = _numbered("a", "b", "a", "a")
    copies = _numbered("p.0.a", "p.1.a", "p.0.a")
    copies.name = "P"
    reading = HandlerSources(
        events=[consumer(copies, ("p.0.>",), 1, set()), consumer(copies, ("p.1.>",), 3, {2})],
        filters=["a"],
        copied=("S", 3),
    )
    measured = run({"S": origin, "P": copies}, measure_handler(reading))
    assert parts(measured) == {"waiting": 1, "in_flight": 1, "uncopied": 1}
    assert measured.position == 4
    assert measured.parts["in_flight"].oldest == time_of(2)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (Part(), Part(), Part()),
        (Part(2, time_of(5), 5), Part(), Part(2, time_of(5), 5)),
        (Part(2, time_of(5), 5), Part(1, time_of(3), 3), Part(3, time_of(3), 3)),
        (Part(2, time_of(5), 5), Part(1), Part(3)),
    ],
)
def test_parts_are_joined(one: Part, other: Part, both: Part) -> None:
    assert one.joined(other) == other.joined(one) == both


def _micros(*times_us: int) -> Part:
    oldest = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(microseconds=min(times_us))
    return Part(len(times_us), oldest)


def test_events_that_left_the_consumer_are_counted_once() -> None:
    """The key ``a`` waits for a retry, ``b`` for an operator; ``c`` was redriven and is retried since."""
    retries = ["retry.shop.h.wait.S.1.10", "retry.shop.h.wait.S.7.70", "retry.shop.other.wait.S.1.10"]
    letters = [
        ("dlq.shop.h.a.S.2.20", False),
        ("dlq.shop.h.a.S.3.30", False),
        ("dlq.shop.h.b.S.4.40", True),
        ("dlq.shop.h.b.S.5.50", False),
        ("dlq.shop.h.c.S.7.70", True),
        ("dlq.shop.h.c.S.8.80", False),
        ("dlq.shop.projections.-.S.9.90", True),
        ("dlq.shop.other.b.S.5.50", False),
    ]
    assert waits_of(retries, letters) == {
        "h": HandlerWaits(_micros(10, 70), _micros(20, 30, 80), _micros(40, 50)),
        "other": HandlerWaits(_micros(10), _micros(50)),
        "projections": HandlerWaits(dead_letters=_micros(90)),
    }
