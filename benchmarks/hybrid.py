"""Reading a stream and its archive as one, against the tables alone and the stream alone.

Nine tenths of the messages are in the archive only, a folder of Parquet files on disk, and the last tenth in the stream
only, as after a trim. The contenders without a stream read files of the same messages: what an engine takes that knows
nothing of streams. See :mod:`benchmarks.spark` for sessions, *warm*, and memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from benchmarks.extras import SPARK
from benchmarks.processes import descendants, peak_mib
from benchmarks.spark import MEMORY, WARM_READS, filled, session_of
from benchmarks.workload import MESSAGES_PER_S, Bar, Contender, Job, Values, Workload
from jetspark.blocking import connect

if TYPE_CHECKING:
    from jetspark.spark.types import DataFrame, SparkSession

__all__ = ["HYBRID_READ"]

# Rows of a file: some hundred thousand, as an archiver of a busy stream writes them.
FILE_ROWS = 250_000


@contextlib.contextmanager
def _archived(job: Job, end: int) -> Iterator[tuple[str, str, list[str]]]:
    """A stream with the messages of a job, its archive up to ``end``, and the files of that."""
    from jetspark.blocking.steps import ProcedureRunner
    from jetspark.lake.archive import open_table
    from jetspark.lake.parquet_files import DataFileWriter
    from jetspark.lake.position import StreamIdentity
    from jetspark.lake.rows import rows_of
    from jetspark.state.scan import Range, RangeScan, head_of

    with filled(job) as name, tempfile.TemporaryDirectory() as root, connect(job.url) as client:
        js = client.jetstream(timeout=30.0)
        created = head_of(js.stream(name).cached_info).created
        table = open_table(root, StreamIdentity(name, created))
        base = table.open_for_writing(1, epoch=1)
        for begin in range(1, end, FILE_ROWS):
            part = Range(name, created, begin, min(begin + FILE_ROWS, end))
            with DataFileWriter(table.store, table.identity, begin) as writer:
                for piece in ProcedureRunner(js).pieces(RangeScan(part)):
                    writer.write(rows_of(name, piece))
                made = writer.finish(part.end)
            base = table.log.commit(base, replace(base.position, next=part.end), add=made)
        js.stream(name).purge(up_to_sequence=end - 1)
        yield name, root, table.locations(base)


def _timed(count: int, read: Callable[[], object]) -> Values:
    """The median of warm reads."""

    def timed() -> float:
        started = perf_counter()
        read()
        return perf_counter() - started

    timed()
    return {"messages_per_s": count / statistics.median(timed() for _ in range(WARM_READS))}


def _into_nothing(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _by_spark(job: Job, frame: Callable[[SparkSession], DataFrame]) -> Values:
    with session_of(2) as spark:
        return _timed(job.count, lambda: _into_nothing(frame(spark))) | {
            "python_mib": peak_mib(itertools.chain([os.getpid()], descendants(os.getpid())))
        }


def hybrid(job: Job) -> Values:
    with _archived(job, 1 + job.count * 9 // 10) as (name, root, _):
        options = {"servers": job.url, "stream": name, "archive": root}
        return _by_spark(job, lambda spark: spark.read.format("jetstream").options(**options).load())


def table_alone(job: Job) -> Values:
    with _archived(job, 1 + job.count) as (_, _, files):
        columns = ("subject", "data", "stream", "sequence", "timestamp")
        return _by_spark(job, lambda spark: spark.read.parquet(*files).select(*columns))


def bare_table(job: Job) -> Values:
    from pyarrow import parquet

    with _archived(job, 1 + job.count) as (_, _, files):

        def read() -> int:
            columns = ["subject", "data", "stream", "sequence", "timestamp"]
            rows = 0
            for file in files:
                with parquet.ParquetFile(file) as opened:
                    for batch in opened.iter_batches(10_000, columns=columns, use_threads=False):
                        rows += batch.num_rows
            assert rows == job.count
            return rows

        return _timed(job.count, read) | {"python_mib": peak_mib(iter([os.getpid()]))}


def stream_alone(job: Job) -> Values:
    with filled(job) as name:
        options = {"servers": job.url, "stream": name}
        return _by_spark(job, lambda spark: spark.read.format("jetstream").options(**options).load())


HYBRID_READ = Workload(
    name="hybrid-read",
    what="a batch read of an archive and its stream as one, nine tenths from the archive; warm, local[2]",
    count=1_000_000,
    quick_count=5_000,
    contenders=(
        Contender(name="bare", what="one thread of pyarrow on the files, no Spark", run=bare_table, needs=SPARK),
        Contender(name="parquet", what="spark.read.parquet of the files, two tasks", run=table_alone, needs=SPARK),
        Contender(name="jetspark", what='format("jetstream") with an archive, two tasks', run=hybrid, needs=SPARK),
        Contender(
            name="jetspark-stream",
            what='format("jetstream") of the stream alone, two tasks',
            run=stream_alone,
            needs=SPARK,
            is_in_quick_runs=False,
        ),
    ),
    storage="file",
    replicas=1,
    metrics=(MESSAGES_PER_S, MEMORY),
    baselines=("bare", "parquet", "jetspark-stream"),
    bars=(
        Bar(
            claim="a read of archive and stream is at least as fast as a read of the stream",
            metric="messages_per_s",
            contender="jetspark",
            baseline="jetspark-stream",
            at_least=1.0,
        ),
    ),
)
