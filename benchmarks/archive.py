"""Archiving a stream: into a Delta table in a local folder, by the live archiver and by Spark's tasks.

The bare reader and Spark's batch read move the same messages and keep nothing: the difference is the cost of the table.
Messages differ from each other, half of each being random digits, so that the bytes on disk are those of a table that
users might have. The warm runs are what counts, as with the other workloads of Spark.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from time import perf_counter

from benchmarks.extras import LAKE, SPARK
from benchmarks.processes import descendants, peak_mib
from benchmarks.spark import bare_read, read_warm
from benchmarks.workload import MESSAGES_PER_S, Bar, Contender, Job, Metric, Values, Workload
from jetspark.blocking import JetStream, connect
from jetspark.jetstream.config import StreamConfig

__all__ = ["ARCHIVE"]

WARM_RUNS = 3
BYTES = Metric("bytes_per_message", "bytes/message", better="lower")
"""On disk; for readers, which write nothing, the payload as it is sent."""
MEMORY = Metric("python_mib", "MiB", better="lower")


@contextlib.contextmanager
def _filled(job: Job) -> Iterator[tuple[JetStream, str]]:
    name, random_ = job.subject.replace(".", "-"), random.Random(1)
    half = job.payload_bytes // 2
    with connect(job.url) as client:
        js = client.jetstream(timeout=30.0)
        js.create_stream(StreamConfig(name=name, subjects=[job.subject], storage="file", allow_batched=True))
        with js.fast_batch() as fast:
            fast.add_many(
                (job.subject, b"%0*d%0*x" % (job.payload_bytes - half, number, half, random_.getrandbits(4 * half)))
                for number in range(job.count)
            )
        try:
            yield js, name
        finally:
            js.delete_stream(name)


def _archiving(job: Job, *, on_spark: bool) -> Values:
    from jetspark.lake import ArchiveOptions, archive_streams, find_tables

    with _filled(job) as (js, stream), contextlib.ExitStack() as resources:
        engine = None
        if on_spark:
            from jetspark.spark import SparkArchiver, session

            spark = session("jetspark-bench", cores=2)
            resources.callback(spark.stop)
            engine = SparkArchiver(spark, servers=job.url)

        def archive() -> tuple[float, int]:
            with tempfile.TemporaryDirectory(prefix="jetspark-bench-") as folder:
                started = perf_counter()
                archive_streams(js, [stream], ArchiveOptions(to=folder), once=True, engine=engine)
                elapsed = perf_counter() - started
                [table] = find_tables(folder)
                snapshot = table.snapshot()
                assert snapshot is not None
                assert sum(each.rows for each in snapshot.files) == job.count
                return elapsed, sum(each.size_bytes for each in snapshot.files)

        archive()
        runs = [archive() for _ in range(WARM_RUNS)]
        pids = itertools.chain([os.getpid()], descendants(os.getpid()) if on_spark else ())
        return {
            "messages_per_s": job.count / statistics.median(elapsed for elapsed, _ in runs),
            "bytes_per_message": runs[-1][1] / job.count,
            "python_mib": peak_mib(pids),
        }


def live(job: Job) -> Values:
    return _archiving(job, on_spark=False)


def on_spark(job: Job) -> Values:
    return _archiving(job, on_spark=True)


def bare(job: Job) -> Values:
    return bare_read(job) | {"bytes_per_message": job.payload_bytes}


def spark_read(job: Job) -> Values:
    return read_warm(job) | {"bytes_per_message": job.payload_bytes}


ARCHIVE = Workload(
    name="archive",
    what="a stream into a Delta table in a local folder, warm; readers that keep nothing beside it",
    count=1_000_000,
    quick_count=5_000,
    contenders=(
        Contender(name="bare", what="a bare socket reader", run=bare),
        Contender(
            name="spark-read", what='spark.read.format("jetstream") into nothing, local[2]', run=spark_read, needs=SPARK
        ),
        Contender(name="jetspark", what="the live archiver, one process", run=live, needs=LAKE),
        Contender(name="jetspark-spark", what="SparkArchiver, local[2]", run=on_spark, needs=SPARK),
    ),
    storage="file",
    replicas=1,
    metrics=(MESSAGES_PER_S, BYTES, MEMORY),
    baselines=("bare", "spark-read"),
    bars=(
        Bar(
            claim="the live archiver is at least 0.5 x a Spark batch read",
            metric="messages_per_s",
            contender="jetspark",
            baseline="spark-read",
            at_least=0.5,
        ),
        Bar(
            claim="the archiver on Spark is at least 0.5 x a Spark batch read",
            metric="messages_per_s",
            contender="jetspark-spark",
            baseline="spark-read",
            at_least=0.5,
        ),
    ),
)
