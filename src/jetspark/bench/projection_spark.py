"""Projections of an application on Spark: read, decode, validate, fold, store; one pass, ``local[2]``, streams on disk.

*Cold* is the first backfill of a fresh session, and beside it the seconds from nothing to the first folded batch of a
streaming query: starting Java, Spark, its Python workers, and folding a hundred events. *Warm* is the same backfill
again, into a bucket that is new.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING

from jetspark.bench.workload import MESSAGES_PER_S, Bar, Contender, Job, Metric, Values, Workload
from jetspark.blocking import JetStream, connect
from jetspark.errors import ConnectionLost, StreamNotFound

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["PROJECTION_SPARK"]

APP = "jetspark.bench.order_totals:app"
# After the cold one; the median counts.
WARM_FOLDS = 3
FIRST_EVENTS = 100

FIRST_BATCH = Metric("first_batch_s", "s", better="lower")


@contextlib.contextmanager
def _prepared(job: Job, count: int) -> Iterator[JetStream]:
    """The application's stream with ``count`` events, and its buckets."""
    from jetspark.bench.order_totals import app, messages

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
    from jetspark.bench.order_totals import app

    topology = app.topology()
    for name in [each.name for each in topology.streams] + [f"KV_{each.bucket}" for each in topology.buckets]:
        with contextlib.suppress(StreamNotFound):
            js.delete_stream(name)


def _fold_once(spark: SparkSession, job: Job, js: JetStream) -> float:
    """Seconds for all events, into an empty bucket."""
    from jetspark.bench.order_totals import KEYS, app
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


def _first_batch(job: Job, js: JetStream) -> float:
    """Seconds from nothing to the first folded batch of a query, in a session for short jobs."""
    from jetspark.spark import run, session

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
        return elapsed
    finally:
        spark.stop()


def _folding(job: Job, *, is_warm: bool, is_short: bool = False) -> Values:
    from jetspark.spark import session

    with _prepared(job, job.count) as js:
        started = perf_counter()
        spark = session("jetspark-bench", cores=2, is_short=is_short)
        try:
            elapsed = _fold_once(spark, job, js)
            first_s = perf_counter() - started
            if is_warm:
                elapsed = statistics.median(_fold_once(spark, job, js) for _ in range(WARM_FOLDS))
        finally:
            spark.stop()
    return {"messages_per_s": job.count / elapsed, "first_batch_s": first_s}


def warm(job: Job) -> Values:
    return _folding(job, is_warm=True)


def cold(job: Job) -> Values:
    return _folding(job, is_warm=False)


def short(job: Job) -> Values:
    return _folding(job, is_warm=True, is_short=True)


def first_batch(job: Job) -> Values:
    """A stream of a hundred events a micro-batch; how fast it is afterwards is not looked at."""
    with _prepared(job, 10 * FIRST_EVENTS) as js:
        first_s = _first_batch(job, js)
    return {"messages_per_s": FIRST_EVENTS / first_s, "first_batch_s": first_s}


PROJECTION_SPARK = Workload(
    name="projection-spark",
    what="an application's events decoded, validated, folded into 10,000 keys and stored; one backfill, local[2]",
    count=1_000_000,
    quick_count=5_000,
    payload_bytes=280,
    contenders=(
        Contender(name="jetspark", what="jetspark.spark.backfill, warm", run=warm, needs="pyspark"),
        Contender(
            name="jetspark-short",
            what="the same in a session for short jobs, warm",
            run=short,
            needs="pyspark",
            is_in_quick_runs=False,
        ),
        Contender(
            name="jetspark-cold",
            what="the first backfill of a session",
            run=cold,
            needs="pyspark",
            is_in_quick_runs=False,
        ),
        Contender(
            name="jetspark-first",
            what="jetspark.spark.run from nothing to its first micro-batch, in a session for short jobs",
            run=first_batch,
            needs="pyspark",
            is_in_quick_runs=False,
        ),
    ),
    storage="file",
    replicas=1,
    baselines=(),
    metrics=(MESSAGES_PER_S, FIRST_BATCH),
    bars=(
        Bar(
            claim="a projection on Spark folds at least 100 thousand events a second",
            metric="messages_per_s",
            contender="jetspark",
            at_least=100_000,
        ),
        Bar(
            claim="the first folded batch of a query is there after at most 12 seconds",
            metric="first_batch_s",
            contender="jetspark-first",
            at_most=12.0,
        ),
    ),
)
