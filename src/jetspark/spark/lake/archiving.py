"""Writes archives in Spark's tasks. No message goes through Java: a task writes files, and returns their descriptions.

A range of sequences is parted among tasks, each of which does what the live archiver does with its part. The driver
commits all files at once. An attempt of a task that is killed or repeated leaves files that are in no commit.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import pyarrow as pa

from jetspark.core.gc_tuning import seldom_collecting
from jetspark.errors import DataLoss, JetSparkError
from jetspark.lake.archive import ArchiveTable
from jetspark.lake.position import DataFile
from jetspark.lake.range_writing import ArchiveOptions, StreamPart, WrittenPart, write_range
from jetspark.lake.store import open_store
from jetspark.spark.connections import runner_for
from jetspark.spark.engine.projection_options import option_text
from jetspark.spark.engine.projections import check_pandas
from jetspark.spark.options import Connecting, read_options
from jetspark.state.scan import Head
from jetspark.state.tables import split

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["SparkArchiver"]

Result: TypeAlias = WrittenPart | JetSparkError

FORMAT = "archive"
# A task with fewer sequences takes less time than its start.
TASK_SEQUENCES = 50_000
# Tasks of a Connect server, which does not tell how many run at the same time.
CONNECT_TASKS = 4
POLL_S = 1.0


class WriteTask(NamedTuple):
    """Arguments of the tasks."""

    options: Mapping[str, str]
    uri: str
    storage_options: Mapping[str, str]
    limits: ArchiveOptions
    parts: Sequence[StreamPart]
    """One for each task."""


class SparkArchiver:
    """The engine of :func:`~jetspark.lake.archive_streams` that writes on Spark.

    Args:
        tasks: Tasks that write at the same time; by default as many as Spark has cores.
        options: How the tasks connect: options of the format ``jetstream``, such as ``servers``.
    """

    def __init__(self, spark: SparkSession, *, tasks: int | None = None, **options: Any) -> None:
        check_pandas("jetspark.spark.SparkArchiver")
        self._options = {name: option_text(value) for name, value in options.items()}
        read_options(Connecting, FORMAT, self._options)
        self._spark, self._tasks = spark, tasks or _parallelism(spark)

    def write(
        self, table: ArchiveTable, part: StreamPart, limits: ArchiveOptions, head: Head, on_piece: Callable[[int], bool]
    ) -> WrittenPart:
        """As :func:`~jetspark.lake.range_writing.write_range`; ends early where every task has enough."""
        run = functools.partial(self._run, table, limits, on_piece)
        parts = _parts(part, limits, head, self._tasks)
        return _joined(parts, run(parts), lambda part: run([part])[0])

    def _run(
        self, table: ArchiveTable, limits: ArchiveOptions, on_piece: Callable[[int], bool], parts: Sequence[StreamPart]
    ) -> list[Result]:
        store = table.store
        task = WriteTask(self._options, store.uri, dict(store.storage_options), limits, parts)
        tasks = self._spark.range(0, len(parts), 1, len(parts)).mapInArrow(
            functools.partial(_write, task), "part binary"
        )
        with ThreadPoolExecutor(1) as beside:
            job = beside.submit(tasks.toArrow)
            while True:
                try:
                    rows = job.result(POLL_S)
                    break
                except TimeoutError:
                    on_piece(parts[0].start)  # keeps the lease; tasks are not stopped
        found = dict(map(pickle.loads, rows["part"].to_pylist()))
        return [found[number] for number in range(len(parts))]


def _parallelism(spark: SparkSession) -> int:
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # Connect has no context, and its error has no class of its own
        return CONNECT_TASKS


def _parts(part: StreamPart, limits: ArchiveOptions, head: Head, tasks: int) -> list[StreamPart]:
    """The parts of a part, no larger than a file should be."""
    most = max(1, int(min(limits.max_rows, limits.max_bytes / max(1.0, head.bytes_per_sequence))))
    end = min(part.end, part.start + tasks * most)
    count = max(1, min(tasks, (end - part.start) // TASK_SEQUENCES))
    ranges = split(part.start, end, count)
    [first, *others] = [replace(part, begin=begin, start=begin, end=stop, lost=()) for begin, stop in ranges]
    return [replace(first, begin=part.begin, lost=part.lost), *others]


def _joined(
    parts: Sequence[StreamPart],
    results: Sequence[WrittenPart | JetSparkError],
    again: Callable[[StreamPart], WrittenPart | JetSparkError],
) -> WrittenPart:
    """The results of touching parts as one. Files must touch, so a part behind parts without rows is written again.

    Raises:
        JetSparkError: A task failed; or messages are lost, and no row is before them.
    """
    files: list[DataFile] = []
    begin = end = parts[0].begin
    empty: WrittenPart | None = None
    for part, result in zip(parts, results, strict=True):
        if isinstance(result, WrittenPart) and result.files and empty is not None:
            result = again(replace(part, begin=empty.begin, lost=empty.lost))
        if isinstance(result, JetSparkError):
            if files and isinstance(result, DataLoss):
                break  # the next call raises it: what is before the loss is committed first
            raise result
        if result.files:
            begin = begin if files else result.begin
            files += result.files
            end, empty = result.end, None
        else:
            known = empty or WrittenPart(result.begin, result.begin, (), ())
            empty = WrittenPart(known.begin, result.end, (), (*known.lost, *result.lost))
        if result.end < part.end:
            break  # lost messages are next
    if files or empty is None:
        return WrittenPart(begin, end, tuple(files), ())
    return empty


def _write(task: WriteTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the parts of a task; in Spark's workers."""
    options = read_options(Connecting, FORMAT, task.options)
    store = open_store(task.uri, task.storage_options)
    for batch in batches:
        for number in batch.column("id").to_pylist():
            result: Result
            try:
                with seldom_collecting():
                    result = write_range(runner_for(options), store, task.parts[number], task.limits)
            except JetSparkError as error:
                result = error  # a raised one would be tried again by Spark, and shown with tracebacks of Java
            yield pa.RecordBatch.from_pydict({"part": pa.array([pickle.dumps((number, result))], pa.binary())})
