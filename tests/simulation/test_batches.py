"""Batches in a failing world: thousands of courses of events, each of them a seed.

A case runs many seeds of one workload, of those that :mod:`support.seeds` knows. When one fails, its seed is printed
with what happened in it, and running that seed alone makes the very same happen again::

    JETSPARK_SEED=1234 .venv/bin/python -m pytest tests/simulation/test_batches.py -k endless_with_ids
"""

from __future__ import annotations

import dataclasses
import random
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from simulation.api import FrontWithApi
from simulation.atomic import AtomicRun, Crossing, Saboteur
from simulation.checkers import (
    LeftIsAccountedFor,
    MemoryIsBounded,
    PublishedIsStored,
    SentOnce,
    StoredIsAPrefix,
    endless_checkers,
    fast_checkers,
)
from simulation.world import STREAM, BatchRun, Burst, EndlessRun, Run, World, some_bursts
from support import seeds

from jetspark.publish.atomic import AtomicMachine
from jetspark.publish.fast_batch import FastMachine
from jetspark.publish.fast_options import FastBatchOptions, FastPublisherOptions, GapMode, Refused
from jetspark.publish.fast_publisher import FastPublisherMachine
from jetspark.testing import BatchLimits
from jetspark.testing.simulation import FaultPlan

FRESH_SEEDS = 10
# By what a seed of each workload costs, so that none takes more than some seconds.
FIXED_SEEDS = {
    "batches_in_mode_ok": 500,
    "batches_in_mode_fail": 600,
    "endless_with_ids": 100,
    "endless_without_ids": 130,
    "endless_behind_a_leader_that_is_cut_off": 100,
    "endless_that_is_left": 130,
    "endless_through_restarts": 20,
    "all_kinds_at_once": 80,
    "atomic_batches": 200,
    "atomic_batches_while_leaders_move": 25,
    "an_atomic_batch_across_a_partition": 100,
}

# Longer than the batches' keep-alive (3 s); and longer than the server's patience with idle batches (10 s).
PAUSES_S = (0.0, 0.001, 0.05, 0.5, 4.0, 11.0)
CALM = FaultPlan(kinds=())


def some_plan(rng: random.Random, *, is_replicated: bool) -> FaultPlan:
    """None at all, or some, or more than anyone deserves."""
    if rng.random() < 0.1:
        return CALM
    kinds = ["cut", "cut", "cut all", "refuse", "kill"]
    if is_replicated:
        kinds = [*kinds, "leader", "leader", "leader"] if rng.random() < 0.7 else ["leader"]
        if rng.random() < 0.5:
            kinds += ["partition", "partition", "slow"]
    return FaultPlan(
        kinds=kinds,  # type: ignore[arg-type]
        every_s=rng.choice([0.3, 1.0, 3.0, 1000.0]),
        per_write=rng.choice([0.0, 0.02, 0.1]),
        for_s=rng.choice([3.0, 10.0, 20.0]),
        outage_s=rng.choice([(0.01, 0.3), (0.05, 4.0), (2.0, 9.0)]),
    )


def some_world(seed: int, *, is_watched: bool = True) -> World:
    rng = random.Random(f"plan {seed}")
    is_replicated = rng.random() < 0.6
    world = World(
        seed,
        plan=some_plan(rng, is_replicated=is_replicated),
        replicas=3 if is_replicated else 1,
        front=FrontWithApi,
        limits=BatchLimits(max_fast_inflight_per_stream=rng.choice([1000, 1000, 1000, 2])),
    )
    world.front.seed = seed  # type: ignore[attr-defined]
    if is_watched:
        SentOnce(world)
    return world


def some_bad(run: Run, *shares: float) -> None:
    """Some messages the stream will not take."""
    rng = run.world.rng
    if rng.random() < 0.5:
        return
    share = rng.choice(shares)
    kinds = rng.choice([("wrong sequence",), ("too large",), ("wrong sequence", "too large")])
    run.bad = {number: rng.choice(kinds) for number in range(1, run.total + 1) if rng.random() < share}


def add_batch(
    world: World,
    name: str,
    gap: GapMode,
    machine: type[FastMachine] = FastMachine,
    checkers: Callable[[str], list[Any]] = fast_checkers,
) -> BatchRun:
    rng = world.rng
    bursts = some_bursts(rng, messages=rng.choice([1, 2, 7, 40, 150]), pauses=PAUSES_S)
    options = FastBatchOptions(
        gap=gap,
        flow=rng.choice([1, 2, 5, 20, 500]),
        max_outstanding_acks=rng.choice([1, 2, 3]),
        timeout=rng.choice([5.0, 30.0]),
        wait_for_stream_s=30.0,  # the stream is there, and faults may keep it without a leader from the first moment on
    )
    run = BatchRun(world, name, bursts, options, commits_with_message=rng.random() < 0.5, machine=machine)
    some_bad(run, 0.02, 0.3, 1.0)
    run.checkers += checkers(gap)
    return run


