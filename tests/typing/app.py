"""What users of ``jetspark.app`` see."""

import datetime
from collections.abc import AsyncIterator
from typing import Annotated, Any, assert_type

import msgspec
from pydantic import BaseModel

import jetspark
from jetspark.app import (
    App,
    AppClient,
    Command,
    CommandOptions,
    CommandReply,
    Context,
    Decision,
    Event,
    Measure,
    Past,
    Private,
    Timestamp,
    TopologyPlan,
    View,
    decode,
    event,
    unchanged,
    upcast,
)
from jetspark.app.testing import (
    HandlerRun,
    InjectedFault,
    ReliabilityReport,
    TestApp,
    check_reliability,
    run_handler,
)


class OrderPaid(Event, type="order.paid", version=2, key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    amount_cents: Annotated[int, msgspec.Meta(ge=0)]
    email: Private[str] = ""
    weight: Measure[float] = 0.0
    at: Timestamp | None = None
    words: list[str] = msgspec.field(default_factory=list)


@event(type="order.shipped", key="order_id")
class OrderShipped(BaseModel):
    order_id: str


@upcast(OrderPaid, from_version=1)
def from_1(old: dict[str, Any]) -> dict[str, Any]:
    return {"order_id": old["id"], "amount_cents": old["total_cents"]}


def fields() -> None:
    paid = OrderPaid(order_id="o-1", amount_cents=5)
    assert_type(paid.order_id, str)
    assert_type(paid.amount_cents, int)
    assert_type(paid.email, str)
    assert_type(paid.weight, float)
    assert_type(paid.at, datetime.datetime | None)
    assert_type(OrderPaid.event_type, str)
    assert_type(OrderPaid.event_version, int)
    OrderPaid(order_id=1, amount_cents=5)  # type: ignore[arg-type]
    OrderPaid(order_id="o-1")  # type: ignore[call-arg]
    OrderPaid("o-1", 5)  # type: ignore[call-arg]
    paid.order_id = "o-2"  # type: ignore[misc]
    assert_type(OrderShipped(order_id="o-1").order_id, str)
    upcast(OrderPaid, from_version=1)(unchanged)


async def use(url: str) -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"], events=[OrderPaid, OrderShipped])
    assert_type(await app.plan(url), TopologyPlan)
    assert_type(await app.apply(url, allow=True), TopologyPlan)
    async with app.connect(url, name="shop") as orders:
        assert_type(orders, AppClient)
        assert_type(await orders.publish(OrderPaid(order_id="o-1", amount_cents=5)), jetspark.PubAck)
        async with orders.bulk() as bulk:
            assert_type(await bulk.publish_many([OrderShipped(order_id="o-1")]), int)
    assert_type(decode("a", b"", None, app.catalogue).correlation_id, str)
    App("orders", stream="ORDERS", compatibility="SOME")  # type: ignore[arg-type]


async def bill(event: OrderPaid, ctx: Context) -> OrderShipped:
    return OrderShipped(order_id=event.order_id)


async def check(app: App) -> None:
    paid = OrderPaid(order_id="o-1", amount_cents=5)
    run = await run_handler(bill, paid, app=app, recorded={"charge": 1})
    assert_type(run, HandlerRun)
    assert_type(run.retry_in_s, float | None)
    async with TestApp(app, seed=1) as test:
        assert_type(test.published(OrderPaid), list[OrderPaid])
        assert_type(test.crash_after_effect(), InjectedFault)
    assert_type(await check_reliability(app, paid, effects=lambda: [1]), ReliabilityReport)


class PayOrder(Command):
    order_id: str
    note: str = ""

    def reads(self) -> list[str]:
        return [f"orders.{self.order_id}.>"]

    def decide(self, past: Past) -> Decision:
        assert_type(past.of(OrderPaid), list[OrderPaid])
        return Decision(events=[OrderPaid(order_id=self.order_id, amount_cents=1)], reply={"cents": 1})


async def call(app: App, orders: AppClient) -> None:
    app.command("orders.pay", tries=3)(PayOrder)
    reply = await orders.call(PayOrder(order_id="o-1"), command_id="c-1", expected_version=0, timeout=2.0)
    assert_type(reply, CommandReply)
    assert_type(reply.sequence, int)
    assert_type(reply.data_as(dict[str, int]), dict[str, int])
    PayOrder(order_id=1)  # type: ignore[arg-type]
    PayOrder("o-1")  # type: ignore[call-arg]
    await orders.call(OrderPaid(order_id="o-1", amount_cents=5))  # type: ignore[arg-type]
    app.command("orders.pay", guard="none")(PayOrder)  # type: ignore[arg-type]


def wrong_options(app: App) -> None:
    app.handler(OrderPaid, durable="a", concurrency="many")  # type: ignore[arg-type]
    app.handler(OrderPaid, durable="a", concurency=3)  # type: ignore[call-arg]
    app.handler(OrderPaid, durable="a", idempotent="twice")  # type: ignore[arg-type]
    app.batch_handler(OrderPaid, durable="a", partitions=3)  # type: ignore[call-arg]


async def wrong_ways_in(app: App, orders: AppClient) -> None:
    async with app.connect("nats://127.0.0.1:4222", auth=jetspark.UserPassword("me", "secret"), name="shop") as client:
        assert_type(client, AppClient)
    async with app.connect("nats://127.0.0.1:4222", decide_here=CommandOptions(queue=10), name="shop") as client:
        assert_type(client, AppClient)
    app.connect(decide_here=True)
    app.connect(decide_here="here")  # type: ignore[arg-type]
    app.connect(nmae="shop")  # type: ignore[call-arg]
    await app.plan("nats://127.0.0.1:4222", request_timeout_s="5")  # type: ignore[arg-type]
    await app.apply("nats://127.0.0.1:4222", user="me")  # type: ignore[call-arg]
    await app.run(tls=True)  # type: ignore[arg-type]
    orders.bulk(max_pending_messages=100)
    orders.bulk(max_pending=100)  # type: ignore[call-arg]


class Account(msgspec.Struct):
    cents: int = 0


shop = App("bank", stream="BANK", subjects=["orders.>"])


@shop.projection("balances", events=[OrderPaid], bucket="balances")
class Balances:
    def key(self, event: OrderPaid) -> str:
        return event.order_id

    def apply(self, state: Account | None, event: OrderPaid) -> Account | object:
        return state or Account()


@shop.projection("counts", events=[OrderPaid], bucket="counts")
class Counts:
    def key(self, event: OrderPaid) -> str:
        return event.order_id

    def apply(self, state: int | None, event: OrderPaid, key: str) -> int:
        return (state or 0) + len(key)


@shop.handler(OrderPaid, durable="billing")
async def charge(event: OrderPaid, limit: int = 3) -> OrderShipped | None:
    return OrderShipped(order_id=event.order_id) if limit else None


@shop.lifespan
async def resources() -> AsyncIterator[int]:
    yield 5


async def views() -> None:
    async with shop.connect() as client:
        balances = client.view(Balances)
        assert_type(balances, View[Account | None])
        assert_type(await balances.get("a"), Account | None)
        assert_type(await balances.get("a", 0), Account | int)
        assert_type((await balances.entry("a")).state, Account | None)
        assert_type(await client.view(Counts).get("a", 0), int)
        assert_type(await client.view("balances").get("a"), Any)
        async with client.view(Counts).replica() as states:
            assert_type(states.get("a"), int | None)
            assert_type(states.get("a", 0), int)
        async for entry in balances.watch("a"):
            assert_type(entry.state, Account | None)
        client.view(int)  # type: ignore[arg-type]


async def signatures() -> None:
    assert_type(await charge(OrderPaid(order_id="o-1", amount_cents=5), limit=0), OrderShipped | None)
    await charge("o-1")  # type: ignore[arg-type]
    async for number in resources():
        assert_type(number, int)


async def effects(ctx: Context) -> None:
    async def effect(order_id: str) -> int:
        return 5

    assert_type(await ctx.once("charge", effect, "o-1"), int)
    assert_type(await ctx.once("charge", effect, "o-1", result_type=Account), Account)
