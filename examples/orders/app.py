"""The application: what can happen to an order, what every order is like, and what each day has earned.

Spark's workers import it by its name, ``orders.app:app``. Every run of the demo has streams and buckets of its own: it
puts a name into the environment variable ``ORDERS_RUN``, which workers inherit.
"""

import os
from typing import Annotated, TypedDict

import msgspec

from jetspark.app import App, Event, Timestamp

RUN = os.environ.get("ORDERS_RUN", "")
NAME = f"demo_orders_{RUN}" if RUN else "demo_orders"
# A retry comes soon or never: a payment that is published twice is so within this many of its day.
DUPLICATE_WINDOW = 100

Cents = Annotated[int, msgspec.Meta(ge=0)]

app = App(NAME, stream=NAME.upper(), subjects=[f"{NAME}.>"], source="/demo/orders")


class OrderCreated(Event, type="order.created", version=1, key="order_id", subject=NAME + ".{order_id}.created"):
    order_id: str
    amount_cents: Cents
    at: Timestamp


class OrderPaid(Event, type="order.paid", version=1, key="order_id", subject=NAME + ".{order_id}.paid"):
    order_id: str
    amount_cents: Cents
    at: Timestamp


class OrderShipped(Event, type="order.shipped", version=1, key="order_id", subject=NAME + ".{order_id}.shipped"):
    order_id: str
    amount_cents: Cents
    at: Timestamp


class OrderCancelled(Event, type="order.cancelled", version=1, key="order_id", subject=NAME + ".{order_id}.cancelled"):
    order_id: str
    amount_cents: Cents
    at: Timestamp


OrderEvent = OrderCreated | OrderPaid | OrderShipped | OrderCancelled
STATUS: dict[type, str] = {
    OrderCreated: "created",
    OrderPaid: "paid",
    OrderShipped: "shipped",
    OrderCancelled: "cancelled",
}


class Order(TypedDict):
    status: str
    amount_cents: int
    history: list[str]


@app.projection("order_state", events=list(STATUS), bucket=f"{NAME}_state")
class OrderState:
    """By order: its status, its amount, and what has happened to it."""

    def key(self, event: OrderEvent) -> str:
        return event.order_id

    def apply(self, state: Order | None, event: OrderEvent) -> Order:
        status = STATUS[type(event)]
        history = state["history"] if state is not None else []
        if state is not None and status in history:
            return state  # it happens once to an order
        return {"status": status, "amount_cents": event.amount_cents, "history": [*history, status]}


class Day(TypedDict):
    orders: int
    revenue_cents: int
    recent: list[str]


@app.projection("daily_revenue", events=[OrderPaid], bucket=f"{NAME}_revenue")
class DailyRevenue:
    """By day: how many orders were paid, and how much that was."""

    def key(self, event: OrderPaid) -> str:
        return event.at.date().isoformat()

    def apply(self, state: Day | None, event: OrderPaid) -> Day:
        day: Day = state or {"orders": 0, "revenue_cents": 0, "recent": []}
        if event.order_id in day["recent"]:
            return day
        return {
            "orders": day["orders"] + 1,
            "revenue_cents": day["revenue_cents"] + event.amount_cents,
            "recent": [*day["recent"], event.order_id][-DUPLICATE_WINDOW:],
        }
