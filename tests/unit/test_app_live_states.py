"""The cache of a live engine: what is kept, what is stored, and what others do meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from jetspark.app import DELETE, Event
from jetspark.app.projections.declaring import ProjectionSpec
from jetspark.app.projections.states import CacheLimits, LiveStates, StateGone
from jetspark.state.changes import Change, Current, Outcome


class Counted(Event, type="cache.counted", version=1, key="name", subject="counts.{name}"):
    name: str
    by: int = 1


class Counts:
    def key(self, event: Counted) -> str:
        return event.name

    def apply(self, state: int | None, event: Counted) -> Any:
        if event.by == 666:
            raise ValueError("no")
        if event.by == 0:
            return None if state is None else DELETE
        return (state or 0) + event.by


SPEC = ProjectionSpec("counts", Counts, events=[Counted], bucket="counts")


def states(keys: int = 1000, size: int = 1 << 20) -> LiveStates:
    return LiveStates(SPEC, CacheLimits(keys, size))


def fold(cache: LiveStates, *rows: tuple[str, int, int], loaded: dict[str, Current] | None = None) -> None:
    """Rows of key, sequence and amount."""
    given = [(key, sequence, Counted(name=key, by=by)) for key, sequence, by in rows]
    cache.add(cache.missing(given), loaded or {})
    cache.apply(given)


def store(cache: LiveStates, first: int = 1) -> list[Change]:
    """As a bucket does that has nothing against it."""
    changes = cache.take()
    cache.settle(changes, Outcome(len(changes), revisions={each.key: first + n for n, each in enumerate(changes)}))
    return changes


def test_the_cache_drops_what_was_used_longest_ago() -> None:
    cache = states(keys=8)
    for number in range(20):
        fold(cache, (f"k{number}", number + 1, 1))
        store(cache, 10 * number + 1)
        fold(cache, ("often", 100 + number, 1))
        store(cache, 10 * number + 2)
        cache.shrink()
        assert len(cache) <= 8
    assert cache.missing([("often", 1, None), ("k19", 1, None), ("k0", 1, None)]) == ["k0"]


def test_a_few_large_states_fill_the_cache_as_well() -> None:
    cache = states(size=5_000)
    for number in range(20):
        fold(cache, (f"k{number}", number + 1, 1))
        store(cache)
        cache.shrink()
    assert len(cache) <= 8


def test_what_is_not_stored_or_parked_is_kept_whatever_the_limits() -> None:
    cache = states(keys=1)
    fold(cache, ("parked", 1, 666))
    store(cache)
    fold(cache, ("dirty", 2, 1), ("too", 3, 1))
    cache.shrink()
    assert cache.missing([("parked", 1, None), ("dirty", 1, None), ("too", 1, None)]) == []
    assert list(cache.parked) == ["parked"]


def test_events_that_come_while_a_state_is_stored_are_stored_the_next_time() -> None:
    cache = states()
    fold(cache, ("a", 1, 1))
    changes = cache.take()
    fold(cache, ("a", 2, 1))
    cache.settle(changes, Outcome(1, revisions={"a": 7}))
    [change] = cache.take()
    assert (change.value, change.sequence, change.revision) == (b"2", 2, 7)


def test_a_key_in_conflict_is_folded_onto_what_the_bucket_has() -> None:
    cache = states()
    fold(cache, ("a", 5, 1), ("a", 7, 10))
    changes = cache.take()
    fold(cache, ("a", 8, 100))
    theirs = Current(b"1000", 5, 3, None, "1")
    cache.settle(changes, Outcome(0, ("a",), present={"a": theirs}))
    [change] = cache.take()
    assert (change.value, change.sequence, change.revision) == (b"1110", 8, 3)
    cache.settle([change], Outcome(0, ("a",), present={"a": Current(b"5", 9, 4, None, "1")}))
    assert not cache.is_dirty  # the other one is beyond


def test_a_revision_that_is_not_sure_is_looked_up_before_the_next_write() -> None:
    cache = states()
    fold(cache, ("a", 1, 1))
    cache.settle(cache.take(), Outcome(1))
    assert cache.unsure() == []  # nothing has to be stored
    fold(cache, ("a", 2, 1))
    assert cache.unsure() == ["a"]
    cache.look_again(["a"], {"a": Current(b"1", 1, 9, None, "1")})
    [change] = cache.take()
    assert (change.value, change.revision) == (b"2", 9)


def test_a_state_that_is_gone_is_told_and_a_mark_that_was_tidied_away_is_not() -> None:
    cache = states()
    fold(cache, ("a", 1, 1), ("b", 2, 1), ("b", 3, 0))
    store(cache)
    fold(cache, ("a", 4, 1), ("b", 5, 1))
    changes = cache.take()
    with pytest.raises(StateGone) as caught:
        cache.settle(changes, Outcome(0, ("a", "b")))
    [parking] = caught.value.changes
    assert (parking.key, parking.operation, parking.revision) == ("a", "delete", 0)
    assert "was removed" in (parking.mark or "")
    [change] = [each for each in cache.take() if each.key == "b"]
    assert (change.value, change.sequence, change.revision) == (b"1", 5, 0)
