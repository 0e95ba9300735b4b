"""Compares a bucket of a projection with a fresh fold of its history, in Spark's tasks.

Some tasks read the bucket, others the stream. Spark shuffles the state of a key to the same task as its events. That
task folds from an empty state, compares, and returns a partial result whose size does not depend on the number of keys
(:mod:`jetspark.app.replay.comparison`). One last task adds these results, so the driver gets a single row.

The bucket is read up to its revision at planning time, so a key that changes later is missing or old in this read. A
key that seems to differ is therefore loaded again by its task and folded again; if its new value is beyond the events
that Spark has read, the task reads the later events.
"""

from __future__ import annotations

import functools
import pickle
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from jetspark.app.replay.comparison import ComparedKeys, KeyContent, compare, reaches
from jetspark.app.replay.verification import contents_of
from jetspark.blocking.steps import ProcedureRunner
from jetspark.spark.connections import patiently, runner_for
from jetspark.spark.engine.projection_options import FORMAT, ProjectionOptions
from jetspark.spark.engine.projections import ProjectionPlan, bring_together, check_pandas
from jetspark.spark.engine.reached_positions import whole_head
from jetspark.spark.options import read_options
from jetspark.spark.schema import PROJECTION_SCHEMA
from jetspark.state.changes import NOTHING
from jetspark.state.scan import Range
from jetspark.state.store import load
from jetspark.state.tables import BucketView, open_bucket, split

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from jetspark.app.projections.key_state import KeyState
    from jetspark.spark.engine.projection_fold import Columns
    from jetspark.state.changes import Current

__all__ = ["compare_bucket"]

# Revisions of the bucket that a task reads, unless that makes too many tasks.
REVISIONS_PER_TASK = 100_000
MAX_SCANS = 64
# Keys that a task has the states of, twice.
KEYS_PER_TASK = 200_000

_PART = "part binary"


class ScanTask(NamedTuple):
    """Arguments of the tasks that read the bucket."""

    options: Mapping[str, str]
    bucket: str
    created: str
    ranges: Sequence[tuple[int, int]]
    """Range of revisions for each task, the end exclusive."""


class CompareTask(NamedTuple):
    """Arguments of the tasks that fold and compare."""

    options: Mapping[str, str]
    bucket: str
    boundary: int
    version: int | None
    unread: Range
    """The range after the events that Spark reads; its end is open."""


