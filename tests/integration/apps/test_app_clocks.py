"""A program whose clock is wrong by an hour: the server's clock decides what is due, over, or forgotten."""

from __future__ import annotations

import asyncio
import datetime
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from support.accounts import Deposit, bank_with_balances
from support.apps import publish, running, set_up, until
from support.commands import WAYS, deciding

import jetspark
from jetspark.aio.jetstream import JetStream
from jetspark.app import (
    App,
    AppClient,
    Breaker,
    Command,
    Context,
    Decision,
    Event,
    Past,
    Retry,
    RetryIn,
    clock,
)
from jetspark.app.extents import ReplayRequest
from jetspark.app.handlers.inheritance import watch_filters
from jetspark.app.handlers.once import OnceRecords
from jetspark.app.replay.what_if import _end_of
from jetspark.app.server_clock import server_clock
from jetspark.app.stream_history import StreamHistory
from jetspark.app.timers import REMEMBERED_S, Timer
from jetspark.errors import TopologyDrift
from jetspark.server import NatsServer

AFTER_S = 600.0
FAR_S = 300.0
"""Of what is an hour too early or too late."""


class Placed(Event, type="order.placed", key="order_id", subject="orders.placed.{order_id}"):
    order_id: str


class Overdue(Event, type="order.overdue", key="order_id", subject="orders.overdue.{order_id}"):
    order_id: str


class Order(msgspec.Struct):
    cents: int = 0


@pytest.fixture(params=[-3600.0, 3600.0], ids=["behind", "ahead"])
def wrong_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(clock, "seconds_now", lambda: time.time() + request.param)
    offset: float = request.param
    return offset


def new_app() -> App:
    app = App("shop", stream="SHOP", subjects=["orders.>"], timers=True, events=[Placed, Overdue])
    app.entities("orders", state=Order)
    return app


async def by_client(app: App, url: str, shop: AppClient) -> None:
    await shop.timers.set("late", Overdue(order_id="o-1"), after=AFTER_S)


async def by_entity(app: App, url: str, shop: AppClient) -> None:
    async with shop.entities("orders").change("o-1") as change:
        change.set(Order(1))
        change.set_timer("late", Overdue(order_id="o-1"), after=datetime.timedelta(seconds=AFTER_S))


async def by_entities(app: App, url: str, shop: AppClient) -> None:
    orders = shop.entities("orders")
    async with orders.changes("o-1", "o-2") as (one, other):
        one.set_timer("late", Overdue(order_id="o-1"), at=datetime.datetime(2200, 1, 1, tzinfo=datetime.UTC))
        one.set_timer("late", Overdue(order_id="o-1"), after=AFTER_S)  # the last one counts
        other.set(Order(2))


async def by_handler(app: App, url: str, shop: AppClient) -> None:
    @app.handler(Placed, durable="waiting")
    async def wait(event: Placed, ctx: Context) -> None:
        await ctx.schedule(Overdue(order_id=event.order_id), after=AFTER_S, name="late")

    await handled(app, url, shop)


async def by_timers_of_a_handler(app: App, url: str, shop: AppClient) -> None:
    @app.handler(Placed, durable="waiting")
    async def wait(event: Placed, ctx: Context) -> None:
        await ctx.timers.set("late", Overdue(order_id=event.order_id), after=AFTER_S)

    await handled(app, url, shop)


async def by_workflow(app: App, url: str, shop: AppClient) -> None:
    @app.workflow("ordering", key="order_id")
    class Ordering:
        def react(self, state: int | None, event: Placed) -> Decision | None:
            return Decision(state=1, timers={"late": (Overdue(order_id=event.order_id), AFTER_S)})

    await handled(app, url, shop)


async def handled(app: App, url: str, shop: AppClient) -> None:
    await app.apply(url)
    await shop.publish(Placed(order_id="o-1"))
    async with running(app, url):
        await until(lambda: any_timer(shop))


async def any_timer(shop: AppClient) -> Timer | None:
    return await anext(aiter(shop.timers.list()), None)


def check_due(timer: Timer) -> None:
    assert timer.due is not None
    assert 0 <= (timer.due - timer.set_at).total_seconds() - AFTER_S + 1.0 < FAR_S


