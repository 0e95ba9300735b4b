"""Converts a bucket's messages into Arrow rows, and rows into changes of keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from jetspark.errors import ConfigError
from jetspark.jetstream.acks import AckableMessage
from jetspark.jetstream.info import StoredMessage
from jetspark.jetstream.kv import KVOperation, check_key
from jetspark.lake.reply_subjects import stream_offsets
from jetspark.lake.rows import texts
from jetspark.state.changes import Change
from jetspark.state.tables import operation

__all__ = ["ChangeColumns", "TableRows", "changes_of", "columns"]


def columns(messages: Sequence[Any], prefix_length: int, schema: pa.Schema) -> pa.RecordBatch:
    """The messages as rows; ``schema`` has some of the table's columns, in any order."""
    if isinstance(messages[0], StoredMessage):  # of an archive
        sequences = pa.array([each.sequence for each in messages], pa.int64())
        times_us = pa.array([each.timestamp for each in messages], pa.timestamp("us", "UTC"))
    else:
        found = stream_offsets(messages)
        sequences, times_us = found.sequences, found.times_us
    arrays = []
    for column in schema:
        match column.name:
            case "key":
                values: Any = texts([message.subject[prefix_length:] for message in messages])
            case "value":
                values = [message.data for message in messages]
            case "revision":
                values = sequences
            case "created":
                values = times_us
            case _:
                values = [operation(message) for message in messages]
        arrays.append(values.cast(column.type) if isinstance(values, pa.Array) else pa.array(values, column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class TableRows:
    """Messages into Arrow batches."""

    # Spark's own batches have as many.
    BATCH_ROWS = 10_000

    def __init__(self, prefix: str, schema: pa.Schema, *, with_deletes: bool) -> None:
        self._prefix_length = len(prefix)
        self._schema = schema
        self._with_deletes = with_deletes
        self.read = 0
        """Messages read, also without a row."""

    def of(self, pieces: Iterable[list[AckableMessage]]) -> Iterator[pa.RecordBatch]:
        for messages in pieces:
            self.read += len(messages)
            kept = messages
            if not self._with_deletes:
                kept = [message for message in messages if operation(message) == "put"]
            for at in range(0, len(kept), self.BATCH_ROWS):
                yield columns(kept[at : at + self.BATCH_ROWS], self._prefix_length, self._schema)


class ChangeColumns:
    """Messages of a range into rows, as :class:`~jetspark.spark.stream.reading.RangeReader` wants them made."""

    def __init__(self, prefix: str, schema: pa.Schema, *, with_deletes: bool) -> None:
        self._prefix_length, self._schema, self._with_deletes = len(prefix), schema, with_deletes

    @property
    def needs_contents(self) -> bool:
        return "value" in self._schema.names

    def of_messages(self, stream: str, messages: Sequence[AckableMessage]) -> pa.RecordBatch:
        if not self._with_deletes:
            messages = [message for message in messages if operation(message) == "put"]
        if not messages:
            return pa.RecordBatch.from_pylist([], self._schema)
        return columns(messages, self._prefix_length, self._schema)

    def of_stored(self, stream: str, messages: Sequence[StoredMessage]) -> pa.RecordBatch:
        raise ConfigError(f"stream {stream!r}: a bucket has limits retention, and this one does not")


# ---- rows into changes ----------------------------------------------------------------------------------------------


# The key is part of a line, of which the server takes 4096 bytes. At a longer one it ends the connection, again each
# time that the row is sent.
MAX_KEY_BYTES = 3500

_OPERATIONS: dict[str, KVOperation] = {"put": "put", "delete": "delete", "purge": "purge"}


def changes_of(batch: pa.RecordBatch, guard: str) -> Iterator[Change]:
    """The rows of a batch as changes: the columns ``key``, ``value``, ``operation``, the one the guard is
    named by, and ``stream_created``.

    Raises:
        ConfigError: A row cannot be written.
    """
    number = batch.num_rows

    def column(name: str) -> list[Any]:
        return batch.column(name).to_pylist() if name in batch.schema.names else [None] * number

    guards = column(guard) if guard != "none" else [None] * number
    streams = [0] * number
    if "stream_created" in batch.schema.names:
        streams = batch.column("stream_created").cast(pa.int64()).to_pylist()
    rows = zip(column("key"), column("value"), column("operation"), guards, streams, strict=True)
    for key, value, asked, limit, stream_created in rows:
        what = _OPERATIONS.get(asked or "put")
        if key is None:
            raise ConfigError("a row without a key")
        if len(key) > MAX_KEY_BYTES:
            raise ConfigError(f"key {key[:40]!r}... of {len(key)} bytes: expected at most {MAX_KEY_BYTES}")
        if what is None:
            raise ConfigError(f"key {key!r}: operation {asked!r}: expected put, delete or purge")
        if what == "put" and value is None:
            raise ConfigError(f"key {key!r} has no value: to remove it, say so with operation='delete'")
        if guard != "none" and (limit is None or limit < 0):
            raise ConfigError(f"key {key!r}: {guard} {limit}: expected 0 or more (guard={guard})")
        if stream_created is None:
            raise ConfigError(
                f"key {key!r} has no stream_created: expected when the stream of its sequence was created"
            )
        yield Change(
            check_key(key),
            b"" if what != "put" else value.encode() if isinstance(value, str) else value,
            what,
            limit if guard == "sequence" else None,
            limit if guard == "revision" else None,
            stream_created=stream_created,
        )
