"""Buckets as tables: ``spark.read``, ``readStream``, ``write`` and ``writeStream`` with ``format("jetstream_kv")``.

Here is what Spark sees: options, schema, offsets, partitions and tasks. How a table of one moment is read is in
:mod:`jetspark.state.tables`, how keys are written in :mod:`jetspark.state.store`; what is promised is in
``docs/spark-kv.md``.

A stream of changes is one of messages, so its offsets are those of :mod:`jetspark.spark.offsets`, with the stream
behind the bucket as the only one and the keys as filters; and it is driven like one, by
:mod:`jetspark.spark.following`.
"""

from __future__ import annotations

import logging
import sys
import uuid
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from jetspark.blocking import JetStream
from jetspark.blocking.steps import Runner
from jetspark.errors import ConfigError, Conflict, JetSparkError, UsageError
from jetspark.jetstream.kv import check_bucket, check_filter
from jetspark.spark import lookups, offsets
from jetspark.spark.collector import seldom_collecting
from jetspark.spark.connections import runner_for
from jetspark.spark.following import PATIENCE_S, Follower
from jetspark.spark.kv_rows import ChangeColumns, Rows, changes_of
from jetspark.spark.offsets import Limits, Offset, Position, Sizes
from jetspark.spark.options import Connecting, boolean, choice, count, milliseconds, names, option, read_options, text
from jetspark.spark.reading import RangeReader
from jetspark.spark.schema import KV_SCHEMA
from jetspark.spark.source_options import SourceOptions
from jetspark.state import scan, tables
from jetspark.state.changes import Change, keep_newest
from jetspark.state.deliveries import delivery
from jetspark.state.scan import Head
from jetspark.state.store import store, store_newest

__all__ = ["SCHEMA", "batch_reader", "batch_writer", "stream_reader", "stream_writer"]

SCHEMA = KV_SCHEMA

FORMAT = "jetstream_kv"

# Names that Spark does not document; `test_spark_kv` sees to it that they are there.
QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"

# Where nobody says how many readers there are to be: one for so many revisions, up to a limit.
REVISIONS_PER_PARTITION = 100_000
MAX_PARTITIONS = 8
# An error names so many keys; it has to fit a log.
MAX_NAMED = 20

_INTEGERS = (ByteType, ShortType, IntegerType, LongType)

_logger = logging.getLogger("jetspark.spark")

B = TypeVar("B", bound="BucketOptions")


