"""One projection, on Spark: payments in, the sum of each order in a bucket out; a second pass changes nothing.

The same application runs live, with ``jetspark run payments_on_spark:app``, and stores the same bytes. Spark's Python
workers import it by the name of this module, so code that must run once is below ``if __name__ == "__main__"``.
"""

import asyncio
import json
from typing import TypedDict

import jetspark.blocking as jetspark
from jetspark.app import App, Event
from jetspark.server import NatsServer
from jetspark.spark import backfill, run, session

app = App("payments", stream="PAYMENTS", subjects=["payments.>"])


class OrderPaid(Event, type="order.paid", version=1, key="order_id", subject="payments.{order_id}"):
    order_id: str
    cents: int


class Paid(TypedDict):
    payments: int
    cents: int


@app.projection("paid", events=[OrderPaid], bucket="paid")
class PaidByOrder:
    """Pure: no clock, no network, no random numbers. The same events give the same state on every engine."""

    def key(self, event: OrderPaid) -> str:
        return event.order_id

    def apply(self, state: Paid | None, event: OrderPaid) -> Paid:
        if state is None:
            return {"payments": 1, "cents": event.cents}
        return {"payments": state["payments"] + 1, "cents": state["cents"] + event.cents}


async def publish(url: str) -> None:
    await app.apply(url)
    async with app.connect(url) as client:
        for number in range(200):
            await client.publish(OrderPaid(order_id=f"o-{number % 4}", cents=100))


def main() -> None:
    with NatsServer() as server, jetspark.connect(server.url) as nc:
        asyncio.run(publish(server.url))
        spark = session("payments", is_short=True)
        try:
            query = run(app, spark, server.url, until_now=True)  # without until_now it runs until it is stopped
            query.awaitTermination()
            report = backfill(app, spark, server.url)  # all events are folded already
        finally:
            spark.stop()
        print(report)
        assert (report.known, report.written) == (200, 0)
        paid = nc.jetstream().kv("paid")
        for order in range(4):
            value = paid.get(f"o-{order}").value
            print(f"o-{order}", value.decode())
            assert json.loads(value) == {"payments": 50, "cents": 5_000}


if __name__ == "__main__":
    main()
