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
from jetspark.lake.hybrid import Archives, HybridRange
from jetspark.spark.connections import patiently
from jetspark.spark.engine.coverage import Covered
from jetspark.spark.engine.projection_options import FORMAT, ProjectionOptions
from jetspark.spark.options import read_options
from jetspark.spark.schema import PROJECTION_SCHEMA
from jetspark.spark.stream.source import BatchReader, StreamReader
from jetspark.spark.tasks import shortly
from jetspark.state.scan import Head

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
    # Offsets name the subjects of the events, by which a changed application is noticed. A task may ask the server for
    # more, and leave out the rest itself: filters with wildcards are slow.
    parts = [replace(part, subjects=options.subjects) for part in ranges]
    if not isinstance(parts[0], HybridRange):  # which knows it from its plan
        # A task cannot tell whether a removed message was an event, so that is checked here, before tasks read.
        front = patiently(options, partial(_find_head, options=options), patience_s=options.patience_s)
        is_kept = front.kept_from is not None
        parts = [replace(part, is_earliest=part.is_earliest or is_kept) for part in parts]
    if not options.is_stored:
        return [InputPartition((part, Covered(part.start, part.end))) for part in parts]
    from jetspark.spark.engine.reached_positions import check_ranges

    covered = patiently(options, lambda js: check_ranges(js, options, ranges), patience_s=options.patience_s)
    return [InputPartition(each) for each in zip(parts, covered, strict=True)]


def _find_head(js: JetStream, options: ProjectionOptions, archives: Archives | None = None) -> Head:
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
