"""Folding events into a bucket from Spark: the bucket's value is the state, and says how far it has come.

The rule, and the invariant that keeps it from losing events, are in :mod:`jetspark.state.fold`: of one write, a key's
events are stored together, by one compare-and-set, or not at all. Spark's own state store is not involved. Per key and
batch a grouped Python function costs Spark 0.2 to 2 ms; this costs microseconds. Three things could break the
invariant.

- *A task takes the events of a key out of order, or in part.* It sorts its rows by sequence first
  (:mod:`jetspark.spark.engine.sorting`), whatever their number, and hands on a key's state after its last row.
- *Two tasks have events of the same key.* Neither can see the other's: they may run one after the other, be repeated,
  run twice at a time. What both know is known to the driver alone, when all have finished. So tasks store nothing.
  They return the values they have come to, and ``commit`` compares their keys: a key of two tasks is an error, with
  nothing stored, and the same rows in other partitions are folded as if nothing had happened. Otherwise the driver
  stores the values, each on the revision its task has loaded.
  :func:`fold` is the way around the driver, for more keys than fit through it: it makes the partitions itself, by a
  hash of the key, so there are no two tasks with the same key, and tasks store themselves. Each row says which
  partition it was made for, so that rows from elsewhere are noticed.
- *Two writes of one micro-batch have different events of the same key* (two writes in ``foreachBatch``). Each value
  says which batch of which query it comes from, and a checksum of its events (:class:`~jetspark.state.fold.Stamp`).

Attempts at a task differ in nothing: without ``fold`` they store nothing, with it they store the same values on the
same revisions. A driver that dies while it stores leaves some keys stored and others not. One that was taken for dead
and comes late is refused by the revisions. Others who write a key between the load and the store: a task folds it
again; the driver, which has no events, drops what the bucket is beyond by now and otherwise fails with
:class:`~jetspark.errors.Conflict`, for the write to be done again.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import IntegerType, LongType, StringType, StructType

from jetspark.core.garbage import seldom_collecting
from jetspark.errors import ConfigError, UsageError
from jetspark.spark.connections import runner_for
from jetspark.spark.engine.sorting import SequenceSort
from jetspark.spark.options import Connecting, choice, count, milliseconds, option, read_options, size, text
from jetspark.spark.tasks import batch_name
from jetspark.state.apply import PATIENCE_S, Folding, store_values
from jetspark.state.changes import Change
from jetspark.state.fold import Fold, States, some_keys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["FoldFormat", "fold"]


def check_apart(parts: Iterable[tuple[int, Iterable[str]]]) -> None:
    """Whether each key is in one part only, given as (partition, keys).

    Raises:
        UsageError: One is in two.
    """
    owner: dict[str, int] = {}
    both: dict[str, tuple[int, int]] = {}
    for partition, keys in parts:
        for key in keys:
            first = owner.setdefault(key, partition)
            if first != partition:
                both.setdefault(key, (first, partition))
    if not both:
        return
    one, other = next(iter(both.values()))
    raise UsageError(
        f"jetstream_fold: events of {some_keys(both)} are in two tasks (partitions {one} and {other}), so neither can "
        'tell what comes first; nothing is stored. Bring them together, with frame.repartition(n, "key") before write '
        "or with jetspark.spark.fold(frame, ...), and write again"
    )


# ---- as a Spark sink -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldOptions(Connecting):
    bucket: str = option(text, "the bucket to fold into; it must exist", default="")
    fold: str = option(
        text, "where the fold is, `package.module:name`: a class without arguments, or an object", default=""
    )
    stored_by: str = option(
        choice("driver", "tasks"),
        "`driver`: when all tasks have finished, and no key is in two of them; `tasks`: by themselves, which needs the "
        "partitions that `jetspark.spark.fold` makes",
        default="driver",
    )
    max_held_rows: int = option(
        count, "rows of a task in memory; what is more is sorted through temporary files", default=1_000_000
    )
    max_held_bytes: int = option(size, "bytes of such rows", default=128 << 20)
    max_keys: int = option(count, "keys of a task, whose states are in memory; more are an error", default=1_000_000)
    max_returned_bytes: int = option(
        size, "bytes of values a task returns to the driver; more are an error", default=256 << 20
    )
    patience_s: float = option(
        milliseconds, "longest wait for a server that is away", default=PATIENCE_S, name="patienceMs"
    )

    def __post_init__(self) -> None:
        Connecting.__post_init__(self)
        for name in ("bucket", "fold"):
            if not getattr(self, name):
                raise ConfigError(f"jetstream_fold: the option {name!r} is missing")
        if self.fold.count(":") != 1:
            raise ConfigError(f"fold={self.fold!r}: expected 'package.module:name'")

    def load(self) -> Fold:
        module_name, _, name = self.fold.partition(":")
        try:
            found: Any = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"fold={self.fold!r}: {error}; is it installed where Spark's workers run?") from error
        made: Fold = found() if isinstance(found, type) else found
        return made

    def folding(self, batch: str | None) -> Folding:
        return Folding(self.bucket, self.load(), batch=batch, check_keys=self._check_keys, patience_s=self.patience_s)

    def _check_keys(self, count: int) -> None:
        if count > self.max_keys:
            raise ConfigError(
                f"maxKeys={self.max_keys}: a task has more keys than that, and holds their states in memory: "
                "make more partitions, or raise it"
            )


class FoldFormat(DataSource):
    """``df.repartition(n, "key").write.format("jetstream_fold")``: columns ``key``, ``sequence``, ``event`` (JSON)."""

    @classmethod
    def name(cls) -> str:
        return "jetstream_fold"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise ConfigError("jetstream_fold: expected mode 'append': a fold goes on from the present state")
        options = read_options(FoldOptions, "jetstream_fold", self.options)
        kinds = {"key": StringType(), "sequence": LongType(), "event": StringType()}
        if options.stored_by == "tasks":
            kinds["partition"] = IntegerType()
        found = {field.name: field.dataType for field in schema.fields}
        if found != kinds:
            wanted = ", ".join(f"{name} {kind.simpleString()}" for name, kind in kinds.items())
            raise ConfigError(f"jetstream_fold: columns {schema.simpleString()}: expected {wanted}")
        return _FoldWriter(options)


def fold(frame: DataFrame, *, partitions: int | None = None, **options: str) -> None:
    """Fold a frame with the columns ``key``, ``sequence`` and ``event`` into a bucket, for any number of keys.

    It brings the events of each key into one of ``partitions`` tasks (by default ``spark.sql.shuffle.partitions``),
    which store what they have folded themselves. The other options are those of the format ``jetstream_fold``, such as
    ``servers``, ``bucket`` and ``fold``. In structured streaming it goes into ``foreachBatch``.

    Raises:
        ConfigError: The frame is a streaming one, or ``partitions`` is below 1.
    """
    from pyspark.sql import functions as F

    if frame.isStreaming:
        raise ConfigError("jetspark.spark.fold: a streaming frame: call it within foreachBatch")
    number = int(frame.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1) if partitions is None else partitions
    if number < 1:
        raise ConfigError(f"partitions={number}: expected 1 or more")
    rows = frame.select(F.col("key").cast("string").alias("key"), "sequence", "event").repartition(number, "key")
    # What Spark itself partitions by. Tasks compare it with where they are.
    rows = rows.withColumn("partition", F.pmod(F.hash("key"), F.lit(number)))
    rows.write.format("jetstream_fold").options(**options, storedBy="tasks").mode("append").save()


@dataclass
class _Folded(WriterCommitMessage):
    """What a task has come to. Spark carries it to the driver."""

    partition: int
    written: int = 0
    dropped: int = 0
    changes: list[Change] = field(default_factory=list)
    """Not stored yet."""
    keys: list[str] = field(default_factory=list)
    """All the task had events of: some may have nothing new, and still be another task's."""


