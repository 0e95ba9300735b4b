"""Streams as Spark sources: what plans, and what reads.

Readers are made anew for each plan, pickled, and unpickled for each task, so they hold options and nothing that is
open. One instance drives a streaming query: it lives as long as the query does, and remembers what it last heard of the
streams.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from jetspark.blocking import JetStream
from jetspark.errors import ConfigError, DataLoss, JetSparkError
from jetspark.spark.collector import seldom_collecting
from jetspark.spark.lookups import PATIENCE_S as START_PATIENCE_S
from jetspark.spark.lookups import ends_of, heads_of, patiently, starts_of, will_pass
from jetspark.spark.offsets import Head, Limits, Offset, Position, Range, admit, check_unchanged, plan
from jetspark.spark.options import read_options
from jetspark.spark.reading import RangeReader
from jetspark.spark.schema import SCHEMA, Columns, check_schema
from jetspark.spark.source_options import SourceOptions

__all__ = ["SCHEMA", "batch_reader", "stream_reader"]

_logger = logging.getLogger("jetspark.spark")

FORMAT = "jetstream"

# Without a trigger Spark asks for the latest offset some eighty times a second. Ten times is soon enough, and what an
# idle query costs the server.
POLL_S = 0.1
# How long a query waits for a server that does not answer before it goes on with what it knows.
PATIENCE_S = 10.0


def batch_reader(options: Mapping[str, str], schema: StructType) -> DataSourceReader:
    """For ``spark.read``.

    Raises:
        ConfigError: An option or a column cannot be used.
    """
    read = read_options(SourceOptions, FORMAT, options).for_batch()
    return BatchReader(read, check_schema(schema))


def stream_reader(options: Mapping[str, str], schema: StructType) -> DataSourceStreamReader:
    """For ``spark.readStream``.

    Raises:
        ConfigError: An option or a column cannot be used.
    """
    read = read_options(SourceOptions, FORMAT, options).for_streaming()
    return StreamReader(read, check_schema(schema))


class RangePartition(InputPartition):
    """What a task reads."""

    def __init__(self, part: Range) -> None:
        super().__init__(part)


def _read(options: SourceOptions, schema: StructType, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    part = partition.value
    if part is None:  # what Spark makes of a plan without partitions
        return
    columns = Columns(schema, has_headers=options.include_headers)
    with seldom_collecting():
        yield from RangeReader(options, part, columns).batches()


class BatchReader(DataSourceReader):
    """Reads from where to where was asked, as of the moment it is planned.

    It has no ``pushFilters``. Spark 4.3 keeps what it pushed into a Python source with the loaded DataFrame, not with
    the query: of ``df.where(a).union(df.where(b))`` one side got the other's filters, and a ``df.count()`` after a
    ``df.where(...)`` counted the filtered rows. Options say the same, and are right.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options, self._schema = options, schema

    def partitions(self) -> Sequence[InputPartition]:
        ranges = patiently(self._options, self._plan)
        return [RangePartition(part) for part in ranges]

    def _plan(self, js: JetStream) -> list[Range]:
        options = self._options
        heads = heads_of(js, options.stream)
        start = starts_of(js, options, heads, "earliest")
        ends = ends_of(js, options, heads)
        _check_loss(start, ends, options)
        return plan(start, admit(start, ends, Limits(), options.sizes), options.subjects)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, self._schema, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads on and on, in batches that are each a function of their two offsets."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options, self._schema = options, schema
        self._heads: list[Head] = []
        self._heads_at = float("-inf")
        self._initial: dict[str, Any] | None = None
        self._target: list[Head] | None = None
        self._is_loss_logged = False

    # ---- called in the one process that drives the query -------------------------------------------------------

    def getDefaultReadLimit(self) -> ReadLimit:
        # The limit of bytes, if there are both, is kept by latestOffset itself: Spark knows one at a time.
        limits = self._options.limits
        if limits.rows is not None:
            return ReadMaxRows(limits.rows)
        if limits.bytes is not None:
            return ReadMaxBytes(limits.bytes)
        return ReadAllAvailable()

    def initialOffset(self) -> dict[str, Any]:
        # Spark asks twice before the first batch, and `latest` must be the same both times.
        if self._initial is None:

            def ask(js: JetStream) -> Offset:
                return starts_of(js, self._options, heads_of(js, self._options.stream), "latest")

            self._initial = patiently(self._options, ask).to_json()
        return self._initial

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._ask(START_PATIENCE_S)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begin = Offset.from_json(start)
        if set(begin.streams) != set(self._options.stream):
            raise ConfigError(
                f"stream={','.join(self._options.stream)!r}: the checkpoint is of {','.join(sorted(begin.streams))!r}; "
                "start with a new checkpoint"
            )
        heads = self._target if self._target is not None else self._wait_for_news(begin)
        check_unchanged(begin, heads)
        self._note_loss(begin, heads)
        end = admit(begin, heads, self._limits(limit), self._options.sizes)
        # Spark compares offsets by their text: what has not moved must be the very same.
        return start if end is begin else end.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        if not self._heads:
            return None
        return _offset(self._heads).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        ranges = plan(Offset.from_json(start), Offset.from_json(end), self._options.subjects)
        return [RangePartition(part) for part in ranges]

    def commit(self, end: dict[str, Any]) -> None:
        pass  # the checkpoint is the one place where the query's position is kept

    def stop(self) -> None:
        pass  # the connection ends with the process

    # ---- called in tasks ---------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, self._schema, partition)

    # ---- small steps -------------------------------------------------------------------------------------------

    def _limits(self, limit: ReadLimit) -> Limits:
        if isinstance(limit, ReadAllAvailable):
            return Limits()
        own = self._options.limits
        if isinstance(limit, ReadMaxRows):
            return Limits(limit.max_rows, own.bytes)
        if isinstance(limit, ReadMaxBytes):
            return Limits(own.rows, limit.max_bytes)
        return own

    def _ask(self, patience_s: float) -> list[Head]:
        self._heads = patiently(self._options, lambda js: heads_of(js, self._options.stream), patience_s=patience_s)
        self._heads_at = time.monotonic()
        return self._heads

    def _wait_for_news(self, begin: Offset) -> list[Head]:
        """What is there now; while nothing is new the server is asked now and then, however often Spark asks us."""
        age_s = time.monotonic() - self._heads_at
        is_known_stale = any(head.next > begin.streams[head.stream].next for head in self._heads)
        if age_s < POLL_S and not is_known_stale:
            time.sleep(POLL_S - age_s)
        elif age_s < POLL_S:
            return self._heads
        try:
            # Blocking for long keeps Spark from stopping the query.
            return self._ask(PATIENCE_S)
        except JetSparkError as error:
            if not will_pass(error) or not self._heads:
                raise
            # An error here would end the query. There is nothing new, and when the server is back there will be.
            _logger.warning("streams %s: nothing heard: %s", ", ".join(self._options.stream), error)
            return [
                Head(head.stream, head.created, head.first, begin.streams[head.stream].next, head.bytes_per_sequence)
                for head in self._heads
            ]

    def _note_loss(self, begin: Offset, heads: list[Head]) -> None:
        if self._options.fail_on_data_loss or not self._is_loss_logged:
            self._is_loss_logged |= _check_loss(begin, heads, self._options)


def _offset(heads: list[Head]) -> Offset:
    return Offset({head.stream: Position(head.created, head.next) for head in heads})


def _check_loss(start: Offset, heads: list[Head], options: SourceOptions) -> bool:
    """Whether something is gone already.

    Raises:
        DataLoss: It is, and that is not allowed.
    """
    is_lost = False
    for head in heads:
        position = start.streams[head.stream]
        wanted = position.next
        if position.is_promised and wanted < min(head.first, head.next):
            is_lost = True
            if options.fail_on_data_loss:
                raise DataLoss(head.stream, wanted, head.first)
            _logger.warning("%s", DataLoss(head.stream, wanted, head.first))
    return is_lost
