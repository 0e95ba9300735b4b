"""Commands in trouble, in virtual time: linearizable, none decided twice, each reply equal to its retries'."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
from simulation.command_world import CommandWorld
from support import seeds
from support.accounts import EnterAtTurn, EnterBlindly, EnterFive, ledger_model, turns_model
from support.linear import NotLinearizable, check_linearizable

from jetspark.app.commands.decision_store import CommandStore


def check(world: CommandWorld) -> None:
    world.run()
    check_linearizable(world.operations, world.entries(), ledger_model(5), 0)


@pytest.mark.parametrize("seed", seeds.tried(range(8), 2))
def test_commands_are_linearizable_whatever_dies_and_gets_lost(seed: int) -> None:
    world = CommandWorld(seed, EnterFive)
    check(world)
    assert len(world.operations) == 20, seeds.again(seed)


@pytest.mark.parametrize("workers", [0, 2], ids=["no workers", "beside workers"])
@pytest.mark.parametrize("seed", seeds.tried(range(8), 2))
def test_commands_that_callers_decide_themselves_are_linearizable_too(seed: int, workers: int) -> None:
    world = CommandWorld(seed, EnterFive, workers=workers, callers=5, here=3 if workers else 5)
    check(world)
    assert len(world.operations) == 20, seeds.again(seed)


@pytest.mark.parametrize("here", [0, 3], ids=["by workers", "by some callers"])
@pytest.mark.parametrize("seed", seeds.tried(range(8), 4))
def test_what_is_refused_is_not_stored_later(seed: int, here: int) -> None:
    """Though a first attempt may still be under way when the second one is refused."""
    world = CommandWorld(seed, EnterAtTurn, callers=6, calls=8, here=here)
    world.run()
    check_linearizable(world.operations, world.entries(), turns_model, 0)


def test_the_checker_finds_a_decision_that_does_not_look_at_the_past() -> None:
    with pytest.raises(NotLinearizable):
        check(CommandWorld(1, EnterBlindly))


def test_the_checker_finds_a_worker_that_forgets_the_guards() -> None:
    def check_many() -> None:
        for seed in range(20):
            # A worker may notice by itself that the stream has an event which it does not know.
            with contextlib.suppress(ExceptionGroup):
                check(CommandWorld(seed, EnterFive))

    with mock.patch.object(CommandStore, "guard_headers", return_value={}), pytest.raises(NotLinearizable):
        check_many()


def test_the_seeds_reach_what_they_are_for() -> None:
    kills = lost = doubts = 0
    for seed in range(2):
        world = CommandWorld(seed, EnterFive)
        world.run()
        kills, lost, doubts = kills + world.kills, lost + world.lost_replies, doubts + world.doubts
    assert (kills > 2, lost > 0, doubts > 2) == (True, True, True), (kills, lost, doubts)


def test_the_seeds_reach_what_callers_that_decide_themselves_are_for() -> None:
    cancelled = closed = doubts = conflicts = 0
    for seed in range(12):
        world = CommandWorld(seed, EnterFive, workers=0, here=5)
        world.run()
        cancelled, closed = cancelled + world.cancelled, closed + world.closed
        doubts, conflicts = doubts + world.doubts, conflicts + world.conflicts
    assert (cancelled > 2, closed > 2, doubts > 2) == (True, True, True), (cancelled, closed, doubts, conflicts)