class _FoldWriter(DataSourceArrowWriter):
    def __init__(self, options: FoldOptions) -> None:
        self._options = options

    @seldom_collecting()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        options, (partition, batch) = self._options, _place()
        with SequenceSort(max_rows=options.max_held_rows, max_bytes=options.max_held_bytes) as rows:
            for each in iterator:
                rows.add(_checked(each, partition))
            if not rows.rows:
                return _Folded(partition)
            folding, runner = options.folding(batch), runner_for(options)
            if options.stored_by == "tasks":
                outcome = runner.run(folding.fold_and_store(rows.pieces))
                return _Folded(partition, outcome.written, outcome.dropped)
            states = runner.run(folding.fold(rows.pieces()))
        return self._returned(partition, states)

    def _returned(self, partition: int, states: States) -> _Folded:
        changes = states.changes()
        limit = self._options.max_returned_bytes
        total = sum(len(change.key) + len(change.value) for change in changes)
        if total > limit:
            raise ConfigError(
                f"maxReturnedBytes={limit}: the values of a task have {total} bytes, too many for the driver to store; "
                "nothing is stored. Use jetspark.spark.fold(frame, ...), whose tasks store themselves, or raise it"
            )
        return _Folded(partition, 0, states.dropped, changes, states.names())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks have finished: store what they have come to, if no two have the same key."""
        folded = [message for message in messages if isinstance(message, _Folded)]
        check_apart((each.partition, each.keys) for each in folded)
        changes = [change for each in folded for change in each.changes]
        if changes:
            options = self._options
            runner_for(options).run(store_values(options.bucket, changes, patience_s=options.patience_s))


def _place() -> tuple[int, str | None]:
    """The task's partition, and the micro-batch it is part of, if it is one."""
    context = TaskContext.get()
    return (0 if context is None else context.partitionId()), batch_name()


def _checked(batch: pa.RecordBatch, partition: int) -> pa.RecordBatch:
    """Rows that can be folded, and belong here.

    Raises:
        ConfigError: A value is missing.
        UsageError: A row was made for another partition.
    """
    columns = [batch.column(name) for name in ("key", "sequence", "event")]
    if any(column.null_count for column in columns):
        for key, sequence, event in zip(*(column.to_pylist() for column in columns), strict=True):
            if key is None or sequence is None or event is None:
                raise ConfigError(f"key={key!r}, sequence={sequence}: expected key, sequence and event in every row")
    if "partition" in batch.schema.names:
        strangers = batch.filter(pc.not_equal(batch.column("partition"), partition))
        if strangers.num_rows:
            key, place = (strangers.column(name)[0].as_py() for name in ("key", "partition"))
            raise UsageError(
                f"jetstream_fold: storedBy=tasks, and key {key!r} is in partition {partition} instead of {place}: let "
                "jetspark.spark.fold(frame, ...) make the partitions"
            )
    return pa.RecordBatch.from_arrays(columns, names=["key", "sequence", "event"])
