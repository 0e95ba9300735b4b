"""Parts of a range that tasks wrote, joined: the files touch, and nothing is skipped."""

from __future__ import annotations

import datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark")

from jetspark.errors import DataLoss, RequestTimeout
from jetspark.lake.position import DataFile, StreamIdentity
from jetspark.lake.range_writing import ArchiveOptions, StreamPart, WrittenPart
from jetspark.spark.lake.archiving import TASK_SEQUENCES, Result, _joined, _parts
from jetspark.state.scan import Head

IDENTITY = StreamIdentity("ORDERS", "2026-11-19T10:14:30Z")
LOSS = DataLoss("ORDERS", 7, 9)


def file(begin: int, end: int) -> DataFile:
    return DataFile(
        path=f"{begin}-{end}",
        day=datetime.date(2026, 11, 19),
        begin=begin,
        end=end,
        rows=1,
        size_bytes=1,
        min_sequence=begin,
        max_sequence=begin,
        min_time_us=0,
        max_time_us=0,
    )


def part(begin: int, end: int, lost: tuple[range, ...] = ()) -> StreamPart:
    return StreamPart(identity=IDENTITY, begin=begin, start=begin, end=end, lost=lost)


def written(part: StreamPart) -> WrittenPart:
    return WrittenPart(part.begin, part.end, (file(part.begin, part.end),), ())


def without_rows(part: StreamPart) -> WrittenPart:
    return WrittenPart(part.begin, part.end, (), part.lost)


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_files_touch_and_end_where_the_last_rows_are(has_rows: list[bool]) -> None:
    parts = [part(10 * number, 10 * number + 10) for number in range(1, len(has_rows) + 1)]
    results: list[Result] = [
        written(each) if rows else without_rows(each) for each, rows in zip(parts, has_rows, strict=True)
    ]
    whole = _joined(parts, results, written)
    assert whole.begin == 10
    if not any(has_rows):
        assert (whole.end, whole.files) == (10 * len(has_rows) + 10, ())
        return
    last = len(has_rows) - has_rows[::-1].index(True)
    assert whole.end == whole.files[-1].end == 10 * last + 10
    assert whole.files[0].begin == 10
    assert all(one.end == other.begin for one, other in pairwise(whole.files))
    assert len(whole.files) == sum(has_rows)


def test_lost_sequences_of_a_part_without_rows_go_into_the_next_file() -> None:
    again: list[StreamPart] = []

    def write(part: StreamPart) -> WrittenPart:
        again.append(part)
        return written(part)

    parts = [part(1, 5), part(5, 9)]
    _joined(parts, [WrittenPart(1, 5, (), (range(2, 4),)), written(parts[1])], write)
    assert [(each.begin, each.start, each.end, each.lost) for each in again] == [(1, 5, 9, (range(2, 4),))]
    empty = _joined(parts, [WrittenPart(1, 5, (), (range(2, 4),)), WrittenPart(5, 9, (), (range(5, 6),))], write)
    assert empty == WrittenPart(1, 9, (), (range(2, 4), range(5, 6)))


def test_a_loss_ends_the_part_before_it_and_is_raised_where_nothing_is_before_it() -> None:
    parts = [part(1, 5), part(5, 9), part(9, 12)]
    assert _joined(parts, [written(parts[0]), LOSS, written(parts[2])], written).end == 5
    cut = WrittenPart(5, 7, (file(5, 7),), ())
    assert _joined(parts, [written(parts[0]), cut, written(parts[2])], written).end == 7
    with pytest.raises(DataLoss):
        _joined(parts, [without_rows(parts[0]), LOSS, written(parts[2])], written)
    with pytest.raises(RequestTimeout):
        _joined(parts, [written(parts[0]), RequestTimeout("x", 1.0), LOSS], written)


def test_a_range_is_parted_among_tasks_and_none_gets_more_than_a_file() -> None:
    limits = ArchiveOptions(to="lake", max_rows=100_000, max_bytes=10_000_000)
    head = Head("ORDERS", IDENTITY.created, 1, 10**6, bytes_per_sequence=200.0)
    whole = StreamPart(identity=IDENTITY, begin=1, start=11, end=10**6, lost=(range(3, 5),))
    found = _parts(whole, limits, head, 4)
    assert [each.end - each.start for each in found] == [50_000] * 4  # 10 MB of 200 bytes each
    assert [(each.begin, each.start, each.lost) for each in found[:2]] == [
        (1, 11, (range(3, 5),)),
        (50_011, 50_011, ()),
    ]
    few = StreamPart(identity=IDENTITY, begin=1, start=1, end=TASK_SEQUENCES)
    assert len(_parts(few, limits, head, 4)) == 1