def add_endless(
    world: World, name: str, *, message_ids: bool, machine: type[FastPublisherMachine] = FastPublisherMachine
) -> EndlessRun:
    rng = world.rng
    bursts = some_bursts(rng, messages=rng.choice([1, 5, 40, 150, 300]), pauses=PAUSES_S)
    handed_back: list[Refused] = []
    options = FastPublisherOptions(
        message_ids=message_ids,
        flow=rng.choice([1, 3, 20, 500]),
        max_outstanding_acks=rng.choice([1, 2, 3]),
        max_pending_messages=rng.choice([1, 10, 100, 10_000]),
        max_pending_bytes=rng.choice([500, 5_000, 64 << 20]),
        batch_timeout_s=rng.choice([3.0, 15.0]),
        wait_for_stream_s=120.0,  # as long as it is patient: the stream is there, faults may keep it without a leader
        on_refused=handed_back.append if rng.random() < 0.7 else None,
    )
    run = EndlessRun(world, name, bursts, options, flushes_every=rng.choice([0, 0, 7, 50]), machine=machine)
    some_bad(run, 0.02, 0.3, 1.0)
    run.checkers += endless_checkers()
    return run


def batches_in_mode_ok(world: World) -> None:
    for number in range(world.rng.choice([1, 1, 2, 4])):
        add_batch(world, f"ok{number}", "ok")


def batches_in_mode_fail(world: World) -> None:
    for number in range(world.rng.choice([1, 1, 2, 4])):
        add_batch(world, f"fail{number}", "fail")


def endless_with_ids(world: World) -> None:
    for number in range(world.rng.choice([1, 1, 2, 3])):
        add_endless(world, f"ids{number}", message_ids=True)


def endless_without_ids(world: World) -> None:
    for number in range(world.rng.choice([1, 1, 2, 3])):
        add_endless(world, f"plain{number}", message_ids=False)


def endless_behind_a_leader_that_is_cut_off(
    world: World, machine: type[FastPublisherMachine] = FastPublisherMachine
) -> None:
    """The leader acknowledges duplicates of what it will lose; with ids, and with ids of the caller's own."""
    rng, network = world.rng, world.network
    if world.is_replicated:
        when = 0.0
        for _ in range(rng.choice([1, 2, 4])):
            when += rng.uniform(0.0, 4.0)
            seconds = rng.choice([1.0, 8.0, 14.0])
            world.clock.after(when, partial(network.cut_off_leader, STREAM, seconds, without_s=rng.uniform(0.0, 3.0)))
            when += seconds
    for number in range(rng.choice([1, 1, 2])):
        run = add_endless(world, f"ids{number}", message_ids=rng.random() < 0.7, machine=machine)
        run.bursts = [Burst(rng.choice([0.01, 0.1, 0.4]), rng.choice([1, 4])) for _ in range(40)]
        run.total = sum(burst.messages for burst in run.bursts)
        run.has_own_ids = not run.options.message_ids
        run.bad = {}


def endless_that_is_left(world: World, machine: type[FastPublisherMachine] = FastPublisherMachine) -> None:
    for number, message_ids in enumerate((False, True)):
        run = add_endless(world, f"left{number}", message_ids=message_ids, machine=machine)
        run.checkers = [PublishedIsStored(), LeftIsAccountedFor(), MemoryIsBounded()]
        run.leave_after(world.rng.choice([0.001, 0.05, 1.0, 10.0]) * world.rng.random())


def all_kinds_at_once(world: World) -> None:
    """Among them two that leave early, one of them without a word: its batch stays open and slows the others down."""
    for name, by_dying in (("guest", False), ("ghost", True)):
        run = add_batch(world, name, "fail", checkers=lambda gap: [StoredIsAPrefix()])
        run.leave_after(world.rng.uniform(0.0, 10.0), by_dying=by_dying)
    add_batch(world, "ok0", "ok")
    add_batch(world, "fail0", "fail")
    add_endless(world, "ids0", message_ids=True)
    add_endless(world, "plain0", message_ids=False)


def atomic_batches(world: World) -> None:
    rng = world.rng
    for number in range(rng.choice([1, 2, 4])):
        bursts = [Burst(rng.choice(PAUSES_S), rng.choice([1, 2, 3, 8, 20])) for _ in range(rng.choice([1, 3, 6]))]
        run = AtomicRun(world, f"atomic{number}", bursts)
        some_bad(run, 0.01, 0.1)


