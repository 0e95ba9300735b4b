"""Batches and partitions of streams with more sequences than messages are cut by messages, with few questions."""

from __future__ import annotations

import bisect
import json
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspark.spark.offsets import Limits, Offset, Sizes, StreamPosition, admit, plan
from jetspark.spark.survey import MAX_LOOKS, Survey
from jetspark.state.scan import Head

CREATED = "2026-03-20T10:14:30.000001Z"


@dataclass
class Stored:
    """A stream with messages at some sequences, that is asked and remembers how often."""

    present: list[int]
    next: int
    looks: int = 0
    arrives: int = 0
    """So many new messages come with every look."""
    newest: list[int] = field(default_factory=list)

    def count(self, stream: str, sequence: int) -> int:
        self.looks += 1
        self.newest += range(len(self.newest), len(self.newest) + self.arrives)
        return len(self.present) - bisect.bisect_left(self.present, sequence) + len(self.newest)

    def between(self, begin: int, end: int) -> int:
        return bisect.bisect_left(self.present, end) - bisect.bisect_left(self.present, begin)

    def survey(self, begin: int = 1, end: int | None = None) -> Survey:
        return Survey(lambda sequence: self.count("S", sequence), begin, end or self.next)

    def head(self) -> Head:
        first = self.present[0] if self.present else self.next
        missing = self.next - first - len(self.present)
        return Head("S", CREATED, first, self.next, 1.0, missing, 100.0)


