"""Buckets as tables and as streams of changes: ``spark.read`` and ``readStream`` with ``format("jetstream_kv")``.

This module has the part that Spark sees: schema, offsets, partitions and tasks. :mod:`jetspark.state.tables` reads a
consistent table; ``docs/spark-kv.md`` has the guarantees.

A stream of changes is a stream of messages. Its offsets are those of :mod:`jetspark.spark.offsets`, with the stream of
the bucket as the only stream and the keys as filters; :mod:`jetspark.spark.stream_follower` drives it.
"""

from __future__ import annotations

import datetime
import logging
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from jetspark.blocking import JetStream
from jetspark.blocking.steps import ProcedureRunner
from jetspark.core.gc_tuning import seldom_collecting
from jetspark.errors import ConfigError
from jetspark.lake.hybrid import Archives, HybridHead
from jetspark.lake.reading import ArchiveRoot
from jetspark.spark import offsets
from jetspark.spark.connections import patiently, runner_for
from jetspark.spark.kv.options import FORMAT, ReadOptions, StreamOptions
from jetspark.spark.kv.past import PastRows, PastTable
from jetspark.spark.kv.rows import ChangeColumns, TableRows
from jetspark.spark.offsets import Limits, Offset, Sizes, StreamPosition
from jetspark.spark.options import read_options
from jetspark.spark.schema import KV_SCHEMA as SCHEMA
from jetspark.spark.schema import AnySchema, arrow_of, spark_of
from jetspark.spark.stream.heads import sequence_at
from jetspark.spark.stream.reading import RangeReader
from jetspark.spark.stream_follower import Follower
from jetspark.spark.tasks import shortly
from jetspark.state import tables
from jetspark.state.deliveries import delivery
from jetspark.state.scan import Head, Range

__all__ = ["SCHEMA", "batch_reader", "stream_reader"]

# The default number of readers is one for this many revisions, up to a limit.
REVISIONS_PER_PARTITION = 100_000
MAX_PARTITIONS = 8
# An error names this many keys; it has to fit a log.
MAX_NAMED = 20

_logger = logging.getLogger("jetspark.spark")


def batch_reader(options: Mapping[str, str], schema: AnySchema) -> DataSourceReader:
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
class PastRevisions(InputPartition):
    """Some revisions of an archive and its bucket; all of the range without ``wanted``."""

    part: Range
    prefix: str
    history: int
    wanted: array[int] | None = None


@dataclass(frozen=True)
class RevisionRange(InputPartition):
    """Whatever the bucket has from one revision to another, both included."""

    created: str
    first: int
    last: int


@dataclass(frozen=True)
class Changes(InputPartition):
    """Some of a bucket's changes."""

    part: Range
    prefix: str


