"""A program that decides its own commands, on the model server and in virtual time: how it waits, gives up and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any
from unittest import mock

import pytest
from support.accounts import Enter, bank

from jetspark.app import App, AppClient, CommandOptions
from jetspark.app.commands.decision_store import CommandStore
from jetspark.app.commands.local_decider import CLOSING_S
from jetspark.app.provisioning import apply_topology
from jetspark.errors import CommandFailed, CommandInDoubt, WorkersBusy
from jetspark.testing.virtual_loop import VirtualLoop, model_network

URL = "nats://model:4222"


def run(test: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop(model_network(1))
    try:
        loop.run_until_complete(test)
    finally:
        loop.close()


async def apply(app: App) -> None:
    async with app.connect(URL) as client:
        await apply_topology(client.js, app)


def entering(client: AppClient, ledger: str, id: str, timeout: float = 5.0) -> asyncio.Task[Any]:
    return asyncio.create_task(client.call(Enter(ledger=ledger, writer="w"), command_id=id, timeout=timeout))


class Held:
    """Appends that have to wait, in a task, wait until they may go on."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()
        self.count = 0

    async def append(self, store: CommandStore, step: Any) -> Any:
        self.count += 1
        await self.may_go_on.wait()
        return await store._publish(step)


def holding(held: Held) -> Any:
    async def append(self: CommandStore, step: Any) -> Any:
        return await held.append(self, step)

    return mock.patch.object(CommandStore, "_append", append)


def test_one_command_more_than_may_wait_is_told_so_and_not_decided() -> None:
    async def test() -> None:
        app, held = bank(), Held()
        await apply(app)
        async with app.connect(URL, decide_here=CommandOptions(concurrency=1, queue=2)) as client:
            with holding(held):
                calls = [entering(client, f"l{n}", f"c-{n}") for n in range(5)]
                done, _ = await asyncio.wait(calls, timeout=1.0)
                assert [type(each.exception()) for each in done] == [WorkersBusy] * 2
                held.may_go_on.set()
                answers = await asyncio.gather(*calls, return_exceptions=True)
            assert [getattr(each, "data", None) for each in answers] == [1, 1, 1, None, None]
            assert held.count == 3

    run(test())


def test_a_call_whose_time_is_over_is_in_doubt_and_leaves_its_turn_to_others() -> None:
    async def test() -> None:
        app, held = bank(), Held()
        await apply(app)
        async with app.connect(URL, decide_here=True) as client:
            with holding(held):
                first, second = entering(client, "x", "a", 1.0), entering(client, "x", "b", 30.0)
                with pytest.raises(CommandInDoubt, match=r"no answer within 1 s.*command_id='a'"):
                    await first
                held.may_go_on.set()
                assert (await second).data == 1
            assert (await entering(client, "x", "a")).data == 2

    run(test())


def test_closing_waits_for_a_bounded_time_and_then_leaves_callers_in_doubt() -> None:
    async def test() -> None:
        app, held, loop = bank(), Held(), asyncio.get_running_loop()
        await apply(app)
        client = await app.connect(URL, decide_here=True).__aenter__()
        with holding(held):
            calls = [entering(client, ledger, f"c-{n}", 60.0) for n, ledger in enumerate("xxy")]
            await asyncio.sleep(0.5)
            began = loop.time()
            late = entering(client, "z", "late", 60.0)
            await asyncio.sleep(0)
            await client.__aexit__(None, None, None)
            assert CLOSING_S <= loop.time() - began < CLOSING_S + 1.0
            answers = await asyncio.gather(*calls, late, return_exceptions=True)
        assert [type(each) for each in answers] == [CommandInDoubt] * 4

    run(test())


def test_closing_before_the_first_call_has_seen_the_stream_leaves_it_in_doubt() -> None:
    async def test() -> None:
        app = bank()
        await apply(app)
        client = await app.connect(URL, decide_here=True).__aenter__()
        call = entering(client, "x", "a")
        await asyncio.sleep(0)
        await client.__aexit__(None, None, None)
        with pytest.raises(CommandInDoubt):
            await call

    run(test())


def test_the_stream_is_looked_at_once_for_all_first_calls_and_again_where_there_was_none() -> None:
    async def test() -> None:
        app = bank()
        async with app.connect(URL, decide_here=True) as client:
            answers = await asyncio.gather(*(entering(client, "x", f"c-{n}") for n in range(3)), return_exceptions=True)
            assert [type(each) for each in answers] == [CommandFailed] * 3
            await apply_topology(client.js, app)
            first = entering(client, "x", "gone")
            await asyncio.sleep(0)
            first.cancel()  # the others have not lost what it began
            replies = await asyncio.gather(*(entering(client, "x", f"c-{n}") for n in range(3)))
            assert sorted(each.data for each in replies) == [1, 2, 3]

    run(test())