# ---- options ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions(Connecting):
    """What every use of a bucket needs."""

    bucket: str = option(text, "the bucket; required", default="")
    patience_s: float = option(
        milliseconds,
        "longest wait for a server that is away, before the task or query fails",
        default=60.0,
        name="patienceMs",
    )

    def __post_init__(self) -> None:
        Connecting.__post_init__(self)
        if not self.bucket:
            raise ConfigError(f"{FORMAT}: bucket: expected the name of one")
        check_bucket(self.bucket)

    def connecting(self) -> Connecting:
        """The part that says how to connect, by which connections are kept."""
        return Connecting(**{entry.name: getattr(self, entry.name) for entry in fields(Connecting)})

    def open(self, keys: Sequence[str] = (), *, is_first_contact: bool = False) -> tables.BucketView:
        return lookups.patiently(
            self.connecting(),
            lambda js: Runner(js).run(tables.open_bucket(self.bucket, keys)),
            patience_s=self.patience_s,
            is_first_contact=is_first_contact,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(BucketOptions):
    """The options of ``read``."""

    keys: tuple[str, ...] = option(
        names, "only these keys, with commas between them; `*` is one token, a last `>` the rest", default=()
    )
    history: bool = option(boolean, "every revision the bucket still has, not only the last of each key", default=False)
    as_of: int | None = option(count, "the table as it was when the bucket was at this revision")
    include_deletes: bool | None = option(
        boolean, "rows for deleted and purged keys too; by default with `history` only"
    )
    num_partitions: int | None = option(
        count, "how many tasks read; by default one for a table of the present, else one for each 100,000 revisions"
    )
    fail_on_data_loss: bool = option(
        boolean, "fail when values are gone that the table had at its moment; `false` leaves them out", default=True
    )

    def __post_init__(self) -> None:
        BucketOptions.__post_init__(self)
        for each in self.keys:
            check_filter(each)

    @property
    def with_deletes(self) -> bool:
        return self.history if self.include_deletes is None else self.include_deletes


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions(BucketOptions):
    """The options of ``readStream``."""

    keys: tuple[str, ...] = option(
        names, "only these keys, with commas between them; `*` is one token, a last `>` the rest", default=()
    )
    starting_offsets: str = option(
        text, "where a new query begins: `earliest`, `latest`, or a revision", default="earliest"
    )
    max_offsets_per_trigger: int | None = option(count, "a micro-batch covers at most so many revisions")
    include_deletes: bool = option(boolean, "rows for deletions and purges too", default=True)
    num_partitions: int = option(count, "how many tasks read a micro-batch", default=1)
    accept_filter_change: bool = option(
        boolean,
        "go on from a checkpoint of other `keys`; what those left out before it is never read",
        default=False,
    )

    def __post_init__(self) -> None:
        BucketOptions.__post_init__(self)
        for each in self.keys:
            check_filter(each)
        start = self.starting_offsets
        if start not in ("earliest", "latest") and not (start.isdecimal() and int(start) > 0):
            raise ConfigError(f"{FORMAT}: startingOffsets={start!r}: expected earliest, latest or a revision")

    def for_ranges(self) -> SourceOptions:
        """The same for reading ranges of the stream behind the bucket."""
        ways = {entry.name: getattr(self, entry.name) for entry in fields(Connecting)}
        return SourceOptions(**ways, stream=(f"KV_{self.bucket}",), fetch_timeout_s=self.patience_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions(BucketOptions):
    """The options of ``write`` and ``writeStream``."""

    guard: str = option(
        choice("none", "revision", "sequence"),
        "`none`: what is written last stays; `revision`: write where the column `revision` is still the key's last; "
        "`sequence`: write where the column `sequence` is newer than what is stored",
        default="none",
    )
    on_conflict: str = option(
        choice("fail", "skip"),
        "with `guard=revision`, keys that others have written: fail the job, or leave them out and log how many",
        default="fail",
    )
    batch_size: int = option(
        count, "rows that are brought together before they are written; of one key only the last is", default=10_000
    )

    def __post_init__(self) -> None:
        BucketOptions.__post_init__(self)
        if self.on_conflict == "skip" and self.guard != "revision":
            raise ConfigError(f"{FORMAT}: onConflict=skip with guard={self.guard}: expected guard=revision")


# ---- tables ----------------------------------------------------------------------------------------------------------


def batch_reader(options: Mapping[str, str], schema: StructType) -> DataSourceReader:
    """For ``spark.read``.

    Raises:
        ConfigError: An option or a column cannot be used.
    """
    return TableReader(read_options(ReadOptions, FORMAT, options), _checked(schema))


@dataclass(frozen=True)
class Table(InputPartition):
    """All of it, at the moment it is read."""

    created: str


@dataclass(frozen=True)
class Revisions(InputPartition):
    """Some revisions of which the table is made."""

    created: str
    sequence: int
    wanted: array[int]


@dataclass(frozen=True)
class Range(InputPartition):
    """Whatever the bucket has from one revision to another, both included."""

    created: str
    first: int
    last: int


@dataclass(frozen=True)
class Changes(InputPartition):
    """Some of a bucket's changes."""

    part: scan.Range
    prefix: str


class TableReader(DataSourceReader):
    """A table at one moment, or every revision up to one. Spark pickles it: plain data only."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options, self._schema = options, schema

    def partitions(self) -> list[InputPartition]:
        options = self._options
        bucket = options.open(options.keys, is_first_contact=True)
        if options.history:
            return self._ranges(bucket)
        if options.as_of is None and (options.num_partitions or 1) == 1:
            return [Table(bucket.created)]
        plan = runner_for(options.connecting()).run(
            tables.plan(
                bucket, as_of=options.as_of, include_deletes=options.with_deletes, patience_s=options.patience_s
            )
        )
        if plan.doubtful and options.fail_on_data_loss:
            raise ConfigError(
                f"{FORMAT}: asOf={options.as_of}: the bucket keeps {bucket.history} revisions of a key, and "
                f"{len(plan.doubtful)} keys have been written so often since that their value then may be gone: "
                f"{_some(plan.doubtful)}. Keep more history; failOnDataLoss=false leaves them out"
            )
        if plan.doubtful:
            _logger.warning("asOf=%d: left out, as they may be gone: %s", options.as_of, _some(plan.doubtful))
        number = options.num_partitions or _default_partitions(len(plan.wanted))
        return [Revisions(bucket.created, plan.sequence, part) for part in plan.parts(number)]

    def _ranges(self, bucket: tables.BucketView) -> list[InputPartition]:
        options, state = self._options, bucket.info.state
        last = state.last_sequence if options.as_of is None else options.as_of
        if last > state.last_sequence:
            raise ConfigError(f"{FORMAT}: asOf={last}: the bucket is at {state.last_sequence}")
        number = options.num_partitions or _default_partitions(state.messages)
        ranges = tables.split(max(1, state.first_sequence), last + 1, number)
        return [Range(bucket.created, first, end - 1) for first, end in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        options = self._options
        if not isinstance(partition, Table | Revisions | Range):
            return  # Spark's way to say that there are none
        bucket = options.open(options.keys)
        bucket.check_is(partition.created)
        rows = Rows(bucket.prefix, _arrow(self._schema), with_deletes=options.with_deletes)
        runner, patience_s = runner_for(options.connecting()), options.patience_s
        with seldom_collecting():
            match partition:
                case Table():
                    present = runner.run(tables.snapshot(bucket, patience_s=patience_s))
                    yield from rows.of(iter([list(present.values())]))
                case Range(first=first, last=last):
                    yield from rows.of(runner.pieces(bucket.scan(first, last, patience_s=patience_s)))
                case Revisions(wanted=wanted):
                    if wanted:
                        pieces = runner.pieces(bucket.scan(wanted[0], wanted[-1], patience_s=patience_s))
                        yield from rows.of(_those(pieces, set(wanted)))
                    self._check_complete(bucket, partition, rows.read)

    def _check_complete(self, bucket: tables.BucketView, partition: Revisions, read: int) -> None:
        lost = len(partition.wanted) - read
        if not lost:
            return
        what = (
            f"{lost} of {len(partition.wanted)} values of bucket {bucket.name!r} as of revision {partition.sequence} "
            f"were overwritten while they were read: it keeps {bucket.history} revisions of a key"
        )
        if self._options.fail_on_data_loss:
            raise ConfigError(
                f"{FORMAT}: {what}. Keep more history, or leave numPartitions out to read the present by one task; "
                "failOnDataLoss=false leaves such keys out"
            )
        _logger.warning("%s; they are left out", what)


def _those(pieces: Iterator[list[Any]], wanted: set[int]) -> Iterator[list[Any]]:
    """The messages with these sequences; those that are gone do not come."""
    for messages in pieces:
        found = [message for message in messages if delivery(message).sequence in wanted]
        if found:
            yield found


def _default_partitions(revisions: int) -> int:
    return min(MAX_PARTITIONS, 1 + revisions // REVISIONS_PER_PARTITION)


def _checked(schema: StructType) -> StructType:
    """A schema that has some of the table's columns, in any order."""
    known = {each.name: each.dataType for each in SCHEMA.fields}
    for each in schema.fields:
        if each.name not in known:
            raise ConfigError(f"{FORMAT}: column {each.name!r}: expected some of {', '.join(known)}")
        if each.dataType != known[each.name]:
            raise ConfigError(
                f"{FORMAT}: column {each.name!r} of type {each.dataType.simpleString()}: expected "
                f"{known[each.name].simpleString()}; cast it afterwards"
            )
    return schema


def _arrow(schema: StructType) -> pa.Schema:
    """Just what Spark compares batches with."""
    return to_arrow_schema(schema, timezone="UTC")


def _some(keys: Sequence[str]) -> str:
    shown = ", ".join(map(repr, keys[:MAX_NAMED]))
    return shown if len(keys) <= MAX_NAMED else f"{shown} and {len(keys) - MAX_NAMED} more"


# ---- streams of changes ----------------------------------------------------------------------------------------------


def stream_reader(options: Mapping[str, str], schema: StructType) -> DataSourceStreamReader:
    """For ``spark.readStream``.

    Raises:
        ConfigError: An option or a column cannot be used.
    """
    return ChangeReader(read_options(StreamOptions, FORMAT, options), _checked(schema))


class ChangeReader(Follower):
    """Changes in the order of their revisions. Spark pickles it: plain data only."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        super().__init__(
            options.connecting(),
            filters=options.keys,
            filters_option="keys",
            limits=Limits(rows=options.max_offsets_per_trigger),
            # As many tasks as was said, however much there is.
            sizes=Sizes(min_partitions=options.num_partitions, max_records=sys.maxsize),
            accepts_other_filters=options.accept_filter_change,
        )
        self._options, self._schema = options, schema
        self._prefix: str | None = None
        """In front of every key. Known once the bucket was looked at."""

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        if self._prefix is None:  # a batch that is run again comes before anything else
            self._ask(lookups.PATIENCE_S)
        prefix = self._prefix
        assert prefix is not None
        ranges = offsets.plan(Offset.from_json(start), Offset.from_json(end), self._options.keys)
        return [Changes(_of_subjects(each, prefix), prefix) for each in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Changes):
            return  # Spark's way to say that there are none
        options = self._options
        columns = ChangeColumns(partition.prefix, _arrow(self._schema), with_deletes=options.include_deletes)
        with seldom_collecting():
            batches = RangeReader(options.for_ranges(), partition.part, columns).batches()
            yield from (batch for batch in batches if batch.num_rows)

    def _look(self, js: JetStream) -> list[Head]:
        bucket = Runner(js).run(tables.open_bucket(self._options.bucket))
        self._prefix = bucket.prefix
        return [bucket.head]

    def _starts_of(self, js: JetStream, heads: list[Head]) -> Offset:
        [head] = heads
        start = self._options.starting_offsets
        begin = head.first if start == "earliest" else head.next if start == "latest" else int(start)
        if begin > head.next:
            raise ConfigError(f"{FORMAT}: startingOffsets={begin}: the bucket is at {head.next - 1}")
        return Offset({head.stream: Position(head.created, begin, is_earliest=start == "earliest")})

    def _without(self, missing: dict[str, Position]) -> None:
        known = ", ".join(sorted(each.removeprefix("KV_") for each in missing))
        raise ConfigError(
            f"{FORMAT}: bucket={self._options.bucket!r}: the checkpoint is of {known!r}; start with a new checkpoint"
        )

    def _admit(self, begin: Offset, heads: list[Head], limits: Limits) -> Offset:
        """As for streams; but revisions that are gone are worth no batches and no tasks: a bucket has many of them."""
        [head] = heads
        at = begin.streams[head.stream].next
        if limits.rows is not None and head.next - at > limits.rows:
            try:
                head = replace(head, first=self._first_from(at) or head.next)
            except JetSparkError as error:
                if not lookups.will_pass(error):
                    raise
                _logger.warning("bucket %s: nothing heard: %s", self._options.bucket, error)
                return begin
        end = super()._admit(begin, [head], limits)
        if end is begin:
            return begin
        position = end.streams[head.stream]
        position = replace(position, begin=max(position.begin, min(head.first, position.next)))
        return replace(end, streams={head.stream: position})

    def _first_from(self, at: int) -> int | None:
        options = self._options

        def ask(js: JetStream) -> int | None:
            runner = Runner(js)
            return runner.run(tables.first_from(runner.run(tables.open_bucket(options.bucket, options.keys)), at))

        return self._patiently(ask, PATIENCE_S)


def _of_subjects(part: scan.Range, prefix: str) -> scan.Range:
    """A range of keys as one of the stream behind the bucket."""
    subjects = tuple(f"{prefix}{key}" for key in part.subjects or (">",))
    # A bucket drops old revisions all the time, so none of them is promised.
    return replace(part, subjects=subjects, is_earliest=True)


# ---- writing ---------------------------------------------------------------------------------------------------------


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceWriter:
    """For ``df.write``.

    Raises:
        ConfigError: An option or a column cannot be used, or the mode is not ``append``.
    """
    read = read_options(WriteOptions, FORMAT, options)
    if overwrite:
        raise ConfigError(
            f'{FORMAT}: mode("overwrite") would have to delete what is not in the frame: use mode("append"), which '
            "replaces the values of the keys it has, and rows with operation='delete' for the others"
        )
    _check_columns(read, schema)
    return BatchWriter(read)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
    """For ``df.writeStream``, with the output modes ``append`` and ``complete``: rows replace the values of their keys.

    Raises:
        ConfigError: An option or a column cannot be used.
    """
    read = read_options(WriteOptions, FORMAT, options)
    _check_columns(read, schema)
    return StreamWriter(read)


def _check_columns(options: WriteOptions, schema: StructType) -> None:
    types = {each.name: each.dataType for each in schema.fields}
    allowed: dict[str, tuple[type[DataType], ...]] = {
        "key": (StringType,),
        "value": (BinaryType, StringType),
        "operation": (StringType,),
        "revision": _INTEGERS,
        "sequence": _INTEGERS,
        "created": (TimestampType,),  # of a frame that was read; the bucket has a time of its own
    }
    for name, kind in types.items():
        if name not in allowed:
            raise ConfigError(f"{FORMAT}: column {name!r}: expected some of {', '.join(allowed)}")
        if not isinstance(kind, allowed[name]):
            expected = " or ".join(each.typeName() for each in allowed[name])
            raise ConfigError(f"{FORMAT}: column {name!r} of type {kind.simpleString()}: expected {expected}")
    needed = [
        "key",
        *([] if "operation" in types else ["value"]),
        *([options.guard] if options.guard != "none" else []),
    ]
    if missing := [name for name in needed if name not in types]:
        raise ConfigError(f"{FORMAT}: the frame has no column {missing[0]!r} (guard={options.guard})")
    if "sequence" in types and options.guard != "sequence":
        raise ConfigError(f"{FORMAT}: a column 'sequence' with guard={options.guard}: expected guard=sequence")


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What became of a task's rows."""

    rows: int
    written: int
    dropped: int
    conflicts: int
    conflicting: tuple[str, ...]
    """Some of the keys."""


class BatchWriter(DataSourceArrowWriter):
    """One ``df.write``. Spark pickles it: plain data only."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        # The same in every attempt at a task: what the first wrote, the second recognises.
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        # Within foreachBatch it is a part of a query, whose batches may be run again by another process.
        return _write(self._options, _batch_name() or self._job, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _report(self._options, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What is written stays."""
        _logger.warning("a write to bucket %r was given up; what it has written stays", self._options.bucket)


class StreamWriter(DataSourceStreamArrowWriter):
    """The micro-batches of a query. Made anew for each of them: plain data only."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        name = _batch_name()
        if name is None:
            raise UsageError(
                f"{FORMAT}: Spark did not say which query and batch this is ({QUERY_ID}, {BATCH_ID}): this version of "
                "Spark is not supported"
            )
        return _write(self._options, name, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _report(self._options, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """What is written stays; Spark runs the same batch again."""
        _logger.warning("batch %d was given up; it is written again when the query starts again", batchId)


def _batch_name() -> str | None:
    """Of the micro-batch a task belongs to: the same whenever, and wherever, it is run."""
    context = TaskContext.get()
    if context is None:
        return None
    query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
    return f"{query}:{batch}" if query and batch else None


@seldom_collecting()
def _write(options: WriteOptions, writer: str, batches: Iterator[pa.RecordBatch]) -> Written:
    """The rows of a task, some thousands at a time, in their order.

    With ``guard=revision`` all at once: a second change of the same key would be refused because of the first.
    """
    runner = runner_for(options.connecting())
    rows = written = dropped = 0
    conflicts: list[str] = []
    kept: dict[str, Change] = {}

    def flush() -> None:
        nonlocal written, dropped
        if options.guard == "sequence":
            outcome = runner.run(store_newest(options.bucket, kept.values(), patience_s=options.patience_s))
        else:
            outcome = runner.run(store(options.bucket, kept.values(), writer=writer, patience_s=options.patience_s))
        kept.clear()
        written, dropped = written + outcome.written, dropped + outcome.dropped
        conflicts.extend(outcome.conflicts)

    for batch in batches:
        for change in changes_of(batch, options.guard):
            keep_newest(kept, change)
            if len(kept) >= options.batch_size and options.guard != "revision":
                flush()
        rows += batch.num_rows
    if kept:
        flush()
    if conflicts and options.on_conflict == "fail":
        raise Conflict(options.bucket, tuple(conflicts[:MAX_NAMED]))
    return Written(rows, written, dropped, len(conflicts), tuple(conflicts[:MAX_NAMED]))


def _report(options: WriteOptions, messages: list[WriterCommitMessage | None]) -> None:
    done = [message for message in messages if isinstance(message, Written)]
    conflicts = sum(each.conflicts for each in done)
    if conflicts:
        named = [key for each in done for key in each.conflicting]
        _logger.warning(
            "bucket %r: %d keys had another revision and were not written: %s",
            options.bucket,
            conflicts,
            ", ".join(named[:MAX_NAMED]),
        )
    _logger.info(
        "bucket %r: %d rows, %d keys written, %d not newer",
        options.bucket,
        sum(each.rows for each in done),
        sum(each.written for each in done),
        sum(each.dropped for each in done),
    )
