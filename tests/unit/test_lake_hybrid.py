"""One history of an archive and a stream: every sequence once, in order, or data loss that names the gap."""

from __future__ import annotations

import datetime
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspark.app.extents import ReplayRequest, extent_of
from jetspark.errors import ArchiveDamaged, ConfigError, DataLoss, StreamRecreated, StreamWentBack
from jetspark.lake.hybrid import HybridCursor, HybridHead, HybridRange, Slice, archive_alone, joined
from jetspark.lake.position import ArchivePosition, StreamIdentity
from jetspark.spark.offsets import Limits, Offset, Sizes, StreamPosition, admit, plan, position_of
from jetspark.spark.stream_follower import check_loss
from jetspark.state.scan import Head, Range

CREATED = "2026-03-20T10:14:30.000001Z"
IDENTITY = StreamIdentity("S", CREATED)
NOON = datetime.datetime(2026, 3, 20, 12, tzinfo=datetime.UTC)


class Lake:
    """The table, which a writer extends and compacts while readers are at work."""

    def __init__(self, first: int, next: int, missing: frozenset[int] = frozenset()) -> None:
        self.first, self.next, self.missing, self.version = first, next, missing, 0

    def reader(self, **fields: Any) -> Any:
        return Archived(self, self.first, self.next, self.version, **fields)


@dataclass(frozen=True)
class Archived:
    """In place of a reader of the table; a message of sequence n was stored n seconds after noon."""

    lake: Lake
    first: int
    next: int
    version: object = 0
    identity: StreamIdentity = IDENTITY
    uri: str = "lake/S"
    bytes_per_message: float = 10.0

    @property
    def position(self) -> ArchivePosition:
        return ArchivePosition(identity=self.identity, first=self.first, next=self.next)

    @property
    def rows(self) -> int:
        return self.count_from(0)

    def count_from(self, sequence: int) -> int:
        return sum(each not in self.lake.missing for each in range(max(self.first, sequence), self.next))

    def sequence_at(self, moment: datetime.datetime) -> int | None:
        wanted = (moment - NOON).total_seconds()
        return next((each for each in range(self.first, self.next) if each >= wanted), None)

    def within(self, start: int, end: int) -> Archived:
        return self

    def reopened(self) -> Archived:
        return replace(self, next=self.lake.next, version=self.lake.version)

    def read(self, start: int, end: int) -> Iterator[int]:
        if self.version != self.lake.version:
            raise ArchiveDamaged(self.uri, "a file is missing")
        assert self.first <= start <= end <= self.next
        yield from (each for each in range(start, end) if each not in self.lake.missing)


def head(first: int, next: int, **fields: object) -> Head:
    return replace(Head("S", CREATED, first, next), **fields)  # type: ignore[arg-type]


def whole(archived: tuple[int, int], stream: tuple[int, int]) -> HybridHead:
    return joined(head(*stream), Lake(*archived).reader())


def range_of(found: Head, start: int, end: int, *, is_earliest: bool = False) -> HybridRange:
    assert isinstance(found, HybridHead)
    return found.range_of(Range("S", CREATED, start, end, is_earliest=is_earliest))


def spans(limit: int = 30) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(1, limit), st.integers(0, limit)).map(lambda each: (each[0], each[0] + each[1]))


@settings(max_examples=600, deadline=None)
@given(archived=spans(), stream=spans(), wanted=spans())
def test_each_sequence_is_read_once_and_in_order_or_the_first_gap_is_named(
    archived: tuple[int, int], stream: tuple[int, int], wanted: tuple[int, int]
) -> None:
    end_of_stream = max(stream[1], archived[1])
    stream = (min(stream[0], end_of_stream), end_of_stream)
    start, end = wanted[0], min(wanted[1], end_of_stream)
    in_archive, in_stream = range(*archived), range(*stream)
    missing = [each for each in range(start, end) if each not in in_archive and each not in in_stream]
    found = whole(archived, stream)
    gap = found.first_loss(start, end)
    if missing:
        there = next(each for each in range(missing[0], end_of_stream + 2) if each in in_archive or each >= stream[0])
        assert gap == range(missing[0], max(there, missing[0] + 1))
    else:
        assert gap is None
        slices = list(HybridCursor(range_of(found, start, end)).slices())
        read = [(each, part.is_archived) for part in slices for each in range(part.start, part.end)]
        assert read == [(each, each in in_archive) for each in range(start, end)]
        assert all(part.start < part.end for part in slices)