@pytest.mark.parametrize("way", [by_client, by_entity, by_entities, by_handler, by_timers_of_a_handler, by_workflow])
async def test_a_timer_is_due_by_the_clock_of_the_server(
    server: NatsServer, js: JetStream, wrong_clock: float, way: Callable[..., Awaitable[None]]
) -> None:
    app = new_app()
    await set_up(js, app)
    async with app.connect(server.url) as shop:
        await way(app, server.url, shop)
        timer = await any_timer(shop)
    assert timer is not None
    check_due(timer)


@pytest.mark.parametrize("way", ["by a worker", "here"])
async def test_a_timer_of_a_command_is_due_by_the_clock_of_the_server(
    server: NatsServer, js: JetStream, wrong_clock: float, way: str
) -> None:
    app = new_app()

    @app.command("orders.place")
    class Place(Command):
        order_id: str

        def reads(self) -> list[str]:
            return [f"orders.*.{self.order_id}"]

        def decide(self, past: Past) -> Decision:
            placed = Placed(order_id=self.order_id)
            return Decision(events=[placed], timers={"late": (Overdue(order_id=self.order_id), AFTER_S)})

    async with deciding(app, server.url, way) as shop:
        await shop.call(Place(order_id="o-1"))
        timer = await any_timer(shop)
    assert timer is not None
    check_due(timer)


async def test_a_long_retry_is_due_by_the_clock_of_the_server(
    server: NatsServer, js: JetStream, wrong_clock: float
) -> None:
    app = new_app()

    @app.handler(Placed, durable="billing", retry=Retry(in_lane_s=1.0))
    async def bill(event: Placed) -> None:
        raise RetryIn(AFTER_S)

    await set_up(js, app)
    await publish(js, app, Placed(order_id="o-1"))
    retries = await js.stream(app.spec.retry_stream)

    async def waits() -> Any:
        return (await retries.info()).state.messages

    async with running(app, server.url):
        await until(waits)
    [message] = [each async for each in retries.get_messages(1)]
    due = datetime.datetime.fromisoformat(message.headers["Nats-Schedule"].removeprefix("@at "))
    assert 0 <= (due - message.timestamp).total_seconds() - AFTER_S + 1.0 < FAR_S


async def test_a_breaker_pauses_by_the_clock_of_the_server(
    server: NatsServer, js: JetStream, wrong_clock: float
) -> None:
    app = new_app()

    @app.handler(Placed, durable="billing", breaker=Breaker(failures=1, open_s=AFTER_S))
    async def bill(event: Placed) -> None:
        raise OSError("away")

    await set_up(js, app)
    await publish(js, app, Placed(order_id="o-1"))
    consumer = await (await js.stream("SHOP")).consumer("billing")

    async def is_paused() -> bool:
        return bool((await consumer.info()).is_paused)

    async with running(app, server.url):
        await until(is_paused)
        left_s = (await consumer.info()).pause_remaining_s
    assert left_s is not None
    assert AFTER_S - FAR_S < left_s < AFTER_S + FAR_S


async def cancel_by_client(app: App, url: str, shop: AppClient) -> None:
    await shop.timers.cancel("late")


async def cancel_by_event(app: App, url: str, shop: AppClient) -> None:
    await shop.publish(Placed(order_id="o-2"), cancels="late")


async def cancel_by_handler(app: App, url: str, shop: AppClient) -> None:
    @app.handler(Placed, durable="ending")
    async def end(event: Placed, ctx: Context) -> None:
        await ctx.timers.cancel("late")

    async def is_over() -> bool:
        return await shop.timers.get("late") is None

    await app.apply(url)
    await shop.publish(Placed(order_id="o-1"))
    async with running(app, url):
        await until(is_over)


CANCELS = [cancel_by_client, cancel_by_event, cancel_by_handler]


async def mark_of_cancel(
    url: str, app: App, cancel: Callable[..., Awaitable[None]], due_in_s: float, *, asks: bool = False
) -> dict[str, str]:
    """The headers of the last mark; none if there was none."""
    marks: list[dict[str, str]] = []
    async with app.connect(url) as shop, await jetspark.connect(url) as nc:
        marking = await nc.subscribe(
            "timers.shop.late.cancelled", callback=lambda each: marks.append(dict(each.headers))
        )
        await nc.flush()
        due = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=due_in_s)
        await shop.timers.set("late", Overdue(order_id="o-1"), at=due)
        if asks:
            await shop.timers.set("other", Overdue(order_id="o-2"), after=AFTER_S)
        await cancel(app, url, shop)
        await marking.drain()
    return marks[-1] if marks else {}