def moving_world(seed: int) -> World:
    """Replicated, and leaders change, are slow or alone; see :class:`Saboteur`."""
    rng = random.Random(f"plan {seed}")
    plan = FaultPlan(
        kinds=("cut", "leader", "slow", "partition"),
        every_s=rng.choice([1.0, 3.0, 1000.0]),
        for_s=25.0,
        outage_s=rng.choice([(0.05, 2.0), (1.0, 6.0)]),
    )
    delay_s = rng.choice([(0.0001, 0.001), (0.001, 0.02)])
    world = World(seed, plan=plan, replicas=3, front=FrontWithApi, delay_s=delay_s)
    world.front.seed = seed  # type: ignore[attr-defined]
    world.faults.over_at = max(world.faults.over_at, world.clock.now + 30.0)
    return world


def atomic_batches_while_leaders_move(world: World, machine: type[AtomicMachine] = AtomicMachine) -> None:
    rng = world.rng
    Saboteur(world, at_commits=0.5, at_questions=rng.choice([0.0, 0.02, 0.1]))
    for number in range(rng.choice([1, 2])):
        bursts = [Burst(rng.choice([0.0, 0.05, 0.5]), rng.choice([1, 2, 3, 8])) for _ in range(12)]
        AtomicRun(world, f"atomic{number}", bursts, machine=machine)


def parted_world(seed: int) -> World:
    """Replicated, parted, and in other ways undisturbed; see :class:`Crossing`."""
    world = World(seed, replicas=3, front=FrontWithApi, delay_s=(0.0001, 0.001))
    world.front.seed = seed  # type: ignore[attr-defined]
    world.faults.over_at = world.clock.now + 30.0
    return world


def an_atomic_batch_across_a_partition(world: World, machine: type[AtomicMachine] = AtomicMachine) -> None:
    Crossing(world)
    AtomicRun(world, "atomic0", [Burst(0.5, world.rng.choice([1, 2, 5]))], machine=machine)


def dying_world(seed: int) -> World:
    """The server ends again and again, each time when something was just sent."""
    plan = FaultPlan(kinds=("kill",), every_s=1.0, per_write=0.1, for_s=6.0, outage_s=(0.05, 0.5))
    return World(seed, plan=plan, delay_s=(0.0005, 0.005))


def endless_through_restarts(world: World, machine: type[FastPublisherMachine] = FastPublisherMachine) -> None:
    """Batches are forgotten with messages that were stored and not acknowledged: ids are all that tells them apart."""
    rng = world.rng
    run = add_endless(world, "ids0", message_ids=True, machine=machine)
    # Acknowledgements are rare, so much is stored and not acknowledged when the server goes.
    flow = rng.choice([20, 500])
    run.options = dataclasses.replace(run.options, flow=flow, max_pending_messages=1000, max_pending_bytes=64 << 20)
    run.has_headers = True
    run.set_machine(machine)
    run.bursts = [Burst(rng.choice([0.02, 0.1]), rng.choice([2, 5])) for _ in range(50)]
    run.total = sum(burst.messages for burst in run.bursts)
    run.bad = {}


WORLDS: dict[str, Callable[[int], World]] = {
    "endless_through_restarts": dying_world,
    "atomic_batches_while_leaders_move": moving_world,
    "an_atomic_batch_across_a_partition": parted_world,
}

WORKLOADS: list[Callable[[World], None]] = [
    batches_in_mode_ok,
    batches_in_mode_fail,
    endless_with_ids,
    endless_without_ids,
    endless_behind_a_leader_that_is_cut_off,
    endless_that_is_left,
    endless_through_restarts,
    all_kinds_at_once,
    atomic_batches,
    atomic_batches_while_leaders_move,
    an_atomic_batch_across_a_partition,
]


def simulate(seed: int, workload: Callable[[World], None], make: Callable[[int], World] | None = None) -> World:
    """One course of events, judged."""
    world = (make or WORLDS.get(workload.__name__, some_world))(seed)
    try:
        workload(world)
        world.run()
    except Exception as problem:
        problem.add_note("\n".join(world.trace()))
        problem.add_note(
            f"seed {seed}, commit {_commit()}; again: {seeds.again(seed)} .venv/bin/python -m pytest "
            f"tests/simulation/test_batches.py -k {workload.__name__}"
        )
        raise
    return world


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_guarantees_hold_whatever_happens(workload: Callable[[World], None]) -> None:
    for seed in seeds.tried(range(FIXED_SEEDS[workload.__name__]), FRESH_SEEDS):
        simulate(seed, workload)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_a_seed_makes_the_same_happen_again(workload: Callable[[World], None]) -> None:
    for seed in range(3):
        first, second = simulate(seed, workload), simulate(seed, workload)
        assert first.trace() == second.trace()
        assert first.clock.now == second.clock.now


