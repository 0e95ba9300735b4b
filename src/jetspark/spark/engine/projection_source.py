"""Reads an application's stream as rows for its projections: planning on the driver, reading in tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from jetspark.blocking import JetStream
from jetspark.core.gc_tuning import seldom_collecting
from jetspark.errors import StreamNotFound
from jetspark.lake.hybrid import Archives, HybridRange
from jetspark.spark.connections import patiently
from jetspark.spark.engine.coverage import Covered
from jetspark.spark.engine.projection_options import FORMAT, ProjectionOptions
from jetspark.spark.options import read_options
from jetspark.spark.schema import PROJECTION_SCHEMA
from jetspark.spark.stream.source import BatchReader, StreamReader
from jetspark.spark.tasks import shortly
from jetspark.state.scan import Head, Range

__all__ = ["batch_reader", "stream_reader"]


def batch_reader(options: Mapping[str, str]) -> DataSourceReader:
    """For ``spark.read``."""
    return ProjectionBatchReader(read_options(ProjectionOptions, FORMAT, options))


def stream_reader(options: Mapping[str, str]) -> DataSourceStreamReader:
    """For ``spark.readStream``."""
    return ProjectionStreamReader(read_options(ProjectionOptions, FORMAT, options))


@shortly
def _read(options: ProjectionOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    # Imported here: processes that plan need neither the application nor its imports.
    from jetspark.spark.engine.app_files import load_same_app
    from jetspark.spark.engine.rows import RouteRows
    from jetspark.spark.stream.reading import RangeReader

    if partition.value is None:  # what Spark makes of a plan without partitions
        return
    part, covered = partition.value
    app = load_same_app(options.app, options.app_folder, options.projections, options.outline)
    rows = RouteRows(app, options.projections, subjects=part.subjects)
    with seldom_collecting():
        yield from RangeReader(options, part, rows).batches()
    yield rows.covered(covered)


def _checked(options: ProjectionOptions, planned: Sequence[InputPartition]) -> list[InputPartition]:
    """The partitions, if the buckets have everything before them."""
    ranges = [each.value for each in planned]
    if not ranges:
        return []
    # A task cannot tell whether a removed message was an event, so that is checked here, before tasks read.
    is_kept = patiently(options, partial(_is_kept, options=options), patience_s=options.patience_s)
    # Offsets name the subjects of the events, by which a changed application is noticed. A task may ask the server for
    # more, and leave out the rest itself: filters with wildcards are slow.
    parts = [_without_checks(replace(part, subjects=options.subjects), is_kept=is_kept) for part in ranges]
    if not options.is_stored:
        return [InputPartition((part, Covered(part.start, part.end))) for part in parts]
    from jetspark.spark.engine.reached_positions import check_ranges

    covered = patiently(options, lambda js: check_ranges(js, options, ranges), patience_s=options.patience_s)
    return [InputPartition(each) for each in zip(parts, covered, strict=True)]


def _without_checks(part: Range, *, is_kept: bool) -> Range:
    """A range whose gaps are no losses, if no event was removed from the stream."""
    if isinstance(part, HybridRange):
        return replace(part, is_kept=is_kept)
    return replace(part, is_earliest=part.is_earliest or is_kept)


def _is_kept(js: JetStream, options: ProjectionOptions) -> bool:
    from jetspark.spark.engine.reached_positions import front_head

    try:
        return front_head(js, options).kept_from is not None
    except StreamNotFound:
        if options.archive is None:
            raise
        return False  # all of it comes from the archive


def _find_head(js: JetStream, options: ProjectionOptions, archives: Archives) -> Head:
    from jetspark.spark.engine.reached_positions import whole_head

    return whole_head(js, options, archives)


class ProjectionBatchReader(BatchReader):
    """Reads from where to where was asked, as of the moment it is planned."""

    def __init__(self, options: ProjectionOptions) -> None:
        super().__init__(options.for_batch(), PROJECTION_SCHEMA)
        self._projecting = options

    def partitions(self) -> Sequence[InputPartition]:
        return _checked(self._projecting, super().partitions())

    def _stream_heads(self, js: JetStream, archives: Archives) -> list[Head]:
        return [_find_head(js, self._projecting, archives)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._projecting, partition)


class ProjectionStreamReader(StreamReader):
    """Reads on and on."""

    def __init__(self, options: ProjectionOptions) -> None:
        super().__init__(options.for_streaming(), PROJECTION_SCHEMA)
        self._projecting = options

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return _checked(self._projecting, super().partitions(start, end))

    def _stream_heads(self, js: JetStream) -> list[Head]:
        return [_find_head(js, self._projecting, self._archives)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._projecting, partition)