class TableReader(DataSourceReader):
    """A table at one moment, or every revision up to one. Spark pickles it: plain data only."""

    def __init__(self, options: ReadOptions, schema: AnySchema) -> None:
        self._options, self._schema = options, schema

    def partitions(self) -> list[InputPartition]:
        options = self._options
        bucket = options.open(options.keys, is_first_contact=True)
        if options.archive is not None:
            root = ArchiveRoot(options.archive, dict(options.archive_options))
            return self._archived(bucket, Archives(root).extend(bucket.head))
        as_of = self._revision(bucket.head)
        if options.history:
            return self._ranges(bucket, as_of)
        if as_of is None and (options.num_partitions or 1) == 1:
            return [Table(bucket.created)]
        plan = runner_for(options.connecting()).run(
            tables.plan(bucket, as_of=as_of, include_deletes=options.with_deletes, patience_s=options.patience_s)
        )
        self._check_doubtful(bucket, plan)
        number = options.num_partitions or _default_partitions(len(plan.wanted))
        return [Revisions(bucket.created, plan.sequence, part) for part in plan.parts(number)]

    def _revision(self, head: Head) -> int | None:
        """The revision that ``asOf`` names, or the last one before its time; None for the present."""
        as_of = self._options.as_of
        if not isinstance(as_of, datetime.datetime):
            return as_of
        return patiently(self._options.connecting(), lambda js: sequence_at(js, head, as_of)) - 1

    def _archived(self, bucket: tables.BucketView, head: Head) -> list[InputPartition]:
        """The table at a moment, or all revisions up to it, from the archive and the bucket."""
        options, as_of = self._options, self._revision(head)
        last = head.next - 1 if as_of is None else as_of
        if last >= head.next:
            raise ConfigError(f"{FORMAT}: asOf={last}: the bucket is at {head.next - 1}")
        if options.history:
            number = options.num_partitions or _default_partitions(last + 1 - head.first)
            parts = tables.split(head.first, last + 1, number)
            return [
                PastRevisions(self._part(head, bucket, first, end), bucket.prefix, bucket.history)
                for first, end in parts
            ]
        table = PastTable(bucket, last)
        # Every key, also those that were not asked for: a sequence without a message of any key is a gap.
        whole = replace(self._part(head, bucket, head.first, head.next), subjects=())
        for _ in RangeReader(options.for_ranges(), whole, table).batches():
            pass
        plan = table.plan(include_deletes=options.with_deletes)
        self._check_doubtful(bucket, plan)
        wanted = plan.parts(options.num_partitions or _default_partitions(len(plan.wanted)))
        return [self._past(head, bucket, part[0], part[-1] + 1, part) for part in wanted if part]

    def _past(
        self, head: Head, bucket: tables.BucketView, first: int, end: int, wanted: array[int] | None = None
    ) -> PastRevisions:
        return PastRevisions(self._part(head, bucket, first, end), bucket.prefix, bucket.history, wanted)

    def _part(self, head: Head, bucket: tables.BucketView, first: int, end: int) -> Range:
        assert isinstance(head, HybridHead)
        part = Range(head.stream, head.created, first, end, bucket.subjects)
        return replace(head.range_of(part), is_kept=True)  # a bucket drops old revisions all the time

    def _check_doubtful(self, bucket: tables.BucketView, plan: tables.TablePlan) -> None:
        options = self._options
        if plan.doubtful and options.fail_on_data_loss:
            raise ConfigError(
                f"{FORMAT}: asOf={plan.sequence}: the bucket keeps {bucket.history} revisions of a key, and "
                f"{len(plan.doubtful)} keys have been written so often since that their value then may be gone: "
                f"{_some(plan.doubtful)}. More history would serve later moments only; failOnDataLoss=false leaves "
                "them out"
            )
        if plan.doubtful:
            _logger.warning(
                "asOf=%d: keys whose revisions may be removed are left out: %s", plan.sequence, _some(plan.doubtful)
            )

    def _ranges(self, bucket: tables.BucketView, as_of: int | None) -> list[InputPartition]:
        options, state = self._options, bucket.info.state
        last = state.last_sequence if as_of is None else as_of
        if last > state.last_sequence:
            raise ConfigError(f"{FORMAT}: asOf={last}: the bucket is at {state.last_sequence}")
        number = options.num_partitions or _default_partitions(state.messages)
        ranges = tables.split(max(1, state.first_sequence), last + 1, number)
        return [RevisionRange(bucket.created, first, end - 1) for first, end in ranges]

    @shortly
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        options = self._options
        if isinstance(partition, PastRevisions):
            yield from self._read_past(partition)
            return
        if not isinstance(partition, Table | Revisions | RevisionRange):
            return  # Spark's way to say that there are none
        bucket = options.open(options.keys)
        bucket.check_is(partition.created)
        rows = TableRows(bucket.prefix, arrow_of(self._schema), with_deletes=options.with_deletes)
        runner, patience_s = runner_for(options.connecting()), options.patience_s
        with seldom_collecting():
            match partition:
                case Table():
                    present = runner.run(tables.snapshot(bucket, patience_s=patience_s))
                    yield from rows.of(iter([list(present.values())]))
                case RevisionRange(first=first, last=last):
                    yield from rows.of(runner.pieces(bucket.scan(first, last, patience_s=patience_s)))
                case Revisions(wanted=wanted):
                    if wanted:
                        pieces = runner.pieces(bucket.scan(wanted[0], wanted[-1], patience_s=patience_s))
                        yield from rows.of(_those(pieces, set(wanted)))
                    self._check_complete(partition.wanted, rows.read, bucket.history)

    def _read_past(self, partition: PastRevisions) -> Iterator[pa.RecordBatch]:
        options, wanted = self._options, partition.wanted
        schema = arrow_of(self._schema)
        rows = PastRows(
            partition.prefix, schema, None if wanted is None else set(wanted), with_deletes=options.with_deletes
        )
        with seldom_collecting():
            batches = RangeReader(options.for_ranges(), partition.part, rows).batches()
            yield from (batch for batch in batches if batch.num_rows)
        if wanted is not None:
            self._check_complete(wanted, rows.read, partition.history)

    def _check_complete(self, wanted: Sequence[int], read: int, history: int) -> None:
        lost = len(wanted) - read
        if not lost:
            return
        what = (
            f"{lost} of {len(wanted)} values of bucket {self._options.bucket!r} were overwritten while they were read: "
            f"it keeps {history} revisions of a key"
        )
        if self._options.fail_on_data_loss:
            raise ConfigError(
                f"{FORMAT}: {what}. Keep more history, or leave numPartitions out to read the present by one task; "
                "failOnDataLoss=false leaves such keys out"
            )
        _logger.warning("%s; they are left out", what)


