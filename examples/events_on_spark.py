"""Events of an application as typed rows on Spark: a batch, and a stream that continues from its checkpoint.

Spark's Python workers import the application by the name of this module, so code that must run once is below
``if __name__ == "__main__"``.
"""

import asyncio
import tempfile
from decimal import Decimal
from pathlib import Path

import msgspec
from pyspark.sql import functions as F

from jetspark.app import App, Event
from jetspark.server import NatsServer
from jetspark.spark import events, session, stream_events

app = App("shop", stream="SHOP", subjects=["shop.>"])


class Line(msgspec.Struct, frozen=True):
    sku: str
    quantity: int = 1


@app.register
class OrderPlaced(Event, type="order.placed", key="order_id", subject="shop.{order_id}.placed"):
    order_id: str
    lines: list[Line]
    price: Decimal
    note: str | None = None


@app.register
class OrderPaid(Event, type="order.paid", key="order_id", subject="shop.{order_id}.paid"):
    order_id: str
    cents: int


async def publish(url: str, first: int, last: int) -> None:
    async with app.connect(url) as client:
        for number in range(first, last):
            order = f"o-{number}"
            lines = [Line(sku="pen", quantity=number), Line(sku="ink")]
            await client.publish(OrderPlaced(order_id=order, lines=lines, price=Decimal("1.50")))
            await client.publish(OrderPaid(order_id=order, cents=150))


def main() -> None:
    with NatsServer() as server, tempfile.TemporaryDirectory() as folder:
        asyncio.run(app.apply(server.url))
        asyncio.run(publish(server.url, 0, 10))
        spark = session("shop")  # or your own session
        try:
            # A batch: the events that are stored now, with a column for each field.
            placed = events(spark, app, OrderPlaced, servers=server.url)
            placed.printSchema()
            sold = placed.select(F.explode("lines").alias("line")).groupBy("line.sku").agg(F.sum("line.quantity"))
            assert sorted(map(tuple, sold.collect())) == [("ink", 10), ("pen", 45)]

            # A stream of two types: a struct column for each, and `_event` for both.
            rows = Path(folder) / "rows"
            for count in (20, 30):  # the second run continues where the first has ended
                both = stream_events(spark, app, OrderPlaced, OrderPaid, servers=server.url, startingOffsets="earliest")
                query = (
                    both.select("type", "_event.key", "_event.time", "order_paid.cents")
                    .writeStream.format("parquet")
                    .option("path", str(rows))
                    .option("checkpointLocation", str(Path(folder) / "checkpoint"))
                    .trigger(availableNow=True)
                    .start()
                )
                query.awaitTermination()
                assert spark.read.parquet(str(rows)).count() == count
                asyncio.run(publish(server.url, 10, 15))
            spark.read.parquet(str(rows)).groupBy("type").agg(F.count("*"), F.sum("cents")).show()

            # The same rows in SQL.
            spark.sql(
                "CREATE TEMPORARY VIEW paid USING jetstream_events "
                f"OPTIONS (app 'events_on_spark:app', type 'order.paid', servers '{server.url}')"
            )
            spark.sql("SELECT _event.key AS order, cents FROM paid WHERE _event.sequence < 5 ORDER BY order").show()
        finally:
            spark.stop()


if __name__ == "__main__":
    main()
