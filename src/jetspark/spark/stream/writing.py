"""Converts rows into messages: the columns of a frame, the ids of messages, and checks. Needs no connection.

A row becomes (subject, data, header block). Conversion works on whole columns and takes some tenths of a microsecond
for a row.

Ids make it harmless to write rows again. Two different rows must never get the same id, because the stream would drop
the second one silently. So a generated id has the number of the row (``<prefix><row>``) *and* a checksum of subject,
data and headers. If Spark computes a partition again in the same order, all ids are the same, and nothing is stored
twice. In another order, which a shuffle may cause, the ids differ: rows may be stored twice, but none is lost. A
column of ids is used unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat
from typing import Any, NoReturn, Protocol
from zlib import crc32

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from jetspark.core.headers import encode
from jetspark.core.subjects import MAX_SUBJECT_BYTES, validate_subject
from jetspark.errors import ConfigError, InvalidHeader, InvalidSubject
from jetspark.publish.outgoing import Item
from jetspark.spark.tasks import TaskId

__all__ = [
    "HEAD",
    "MAX_HEADER_BYTES",
    "Destination",
    "Encoder",
    "Layout",
    "MessageLimits",
    "RowEncoder",
    "RowLayout",
    "Rows",
    "added_up",
    "digest_of",
    "id_fault",
    "null_value",
]

COLUMNS = ("data", "subject", "headers", "msg_id", "ttl")
# What the source adds to each message. A frame that was read may be written as it is; the copy has its own.
ORIGIN = ("stream", "sequence", "timestamp", "stream_created")

# Subjects that were found good are remembered; this many at most, as a partition may have one for each row.
MAX_KNOWN_SUBJECTS = 100_000

# What the server takes: headers by their size in 16 bits, a TTL in nanoseconds by its 63.
MAX_HEADER_BYTES = 65_535
MAX_TTL_S = 9_223_372_036

_INTEGERS = (ByteType, ShortType, IntegerType, LongType)
_NUMBERS = (*_INTEGERS, FloatType, DoubleType, DecimalType)
HEAD = b"NATS/1.0\r\n"
"""The first line of a header block."""
"""The first line of a header block."""

# Digests of rows are added up, so they are as long as it takes to make no sum of other rows the same by chance.
DIGEST_BYTES = 16


class RowLayout(Protocol):
    """How the rows of a frame become messages: plain data, which Spark pickles."""

    @property
    def stream(self) -> str | None:
        """The stream that stores the rows, if that is known."""

    @property
    def has_own_ids(self) -> bool:
        """True if ids come from the rows, so that another partition or another program may use the same."""

    @property
    def has_ttl(self) -> bool: ...

    def some_subject(self, batch: pa.RecordBatch, partition: int) -> str:
        """The subject of one of the rows."""

    def encoder(
        self, destination: Destination, task_id: TaskId, *, has_ids: bool = True, with_digest: bool = False
    ) -> RowEncoder:
        """The encoder of a task.

        Args:
            has_ids: Give rows ids that are the same in each attempt.
            with_digest: Compute a digest of the rows, which takes about three microseconds for each.
        """


class RowEncoder(Protocol):
    """Makes messages of the rows of a task."""

    @property
    def rows(self) -> int:
        """How many were encoded."""

    @property
    def digest(self) -> int:
        """Sum of the digests of the rows: independent of their order, and sums of partitions can be added."""

    @property
    def refused(self) -> int:
        """How many became dead letters."""

    def encode_all(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Rows]:
        """The messages of all rows, in order.

        Raises:
            ConfigError: A row cannot be a message. It is raised here or while the result is iterated.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which columns a frame has."""

    subject: str | None
    """For all rows; None when it is a column."""
    msg_id: str | None
    """The column with the ids; None when they are made here."""
    has_headers: bool = False
    has_ttl: bool = False
    stream: None = None

    @property
    def has_own_ids(self) -> bool:
        return self.msg_id is not None

    def some_subject(self, batch: pa.RecordBatch, partition: int) -> str:
        if self.subject is not None:
            return self.subject
        subject = batch.column("subject")[0].as_py()
        if subject is None:
            raise ConfigError(f"row 0 of partition {partition}: {null_value('subject')}")
        return str(subject)

    def encoder(
        self, destination: Destination, task_id: TaskId, *, has_ids: bool = True, with_digest: bool = False
    ) -> Encoder:
        prefix = task_id.id_prefix() if has_ids else None
        return Encoder(self, destination, partition=task_id.partition, id_prefix=prefix, with_digest=with_digest)

    @classmethod
    def of(cls, schema: StructType, *, subject: str | None, msg_id_column: str | None) -> Layout:
        """The layout of a frame by its columns.

        Raises:
            ConfigError: A column is missing, has a type that cannot be written, or would be ignored.
        """
        fields = {field.name: field for field in schema.fields}
        if len(fields) < len(schema.fields):
            raise ConfigError(f"jetstream: columns {', '.join(schema.fieldNames())}: expected each name once")
        if msg_id_column is not None:
            if msg_id_column not in fields:
                raise ConfigError(f"jetstream: msgIdColumn={msg_id_column!r}: the frame has no such column")
            if "msg_id" in fields and msg_id_column != "msg_id":
                raise ConfigError(
                    f"jetstream: a column msg_id with msgIdColumn={msg_id_column!r}: expected one of both"
                )
        ids = msg_id_column or ("msg_id" if "msg_id" in fields else None)
        is_read = "stream" in fields and "sequence" in fields
        for name, field in fields.items():
            if name not in COLUMNS and name != ids and not (is_read and name in ORIGIN):
                raise ConfigError(
                    f"jetstream: column {name!r} has no place in a message: leave it out, as "
                    f".select({', '.join(repr(each) for each in fields if each in COLUMNS) or repr('data')}) does, or "
                    f"make it part of data; the sink writes {', '.join(COLUMNS)}"
                )
            _check_type(field, is_id=name == ids)
        if "data" not in fields:
            raise ConfigError("jetstream: no column data: expected one with what the messages carry")
        if subject is None and "subject" not in fields:
            raise ConfigError("jetstream: no column subject: expected one, or the option subject for all rows")
        if subject is not None:
            try:
                validate_subject(subject)
            except InvalidSubject as error:
                raise ConfigError(f"jetstream: option subject: {error}") from None
        return cls(subject=subject, msg_id=ids, has_headers="headers" in fields, has_ttl="ttl" in fields)


def _check_type(field: StructField, *, is_id: bool) -> None:
    expected = ""
    kind = field.dataType
    if is_id:
        if not isinstance(kind, (StringType, *_INTEGERS)):
            expected = "string, or a whole number"
    elif field.name == "data":
        if not isinstance(kind, BinaryType | StringType):
            expected = "binary or string, such as to_json(struct(...))"
    elif field.name == "subject":
        if not isinstance(kind, StringType):
            expected = "string"
    elif field.name == "headers":
        if not _is_headers(kind):
            expected = "map<string,array<string>> or map<string,string>"
    elif field.name == "ttl" and not isinstance(kind, _NUMBERS):
        expected = "a number of seconds"
    if expected:
        raise ConfigError(f"jetstream: column {field.name!r} is {kind.simpleString()}: expected {expected}")


def _is_headers(kind: DataType) -> bool:
    if not isinstance(kind, MapType) or not isinstance(kind.keyType, StringType):
        return False
    value = kind.valueType.elementType if isinstance(kind.valueType, ArrayType) else kind.valueType
    return isinstance(value, StringType)


@dataclass(frozen=True, slots=True)
class Rows:
    """Messages of one Arrow batch."""

    first: int
    """Which row of the partition the first one is, from 0."""
    subjects: Sequence[str] | None
    """None when all have the layout's."""
    data: list[bytes]
    ids: list[bytes]
    """Without the prefix that all ids of the partition have."""
    blocks: list[bytes] | None
    """Header blocks, as they stand in a frame; None when there is nothing to say."""
    subject: str | None = None

    def __len__(self) -> int:
        return len(self.data)

    def items(self) -> Iterator[Item]:
        """As publishers take them."""
        subjects = repeat(self.subject or "") if self.subjects is None else self.subjects
        if self.blocks is None:
            return zip(subjects, self.data, strict=False)
        return zip(subjects, self.data, self.blocks, strict=False)

    def but_for(self, known: set[bytes]) -> Rows:
        """Without those whose ids are known."""
        keep = [number for number, each in enumerate(self.ids) if each not in known]
        if len(keep) == len(self.ids):
            return self
        subjects = self.subjects
        return Rows(
            self.first,
            None if subjects is None else [subjects[number] for number in keep],
            [self.data[number] for number in keep],
            [self.ids[number] for number in keep],
            None if self.blocks is None else [self.blocks[number] for number in keep],
            self.subject,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The stream that messages are for, and its limits."""

    stream: str
    is_stored: Callable[[str], bool]
    """Tells the subjects that the stream stores."""
    max_bytes: int
    """Largest message that the server accepts."""
    max_stream_bytes: int | None = None
    """Largest message that the stream accepts, if it has a limit."""
    is_expected: bool = False
    """Messages name the stream, so that the server refuses them if another one would store them."""


class MessageLimits:
    """The subjects and sizes that a destination accepts."""

    def __init__(self, destination: Destination) -> None:
        self._stream, self._is_stored = destination.stream, destination.is_stored
        self.max_bytes, stream_limit = destination.max_bytes, destination.max_stream_bytes
        """Largest message."""
        self._whose = "the server takes (max_payload)"
        if stream_limit is not None and 0 <= stream_limit < self.max_bytes:
            self.max_bytes = stream_limit
            self._whose = f"stream {self._stream!r} takes (max_message_bytes)"
        self._known_subjects: set[str] = set()

    def subject_faults(self, subjects: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Subjects that are refused, and why; a subject that was found good is not looked at again."""
        for subject in set(subjects) - self._known_subjects:
            try:
                validate_subject(subject)
            except InvalidSubject as error:
                yield subject, str(error)
                continue
            if (size := len(subject.encode())) > MAX_SUBJECT_BYTES:
                yield subject, f"a subject of {size} bytes, {subject[:40]!r}...: expected at most {MAX_SUBJECT_BYTES}"
            elif not self._is_stored(subject):
                yield (
                    subject,
                    f"stream {self._stream!r} does not store subject {subject!r}: add it to the stream's subjects, or "
                    "write such rows with a query of their own",
                )
            else:
                if len(self._known_subjects) >= MAX_KNOWN_SUBJECTS:
                    self._known_subjects.clear()
                self._known_subjects.add(subject)

    def size_fault(self, data: bytes, block: bytes) -> str | None:
        """Why a message is too large, if it is."""
        if len(block) > MAX_HEADER_BYTES:
            return f"headers of {len(block)} bytes: the server takes {MAX_HEADER_BYTES}"
        if len(data) + len(block) > self.max_bytes:
            sizes = f"data of {len(data)} bytes and headers of {len(block)}"
            return f"{sizes} are more than the {self.max_bytes} bytes {self._whose}"
        return None


class Encoder:
    """The rows of one partition, in order, as messages."""

    def __init__(
        self,
        layout: Layout,
        destination: Destination,
        *,
        partition: int,
        id_prefix: str | None,
        with_digest: bool = False,
    ) -> None:
        """
        Args:
            id_prefix: Begins each generated id; None for messages without generated ids.
            with_digest: Compute a digest of the rows, which takes about three microseconds for each.
        """
        self.rows = 0
        self.digest = 0
        self.refused = 0
        self._with_digest = with_digest
        self._layout, self._partition = layout, partition
        self._limits, stream = MessageLimits(destination), destination.stream
        self._head = HEAD + (f"Nats-Expected-Stream: {stream}\r\n".encode() if destination.is_expected else b"")
        self._id_prefix = b"" if layout.msg_id else None if id_prefix is None else id_prefix.encode()
        self._subject_sum = 0
        if layout.subject is not None:
            self._check_subjects([layout.subject])
            self._subject_sum = crc32(layout.subject.encode())

    def encode_all(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Rows]:
        return map(self.encode, batches)

    def encode(self, batch: pa.RecordBatch) -> Rows:
        """The messages of the next rows.

        Raises:
            ConfigError: A row cannot be a message; it says which. None of the batch's rows is returned then.
        """
        layout, count = self._layout, batch.num_rows
        data = self._values(batch, "data", as_type=pa.binary())
        subjects: list[str] | None = None
        sums: Iterator[int] = repeat(self._subject_sum, count)
        if layout.subject is None:
            subjects = self._values(batch, "subject")
            self._check_subjects(subjects)
            sums = map(crc32, self._values(batch, "subject", as_type=pa.binary()))
        extras: list[bytes] | None = None
        if layout.has_headers:
            extras = self._header_lines(batch.column("headers"))
        if layout.has_ttl:
            ttls = self._ttl_lines(batch.column("ttl").to_pylist())
            extras = ttls if extras is None else [a + b for a, b in zip(extras, ttls, strict=True)]
        ids: list[bytes] = []
        if layout.msg_id is not None:
            ids = self._own_ids(batch, layout.msg_id)
        elif self._id_prefix is not None:
            if extras is not None:
                sums = map(crc32, extras, sums)
            places = enumerate(zip(data, sums, strict=True), self.rows)
            ids = [b"%d:%08x" % (row, crc32(each, seed)) for row, (each, seed) in places]
        if self._with_digest:
            self.digest = added_up([self.digest, *self._digests(subjects, data, extras, ids)])
        blocks = self._blocks(count, ids, extras)
        self._check_size(data, blocks)
        rows = Rows(self.rows, subjects, data, ids, blocks, layout.subject)
        self.rows += count
        return rows

    def _digests(
        self, subjects: list[str] | None, data: list[bytes], extras: list[bytes] | None, ids: list[bytes]
    ) -> Iterator[int]:
        """Digest of each row, independent of its number: generated ids, which contain the number, are excluded."""
        layout = self._layout
        parts = zip(
            repeat(layout.subject or "") if subjects is None else subjects,
            repeat(b"") if extras is None else extras,
            ids if layout.msg_id is not None else repeat(b""),
            data,
            strict=False,
        )
        for subject, extra, msg_id, each in parts:
            head = b"%b\0%d\0%b%d\0%b" % (subject.encode(), len(extra), extra, len(msg_id), msg_id)
            yield int.from_bytes(blake2b(head + each, digest_size=DIGEST_BYTES).digest())

    def _blocks(self, count: int, ids: list[bytes], extras: list[bytes] | None) -> list[bytes] | None:
        head = self._head
        if self._id_prefix is not None:
            head += b"Nats-Msg-Id: " + self._id_prefix
            if extras is None:
                return [b"%b%b\r\n\r\n" % (head, each) for each in ids]
            return [b"%b%b\r\n%b\r\n" % (head, each, extra) for each, extra in zip(ids, extras, strict=True)]
        if extras is None:
            return None if head == HEAD else [head + b"\r\n"] * count
        return [b"%b%b\r\n" % (head, extra) for extra in extras]

    def _values(self, batch: pa.RecordBatch, name: str, *, as_type: pa.DataType | None = None) -> list[Any]:
        column = batch.column(name)
        if column.null_count:
            row = next(number for number, value in enumerate(column.is_valid().to_pylist()) if not value)
            self._refuse(row, null_value(name))
        if as_type is not None and column.type != as_type:
            column = column.cast(as_type)
        values: list[Any] = column.to_pylist()
        return values

    def _check_subjects(self, subjects: list[str]) -> None:
        for subject, why in self._limits.subject_faults(subjects):
            self._refuse(subjects.index(subject), why)

    def _own_ids(self, batch: pa.RecordBatch, name: str) -> list[bytes]:
        ids: list[str] = self._values(batch, name, as_type=pa.string())
        for row, each in enumerate(ids):
            if (why := id_fault(each)) is not None:
                self._refuse(row, f"{name} is {each!r}: {why}")
        return [each.encode() for each in ids]

    def _ttl_lines(self, seconds: list[Any]) -> list[bytes]:
        lines = []
        for row, each in enumerate(seconds):
            if each is None:
                lines.append(b"")
                continue
            # The server counts whole seconds and refuses less than one.
            if not 1 <= each <= MAX_TTL_S:
                expected = f"expected 1 second or more, at most {MAX_TTL_S}, or null for none"
                self._refuse(row, f"ttl is {each}: {expected}")
            lines.append(b"Nats-TTL: %ds\r\n" % math.ceil(each))
        return lines

    def _header_lines(self, column: pa.MapArray) -> list[bytes]:
        """The header lines of each row.

        Headers that begin with ``Nats-`` are instructions to the server (expectations, batches, roll-ups). A message
        that was read from a stream still has the instructions of its first publication. They are omitted, because the
        server would obey them again.
        """
        lines = []
        for row, pairs in enumerate(_pairs(column)):
            named = {name: value for name, value in pairs if value is not None and not name.startswith("Nats-")}
            if not named:
                lines.append(b"")
                continue
            try:
                lines.append(encode(named)[len(HEAD) : -2])
            except InvalidHeader as error:
                self._refuse(row, str(error))
        return lines

    def _check_size(self, data: list[bytes], blocks: list[bytes] | None) -> None:
        largest = max(map(len, blocks)) if blocks else 0
        if max(map(len, data)) + largest <= self._limits.max_bytes and largest <= MAX_HEADER_BYTES:
            return
        for row, (each, block) in enumerate(zip(data, blocks or [b""] * len(data), strict=True)):
            if (why := self._limits.size_fault(each, block)) is not None:
                self._refuse(row, why)

    def _refuse(self, row: int, why: str) -> NoReturn:
        raise ConfigError(f"row {self.rows + row} of partition {self._partition}: {why}")


def added_up(digests: Iterable[int]) -> int:
    """The digest of all rows, from those of parts of them."""
    return sum(digests) % (1 << 8 * DIGEST_BYTES)


def digest_of(parts: Iterable[bytes]) -> int:
    """Digest of a row; parts are told apart by their lengths."""
    text = b"".join(b"%d\0%b" % (len(part), part) for part in parts)
    return int.from_bytes(blake2b(text, digest_size=DIGEST_BYTES).digest())


def id_fault(id: str) -> str | None:
    """Why a text cannot be the id of a message; None if it can."""
    if not id or id[0] in " \t" or "\r" in id or "\n" in id:
        return "expected a text of one line that does not begin with a blank"
    return None


def null_value(name: str) -> str:
    return f"{name} is null: leave such rows out, or give them a value"


def _pairs(column: pa.MapArray) -> list[list[tuple[str, Any]]]:
    """Each row's (name, value or values). Through the flat arrays, at a tenth of what ``to_pylist`` takes for maps."""
    offsets = column.offsets.to_pylist()
    keys = column.keys.to_pylist()
    items = column.items
    if pa.types.is_list(items.type):
        inner, flat = items.offsets.to_pylist(), items.values.to_pylist()
        valid = items.is_valid().to_pylist()
        values: list[Any] = [
            flat[inner[number] : inner[number + 1]] if valid[number] else None for number in range(len(items))
        ]
    else:
        values = items.to_pylist()
    pairs = list(zip(keys, values, strict=True))
    is_there = column.is_valid().to_pylist()
    return [pairs[offsets[row] : offsets[row + 1]] if is_there[row] else [] for row in range(len(column))]
