"""Folding events into a bucket on Spark: whatever the partitions, every event once in the state, or an error."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pyarrow as pa
import pytest
from support.folds import Chain
from support.names import new_name

from jetspark import KVConfig
from jetspark.blocking import JetStream, KeyValue, Stream, StreamConfig
from jetspark.blocking.steps import ProcedureRunner
from jetspark.errors import Conflict, UsageError
from jetspark.server import NatsServer
from jetspark.spark.engine.folding import FoldFormat, fold
from jetspark.state.changes import Change
from jetspark.state.store import store

pyspark = pytest.importorskip("pyspark")

from pyspark.sql import functions as F  # noqa: E402
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.timeout(600)]

SCHEMA = StructType().add("key", StringType()).add("sequence", LongType()).add("event", StringType())
KEYS = 10


def new_bucket(js: JetStream) -> KeyValue:
    return js.create_kv(KVConfig(bucket=new_name("folded"), allow_batched=True))


def rows_of(count: int, first: int = 1) -> list[tuple[str, int, str]]:
    return [(f"k{number % KEYS}", number, json.dumps({"number": number})) for number in range(first, first + count)]


def folded(rows: list[tuple[str, int, str]]) -> dict[str, Any]:
    """What folding them one after the other makes of each key."""
    state: dict[str, Any] = {}
    for key, _, event in rows:
        times, link = state.get(key, (0, 0))
        state[key] = [times + 1, crc32(b"%d" % json.loads(event)["number"], link)]
    return state


def state_of(bucket: KeyValue) -> dict[str, Any]:
    return {key: json.loads(entry.value) for key, entry in bucket.snapshot([">"]).items()}


def frame_of(spark: SparkSession, count: int, partitions: int) -> DataFrame:
    """The rows of ``rows_of``, with neighbours in one partition, as a source reads them."""
    numbers = spark.range(1, count + 1, numPartitions=partitions)
    return numbers.select(
        F.concat(F.lit("k"), F.col("id") % KEYS).alias("key"),
        F.col("id").alias("sequence"),
        F.to_json(F.struct(F.col("id").alias("number"))).alias("event"),
    )


def options_of(server: NatsServer, bucket: KeyValue, **more: str) -> dict[str, str]:
    return {"servers": server.url, "bucket": bucket.bucket, "fold": "support.folds:Chain", **more}


def write(frame: DataFrame, options: dict[str, str]) -> None:
    frame.write.format("jetstream_fold").options(**options).mode("append").save()


def arrow(rows: list[tuple[str, int, str]], size: int = 1000) -> list[pa.RecordBatch]:
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [
        pa.RecordBatch.from_arrays(
            [pa.array(column, kind) for column, kind in zip(zip(*part, strict=True), TYPES, strict=True)],
            names=["key", "sequence", "event"],
        )
        for part in parts
    ]


TYPES = (pa.string(), pa.int64(), pa.string())


# ---- keys in two tasks ---------------------------------------------------------------------------------------------


def test_keys_in_two_tasks_are_an_error_and_the_same_rows_brought_together_are_all_counted(
    spark: SparkSession, server: NatsServer, js: JetStream
) -> None:
    bucket = new_bucket(js)
    options = options_of(server, bucket)
    frame = frame_of(spark, 20_000, partitions=4)
    with pytest.raises(Exception, match=r"keys 'k\d'.* are in two tasks.*nothing is stored.*repartition\(n"):
        write(frame, options)
    assert state_of(bucket) == {}
    write(frame.repartition(4, "key"), options)
    assert state_of(bucket) == folded(rows_of(20_000))


def test_a_micro_batch_that_failed_for_its_partitions_is_folded_whole_when_they_are_right(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path
) -> None:
    bucket, stream = new_bucket(js), source(js, rows_of(4_000))
    options = options_of(server, bucket)
    with pytest.raises(Exception, match="are in two tasks"):
        run(spark, server, stream, tmp_path, lambda events: write(events.repartition(4), options))
    assert state_of(bucket) == {}
    run(spark, server, stream, tmp_path, lambda events: write(events.repartition(4, "key"), options))
    assert state_of(bucket) == folded(rows_of(4_000))


def source(js: JetStream, rows: list[tuple[str, int, str]]) -> Stream:
    name = new_name("F")
    stream = js.create_stream(StreamConfig(name=name, subjects=[f"{name}.>"], allow_batched=True, allow_direct=True))
    with js.fast_batch() as batch:
        batch.add_many((f"{name}.{key}", event.encode()) for key, _, event in rows)
    return stream


def run(
    spark: SparkSession, server: NatsServer, stream: Stream, folder: Path, act: Callable[[DataFrame], object]
) -> None:
    """A streaming query over all there is, with the checkpoint of the last one."""
    read = spark.readStream.format("jetstream").option("servers", server.url).option("stream", stream.name)
    events = read.option("startingOffsets", "earliest").load()
    events = events.select(
        F.substring_index("subject", ".", -1).alias("key"), "sequence", F.col("data").cast("string").alias("event")
    )
    query = (
        events.writeStream.foreachBatch(lambda batch, _: act(batch))  # type: ignore[arg-type]  # Spark ignores results
        .option("checkpointLocation", str(folder / stream.name))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


# ---- what happens again --------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


def test_a_batch_that_spark_repeats_after_it_was_stored_changes_nothing(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path
) -> None:
    bucket, other, stream = new_bucket(js), new_bucket(js), source(js, rows_of(2_000))

    def act(events: DataFrame) -> None:
        write(events.repartition(2, "key"), options_of(server, bucket))
        fold(events, partitions=2, **options_of(server, other))

    def stopped(events: DataFrame) -> None:
        act(events)
        raise Killed("between the write and the commit")

    with pytest.raises(Exception, match="between the write and the commit"):
        run(spark, server, stream, tmp_path, stopped)
    revisions = [js.stream(f"KV_{each.bucket}").info().state.last_sequence for each in (bucket, other)]
    run(spark, server, stream, tmp_path, act)
    assert state_of(bucket) == state_of(other) == folded(rows_of(2_000))
    assert revisions == [js.stream(f"KV_{each.bucket}").info().state.last_sequence for each in (bucket, other)]


def test_attempts_at_the_same_task_are_stored_once(server: NatsServer, js: JetStream) -> None:
    bucket, rows = new_bucket(js), rows_of(5_000)
    writer = FoldFormat(options_of(server, bucket)).writer(SCHEMA, False)
    first, second = writer.write(iter(arrow(rows))), writer.write(iter(arrow(rows)))
    assert state_of(bucket) == {}
    writer.commit([second])
    writer.commit([first])  # a driver that was taken for dead
    assert state_of(bucket) == folded(rows)
    assert js.stream(f"KV_{bucket.bucket}").info().state.last_sequence == KEYS


def test_attempts_that_store_themselves_at_the_same_time_apply_every_event_once(
    server: NatsServer, js: JetStream
) -> None:
    bucket, rows = new_bucket(js), rows_of(5_000)
    schema = StructType([*SCHEMA.fields, StructField("partition", IntegerType())])
    batches = [batch.append_column("partition", pa.array([0] * len(batch), pa.int32())) for batch in arrow(rows)]

    def attempt(half: int) -> None:
        writer = FoldFormat(options_of(server, bucket, storedBy="tasks")).writer(schema, False)
        writer.write(iter(batches[: len(batches) // half]))

    # One is a task of a batch before that goes on: it has the first half of the events.
    threads = [threading.Thread(target=attempt, args=(half,)) for half in (1, 2, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert state_of(bucket) == folded(rows)


def test_a_driver_that_dies_while_it_stores_leaves_what_the_next_one_completes(
    server: NatsServer, js: JetStream
) -> None:
    bucket, rows = new_bucket(js), rows_of(3_000)
    writer = FoldFormat(options_of(server, bucket)).writer(SCHEMA, False)
    message: Any = writer.write(iter(arrow(rows)))
    ProcedureRunner(js).run(store(bucket.bucket, message.changes[:4]))
    again = FoldFormat(options_of(server, bucket)).writer(SCHEMA, False)
    again.commit([again.write(iter(arrow(rows)))])
    assert state_of(bucket) == folded(rows)


def test_a_key_that_others_have_written_meanwhile_is_a_conflict_and_nothing_is_lost(
    server: NatsServer, js: JetStream
) -> None:
    bucket, rows = new_bucket(js), rows_of(3_000)

    def fold_all() -> None:
        writer = FoldFormat(options_of(server, bucket)).writer(SCHEMA, False)
        message = writer.write(iter(arrow(rows)))
        if not state_of(bucket):
            # Another engine, which has come to the tenth event of its key.
            state = Chain().apply(None, {"number": 10}, 10)
            ahead = Change("k0", json.dumps(state).encode(), sequence=10, revision=0)
            ProcedureRunner(js).run(store(bucket.bucket, [ahead]))
        writer.commit([message])

    with pytest.raises(Conflict, match="'k0'"):
        fold_all()
    fold_all()
    assert state_of(bucket) == folded(rows)


# ---- two writes of one batch ---------------------------------------------------------------------------------------


def test_two_writes_of_a_batch_with_other_events_of_a_key_are_an_error(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path
) -> None:
    bucket, stream = new_bucket(js), source(js, rows_of(1_000))
    even, odd = (F.col("sequence") % 20 < 10), (F.col("sequence") % 20 >= 10)

    def act(events: DataFrame) -> None:
        for some in (odd, even):
            write(events.where(some).repartition(2, "key"), options_of(server, bucket))

    with pytest.raises(Exception, match=r"another write of the same micro-batch has stored other events of keys 'k\d'"):
        run(spark, server, stream, tmp_path, act)


def test_two_writes_of_a_batch_with_keys_or_buckets_of_their_own_are_both_folded(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path
) -> None:
    one, two, stream = new_bucket(js), new_bucket(js), source(js, rows_of(1_000))
    low, high = F.col("key") < "k5", F.col("key") >= "k5"

    def act(events: DataFrame) -> None:
        for some in (low, high):
            write(events.where(some).repartition(2, "key"), options_of(server, one))
        fold(events, partitions=3, **options_of(server, two))

    run(spark, server, stream, tmp_path, act)
    run(spark, server, stream, tmp_path, act)
    assert state_of(one) == state_of(two) == folded(rows_of(1_000))


# ---- tasks that store themselves -----------------------------------------------------------------------------------


def test_fold_makes_its_own_partitions_and_refuses_those_of_others(
    spark: SparkSession, server: NatsServer, js: JetStream
) -> None:
    frame = frame_of(spark, 20_000, partitions=4)
    for partitions in (1, None, 3):
        bucket = new_bucket(js)
        fold(frame, partitions=partitions, **options_of(server, bucket))
        assert state_of(bucket) == folded(rows_of(20_000))
    elsewhere = frame.withColumn("partition", F.lit(7))
    with pytest.raises(Exception, match=r"storedBy=tasks, and key 'k\d' is in partition \d instead of 7"):
        write(elsewhere, options_of(server, bucket, storedBy="tasks"))
    assert state_of(bucket) == folded(rows_of(20_000))


# ---- more than fits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"maxHeldRows": "700"}, {"maxHeldBytes": "20k"}], ids=["rows", "bytes"])
def test_more_rows_than_a_task_holds_are_folded_in_order(
    server: NatsServer, js: JetStream, limit: dict[str, str]
) -> None:
    bucket, rows = new_bucket(js), rows_of(30_000)
    mixed = random.Random(1).sample(rows, len(rows))
    writer = FoldFormat(options_of(server, bucket, **limit)).writer(SCHEMA, False)
    writer.commit([writer.write(iter(arrow(mixed, 300)))])
    assert state_of(bucket) == folded(rows)


def test_more_keys_or_values_than_a_task_may_have_are_an_error(server: NatsServer, js: JetStream) -> None:
    bucket = new_bucket(js)
    for limit in ({"maxKeys": "9"}, {"maxReturnedBytes": "50"}):
        writer = FoldFormat(options_of(server, bucket, **limit)).writer(SCHEMA, False)
        [name] = limit
        with pytest.raises(ValueError, match=f"{name}={limit[name]}: "):
            writer.write(iter(arrow(rows_of(100))))
    assert state_of(bucket) == {}


def test_a_driver_refuses_a_key_of_two_tasks_even_if_one_has_nothing_new(server: NatsServer, js: JetStream) -> None:
    bucket = new_bucket(js)
    writer = FoldFormat(options_of(server, bucket)).writer(SCHEMA, False)
    writer.commit([writer.write(iter(arrow(rows_of(10, first=11))))])
    old: Any = writer.write(iter(arrow(rows_of(10))))
    new = writer.write(iter(arrow(rows_of(10, first=21))))
    old.partition = 1
    with pytest.raises(UsageError, match="are in two tasks"):
        writer.commit([old, new])
