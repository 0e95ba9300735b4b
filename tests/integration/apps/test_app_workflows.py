"""Workflows on a real server: payments race their time-outs, workers and the server die, and each run ends once."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import random
import time
from collections import Counter

import msgspec
import pytest
from support.apps import until
from support.fulfilment import Paid, Placed, fulfilment
from typer.testing import CliRunner

from jetspark.app import App, AppClient, Event, WorkflowRun
from jetspark.cli.commands import app as cli
from jetspark.errors import NetworkError
from jetspark.server import NatsServer

RUNS = int(os.environ.get("JETSPARK_MANY_RUNS", "60"))
"""10,000 are the demonstration: ``JETSPARK_MANY_RUNS=10000 pytest -s -k whatever``."""
PAYMENT_S = max(1.0, RUNS / 200)
"""The more runs, the longer: what races shall be payments and time-outs, and not all of them with a slow machine."""


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


async def order(shop: AppClient, number: int, rng: random.Random) -> None:
    await asyncio.sleep(rng.random() * 2 * PAYMENT_S)
    id = f"o-{number}"
    await publish(shop, Placed(order_id=id), f"placed {id}")
    if number % 3:
        # Some pay in time, some at the very moment, some too late.
        await asyncio.sleep(rng.random() * 3 * PAYMENT_S)
        await publish(shop, Paid(order_id=id), f"paid {id}")


async def runs_of(shop: AppClient) -> dict[str, WorkflowRun]:
    return {run.key: run async for run in shop.workflow("fulfilment").list()}


async def check_events(shop: AppClient, runs: dict[str, WorkflowRun]) -> Counter[str]:
    """Every run has done what its end says, once, and no timer was early. Returns the number of events by type."""
    stream = await shop.js.stream("KV_shop")
    seen: Counter[tuple[str, str]] = Counter()
    async for message in stream.get_messages(1, subject="orders.>"):
        body = msgspec.json.decode(message.data)
        seen[body["type"], body["data"]["order_id"]] += 1
        if body["type"] == "order.payment_overdue":
            assert message.timestamp >= datetime.datetime.fromisoformat(body["time"]), "a timer was early"
    for key, run in runs.items():
        expected = "order.shipped" if run.status == "done" else "stock.release"
        other = "stock.release" if run.status == "done" else "order.shipped"
        assert (seen[expected, key], seen[other, key], seen["stock.reserve", key]) == (1, 0, 1), run
        assert run.timers == ()
        if run.status == "failed":
            assert seen["order.payment_overdue", key] == 2  # reminded, and given up: no timer was lost
        else:
            assert int(key.partition("-")[2]) % 3, "shipped without a payment"
    counts: Counter[str] = Counter()
    for (kind, _), count in seen.items():
        counts[kind] += count
    return counts


@pytest.mark.slow
async def test_every_run_ends_exactly_once_whatever_is_killed() -> None:
    rng, app, began = random.Random(3), fulfilment(PAYMENT_S), time.monotonic()
    async with NatsServer() as server:
        await app.apply(server.url)
        workers = [asyncio.create_task(work(app, server.url, seconds * PAYMENT_S)) for seconds in (1.1, 1.7)]
        async with app.connect(server.url) as shop:
            orders = [asyncio.create_task(order(shop, number, rng)) for number in range(RUNS)]
            for _ in range(2):
                await asyncio.sleep(PAYMENT_S)
                server.kill()
                await asyncio.to_thread(server.restart)
            await asyncio.gather(*orders)
            runs: dict[str, WorkflowRun] = {}
            async with asyncio.timeout(120 + RUNS / 10):
                while sum(run.status != "running" for run in runs.values()) < RUNS:
                    await asyncio.sleep(max(0.2, PAYMENT_S / 10))
                    runs = await runs_of(shop)
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)
            assert await runs_of(shop) == runs, "a run went on after its end"
            counts = await check_events(shop, runs)
            ends = Counter(run.status for run in runs.values())
            assert set(ends) == {"done", "failed"}
            dead = await (await shop.js.stream(app.dead_letter_stream)).info()
            assert dead.state.messages == 0
            assert [timer async for timer in shop.timers.list()] == []
            print(f"\n{RUNS} runs in {time.monotonic() - began:.0f} s: {dict(ends)}; events: {dict(counts)}")


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
        [step] = shown["timeline"]
        assert (step["type"], [each["type"] for each in step["decided"]["events"]]) == (
            "order.placed",
            ["stock.reserve"],
        )
        cancelled = json.loads(await asyncio.to_thread(say, "cancel", *where, "o 1", "--reason", "by hand", "--json"))
        assert (cancelled["status"], cancelled["reason"]) == ("failed", "by hand")
        text = await asyncio.to_thread(say, "show", *where, "o 1")
        for line in (
            "order.placed  {'order_id': 'o 1'}",
            "publishes stock.reserve",
            "sets timer payment, due ",
            "publishes stock.release",
            "cancels timer payment",
            "failed: by hand",
        ):
            assert line in text
        assert "by hand" in await asyncio.to_thread(say, "ls", *where, "--status", "failed")
        again = json.loads(await asyncio.to_thread(say, "retry", *where, "o 1", "--json"))
        assert (again["is_begun_anew"], again["letters"]) == (True, 0)
        shown = json.loads(await asyncio.to_thread(say, "show", *where, "o 1", "--json"))
        assert (shown["status"], shown["retries"], shown["timers"]) == ("running", 1, ["payment"])
    finally:
        workers.cancel()
        await asyncio.wait([workers])
