"""Does the order of keys hold across processes that are killed, cut off and replaced? A seed is a run in no time.

The faults of a run are those of real processes: killed, stopped, without a network, asked to end. For a long time the
checkers excused every process that had ever been away, no process was stopped, and a network was cut with an error or
not at all. So they could not find a worker that came back, began an event which the server had delivered to another
one in the meantime, and finished it first. Now a process that is back has no excuse: what it begins must be its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from unittest import mock

import pytest
from simulation.partition_world import Happened, World, run_world
from support import seeds

from jetspark.aio.stream_message import JetStreamMessage
from jetspark.app import Context
from jetspark.app.handlers.handler_worker import HandlerWorker
from jetspark.app.handlers.intake import Intake


# 0: a process that was cut off began an event after a look-up that had waited for its connection.
@pytest.mark.parametrize("seed", seeds.tried(range(2), 2))
def test_keys_stay_in_order_and_effects_happen_once(seed: int) -> None:
    run_world(seed)


# ---- bugs that were planted, one for each checker --------------------------------------------------------------------


class SharesKeys(World):
    """Processes take the events of a key from one another, since nobody has partitions."""

    sharing: ClassVar = {}


class RepeatsEffects(World):
    """What was done is recorded under a name that the next attempt does not know; nothing is a transaction."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.is_transaction = False

    async def effect(self, number: int, *, idempotency_key: str) -> None:
        await super().effect(number, idempotency_key=f"{idempotency_key} {len(self.log)}")
        if len(self.effects[number]) == 1:
            raise OSError("away, after it was done")


class CountsTwice(World):
    """A transaction writes its event twice."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.is_transaction = True

    def counted(self, numbers: list[int], number: int) -> list[int]:
        return [*numbers, number, number]


class ForgetsEvents(World):
    """An event whose handling fails is taken for done."""

    async def handle(self, event: Happened, ctx: Context) -> None:
        with contextlib.suppress(OSError):
            await super().handle(event, ctx)


@pytest.mark.parametrize(
    ("bug", "found"),
    [
        (SharesKeys, "began before"),
        (RepeatsEffects, "an effect happened twice"),
        (CountsTwice, " counted "),
        (ForgetsEvents, "never done|began before"),
    ],
)
def test_a_planted_bug_is_found_within_a_few_seeds(bug: type[World], found: str) -> None:
    told = []
    for seed in range(5):
        try:
            run_world(seed, count=1, kind=bug)
        except AssertionError as error:
            told.append(str(error))
            if re.search(found, told[-1]):
                return
    pytest.fail(f"found in none of 5 seeds: {told}")


# ---- mistakes that were once in the workers --------------------------------------------------------------------------


async def keep_unconfirmed(self: HandlerWorker, messages: Sequence[JetStreamMessage]) -> float | None:
    """Takes ``in_progress`` for heard when it is written to the socket."""
    sent_at = asyncio.get_running_loop().time()
    if not self.is_connected:
        return None
    for message in messages:
        if not message.is_answered:
            await message.in_progress()
    return sent_at


_ask = Intake._ask


async def ask_and_date_by_the_end(self: Intake, *arguments: Any, **options: Any) -> Any:
    """Takes the end of a pull for the time of the delivery."""
    pulled = await _ask(self, *arguments, **options)
    return dataclasses.replace(pulled, heard_at=pulled.came_at)


async def ask_and_forget_earlier_pulls(self: Intake, consumer: Any, side: Any, *arguments: Any, **options: Any) -> Any:
    """Takes what arrives late for the answer to the last pull."""
    self._unanswered.pop(side, None)
    return await _ask(self, consumer, side, *arguments, **options)


@pytest.mark.parametrize(
    ("target", "name", "mistake", "faults"),
    [
        (HandlerWorker, "keep", keep_unconfirmed, ["silence"]),
        (Intake, "_ask", ask_and_date_by_the_end, ["pause"]),
        (Intake, "_ask", ask_and_forget_earlier_pulls, ["silence"]),
    ],
)
def test_a_mistake_that_workers_once_made_is_found_within_a_few_seeds(
    target: type, name: str, mistake: Callable[..., Any], faults: list[str]
) -> None:
    told = []
    with mock.patch.object(target, name, mistake):
        for seed in range(1, 13):
            try:
                run_world(seed, count=10, faults=faults)
            except AssertionError as error:
                told.append(str(error))
                if "began" in told[-1]:
                    return
    pytest.fail(f"found in none of 12 seeds: {told}")


@pytest.mark.parametrize("faults", [["silence"], ["pause"]])
def test_processes_that_are_only_absent_begin_nothing_that_was_delivered_again(faults: list[str]) -> None:
    """The same faults without a mistake."""
    for seed in range(1, 3):
        run_world(seed, count=10, faults=faults)
