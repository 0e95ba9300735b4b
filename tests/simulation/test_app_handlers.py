"""Do the promises of handlers hold when workers crash anywhere? A seed is a run, and no time passes."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any, ClassVar

import pytest
from simulation.app_world import Faults, Stored, World
from support import seeds

from jetspark.app.handlers.handler_steps import (
    CloseDeadLetter,
    DropParked,
    FindDeadLetter,
    WriteDeadLetter,
    WriteSchedule,
)
from jetspark.app.handlers.lanes import WorkItem
from jetspark.app.handlers.machine import HandlerLimits
from jetspark.app.handlers.retry import Breaker, RetryPolicy

POLICY = RetryPolicy(attempts=4, first_s=0.5, max_s=600, in_lane_s=5)


def world_of(seed: int, faults: Faults, kind: type[World] = World, *, batch: int = 1) -> World:
    rng = random.Random(seed)
    limits = HandlerLimits(
        concurrency=rng.choice([1, 2, 5, 20]),
        rate=rng.choice([None, None, 5.0, 50.0]),
        burst=rng.choice([1, 3, 20]),
        timeout_s=5.0,
        ack_wait_s=30.0,
        max_messages=rng.choice([2, 4, 30, 100]),
        max_bytes=rng.choice([20, 100, 10_000]),
    )
    keys = rng.choice([0, 1, 5, 30])
    if batch > 1:  # a batch handler keeps no order, and holds at least one batch
        limits, keys = dataclasses.replace(limits, batch=batch, concurrency=20, max_messages=30, max_bytes=10_000), 0
    return kind(
        seed,
        events=40,
        keys=keys,
        limits=limits,
        policy=POLICY,
        faults=faults,
        breaker=rng.choice([None, None, Breaker(failures=3, open_s=7.0)]),
    )


def finish(world: World) -> None:
    """The operator mends the code, redrives or discards what is dead, until nothing is left."""
    for _ in range(100):
        world.run_until_quiet()
        dead_letters = world.open()
        if not dead_letters:
            break
        if world.rng.random() < 0.5:
            world.trouble.clear()
        for sequence in dead_letters:
            if world.rng.random() < 0.2:
                world.discard(sequence)
            else:
                ref = world._ref(sequence)
                assert ref is not None
                world.request(ref)
    check_nothing_is_forgotten(world)
    check_rate(world)


def check_nothing_is_forgotten(world: World) -> None:
    assert all(count == 1 for count in world.open_dead_letters.values()), "one failure, two letters"
    assert all(world.done.values()), f"not done: {[each for each, count in world.done.items() if not count]}"
    assert [each for each in world.dead_letters.values() if each.status != "closed"] == [], "letters stay"
    assert world.parked == {}, "keys stay parked"
    assert world.machine.held == world.machine.running == world.machine.held_bytes == 0
    assert len(world.machine.lanes) == 0


def check_rate(world: World) -> None:
    rate, burst = world.limits.rate, world.limits.burst
    if rate is None or burst is None or world.crashes:  # each worker has a bucket of its own
        return
    for first, began in enumerate(world.starts):
        for last in range(first, len(world.starts)):
            assert last - first + 1 <= burst + rate * (world.starts[last] - began) + 1e-3, "faster than the rate"


@pytest.mark.parametrize("seed", seeds.tried(range(40), 5))
def test_without_faults_every_event_is_done_exactly_once(seed: int) -> None:
    world = world_of(seed, Faults())
    finish(world)
    assert set(world.done.values()) == {1}, seeds.again(seed)


@pytest.mark.parametrize("seed", seeds.tried(range(40), 5))
def test_lost_acknowledgements_repeat_nothing_that_is_remembered(seed: int) -> None:
    world = world_of(seed, Faults(lost_answer=0.2))
    finish(world)


@pytest.mark.parametrize("seed", seeds.tried(range(150), 20))
def test_crashes_lose_nothing_and_keep_the_order_of_a_key(seed: int) -> None:
    chance = random.Random(seed).choice([0.002, 0.01, 0.03])
    world = world_of(seed, Faults(crash=chance, lost_answer=0.05))
    world.run_until_quiet()
    world.faults.crash = 0.0
    finish(world)


@pytest.mark.parametrize("seed", seeds.tried(range(60), 10))
def test_a_worker_that_was_stopped_repeats_no_decision_of_the_worker_that_has_its_events(seed: int) -> None:
    world = world_of(seed, Faults(stop=0.1, lost_answer=0.05, crash=0.005 * (seed % 2)))
    world.run_until_quiet()
    world.faults.crash = world.faults.stop = 0.0
    finish(world)


@pytest.mark.parametrize("seed", seeds.tried(range(60), 10))
def test_batches_lose_nothing_in_crashes(seed: int) -> None:
    rng = random.Random(seed)
    faults = Faults(crash=rng.choice([0.002, 0.01, 0.03]), lost_answer=0.05, stop=rng.choice([0.0, 0.05]))
    world = world_of(seed, faults, batch=rng.choice([2, 3, 10]))
    world.run_until_quiet()
    world.faults.crash = world.faults.stop = 0.0
    finish(world)


@pytest.mark.parametrize("seed", seeds.tried(range(10), 5))
def test_without_faults_every_event_of_a_batch_is_done_exactly_once(seed: int) -> None:
    world = world_of(seed, Faults(), batch=4)
    finish(world)
    assert set(world.done.values()) == {1}, seeds.again(seed)


LEFT_BEHIND = (960483099, 960483916, 960483968, 960485376)


# In the last ten somebody lets a key go on at the very moment when a letter of it is written: one that is put behind
# the key's first, or one of an event that others gave up. In the last four of them the worker dies then, and the letter
# is found later, when another event of the key, behind it, is done already.
@pytest.mark.parametrize("given_up", [0.0, 0.3])
@pytest.mark.parametrize("seed", seeds.tried([*range(70), 1125, 1200, 1067, 1159, 1185, 1248, *LEFT_BEHIND], 10))
def test_no_key_stands_still_when_an_operator_discards_while_workers_work(seed: int, given_up: float) -> None:
    world = world_of(seed, Faults(crash=0.01 if given_up else 0.005, lost_answer=0.05, given_up=given_up))
    world.trouble |= {each: ["reject"] * 1000 for each in world.stream if world.rng.random() < 0.2}

    is_over = False

    def operate() -> None:
        for sequence in world.open():
            if world.rng.random() < 0.5:
                world.discard_meanwhile(sequence)
        if not is_over:
            world.at(world.rng.uniform(0.1, 5.0), operate, of_worker=False)

    operate()
    world.run_until_quiet()
    world.faults.crash, is_over = 0.0, True
    finish(world)


@pytest.mark.parametrize("seed", seeds.tried(range(80), 10))
def test_what_others_give_up_while_no_worker_runs_is_not_lost(seed: int) -> None:
    world = world_of(seed, Faults(crash=0.01, lost_answer=0.05, given_up=0.3))
    world.run_until_quiet()
    world.faults.crash = 0.0
    finish(world)


def test_the_seeds_reach_what_they_are_for() -> None:
    """Bounds are reached, crashes happen, keys are parked: otherwise the runs above prove little."""
    most_running, most_held, crashes, dead_letters, requests = set(), set(), 0, 0, 0
    for seed in range(30):
        world = world_of(seed, Faults(crash=0.01))
        world.run_until_quiet()
        if world.most_running == world.limits.concurrency:
            most_running.add(world.limits.concurrency)
        if world.was_full:
            most_held.add(world.limits.max_messages)
        crashes += world.crashes
        dead_letters += len(world.dead_letters)
        requests += len(world.requested)
    assert {1, 2, 5} <= most_running
    assert {2, 4, 30} <= most_held
    assert min(crashes, dead_letters) > 50
    given_up = [world_of(seed, Faults(crash=0.01, given_up=0.3)) for seed in range(20)]
    for world in given_up:
        world.run_until_quiet()
    assert sum(world.given_up for world in given_up) > 50
    stopped = [world_of(seed, Faults(stop=0.1)) for seed in range(20)]
    batches = [world_of(seed, Faults(crash=0.01), batch=3) for seed in range(10)]
    for world in (*stopped, *batches):
        world.run_until_quiet()
    assert sum(world.lapses for world in stopped) > 50
    assert max(world.most_in_call for world in batches) == 3


# ---- bugs that were planted, one for each checker --------------------------------------------------------------------


class ForgetsKeys(World):
    """The worker knows no keys, so that every event has a lane of its own."""

    def _item(self, message: Stored) -> WorkItem:
        item = super()._item(message)
        item.key = None
        return item


class _OtherLimits(World):
    """The worker keeps to other limits than it was given."""

    other: ClassVar[dict[str, Any]] = {}

    def _start_worker(self) -> None:
        given = self.limits
        self.limits = dataclasses.replace(given, **self.other)
        try:
            super()._start_worker()
        finally:
            self.limits = given


class RunsTooMany(_OtherLimits):
    other: ClassVar = {"concurrency": 1000}


class HoldsTooMany(_OtherLimits):
    other: ClassVar = {"max_messages": 1000, "max_bytes": 1 << 20}


class RunsTooFast(_OtherLimits):
    other: ClassVar = {"rate": None, "burst": None}


class _Misdoes(World):
    """The worker takes one kind of step for done, and does nothing."""

    kind: ClassVar[type[Any]]

    def _perform(self, step: Any, *, is_operator: bool = False) -> Any:
        if isinstance(step, self.kind):
            return True
        return super()._perform(step, is_operator=is_operator)


class StoresNoRetries(_Misdoes):
    kind = WriteSchedule


class WritesNoDeadLetters(_Misdoes):
    kind = WriteDeadLetter


class ClosesNoDeadLetters(_Misdoes):
    kind = CloseDeadLetter


class LeavesKeysParked(_Misdoes):
    kind = DropParked


class WritesDeadLettersTwice(World):
    """It does not look whether there is one."""

    def _perform(self, step: Any, *, is_operator: bool = False) -> Any:
        if isinstance(step, FindDeadLetter):
            return None
        if isinstance(step, WriteDeadLetter) and (present := self.dead_letters.get(step.item.sequence)) is not None:
            step = dataclasses.replace(step, revision=present.revision)
        return super()._perform(step, is_operator=is_operator)


@pytest.mark.parametrize(
    ("bug", "found"),
    [
        (ForgetsKeys, "began before|both run"),
        (RunsTooMany, "too many run"),
        (HoldsTooMany, "too many are held|too many bytes"),
        (RunsTooFast, "faster than the rate"),
        (StoresNoRetries, "not done"),
        (WritesNoDeadLetters, "not done"),
        (ClosesNoDeadLetters, "letters stay"),
        (LeavesKeysParked, "keys stay parked"),
        (WritesDeadLettersTwice, "one failure, two letters"),
    ],
)
def test_a_planted_bug_is_found_within_a_few_seeds(bug: type[World], found: str) -> None:
    told = []
    for seed in range(20):
        world = world_of(seed, Faults(crash=0.03 * (seed % 2), lost_answer=0.05 * (seed % 2)), bug)
        try:
            world.run_until_quiet(1e5)
            world.faults.crash = 0.0
            finish(world)
        except AssertionError as error:
            told.append(str(error))
            if re.search(found, told[-1]):
                return
    pytest.fail(f"found in none of 20 seeds: {told[:3]}")
