"""Turns and places of commands: nobody is in twice, and nothing stays taken, whoever is cancelled and when."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from support import seeds

from jetspark.app.turns import DecisionSlots, Turns

FILTERS = ("a", "b", "c")


@pytest.mark.parametrize("seed", seeds.tried(range(20), 5))
async def test_a_turn_is_had_by_one_and_nothing_stays_taken_when_some_are_cancelled(seed: int) -> None:
    rng, turns, places = random.Random(seed), Turns(), DecisionSlots(2)
    inside: list[tuple[str, ...]] = []
    most = entered = 0

    async def command(boundary: tuple[str, ...]) -> None:
        nonlocal most, entered
        if not turns.try_begin(boundary):
            await turns.begin(boundary)
        try:
            await places.take()
            try:
                assert not any(set(boundary) & set(other) for other in inside), inside
                inside.append(boundary)
                most, entered = max(most, len(inside)), entered + 1
                try:
                    for _ in range(rng.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    inside.remove(boundary)
            finally:
                places.give_back()
        finally:
            turns.end(boundary)

    tasks = []
    for _ in range(60):
        boundary = tuple(sorted(rng.sample(FILTERS, rng.randint(1, 3))))
        tasks.append(asyncio.create_task(command(boundary)))
        if rng.random() < 0.4:
            rng.choice(tasks).cancel()
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
    done, _ = await asyncio.wait(tasks)
    for task in done:
        with contextlib.suppress(asyncio.CancelledError):
            task.result()
    assert (most <= 2, entered > 5) == (True, True), seeds.again(seed)
    assert turns.try_begin(FILTERS), "a turn was not given back"
    assert [places.try_take() for _ in range(3)] == [True, True, False]


async def test_who_is_cancelled_when_it_is_passed_on_passes_it_on() -> None:
    turns = Turns()
    assert turns.try_begin(("a",))
    second, third = (asyncio.create_task(turns.begin(("a",))) for _ in range(2))
    await asyncio.sleep(0)
    turns.end(("a",))
    second.cancel()
    await asyncio.wait([second, third], timeout=60)
    assert (second.cancelled(), third.done()) == (True, True)


async def test_who_is_cancelled_while_it_waits_leaves_nothing_behind() -> None:
    places = DecisionSlots(1)
    assert places.try_take()
    waiting = asyncio.create_task(places.take())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting], timeout=60)
    assert not places._waiting
    places.give_back()
    assert places.try_take()


async def test_those_who_wait_are_served_in_the_order_of_asking() -> None:
    places, order = DecisionSlots(1), list[int]()
    assert places.try_take()

    async def wait(number: int) -> None:
        await places.take()
        order.append(number)
        places.give_back()

    tasks = [asyncio.create_task(wait(number)) for number in range(5)]
    await asyncio.sleep(0)
    places.give_back()
    await asyncio.wait(tasks)
    assert order == [0, 1, 2, 3, 4]
