"""The Spark job: read the stream, tell good events from bad ones, fold the good ones, put the bad ones aside."""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import jetspark.spark

STREAM, DEAD_LETTERS = "ORDERS", "ORDERS_DEAD"
ORDER_STATE, DAILY_REVENUE = "order_state", "daily_revenue"

EVENT = "event_id string, type string, order_id string, amount_cents bigint, at string"
TYPES = ["order.created", "order.paid", "order.shipped", "order.cancelled"]


def stream(spark: SparkSession, servers: str, checkpoint: str, per_batch: int):
    """Start the query; it ends when it has read everything there is."""
    orders = (
        spark.readStream.format("jetstream")
        .option("servers", servers)
        .option("stream", STREAM)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", per_batch)
        .load()
    )
    return (
        orders.writeStream.queryName("orders")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .foreachBatch(lambda batch, _: process(batch, servers))
        .start()
    )


def replay(spark: SparkSession, servers: str, first: int, end: int) -> None:
    """Process a part of history again: the same code, on a batch."""
    reader = spark.read.format("jetstream").option("servers", servers).option("stream", STREAM)
    process(reader.option("startingOffsets", first).option("endingOffsets", end).load(), servers)


def process(batch: DataFrame, servers: str) -> None:
    checked = with_reason(batch).persist()
    good, bad = checked.where("reason IS NULL"), checked.where("reason IS NOT NULL")
    fold(good.withColumn("key", F.col("event.order_id")), servers, ORDER_STATE, "orders.projections:OrderState")
    paid = good.where("event.type = 'order.paid'").withColumn("key", F.substring("event.at", 1, 10))
    fold(paid, servers, DAILY_REVENUE, "orders.projections:DailyRevenue")
    put_aside(bad, servers)
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


def fold(events: DataFrame, servers: str, bucket: str, projection: str) -> None:
    """The events of a key come into one task, which stores the new state."""
    rows = events.select("key", "sequence", F.to_json("event").alias("event"))
    partitions = events.sparkSession.sparkContext.defaultParallelism
    jetspark.spark.fold(rows, partitions=partitions, servers=servers, bucket=bucket, fold=projection)


def put_aside(bad: DataFrame, servers: str) -> None:
    """Into the dead-letter stream, with the reason and the origin; an id each, so that a replay adds nothing."""
    sequence = F.col("sequence").cast("string")
    origin = {"Reason": F.col("reason"), "Origin-Subject": F.col("subject"), "Origin-Sequence": sequence}
    rows = bad.select(
        F.concat(F.lit("dead."), "subject").alias("subject"),
        "data",
        F.create_map(*(part for name, value in origin.items() for part in (F.lit(name), value))).alias("headers"),
        F.concat(F.lit("dead-"), "stream", F.lit("-"), sequence).alias("msg_id"),
    )
    rows.write.format("jetstream").option("servers", servers).mode("append").save()