def test_the_faults_do_happen() -> None:
    """A simulation in which nothing goes wrong would prove nothing."""
    ends: Counter[str] = Counter()
    for seed in range(50):
        for run in simulate(seed, batches_in_mode_fail).runs + simulate(seed, batches_in_mode_ok).runs:
            assert isinstance(run, BatchRun)
            ends[type(run.batch.failure).__name__] += 1
            ends["gaps"] += len(run.batch.losses.gaps)
            ends["errors"] += len(run.batch.losses.errors)
        for run in simulate(seed, endless_without_ids).runs:
            assert isinstance(run, EndlessRun)
            ends["batches"] += run.endless.batches
            ends["doubled"] += len(run.world.stored(run.name)) - len(set(run.world.stored(run.name)))
        for run in simulate(seed, atomic_batches).runs:
            assert isinstance(run, AtomicRun)
            ends.update(f"{batch.machine.outcome}, {type(batch.failure).__name__}" for batch in run.batches)
    expected = {
        "NoneType": 70,
        "BatchInDoubt": 33,
        "BatchCutShort": 7,
        "gaps": 10,  # without those that a refusal makes
        "errors": 100,
        "batches": 170,
        "doubled": 33,
        "stored, NoneType": 130,
        "stored, BatchInDoubt": 2,
        "not stored, BatchInDoubt": 2,
    }
    assert all(ends[what] >= count for what, count in expected.items()), ends


@pytest.mark.parametrize("message_ids", [False, True])
def test_a_publisher_nobody_disturbs_is_done_within_a_few_round_trips(message_ids: bool) -> None:
    world = World(3, delay_s=(0.001, 0.001))
    run = EndlessRun(world, "calm", [Burst(0.0, 100)], FastPublisherOptions(message_ids=message_ids))
    run.start()
    assert world.clock.run(world.clock.now + 0.05, lambda: run.is_over)


# ---- flow ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("publishers", "flow"),
    # With more than 500 publishers the share is 1, whatever flow is asked for.
    [*((publishers, flow) for publishers in (1, 2, 3, 10, 60) for flow in (7, 500)), (501, 500)],
)
def test_every_publisher_ends_at_its_share_of_the_flow(publishers: int, flow: int) -> None:
    world = World(publishers, delay_s=(0.0005, 0.002))
    options = FastBatchOptions(flow=flow)
    # Enough for the slowest climb, from 1 to 500 by doubling.
    runs = [BatchRun(world, f"p{number}", [Burst(0.0, 10**9)], options) for number in range(publishers)]
    for run in runs:
        run.start()
    clock = world.clock
    wanted = max(1, min(flow, 500 // publishers))
    assert clock.run(
        clock.now + 5.0,
        lambda: all(run.batch.sender.msgs_per_ack == wanted and run.batch.acknowledged > 20 for run in runs),
    )
    assert [each.messages_per_ack for each in world.model.flow(STREAM)] == [wanted] * publishers


def test_those_who_stay_get_the_share_of_those_who_leave() -> None:
    world = World(1, delay_s=(0.0005, 0.002))
    runs = [BatchRun(world, f"p{number}", [Burst(0.0, 10**9)], FastBatchOptions()) for number in range(4)]
    for run in runs:
        run.start()
    clock = world.clock
    assert clock.run(clock.now + 0.5, lambda: all(run.batch.sender.msgs_per_ack == 125 for run in runs))
    clock.run(clock.now + 0.02)
    assert [run.batch.sender.msgs_per_ack for run in runs] == [125] * 4
    for run in runs[1:]:
        run.leave_after(0.0, by_dying=False)
    assert clock.run(clock.now + 0.5, lambda: runs[0].batch.sender.msgs_per_ack == 500)
    clock.run(clock.now + 0.02)
    assert runs[0].batch.sender.msgs_per_ack == 500


def test_a_dead_publisher_costs_the_others_ten_seconds() -> None:
    world = World(2, delay_s=(0.0005, 0.002))
    survivor = BatchRun(world, "survivor", [Burst(0.0, 50), *[Burst(0.1, 600)] * 200], FastBatchOptions())
    dead = BatchRun(world, "dead", [Burst(0.0, 10**9)], FastBatchOptions())
    dead.leave_after(0.1, by_dying=True)
    for run in world.runs:
        run.start()
    world.clock.run(world.clock.now + 9.5)
    assert survivor.batch.sender.msgs_per_ack == 250
    world.clock.run(world.clock.now + 2.5)
    assert survivor.batch.sender.msgs_per_ack == 500
