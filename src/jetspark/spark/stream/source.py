"""Streams as Spark sources: planning on the driver, and reading in tasks.

Spark creates readers for each plan and pickles them for each task, so they hold options and no open connections.
:mod:`jetspark.spark.stream_follower` drives streaming queries.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from jetspark.blocking import JetStream
from jetspark.core.gc_tuning import seldom_collecting
from jetspark.errors import ConfigError, PermissionDenied
from jetspark.lake.hybrid import Archives, HybridHead
from jetspark.spark.connections import patiently
from jetspark.spark.offsets import Limits, Offset, StreamPosition, admit, plan, position_of
from jetspark.spark.options import read_options
from jetspark.spark.schema import SCHEMA, AnySchema, Columns, check_schema
from jetspark.spark.stream.heads import (
    check_readable,
    check_time_has_come,
    ends_of,
    heads_of,
    is_deleted,
    listed,
    matching,
    starts_of,
)
from jetspark.spark.stream.reading import RangeReader
from jetspark.spark.stream.source_options import SourceOptions
from jetspark.spark.stream_follower import Follower, check_loss, count_from
from jetspark.spark.survey import Count
from jetspark.spark.tasks import shortly
from jetspark.state.scan import Head, Range

__all__ = ["SCHEMA", "batch_reader", "stream_reader"]

_logger = logging.getLogger("jetspark.spark")

FORMAT = "jetstream"
# Named streams that are asked about one by one. More are looked up in the list of the account's streams.
MAX_ASKED = 10
# Opening an archive counts as that many requests.
ARCHIVE_REQUESTS = 10


def batch_reader(options: Mapping[str, str], schema: AnySchema) -> DataSourceReader:
    """For ``spark.read``.

    Raises:
        ConfigError: An option or a column cannot be used.
    """
    read = read_options(SourceOptions, FORMAT, options).for_batch()
    return BatchReader(read, check_schema(schema))


def stream_reader(options: Mapping[str, str], schema: AnySchema) -> DataSourceStreamReader:
    """For ``spark.readStream``.

    Raises:
        ConfigError: An option or a column cannot be used.
    """
    read = read_options(SourceOptions, FORMAT, options).for_streaming()
    return StreamReader(read, check_schema(schema))


def _find_heads(js: JetStream, options: SourceOptions, archives: Archives | None = None) -> list[Head]:
    if options.stream_pattern is None:
        return heads_of(js, options.stream, archives)
    return matching(js, options.stream_pattern)


def _count_from(js: JetStream, heads: Iterable[Head]) -> Count:
    """Counts the messages of streams and their archives."""
    known = {head.stream: head for head in heads}

    def count(stream: str, sequence: int) -> int:
        head = known[stream]
        if isinstance(head, HybridHead):
            return head.count_from(sequence, partial(_in_stream, js, head))
        return count_from(js, stream, sequence)

    return count


def _in_stream(js: JetStream, head: Head, sequence: int) -> int:
    return 0 if is_deleted(head) else count_from(js, head.stream, sequence)


def _with_archives(ranges: Iterable[Range], heads: Iterable[Head]) -> list[Range]:
    """The ranges of a plan as tasks read them."""
    hybrid = {head.stream: head for head in heads if isinstance(head, HybridHead)}
    return [hybrid[part.stream].range_of(part) if part.stream in hybrid else part for part in ranges]


class RangePartition(InputPartition):
    """The range that a task reads."""

    def __init__(self, part: Range) -> None:
        super().__init__(part)


@shortly
def _read(options: SourceOptions, schema: AnySchema, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    part = partition.value
    if part is None:  # what Spark makes of a plan without partitions
        return
    columns = Columns(schema, has_headers=options.include_headers, created=part.created)
    with seldom_collecting():
        yield from RangeReader(options, part, columns).batches()


class BatchReader(DataSourceReader):
    """Reads the requested range of streams as they are at planning time.

    It has no ``pushFilters``. Spark 4.3 keeps filters pushed into a Python source with the loaded DataFrame, not with
    the query: of ``df.where(a).union(df.where(b))`` one side got the other's filters, and a ``df.count()`` after a
    ``df.where(...)`` counted the filtered rows. Options select the same rows correctly.
    """

    def __init__(self, options: SourceOptions, schema: AnySchema) -> None:
        self._options, self._schema = options, schema

    def partitions(self) -> Sequence[InputPartition]:
        ranges = patiently(self._options, self._plan, is_first_contact=True)
        return [RangePartition(part) for part in ranges]

    def _plan(self, js: JetStream) -> list[Range]:
        options, archives = self._options, self._options.archives()
        archives.open(options.stream)
        heads = [archives.extend(head) for head in self._stream_heads(js, archives)]
        if not heads:
            raise ConfigError(f"{options.which}: no stream has such a name; it has to match the whole of it")
        check_readable(js, heads, options.subjects)
        start = starts_of(js, options, heads, "earliest")
        ends = ends_of(js, options, heads)
        check_loss(start, ends, is_allowed=not options.fail_on_data_loss)
        end = admit(start, ends, Limits(), options.sizes, _count_from(js, heads))
        return _with_archives(plan(start, end), heads)

    def _stream_heads(self, js: JetStream, archives: Archives) -> list[Head]:
        """The heads of the streams, without their archives."""
        return _find_heads(js, self._options, archives)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, self._schema, partition)


class StreamReader(Follower):
    """Reads on and on, in batches that are each a function of their two offsets."""

    def __init__(self, options: SourceOptions, schema: AnySchema) -> None:
        super().__init__(
            options,
            filters=options.wanted_subjects,
            filters_option="subjects",
            limits=options.limits,
            sizes=options.sizes,
            accepts_other_filters=options.accept_filter_change,
        )
        self._options, self._schema = options, schema
        self._is_loss_logged = self._is_emptiness_logged = False
        self._pages: float = 1
        """Requests that the list of the account's streams takes, as far as known; infinite without the permission."""
        self._left_out = 0
        """Streams that the last list left out."""
        self._archives = options.archives()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        self._check_repeated(start, end)
        ranges = plan(Offset.from_json(start), Offset.from_json(end), self._options.subjects)
        return [RangePartition(part) for part in _with_archives(ranges, self._heads)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, self._schema, partition)

    def _find_heads(self, js: JetStream) -> list[Head]:
        self._archives.open(self._options.stream)
        return [self._archives.extend(head) for head in self._stream_heads(js)]

    def _messages_from(self, stream: str, sequence: int) -> int:
        ask = super()._messages_from
        for head in self._heads:
            if isinstance(head, HybridHead) and head.stream == stream:
                return head.count_from(sequence, partial(ask, stream))
        return ask(stream, sequence)

    def _stream_heads(self, js: JetStream) -> list[Head]:
        """The present heads of the streams, without their archives."""
        options = self._options
        if not self._is_reached:
            heads = _find_heads(js, options)  # each of them, or an error: a new query must not begin without one
            check_readable(js, heads, options.subjects)
        elif self._is_list_shorter:
            heads = self._listed_heads(js)
        else:
            heads = _find_heads(js, options)
        if not heads and not self._is_emptiness_logged:
            self._is_emptiness_logged = True
            _logger.warning("%s: no stream has such a name yet; waiting for one", self._options.which)
        return heads

    @property
    def _is_list_shorter(self) -> bool:
        named = len(self._options.stream)
        return not named or named > max(MAX_ASKED, self._pages)

    def _listed_heads(self, js: JetStream) -> list[Head]:
        try:
            heads, self._pages, self._left_out = listed(js, self._options, [head.stream for head in self._heads])
        except PermissionDenied:
            if self._options.stream_pattern is not None:
                raise
            self._pages = math.inf
            return _find_heads(js, self._options)
        return heads

    def _requests(self) -> int:
        requests = int(self._pages) + self._left_out if self._is_list_shorter else len(self._options.stream)
        # While messages are missing between archive and stream, each look opens the archive again.
        return requests + ARCHIVE_REQUESTS * self._archives.has_gap

    def _starts_of(self, js: JetStream, heads: list[Head]) -> Offset:
        check_time_has_come(js, self._options, heads)
        return starts_of(js, self._options, heads, "latest")

    def _start_of_added(self, head: Head) -> StreamPosition:
        # `startingOffsets` is for new queries, save where it names this very stream: like Kafka's new partitions.
        bound = self._options.starting_offsets
        named = dict(bound.by_stream).get(head.stream) if bound is not None else None
        return position_of(head, "earliest" if named is None else named)

    def _without(self, missing: dict[str, StreamPosition]) -> None:
        options = self._options
        what = f"{options.which}: the checkpoint also has {', '.join(map(repr, sorted(missing)))}"
        if options.stream_pattern is None:
            raise ConfigError(
                f"{what}, which would never be read to its end; name it again, or start with a new checkpoint"
            )
        if options.fail_on_data_loss:
            raise ConfigError(
                f"{what}, which is deleted or no longer matches; set failOnDataLoss=false to go on without it, or "
                "start with a new checkpoint"
            )
        _logger.warning("%s, which is deleted or no longer matches; the query continues without it", what)

    def _handle_loss(self, begin: Offset, heads: list[Head]) -> None:
        is_allowed = not self._options.fail_on_data_loss
        if not is_allowed or not self._is_loss_logged:
            self._is_loss_logged |= check_loss(begin, heads, is_allowed=is_allowed)
