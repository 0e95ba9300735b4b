"""Workflows on a real server: payments race their time-outs, workers and the server die, and each run ends once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections import Counter

import msgspec
import pytest
from support.apps import until
from support.fulfilment import Paid, Placed, fulfilment
from typer.testing import CliRunner

from jetspark.app import App, AppClient, Event
from jetspark.cli.commands import app as cli
from jetspark.errors import NetworkError
from jetspark.server import NatsServer

RUNS = int(os.environ.get("JETSPARK_MANY_RUNS", "60"))
PAYMENT_S = 1.0


async def work(app: App, url: str, seconds: float) -> None:
    """A worker that is dropped without a word after some time, some times; the last one stays."""
    for timeout in (seconds, seconds, seconds, None):
        worker = asyncio.create_task(app.run(url, stop_timeout=0.0))
        try:
            await asyncio.wait([worker], timeout=timeout)
        finally:
            worker.cancel()
            await asyncio.wait([worker])


async def publish(shop: AppClient, event: Event, id: str) -> None:
    """With the same id until it is stored."""
    while True:
        with contextlib.suppress(NetworkError):
            await shop.publish(event, id=id)
            return


@pytest.mark.slow
async def test_every_run_ends_exactly_once_whatever_is_killed() -> None:
    rng, app = random.Random(3), fulfilment(PAYMENT_S)
    async with NatsServer() as server:
        await app.apply(server.url)
        workers = [asyncio.create_task(work(app, server.url, seconds)) for seconds in (1.1, 1.7)]
        async with app.connect(server.url) as shop:

            async def order(number: int) -> None:
                await asyncio.sleep(rng.random() * 2)
                id = f"o-{number}"
                await publish(shop, Placed(order_id=id), f"placed {id}")
                if number % 3:
                    # Some pay in time, some at the very moment, some too late.
                    await asyncio.sleep(rng.random() * 3 * PAYMENT_S)
                    await publish(shop, Paid(order_id=id), f"paid {id}")

            orders = [asyncio.create_task(order(number)) for number in range(RUNS)]
            await asyncio.sleep(1.0)
            server.kill()
            await asyncio.to_thread(server.restart)
            await asyncio.gather(*orders)

            async def all_have_ended() -> bool:
                ended = [run.key async for run in shop.workflow("fulfilment").list() if run.status != "running"]
                return len(ended) == RUNS

            await until(all_have_ended, 120 + RUNS)
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)
            runs = {run.key: run async for run in shop.workflow("fulfilment").list()}
            stream = await shop.js.stream("KV_shop")
            seen: Counter[tuple[str, str]] = Counter()
            async for message in stream.get_messages(1, subject="orders.>"):
                body = msgspec.json.decode(message.data)
                seen[body["type"], body["data"]["order_id"]] += 1
            for key, run in runs.items():
                expected = "order.shipped" if run.status == "done" else "stock.release"
                other = "stock.release" if run.status == "done" else "order.shipped"
                assert (seen[expected, key], seen[other, key], seen["stock.reserve", key]) == (1, 0, 1), run
                assert run.timers == ()
                if run.status == "failed":
                    assert seen["order.payment_overdue", key] == 2  # reminded, and given up
                else:
                    assert int(key.partition("-")[2]) % 3, "shipped without a payment"
            assert {"done", "failed"} == {run.status for run in runs.values()}
            dead = await (await shop.js.stream(app.dead_letter_stream)).info()
            assert dead.state.messages == 0


async def test_runs_are_listed_shown_and_ended_on_the_command_line(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = fulfilment()
    monkeypatch.setattr("support.fulfilment.app", app, raising=False)
    await app.apply(nats_url)

    def say(*words: str) -> str:
        result = CliRunner().invoke(cli, ["workflow", *words, "--servers", nats_url])
        assert result.exit_code == 0, result.output
        return result.output

    workers = asyncio.create_task(app.run(nats_url))
    try:
        async with app.connect(nats_url) as shop:
            await shop.publish(Placed(order_id="o 1"))
            runs = shop.workflow("fulfilment")

            async def is_there() -> bool:
                return await runs.get("o 1") is not None

            await until(is_there)
        where = ["support.fulfilment:app", "fulfilment"]
        assert (await asyncio.to_thread(say, "ls", *where)).splitlines()[-1] == "1 runs"
        shown = json.loads(await asyncio.to_thread(say, "show", *where, "o 1", "--json"))
        assert (shown["status"], shown["timers"]) == ("running", ["payment"])
        assert [step["type"] for step in shown["timeline"]] == ["order.placed"]
        assert "cancelled" in await asyncio.to_thread(say, "cancel", *where, "o 1", "--reason", "by hand")
        assert "by hand" in await asyncio.to_thread(say, "ls", *where, "--status", "failed")
        assert "o 1: begun anew" in await asyncio.to_thread(say, "retry", *where, "o 1")
        shown = json.loads(await asyncio.to_thread(say, "show", *where, "o 1", "--json"))
        assert (shown["status"], shown["retries"], shown["timers"]) == ("running", 1, ["payment"])
    finally:
        workers.cancel()
        await asyncio.wait([workers])
