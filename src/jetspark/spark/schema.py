"""The columns of a stream and of a bucket, and how messages become Arrow record batches. Pure."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
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
from jetspark.errors import ConfigError, ProtocolError
from jetspark.jetstream.wire import parse_time
from jetspark.spark.reply_subjects import stream_offsets

__all__ = ["KV_SCHEMA", "PROJECTION_SCHEMA", "SCHEMA", "Columns", "check_schema", "texts"]

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
"""Of a stream."""

KV_SCHEMA = StructType(
    [
        StructField("key", StringType()),
        StructField("value", BinaryType()),
        StructField("revision", LongType()),
        StructField("created", TimestampType()),
        StructField("operation", StringType()),
    ]
)
"""Of a bucket."""

PROJECTION_SCHEMA = StructType(
    [
        StructField("target", IntegerType()),
        StructField("key", StringType()),
        StructField("sequence", LongType()),
        StructField("reading", IntegerType()),
        StructField("data", BinaryType()),
    ]
)
"""Of events on their way to the keys of an application's projections."""


def check_schema(schema: StructType) -> StructType:
    """A schema somebody gave: some of the columns, in any order.

    Raises:
        ConfigError: It has a column there is not, or with another type.
    """
    known = {column.name: column.dataType for column in SCHEMA}
    for column in schema:
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

    def __init__(self, schema: StructType, *, has_headers: bool, created: str) -> None:
        """``created`` is when the stream was, as :class:`~jetspark.state.scan.Head` has it."""
        self.names = tuple(schema.names)
        self._created = parse_time(created) if created else None
        self._has_headers = has_headers
        self.arrow_schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        # Headers are contents too: without the data a message has one more of them, with the size.
        self.needs_contents = "data" in self.names or (has_headers and "headers" in self.names)

    def of_messages(self, stream: str, messages: Sequence[CoreMessage]) -> pa.RecordBatch:
        """From a consumer's messages.

        Raises:
            ProtocolError: One does not say where it was in the stream.
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
        """From messages that were got without a consumer (:class:`~jetspark.StoredMessage`)."""
        arrays = []
        for field in self.arrow_schema:
            match field.name:
                case "sequence":
                    array = pa.array([each.sequence for each in messages], pa.int64())
                case "timestamp":
                    array = pa.array([each.timestamp for each in messages], field.type)
                case "headers" if self._has_headers:
                    array = pa.array([_lists(each.headers) for each in messages], field.type)
                case _:
                    array = self._plain(field, stream, messages)
            arrays.append(array)
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
                return pa.array([_headers(each) for each in messages], field.type)
        return pa.nulls(len(messages), field.type)


def texts(found: list[str]) -> Any:
    """Subjects, or keys, as a column."""
    try:
        return pa.array(found, pa.string())
    except UnicodeEncodeError:
        # A subject is UTF-8 by convention only, and Spark's strings are UTF-8: what is not is shown as U+FFFD.
        return pa.array([text.encode(errors="surrogateescape").decode(errors="replace") for text in found], pa.string())


def _headers(message: CoreMessage) -> list[tuple[str, list[str]]] | None:
    if message.raw_headers is None:
        return []
    try:
        return _lists(message.headers)
    except ProtocolError as error:
        # The server stores any block; one publisher's mistake must not end everybody's query.
        _logger.warning("the headers of a message on %r cannot be read: %s", message.subject, error)
        return None


def _lists(headers: Any) -> list[tuple[str, list[str]]]:
    return [(_utf8(name), [_utf8(value) for value in headers.get_all(name)]) for name in headers]


def _utf8(text: str) -> str:
    return text if text.isascii() else text.encode(errors="surrogateescape").decode(errors="replace")
