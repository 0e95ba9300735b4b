"""Gaps, refusals and doubts of a fast batch, checked against sets of single messages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspark.errors import ServerError, UsageError
from jetspark.publish import fast_losses
from jetspark.publish.fast_losses import FastLosses
from jetspark.publish.fast_options import Refusal

ERROR = ServerError(400, 10071, "no")


def _flat(ranges: list[range]) -> list[int]:
    return [number for each in ranges for number in each]


def test_a_message_is_reported_once_by_whichever_report_came_first() -> None:
    losses = FastLosses()
    losses.add_refusal(Refusal(3, ERROR))
    losses.add_gap(range(2, 6), 9)
    losses.add_refusal(Refusal(4, ERROR))
    losses.add_gap(range(2, 8), 9)
    assert losses.gaps == [range(2, 3), range(4, 6), range(6, 8)]
    assert [each.sequence for each in losses.errors] == [3]
    assert losses.news == [losses.errors[0], *losses.gaps]


def test_an_end_is_no_message() -> None:
    losses = FastLosses()
    losses.ends.add(4)
    losses.add_gap(range(3, 5), 4)
    losses.add_refusal(Refusal(4, ERROR))
    losses.lose_session(2, 4)
    assert (losses.gaps, losses.errors, losses.doubts) == ([range(3, 4)], [], [])
    assert losses.stored(4) == 2
    assert losses.explain(range(3, 5))


def test_what_was_under_way_when_a_session_was_lost_is_in_doubt_until_it_is_reported() -> None:
    losses = FastLosses()
    losses.lose_session(2, 6)
    losses.lose_session(2, 8)
    assert _flat(losses.doubts) == [3, 4, 5, 6, 7, 8]
    losses.lose_session(8, 8)
    losses.add_gap(range(5, 7), 8)
    assert _flat(losses.doubts) == [3, 4, 7, 8]
    assert not losses.explain(range(3, 4))
    assert losses.stored(8) == 2
    losses.begin_again()
    assert losses.doubts == []


def test_the_reports_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_losses, "MAX_REPORTS", 2)
    losses = FastLosses()
    for sequence in (1, 2):
        losses.add_refusal(Refusal(sequence, ERROR))
        losses.add_gap(range(10 * sequence, 10 * sequence + 1), 100)
    with pytest.raises(UsageError, match="more than 2 losses"):
        losses.add_refusal(Refusal(3, ERROR))
    with pytest.raises(UsageError, match="more than 2 losses"):
        losses.add_gap(range(50, 51), 100)


_REPORTS = st.lists(
    st.one_of(
        st.tuples(st.just("gap"), st.integers(1, 12), st.integers(1, 12)),
        st.tuples(st.just("refused"), st.integers(1, 12), st.just(0)),
        st.tuples(st.just("lost session"), st.integers(0, 12), st.integers(0, 12)),
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(_REPORTS, st.sets(st.integers(10, 12), max_size=2))
def test_whatever_is_reported_the_sets_are_right(reports: list[tuple[str, int, int]], ends: set[int]) -> None:
    losses = FastLosses()
    losses.ends.update(ends)
    gone: set[int] = set()
    unheard: set[int] = set()
    for kind, first, second in reports:
        if kind == "gap":
            losses.add_gap(range(first, second), 12)
            gone |= set(range(first, second)) - ends
        elif kind == "refused":
            losses.add_refusal(Refusal(first, ERROR))
            gone |= {first} - ends
        else:
            losses.lose_session(first, second)
            # Those up to an earlier loss were acknowledged since, or are in doubt already.
            start = max(first + 1, max(unheard, default=0) + 1)
            unheard |= set(range(start, second + 1))
    told = _flat(losses.gaps) + [each.sequence for each in losses.errors]
    assert sorted(told) == sorted(gone)
    assert set(_flat(losses.doubts)) == unheard - gone - ends
    assert losses.stored(12) == len(set(range(1, 13)) - gone - unheard - ends)
    assert losses.explain(range(1, 13)) is (set(range(1, 13)) <= gone | ends)
