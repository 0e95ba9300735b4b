"""A program whose clock is wrong by an hour: what is due some time from now is due by the server's clock."""

from __future__ import annotations

import datetime
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from support.apps import publish, running, set_up, until
from support.commands import deciding

from jetspark.aio.jetstream import JetStream
from jetspark.app import App, AppClient, Breaker, Command, Context, Decision, Event, Past, Retry, RetryIn, clock
from jetspark.app.timers import Timer
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
    retries = await js.stream(app.retry_stream)

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
