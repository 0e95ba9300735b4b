"""An application with one projection, for benchmarks: payments of orders, and the total paid for each.

An event has some 280 bytes. Spark's workers import this module: it has nothing else in it.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import TypedDict

from jetspark.app import App, Event, encode

__all__ = ["KEYS", "app", "messages"]

KEYS = 10_000

app = App("bench_orders", stream="BENCH_ORDERS", subjects=["bench_orders.>"])


class Paid(Event, type="order.paid", version=1, key="order_id", subject="bench_orders.{order_id}.paid"):
    order_id: str
    customer: str
    amount_cents: int


class Total(TypedDict):
    payments: int
    cents: int


@app.projection("totals", events=[Paid], bucket="bench_totals")
class PaidTotals:
    def key(self, event: Paid) -> str:
        return event.order_id

    def apply(self, state: Total | None, event: Paid) -> Total:
        if state is None:
            return {"payments": 1, "cents": event.amount_cents}
        return {"payments": state["payments"] + 1, "cents": state["cents"] + event.amount_cents}


def messages(count: int, keys: int = KEYS) -> Iterator[tuple[str, bytes]]:
    """``count`` payments of ``keys`` orders: subject and data."""
    now = datetime.datetime.now(datetime.UTC)
    for number in range(count):
        event = Paid(order_id=f"o-{number % keys}", customer=f"c-{number % 97}", amount_cents=number)
        encoded = encode(event, id=f"payment-{number}", source="/bench/orders", time=now)
        yield encoded.subject, encoded.data