def _those(pieces: Iterator[list[Any]], wanted: set[int]) -> Iterator[list[Any]]:
    """The messages with these sequences, without removed ones."""
    for messages in pieces:
        found = [message for message in messages if delivery(message).sequence in wanted]
        if found:
            yield found


def _default_partitions(revisions: int) -> int:
    return min(MAX_PARTITIONS, 1 + revisions // REVISIONS_PER_PARTITION)


def _checked(schema: AnySchema) -> AnySchema:
    """A schema that has some of the table's columns, in any order."""
    known = {each.name: each.dataType for each in SCHEMA.fields}
    for each in spark_of(schema).fields:
        if each.name not in known:
            raise ConfigError(f"{FORMAT}: column {each.name!r}: expected some of {', '.join(known)}")
        if each.dataType != known[each.name]:
            raise ConfigError(
                f"{FORMAT}: column {each.name!r} of type {each.dataType.simpleString()}: expected "
                f"{known[each.name].simpleString()}; cast it afterwards"
            )
    return schema


def _some(keys: Sequence[str]) -> str:
    shown = ", ".join(map(repr, keys[:MAX_NAMED]))
    return shown if len(keys) <= MAX_NAMED else f"{shown} and {len(keys) - MAX_NAMED} more"


# ---- streams of changes ----------------------------------------------------------------------------------------------


def stream_reader(options: Mapping[str, str], schema: AnySchema) -> DataSourceStreamReader:
    """For ``spark.readStream``.

    Raises:
        ConfigError: An option or a column cannot be used.
    """
    return ChangeReader(read_options(StreamOptions, FORMAT, options), _checked(schema))


class ChangeReader(Follower):
    """Changes in the order of their revisions. Spark pickles it: plain data only."""

    def __init__(self, options: StreamOptions, schema: AnySchema) -> None:
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
        self._check_repeated(start, end)
        prefix = self._prefix
        assert prefix is not None
        ranges = offsets.plan(Offset.from_json(start), Offset.from_json(end), self._options.keys)
        return [Changes(_of_subjects(each, prefix), prefix) for each in ranges]

    @shortly
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Changes):
            return  # Spark's way to say that there are none
        options = self._options
        columns = ChangeColumns(partition.prefix, arrow_of(self._schema), with_deletes=options.include_deletes)
        with seldom_collecting():
            batches = RangeReader(options.for_ranges(), partition.part, columns).batches()
            yield from (batch for batch in batches if batch.num_rows)

    def _find_heads(self, js: JetStream) -> list[Head]:
        bucket = ProcedureRunner(js).run(tables.open_bucket(self._options.bucket))
        self._prefix = bucket.prefix
        return [bucket.head]

    def _starts_of(self, js: JetStream, heads: list[Head]) -> Offset:
        [head] = heads
        start = self._options.starting_offsets
        begin = head.first if start == "earliest" else head.next if start == "latest" else int(start)
        if begin > head.next:
            raise ConfigError(f"{FORMAT}: startingOffsets={begin}: the bucket is at {head.next - 1}")
        return Offset({head.stream: StreamPosition(head.created, begin, is_earliest=start == "earliest")})

    def _without(self, missing: dict[str, StreamPosition]) -> None:
        known = ", ".join(sorted(each.removeprefix("KV_") for each in missing))
        raise ConfigError(
            f"{FORMAT}: bucket={self._options.bucket!r}: the checkpoint is of {known!r}; start with a new checkpoint"
        )

    def _admit(self, begin: Offset, heads: list[Head], limits: Limits) -> Offset:
        """As for streams; but revisions that are gone are worth no batches and no tasks: a bucket has many of them."""
        [head] = heads
        at = begin.streams[head.stream].next
        if limits.rows is not None and head.next - at > limits.rows:
            head = replace(head, first=self._first_from(at) or head.next)
        end = super()._admit(begin, [head], limits)
        if end is begin:
            return begin
        position = end.streams[head.stream]
        position = replace(position, begin=max(position.begin, min(head.first, position.next)))
        return replace(end, streams={head.stream: position})

    def _first_from(self, at: int) -> int | None:
        options = self._options

        def ask(js: JetStream) -> int | None:
            runner = ProcedureRunner(js)
            return runner.run(tables.first_from(runner.run(tables.open_bucket(options.bucket, options.keys)), at))

        return self._patiently(ask, self._patience_s)


def _of_subjects(part: Range, prefix: str) -> Range:
    """A range of keys as one of the stream behind the bucket."""
    subjects = tuple(f"{prefix}{key}" for key in part.subjects or (">",))
    # A bucket drops old revisions all the time, so none of them is promised.
    return replace(part, subjects=subjects, is_earliest=True)
