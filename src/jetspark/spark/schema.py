"""Schemas of streams and buckets, and the conversion of messages into Arrow record batches. Pure."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from jetspark.core.message import CoreMessage
from jetspark.errors import ConfigError
from jetspark.jetstream.wire import parse_time
from jetspark.lake.header_columns import header_columns
from jetspark.lake.reply_subjects import stream_offsets
from jetspark.lake.rows import RAW_SCHEMA, texts

__all__ = [
    "KV_SCHEMA",
    "PROJECTION_SCHEMA",
    "SCHEMA",
    "AnySchema",
    "Columns",
    "arrow_of",
    "check_schema",
    "declared",
    "spark_of",
]

_logger = logging.getLogger("jetspark.spark")

SCHEMA = StructType(
    [
        StructField("subject", StringType()),
        StructField("data", BinaryType()),
        StructField("headers", MapType(StringType(), ArrayType(StringType()))),
        StructField("stream", StringType()),
        StructField("sequence", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("stream_created", TimestampType()),
    ]
)
"""Columns of a stream."""

KV_SCHEMA = StructType(
    [
        StructField("key", StringType()),
        StructField("value", BinaryType()),
        StructField("revision", LongType()),
        StructField("created", TimestampType()),
        StructField("operation", StringType()),
    ]
)
"""Columns of a bucket."""

PROJECTION_SCHEMA = StructType(
    [
        StructField("target", IntegerType()),
        StructField("key", StringType()),
        StructField("sequence", LongType()),
        StructField("reading", IntegerType()),
        StructField("data", BinaryType()),
    ]
)
"""Columns of an application's events, routed to the keys of its projections."""


AnySchema: TypeAlias = "StructType | pa.Schema"
"""A schema of Spark; or of Arrow, as Sail gives it to readers, whose rows must have exactly its types."""


def declared(schema: StructType) -> Any:
    """A schema as the engine takes it from a format. Sail cannot convert the times of Spark's, and takes Arrow's."""
    return to_arrow_schema(schema, timezone="UTC") if "pysail" in sys.modules else schema


def arrow_of(schema: AnySchema) -> pa.Schema:
    """The types of record batches, just as Spark or Sail compares them."""
    return schema if isinstance(schema, pa.Schema) else to_arrow_schema(schema, timezone="UTC")


def spark_of(schema: AnySchema) -> StructType:
    """The same schema in Spark's types."""
    return from_arrow_schema(schema) if isinstance(schema, pa.Schema) else schema


def check_schema(schema: AnySchema) -> AnySchema:
    """Check a user's schema: some of the columns of a stream, in any order.

    Raises:
        ConfigError: A column does not exist, or has another type.
    """
    known = {column.name: column.dataType for column in SCHEMA}
    for column in spark_of(schema):
        if column.name not in known:
            raise ConfigError(f"column {column.name!r}: a stream has {', '.join(known)}")
        if column.dataType.simpleString() != known[column.name].simpleString():
            raise ConfigError(
                f"column {column.name!r} as {column.dataType.simpleString()}: "
                f"expected {known[column.name].simpleString()}"
            )
    return schema


class Columns:
    """Makes record batches of a schema."""

    def __init__(self, schema: AnySchema, *, has_headers: bool, created: str) -> None:
        """``created``: the stream's creation time, in the form of :class:`~jetspark.state.scan.Head`."""
        self.names = tuple(schema.names)
        self._created = parse_time(created) if created else None
        self._has_headers = has_headers
        self.arrow_schema = arrow_of(schema)
        # Headers count as contents: without its data a message has an additional header with the size.
        self.needs_contents = "data" in self.names or (has_headers and "headers" in self.names)

    def of_messages(self, stream: str, messages: Sequence[CoreMessage]) -> pa.RecordBatch:
        """From a consumer's messages.

        Raises:
            ProtocolError: A message has no reply subject with its sequence.
        """
        found = stream_offsets(messages)
        arrays = []
        for field in self.arrow_schema:
            match field.name:
                case "sequence":
                    array = found.sequences
                case "timestamp":
                    array = found.times_us.cast(field.type)
                case _:
                    array = self._plain(field, stream, messages)
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow_schema)

    def of_stored(self, stream: str, messages: Sequence[Any]) -> pa.RecordBatch:
        """From messages read without a consumer."""
        arrays = []
        for field in self.arrow_schema:
            match field.name:
                case "sequence":
                    array = pa.array([each.sequence for each in messages], pa.int64())
                case "timestamp":
                    array = pa.array([each.timestamp for each in messages], field.type)
                case _:
                    array = self._plain(field, stream, messages)
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow_schema)

    @property
    def archive_columns(self) -> list[str]:
        """The columns of an archive that :meth:`of_archived` needs."""
        return [name for name in self.names if name in RAW_SCHEMA.names and (name != "headers" or self._has_headers)]

    def of_archived(self, stream: str, rows: pa.RecordBatch) -> pa.RecordBatch:
        """From rows of an archive."""
        wanted = self.archive_columns
        arrays = [
            rows.column(field.name).cast(field.type) if field.name in wanted else self._plain(field, stream, rows)
            for field in self.arrow_schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow_schema)

    def _plain(self, field: Any, stream: str, messages: Sequence[Any]) -> Any:
        match field.name:
            case "data":
                return pa.array([each.data for each in messages], field.type)
            case "subject":
                return texts([each.subject for each in messages])
            case "stream":
                return pa.repeat(pa.scalar(stream, field.type), len(messages))
            case "stream_created":
                return pa.repeat(pa.scalar(self._created, field.type), len(messages))
            case "headers" if self._has_headers:
                maps, _ = header_columns([each.raw_headers for each in messages])
                if maps.null_count:
                    # The server stores any header block; a publisher's mistake must not end queries.
                    _logger.warning("stream %s: %d header blocks cannot be decoded: null", stream, maps.null_count)
                return maps.cast(field.type)
        return pa.nulls(len(messages), field.type)
