"""The Spark job: read the stream, tell good events from bad ones, fold the good ones, put the bad ones aside."""

from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import jetspark.spark


@dataclass(frozen=True)
class Place:
    """Where the pipeline runs: the servers, and names that no other run and no other program uses."""

    servers: str
    run: str

    @property
    def stream(self) -> str:
        return f"DEMO_ORDERS_{self.run}"

    @property
    def subjects(self) -> str:
        return f"demo.{self.run}.orders"

    @property
    def dead_letters(self) -> str:
        return f"DEMO_DEAD_{self.run}"

    @property
    def dead_subjects(self) -> str:
        return f"demo.{self.run}.dead"

    @property
    def order_state(self) -> str:
        return f"demo_order_state_{self.run}"

    @property
    def daily_revenue(self) -> str:
        return f"demo_daily_revenue_{self.run}"


EVENT = "event_id string, type string, order_id string, amount_cents bigint, at string"
TYPES = ["order.created", "order.paid", "order.shipped", "order.cancelled"]


def stream(spark: SparkSession, place: Place, checkpoint: str, per_batch: int) -> StreamingQuery:
    """Start the query; it ends when it has read everything there is."""
    orders = (
        spark.readStream.format("jetstream")
        .option("servers", place.servers)
        .option("stream", place.stream)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", per_batch)
        .load()
    )
    return (
        orders.writeStream.queryName("orders")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .foreachBatch(lambda batch, _: process(batch, place))
        .start()
    )


def replay(spark: SparkSession, place: Place, first: int, end: int) -> None:
    """Process a part of history again: the same code, on a batch."""
    reader = spark.read.format("jetstream").option("servers", place.servers).option("stream", place.stream)
    process(reader.option("startingOffsets", first).option("endingOffsets", end).load(), place)


def process(batch: DataFrame, place: Place) -> None:
    checked = with_reason(batch).persist()
    good, bad = checked.where("reason IS NULL"), checked.where("reason IS NOT NULL")
    by_order = good.withColumn("key", F.col("event.order_id"))
    fold(by_order, place, place.order_state, "orders.projections:OrderState")
    paid = good.where("event.type = 'order.paid'").withColumn("key", F.substring("event.at", 1, 10))
    fold(paid, place, place.daily_revenue, "orders.projections:DailyRevenue")
    put_aside(bad, place)
    checked.unpersist()


def with_reason(batch: DataFrame) -> DataFrame:
    """The event, and what is wrong with it, if anything is."""
    event = F.from_json(F.col("data").cast("string"), EVENT)
    parsed = batch.withColumn("event", event)
    reason = (
        F.when(F.col("event.event_id").isNull() & F.col("event.type").isNull(), "not JSON")
        .when(F.col("event.type").isNull() | ~F.col("event.type").isin(TYPES), "unknown type")
        .when(F.col("event.order_id").isNull(), "no order_id")
        .when(F.col("event.amount_cents").isNull() | (F.col("event.amount_cents") < 0), "negative amount")
        .when(F.col("event.at").isNull(), "no time")
    )
    return parsed.withColumn("reason", reason)


def fold(events: DataFrame, place: Place, bucket: str, projection: str) -> None:
    """The events of a key come into one task, which stores the new state."""
    rows = events.select("key", "sequence", F.to_json("event").alias("event"))
    partitions = events.sparkSession.sparkContext.defaultParallelism
    jetspark.spark.fold(rows, partitions=partitions, servers=place.servers, bucket=bucket, fold=projection)


def put_aside(bad: DataFrame, place: Place) -> None:
    """Into the dead-letter stream, with the reason and the origin; an id each, so that a replay adds nothing."""
    sequence = F.col("sequence").cast("string")
    origin = {"Reason": F.col("reason"), "Origin-Subject": F.col("subject"), "Origin-Sequence": sequence}
    rows = bad.select(
        F.concat(F.lit(f"{place.dead_subjects}."), "subject").alias("subject"),
        "data",
        F.create_map(*(part for name, value in origin.items() for part in (F.lit(name), value))).alias("headers"),
        F.concat(F.lit("dead-"), "stream", F.lit("-"), sequence).alias("msg_id"),
    )
    rows.write.format("jetstream").option("servers", place.servers).mode("append").save()
