"""Typed events through Spark and back: two streams of events joined, and what does not match is an event of its own.

Orders and payments are read as typed rows, joined within an hour by a streaming query with watermarks, and payments of
the wrong amount are published as ``PaymentMismatch``. A live handler consumes those. Each keeps the id and the
correlation of the payment that led to it, so a batch that Spark runs again publishes nothing twice.

Spark's Python workers import this module, so code that must run once is below ``if __name__ == "__main__"``.
"""

import asyncio
import datetime
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from jetspark.app import App, Context, Event, Timestamp
from jetspark.server import NatsServer
from jetspark.spark import session, stream_events, write_events

app = App("shop", stream="SHOP", subjects=["orders.>"])
looked_into: list[str] = []
all_are_done = asyncio.Event()


class OrderPlaced(Event, type="order.placed", key="order_id", subject="orders.{order_id}.placed"):
    order_id: str
    cents: int
    at: Timestamp


class OrderPaid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    cents: int
    at: Timestamp


class PaymentMismatch(Event, type="payment.mismatch", key="order_id", subject="orders.{order_id}.mismatch"):
    order_id: str
    expected_cents: int
    paid_cents: int


app.register(OrderPlaced)
app.register(OrderPaid)


@app.handler(PaymentMismatch, durable="mismatches")
async def look_into(event: PaymentMismatch, ctx: Context) -> None:
    looked_into.append(event.order_id)
    print(f"{event.order_id}: {event.paid_cents} paid, {event.expected_cents} expected, request {ctx.correlation_id}")
    if len(looked_into) == 4:
        all_are_done.set()


def mismatches(spark: SparkSession, url: str) -> DataFrame:
    """Payments within an hour of their order that have another amount."""
    placed = stream_events(spark, app, OrderPlaced, servers=url, startingOffsets="earliest")
    paid = stream_events(spark, app, OrderPaid, servers=url, startingOffsets="earliest")
    # The watermarks let Spark forget orders that no payment can match any more.
    pairs = (
        placed.withWatermark("at", "10 minutes")
        .alias("o")
        .join(
            paid.withWatermark("at", "10 minutes").alias("p"),
            on=F.expr("o.order_id = p.order_id AND p.at BETWEEN o.at AND o.at + INTERVAL 1 HOUR"),
        )
        .where("o.cents != p.cents")
    )
    return pairs.selectExpr("o.order_id", "o.cents AS expected_cents", "p.cents AS paid_cents", "p._event AS _event")


async def publish(url: str) -> None:
    await app.apply(url)
    start = datetime.datetime(2026, 3, 15, 10, 0, tzinfo=datetime.UTC)
    async with app.connect(url) as client:
        for number in range(100):
            at = start + datetime.timedelta(minutes=number)
            await client.publish(OrderPlaced(order_id=f"o-{number}", cents=500, at=at))
            paid_cents = 450 if number % 25 == 0 else 500
            after = at + datetime.timedelta(minutes=5)
            await client.publish(OrderPaid(order_id=f"o-{number}", cents=paid_cents, at=after))


async def handle_all(url: str) -> None:
    workers = asyncio.create_task(app.run(url))
    await all_are_done.wait()
    workers.cancel()
    await asyncio.wait([workers])


def main() -> None:
    with NatsServer() as server, tempfile.TemporaryDirectory() as folder:
        asyncio.run(publish(server.url))
        spark = session("mismatches", is_short=True)
        try:
            query = write_events(
                mismatches(spark, server.url),
                app,
                PaymentMismatch,
                servers=server.url,
                checkpoint=Path(folder).as_uri(),
                until_now=True,  # without it the query runs until it is stopped
            )
            query.awaitTermination()
        finally:
            spark.stop()
        asyncio.run(handle_all(server.url))
        assert sorted(looked_into) == ["o-0", "o-25", "o-50", "o-75"]


if __name__ == "__main__":
    main()
