"""Spark on one machine: reading a stream, and writing one.

Each measurement has a Spark of its own, ``local[2]``, and streams on disk, as users have. *Cold* is the first use of a
format in a fresh session: Python workers are started, and Java interprets. *Warm* is the same query again. Starting the
session itself is in neither. The bare contenders move the same messages with one thread in pure Python and no Spark at
all; the difference is the cost of Spark.

Memory is that of the largest Python process behind a measurement, at its highest: with Spark a worker of the executor,
without it the contender's own. The JVM's is not in it.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING

from benchmarks import fast_ingest, js_pull
from benchmarks.extras import SPARK
from benchmarks.processes import descendants, peak_mib
from benchmarks.streams import stream_for
from benchmarks.workload import MESSAGES_PER_S, Bar, Contender, Job, Metric, Rounds, Values, Workload, payload_of
from jetspark.blocking import connect
from jetspark.jetstream.config import StreamConfig

if TYPE_CHECKING:
    from jetspark.spark.types import DataFrame, SparkSession

__all__ = ["MEMORY", "SPARK_READ", "SPARK_READ_LARGE", "SPARK_WRITE", "WARM_READS", "filled", "session_of"]

# Half a gigabyte of the largest messages a server takes by default: more than a worker may hold.
LARGE_BYTES, LARGE_COUNT = 1 << 20, 512

# Reads after the cold one, of which the median counts. A JVM compiles what runs often, on the same processors: it spent
# 1.4 s on the first million, 1.2 on the second and 0.9 on every one after that.
WARM_READS = 3

MEMORY = Metric("python_mib", "MiB", better="lower")


@contextlib.contextmanager
def session_of(cores: int) -> Iterator[SparkSession]:
    from jetspark.spark import session

    spark = session("jetspark-bench", cores=cores)
    try:
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def filled(job: Job) -> Iterator[str]:
    """A stream with the messages of a job."""
    name = job.subject.replace(".", "-")
    payload = payload_of(job.payload_bytes)
    with connect(job.url) as client:
        js = client.jetstream(timeout=30.0)
        config = StreamConfig(name=name, subjects=[job.subject], storage="file", allow_batched=True, allow_direct=True)
        js.create_stream(config)
        with js.fast_batch() as fast:
            fast.add_many((job.subject, payload) for _ in range(job.count))
        try:
            yield name
        finally:
            js.delete_stream(name)


def _read(spark: SparkSession, job: Job, stream: str) -> DataFrame:
    reader = spark.read.format("jetstream").option("servers", job.url).option("stream", stream)
    return reader.option("startingOffsets", "earliest").option("endingOffsets", job.count + 1).load()


def _reading(job: Job, *, cores: int = 2, is_warm: bool = True) -> Values:
    with filled(job) as stream, session_of(cores) as spark:

        def read() -> float:
            started = perf_counter()
            _read(spark, job, stream).write.format("noop").mode("overwrite").save()
            return perf_counter() - started

        elapsed = read()
        if is_warm:
            elapsed = statistics.median(read() for _ in range(WARM_READS))
        return {"messages_per_s": job.count / elapsed, "python_mib": peak_mib(descendants(os.getpid()))}


def read_warm(job: Job) -> Values:
    return _reading(job)


def read_cold(job: Job) -> Values:
    return _reading(job, is_warm=False)


def read_on_one_core(job: Job) -> Values:
    return _reading(job, cores=1)


def bare_read(job: Job) -> Values:
    return js_pull.bare(job) | {"python_mib": peak_mib(iter([os.getpid()]))}


def _writing(job: Job, partitions: int = 2, **options: str) -> Values:
    payload = payload_of(job.payload_bytes).decode()
    columns = [f"'{job.subject}' AS subject", f"CAST('{payload}' AS binary) AS data"]
    with stream_for(job, allow_batched=True), session_of(2) as spark:
        for count in (rounds := Rounds(job)):
            rows = spark.range(0, count, 1, partitions).selectExpr(*columns)
            rounds.begin()
            rows.write.format("jetstream").options(servers=job.url, **options).mode("append").save()
    return rounds.values()


def write(job: Job) -> Values:
    return _writing(job)


def write_one_partition(job: Job) -> Values:
    return _writing(job, partitions=1)


def write_without_ids(job: Job) -> Values:
    return _writing(job, exactlyOnce="false")


_READERS = (
    Contender(name="bare", what="a bare socket reader, no Spark", run=bare_read),
    Contender(
        name="jetspark",
        what='spark.read.format("jetstream"), two tasks at a time, warm',
        run=read_warm,
        needs=SPARK,
    ),
    Contender(
        name="jetspark-cold",
        what="the same, the first read of a session",
        run=read_cold,
        needs=SPARK,
        is_in_quick_runs=False,
    ),
    Contender(
        name="jetspark-1",
        what="one task at a time, warm",
        run=read_on_one_core,
        needs=SPARK,
        is_in_quick_runs=False,
    ),
)

SPARK_READ = Workload(
    name="spark-read",
    what="a batch read of a whole stream, all columns but headers, into nothing; warm and cold, local[2]",
    count=1_000_000,
    quick_count=5_000,
    contenders=_READERS,
    storage="file",
    replicas=1,
    metrics=(MESSAGES_PER_S, MEMORY),
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

SPARK_READ_LARGE = Workload(
    name="spark-read-large",
    what="the same with messages of 1 MiB",
    count=LARGE_COUNT,
    quick_count=8,
    contenders=_READERS[:3],
    payload_bytes=LARGE_BYTES,
    storage="file",
    replicas=1,
    metrics=(MESSAGES_PER_S, MEMORY),
    baselines=("bare",),
)

SPARK_WRITE = Workload(
    name="spark-write",
    what="a batch write of as many rows to a stream, over fast ingest; warm, local[2]",
    count=500_000,
    quick_count=5_000,
    contenders=(
        Contender(name="bare", what="a bare fast-ingest writer, no ids, no Spark", run=fast_ingest.bare),
        Contender(name="bare-ids", what="the same with message ids", run=fast_ingest.bare_ids),
        Contender(name="jetspark", what='df.write.format("jetstream"), with ids, 2 partitions', run=write, needs=SPARK),
        Contender(
            name="jetspark-1",
            what="the same, 1 partition",
            run=write_one_partition,
            needs=SPARK,
            is_in_quick_runs=False,
        ),
        Contender(name="jetspark-no-ids", what="exactlyOnce=false, 2 partitions", run=write_without_ids, needs=SPARK),
    ),
    storage="file",
    replicas=1,
    baselines=("bare", "bare-ids"),
    metrics=(MESSAGES_PER_S,),  # most of the processor time is not this process's: Java's, and its workers'
    bars=(
        Bar(
            claim="the Spark sink without ids is at least 0.5 x a bare writer without ids",
            metric="messages_per_s",
            contender="jetspark-no-ids",
            baseline="bare",
            at_least=0.5,
        ),
        Bar(
            claim="the Spark sink with ids is at least 0.5 x a bare writer with ids",
            metric="messages_per_s",
            contender="jetspark",
            baseline="bare-ids",
            at_least=0.5,
        ),
    ),
)
