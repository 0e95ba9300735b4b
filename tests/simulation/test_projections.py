"""Do live projections keep their promises when workers, servers and connections die? A seed is a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from simulation.partition_world import quiet
from simulation.projection_world import LateWorld, world_of
from support import seeds

from jetspark.app.projections import live_engine, live_states
from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.live_engine import LiveEngine
from jetspark.state.changes import Change
from jetspark.state.lookup import Lookup
from jetspark.state.store import StateBucket


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.parametrize("seed", seeds.tried([*range(8), 13, 477], 0))
def test_every_state_is_what_a_plain_loop_makes_whatever_dies(seed: int) -> None:
    world_of(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("is_fresh", [False, True])
def test_every_state_is_right_for_many_more_seeds(is_fresh: bool) -> None:
    for seed in seeds.given() or (seeds.fresh(20) if is_fresh else range(1000, 1020)):
        try:
            world_of(seed).run()
        except BaseException as error:
            raise AssertionError(seeds.again(seed)) from error


def test_the_seeds_reach_what_they_are_for() -> None:
    worlds = [world_of(seed) for seed in (*range(100, 106), 33)]
    for world in worlds:
        world.run()
    assert sum(world.kills for world in worlds) > 10
    assert sum(world.conflicts for world in worlds) > 2
    assert sum(world.held_replicas for world in worlds) > 10
    assert sum(world.looks for world in worlds) > 50
    assert sum(world.joins for world in worlds) > 0


def test_a_new_projection_keeps_no_other_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_engine, "PIECE", 10)  # so that it takes a while
    world = LateWorld(3, history=300)
    world.run()
    news = [at for at, (name, sequence) in enumerate(world.writes) if name == "balances" and sequence > 300]
    late = [at for at, (name, sequence) in enumerate(world.writes) if name == "moves" and sequence <= 250]
    assert len(late) > 10
    assert sum(at < late[-1] for at in news) > 5
    assert world.joins == 1


# ---- engines that are wrong, each in one way -------------------------------------------------------------------------


def _applies_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes an event that the state has already."""

    def apply(self: live_states.LiveStates, rows: Any) -> None:
        self._rows.append(rows)
        for key, sequence, event in rows:
            entry = self._keys[key]
            if entry.parked is None:
                entry.fold(self.spec, key, sequence, event)
                self._dirty[key] = entry

    monkeypatch.setattr(live_states.LiveStates, "apply", apply)


def _moves_the_position_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says that events are stored that were only read: after a crash they are skipped."""
    store = LiveEngine._store_in

    async def store_in(self: LiveEngine, place: Any, with_position: bool) -> bool:
        self._through = self._read
        return await store(self, place, with_position)

    monkeypatch.setattr(LiveEngine, "_store_in", store_in)


def _forgets_tombstones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps no sequence of a deleted key."""
    change = KeyState.change

    def forgetful(self: KeyState, spec: Any, key: str) -> Change | None:
        found = change(self, spec, key)
        return found if found is None or found.operation == "put" else found._replace(sequence=0)

    monkeypatch.setattr(KeyState, "change", forgetful)


def _writes_without_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores whatever is there."""
    take = live_states.LiveStates.take_changes

    def careless(self: live_states.LiveStates) -> list[Change]:
        return [change._replace(revision=None) for change in take(self)]

    monkeypatch.setattr(live_states.LiveStates, "take_changes", careless)


def _drops_rows_in_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes what others wrote for all there is."""
    rebase = live_states.LiveStates._rebase

    def dropping(self: live_states.LiveStates, present: Any) -> None:
        for key in present:
            self._keys[key].passed = self._last
        rebase(self, present)

    monkeypatch.setattr(live_states.LiveStates, "_rebase", dropping)


def _skips_what_it_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def skip(*args: Any) -> None:
        pass

    monkeypatch.setattr(LiveEngine, "_write_dead_letter", skip)


def _skips_after_a_nak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes events in the order in which a consumer delivers them that was given one back: 2, 3, 4, then 1."""
    fold = LiveEngine._fold

    async def out_of_order(self: LiveEngine, messages: Any) -> None:
        await fold(self, [*messages[1:], messages[0]])

    monkeypatch.setattr(LiveEngine, "_fold", out_of_order)


def _mixes_two_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the value of a key from one moment, and its sequence and revision from another."""
    load_all = StateBucket.load_all
    earlier: dict[tuple[int, str], bytes | None] = {}

    def mixing(self: StateBucket, keys: Any) -> Any:
        found = yield from load_all(self, keys)
        mixed = {}
        for key, current in found.items():
            mixed[key] = current._replace(value=earlier.setdefault((id(self._config), key), current.value))
        return mixed

    monkeypatch.setattr(StateBucket, "load_all", mixing)


def _believes_any_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes what a replica says that is behind for what is."""
    init = Lookup.__init__

    def credulous(self: Lookup, *args: Any, at_least: int = 0, probe_subject: str | None = None) -> None:
        init(self, *args)

    monkeypatch.setattr(Lookup, "__init__", credulous)


@pytest.mark.parametrize(
    ("mistake", "first"),
    [
        # The first seed that shows the mistake today, so that none before it is run each time for nothing.
        (_applies_twice, 2),
        (_moves_the_position_first, 4),
        (_forgets_tombstones, 0),
        (_writes_without_looking, 2),
        (_drops_rows_in_conflict, 1),
        (_skips_what_it_cannot_read, 1),
        (_skips_after_a_nak, 0),
        (_mixes_two_snapshots, 0),
        (_believes_any_replica, 4),
    ],
)
def test_an_engine_that_is_wrong_is_caught(
    mistake: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    for seed in range(first, first + 60):
        world = world_of(seed)
        world.patience_s = 30.0
        try:
            world.run()
        except (AssertionError, TimeoutError):
            return
    pytest.fail("no checker has noticed")
