"""Rows into buckets: ``df.write`` and ``writeStream`` with ``format("jetstream_kv")``.

Keys are written by :mod:`jetspark.state.store`; ``docs/spark-kv.md`` has the guarantees.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
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

from jetspark.core.gc_tuning import seldom_collecting
from jetspark.errors import ConfigError, Conflict, JetSparkError, UsageError
from jetspark.spark.connections import runner_for
from jetspark.spark.kv.options import FORMAT, WriteOptions
from jetspark.spark.kv.rows import changes_of
from jetspark.spark.options import read_options
from jetspark.spark.tasks import BATCH_ID, QUERY_ID, TaskFailed, batch_name, is_final, raise_failure
from jetspark.state.changes import Change, keep_newest
from jetspark.state.store import store, store_newest

__all__ = ["batch_writer", "stream_writer"]

# An error names this many keys; it has to fit a log.
MAX_NAMED = 20

_INTEGERS = (ByteType, ShortType, IntegerType, LongType)

_logger = logging.getLogger("jetspark.spark")


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
    return BucketBatchWriter(read)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
    """For ``df.writeStream``, with the output modes ``append`` and ``complete``: rows replace the values of their keys.

    Raises:
        ConfigError: An option or a column cannot be used.
    """
    read = read_options(WriteOptions, FORMAT, options)
    _check_columns(read, schema)
    return BucketStreamWriter(read)


def _check_columns(options: WriteOptions, schema: StructType) -> None:
    types = {each.name: each.dataType for each in schema.fields}
    allowed: dict[str, tuple[type[DataType], ...]] = {
        "key": (StringType,),
        "value": (BinaryType, StringType),
        "operation": (StringType,),
        "revision": _INTEGERS,
        "sequence": _INTEGERS,
        "stream_created": (TimestampType,),
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
    for name in ("sequence", "stream_created"):
        if name in types and options.guard != "sequence":
            raise ConfigError(f"{FORMAT}: a column {name!r} with guard={options.guard}: expected guard=sequence")


@dataclass(frozen=True)
class BucketWritten(WriterCommitMessage):
    """Counts of a task's rows."""

    rows: int
    written: int
    dropped: int
    conflicts: int
    conflicting: tuple[str, ...]
    """Some of the keys."""


class BucketBatchWriter(DataSourceArrowWriter):
    """One ``df.write``. Spark pickles it: plain data only."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        # The same in every attempt at a task: what the first wrote, the second recognises.
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        # Within foreachBatch it is a part of a query, whose batches may be run again by another process.
        return _write(self._options, batch_name() or self._job, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        raise_failure(messages)
        _report(self._options, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Written keys stay."""
        _logger.warning("write to bucket %r failed; the keys it has written stay", self._options.bucket)


class BucketStreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a query. Spark creates it for each batch and pickles it: plain data only."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        name = batch_name()
        if name is None:
            raise UsageError(
                f"{FORMAT}: Spark did not say which query and batch this is ({QUERY_ID}, {BATCH_ID}): this version of "
                "Spark is not supported"
            )
        return _write(self._options, name, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        raise_failure(messages)
        _report(self._options, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Written keys stay; Spark runs the same batch again."""
        _logger.warning("batch %d failed; it is written again when the query restarts", batchId)


def _write(options: WriteOptions, writer: str, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
    """Write the rows of a task. An invalid row ends the write; errors of the bucket are not retried."""
    try:
        written = _write_all(options, writer, batches)
    except JetSparkError as error:
        if not is_final(error):
            raise
        if isinstance(error, ConfigError):
            raise error.with_traceback(None) from None
        return TaskFailed(error)
    if written.conflicts and options.on_conflict == "fail":
        return TaskFailed(Conflict(options.bucket, written.conflicting))
    return written


@seldom_collecting()
def _write_all(options: WriteOptions, writer: str, batches: Iterator[pa.RecordBatch]) -> BucketWritten:
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
    return BucketWritten(rows, written, dropped, len(conflicts), tuple(conflicts[:MAX_NAMED]))


def _report(options: WriteOptions, messages: list[WriterCommitMessage | None]) -> None:
    done = [message for message in messages if isinstance(message, BucketWritten)]
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
