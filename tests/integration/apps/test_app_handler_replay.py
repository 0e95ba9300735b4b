"""Replaying events to a handler, beside its live worker."""

from __future__ import annotations

import asyncio
import datetime
import importlib
import json
import re
import sys
from pathlib import Path

import msgspec
import pytest
from support.apps import is_settled, publish, running, set_up, until
from support.peers import Proxy
from typer.testing import CliRunner

import jetspark
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Context, Event, Retry, Skip, encode
from jetspark.app.clock import utc_now
from jetspark.app.replay import (
    HandlerReplayOptions,
    HandlerReplayPlan,
    ReplayRequest,
    plan_handler_replay,
    read_handler_records,
    replay_handler,
)
from jetspark.cli import commands
from jetspark.errors import ConfigError, DataLoss
from jetspark.server import NatsServer


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    cents: int


class Billed(Event, type="order.billed", key="order_id", subject="orders.{order_id}.billed"):
    order_id: str
    receipt: str


class Shop:
    """An application with a handler, and what its handler has done."""

    def __init__(self) -> None:
        self.charged: list[str] = []
        self.seen: list[tuple[str, int, bool]] = []
        self.is_broken = False
        self.hold: asyncio.Event | None = None
        self.app = app = App("shop", stream="SHOP", subjects=["orders.>"])

        async def charge(order: str) -> str:
            self.charged.append(order)
            return f"receipt-{order}"

        @app.handler(Paid, durable="billing", timeout=5)
        async def bill(event: Paid, ctx: Context) -> Billed | None:
            self.seen.append((event.order_id, event.cents, ctx.is_replay))
            if self.hold is not None and event.cents == 7:
                await self.hold.wait()
            if event.cents == 0:
                raise Skip("nothing to pay")
            if self.is_broken:
                raise ValueError("broken code")
            receipt = await ctx.once("charge", charge, event.order_id)
            return Billed(order_id=event.order_id, receipt=receipt)

        @app.handler(Paid, durable="ledger", idempotent="transaction", bucket="ledger")
        async def enter(event: Paid, ctx: Context) -> None:
            known = await ctx.tx.get(event.order_id)
            await ctx.tx.put(event.order_id, b"%d" % (int(known or 0) + event.cents))

        @app.batch_handler(Paid, durable="report")
        async def report(events: list[Paid]) -> None: ...


async def handled_live(server: NatsServer, js: JetStream, shop: Shop, count: int = 9) -> None:
    """Events that a live worker has handled."""
    await set_up(js, shop.app)
    await publish(js, shop.app, *(Paid(order_id=f"o-{n % 3}", cents=n) for n in range(count)))
    async with running(shop.app, server.url):
        await until(lambda: is_settled(js, shop.app, "billing"))
        await until(lambda: is_settled(js, shop.app, "ledger"))


async def everything(js: JetStream) -> dict[str, int]:
    """The last sequence of every stream, but for the bucket that has the record of a replay."""
    found = {name: (await (await js.stream(name)).info()).state.last_sequence async for name in js.stream_names()}
    del found["KV_shop_handlers"]
    return found


async def totals(js: JetStream) -> dict[str, bytes]:
    found = (await (await js.kv("ledger")).snapshot(["*"])).values()
    return {entry.key: entry.value for entry in found if entry.key.startswith("o-")}


async def test_a_replay_without_effects_says_what_would_happen_and_changes_nothing(
    server: NatsServer, js: JetStream
) -> None:
    shop = Shop()
    await handled_live(server, js, shop)
    await publish(js, shop.app, Paid(order_id="new", cents=70))  # which no worker has handled
    charged, before = list(shop.charged), await everything(js)
    live = (await (await (await js.stream("SHOP")).consumer("billing")).info()).delivered
    shop.seen.clear()

    done = await replay_handler(js, shop.app, "billing", ReplayRequest(from_seq=1))

    assert (done.events, done.done, done.skipped, done.stopped, done.failed) == (10, 8, 1, 1, 0)
    assert (done.published, done.recorded, done.held_back) == ({"order.billed": 8}, {"charge": 8}, {"charge": 1})
    assert {is_replay for _, _, is_replay in shop.seen} == {True}
    assert [n for order, n, _ in shop.seen if order == "o-1"] == [1, 4, 7]  # in the order of their key
    assert shop.charged == charged
    assert await everything(js) == before
    assert (await (await (await js.stream("SHOP")).consumer("billing")).info()).delivered == live
    names = [each.name async for each in (await js.stream("SHOP")).consumers()]
    assert sorted(names) == ["billing", "ledger", "report"]  # the shadow is gone

    shop.is_broken = True
    broken = await replay_handler(js, shop.app, "billing", ReplayRequest(from_seq=2, to_seq=5, keys=("o-1",)))
    assert (broken.failed, broken.failures[0]["sequence"]) == (2, 2)
    assert "ValueError: broken code" in str(broken)
    assert await everything(js) == before  # no letter either
    records = await read_handler_records(await js.kv("shop_handlers"))
    assert [(each.id, each.status) for each in records] == [(done.id, "done"), (broken.id, "done")]

    entered = await replay_handler(js, shop.app, "ledger")
    assert (entered.done, entered.writes) == (10, 10)
    assert await everything(js) == before


