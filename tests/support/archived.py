"""Messages for archives, and tables with them."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

from jetspark.core.headers import readable
from jetspark.core.message import CoreMessage
from jetspark.jetstream.info import StoredMessage
from jetspark.jetstream.wire import time_from_ns
from jetspark.lake.archive import ArchiveTable
from jetspark.lake.parquet_files import DataFileWriter, read_rows
from jetspark.lake.position import ArchivePosition, DataFile, Snapshot, StreamIdentity
from jetspark.lake.rows import messages_of, rows_of

__all__ = [
    "DAY_NS",
    "IDENTITY",
    "NOON_NS",
    "append",
    "block_at",
    "contents",
    "delivered",
    "position_at",
    "rows_in",
    "stored",
    "written",
]

IDENTITY = StreamIdentity("ORDERS", "2026-11-19T10:14:30.123456Z")
NOON_NS = int(datetime.datetime(2026, 11, 19, 12, tzinfo=datetime.UTC).timestamp()) * 1_000_000_000
DAY_NS = 86_400 * 1_000_000_000


def stored(
    sequence: int, *, data: bytes = b"", subject: str = "orders.o-1.paid", block: bytes | None = None, time_ns: int = 0
) -> StoredMessage:
    time_ns = time_ns or NOON_NS + sequence
    return StoredMessage(
        stream=IDENTITY.stream,
        subject=subject,
        sequence=sequence,
        timestamp=time_from_ns(time_ns),
        data=data,
        headers=readable(block),
        raw_headers=block,
        time_ns=time_ns,
    )


def delivered(message: StoredMessage) -> CoreMessage:
    """The same message as a consumer delivers it."""
    reply = f"$JS.ACK.{message.stream}.c.1.{message.sequence}.1.{message.time_ns}.0".encode()
    return CoreMessage(message.subject, message.data, reply, message.raw_headers, None)


def contents(messages: Iterable[StoredMessage]) -> list[tuple[object, ...]]:
    """All that a stream stores of messages, for comparisons."""
    return [
        (each.stream, each.sequence, each.subject, each.raw_headers, each.data, each.time_ns, each.timestamp)
        for each in messages
    ]


def written(
    table: ArchiveTable,
    begin: int,
    end: int,
    *,
    data: bytes = b"",
    missing: Iterable[int] = (),
    file_bytes: int = 1 << 27,
) -> list[DataFile]:
    """Files with the messages from begin to end."""
    gone = set(missing)
    present = [sequence for sequence in range(begin, end) if sequence not in gone]
    messages = [stored(sequence, data=data or b"%d" % sequence, block=block_at(sequence)) for sequence in present]
    with DataFileWriter(table.store, table.identity, begin) as writer:
        for at in range(0, len(messages), 1000):
            writer.write(rows_of(table.identity.stream, messages[at : at + 1000]))
        return writer.finish(end)


def block_at(sequence: int) -> bytes:
    """The headers that :func:`written` gives a message."""
    return b"NATS/1.0\r\nA: %d\r\nA: x\r\n\r\n" % sequence


def position_at(base: Snapshot, end: int, *, epoch: int | None = None) -> ArchivePosition:
    before = base.position
    return ArchivePosition(
        identity=before.identity, first=before.first, next=end, epoch=before.epoch if epoch is None else epoch
    )


def append(table: ArchiveTable, base: Snapshot, count: int, *, data: bytes = b"", epoch: int | None = None) -> Snapshot:
    """Commit the next messages."""
    begin = base.position.next
    files = written(table, begin, begin + count, data=data)
    return table.log.commit(base, position_at(base, begin + count, epoch=epoch), add=files)


def rows_in(table: ArchiveTable, files: Sequence[DataFile]) -> list[StoredMessage]:
    return [message for file in files for rows in read_rows(table.store, file) for message in messages_of(rows)]
