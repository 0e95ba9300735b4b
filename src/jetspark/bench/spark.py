"""Spark on one machine: reading a stream, writing one, and folding one into a bucket.

Each measurement has a Spark of its own, ``local[2]``, which has run the same query once on a tenth of the data before
the clock starts: starting a JVM and its Python workers takes seconds and is paid once. The bare contenders move the
same messages with one thread in pure Python and no Spark at all; what is between them and us is what Spark costs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

from jetspark.bench import fast_ingest, js_pull
from jetspark.bench.streams import stream_for
from jetspark.bench.workload import Bar, Contender, Job, Values, Workload, payload_of
from jetspark.blocking import connect
from jetspark.errors import ConnectionLost
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.kv import KVConfig

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["SPARK_FOLD", "SPARK_READ", "SPARK_WRITE"]

KEYS = 10_000


@contextlib.contextmanager
def _session(cores: int) -> Iterator[SparkSession]:
    from jetspark.spark import session

    spark = session("jetspark-bench", cores=cores)
    try:
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def _filled(job: Job, count: int, data: Any = None) -> Iterator[str]:
    """A stream with so many messages; ``data`` makes the payload of each from its number."""
    name = job.subject.replace(".", "-")
    payload = payload_of(job.payload_bytes)
    with connect(job.url) as client:
        js = client.jetstream(timeout=30.0)
        config = StreamConfig(
            name=name, subjects=[job.subject], storage="memory", allow_batched=True, allow_direct=True
        )
        js.create_stream(config)
        with js.fast_batch() as fast:
            fast.add_many((job.subject, payload if data is None else data(number)) for number in range(count))
        try:
            yield name
        finally:
            js.delete_stream(name)


def _read(spark: SparkSession, job: Job, stream: str, end: int) -> DataFrame:
    reader = spark.read.format("jetstream").option("servers", job.url).option("stream", stream)
    return reader.option("startingOffsets", "earliest").option("endingOffsets", end).load()


def _reading(cores: int, job: Job) -> Values:
    with _filled(job, job.count) as stream, _session(cores) as spark:
        for count in (min(job.warmup, job.count), job.count):
            started = perf_counter()
            _read(spark, job, stream, count + 1).write.format("noop").mode("overwrite").save()
            elapsed = perf_counter() - started
    return {"messages_per_s": job.count / elapsed}


def read_on_two_cores(job: Job) -> Values:
    return _reading(2, job)


def read_on_one_core(job: Job) -> Values:
    return _reading(1, job)


def write(job: Job) -> Values:
    payload = payload_of(job.payload_bytes).decode()
    with stream_for(job, allow_batched=True), _session(2) as spark:
        for count in (job.warmup, job.count):
            rows = spark.range(count).selectExpr(f"'{job.subject}' AS subject", f"CAST('{payload}' AS binary) AS data")
            started = perf_counter()
            rows.write.format("jetstream").option("servers", job.url).mode("append").save()
            elapsed = perf_counter() - started
    return {"messages_per_s": job.count / elapsed}


class Totals:
    """The fold of the benchmark: how often, and how much."""

    def apply(self, state: Any, event: Any, sequence: int) -> Any:
        count, total = state or (0, 0)
        return [count + 1, total + event["amount"]]


def fold(job: Job) -> Values:
    def event(number: int) -> bytes:
        return json.dumps({"key": f"k{number % KEYS}", "amount": number}).encode()

    with _filled(job, job.count, event) as stream, connect(job.url) as client, _session(2) as spark:
        js = client.jetstream(timeout=30.0)
        for turn, count in enumerate((min(job.warmup, job.count), job.count)):
            bucket = f"{stream}-{turn}"
            js.create_kv(KVConfig(bucket=bucket, storage="memory"))
            try:
                started = perf_counter()
                _fold(spark, job, stream, bucket, count)
                elapsed = perf_counter() - started
                found = js.stream(f"KV_{bucket}").info().state.messages
                if found != min(KEYS, count):
                    raise ConnectionLost(f"{found} keys of {min(KEYS, count)}")
            finally:
                js.delete_kv(bucket)
    return {"messages_per_s": job.count / elapsed}


def _fold(spark: SparkSession, job: Job, stream: str, bucket: str, count: int) -> None:
    rows = _read(spark, job, stream, count + 1).selectExpr(
        "get_json_object(CAST(data AS string), '$.key') AS key", "sequence", "CAST(data AS string) AS event"
    )
    writer = rows.repartition(2, "key").write.format("jetstream_fold").option("servers", job.url)
    writer.option("bucket", bucket).option("fold", "jetspark.bench.spark:Totals").mode("append").save()


SPARK_READ = Workload(
    name="spark-read",
    what="a batch read of a whole stream, all columns but headers, into nothing; warm, local[2]",
    count=1_000_000,
    quick_count=5_000,
    contenders=(
        Contender(name="bare", what="a bare socket reader, no Spark", run=js_pull.bare),
        Contender(
            name="jetspark", what='spark.read.format("jetstream"), local[2]', run=read_on_two_cores, needs="pyspark"
        ),
        Contender(name="jetspark-1", what="the same, local[1]", run=read_on_one_core, needs="pyspark"),
    ),
    storage="memory",
    replicas=1,
    baselines=("bare",),
    bars=(
        Bar(
            claim="a Spark batch read is at least 0.6 x a bare reader",
            metric="messages_per_s",
            contender="jetspark",
            baseline="bare",
            at_least=0.6,
        ),
    ),
)

SPARK_WRITE = Workload(
    name="spark-write",
    what="a batch write of as many rows to a stream, with message ids, over fast ingest; warm, local[2]",
    count=500_000,
    quick_count=5_000,
    contenders=(
        Contender(name="bare", what="a bare fast-ingest writer, no ids, no Spark", run=fast_ingest.bare),
        Contender(name="jetspark", what='df.write.format("jetstream")', run=write, needs="pyspark"),
    ),
    storage="file",
    replicas=1,
    baselines=("bare",),
    bars=(
        Bar(
            claim="the Spark sink is at least 0.5 x a bare writer",
            metric="messages_per_s",
            contender="jetspark",
            baseline="bare",
            at_least=0.5,
        ),
    ),
)

SPARK_FOLD = Workload(
    name="spark-fold",
    what="events of a stream folded into 10,000 keys of a bucket; warm, local[2]",
    count=1_000_000,
    quick_count=5_000,
    contenders=(
        Contender(name="bare", what="a bare socket reader, no fold, no Spark", run=js_pull.bare),
        Contender(
            name="jetspark", what='df.repartition(2, "key").write.format("jetstream_fold")', run=fold, needs="pyspark"
        ),
    ),
    storage="memory",
    replicas=1,
    baselines=("bare",),
)
