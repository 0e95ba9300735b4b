"""Reads typed events: planning on the driver, reading in tasks, as :mod:`jetspark.spark.stream.source`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from jetspark.core.gc_tuning import seldom_collecting
from jetspark.spark.stream.source import BatchReader, StreamReader
from jetspark.spark.tasks import shortly
from jetspark.spark.typed.event_options import EventOptions, typed_read
from jetspark.spark.typed.event_rows import arrow_schema

__all__ = ["batch_reader", "schema_of", "stream_reader"]


def schema_of(options: Mapping[str, str]) -> StructType:
    """The columns of a read.

    Raises:
        ConfigError: An option is invalid, or a field of an event has no column type.
    """
    read = typed_read(options)
    return from_arrow_schema(arrow_schema(read.contracts, keeps=read.options.keeps))


def batch_reader(options: Mapping[str, str], schema: StructType) -> DataSourceReader:
    """For ``spark.read``."""
    return EventBatchReader(typed_read(options).options, schema)


def stream_reader(options: Mapping[str, str], schema: StructType) -> DataSourceStreamReader:
    """For ``spark.readStream``."""
    return EventStreamReader(typed_read(options).options, schema)


@shortly
def _read(options: EventOptions, schema: StructType, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    # Imported here: processes that plan need neither.
    from jetspark.spark.engine.app_files import load_app
    from jetspark.spark.stream.reading import RangeReader
    from jetspark.spark.typed.event_options import contracts_of
    from jetspark.spark.typed.event_rows import EventRowMaker

    part = partition.value
    if part is None:  # what Spark makes of a plan without partitions
        return
    app = load_app(options.app, options.app_folder)
    rows = EventRowMaker(app, contracts_of(app, options.type), options, to_arrow_schema(schema, timezone="UTC"), part)
    try:
        with seldom_collecting():
            yield from RangeReader(options, part, rows).batches()
    finally:
        rows.warn()


class EventBatchReader(BatchReader):
    """Reads the requested range of streams as they are at planning time."""

    def __init__(self, options: EventOptions, schema: StructType) -> None:
        super().__init__(options.for_batch(), schema)
        self._typed, self._columns = options, schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._typed, self._columns, partition)


class EventStreamReader(StreamReader):
    """Reads on and on."""

    def __init__(self, options: EventOptions, schema: StructType) -> None:
        super().__init__(options.for_streaming(), schema)
        self._typed, self._columns = options, schema

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        # Offsets name the subjects of the events, by which a changed application is noticed. A task may ask the server
        # for more, and leave out the rest itself: filters with wildcards are slow.
        ranges = [each.value for each in super().partitions(start, end)]
        return [InputPartition(replace(part, subjects=self._typed.subjects)) for part in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._typed, self._columns, partition)
