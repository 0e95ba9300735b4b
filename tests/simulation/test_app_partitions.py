"""Does the order of keys hold across processes that are killed, cut off and replaced? A seed is a run in no time."""

from __future__ import annotations

import contextlib
import re
from typing import ClassVar

import pytest
from simulation.partition_world import Happened, World, run_world
from support import seeds

from jetspark.app import Context


# 6021: a process that was stopped began an event that another one had finished, as its timer ran before its handlers.
@pytest.mark.parametrize("seed", seeds.tried([*range(2), 6021], 2))
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
