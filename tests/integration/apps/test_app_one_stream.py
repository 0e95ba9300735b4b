"""All parts of an application in one stream of any name: handler, projection, command, workflow with its timers."""

from __future__ import annotations

import asyncio

import msgspec
from support.commands import served

from jetspark.app import App, Command, CommandAnswered, Decision, Event, Past, Refused


class OrderPlaced(Event, type="order.placed", key="order_id", subject="orders.{order_id}.placed"):
    order_id: str


class OrderPaid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    amount_cents: int


class OrderBilled(Event, type="order.billed", key="order_id", subject="orders.{order_id}.billed"):
    order_id: str


class OrderClosed(Event, type="order.closed", key="order_id", subject="orders.{order_id}.closed"):
    order_id: str


class PaymentOverdue(Event, type="order.overdue", key="order_id", subject="orders.{order_id}.overdue"):
    order_id: str


class CloseOrder(Command):
    order_id: str

    def reads(self) -> list[str]:
        return [f"orders.{self.order_id}.>"]

    def decide(self, past: Past) -> list[Event]:
        return [OrderClosed(order_id=self.order_id)]


class OrderStatus:
    def key(self, event: OrderPlaced | OrderPaid | OrderClosed) -> str:
        return event.order_id

    def apply(self, state: str | None, event: OrderPlaced | OrderPaid | OrderClosed) -> str:
        return type(event).__name__


class PlaceOrder(Command):
    order_id: str

    def reads(self) -> list[str]:
        return [f"orders.{self.order_id}.>"]

    def decide(self, past: Past) -> list[Event]:
        if past.of(OrderPlaced):
            raise Refused("the order exists")
        return [OrderPlaced(order_id=self.order_id)]


class Flow(msgspec.Struct, frozen=True):
    step: str


class Fulfilment:
    def react(
        self, state: Flow | None, event: OrderPlaced | OrderBilled | PaymentOverdue | CommandAnswered
    ) -> Decision | None:
        match event:
            case OrderPlaced():
                timer = (PaymentOverdue(order_id=event.order_id), 3600)
                return Decision(state=Flow("placed"), timers={"payment": timer})
            case OrderBilled():
                close = CloseOrder(order_id=event.order_id)
                return Decision(state=Flow("billed"), commands={"close": close}, cancels=["payment"])
            case CommandAnswered():
                return Decision(state=Flow("closed"), is_done=True)
        return Decision(failed="not paid")


def orders_app() -> App:
    app = App("orders", stream="ORDERS", subjects=["orders.>"], events=[OrderBilled, OrderClosed], timers=True)

    @app.handler(OrderPaid, durable="billing")
    async def bill(event: OrderPaid) -> OrderBilled:
        return OrderBilled(order_id=event.order_id)

    app.projection("order_status", events=[OrderPlaced, OrderPaid, OrderClosed], bucket="order_state")(OrderStatus)
    app.command("orders.place")(PlaceOrder)
    app.command("orders.close")(CloseOrder)
    app.workflow("fulfilment", key="order_id", version=1)(Fulfilment)
    return app


async def test_an_application_has_all_its_parts_in_one_stream_of_any_name(nats_url: str) -> None:
    async with served(orders_app(), nats_url) as orders, asyncio.timeout(120):
        reply = await orders.call(PlaceOrder(order_id="o-1"), command_id="cmd-1")
        ack = await orders.publish(OrderPaid(order_id="o-1", amount_cents=500))
        assert reply.sequence < ack.sequence
        assert await orders.view("order_status").get("o-1", at_least=ack.sequence) in ("OrderPaid", "OrderClosed")
        runs = orders.workflow("fulfilment")
        run = await runs.wait_for_end("o-1", timeout=60)
        assert (run.status, run.state, run.timers) == ("done", Flow("closed"), ())
        assert [each.key async for each in runs.list("done")] == ["o-1"]
        stream = await orders.js.stream("ORDERS")
        last = await stream.get_message(last_for="orders.o-1.closed")
        assert await orders.view("order_status").get("o-1", at_least=last.sequence) == "OrderClosed"
        assert sorted((await stream.info()).config.subjects or ()) == [
            "orders.>",
            "states.orders.>",
            "timers.orders.>",
            "workflows.orders.>",
        ]
