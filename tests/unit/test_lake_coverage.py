"""Ranges of sequences, compared with sets of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain, pairwise

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from jetspark.lake.coverage import account, common, missing_in, repeated, runs, text, union

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


def test_text_shows_the_first_ranges_and_counts_the_rest() -> None:
    assert text([range(5, 6), range(8, 13)]) == "5, 8-12"
    assert text([range(each, each + 1) for each in (1, 3, 5)], most=1) == "1 and 2 more ranges"
