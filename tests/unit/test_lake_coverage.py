"""Ranges of sequences, compared with sets of them."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable
from itertools import chain, pairwise

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from jetspark.lake.coverage import account, clusters, common, missing_in, repeated, runs, text, union
from jetspark.lake.position import DataFile

SEQUENCES = st.integers(min_value=1, max_value=60)
RANGES = st.lists(st.builds(lambda start, length: range(start, start + length), SEQUENCES, st.integers(0, 20)))


def sequences(ranges: Iterable[range]) -> set[int]:
    return set(chain.from_iterable(ranges))


def are_separate(ranges: list[range]) -> bool:
    return all(ranges) and all(a.stop < b.start for a, b in pairwise(ranges))


@given(RANGES)
def test_a_union_has_the_same_sequences_in_as_few_ranges_as_possible(ranges: list[range]) -> None:
    found = union(ranges)
    assert sequences(found) == sequences(ranges)
    assert are_separate(found)


@given(SEQUENCES, SEQUENCES, RANGES)
def test_missing_is_what_no_range_has(begin: int, end: int, ranges: list[range]) -> None:
    found = missing_in(begin, end, ranges)
    assert sequences(found) == set(range(begin, end)) - sequences(ranges)
    assert are_separate(found)


@given(RANGES, RANGES)
def test_common_is_what_both_have(some: list[range], others: list[range]) -> None:
    assert sequences(common(some, others)) == sequences(some) & sequences(others)


@given(RANGES)
def test_repeated_is_what_at_least_two_ranges_have(ranges: list[range]) -> None:
    found = repeated(ranges)
    counts = Counter(chain.from_iterable(ranges))
    assert sequences(found) == {sequence for sequence, count in counts.items() if count > 1}
    assert are_separate(found)


@given(st.lists(SEQUENCES))
def test_runs_are_the_sequences_in_their_order(listed: list[int]) -> None:
    found = runs(pa.array(listed, pa.int64()))
    assert list(chain.from_iterable(found)) == listed
    assert all(a.stop != b.start for a, b in pairwise(found))


def test_runs_of_a_slice_begin_where_the_slice_does() -> None:
    assert runs(pa.array([1, 2, 5, 6, 7, 9], pa.int64()).slice(1, 4)) == [range(2, 3), range(5, 8)]


@given(SEQUENCES, st.integers(1, 40), RANGES, RANGES)
def test_an_account_says_what_became_of_each_sequence(
    begin: int, length: int, rows: list[range], gone: list[range]
) -> None:
    part = set(range(begin, begin + length))
    found = account(begin, begin + length, rows, gone)
    counts = Counter(chain.from_iterable(rows))
    assert sequences(found.missing) == part - sequences(rows) - sequences(gone)
    assert sequences(found.doubled) == {sequence for sequence, count in counts.items() if count > 1}
    assert sequences(found.contradictory) == sequences(rows) & sequences(gone)
    assert sequences(found.misplaced) == sequences(rows) - part
    is_sound = (
        sequences(rows) <= part
        and max(counts.values(), default=1) == 1
        and not sequences(rows) & sequences(gone)
        and part <= sequences(rows) | sequences(gone)
    )
    assert found.is_sound == is_sound


def data_file(begin: int, end: int) -> DataFile:
    return DataFile(
        path=f"{begin}-{end}",
        day=datetime.date(2026, 11, 19),
        begin=begin,
        end=end,
        rows=1,
        size_bytes=1,
        min_sequence=begin,
        max_sequence=end - 1,
        min_time_us=0,
        max_time_us=0,
    )


@given(st.lists(st.tuples(SEQUENCES, st.integers(1, 15))))
def test_clusters_hold_the_files_that_overlap(spans: list[tuple[int, int]]) -> None:
    files = [data_file(begin, begin + length) for begin, length in spans]
    found = list(clusters(files))
    assert Counter(file.path for cluster in found for file in cluster.files) == Counter(file.path for file in files)
    assert all(a.end <= b.begin for a, b in pairwise(found))
    for cluster in found:
        covered = sequences(range(file.begin, file.end) for file in cluster.files)
        assert covered == set(range(cluster.begin, cluster.end))
        # No cluster could be split: each of its files overlaps another one.
        for at in {file.end for file in cluster.files} - {cluster.end}:
            assert any(file.begin < at < file.end for file in cluster.files)


def test_a_chain_of_files_that_touch_has_a_cluster_for_each() -> None:
    files = [data_file(5, 9), data_file(1, 5), data_file(9, 10)]
    assert [(each.begin, each.end, len(each.files)) for each in clusters(files)] == [(1, 5, 1), (5, 9, 1), (9, 10, 1)]


def test_text_shows_the_first_ranges_and_counts_the_rest() -> None:
    assert text([range(5, 6), range(8, 13)]) == "5, 8-12"
    assert text([range(each, each + 1) for each in (1, 3, 5)], most=1) == "1 and 2 more ranges"
