"""Events of an application as typed rows on Spark, beside the same messages as raw rows.

Both read one stream of events of 280 bytes into nothing, in a session of their own, ``local[2]``. A typed row has been
decoded and validated, and has a column for each field and 13 columns of the envelope.

A write makes such events of rows that Spark computes, and the raw sink stores as many messages of that size, whose
bytes are given. Each write of the first kind checks all rows before it sends one, in a pass of its own, unless invalid
rows become dead letters.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from benchmarks.extras import SPARK
from benchmarks.processes import cpu_s
from benchmarks.projection_spark import APP, prepared
from benchmarks.workload import CPU_PER_MILLION, MESSAGES_PER_S, Bar, Contender, Job, Values, Workload
from jetspark.errors import ConnectionLost

if TYPE_CHECKING:
    from jetspark.spark.types import DataFrame, SparkSession

__all__ = ["SPARK_EVENTS", "SPARK_EVENTS_WRITE"]

# After the cold one; the median counts. Java compiles what runs often, on the same processors.
WARM_READS = 4
WARM_WRITES = 3


def _raw(spark: SparkSession, job: Job) -> DataFrame:
    from benchmarks.order_totals import app

    return spark.read.format("jetstream").options(servers=job.url, stream=app.stream).load()


def _typed(spark: SparkSession, job: Job) -> DataFrame:
    from benchmarks.order_totals import Paid
    from jetspark.spark import events

    return events(spark, APP, Paid, servers=job.url)


def _reading(job: Job, frame_of: Callable[[SparkSession, Job], DataFrame]) -> Values:
    from jetspark.spark import session

    def read() -> float:
        started = perf_counter()
        frame_of(spark, job).write.format("noop").mode("overwrite").save()
        return perf_counter() - started

    with prepared(job, job.count):
        spark = session("jetspark-bench", cores=2)
        try:
            if (found := frame_of(spark, job).count()) != job.count:
                raise ConnectionLost(f"{found} rows of {job.count} events")
            read()
            before = cpu_s()
            elapsed = statistics.median(read() for _ in range(WARM_READS))
            used_s = (cpu_s() - before) / WARM_READS
        finally:
            spark.stop()
    return {"messages_per_s": job.count / elapsed, "cpu_s_per_million": used_s / job.count * 1e6}


def raw(job: Job) -> Values:
    return _reading(job, _raw)


def typed(job: Job) -> Values:
    return _reading(job, _typed)


SPARK_EVENTS = Workload(
    name="spark-events",
    what="a batch read of an application's events into nothing, raw and as typed rows; warm, local[2]",
    count=500_000,
    quick_count=5_000,
    payload_bytes=280,
    contenders=(
        Contender(name="raw", what='spark.read.format("jetstream"), subject and bytes', run=raw, needs=SPARK),
        Contender(
            name="jetspark", what="jetspark.spark.events, decoded, a column for each field", run=typed, needs=SPARK
        ),
    ),
    storage="file",
    replicas=1,
    baselines=("raw",),
    metrics=(MESSAGES_PER_S, CPU_PER_MILLION),
    bars=(
        Bar(
            claim="typed events are read at least 0.5 x as fast as raw messages",
            metric="messages_per_s",
            contender="jetspark",
            baseline="raw",
            at_least=0.5,
        ),
        Bar(
            claim="typed events are read at 100 thousand a second or more",
            metric="messages_per_s",
            contender="jetspark",
            at_least=100_000,
        ),
    ),
)


def _writing(job: Job, write: Callable[[DataFrame, Job], None]) -> Values:
    from jetspark.spark import session

    def measure() -> float:
        started = perf_counter()
        write(spark.range(0, job.count, 1, 2), job)
        return perf_counter() - started

    with prepared(job, 0) as js:
        spark = session("jetspark-bench", cores=2)
        try:
            measure()
            before = cpu_s()
            elapsed = statistics.median(measure() for _ in range(WARM_WRITES))
            used_s = (cpu_s() - before) / WARM_WRITES
        finally:
            spark.stop()
        from benchmarks.order_totals import app

        stored = js.stream(app.stream).info().state.messages
        if stored != job.count * (WARM_WRITES + 1):
            raise ConnectionLost(f"{stored} stored of {job.count * (WARM_WRITES + 1)}")
    return {"messages_per_s": job.count / elapsed, "cpu_s_per_million": used_s / job.count * 1e6}


def _write_raw(rows: DataFrame, job: Job) -> None:
    data = f"CAST('{'x' * job.payload_bytes}' AS binary) AS data"
    messages = rows.selectExpr("concat('bench_orders.o-', id % 10000, '.paid') AS subject", data)
    messages.write.format("jetstream").options(servers=job.url).mode("append").save()


def _write_typed(rows: DataFrame, job: Job, **options: str) -> None:
    from benchmarks.order_totals import Paid
    from jetspark.spark import write_events

    columns = ("concat('o-', id % 10000) AS order_id", "concat('c-', id % 97) AS customer", "id AS amount_cents")
    write_events(rows.selectExpr(*columns), APP, Paid, servers=job.url, **options)


def write_raw(job: Job) -> Values:
    return _writing(job, _write_raw)


def write_typed(job: Job) -> Values:
    return _writing(job, _write_typed)


def write_typed_once(job: Job) -> Values:
    return _writing(job, lambda rows, job: _write_typed(rows, job, invalid="dead_letter"))


SPARK_EVENTS_WRITE = Workload(
    name="spark-events-write",
    what="a batch write of rows as an application's events, and of as many raw messages; warm, local[2]",
    count=200_000,
    quick_count=2_000,
    payload_bytes=280,
    contenders=(
        Contender(
            name="raw", what='df.write.format("jetstream"), bytes that are given, with ids', run=write_raw, needs=SPARK
        ),
        Contender(
            name="jetspark",
            what="write_events, all rows checked before one is sent",
            run=write_typed,
            needs=SPARK,
        ),
        Contender(
            name="jetspark-dead-letter",
            what="invalid=dead_letter, each row checked before it is sent",
            run=write_typed_once,
            needs=SPARK,
        ),
    ),
    storage="file",
    replicas=1,
    baselines=("raw",),
    metrics=(MESSAGES_PER_S, CPU_PER_MILLION),
    bars=(
        Bar(
            claim="typed events are written at least 0.5 x as fast as raw messages",
            metric="messages_per_s",
            contender="jetspark",
            baseline="raw",
            at_least=0.5,
        ),
    ),
)
