"""Writes rows of an application's projections into their buckets, by :mod:`jetspark.spark.engine.projection_fold`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from jetspark.core.gc_tuning import seldom_collecting
from jetspark.errors import ConfigError, JetSparkError
from jetspark.spark.connections import patiently, runner_for
from jetspark.spark.engine.coverage import Covered, check_seen, merge
from jetspark.spark.engine.projection_options import FORMAT, ProjectionOptions
from jetspark.spark.options import read_options
from jetspark.spark.schema import PROJECTION_SCHEMA
from jetspark.spark.tasks import TaskFailed, is_final, raise_failure

if TYPE_CHECKING:
    from jetspark.spark.engine.projection_fold import ProjectionFold
    from jetspark.spark.engine.rows import Unreadable
    from jetspark.state.changes import Current

__all__ = ["batch_writer", "folded_rows", "state_rows", "stream_writer"]

_logger = logging.getLogger("jetspark.spark")

STATES_AT_A_TIME = 10_000


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceWriter:
    """For ``df.write``."""
    return ProjectionBatchWriter(_checked(options, schema, overwrite))


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
    """For ``df.writeStream``."""
    return ProjectionStreamWriter(_checked(options, schema, overwrite))


def _checked(options: Mapping[str, str], schema: StructType, overwrite: bool) -> ProjectionOptions:
    if overwrite:
        raise ConfigError(f"{FORMAT}: expected to append: a projection goes on from its present states")
    if schema.names != PROJECTION_SCHEMA.names:
        raise ConfigError(f"{FORMAT}: columns {schema.simpleString()}: expected those that the format reads")
    return read_options(ProjectionOptions, FORMAT, options)


@dataclass
class Projected(WriterCommitMessage):
    """The result of a task, which Spark sends to the driver."""

    counts: dict[str, int]
    covered: list[Covered]
    seen: list[int]
    """For each bucket the revision that the task's loads have seen at least."""