def compare_bucket(
    plan: ProjectionPlan,
    spark: SparkSession,
    bucket: str,
    boundary: int,
    version: int | None,
    partitions: int | None,
) -> ComparedKeys:
    """Compare a bucket with a fresh fold of the only projection of a plan."""
    check_pandas("jetspark.spark.ReplayEngine")
    view = _opened(plan.connecting, bucket)
    state = view.info.state
    ranges = split(
        max(1, state.first_sequence), state.last_sequence + 1, min(MAX_SCANS, 1 + state.messages // REVISIONS_PER_TASK)
    )
    # Read after the bucket, so that few of its values are beyond the events read.
    head = patiently(plan.connecting, lambda js: whole_head(js, plan.connecting))
    given = plan.options | {"startingOffsets": "earliest", "endingOffsets": str(head.next)}
    unread = Range(
        head.stream,
        head.created,
        head.next,
        head.next,
        plan.connecting.subjects,
        is_earliest=head.kept_from is not None,
    )
    scan = ScanTask(plan.options, bucket, view.created, ranges)
    tasks = spark.range(0, len(ranges), 1, max(1, len(ranges)))
    found = tasks.mapInArrow(functools.partial(_scan, scan), PROJECTION_SCHEMA)
    events = spark.read.format(FORMAT).options(**given).load().where("target > -2")
    together = bring_together(events.union(found), partitions or _enough_tasks(spark, state.messages))
    task = CompareTask(plan.options, bucket, boundary, version, unread)
    parts = together.mapInArrow(functools.partial(_compare, task), _PART)
    return _only(parts.repartition(1).mapInArrow(_add_up, _PART))


def _opened(options: ProjectionOptions, bucket: str) -> BucketView:
    return patiently(options, lambda js: ProcedureRunner(js).run(open_bucket(bucket)), patience_s=options.patience_s)


def _enough_tasks(spark: SparkSession, keys: int) -> int | None:
    """Number of tasks so that the keys of each fit into its memory; None for Spark's default."""
    usual = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    wanted = 1 + keys // KEYS_PER_TASK
    return wanted if wanted > usual else None


def _only(frame: DataFrame) -> ComparedKeys:
    [part] = frame.toArrow()["part"].to_pylist()
    found: ComparedKeys = pickle.loads(part)
    return found


# ---- in tasks --------------------------------------------------------------------------------------------------------


def _scan(task: ScanTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The states of the bucket, in the form of rows that a fold can start from."""
    from jetspark.spark.engine.rows import base_rows

    options = read_options(ProjectionOptions, FORMAT, task.options)
    for batch in batches:
        for number in batch.column("id").to_pylist():
            view = _opened(options, task.bucket)
            view.check_is(task.created)
            first, end = task.ranges[number]
            scan = view.scan(first, end - 1, patience_s=options.patience_s)
            for messages in runner_for(options).pieces(scan):
                # Of a key's revisions the last one: they come in order.
                yield from base_rows(dict(contents_of(view, messages))).to_batches()


def _compare(task: CompareTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Fold and compare the keys of a task."""
    from jetspark.core.gc_tuning import seldom_collecting

    with _Keys(task) as keys, seldom_collecting():
        for batch in batches:
            keys.add(batch)
        keys.fold()
        keys.complete()
        yield _row(keys.compared())


def _add_up(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Parts as one."""
    whole = ComparedKeys()
    for batch in batches:
        for part in batch.column("part").to_pylist():
            whole.include(pickle.loads(part))
    yield _row(whole)


def _row(part: ComparedKeys) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_pydict({"part": pa.array([pickle.dumps(part)], pa.binary())})


class _Keys:
    """The keys of a task: what the bucket has for them, and what their events make of them."""

    def __init__(self, task: CompareTask) -> None:
        from jetspark.spark.engine.projection_sink import TaskRows

        self._task = task
        self._options = read_options(ProjectionOptions, FORMAT, task.options)
        self._rows = TaskRows(self._options)
        self._states: dict[str, KeyState] = {}
        self._found = self._rows.bases
        self._events = self._unreadable = 0

    def __enter__(self) -> Self:
        self._rows.events.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._rows.events.__exit__(*error)

    def add(self, batch: pa.RecordBatch) -> None:
        import pyarrow.compute as pc

        from jetspark.spark.engine.rows import LETTER

        # Only counted: the row has the whole message.
        is_letter = pc.equal(batch.column("target"), LETTER)
        letters = batch.filter(is_letter)
        if letters.num_rows:
            self._unreadable += self._up_to_boundary(letters)
            batch = batch.filter(pc.invert(is_letter))
        known = self._rows.events.rows
        self._rows.add_after_bases(batch)
        if self._rows.events.rows > known:
            # The rows that say what the bucket has are of sequence 0.
            self._events += self._up_to_boundary(batch.filter(pc.greater(batch.column("sequence"), 0)))
        self._options.check_keys(len(self._found))

    def _up_to_boundary(self, batch: pa.RecordBatch) -> int:
        import pyarrow.compute as pc

        return pc.sum(pc.less_equal(batch.column("sequence"), self._task.boundary)).as_py() or 0

    def fold(self) -> None:
        """Every key to the boundary, or to where its value says that it is, if that is beyond."""
        limits = _Limits(self._task.boundary, self._found)
        fold = self._rows.new_fold()
        [states] = fold.fold_from_nothing(map(limits.cut, self._rows.events.pieces()))
        self._states = dict(states)

    def complete(self) -> None:
        """Look again at keys that differ: they may have been written since the bucket was read."""
        suspects = [key for key in self._keys if self._differs(key)]
        if not suspects:
            return
        current = runner_for(self._options).run(
            load(self._task.bucket, sorted(suspects), patience_s=self._options.patience_s)
        )
        limits = _Limits(self._task.boundary, current)
        fold = self._rows.new_fold()
        again = fold.fold_bases(
            dict.fromkeys(suspects, NOTHING),
            map(limits.cut, chain(self._rows.events.pieces(), self._unread(limits.last))),
        )
        for key in suspects:
            self._states[key] = again[key]
            self._found[key] = current.get(key, NOTHING)

    def compared(self) -> ComparedKeys:
        result = ComparedKeys(events=self._events, unreadable=self._unreadable)
        for key in sorted(self._keys):
            result.add(key, self._expected(key), self._found.get(key, NOTHING), self._task.version)
        return result

    @property
    def _keys(self) -> Set[str]:
        return self._states.keys() | self._found.keys()

    def _expected(self, key: str) -> KeyContent:
        return KeyContent.of_state(self._states.get(key))

    def _differs(self, key: str) -> bool:
        found = self._found.get(key, NOTHING)
        return compare(key, self._expected(key), found, self._task.version) is not None

    def _unread(self, last: int) -> Iterator[Columns]:
        """Rows of the events that came since Spark has planned its reading, up to one."""
        part = replace(self._task.unread, end=last + 1)
        if part.start >= part.end:
            return
        import pyarrow.compute as pc

        from jetspark.spark.engine.projection_fold import COLUMNS
        from jetspark.spark.engine.rows import RouteRows
        from jetspark.spark.stream.reading import RangeReader

        rows = RouteRows(self._rows.app, self._options.projections, subjects=part.subjects)
        for batch in RangeReader(self._options, part, rows).batches():
            events = batch.filter(pc.greater_equal(batch.column("target"), 0))
            if events.num_rows:
                yield [events.column(name).to_pylist() for name in COLUMNS]


class _Limits:
    """How far keys are folded: to a boundary, or if their values are beyond it, as far as those say."""

    def __init__(self, boundary: int, found: Mapping[str, Current]) -> None:
        self._boundary, self._further = boundary, reaches(found, boundary)
        self.last = max([boundary, *self._further.values()])

    def cut(self, piece: Columns) -> Columns:
        """The rows up to the end of the comparison; rows are in ascending order of sequences."""
        _, keys, sequences, *_ = piece
        if not sequences or sequences[-1] <= self._boundary:
            return piece
        further = self._further
        first = bisect_right(sequences, self._boundary)
        kept = [True] * first + [
            sequence <= further.get(key, 0) for key, sequence in zip(keys[first:], sequences[first:], strict=True)
        ]
        return [list(compress(column, kept)) for column in piece]