def test_the_archive_is_read_before_the_stream_wherever_it_has_a_sequence() -> None:
    cursor = HybridCursor(range_of(whole((5, 20), (1, 30)), 2, 28))
    assert list(cursor.slices()) == [
        Slice(2, 5, is_archived=False),
        Slice(5, 20, is_archived=True),
        Slice(20, 28, is_archived=False),
    ]


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), missing=st.frozensets(st.integers(1, 60), max_size=10))
def test_a_range_is_the_same_while_the_archive_grows_and_is_compacted_and_the_stream_is_trimmed(
    seed: int, missing: frozenset[int]
) -> None:
    rng = random.Random(seed)
    lake, last = Lake(1, rng.randint(1, 60), missing), 60
    first = rng.randint(1, lake.next)
    part = range_of(joined(head(first, last + 1), lake.reader()), 1, last + 1)

    def moves() -> None:
        nonlocal first
        if rng.random() < 0.4:
            lake.next = rng.randint(lake.next, last + 1)
        if rng.random() < 0.4:
            first = rng.randint(first, lake.next)  # only what is archived
        if rng.random() < 0.1:
            lake.version += 1

    def scan(start: int, end: int) -> Iterator[int]:
        for each in range(start, end):
            if first > each:
                raise DataLoss("S", each, first)
            if each not in missing:
                yield each

    read, cursor = list[int](), HybridCursor(part)
    while (piece := cursor.slice()) is not None:
        try:
            archive: Any = cursor.archive
            source = archive.read if piece.is_archived else scan
            for each in source(piece.start, piece.end):
                read.append(each)
                cursor.reached(each + 1)
                moves()
            cursor.reached(piece.end)
        except (DataLoss, ArchiveDamaged) as error:
            if not cursor.can_continue(error):
                raise
    assert read == [each for each in range(1, last + 1) if each not in missing]


def test_a_reader_gives_up_where_the_archive_does_not_help() -> None:
    lake = Lake(1, 10)
    cursor = HybridCursor(range_of(joined(head(5, 31), lake.reader()), 1, 31))
    cursor.reached(10)
    assert cursor.slice() == Slice(10, 31, is_archived=False)
    assert not cursor.can_continue(DataLoss("S", 10, 20))
    lake.next = 20
    assert cursor.can_continue(DataLoss("S", 10, 20))
    assert cursor.slice() == Slice(10, 20, is_archived=True)
    assert not cursor.can_continue(DataLoss("S", 15, 16))  # lost before it was archived
    assert not cursor.can_continue(ArchiveDamaged("lake/S", "a file is missing"))  # and the table says that it is there
    lake.version += 1
    assert cursor.can_continue(ArchiveDamaged("lake/S", "a file is missing"))


def test_a_table_that_never_stays_as_it_is_does_not_keep_a_reader_for_ever() -> None:
    lake = Lake(1, 10)
    cursor = HybridCursor(range_of(joined(head(5, 31), lake.reader()), 1, 31))
    cursor.slice()
    for _ in range(100):
        lake.version += 1
        if not cursor.can_continue(ArchiveDamaged("lake/S", "a file is missing")):
            return
    pytest.fail("no end")


def test_losses_at_the_beginning_are_accepted_only_where_the_history_begins() -> None:
    earliest = HybridCursor(range_of(whole((5, 20), (1, 30)), 1, 30, is_earliest=True))
    assert earliest.in_stream(Slice(1, 5, is_archived=False)).is_earliest
    assert not earliest.in_stream(Slice(20, 30, is_archived=False)).is_earliest
    nothing_archived = HybridCursor(range_of(whole((1, 1), (1, 30)), 1, 30, is_earliest=True))
    assert nothing_archived.in_stream(Slice(1, 30, is_archived=False)).is_earliest
    kept = HybridCursor(replace(range_of(whole((5, 20), (1, 30)), 1, 30), is_kept=True))
    assert kept.in_stream(Slice(20, 30, is_archived=False)).is_earliest


def test_the_head_begins_in_the_archive_and_ends_with_the_stream() -> None:
    found = whole((3, 20), (10, 30))
    assert (found.first, found.next, found.whole_from, found.tail.first) == (3, 30, 3, 10)
    assert whole((7, 7), (10, 30)).first == 10  # nothing is archived yet
    assert whole((10, 20), (3, 30)).first == 3
    deleted = archive_alone(Lake(3, 20).reader())
    assert (deleted.first, deleted.next) == (3, 20)
    assert deleted.first_loss(3, 20) is None
    assert deleted.first_loss(1, 20) == range(1, 3)