def _run(options: ProjectionOptions, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
    try:
        return write_rows(options, batches)
    except JetSparkError as error:
        if not is_final(error):
            raise
        return TaskFailed(error)


class ProjectionBatchWriter(DataSourceArrowWriter):
    """One ``df.write``. Spark pickles it: plain data only."""

    def __init__(self, options: ProjectionOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _run(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        raise_failure(messages)
        finish(self._options, messages)


class ProjectionStreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a query. Spark creates it for each batch and pickles it: plain data only."""

    def __init__(self, options: ProjectionOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _run(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        raise_failure(messages)
        finish(self._options, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Stored states stay; Spark runs the same batch again, which does not change them."""
        _logger.warning("batch %d failed; it is folded again when the query restarts", batchId)


class TaskRows:
    """The rows of a task: events, unreadable messages, and covered ranges."""

    def __init__(self, options: ProjectionOptions) -> None:
        from jetspark.spark.engine.app_files import load_same_app
        from jetspark.spark.engine.projection_fold import COLUMNS
        from jetspark.spark.engine.sequence_sort import SequenceSort

        self.app = load_same_app(options.app, options.app_folder, options.projections, options.outline)
        self.events = SequenceSort(max_rows=options.max_held_rows, max_bytes=options.max_held_bytes, columns=COLUMNS)
        self.letters: list[Unreadable] = []
        self.covered: list[Covered] = []
        self.bases: dict[str, Current] = {}
        self._options = options
        self.fold = self.new_fold()

    def new_fold(self) -> ProjectionFold:
        from jetspark.spark.engine.projection_fold import ProjectionFold
        from jetspark.spark.engine.rows import Readings, specs_of

        options = self._options
        return ProjectionFold(
            [spec.within(options.max_payload_bytes) for spec in specs_of(self.app, options.projections)],
            options.buckets,
            Readings(self.app).readers,
            patience_s=options.patience_s,
            check_keys=options.check_keys,
        )

    def add(self, batch: pa.RecordBatch) -> None:
        import pyarrow.compute as pc  # a process that commits does without

        from jetspark.spark.engine.rows import COVERED, unpack

        targets = batch.column("target")
        others = batch.filter(pc.less(targets, 0))
        if others.num_rows:
            batch = batch.filter(pc.greater_equal(targets, 0))
            for target, data in zip(
                others.column("target").to_pylist(), others.column("data").to_pylist(), strict=True
            ):
                (self.covered if target == COVERED else self.letters).append(unpack(data))
        self.events.add(batch)

    def add_after_bases(self, batch: pa.RecordBatch) -> None:
        """Rows among which are the states that keys have in a bucket: of a key the latest counts."""
        import pyarrow.compute as pc

        from jetspark.spark.engine.rows import BASE, unpack

        is_base = pc.equal(batch.column("reading"), BASE)
        found = batch.filter(is_base)
        for key, data in zip(found.column("key").to_pylist(), found.column("data").to_pylist(), strict=True):
            state: Current = unpack(data)
            if (known := self.bases.get(key)) is None or known.revision <= state.revision:
                self.bases[key] = state
        self.add(batch.filter(pc.invert(is_base)) if found.num_rows else batch)


@seldom_collecting()
def write_rows(options: ProjectionOptions, batches: Iterator[pa.RecordBatch]) -> Projected:
    """Fold the rows of a task, write its dead letters, and collect the ranges that were read."""
    from jetspark.spark.engine.dead_letters import write_letters
    from jetspark.spark.engine.projection_fold import Tally

    rows, runner = TaskRows(options), runner_for(options)
    with rows.events as events:
        for batch in batches:
            rows.add(batch)
        # Of a task without rows nothing is asked.
        tally = runner.run(rows.fold.fold_and_store(events.pieces)) if events.rows else Tally()
    tally.unreadable = len(rows.letters)
    if rows.letters and options.letters:
        letters = write_letters(rows.app.name, options.stream[0], rows.letters, patience_s=options.patience_s)
        tally.letters = runner.run(letters)
    return Projected(asdict(tally), rows.covered, rows.fold.seen)


def finish(options: ProjectionOptions, messages: list[WriterCommitMessage | None]) -> None:
    """After all tasks have stored their keys: advance the positions of the buckets, and report."""
    done = [message for message in messages if isinstance(message, Projected)]
    whole = merge(part for each in done for part in each.covered)
    counts: dict[str, int] = {}
    for each in done:
        for name, number in each.counts.items():
            counts[name] = counts.get(name, 0) + number
    if whole is not None:
        from jetspark.spark.engine.reached_positions import advance_positions

        check_seen(options.buckets, whole, [each.seen for each in done])
        advance_positions(options, whole)
    _logger.info("projections %s: %s, %s", ",".join(options.projections), whole, counts)
    if options.report is not None:
        bucket, _, key = options.report.partition("/")
        value = json.dumps(counts).encode()
        patiently(options, lambda js: js.kv(bucket).put(key, value), patience_s=options.patience_s)


def state_rows(options: ProjectionOptions, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Fold the rows of a task from nothing, and store nothing: the states as rows."""
    rows = TaskRows(options)
    with rows.events as events, seldom_collecting():
        for batch in batches:
            rows.add(batch)
        states = rows.fold.fold_from_nothing(events.pieces())
    for name, of_key in zip(options.projections, states, strict=True):
        found = [(key, state) for key, state in of_key.items() if state.sequence or state.parked is not None]
        for start in range(0, len(found), STATES_AT_A_TIME):
            part = [state for _, state in found[start : start + STATES_AT_A_TIME]]
            columns = {
                "projection": pa.array([name] * len(part), pa.string()),
                "key": pa.array([key for key, _ in found[start : start + STATES_AT_A_TIME]], pa.string()),
                "value": pa.array([state.value for state in part], pa.binary()),
                "sequence": pa.array([state.sequence for state in part], pa.int64()),
                "parked": pa.array([state.parked and state.parked.sequence for state in part], pa.int64()),
            }
            yield pa.RecordBatch.from_pydict(columns)


def folded_rows(options: ProjectionOptions, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Fold the rows of a task on from the states that are among them, and store nothing."""
    rows = TaskRows(options)
    with rows.events as events, seldom_collecting():
        for batch in batches:
            rows.add_after_bases(batch)
        states = rows.fold.fold_bases(rows.bases, events.pieces())
    spec = rows.app.projections[options.projections[0]]
    found = list(states.items())
    for start in range(0, len(found), STATES_AT_A_TIME):
        part = found[start : start + STATES_AT_A_TIME]
        columns = {
            "key": pa.array([key for key, _ in part], pa.string()),
            "value": pa.array([state.value for _, state in part], pa.binary()),
            "sequence": pa.array([state.sequence for _, state in part], pa.int64()),
            "mark": pa.array([spec.mark(state.parked, state.ids) for _, state in part], pa.string()),
        }
        yield pa.RecordBatch.from_pydict(columns)
