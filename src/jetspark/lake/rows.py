"""Messages as rows of an archive, and rows as messages again, byte for byte.

A row keeps what another engine can read, in columns of text, and the stored bytes where that text would lose some of
them: a subject or a header that is not UTF-8, a header block in another form than our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from jetspark.core.headers import encode, readable, with_values
from jetspark.jetstream.info import StoredMessage
from jetspark.lake.header_columns import HEADERS_TYPE, block_column, header_columns, utf8
from jetspark.lake.reply_subjects import stream_offsets, times_us

__all__ = ["RAW_SCHEMA", "TABLE_SCHEMA", "TIMESTAMP_TYPE", "messages_of", "rows_of", "texts"]

TIMESTAMP_TYPE = pa.timestamp("us", "UTC")

RAW_SCHEMA = pa.schema(
    [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("subject", pa.string(), nullable=False),
        pa.field("headers", HEADERS_TYPE),
        pa.field("data", pa.binary(), nullable=False),
        pa.field("timestamp", TIMESTAMP_TYPE, nullable=False),
        pa.field("timestamp_ns", pa.int64(), nullable=False),
        pa.field("stream", pa.string(), nullable=False),
        pa.field("raw_subject", pa.binary()),
        pa.field("raw_headers", pa.binary()),
    ]
)
"""Columns of the data files."""
TABLE_SCHEMA = RAW_SCHEMA.append(pa.field("day", pa.date32()))
"""Columns of the table: the day is in the paths of the files."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def rows_of(stream: str, messages: Sequence[Any]) -> pa.RecordBatch:
    """Messages of a :class:`~jetspark.state.scan.RangeScan`, in their order, as rows of :data:`RAW_SCHEMA`.

    They are a consumer's messages, or :class:`~jetspark.jetstream.info.StoredMessage`.

    Raises:
        ProtocolError: A message has no reply subject with its sequence.
    """
    if not messages:
        return pa.RecordBatch.from_pylist([], RAW_SCHEMA)
    if isinstance(messages[0], StoredMessage):
        sequences = pa.array([each.sequence for each in messages], pa.int64())
        times_ns = pa.array([_time_ns(each) for each in messages], pa.int64())
        blocks = [_block(each) for each in messages]
    else:
        sequences, times_ns = stream_offsets(messages)
        blocks = [each.raw_headers for each in messages]
    subjects = [each.subject for each in messages]
    headers, raw_headers = header_columns(blocks)
    columns = [
        sequences,
        texts(subjects),
        headers,
        pa.array([each.data for each in messages], pa.binary()),
        times_us(times_ns).cast(TIMESTAMP_TYPE),
        times_ns,
        pa.repeat(pa.scalar(stream, pa.string()), len(messages)),
        _raw_subjects(subjects),
        raw_headers,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)


def messages_of(rows: pa.RecordBatch) -> list[StoredMessage]:
    """Rows, with all columns of :data:`RAW_SCHEMA` in any order, as the messages that were stored."""

    def column(name: str) -> Any:
        return rows.column(name).to_pylist()

    blocks = block_column(rows.column("headers"), rows.column("raw_headers"))
    return [
        StoredMessage(
            stream=stream,
            subject=subject if raw_subject is None else raw_subject.decode(errors="surrogateescape"),
            sequence=sequence,
            timestamp=_EPOCH + timedelta(0, 0, time_ns // 1000),
            data=data,
            headers=with_values(dict(pairs)) if stored is None else readable(stored),
            raw_headers=block,
            time_ns=time_ns,
        )
        for stream, subject, raw_subject, sequence, time_ns, data, pairs, stored, block in zip(
            column("stream"),
            column("subject"),
            column("raw_subject"),
            column("sequence"),
            column("timestamp_ns"),
            column("data"),
            column("headers"),
            column("raw_headers"),
            blocks.to_pylist(),
            strict=True,
        )
    ]


def texts(found: Sequence[str]) -> Any:
    """Subjects or keys as a column. They are UTF-8 by convention only; other bytes become U+FFFD."""
    try:
        return pa.array(found, pa.string())
    except UnicodeEncodeError:
        return pa.array([utf8(text) for text in found], pa.string())


def _raw_subjects(subjects: Sequence[str]) -> Any:
    try:
        "".join(subjects).encode()
        return pa.nulls(len(subjects), pa.binary())
    except UnicodeEncodeError:
        raw = [each.encode(errors="surrogateescape") for each in subjects]
        return pa.array(
            [None if bytes_ == utf8(each).encode() else bytes_ for each, bytes_ in zip(subjects, raw, strict=True)],
            pa.binary(),
        )


def _block(message: StoredMessage) -> bytes | None:
    """The header block; of a message made by hand, which has none, that of its headers."""
    if message.raw_headers is None and message.headers:
        return encode(message.headers)
    return message.raw_headers


def _time_ns(message: StoredMessage) -> int:
    if message.time_ns is not None:
        return message.time_ns
    return (message.timestamp - _EPOCH) // _MICROSECOND * 1000
