"""Every checker finds a bug that was planted for it, within a few seeds. One that finds none would prove nothing.

A row of the tables is a checker, a planted bug, the workload that shows it, and what the checker says. The checker is
alone in such a run, so that it is the one that finds it; a checker without a row fails this file, too.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import pytest
from simulation import planted, test_batcher, test_batches, test_sessions
from simulation.atomic import AllOrNothing, AtomicRun
from simulation.checkers import (
    AcknowledgedIsStored,
    EverythingArrives,
    Judge,
    KeepsPace,
    LeftIsAccountedFor,
    MemoryIsBounded,
    MissingIsReported,
    NoStall,
    PublishedIsStored,
    SentOnce,
    StoredIsAPrefix,
    Violation,
)
from simulation.test_batches import (
    add_batch,
    add_endless,
    an_atomic_batch_across_a_partition,
    atomic_batches_while_leaders_move,
    dying_world,
    endless_behind_a_leader_that_is_cut_off,
    endless_that_is_left,
    endless_through_restarts,
    moving_world,
    parted_world,
    some_world,
)
from simulation.world import BatchRun, Burst, World

from jetspark.batcher import Batcher
from jetspark.core.connection import Connection
from jetspark.publish.fast_options import FastBatchOptions

# A bug that only a rare course of events shows would be found by accident.
SEEDS = 40

Work = Callable[..., Any]
Make = Callable[[int], World]
unwatched_world: Make = partial(some_world, is_watched=False)


def ok(world: World, machine: Any) -> None:
    add_batch(world, "broken", "ok", machine)


def fail(world: World, machine: Any) -> None:
    add_batch(world, "broken", "fail", machine)


def many_ok(world: World, machine: Any) -> None:
    """With losses, refusals and lost sessions in most runs."""
    for number in range(4):
        add_batch(world, f"broken{number}", "ok", machine)


def refused(world: World, machine: Any) -> None:
    """Every message, a window and more of them, and nothing else is wrong."""
    options = FastBatchOptions(gap="ok", flow=world.rng.choice([1, 5]), timeout=5.0)
    run = BatchRun(world, "broken", [Burst(0.0, 40)], options, machine=machine)
    run.bad = dict.fromkeys(range(1, 41), "wrong sequence")


def with_ids(world: World, machine: Any) -> None:
    add_endless(world, "broken", message_ids=True, machine=machine)


def without_ids(world: World, machine: Any) -> None:
    add_endless(world, "broken", message_ids=False, machine=machine)


def atomic(world: World, machine: Any) -> None:
    AtomicRun(world, "broken", [Burst(0.5, 5)] * 6, machine=machine)


@dataclass(frozen=True)
class Row:
    """``bug`` is a machine, or opens a block in which everything is wrong in one way."""

    checker: type[Judge]
    bug: Any
    work: Work
    claim: str
    make: Make = unwatched_world


ROWS = [
    Row(SentOnce, planted.Resends, fail, "was sent twice"),
    Row(SentOnce, planted.Resends, ok, "was sent twice"),
    Row(AcknowledgedIsStored, planted.TakesLostForStored, fail, "acknowledged and not stored"),
    Row(AcknowledgedIsStored, planted.ForgetsItsAcks, fail, "acknowledged goes back"),
    Row(StoredIsAPrefix, planted.ClaimsTheWhole, fail, "committed and not complete"),
    Row(MissingIsReported, planted.KeepsLossesToItself, many_ok, "missing without a word|callbacks were told|not what"),
    Row(MissingIsReported, planted.BlamesTheWrongOne, ok, "reported missing, and stored|not what was heard"),
    Row(MissingIsReported, planted.ReportsTwice, many_ok, "reported twice"),
    Row(MissingIsReported, planted.TellsTwice, many_ok, "callbacks were told otherwise"),
    Row(MissingIsReported, planted.IsNeverInDoubt, many_ok, "missing without a word|counted wrongly"),
    Row(MissingIsReported, planted.DoubtsEverything, many_ok, "in doubt without a reason"),
    Row(MissingIsReported, planted.DoubtsWhatItKnows, many_ok, "reported, and in doubt"),
    Row(MissingIsReported, planted.CountsWhatItDoubts, many_ok, "counted wrongly"),
    Row(KeepsPace, planted.IgnoresThePace, fail, "sent more than there was room for"),
    Row(KeepsPace, planted.KeepsWithoutEnd, ok, "kept more than may come early"),
    Row(NoStall, planted.SeesNoProgressInErrors, refused, "failed, and nothing was wrong|nothing happened for", World),
    Row(NoStall, planted.NeverAsks, fail, "not over, long after|nothing happened for"),
    Row(PublishedIsStored, planted.DropsWhatWasSent, with_ids, "published and not stored"),
    Row(PublishedIsStored, planted.CountsAhead, with_ids, "published and not stored"),
    Row(
        PublishedIsStored, planted.BelievesEveryAck, endless_behind_a_leader_that_is_cut_off, "published and not stored"
    ),
    Row(PublishedIsStored, planted.DoesNotAsk, endless_behind_a_leader_that_is_cut_off, "published and not stored"),
    Row(EverythingArrives, planted.PutsItBehind, with_ids, "out of order|lost"),
    Row(EverythingArrives, planted.KeepsDoublesToItself, without_ids, "doubled"),
    Row(EverythingArrives, planted.ForgetsTheIds, endless_through_restarts, "doubled", dying_world),
    Row(EverythingArrives, planted.GivesNoIds, endless_through_restarts, "doubled", dying_world),
    Row(LeftIsAccountedFor, planted.ForgetsWhatItLeaves, endless_that_is_left, "left and forgotten"),
    Row(LeftIsAccountedFor, planted.GoesOnWhenLeft, endless_that_is_left, "went on after it was left"),
    Row(MemoryIsBounded, planted.HasRoomForAll, with_ids, "too many messages are kept"),
    Row(MemoryIsBounded, planted.PingsWithoutMeasure, fail, "the connection keeps too much"),
    Row(
        AllOrNothing, planted.TrustsTheTimeout, atomic_batches_while_leaders_move, "said not to be stored", moving_world
    ),
    Row(AllOrNothing, planted.NeverResolves, atomic_batches_while_leaders_move, "unknown, long after", moving_world),
    *[
        Row(AllOrNothing, bug, an_atomic_batch_across_a_partition, "said not to be stored", parted_world)
        for bug in (
            planted.settled_without_a_majority,
            planted.settled_before_all_is_applied,
            planted.resolved_without_a_fence,
            planted.resolved_by_any_leader,
            planted.settled_by_the_never_heard,
            planted.resolved_by_any_replica,
        )
    ],
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.checker.__name__}-{row.bug.__name__}-{row.work.__name__}")
def test_a_planted_bug_is_found_by_its_checker(row: Row) -> None:
    found = islice((seed for seed in range(SEEDS) if re.search(row.claim, _verdict(row, seed))), 2)
    print(f"{row.checker.__name__}: {row.bug.__name__}: found by seeds {(seeds := list(found))}")
    assert len(seeds) == 2, "found by accident, or not at all"


def _verdict(row: Row, seed: int) -> str:
    """What the checker says of a run in which it is the only one; nothing when it has no complaint."""
    with contextlib.ExitStack() as stack:
        world = row.make(seed)
        if isinstance(row.bug, type):
            row.work(world, row.bug)
        else:
            stack.enter_context(row.bug())
            row.work(world)
        if row.checker is SentOnce:
            SentOnce(world)
        for run in world.runs:
            run.checkers = [] if row.checker is SentOnce else [row.checker()]
        try:
            world.run()
        except Violation as violation:
            return str(violation)
        except (AssertionError, IndexError):
            pass  # the machine's own assertions came first
    return ""


def test_every_checker_of_publishers_has_a_planted_bug() -> None:
    assert {row.checker for row in ROWS} == set(_kinds(Judge))


def _kinds(base: type[object]) -> list[type[object]]:
    return [each for kind in base.__subclasses__() for each in (kind, *_kinds(kind))]


# ---- sessions --------------------------------------------------------------------------------------------------------

SESSIONS: list[tuple[Callable[[test_sessions.World], None], type[Connection]]] = [
    (test_sessions.the_protocol_is_kept, planted.SubscribesTwice),
    (test_sessions.nothing_is_lost_doubled_or_reordered_without_a_word, planted.LosesAWrite),
    (test_sessions.nothing_is_lost_doubled_or_reordered_without_a_word, planted.WritesTwice),
    (test_sessions.confirmations_are_true, planted.ConfirmsEarly),
    (test_sessions.what_is_delivered_is_delivered_once_and_in_order, planted.DeliversTwice),
]


@pytest.mark.parametrize(("checker", "bug"), SESSIONS, ids=lambda each: each.__name__)
def test_a_planted_bug_of_sessions_is_found(
    checker: Callable[[test_sessions.World], None], bug: type[Connection]
) -> None:
    for seed in range(5):
        with contextlib.suppress(IndexError, KeyError):  # the machine's own end
            world = test_sessions.live(seed, bug, max_steps=5000)
            try:
                checker(world)
            except AssertionError:
                return
    pytest.fail(f"{checker.__name__} does not see {bug.__name__}")


def test_every_checker_of_sessions_has_a_planted_bug() -> None:
    assert {checker for checker, _ in SESSIONS} == set(test_sessions.CHECKERS)


# ---- the batcher -----------------------------------------------------------------------------------------------------

BATCHERS: list[tuple[Callable[..., object], type[Batcher[Any]]]] = [
    (test_batcher.check, planted.Miscounts),
    (test_batcher.check_flushed, planted.FlushesNothing),
    (test_batcher.end, planted.ShutsDownInSilence),
    (test_batcher.tell, planted.WritesAgain),
]


@pytest.mark.parametrize(("checker", "bug"), BATCHERS, ids=lambda each: each.__name__)
def test_a_planted_bug_of_the_batcher_is_found(
    checker: Callable[..., object], bug: type[Batcher[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", logger="jetspark.batcher")
    for seed in range(SEEDS):
        try:
            test_batcher.happen([seed], 1, "unreliable", bug)
        except AssertionError as error:
            frames = [
                each.name for each in traceback.extract_tb(error.__traceback__) if "test_batcher" in each.filename
            ]
            if frames[-1] == checker.__name__:
                return
    pytest.fail(f"{checker.__name__} does not see {bug.__name__}")


def test_every_checker_of_the_batcher_has_a_planted_bug() -> None:
    assert {checker for checker, _ in BATCHERS} == set(test_batcher.CHECKERS)


def test_every_workload_is_run() -> None:
    """A workload that is not in the list would prove nothing either."""
    assert {each.__name__ for each in test_batches.WORKLOADS} == set(test_batches.FIXED_SEEDS)
