"""The cache of a live engine: what is kept, what is stored, and what others do meanwhile."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from jetspark.app import DELETE, Event
from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.live_states import ENTRY_BYTES, CacheLimits, LiveStates, StateGone
from jetspark.app.projections.projection_spec import ProjectionArguments, ProjectionSpec
from jetspark.app.projections.router import KeyRows
from jetspark.app.projections.state_header import FOREIGN, Mark, position_key
from jetspark.state.changes import NOTHING, Change, Current, Outcome


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


SPEC = ProjectionSpec("counts", Counts, ProjectionArguments(events=[Counted], bucket="counts"))


def states(keys: int = 1000, size: int = 1 << 20) -> LiveStates:
    return LiveStates(SPEC, CacheLimits(keys, size))


def fold(cache: LiveStates, *rows: tuple[str, int, int], loaded: dict[str, Current] | None = None) -> None:
    """Rows of key, sequence and amount."""
    given = KeyRows((key, sequence, Counted(name=key, by=by)) for key, sequence, by in rows)
    cache.add(cache.missing(given), loaded or {})
    cache.apply(given)


def store(cache: LiveStates, first: int = 1) -> list[Change]:
    """As a bucket does that has nothing against it."""
    changes = cache.take_changes()
    cache.commit(changes, Outcome(len(changes), revisions={each.key: first + n for n, each in enumerate(changes)}))
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
    assert cache.missing(KeyRows([("often", 1, None), ("k19", 1, None), ("k0", 1, None)])) == ["k0"]


def test_a_few_large_states_fill_the_cache_as_well() -> None:
    cache = states(size=8 * (ENTRY_BYTES + 20))
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
    assert cache.missing(KeyRows([("parked", 1, None), ("dirty", 1, None), ("too", 1, None)])) == []
    assert list(cache.parked) == ["parked"]


class LookedThrough(dict[Any, Any]):
    """Counts how often all of it was looked at."""

    times = 0

    def items(self) -> Any:
        self.times += 1
        return super().items()


def test_states_that_have_to_be_stored_are_not_looked_through_with_every_piece() -> None:
    cache = states(keys=8)
    cache._keys = looked = LookedThrough()
    for number in range(100):
        fold(cache, (f"k{number}", number + 1, 1))
        cache.shrink()
    assert (len(cache), looked.times) == (100, 1)
    changes = cache.take_changes()
    cache.shrink()
    cache.shrink()
    assert (len(cache), looked.times) == (100, 2)
    cache.commit(changes, Outcome(100, revisions={each.key: n for n, each in enumerate(changes, start=1)}))
    cache.shrink()
    assert (len(cache), looked.times) == (7, 3)


def test_states_that_need_not_be_stored_after_all_are_dropped() -> None:
    cache = states(keys=2)
    fold(cache, *((key, number, 0) for number, key in enumerate("abcd", start=1)))
    cache.shrink()
    assert len(cache) == 4
    assert cache.take_changes() == []  # an end of what never was
    cache.shrink()
    assert len(cache) == 1


def test_events_that_come_while_a_state_is_stored_are_stored_the_next_time() -> None:
    cache = states()
    fold(cache, ("a", 1, 1))
    changes = cache.take_changes()
    fold(cache, ("a", 2, 1))
    cache.commit(changes, Outcome(1, revisions={"a": 7}))
    [change] = cache.take_changes()
    assert (change.value, change.sequence, change.revision) == (b"2", 2, 7)


def test_a_key_in_conflict_is_folded_onto_what_the_bucket_has() -> None:
    cache = states()
    fold(cache, ("a", 5, 1), ("a", 7, 10))
    changes = cache.take_changes()
    fold(cache, ("a", 8, 100))
    theirs = Current(b"1000", 5, 3, "1")
    cache.commit(changes, Outcome(0, ("a",), present={"a": theirs}))
    [change] = cache.take_changes()
    assert (change.value, change.sequence, change.revision) == (b"1110", 8, 3)
    cache.commit([change], Outcome(0, ("a",), present={"a": Current(b"5", 9, 4, "1")}))
    assert not cache.is_dirty  # the other one is beyond


def test_rows_of_a_key_in_conflict_are_found_in_every_piece_and_those_of_others_are_let_go() -> None:
    cache = states()
    for sequence in range(1, 10):
        fold(cache, ("a", 10 * sequence, sequence), ("b", 10 * sequence + 1, 1))
    changes = cache.take_changes()
    fold(cache, ("b", 200, 1), ("a", 201, 100))
    cache.commit(changes, Outcome(1, ("a",), present={"a": Current(b"1000", 45, 3, "1")}, revisions={"b": 4}))
    assert [(row[0], row[1]) for rows in cache._rows for row in rows if row[0] == "a"] == [
        *(("a", 10 * sequence) for sequence in range(1, 10)),
        ("a", 201),
    ]
    assert [row[1] for rows in cache._rows for row in rows if row[0] == "b"] == [200]
    fold(cache, ("a", 202, 1000))
    found = {change.key: change for change in cache.take_changes()}
    assert (found["a"].value, found["a"].sequence, found["a"].revision) == (b"2135", 202, 3)
    assert (found["b"].value, found["b"].sequence, found["b"].revision) == (b"10", 200, 4)
    # Others were first again: what is in hand is folded a second time, the events of both batches.
    theirs = Current(b"1005", 50, 8, "1")
    cache.commit(list(found.values()), Outcome(1, ("a",), present={"a": theirs}, revisions={"b": 9}))
    [change] = store(cache)
    assert (change.value, change.sequence, change.revision) == (b"2135", 202, 8)
    assert (cache._rows, cache._sent_rows, cache.is_dirty) == ([], [], False)


def test_a_position_in_conflict_is_none_of_the_keys() -> None:
    cache = states()
    fold(cache, ("a", 1, 1))
    cache.commit(cache.take_changes(), Outcome(1, (position_key(),), revisions={"a": 1}))
    assert not cache.is_dirty


def test_rows_that_change_nothing_are_let_go() -> None:
    cache = states()
    fold(cache, ("a", 1, 0))
    assert cache.take_changes() == []
    assert (cache._rows, cache._sent_rows) == ([], [])


def test_a_state_that_another_engine_has_made_larger_counts_for_what_it_is() -> None:
    cache = states()
    fold(cache, ("a", 1, 1))
    cache.commit(cache.take_changes(), Outcome(0, ("a",), present={"a": Current(b"1" * 1000, 9, 4, "1")}))
    assert cache._size == ENTRY_BYTES + 1 + 2000


def test_a_revision_that_is_not_sure_is_looked_up_before_the_next_write() -> None:
    cache = states()
    fold(cache, ("a", 1, 1))
    cache.commit(cache.take_changes(), Outcome(1))
    assert cache.unsure() == []  # nothing has to be stored
    fold(cache, ("a", 2, 1))
    assert cache.unsure() == ["a"]
    cache.reload(["a"], {"a": Current(b"1", 1, 9, "1")})
    [change] = cache.take_changes()
    assert (change.value, change.revision) == (b"2", 9)


def test_a_state_that_is_gone_is_told_and_a_mark_that_was_tidied_away_is_not() -> None:
    cache = states()
    fold(cache, ("a", 1, 1), ("b", 2, 1), ("b", 3, 0))
    store(cache)
    fold(cache, ("a", 4, 1), ("b", 5, 1))
    changes = cache.take_changes()
    with pytest.raises(StateGone) as caught:
        cache.commit(changes, Outcome(0, ("a", "b")))
    [parking] = caught.value.changes
    assert (parking.key, parking.operation, parking.revision) == ("a", "delete", 0)
    assert "was removed" in (parking.mark or "")
    [change] = [each for each in cache.take_changes() if each.key == "b"]
    assert (change.value, change.sequence, change.revision) == (b"1", 5, 0)


def sizes(cache: LiveStates) -> int:
    """What the states in hand should count for."""
    return sum(
        ENTRY_BYTES + len(key) + 2 * len(entry.value or b"")
        for key, entry in cache._keys.items()
        if entry.sent is None and key not in cache._dirty
    )


def test_everything_begins_with_nothing() -> None:
    cache = states()
    assert (len(cache), cache.is_dirty, cache.applied, cache.known, cache.waiting) == (0, False, 0, 0, 0)
    fold(cache, ("a", 1, 1))
    assert (len(cache), cache.is_dirty, cache.unsure()) == (1, True, [])


def test_events_are_counted_once() -> None:
    cache = states()
    fold(cache, ("a", 1, 1), ("a", 2, 1))
    assert cache.applied == 0  # nothing is stored
    store(cache)
    fold(cache, ("a", 2, 1), ("a", 3, 1))
    store(cache, 2)
    assert (cache.applied, cache.known, cache.waiting) == (3, 1, 0)
    fold(cache, ("b", 5, 1), ("b", 6, 1), ("b", 7, 1), loaded={"b": Current(b"9", 6, 1, "1")})
    assert cache.known == 3
    [change] = store(cache, 3)
    assert (change.value, change.sequence) == (b"10", 7)
    assert cache.applied == 4


def test_events_of_a_parked_key_wait_and_are_not_kept_once_the_bucket_knows() -> None:
    cache = states()
    fold(cache, ("a", 1, 666), ("a", 2, 1))
    assert cache.waiting == 1
    changes = cache.take_changes()
    fold(cache, ("a", 3, 1))
    assert (cache.waiting, cache.is_dirty) == (2, True)
    cache.commit(changes, Outcome(1, revisions={"a": 1}))
    assert cache.take_changes() == []
    fold(cache, ("a", 4, 1))
    assert (cache.waiting, cache.is_dirty) == (3, False)
    fold(cache, ("b", 5, 1), loaded={"b": Current(b"1", 4, 2, "1 parked 4 no")})
    assert (cache.waiting, cache.is_dirty, sorted(cache.parked)) == (4, False, ["a", "b"])


def test_what_waits_for_a_key_that_another_engine_has_parked_is_counted_and_let_go() -> None:
    cache = states()
    fold(cache, ("a", 1, 1), ("a", 2, 1))
    changes = cache.take_changes()
    cache.commit(changes, Outcome(0, ("a",), present={"a": Current(b"0", 0, 3, "1 parked 1 no")}))
    assert (cache.waiting, cache.is_dirty, list(cache.parked)) == (2, False, ["a"])
    cache.reload(["a"], {"a": Current(b"7", 0, 4, "1")})  # a repair: they are not folded onto it
    assert (cache.take_changes(), cache._keys["a"].value) == ([], b"7")


def test_a_key_that_was_repaired_meanwhile_goes_on() -> None:
    cache = states()
    fold(cache, ("a", 1, 666))
    changes = cache.take_changes()
    assert cache.parked == {}  # nobody but this engine knows
    cache.commit(changes, Outcome(0, ("a",), present={"a": Current(b"7", 1, 3, "1")}))
    assert (cache.parked, cache.is_dirty) == ({}, False)
    cache = states()
    fold(cache, ("a", 2, 1), loaded={"a": Current(b"1", 1, 1, "1 parked 2 no")})
    assert list(cache.parked) == ["a"]
    cache.reload(["a"], {"a": Current(b"7", 2, 3, "1")})
    assert cache.parked == {}


def test_a_bucket_that_is_as_far_or_further_leaves_nothing_to_store() -> None:
    for sequence, is_dirty in ((1, True), (2, False), (9, False)):
        cache = states()
        fold(cache, ("a", 1, 1))
        cache.commit(cache.take_changes(), Outcome(1))
        fold(cache, ("a", 2, 1))
        assert cache.unsure() == ["a"]
        cache.reload(["a"], {"a": Current(b"2", sequence, 9, "1")})
        assert (cache.is_dirty, cache.unsure()) == (is_dirty, [])


def test_a_state_that_was_replaced_by_an_older_one_is_parked_as_it_is() -> None:
    cache = states()
    fold(cache, ("a", 1, 1), ("a", 3, 1))
    store(cache)
    fold(cache, ("a", 4, 1))
    with pytest.raises(StateGone) as caught:
        cache.commit(cache.take_changes(), Outcome(0, ("a",), present={"a": Current(b"1", 1, 9, "1")}))
    [parking] = caught.value.changes
    assert (parking.value, parking.operation, parking.sequence, parking.revision) == (b"1", "put", 1, 9)
    mark = Mark.read(parking.mark)
    assert mark is not None
    assert mark.parked is not None
    assert mark.parked.sequence == 0  # it was not an event
    assert caught.value.projection == "counts"
    assert caught.value.args == ("counts", [parking])


def test_a_value_of_somebody_else_is_not_gone_and_not_overwritten() -> None:
    cache = states()
    fold(cache, ("a", 3, 1))
    store(cache)
    fold(cache, ("a", 4, 1))
    cache.commit(cache.take_changes(), Outcome(0, ("a",), present={"a": Current(b"theirs", 0, 1, None)}))
    assert cache.parked == {"a": FOREIGN}
    assert not cache.is_dirty


def test_an_old_event_does_not_raise_a_key_whose_mark_was_tidied_away() -> None:
    cache = states()
    fold(cache, ("b", 2, 1), ("b", 3, 0))
    store(cache)
    cache.reload(["b"], {})
    fold(cache, ("b", 2, 100), ("b", 3, 100))
    assert (cache.known, cache.is_dirty) == (2, False)
    fold(cache, ("b", 6, 1))
    [change] = cache.take_changes()
    assert (change.value, change.sequence, change.revision) == (b"1", 6, 0)


def test_events_that_came_while_a_key_was_parked_are_not_folded_onto_its_repair() -> None:
    """It may have passed by others before them; events of a key that goes on are in hand."""
    for by, later in itertools.product((666, 1), ((), (("a", 4, 100),))):
        cache = states()
        fold(cache, ("a", 1, by))
        changes = cache.take_changes()
        fold(cache, ("a", 3, 10))
        cache.commit(changes, Outcome(1))
        fold(cache, *later)
        assert cache.unsure() == ["a"]
        cache.reload(["a"], {"a": Current(b"1", 1, 5, "1")})
        goes_on = [b"111" if later else b"11"]
        assert [change.value for change in cache.take_changes()] == ([] if by == 666 else goes_on)


@pytest.mark.parametrize(("keys", "left"), [(8, 7), (16, 14), (18, 15)])
def test_too_many_keys_are_cut_to_seven_eighths(keys: int, left: int) -> None:
    cache = states(keys=keys)
    fold(cache, *((f"k{number:02}", number + 1, 1) for number in range(keys)))
    store(cache)
    cache.shrink()
    assert len(cache) == keys
    fold(cache, ("last", 100, 1))
    store(cache)
    cache.shrink()
    assert len(cache) == left
    assert cache._size == sizes(cache)


def test_too_many_bytes_are_cut_to_seven_eighths() -> None:
    each = ENTRY_BYTES + 3 + 2
    for short, left in ((0, 16), (1, 13)):
        cache = states(size=16 * each - short)
        fold(cache, *((f"k{number:02}", number + 1, 1) for number in range(16)))
        store(cache)
        assert cache._size == sizes(cache) == 16 * each
        cache.shrink()
        assert len(cache) == left
        assert cache._size == sizes(cache) == left * each
    cache = states(size=16 * each - 8)
    fold(cache, *((f"k{number:02}", number + 1, 1) for number in range(16)))
    store(cache)
    cache.shrink()
    assert cache._size == 13 * each <= (16 * each - 8) * 7 // 8 < 14 * each


def test_what_was_used_last_is_kept() -> None:
    cache = states(keys=4)
    fold(cache, ("a", 1, 1), ("b", 2, 1), ("c", 3, 1), ("d", 4, 1))
    fold(cache, ("a", 5, 1))
    fold(cache, ("e", 6, 1))
    store(cache)
    cache.shrink()
    assert cache.missing(KeyRows((key, 9, None) for key in "abcde")) == ["b", "c"]


@pytest.mark.parametrize("seed", range(60))
def test_two_engines_and_a_bucket_come_to_what_folding_alone_makes(seed: int) -> None:
    """Whoever is first, whatever is not sure, and however little is kept."""
    rng = random.Random(seed)
    events = [(rng.choice("abc"), rng.randrange(4)) for _ in range(rng.randint(1, 25))]
    bucket: dict[str, Current] = {}
    engines = [states(keys=2), states(keys=2)]
    places = [0, 0]
    revision = 0

    def flush(engine: LiveStates) -> None:
        nonlocal revision
        if unsure := engine.unsure():
            engine.reload(unsure, bucket)
        changes = engine.take_changes()
        other = engines[engines.index(engine) - 1]
        if other.is_dirty and not other.unsure() and rng.random() < 0.5:
            flush(other)  # meanwhile
        conflicts, revisions = [], {}
        for change in changes:
            if bucket.get(change.key, NOTHING).revision != change.revision:
                conflicts.append(change.key)
                continue
            revision += 1
            value = change.value if change.operation == "put" else None
            bucket[change.key] = Current(value, change.sequence or 0, revision, change.mark)
            if rng.random() < 0.5:
                revisions[change.key] = revision
        outcome = Outcome(len(changes) - len(conflicts), tuple(conflicts), revisions=revisions, present=dict(bucket))
        engine.commit(changes, outcome)
        engine.shrink()

    while any(place < len(events) for place in places) or any(engine.is_dirty for engine in engines):
        number = rng.randrange(2)
        engine, place = engines[number], places[number]
        count = rng.randint(0, 5)
        rows = [(key, place + 1 + n, by) for n, (key, by) in enumerate(events[place : place + count])]
        fold(engine, *rows, loaded=bucket)
        places[number] += len(rows)
        flush(engine)
        if not engine.is_dirty:
            assert engine._size == sizes(engine)
    for key in "abc":
        state = KeyState(SPEC, key, NOTHING)
        for sequence, (name, by) in enumerate(events, 1):
            if name == key:
                state.apply(SPEC, key, sequence, Counted(name=key, by=by))
        assert bucket.get(key, NOTHING).value == state.value
