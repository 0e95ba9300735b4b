"""Workflows on a real server: payments race their time-outs, workers and the server die, and each run ends once.

The small version runs always. The large one has ten thousand runs, and a worker killed every two seconds::

    JETSPARK_MANY_RUNS=10000 python -m pytest -s -k exactly_once tests/integration/apps/test_app_workflows.py
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import json
import logging
import math
import os
import random
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import pytest
from support.apps import is_settled, running, until
from support.fulfilment import Paid, Placed, fulfilment
from support.processes import start_process
from support.runs import (
    OVERDUE,
    PAID,
    PLACED,
    RELEASED,
    RESERVED,
    SHIPPED,
    SeenEvent,
    WrongRun,
    check_runs,
    read_events,
)
from typer.testing import CliRunner

import jetspark
from jetspark.app import App, AppClient, Decision, Event, WorkflowRun
from jetspark.app.workflows.timeline import read_timeline
from jetspark.app.workflows.workflow_spec import RunRecord, RunStatus
from jetspark.cli.commands import app as cli
from jetspark.errors import ConfigError, ConsumerNotFound, NetworkError, RequestTimeout, WorkflowNotOver
from jetspark.server import NatsServer

MANY = int(os.environ.get("JETSPARK_MANY_RUNS", "0"))
RUNS, WORKERS = (MANY, 3) if MANY else (60, 2)
PAYMENT_S = max(1.0, RUNS / 200)
"""The more runs, the longer: what races shall be payments and time-outs, and not all of them with a slow machine."""
KILL_EVERY_S = 2.0 if MANY else 1.0


def work(url: str) -> None:
    asyncio.run(fulfilment(PAYMENT_S).run(url, stop_timeout=20.0))


class Workers:
    """Processes that are killed and replaced, one after the other, until the block ends; then there are some left."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._processes: list[BaseProcess] = []
        self.killed = 0

    def start(self) -> None:
        self._processes.append(start_process(work, self._url))

    @asynccontextmanager
    async def dying(self) -> AsyncIterator[None]:
        killing = asyncio.create_task(self._kill())
        try:
            yield
        finally:
            killing.cancel()
            await asyncio.wait([killing])

    async def _kill(self) -> None:
        while True:
            await asyncio.sleep(KILL_EVERY_S)
            self.start()
            self.kill(self._processes.pop(0))
            self.killed += 1

    def kill(self, process: BaseProcess) -> None:
        process.kill()
        process.join()

    def end(self) -> None:
        for process in self._processes:
            self.kill(process)


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


@pytest.mark.slow
@pytest.mark.timeout(3600 if MANY else 300)
async def test_every_run_ends_exactly_once_whatever_is_killed() -> None:
    rng, app, began = random.Random(3), fulfilment(PAYMENT_S), time.monotonic()
    async with NatsServer() as server:
        await app.apply(server.url)
        workers = Workers(server.url)
        for _ in range(WORKERS):
            workers.start()
        try:
            async with app.connect(server.url) as shop:
                async with workers.dying():
                    orders = [asyncio.create_task(order(shop, number, rng)) for number in range(RUNS)]
                    for _ in range(2):
                        await asyncio.sleep(PAYMENT_S)
                        server.kill()
                        await asyncio.to_thread(server.restart)
                    await asyncio.gather(*orders)
                ended = await all_ended(shop, app)
                # Whatever is late was taken by now, and has changed nothing.
                assert await runs_of(shop) == ended, "a run went on after its end"
                events = await read_events(shop)
                dead = await (await shop.js.stream(app.spec.dead_letter_stream)).info()
                timers = [timer async for timer in shop.timers.list()]
        finally:
            workers.end()
    checked = check_runs(ended, events)
    assert (len(ended), dead.state.messages, timers) == (RUNS, 0, [])
    assert set(checked.ends) == {"done", "failed"}
    assert workers.killed >= 2
    paid = {each.order for each in events if each.type == PAID}
    assert all(key in paid for key, run in ended.items() if run.status == "done")
    print(
        f"\n{RUNS} runs in {time.monotonic() - began:.0f} s, {workers.killed} workers and the server twice killed: "
        f"{dict(checked.ends)}; {len(events)} events, no timer early, none lost, {checked.late} late and harmless"
    )