@pytest.mark.parametrize("asks", [False, True], ids=["unknown", "known"])
@pytest.mark.parametrize("cancel", CANCELS)
async def test_a_cancel_shortly_before_a_timer_fires_is_remembered(
    server: NatsServer, js: JetStream, wrong_clock: float, cancel: Callable[..., Awaitable[None]], asks: bool
) -> None:
    app = new_app()
    await set_up(js, app)
    mark = await mark_of_cancel(server.url, app, cancel, 30.0, asks=asks)
    assert mark["Nats-TTL"] == f"{REMEMBERED_S}s"
    assert mark["Jetspark-Timer-Setting"]


@pytest.mark.parametrize("cancel", CANCELS)
async def test_a_cancel_long_before_a_timer_fires_is_not_remembered(
    server: NatsServer, js: JetStream, wrong_clock: float, cancel: Callable[..., Awaitable[None]]
) -> None:
    app = new_app()
    await set_up(js, app)
    mark = await mark_of_cancel(server.url, app, cancel, AFTER_S, asks=cancel is not cancel_by_handler)
    assert mark.get("Nats-TTL") == (None if cancel is cancel_by_event else "1s")


@pytest.mark.parametrize("way", WAYS)
async def test_a_command_is_remembered_by_the_clock_of_the_server(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    app = bank_with_balances()
    async with deciding(app, server.url, way) as client:
        first = await client.call(Deposit(account="a", cents=1), command_id="d-1", timeout=20.0)
        assert await client.view("balances").get("a", at_least=first.sequence, timeout=30.0) == 1
    monkeypatch.setattr(clock, "seconds_now", lambda: time.time() + 2 * 3600.0)
    async with deciding(bank_with_balances(), server.url, way) as client:
        again = await client.call(Deposit(account="a", cents=1), command_id="d-1", timeout=20.0)
    assert (again.sequence, again.is_repeated) == (first.sequence, True)


async def test_the_time_since_when_a_narrowed_consumer_misses_events_is_the_servers(
    server: NatsServer, js: JetStream, wrong_clock: float
) -> None:
    stream = await js.create_stream(jetspark.StreamConfig(name="S", subjects=["s.>"]))
    consumer = await stream.create_consumer(jetspark.ConsumerConfig(durable_name="d", filter_subject="s.>"))
    began = (await stream.info()).timestamp
    watching = asyncio.create_task(watch_filters("shop", {consumer: ["s.>"]}, every_s=0.01))
    await stream.update_consumer(jetspark.ConsumerConfig(durable_name="d", filter_subject="s.a"))
    narrowed = (await stream.info()).timestamp
    with pytest.raises(TopologyDrift) as raised:
        await watching
    found = re.search(r"--since (\S+)", str(raised.value))
    assert began is not None
    assert narrowed is not None
    assert found is not None
    assert began.replace(microsecond=0) <= datetime.datetime.fromisoformat(found[1]) <= narrowed


async def test_a_what_if_up_to_the_end_of_a_stream_ends_by_the_clock_of_the_server(
    server: NatsServer, js: JetStream, wrong_clock: float
) -> None:
    app = new_app()

    @app.workflow("ordering", key="order_id")
    class Ordering:
        def react(self, state: int | None, event: Placed | Overdue) -> Decision | None:
            if isinstance(event, Overdue):
                return Decision(state=2)
            return Decision(state=1, timers={"late": (Overdue(order_id=event.order_id), AFTER_S)})

    await set_up(js, app)
    history = StreamHistory(js, app.stream, (">",))
    end = await _end_of(history, await history.extent(ReplayRequest()))
    told = (await (await js.stream(app.stream)).info()).timestamp
    assert told is not None
    assert abs((told - end).total_seconds()) < FAR_S


async def test_an_effect_is_claimed_by_the_clock_of_the_server(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = await js.create_kv(jetspark.KVConfig(bucket="records", limit_marker_ttl_s=1))
    now = server_clock(js, "KV_records").now
    one, other = (OnceRecords(records, "billing", now, lease_s=AFTER_S, remember_s=AFTER_S) for _ in range(2))
    await one._claim("charge")
    monkeypatch.setattr(clock, "seconds_now", lambda: time.time() + 2 * AFTER_S)
    with pytest.raises(RetryIn, match="another worker has claimed"):
        await other._claim("charge")
