"""States that are folded to be compared, of which few are in memory."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from support.repeated import Closed, Moved, app

from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.live_states import CacheLimits
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.router import KeyRows
from jetspark.app.projections.state_header import Identified
from jetspark.app.replay import scratch_states
from jetspark.app.replay.comparison import KeyContent, compare
from jetspark.app.replay.scratch_states import ENTRY_BYTES, ScratchStates
from jetspark.errors import UsageError
from jetspark.state.changes import NOTHING, Current

PLAIN, UNIQUE = app.projections["plain"], app.projections["sums"]


def some_rows(spec: ProjectionSpec, seed: int, count: int = 3_000, keys: int = 200) -> KeyRows:
    rng, rows = random.Random(seed), KeyRows()
    for sequence in range(1, count + 1):
        key = f"k{rng.randrange(keys)}"
        cents = 66 if rng.random() < 0.01 else rng.randrange(9)
        event = Closed(account=key) if rng.random() < 0.2 else Moved(source="x", target=key, cents=cents)
        id = rng.randrange(count).to_bytes(12)
        rows.add(key, sequence, Identified(id, event) if spec.unique_ids else event)
    return rows


def folded(spec: ProjectionSpec, rows: KeyRows) -> dict[str, KeyState]:
    states: dict[str, KeyState] = {}
    for key, sequence, event in rows:
        states.setdefault(key, KeyState(spec, key, NOTHING)).apply(spec, key, sequence, event)
    return states


def pieces(rows: KeyRows, size: int) -> list[KeyRows]:
    listed = list(rows)
    return [KeyRows(listed[begin : begin + size]) for begin in range(0, len(listed), size)]


def current(spec: ProjectionSpec, state: KeyState, revision: int = 1) -> Current:
    return Current(state.value, state.sequence, revision, spec.mark(state.parked, state.ids))


LIMITS = {
    "all fit": CacheLimits(1_000, 1 << 30),
    "few fit": CacheLimits(20, 1 << 30),
    "one fits": CacheLimits(1, 1 << 30),
    "few bytes": CacheLimits(1_000, 20 * (ENTRY_BYTES + 10)),
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=list(LIMITS))
@pytest.mark.parametrize("spec", [PLAIN, UNIQUE], ids=["plain", "unique"])
@pytest.mark.parametrize("seed", range(3))
def test_states_are_the_same_however_few_are_in_memory(seed: int, spec: ProjectionSpec, limits: CacheLimits) -> None:
    rows = some_rows(spec, seed)
    right = folded(spec, rows)
    with ScratchStates(spec, limits) as scratch:
        for piece in pieces(rows, 50):
            scratch.apply(piece)
            assert len(scratch) <= limits.keys
        found = [each for some in scratch.items() for each in some]
        assert (scratch.spilled > 0) == (limits is not LIMITS["all fit"])
        assert len(scratch) <= 20 or limits is LIMITS["all fit"]
    contents = {
        each.key: each.content._replace(parked=each.content.parked and each.content.parked._replace(reason=""))
        for each in found
    }
    assert len(found) == len(contents)
    assert contents == {
        key: KeyContent.of_state(state)._replace(parked=state.parked and state.parked._replace(reason=""))
        for key, state in right.items()
    }


@pytest.mark.parametrize("limits", LIMITS.values(), ids=list(LIMITS))
@pytest.mark.parametrize("spec", [PLAIN, UNIQUE], ids=["plain", "unique"])
def test_of_a_key_that_comes_more_than_once_the_last_revision_is_compared(
    spec: ProjectionSpec, limits: CacheLimits
) -> None:
    rows = some_rows(spec, 7)
    right = folded(spec, rows)
    held = {key: state for key, state in right.items() if state.parked is None and state.value is not None}
    same, other, before, unknown = sorted(held)[0], sorted(held)[1], sorted(held)[2], "never"
    with ScratchStates(spec, limits) as scratch:
        for piece in pieces(rows, 50):
            scratch.apply(piece)
        scratch.compare({same: Current(b"0", 1, 1, "1"), before: current(spec, held[before])}, 1)
        for key, state in sorted(right.items()):
            if key != before:
                scratch.compare({key: current(spec, state)}, 1)
        scratch.compare({same: current(spec, held[same], 2), other: current(spec, held[other])._replace(value=b"9")}, 1)
        scratch.compare({before: current(spec, held[before])._replace(sequence=99_999)}, 1)
        scratch.compare({unknown: Current(b"1", 1, 5, spec.mark(None, b""))}, 1)
        found = {each.key: each for some in scratch.items() for each in some}
    assert found[unknown].content == KeyContent(None)
    unequal = {key for key, each in found.items() if not each.is_equal}
    assert unequal == {other, before, unknown, *(key for key, state in right.items() if state.parked is not None)}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=list(LIMITS))
@pytest.mark.parametrize("spec", [PLAIN, UNIQUE], ids=["plain", "unique"])
@pytest.mark.parametrize("seed", range(3))
def test_keys_that_differ_are_continued_to_where_the_bucket_has_them(
    seed: int, spec: ProjectionSpec, limits: CacheLimits
) -> None:
    rng, rows, boundary = random.Random(seed), some_rows(spec, seed), 1_500
    early, late = KeyRows(row for row in rows if row[1] <= boundary), [row for row in rows if row[1] > boundary]
    ends = {key: rng.choice([boundary, 2_000, 2_500, 3_000]) for key in {*rows.keys}}
    right = folded(spec, KeyRows(row for row in rows if row[1] <= ends[row[0]]))
    bucket = {key: current(spec, state) for key, state in right.items()}
    wrong = Current(b"0", 10**30, 7, None)  # by another program
    bucket |= {"k1": wrong, "never": wrong}
    with ScratchStates(spec, limits) as scratch:
        for piece in pieces(early, 50):
            scratch.apply(piece)
        scratch.compare({key: bucket[key] for key in sorted(bucket)[::2]}, 1)
        passed: list[str] = []
        for keys in scratch.differing(7):
            passed += keys
            assert len(keys) <= 7
            scratch.compare({key: bucket.get(key, NOTHING) for key in keys}, 1)
        assert len(passed) == len(set(passed))
        for piece in pieces(KeyRows(late), 50):
            scratch.continue_with(piece)
            assert len(scratch) <= limits.keys
        items = {each.key: each for some in scratch.items() for each in some}
    for key, each in items.items():
        assert each.is_equal == (each.found == NOTHING)
        if key in ("k1", "never"):
            assert (each.is_equal, each.found) == (False, wrong)
        elif not each.is_equal:
            assert (each.found, compare(key, each.content, each.found, 1)) == (bucket[key], None)
    assert {key for key in items if not items[key].is_equal} <= {*passed}
    assert {key for key, found in bucket.items() if KeyContent.of_current(found).reach > boundary} <= {*passed}


def test_a_state_of_another_version_is_another_state_unless_any_will_do() -> None:
    with ScratchStates(PLAIN, LIMITS["few fit"]) as scratch:
        scratch.apply(KeyRows([("k", 1, Moved(source="x", target="k", cents=5))]))
        found = Current(b"5", 1, 3, "2")
        for version, is_equal in ((1, False), (None, True)):
            scratch.compare({"k": found}, version)
            [[each]] = scratch.items()
            assert each.is_equal == is_equal


def test_it_begins_with_states_that_somebody_has() -> None:
    states = {f"k{number}": Current(b"%d" % number, number, 1, "1") for number in range(1, 60)}
    with ScratchStates(PLAIN, LIMITS["few fit"]) as scratch:
        scratch.begin_all(states)
        assert len(scratch) <= 20
        found = {each.key: each.content for some in scratch.items() for each in some}
    assert found == {key: KeyContent.of_current(each) for key, each in states.items()}


def test_a_key_may_be_any_bytes_that_a_subject_may_be() -> None:
    names = ["ä", "\udcff", "k"]
    with ScratchStates(PLAIN, LIMITS["one fits"]) as scratch:
        for sequence, name in enumerate(names * 2, start=1):
            scratch.apply(KeyRows([(name, sequence, Moved(source="x", target=name, cents=5))]))
        found = {each.key: each.content.value for some in scratch.items() for each in some}
    assert found == dict.fromkeys(names, b"10")


def test_a_file_that_cannot_take_more_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_states, "PRAGMAS", (*scratch_states.PRAGMAS, "max_page_count=3"))
    rows = some_rows(PLAIN, 1, keys=2_000)
    said = r"disk is full, after \d+ states: expected room for all keys in the folder TMPDIR"
    with ScratchStates(PLAIN, LIMITS["one fits"]) as scratch, pytest.raises(UsageError, match=said):
        scratch.apply(rows)


def test_the_file_has_no_name_and_goes_with_the_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with ScratchStates(PLAIN, LIMITS["one fits"]) as scratch:
        for piece in pieces(some_rows(PLAIN, 1), 50):
            scratch.apply(piece)
        assert scratch.spilled > 100
        assert list(tmp_path.iterdir()) == []
    if files is not None:
        assert len(os.listdir("/proc/self/fd")) == files