async def all_ended(shop: AppClient, app: App) -> dict[str, WorkflowRun]:
    """The runs when all are over, and no event and no timer is left that could change one."""
    runs: dict[str, WorkflowRun] = {}
    async with asyncio.timeout(120 + RUNS / 5):
        while sum(run.status != "running" for run in runs.values()) < RUNS:
            await asyncio.sleep(max(0.2, PAYMENT_S / 10))
            runs = await runs_of(shop)

        async def is_over() -> bool:
            has_timers = bool([timer async for timer in shop.timers.list()])
            return not has_timers and await is_settled(shop.js, app, "fulfilment")

        await until(is_over, timeout=120 + RUNS / 5)
    return runs


def test_the_check_of_runs_rejects_what_is_broken() -> None:
    def seen(*types: str, early: bool = False) -> list[SeenEvent]:
        due = datetime.datetime(2026, 3, 31, tzinfo=datetime.UTC)
        stored = due - datetime.timedelta(milliseconds=early)
        return [SeenEvent(number, kind, "o", stored, due) for number, kind in enumerate(types, 1)]

    def run(status: RunStatus, *timers: str) -> dict[str, WorkflowRun]:
        fields: dict[str, Any] = dict.fromkeys(("reason", "state", "started", "updated"))
        more: dict[str, Any] = {"commands": (), "events": (), "retries": 0}
        return {"o": WorkflowRun(key="o", status=status, timers=timers, **fields, **more)}

    done, failed = (PLACED, RESERVED, PAID, SHIPPED), (PLACED, RESERVED, OVERDUE, OVERDUE, RELEASED)
    assert check_runs(run("done"), seen(*done)).late == 0
    assert check_runs(run("done"), seen(PLACED, RESERVED, OVERDUE, PAID, SHIPPED, OVERDUE)).late == 1
    assert check_runs(run("failed"), seen(*failed, PAID)).ends == {"failed": 1}
    for words, runs, events in (
        ("early", run("failed"), seen(*failed, early=True)),
        ("not ended", run("running"), seen(*done)),
        ("not ended", run("done", "payment"), seen(*done)),
        ("without a run", {}, seen(*done)),
        ("without an order", run("done"), []),
        ("one end", run("done"), seen(*done, SHIPPED)),
        ("one end", run("done"), seen(*done, RELEASED)),
        ("one end", run("failed"), seen(*done)),
        ("one reservation", run("done"), seen(RESERVED, *done)),
        ("two timers before", run("failed"), seen(PLACED, RESERVED, OVERDUE, RELEASED)),
        ("1 after it", run("failed"), seen(*failed, OVERDUE)),
        ("paid 0 times", run("done"), seen(PLACED, RESERVED, SHIPPED)),
        ("sets two", run("done"), seen(*done, OVERDUE, OVERDUE, OVERDUE)),
    ):
        with pytest.raises(WrongRun, match=words):
            check_runs(runs, events)


class Patience(msgspec.Struct, frozen=True):
    step: str


class Reminder(Event, type="order.reminder", key="order_id", subject="orders.{order_id}.reminder"):
    order_id: str
    number: int


class Patient:
    """Reminds several times, unless it is paid."""

    def react(self, state: Patience | None, event: Placed | Paid | Reminder) -> Decision | None:
        match event:
            case Placed() if state is None:
                reminders = [Reminder(order_id=event.order_id, number=number) for number in range(5)]
                timers = {f"r{each.number}": (each, 3600) for each in reminders}
                return Decision(state=Patience("waiting"), timers=timers)
            case Paid():
                return Decision(state=Patience("paid"), is_done=True)
        return None


async def test_a_run_that_is_over_leaves_no_timer_for_others_to_hear() -> None:
    app = App("shop", stream="ORDERS", subjects=["orders.>"], events=[Placed, Paid, Reminder], timers=True)
    app.workflow("patient", key="order_id")(Patient)
    async with NatsServer() as server:
        await app.apply(server.url)
        async with app.connect(server.url) as shop, running(app, server.url):
            runs = shop.workflow("patient")
            for id in ("paid", "cancelled"):
                await shop.publish(Placed(order_id=id))
            await until(lambda: has_timers(shop, 10))
            await shop.publish(Paid(order_id="paid"))
            assert await runs.cancel("cancelled")
            assert (await runs.wait_for_end("paid", timeout=60)).status == "done"
            assert [timer.name async for timer in shop.timers.list()] == []