async def test_with_effects_what_is_recorded_is_not_repeated(server: NatsServer, js: JetStream) -> None:
    shop = Shop()
    await handled_live(server, js, shop)
    await publish(js, shop.app, Paid(order_id="new", cents=70))
    before = (await (await js.stream("SHOP")).info()).state.messages
    ledger = await totals(js)
    charged = list(shop.charged)

    done = await replay_handler(js, shop.app, "billing", options=HandlerReplayOptions(effects=True))

    assert (done.done, done.skipped, done.published) == (9, 1, {})
    assert shop.charged == [*charged, "new"]
    # Events that were published before have the same ids, and are stored once.
    assert (await (await js.stream("SHOP")).info()).state.messages == before + 1
    await replay_handler(js, shop.app, "ledger", options=HandlerReplayOptions(effects=True))
    assert await totals(js) == ledger
    assert (await (await js.kv("ledger")).get("new")).value == b"70"


async def test_a_replay_that_was_killed_is_resumed_and_counts_each_event_once(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetspark.app.replay.handler_replay.PORTION", 4)
    shop = Shop()
    await handled_live(server, js, shop)
    shop.seen.clear()
    shop.hold = asyncio.Event()
    task = asyncio.create_task(replay_handler(js, shop.app, "billing"))
    await until(lambda: any(cents == 7 for _, cents, _ in shop.seen))
    task.cancel()
    await asyncio.wait([task])
    shop.hold = None
    [record] = await read_handler_records(await js.kv("shop_handlers"), "billing")
    assert (record.status, record.at, record.events) == ("running", 4, 4)
    with pytest.raises(ConfigError, match="it was begun without effects"):
        await replay_handler(js, shop.app, "billing", options=HandlerReplayOptions(resume=record.id, effects=True))

    plans: list[HandlerReplayPlan] = []
    done = await replay_handler(
        js, shop.app, "billing", options=HandlerReplayOptions(resume=record.id), on_plan=plans.append
    )

    assert (done.id, done.events, done.done, done.skipped, done.status) == (record.id, 9, 8, 1, "done")
    [left] = plans
    assert (left.extent.first, left.extent.last, sum(left.events.values())) == (5, record.last, 5)
    assert done.outline == record.outline
    assert (done.outline["subjects"], done.outline["deleted"]) == (["orders.*.paid"], 0)
    with pytest.raises(ConfigError, match="it is done already"):
        await replay_handler(js, shop.app, "billing", options=HandlerReplayOptions(resume=record.id))


@pytest.mark.parametrize("cut_after", [40_000, 130_000])  # among the only portion, or the first of several
@pytest.mark.parametrize("count", [150, 500])
async def test_events_that_get_lost_with_the_connection_are_handled_all_the_same(
    server: NatsServer, js: JetStream, count: int, cut_after: int
) -> None:
    app = App("shop", stream="SHOP", subjects=["orders.>"])
    seen: list[int] = []

    @app.handler(Paid, durable="billing")
    async def bill(event: Paid) -> None:
        seen.append(event.cents)

    await set_up(js, app)
    encoded = encode(Paid(order_id="o" * 300, cents=123456789), id="id", source="/shop", time=utc_now())
    async with js.fast_batch() as batch:
        await batch.add_many((encoded.subject, encoded.data.replace(b"123456789", b"%d" % n)) for n in range(count))
    async with Proxy(server.port) as proxy, jetspark.connect(proxy.url) as client:
        plans: list[HandlerReplayPlan] = []

        def cut(plan: HandlerReplayPlan) -> None:
            plans.append(plan)
            proxy.cut_after(cut_after)

        done = await replay_handler(client.jetstream(), app, "billing", on_plan=cut)
    assert [sum(plan.events.values()) for plan in plans] == [count]
    assert (done.events, done.done, done.failed) == (count, count, 0)
    assert seen == list(range(count))
    assert [each.name async for each in (await js.stream("SHOP")).consumers()] == ["billing"]


class Receipt(msgspec.Struct):
    number: int
    day: datetime.date


async def test_what_a_handler_does_through_its_context_is_held_back_and_counted(
    server: NatsServer, js: JetStream
) -> None:
    app = App("shop", stream="SHOP", subjects=["orders.>"], timers=True, events=[Billed])
    receipts: list[Receipt] = []
    billed = Billed(order_id="o", receipt="r")

    async def charge(order: str) -> Receipt:
        return Receipt(7, datetime.date(2026, 3, 20))

    @app.handler(Paid, durable="typed")
    async def typed(event: Paid, ctx: Context) -> None:
        receipts.append(await ctx.once("charge", charge, event.order_id))

    @app.handler(Paid, durable="together")
    async def together(event: Paid, ctx: Context) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name in ("one", "other"):
                tasks.create_task(ctx.once(name, charge, event.order_id))

    @app.handler(Paid, durable="bucket")
    async def bucket(event: Paid, ctx: Context) -> None:
        await (await ctx.js.kv("shop_handlers")).put("x", b"")

    @app.handler(Paid, durable="raw")
    async def raw(event: Paid, ctx: Context) -> None:
        assert (await ctx.js.publish("orders.raw", b"no event", msg_id="x")).sequence == 0

    @app.handler(Paid, durable="ending")
    async def ending(event: Paid, ctx: Context) -> None:
        assert await ctx.is_current_timer()
        assert await ctx.timers.get("other") is None
        assert (await ctx.publish(billed, cancels="due")).sequence == 0

    @app.handler(Paid, durable="scheduling")
    async def scheduling(event: Paid, ctx: Context) -> None:
        await ctx.schedule(billed, after=60)

    @app.handler(Paid, durable="cancelling")
    async def cancelling(event: Paid, ctx: Context) -> None:
        await ctx.timers.cancel("due")

    await set_up(js, app)
    await publish(js, app, Paid(order_id="o-1", cents=1))
    async with running(app, server.url, only=["typed"]):
        await until(lambda: is_settled(js, app, "typed"))
    async with app.connect(server.url) as client:
        await client.timers.set("due", billed, after=40)
    before = await everything(js)

    async def replayed(handler: str) -> tuple[int, int, dict[str, int], dict[str, int]]:
        done = await replay_handler(js, app, handler, ReplayRequest(to_seq=1))
        assert (done.events, done.failures) == (1, [])
        return done.done, done.stopped, done.published, done.held_back

    assert await replayed("typed") == (1, 0, {}, {})
    assert receipts == [Receipt(7, datetime.date(2026, 3, 20))] * 2  # what was recorded has its type
    *ended, held_back = await replayed("together")
    assert ended == [0, 1, {}]
    # The first one that is held back cancels its sibling, which may have been held back by then.
    assert held_back in ({"one": 1, "other": 1}, {"one": 1}, {"other": 1})
    assert await replayed("bucket") == (0, 1, {}, {"ctx.js.kv": 1})
    assert await replayed("raw") == (1, 0, {"orders.raw": 1}, {})
    assert await replayed("ending") == (1, 0, {"order.billed": 1}, {})
    assert await replayed("scheduling") == (1, 0, {"order.billed": 1}, {})
    assert await replayed("cancelling") == (0, 1, {}, {"timers": 1})
    assert await everything(js) == before


@pytest.mark.parametrize("effects", [False, True])
async def test_an_event_whose_handler_cancels_itself_or_takes_too_long_has_failed(js: JetStream, effects: bool) -> None:
    app = App("shop", stream="SHOP", subjects=["orders.>"])

    @app.handler(Paid, durable="billing", timeout=0.2, retry=Retry(attempts=1))
    async def bill(event: Paid) -> None:
        if event.cents < 2:
            if event.cents == 0:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            await asyncio.sleep(60)

    await set_up(js, app)
    await publish(js, app, *(Paid(order_id="o", cents=n) for n in range(3)))
    done = await replay_handler(js, app, "billing", options=HandlerReplayOptions(effects=effects))
    assert (done.events, done.done, done.failed) == (3, 1, 2)
    assert [each["error"].partition(":")[0] for each in done.failures] == ["CancelledError", "HandlerTimeout"]


async def test_what_is_gone_or_cannot_be_held_back_is_refused(server: NatsServer, js: JetStream) -> None:
    shop = Shop()
    await handled_live(server, js, shop)
    plan = await plan_handler_replay(js, shop.app, "billing", ReplayRequest(from_seq=4, to_seq=9))
    assert (plan.events, plan.keys) == ({"order.paid": 6}, 3)
    stream = await js.stream("SHOP")
    times = [(await stream.get_message(sequence)).timestamp for sequence in (4, 9)]
    assert [plan.outline.first_time, plan.outline.last_time] == times
    stored = [f"{time:%Y-%m-%dT%H:%M:%S}Z" for time in times]
    assert f"stored from {stored[0]} to {stored[1]}, on orders.*.paid\n" in str(plan)
    await stream.delete_message(6)
    plan = await plan_handler_replay(js, shop.app, "billing", ReplayRequest(from_seq=4, subject="orders.o-1.*"))
    assert "no replay sees them; in this range 6" in str(plan)
    assert (plan.to_dict()["subjects"], plan.to_dict()["gaps"]) == (["orders.o-1.*"], [[6, 6]])
    with pytest.raises(ConfigError, match="a batch handler has no context"):
        await replay_handler(js, shop.app, "report", options=HandlerReplayOptions(effects=True))
    with pytest.raises(ConfigError, match=r"keys=\(7,\): expected texts, as ctx.key has them"):
        await replay_handler(js, shop.app, "billing", ReplayRequest(keys=(7,)))
    with pytest.raises(ConfigError, match="it has billing, ledger, report"):
        await replay_handler(js, shop.app, "shipping")
    await stream.purge(up_to_sequence=3)
    with pytest.raises(DataLoss):
        await replay_handler(js, shop.app, "billing", ReplayRequest(from_seq=2))


SOURCE = """
from jetspark.app import App, Context, Event

class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    cents: int

app = App("till", stream="TILL", subjects=["orders.>"])

@app.handler(Paid, durable="billing")
async def bill(event: Paid, ctx: Context) -> None:
    assert ctx.is_replay
    assert event.cents != 5
"""


def test_the_command_replays_handlers_and_lists_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_url: str
) -> None:
    (tmp_path / "handled.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("JETSPARK_SERVERS", nats_url)
    module = importlib.import_module("handled")

    def run(*arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(commands.app, list(arguments))
        assert done.exit_code == code, f"{done.output} {done.exception!r}"
        return done.output

    async def prepare() -> None:
        async with jetspark.connect(nats_url) as client:
            await set_up(client.jetstream(), module.app)
            await publish(client.jetstream(), module.app, *(module.Paid(order_id="o", cents=n) for n in range(9)))

    try:
        asyncio.run(prepare())
        part = ("replay", "handled:app", "billing", "--to-seq", "4")
        assert "4 events of 1 keys (4 order.paid)" in run(*part, "--dry-run")
        told = run(*part, "--effects")
        assert re.search(r"all of it is there\nstored from \S+ to \S+, on orders\.\*\.paid\n4 events of 1 keys", told)
        assert "4 done, 0 skipped, 0 failed, done" in told
        found = json.loads(run("replay", "handled:app", "billing", "--rate", "1000", "--json", code=3))
        assert (found["done"], found["failed"], found["failures"][0]["sequence"]) == (8, 1, 6)
        assert "2 replays" in run("replays", "handled:app", "billing")
        refused = CliRunner().invoke(commands.app, ["replay", "handled:app", "shipping"]).exception
        assert "no projection or handler of this name; it has billing" in str(refused)
    finally:
        del sys.modules["handled"]


@pytest.mark.parametrize("has_plan", [False, True])
async def test_a_key_without_an_event_in_the_range_is_refused(
    server: NatsServer, js: JetStream, has_plan: bool
) -> None:
    """As a projection refuses it: most likely it was misspelt."""
    shop = Shop()
    await handled_live(server, js, shop)
    shop.seen.clear()
    told: list[HandlerReplayPlan] = []
    on_plan = told.append if has_plan else None
    for request in (
        ReplayRequest(keys=("o-1", "o-9")),
        ReplayRequest(keys=("o-9",), from_seq=3),
        ReplayRequest(keys=("o-0",), from_seq=2, to_seq=3),  # which are of other keys
        ReplayRequest(keys=("o-1",), subject="orders.o-2.>"),
    ):
        with pytest.raises(ConfigError, match=r"key 'o-.' of handler 'billing': no event in sequences . to \d+ of"):
            await replay_handler(js, shop.app, "billing", request, on_plan=on_plan)
        with pytest.raises(ConfigError, match="no event in sequences"):
            await plan_handler_replay(js, shop.app, "billing", request)
    assert (shop.seen, told) == ([], [])
    done = await replay_handler(js, shop.app, "billing", ReplayRequest(keys=("o-1", "o-0")), on_plan=on_plan)
    assert (done.events, done.status) == (6, "done")
