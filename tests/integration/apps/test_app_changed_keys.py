"""A handler whose key changes while keys are parked: new events would overtake waiting ones, so ``plan`` says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.apps import is_settled, publish, running, set_up, until

from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Context, Decision, Event, Reject
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.errors import TopologyDrift, TopologyRefused
from jetspark.server import NatsServer


class Paid(Event, type="order.paid", key="order_id", subject="orders.paid.{order_id}"):
    order_id: str
    customer: str = "c"


class Shipped(Event, type="order.shipped", key="order_id", subject="orders.shipped.{order_id}"):
    order_id: str


def by_customer(event: Any) -> str:
    return str(event.customer)


def new_app(*events: type, **options: Any) -> App:
    app = App("shop", stream="SHOP", subjects=["orders.>"], events=[Paid, Shipped])

    @app.handler(*(events or (Paid,)), durable="billing", **options)
    async def bill(event: Any, ctx: Context) -> None:
        raise Reject("no such card")

    return app


async def park(server: NatsServer, js: JetStream, app: App, *order_ids: str) -> None:
    await set_up(js, app)
    await publish(js, app, *(Paid(order_id=each) for each in order_ids))
    async with running(app, server.url):
        await until(lambda: is_settled(js, app, "billing"))


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"key": "customer"}, "order.paid: order_id -> customer"),
        ({"key": by_customer}, "order.paid: order_id -> by_customer()"),
        ({"in_order": False}, "order.paid: order_id -> -"),
    ],
    ids=["another field", "a function", "no order"],
)
async def test_another_key_is_refused_while_keys_are_parked(
    server: NatsServer, js: JetStream, options: dict[str, Any], change: str
) -> None:
    before, after = new_app(), new_app(**options)
    await park(server, js, before, "o.1", "o-2", "o-3", "o-4")
    assert (await before.plan(server.url)).is_empty
    plan = await after.plan(server.url)
    [step] = plan.steps
    assert (step.kind, step.name, step.safety) == ("consumer", "billing of SHOP", "destructive")
    assert f"another key ({change}) while " in str(plan)
    assert ", ... are parked: later events of theirs would overtake those that wait" in str(plan)
    assert str(plan).count("'o") == 3
    with pytest.raises(TopologyRefused, match="Redrive or discard their dead letters first"):
        await after.apply(server.url)
    with pytest.raises(TopologyDrift, match="another key"):
        await after.run(server.url)
    assert await after.apply(server.url, allow=True) == plan
    assert (await after.plan(server.url)).is_empty


@pytest.mark.parametrize("options", [{"key": "customer"}, {"in_order": False}], ids=["another field", "no order"])
async def test_another_key_is_a_safe_change_while_no_key_is_parked(
    server: NatsServer, js: JetStream, options: dict[str, Any]
) -> None:
    before, after = new_app(), new_app(**options)
    await park(server, js, before, "o-1")
    store = await HandlerStore.open(js, before.name, "billing")
    for key in [key async for key in store.records.keys("parked.>")]:
        await store.records.purge(key)
    plan = await after.plan(server.url)
    assert [(step.safety, step.action) for step in plan.steps] == [("safe", "update")]
    assert "jetspark-keys=order.paid=order_id" in str(plan)
    await after.apply(server.url)
    assert (await after.plan(server.url)).is_empty


async def test_the_same_keys_in_other_words_and_other_events_change_no_order(server: NatsServer, js: JetStream) -> None:
    await park(server, js, new_app(), "o-1")
    assert (await new_app(key="order_id").plan(server.url)).is_empty
    plan = await new_app(Paid, Shipped).plan(server.url)
    assert {step.safety for step in plan.steps} == {"safe"}


async def test_another_key_of_a_workflow_is_named_by_its_author_s_function(server: NatsServer, js: JetStream) -> None:
    def app_of(key: str | Callable[[Any], Any]) -> App:
        app = App("shop", stream="SHOP", subjects=["orders.>"])

        @app.workflow("ordering", key=key)
        class Ordering:
            def react(self, state: int | None, event: Paid) -> Decision | None: ...

        return app

    await app_of("order_id").apply(server.url)
    plan = await app_of(by_customer).plan(server.url)
    assert "order.paid=by_customer()" in str(plan)