def test_an_event_of_the_archive_proves_that_nothing_before_the_archive_is_missing() -> None:
    found = whole((11, 100), (120, 200))
    assert found.first_loss(1, 50) == range(1, 11)
    proven = replace(found, is_front_whole=True)
    assert proven.first_loss(1, 50) is None
    assert proven.first_loss(1, 150) == range(100, 120)
    assert replace(proven, tail=replace(found.tail, kept_from=1)).first_loss(1, 150) is None


def test_messages_of_both_are_counted_once() -> None:
    missing = frozenset({4, 12, 25})
    stream_first = 10

    def in_stream(sequence: int) -> int:
        return sum(each not in missing for each in range(max(sequence, stream_first), 30))

    found = joined(head(stream_first, 30, missing=2), Lake(3, 20, missing).reader())
    for sequence in range(3, 31):
        assert found.count_from(sequence, in_stream) == sum(each not in missing for each in range(sequence, 30))
    assert found.missing >= 3


def test_a_time_is_found_in_the_archive_first_and_never_behind_a_gap() -> None:
    def second(number: int) -> datetime.datetime:
        return NOON + datetime.timedelta(seconds=number)

    assert whole((3, 20), (10, 30)).begin_at(second(5), 10) == 5
    assert whole((3, 20), (10, 30)).begin_at(second(25), 25) == 25
    assert whole((3, 20), (1, 30)).begin_at(second(2), 2) == 2
    assert whole((3, 8), (10, 30)).begin_at(second(9), 10) == 8
    assert whole((3, 8), (10, 30)).begin_at(second(12), 12) == 12


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_an_archive_of_another_stream_or_incarnation_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="archive lake/S is of stream 'T': expected one of stream 'S'"):
        joined(head(1, 5), Lake(1, 3).reader(identity=StreamIdentity("T", CREATED)))
    older = StreamIdentity("S", "2025-01-01T00:00:00Z")
    with pytest.raises(StreamRecreated, match=r"created at 2025-01-01T00:00:00Z.*archive lake/S is of the former"):
        joined(head(1, 5), Lake(1, 3).reader(identity=older))


def test_a_stream_that_ends_before_its_archive_went_back() -> None:
    with pytest.raises(StreamWentBack):
        joined(head(1, 5), Lake(1, 9).reader(), is_older=True)
    assert joined(head(1, 5), Lake(1, 9).reader()).next == 5  # archived since the stream was looked at


# ---- as planning takes it --------------------------------------------------------------------------------------------


def test_a_replay_of_everything_begins_in_the_archive() -> None:
    extent = extent_of(ReplayRequest(), whole((1, 20), (10, 30)), 1)
    assert (extent.first, extent.last) == (1, 29)
    with pytest.raises(DataLoss) as caught:
        extent_of(ReplayRequest(), whole((1, 8), (10, 30)), 1)
    assert (caught.value.wanted, caught.value.first) == (8, 10)
    with pytest.raises(DataLoss) as caught:
        extent_of(ReplayRequest(), whole((3, 20), (10, 30)), 1)
    assert (caught.value.wanted, caught.value.first) == (1, 3)
    assert extent_of(ReplayRequest(from_seq=3, to_seq=7), whole((3, 8), (10, 30)), 1).last == 7


def test_a_query_from_earliest_begins_in_the_archive_and_its_batches_cross_over() -> None:
    found = whole((1, 20), (10, 30))
    start = Offset({"S": position_of(found, "earliest")})
    assert start.streams["S"] == StreamPosition(CREATED, 1, is_earliest=True)
    assert not check_loss(start, [found], is_allowed=False)
    ends, ranges = [], []
    for _ in range(3):
        end = admit(start, [found], Limits(rows=12), Sizes(max_records=5))
        ranges += [(part.start, part.end) for part in plan(start, end)]
        ends.append(end.streams["S"].next)
        start = end
    assert ends == [13, 25, 30]
    assert [each for begin, stop in ranges for each in range(begin, stop)] == list(range(1, 30))


@pytest.mark.parametrize("is_earliest", [True, False])
def test_a_gap_behind_the_start_is_a_loss_from_earliest_too(is_earliest: bool) -> None:
    found = whole((1, 8), (10, 30))
    start = Offset({"S": StreamPosition(CREATED, 1, is_earliest=is_earliest)})
    with pytest.raises(DataLoss) as caught:
        check_loss(start, [found], is_allowed=False)
    assert (caught.value.wanted, caught.value.first) == (8, 10)
    assert check_loss(start, [found], is_allowed=True)
    assert not check_loss(start, [replace(found, next=8)], is_allowed=False)  # a batch that ends before it