class Asked(Event, type="call.asked", key="place", subject="calls.{place}.asked"):
    place: str
    timer: str
    after_s: float = 0.5


class Due(Event, type="call.due", key="place", subject="calls.{place}.due"):
    place: str


class Waiting:
    def react(self, state: str | None, event: Asked | Due) -> Decision | None:
        if isinstance(event, Asked):
            return Decision(state="waiting", timers={event.timer: (Due(place=event.place), event.after_s)})
        return Decision(is_done=True)


async def test_timers_of_two_runs_are_two_whatever_they_and_the_runs_are_called(nats_url: str) -> None:
    app = App("calls", stream="CALLS", subjects=["calls.>"], timers=True)
    app.workflow("waiting", key="place")(Waiting)
    await app.apply(nats_url)
    timers = {"a": "b/c", "a/b": "c", "x": "y=2Fz", "x=2Fy": "z", "x/y": "/z", "x/": "y/z"}
    async with app.connect(nats_url) as client, running(app, nats_url):
        for place, timer in timers.items():
            await client.publish(Asked(place=place, timer=timer))
        runs = client.workflow("waiting")
        ended = await asyncio.gather(*(runs.wait_for_end(place, timeout=10) for place in timers))
    assert {run.status for run in ended} == {"done"}


async def test_a_reason_or_a_time_that_is_none_is_told_and_changes_nothing(nats_url: str) -> None:
    app = fulfilment()
    await app.apply(nats_url)
    async with app.connect(nats_url) as shop, running(app, nats_url):
        runs = shop.workflow("fulfilment")
        await shop.publish(Placed(order_id="o"))
        await until(lambda: runs.get("o"))
        for reason in (None, 5, True, b"x", ["x"]):
            with pytest.raises(ConfigError, match=f"reason={re.escape(repr(reason))}: expected a text"):
                await runs.cancel("o", reason)  # type: ignore[arg-type]
        run = await runs.get("o")
        assert run is not None
        assert run.status == "running"
        assert [step["by_hand"] async for step in runs.timeline("o") if step["by_hand"]] == []
        assert await runs.cancel("o", "")
        for wait_s in (math.nan, -1, math.inf, "5", None):
            with pytest.raises(ConfigError, match=f"wait_s={re.escape(repr(wait_s))}: expected seconds"):
                await runs.retry("o", wait_s=wait_s)  # type: ignore[arg-type]


async def has_timers(shop: AppClient, count: int) -> bool:
    return len([timer async for timer in shop.timers.list()]) == count


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
        assert (again["is_restarted"], again["dead_letters"]) == (True, 0)
        shown = json.loads(await asyncio.to_thread(say, "show", *where, "o 1", "--json"))
        assert (shown["status"], shown["retries"], shown["timers"]) == ("running", 1, ["payment"])
    finally:
        workers.cancel()
        await asyncio.wait([workers])


