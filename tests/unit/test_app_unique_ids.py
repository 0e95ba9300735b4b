"""Projections that fold an event once however often it is stored: ``unique_ids``."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from support.projections import route_one
from support.repeated import WINDOW, Closed, Held, Moved, Sums, app, oracle, some_messages

from jetspark.app import App, Command, Event, encode
from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.live_states import CacheLimits, LiveStates
from jetspark.app.projections.projection_spec import ProjectionArguments, ProjectionSpec
from jetspark.app.projections.router import KeyRows, Recorded, Router
from jetspark.app.projections.state_header import (
    ID_BYTES,
    MAX_UNIQUE_IDS,
    Identified,
    Mark,
    Parked,
    digest_of,
    is_among,
    room_for,
)
from jetspark.app.projections.windows import Window
from jetspark.app.replay.comparison import Digest, KeyContent, change_to, compare
from jetspark.app.replay.replay_check import NotReplayable, ReplayCheckOptions, check_replay
from jetspark.errors import ConfigError, UsageError
from jetspark.jetstream.kv import KVConfig
from jetspark.state.changes import NOTHING, Change, Current, Outcome, header_bytes

GOLDEN = json.loads((Path(__file__).parent / "state_bytes.json").read_text())["unique"]
NOON = datetime.datetime(2026, 3, 31, 12, tzinfo=datetime.UTC)
SPEC = app.projections["sums"]


def moved(source: str, target: str, cents: int) -> Moved:
    return Moved(source=source, target=target, cents=cents)


def recorded(count: int, seed: int) -> list[Recorded]:
    return [
        Recorded(number, each.subject, each.data, each.headers, 0)
        for number, each in enumerate(some_messages(count, seed), start=1)
    ]


def current(change: Change, revision: int = 1) -> Current:
    return Current(change.value if change.operation == "put" else None, change.sequence or 0, revision, change.mark)


def held(current: Current) -> Held:
    mark = Mark.read(current.mark)
    assert mark is not None
    ids = tuple(mark.ids[at : at + ID_BYTES] for at in range(0, len(mark.ids), ID_BYTES))
    return Held(current.value, current.sequence, ids, mark.parked and mark.parked.sequence)


def folded(messages: list[Recorded], cuts: int = 10**9) -> dict[str, Held]:
    """Folded in batches, each from what the one before has stored."""
    router, stored = Router([SPEC], app.catalogue), dict[str, Current]()
    for begin in range(0, len(messages), cuts):
        states: dict[str, KeyState] = {}
        # With some that were folded before, as after a crash.
        for message in messages[max(0, begin - 5) : begin + cuts]:
            for _, key, sequence, event in route_one(router, message).rows:
                state = states.setdefault(key, KeyState(SPEC, key, stored.get(key, NOTHING)))
                state.apply(SPEC, key, sequence, event)
        for key, state in states.items():
            if (change := state.change(SPEC, key)) is not None:
                stored[key] = current(change)
    return {key: held(each) for key, each in stored.items()}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("cuts", [1, 7, 1000])
def test_an_event_that_is_stored_again_is_folded_once_however_the_stream_is_cut(seed: int, cuts: int) -> None:
    messages = recorded(400, seed)
    assert folded(messages, cuts) == {
        key: each for key, each in oracle(messages).items() if each.sequence or each.parked
    }


@pytest.mark.parametrize("seed", range(4))
def test_rows_as_columns_have_the_ids_that_rows_one_by_one_have(seed: int) -> None:
    messages, router = recorded(200, seed), Router(app.projections.values(), app.catalogue)
    rows = {name: KeyRows() for name in app.projections}
    router.add_rows(messages, [each.sequence for each in messages], lambda each: each, rows)
    one_by_one = [row for message in messages for row in route_one(router, message).rows]
    for name in app.projections:
        assert list(rows[name]) == [row[1:] for row in one_by_one if row.projection == name]
    assert {type(event) for _, _, event in rows["sums"]} == {Identified}
    assert {type(event) for _, _, event in rows["plain"]} <= {Moved, Closed}


def test_an_event_is_told_from_others_by_its_source_and_its_id() -> None:
    assert digest_of("/a", "b/c") != digest_of("/a/b", "c")
    assert digest_of("/a", "\ud800") != digest_of("/a", "\ud801")
    ids = b"".join(digest_of("/a", str(number)) for number in range(50))
    assert all(is_among(digest_of("/a", str(number)), ids) for number in range(50))
    assert not is_among(digest_of("/a", "50"), ids)
    assert not is_among(ids[5 : 5 + ID_BYTES], ids)  # of two ids a part each
    assert is_among(ids[5 : 5 + ID_BYTES], ids + ids[5 : 5 + ID_BYTES])


def apply(state: KeyState, *cents: int, first: int = 1) -> None:
    for sequence, each in enumerate(cents, start=first):
        state.apply(SPEC, "k", sequence, Identified(digest_of("/", str(each)), moved("x", "k", each)))


def test_as_many_ids_are_kept_as_were_declared_and_the_next_one_is_forgotten() -> None:
    state = KeyState(SPEC, "k", NOTHING)
    apply(state, 1, 2, 3, 1)
    assert (state.value, state.sequence, state.known) == (b"6", 3, 1)
    apply(state, 4, 1, first=5)  # three others came since
    assert (state.value, state.sequence, len(state.ids)) == (b"11", 6, WINDOW * ID_BYTES)


def test_an_event_that_was_ignored_is_known_when_it_comes_again() -> None:
    state = KeyState(SPEC, "k", NOTHING)
    apply(state, 0)
    change = state.change(SPEC, "k")
    assert change is not None
    assert (change.operation, change.sequence) == ("delete", 1)
    again = KeyState(SPEC, "k", current(change))
    apply(again, 0, first=2)
    assert (again.known, again.sequence, again.change(SPEC, "k")) == (1, 1, None)


def test_an_event_that_is_refused_parks_its_key_and_is_not_taken() -> None:
    state = KeyState(SPEC, "k", NOTHING)
    apply(state, 5, 66)
    change = state.change(SPEC, "k")
    assert change is not None
    mark = Mark.read(change.mark)
    assert mark == Mark(1, Parked(2, "ValueError: cannot be applied"), WINDOW, digest_of("/", "5"))


@pytest.mark.parametrize("loaded", ["1", f"1 unique {WINDOW + 1}:", f"1 unique {WINDOW}:"])
def test_a_state_that_was_made_with_another_number_of_ids_is_not_folded_on(loaded: str) -> None:
    spec = SPEC if loaded != f"1 unique {WINDOW}:" else app.projections["plain"]
    with pytest.raises(UsageError, match="another version and rebuild"):
        KeyState(spec, "k", Current(b"1", 3, 9, loaded))


@pytest.mark.parametrize("text", ["1 unique 3", "1 unique x:", "1 unique 3:!", "1 unique 3:QUJD", "1 unique 3: else"])
def test_a_mark_that_no_engine_has_written_is_foreign(text: str) -> None:
    assert Mark.read(text) is None


@pytest.mark.parametrize("value", [0, -1, MAX_UNIQUE_IDS + 1, True, 2.0, "3", [3]])
def test_a_number_of_ids_that_cannot_be_kept_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"projection 'sums': unique_ids=.*: expected how many ids each key keeps"):
        ProjectionSpec("sums", Sums, ProjectionArguments(events=[Moved], bucket="sums", unique_ids=value))


def test_the_ids_take_their_room_of_what_a_message_may_have() -> None:
    plain = app.projections["plain"]
    most = ProjectionSpec("sums", Sums, ProjectionArguments(events=[Moved], bucket="sums", unique_ids=MAX_UNIQUE_IDS))
    assert plain.max_state_bytes - most.max_state_bytes == room_for(MAX_UNIQUE_IDS)
    mark = str(Mark(10**9, None, MAX_UNIQUE_IDS, bytes(MAX_UNIQUE_IDS * ID_BYTES)))
    assert len(mark) <= room_for(MAX_UNIQUE_IDS) < 65_000
    assert most.within(1 << 19).max_state_bytes < plain.within(1 << 19).max_state_bytes
    assert most.renewed().options == most.options
    small = KVConfig(bucket="sums", max_value_bytes=4096)
    with pytest.raises(ConfigError, match="max_value_bytes=4096 of bucket sums: the ids take"):
        ProjectionSpec("sums", Sums, ProjectionArguments(events=[Moved], bucket=small, unique_ids=500))


def test_what_has_no_ids_of_its_own_is_refused_with_them() -> None:
    class Looking:
        def key(self, event: Moved) -> str:
            return event.source

        def apply(self, state: int | None, event: Moved, lookup: Any) -> int:
            return 0

    other = App("other", stream="LEDGER", subjects=["ledger.>"])
    other.projection("sums", events=[Moved], bucket="sums", unique_ids=5)(Sums)
    with pytest.raises(ConfigError, match="lookups= is not supported with unique_ids="):
        other.projection("looking", events=[Moved], bucket="looking", lookups=["sums"])(Looking)

    @other.command("move", snapshot="sums")
    class Move(Command):
        def reads(self) -> list[str]:
            return ["ledger.a.*"]

        def snapshot_key(self) -> str:
            return "a"

        def decide(self, past: Any) -> list[Event]:
            return []

    with pytest.raises(ConfigError, match="snapshot='sums': expected a projection without unique_ids"):
        other.topology()


def test_every_firing_of_a_timer_is_an_event_of_its_own() -> None:
    sent = encode(moved("a", "b", 1), id="timer-1", source=app.source, time=NOON)
    router = Router([SPEC], app.catalogue)
    headers = [{**sent.headers, "Nats-Schedule-Next": moment} for moment in ("2026-03-31T10:00:00Z", "purge")]
    headers += [{**sent.headers, "Nats-Schedule-Next": "2026-03-31T11:00:00Z"}, sent.headers]
    ids = [route_one(router, Recorded(1, sent.subject, sent.data, each, 0)).rows[0].event.id for each in headers]
    assert len(set(ids)) == 3
    assert ids[1] == ids[3] == digest_of(app.source, "timer-1")  # the last firing, and one that is stored again


def test_a_state_that_lost_a_race_is_folded_on_what_the_winner_has_with_its_ids() -> None:
    states = LiveStates(SPEC, CacheLimits(100, 1 << 20))
    events = [Identified(digest_of("/", str(cents)), moved("x", "k", cents)) for cents in (1, 2, 1)]
    states.add(["k"], {})
    states.apply(KeyRows(("k", sequence, event) for sequence, event in enumerate(events, start=1)))
    [change] = states.take_changes()
    assert change.value == b"3"
    winner = KeyState(SPEC, "k", NOTHING)
    winner.apply(SPEC, "k", 1, events[0])
    found = winner.change(SPEC, "k")
    assert found is not None
    states.commit([change], Outcome(conflicts=("k",), present={"k": current(found, 7)}))
    [again] = states.take_changes()
    assert (again.value, again.sequence, again.mark, again.revision) == (b"3", 2, change.mark, 7)


def test_ids_of_a_deleted_key_stay_in_hand_when_its_marker_is_tidied_away() -> None:
    states = LiveStates(SPEC, CacheLimits(100, 1 << 20))
    first, last = Identified(b"m" * ID_BYTES, moved("x", "k", 1)), Identified(b"c" * ID_BYTES, Closed(account="k"))
    states.add(["k"], {})
    states.apply(KeyRows([("k", 1, first), ("k", 2, last)]))
    [change] = states.take_changes()
    states.commit([change], Outcome(1, revisions={"k": 5}))
    states.apply(KeyRows([("k", 3, Identified(digest_of("/", "n"), moved("x", "k", 4)))]))
    [more] = states.take_changes()
    states.commit([more], Outcome(conflicts=("k",), present={}))  # the marker is gone
    [again] = states.take_changes()
    assert (again.revision, again.value, again.mark) == (0, b"4", more.mark)


def test_a_difference_of_ids_alone_is_found_and_repaired() -> None:
    right = KeyContent(b"5", 7, None, digest_of("/", "1") + digest_of("/", "2"))
    wrong = Current(b"5", 7, 3, SPEC.mark(None, digest_of("/", "2")))
    found = compare("k", right, wrong, 1)
    assert found is not None
    assert found.kind == "ids"
    change = change_to(SPEC, "k", right, wrong)
    assert change is not None
    assert compare("k", right, current(change), 1) is None


# ---- the bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["put", "delete", "parked"])
def test_a_state_with_ids_is_stored_as_ever(name: str) -> None:
    state = KeyState(SPEC, "k", NOTHING)
    events: list[Event] = [moved("x", "k", 5), Closed(account="k")] if name == "delete" else [moved("x", "k", 5)]
    events += [moved("x", "k", 66)] if name == "parked" else []
    for number, event in enumerate(events, start=7):
        state.apply(SPEC, "k", number, Identified(digest_of("/shop", f"e-{number}"), event))
    change = state.change(SPEC, "k")
    assert change is not None
    block = header_bytes(change._replace(revision=None), "")
    assert block is not None
    assert {"headers": block.decode(), "value": change.value.decode()} == GOLDEN[name]


def test_a_digest_of_states_with_ids_is_what_it_was() -> None:
    digest = Digest()
    digest.add("k", KeyContent(b"5", 7, None, digest_of("/shop", "e-7")))
    assert str(digest) == GOLDEN["digest"]


# ---- check_replay ----------------------------------------------------------------------------------------------------

EVENTS = [moved("a", "b", cents) for cents in range(1, 8)]


def test_check_replay_folds_duplicate_ids_as_the_projection_does() -> None:
    ids = ["1", "2", "1", "3", "4", "5", "1"]  # the last one is out of the window by then
    assert check_replay(app, "sums", EVENTS, ids=ids) == {"a": -25, "b": 25}
    assert check_replay(app, "plain", EVENTS, ids=ids) == {"a": -28, "b": 28}


def test_check_replay_tells_a_fold_that_counts_an_event_twice() -> None:
    with pytest.raises(
        NotReplayable, match=r"stored again with its id, \d events later, it changes key 'a' .*unique_ids=4"
    ):
        check_replay(app, "plain", EVENTS, ReplayCheckOptions(duplicates=4))
    check_replay(app, "plain", EVENTS, ReplayCheckOptions(duplicates=0))
    with pytest.raises(NotReplayable, match="declare more than unique_ids=3"):
        check_replay(app, "sums", EVENTS, ReplayCheckOptions(duplicates=7))


def test_check_replay_tells_a_duplicate_that_is_late_for_its_window() -> None:
    other = App("other", stream="LEDGER", subjects=["ledger.>"])
    for name, late in (("apart", "apart"), ("keep", "keep")):
        window = Window(size_s=60, grace_s=60, late=late)  # type: ignore[arg-type]
        other.projection(name, events=[Moved], bucket=name, unique_ids=50, window=window)(Sums)
    times = [NOON + datetime.timedelta(minutes=number) for number in range(7)]
    check_replay(other, "keep", EVENTS, times=times)
    with pytest.raises(NotReplayable, match="late for its window: give the window a longer grace_s"):
        check_replay(other, "apart", EVENTS, times=times)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ids": ["1"]}, "ids: expected one for each of 7 events, got 1"),
        ({"ids": [1] * 7}, "ids=1"),
        ({"ids": [""] * 7}, "id=''"),
        ({"duplicates": -1}, "duplicates=-1"),
        ({"duplicates": "many"}, "duplicates='many'"),
    ],
)
def test_check_replay_says_what_is_wrong_with_ids(options: dict[str, Any], said: str) -> None:
    options = dict(options)
    ids = options.pop("ids", None)
    with pytest.raises((ConfigError, NotReplayable), match=said):
        check_replay(app, "sums", EVENTS, ReplayCheckOptions(**options), ids=ids)


def test_bytes_are_those_of_a_projection_without_ids_where_it_is_off() -> None:
    plain = app.projections["plain"]
    assert (plain.unique_ids, plain.mark(None, b""), plain.options.unique_ids) == (0, "1", None)