def spread(messages: int, sequences: int, shape: str) -> Stored:
    rng = random.Random(f"{messages} {sequences} {shape}")
    match shape:
        case "evenly":
            present = [1 + number * sequences // messages for number in range(messages)]
        case "by chance":
            present = sorted(rng.sample(range(1, sequences + 1), messages))
        case "at the front":
            present = [*range(1, messages), sequences]
        case "at the end":
            present = [1, *range(sequences - messages + 2, sequences + 1)]
        case _:  # older ones are rarer, as where the newest of each key stays
            present = sorted({sequences - int(sequences ** (number / messages)) + 1 for number in range(messages)})
    return Stored(present, sequences + 1)


SHAPES = ["evenly", "by chance", "at the front", "at the end", "rarer with age"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("limit", [1, 10, 100, 1_000])
def test_micro_batches_have_what_they_may_and_grow_with_messages_only(shape: str, limit: int) -> None:
    for sequences in (10_000, 1_000_000, 100_000_000):
        stored = spread(1_000, sequences, shape)
        offset, batches = Offset({"S": StreamPosition(CREATED, 1)}), 0
        while (end := admit(offset, [stored.head()], Limits(rows=limit), Sizes(), stored.count)) is not offset:
            begin, until = offset.streams["S"].next, end.streams["S"].next
            assert stored.between(begin, until) <= limit
            offset, batches = end, batches + 1
        assert offset.streams["S"].next == stored.next
        most = 4 * len(stored.present) // limit + 8
        assert batches <= most
        assert stored.looks <= batches * (MAX_LOOKS // 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most", [10, 100, 1_000])
def test_partitions_have_what_they_may_and_grow_with_messages_only(shape: str, most: int) -> None:
    for sequences in (10_000, 1_000_000, 100_000_000):
        stored = spread(1_000, sequences, shape)
        sizes = Sizes(max_records=most)
        start = Offset({"S": StreamPosition(CREATED, 1)})
        end = admit(start, [stored.head()], Limits(), sizes, stored.count)
        parts = [(part.start, part.end) for part in plan(start, end)]
        assert [begin for begin, _ in parts] == [1, *(until for _, until in parts[:-1])]
        assert parts[-1][1] == stored.next
        assert len(parts) <= 4 * len(stored.present) // most + 8
        assert stored.looks <= MAX_LOOKS + 2
        # Where the looks are used up, partitions are no longer cut where the messages are.
        if stored.looks < MAX_LOOKS:
            assert max(stored.between(*part) for part in parts) <= most
        # The same from the checkpoint.
        again = Offset.from_json(json.loads(json.dumps(end.to_json())))
        assert plan(start, again) == plan(start, end)


def test_a_stream_without_gaps_is_not_asked() -> None:
    stored = Stored(list(range(1, 100_001)), 100_001)
    start = Offset({"S": StreamPosition(CREATED, 1)})
    admit(start, [stored.head()], Limits(rows=100), Sizes(max_records=10), stored.count)
    assert stored.looks == 0


def test_a_query_that_has_less_to_read_than_a_batch_takes_does_not_ask() -> None:
    stored = spread(100, 100_000, "evenly")
    start = Offset({"S": StreamPosition(CREATED, 99_500)})
    end = admit(start, [stored.head()], Limits(rows=1_000), Sizes(), stored.count)
    assert (end.streams["S"].next, stored.looks) == (100_001, 0)


def test_at_least_as_many_partitions_are_made_as_were_asked_for() -> None:
    stored = spread(1_000, 1_000_000, "at the end")
    start = Offset({"S": StreamPosition(CREATED, 1)})
    end = admit(start, [stored.head()], Limits(), Sizes(min_partitions=4), stored.count)
    assert 4 <= len(plan(start, end)) <= 9


def test_a_long_stretch_without_messages_is_one_batch_and_one_partition() -> None:
    stored = Stored([1, 5_000_000], 5_000_001)
    start = Offset({"S": StreamPosition(CREATED, 2)})
    end = admit(start, [stored.head()], Limits(rows=10), Sizes(), stored.count)
    assert [(part.start, part.end) for part in plan(start, end)] == [(2, 5_000_001)]


def test_messages_that_come_between_two_looks_make_no_batch_too_large() -> None:
    for arrives in (1, 50, 5_000):
        stored = spread(10_000, 1_000_000, "by chance")
        stored.arrives = arrives
        end = stored.survey().end_after(100)
        assert stored.between(1, end) <= 100
        assert end >= 101


def test_a_limit_of_bytes_goes_by_the_size_of_messages() -> None:
    stored = spread(1_000, 1_000_000, "evenly")
    start = Offset({"S": StreamPosition(CREATED, 1)})
    sizes = Sizes(max_records=1_000)
    end = admit(start, [stored.head()], Limits(bytes=10_000), sizes, stored.count)  # a hundred of 100 bytes
    assert 50 <= stored.between(1, end.streams["S"].next) <= 100


def test_streams_share_a_limit_in_proportion_to_their_messages() -> None:
    few, many = spread(100, 1_000_000, "evenly"), Stored(list(range(1, 901)), 901)
    heads = [few.head(), Head("FULL", CREATED, 1, 901, 1.0)]
    start = Offset({name: StreamPosition(CREATED, 1) for name in ("S", "FULL")})
    end = admit(start, heads, Limits(rows=100), Sizes(), few.count)
    assert end.streams["FULL"].next == 91
    assert 5 <= few.between(1, end.streams["S"].next) <= 10
    assert many.looks == 0


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_batch_after_batch_covers_every_sequence_once_within_its_limit(data: st.DataObject) -> None:
    sequences = data.draw(st.integers(10, 5_000))
    present = sorted(data.draw(st.sets(st.integers(1, sequences), min_size=1, max_size=40)) | {sequences})
    stored = Stored(present, sequences + 1)
    sizes = Sizes(min_partitions=data.draw(st.integers(1, 4)), max_records=data.draw(st.integers(1, 60)))
    limit = data.draw(st.none() | st.integers(1, 60))
    offset, covered = Offset({"S": StreamPosition(CREATED, 1)}), []
    while (end := admit(offset, [stored.head()], Limits(rows=limit), sizes, stored.count)) is not offset:
        parts = plan(offset, end)
        assert all(part.start < part.end for part in parts)
        assert limit is None or sum(stored.between(part.start, part.end) for part in parts) <= limit
        covered += [(part.start, part.end) for part in parts]
        offset = Offset.from_json(end.to_json())
    assert [begin for begin, _ in covered] == [1, *(until for _, until in covered[:-1])]
    assert covered[-1][1] == stored.next