async def test_a_run_that_cannot_be_read_hides_no_other(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = fulfilment()
    monkeypatch.setattr("support.fulfilment.app", app, raising=False)
    await app.apply(nats_url)
    async with app.connect(nats_url) as shop, running(app, nats_url):
        entities, runs = shop.entities("fulfilment"), shop.workflow("fulfilment")
        for id in ("good", "no json", "newer", "other state", "deep"):
            await shop.publish(Placed(order_id=id))

        async def are_there() -> bool:
            return len([run async for run in runs.list()]) == 5

        await until(are_there)
        damaged = {
            "no json": b"{",
            "newer": b'{"version":999,"key":"newer"}',
            "other state": b'{"version":1,"key":"other state","state":17,"timers":{}}',
            "deep": b"[" * 100_000,
        }
        for id, data in damaged.items():
            await shop.js.publish(entities.subject_of(id), data)
        listed = {run.key: run async for run in runs.list("running")}
        assert set(listed) == {"good", *damaged}
        assert (listed["good"].status, listed["good"].timers) == ("running", ("payment",))
        for id in damaged:
            assert listed[id].status == "unreadable"
            assert repr(id) in (listed[id].reason or ""), listed[id].reason

        seen = set()

        async def list_entities() -> None:
            async for found in entities.list():
                seen.add(found.key)

        with pytest.raises(ConfigError, match=r"and 1 more"):  # what is no record; of the others only the state is not
            await list_entities()
        assert seen == {"good", "newer", "other state"}
    words = ["workflow", "ls", "support.fulfilment:app", "fulfilment", "--servers", nats_url]
    result = await asyncio.to_thread(CliRunner().invoke, cli, words)
    assert result.exit_code == 0, result.output
    assert "unreadable  newer" in result.output
    assert result.output.splitlines()[-1] == "5 runs, 4 of them unreadable"


async def test_waiting_for_a_run_that_does_not_end_names_it(nats_url: str) -> None:
    app = fulfilment()
    await app.apply(nats_url)
    async with app.connect(nats_url) as shop:
        with pytest.raises(WorkflowNotOver, match=r"run 'o-1' of workflow 'fulfilment' .* 0\.1 s: it has not begun"):
            await shop.workflow("fulfilment").wait_for_end("o-1", timeout=0.1)
    assert issubclass(WorkflowNotOver, TimeoutError)


async def test_waiting_for_a_run_whose_server_is_away_does_not_say_that_it_has_not_begun() -> None:
    app = fulfilment()
    with NatsServer() as server:
        await app.apply(server.url)
        async with app.connect(server.url) as shop:
            server.pause()
            try:
                with pytest.raises(WorkflowNotOver, match="the server did not report its status"):
                    await shop.workflow("fulfilment").wait_for_end("o-1", timeout=0.5)
            finally:
                server.resume()


async def test_a_timeline_that_cannot_be_read_raises_one_plain_error(own: NatsServer) -> None:
    async with jetspark.connect(own.url) as client:
        js = client.jetstream(timeout=0.5)
        stream = await js.create_stream(jetspark.StreamConfig(name="TIMELINE", subjects=("timeline",)))
        own.pause()
        try:
            record = RunRecord(version=1, key="o-1", events=(1, 2, 3))
            steps = read_timeline(stream, fulfilment().catalogue, record, 1)
            with pytest.raises(RequestTimeout):
                await anext(aiter(steps))
        finally:
            own.resume()


async def test_wrong_arguments_for_runs_are_told(nats_url: str) -> None:
    app = fulfilment()
    await app.apply(nats_url)
    async with app.connect(nats_url) as shop:
        runs = shop.workflow("fulfilment")
        for status in ("bogus", 5, "unreadable"):
            with pytest.raises(ConfigError, match="expected one of running, done, failed, or None"):
                await anext(aiter(runs.list(status)))  # type: ignore[arg-type]
        for timeout in (-1, float("nan"), "5"):
            with pytest.raises(ConfigError, match="timeout="):
                await runs.wait_for_end("o-1", timeout=timeout)  # type: ignore[arg-type]


async def test_workers_whose_stream_is_deleted_say_so_in_a_line_each(
    nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = fulfilment()
    heard: list[str] = []

    @app.handler(Placed, durable="hearing")
    async def hear(event: Placed) -> None:
        heard.append(event.order_id)

    await app.apply(nats_url)
    workers = asyncio.create_task(app.run(nats_url, stop_timeout=5.0))
    async with app.connect(nats_url) as shop:
        await shop.publish(Placed(order_id="o-1"))
        await until(lambda: heard)
        await until(lambda: shop.workflow("fulfilment").get("o-1"))
        await shop.js.delete_stream(app.stream)
    with pytest.raises(ConsumerNotFound, match="it was deleted"):
        await asyncio.wait_for(workers, 60)
    del workers
    gc.collect()
    records = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in records if record.name == "asyncio"] == []
    told = [record.getMessage() for record in records if record.name == "jetspark.app"]  # none, if one noticed alone
    assert all(text.startswith("another worker failed as well: consumer ") for text in told), told
