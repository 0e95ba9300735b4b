"""Projections of an application on Spark: read, decode, validate, fold, store; one pass, ``local[2]``, streams on disk.

*Cold* is the first backfill of a fresh session; *warm* is the same again, into a bucket that is new. Processor time is
that of the driver, Java and all Python workers together, in the warm ones: it stays comparable when other processes
use the machine. The server's is not in it. The first batch is counted from nothing: starting Java, Spark and its Python
workers, and folding a hundred events, as ``jetspark run --engine spark`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING

from benchmarks.extras import SPARK
from benchmarks.processes import cpu_s
from benchmarks.workload import CPU_PER_MILLION, MESSAGES_PER_S, Bar, Contender, Job, Metric, Values, Workload
from jetspark.blocking import JetStream, connect
from jetspark.errors import ConnectionLost, StreamNotFound

if TYPE_CHECKING:
    from jetspark.spark.types import SparkSession

__all__ = ["APP", "PROJECTION_SPARK", "PROJECTION_SPARK_FIRST", "prepared"]

APP = "benchmarks.order_totals:app"
# After the cold one; the median counts.
WARM_FOLDS = 3
FIRST_EVENTS = 100

COLD = Metric("cold_messages_per_s", "messages/s")
FIRST_BATCH = Metric("first_batch_s", "s", better="lower")


@contextlib.contextmanager
def prepared(job: Job, count: int) -> Iterator[JetStream]:
    """The application's stream with ``count`` events, and its buckets."""
    from benchmarks.order_totals import app, messages

    with connect(job.url) as client:
        js = client.jetstream(timeout=30.0)
        _remove(js)
        asyncio.run(app.apply(job.url))
        with js.fast_batch() as fast:
            fast.add_many(messages(count))
        try:
            yield js
        finally:
            _remove(js)


def _remove(js: JetStream) -> None:
    from benchmarks.order_totals import app

    topology = app.topology()
    for name in [each.name for each in topology.streams] + [f"KV_{each.bucket}" for each in topology.buckets]:
        with contextlib.suppress(StreamNotFound):
            js.delete_stream(name)


def _fold_once(spark: SparkSession, job: Job, js: JetStream) -> float:
    """Seconds for all events, into an empty bucket."""
    from benchmarks.order_totals import KEYS, app
    from jetspark.spark import backfill

    with contextlib.suppress(StreamNotFound):
        js.delete_kv("bench_totals")
    asyncio.run(app.apply(job.url))
    started = perf_counter()
    report = backfill(APP, spark, job.url, partitions=2)
    elapsed = perf_counter() - started
    if (report.applied, report.written) != (job.count, min(KEYS, job.count)):
        raise ConnectionLost(f"{report} of {job.count} events")
    return elapsed


def warm_and_cold(job: Job) -> Values:
    from jetspark.spark import session

    with prepared(job, job.count) as js:
        spark = session("jetspark-bench", cores=2)
        try:
            cold_s = _fold_once(spark, job, js)
            before = cpu_s()
            warm_s = [_fold_once(spark, job, js) for _ in range(WARM_FOLDS)]
            used_s = (cpu_s() - before) / WARM_FOLDS
        finally:
            spark.stop()
    return {
        "messages_per_s": job.count / statistics.median(warm_s),
        "cold_messages_per_s": job.count / cold_s,
        "cpu_s_per_million": used_s / job.count * 1e6,
    }


def first_batch(job: Job) -> Values:
    """Seconds from nothing to the first folded batch of a query, in a session for short jobs."""
    from jetspark.spark import run, session

    with prepared(job, 10 * FIRST_EVENTS) as js:
        started = perf_counter()
        spark = session("jetspark-bench", cores=2, is_short=True)
        try:
            query = run(APP, spark, job.url, maxOffsetsPerTrigger=FIRST_EVENTS)
            while js.stream("KV_bench_totals").info().state.messages == 0:
                if not query.isActive:
                    query.awaitTermination()
                query.awaitTermination(0.05)  # type: ignore[arg-type]  # Spark takes fractions
            elapsed = perf_counter() - started
            query.stop()
        finally:
            spark.stop()
    return {"first_batch_s": elapsed}


PROJECTION_SPARK = Workload(
    name="projection-spark",
    what="an application's events decoded, validated, folded into 10,000 keys and stored; one backfill, local[2]",
    count=1_000_000,
    quick_count=5_000,
    payload_bytes=280,
    contenders=(
        Contender(
            name="jetspark", what="jetspark.spark.backfill, warm, and cold before", run=warm_and_cold, needs=SPARK
        ),
    ),
    storage="file",
    replicas=1,
    baselines=(),
    metrics=(MESSAGES_PER_S, COLD, CPU_PER_MILLION),
    bars=(
        Bar(
            claim="a projection on Spark folds at least 100 thousand events a second",
            metric="messages_per_s",
            contender="jetspark",
            at_least=100_000,
        ),
    ),
)

PROJECTION_SPARK_FIRST = Workload(
    name="projection-spark-first",
    what="from nothing to the first folded batch of a hundred events, local[2]",
    count=FIRST_EVENTS,
    quick_count=FIRST_EVENTS,
    payload_bytes=280,
    contenders=(
        Contender(
            name="jetspark",
            what="jetspark.spark.run in a session for short jobs",
            run=first_batch,
            needs=SPARK,
            is_in_quick_runs=False,
        ),
    ),
    storage="file",
    replicas=1,
    baselines=(),
    metrics=(FIRST_BATCH,),
    bars=(
        Bar(
            claim="the first folded batch of a query is there after at most 12 seconds",
            metric="first_batch_s",
            contender="jetspark",
            at_most=12.0,
        ),
    ),
)
