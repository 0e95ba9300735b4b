"""Object stores: a stream seen as a folder of files of any size. Objects on the wire (ADR-20 of NATS).

A bucket is a stream ``OBJ_<bucket>``. The content of an object is cut into chunks, which are messages on one subject of
their own, ``$O.<bucket>.C.<nuid>``. Its metadata is one message on ``$O.<bucket>.M.<name in base64>``, written after
the last chunk: it makes the object visible, and names the ``nuid``. Replacing an object writes new chunks under a new
nuid, then new metadata, then removes the old chunks; so a reader sees the one or the other, never a mixture.

Metadata is always written with the sequence it replaces (compare and set). The second of two writers is refused, reads
again, and removes the chunks that it really replaces: no unreferenced chunks stay behind, and a write whose
acknowledgement was lost can be repeated without harm.

Chunks travel over fast ingest if the bucket's stream allows it, each with its own message id (the nuid and an index):
chunks in doubt after the loss of a server are sent again and recognised. The stream keeps ids for its duplicate window
only, and a chunk stored twice would damage the object; so after every such repetition the chunks are counted before
the metadata is written.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from jetspark.core.arguments import explained, flag, instance, text, unfit
from jetspark.core.headers import Headers, HeadersLike
from jetspark.core.numbers import whole
from jetspark.errors import (
    BatchInDoubt,
    ConfigError,
    Conflict,
    ConnectionLost,
    DigestMismatch,
    KeyExists,
    MessageNotFound,
    ObjectNotFound,
    ProtocolError,
    RequestTimeout,
    StreamNameInUse,
    WrongLastSequence,
)
from jetspark.jetstream import wire
from jetspark.jetstream.acks import AckableMessage
from jetspark.jetstream.checks import check_config, check_description, check_fields, check_types
from jetspark.jetstream.config import MAX_REPLICAS, Compression, DeliverPolicy, Placement, Storage, StreamConfig, ruled
from jetspark.jetstream.info import StoredMessage, StreamInfo
from jetspark.jetstream.kv import check_bucket
from jetspark.jetstream.operations import Api, Operation, message_query
from jetspark.jetstream.ordered import OrderedOptions
from jetspark.jetstream.publishing import Expect, publish, publish_headers

__all__ = [
    "Download",
    "ObjectInfo",
    "ObjectLink",
    "ObjectMeta",
    "ObjectStoreConfig",
    "ObjectStoreStatus",
    "Objects",
    "Upload",
]

BytesLike: TypeAlias = bytes | bytearray | memoryview


class BinaryReader(Protocol):
    """A file opened for reading in binary mode, or anything that reads like one."""

    def read(self, size: int, /) -> bytes: ...


class BinaryWriter(Protocol):
    """A file opened for writing in binary mode, or anything that writes like one."""

    def write(self, data: bytes, /) -> Any: ...


DEFAULT_CHUNK_BYTES = 128 * 1024

# Most bytes of a put that wait for acknowledgement. On one machine 16 MiB were about a tenth faster than 8, and 32 not
# clearly better; the server refuses more than 128 MB in one stream's queue.
WINDOW_BYTES = 16 << 20

# Bytes of a fast batch in flight, at two acknowledgements outstanding. Between 1 and 16 MiB a busy machine of two cores
# showed no clear difference, so this is mainly a bound on memory.
FAST_WINDOW_BYTES = 8 << 20

# The server requires an acknowledgement after at most this many messages.
MAX_FLOW = 500

# The level of nats-server 2.14, the first with fast ingest.
FAST_INGEST_API_LEVEL = 4

# Longest time without an answer before a fast batch is given up for the next.
BATCH_TIMEOUT_S = 15.0

# The only chunk of a put that took this long is counted before it becomes visible: a clean-up may have taken it for the
# rest of a dead put. Several chunks are always counted: the bucket may be purged or re-created between them.
LONG_PUT_S = 60.0

# Timeout for removing chunks after the server acknowledged nothing within a put's whole timeout. The request is sent
# all the same: a server that returns receives it.
CLEAN_UP_S = 1.0

# A slow source sends too little to be acknowledged by itself; the server is asked this often, so that the ids of chunks
# in doubt are always recent enough to be recognised.
FLUSH_EVERY_S = 5.0

# A message id and the lines around it, which count against the largest payload too.
ID_HEADER_BYTES = 100

# Bytes read and hashed in one step of a put.
BLOCK_BYTES = 1 << 20

# The same with asyncio, where each step is a visit to another thread: 657 MB/s in steps of this size, 615 in steps of
# 1 MiB, 612 without the thread (medians of six rounds on two cores). Without asyncio a thread for the hash gained
# nothing there: 568 MB/s with it, 582 without.
AHEAD_BYTES = 4 << 20

# Bytes of one request of a get, and so the most that a slow reader has in memory.
READ_AHEAD_BYTES = 16 << 20

# After this many conflicting changes of the metadata a write gives up: the other writer does not stop.
MAX_WRITE_ATTEMPTS = 20

# How often metadata is sent again when it is unknown whether it was stored.
COMMIT_ATTEMPTS = 3

# Total attempts of a read whose object is replaced during the read.
READ_ATTEMPTS = 5

MAX_LINKS = 8

_DIGEST_PREFIX = "SHA-256="


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreConfig:
    """A bucket for objects. ``None`` means "not mentioned", as in :class:`StreamConfig`."""

    bucket: str = field(metadata={"check": lambda _, bucket: check_bucket(bucket)})
    description: str | None = ruled(check=check_description)
    ttl_s: float | None = ruled(low=0.1)
    """Seconds after which an object is removed."""
    max_bytes: int | None = ruled(low=-1)
    """Limit for the whole bucket; a put beyond it is refused."""
    storage: Storage | None = None
    replicas: int | None = ruled(low=1, high=MAX_REPLICAS)
    compression: Compression | None = None
    placement: Placement | None = None
    metadata: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, config: ObjectStoreConfig | str) -> ObjectStoreConfig:
        return check_config(cls, config, name="bucket")

    def to_stream(self, api_level: int = 0) -> StreamConfig:
        """The stream behind the bucket, as every NATS client makes it.

        ``api_level`` is the server's, for a new bucket: where fast ingest is possible it is allowed.
        """
        return StreamConfig(
            name=stream_of(self.bucket),
            description=self.description,
            subjects=[f"$O.{self.bucket}.C.>", f"$O.{self.bucket}.M.>"],
            max_age_s=self.ttl_s,
            max_bytes=self.max_bytes,
            storage=self.storage,
            replicas=self.replicas,
            compression=self.compression,
            placement=self.placement,
            discard="new",
            duplicate_window_s=None if not self.ttl_s else min(self.ttl_s, 120.0),
            allow_rollup=True,
            allow_direct=True,
            allow_batched=True if api_level >= FAST_INGEST_API_LEVEL else None,
            metadata=self.metadata,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectMeta:
    """The owner's description of an object; it can be changed without writing the object again."""

    name: str
    description: str | None = None
    headers: HeadersLike | None = None
    metadata: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        check_object_name(self.name)
        if self.description is not None:
            text("description", self.description)
        Headers(self.headers)  # raises now for headers that could not be sent
        metadata = self.metadata
        if metadata is not None and not (
            isinstance(metadata, Mapping) and all(isinstance(each, str) for pair in metadata.items() for each in pair)
        ):
            raise unfit("metadata", metadata, "a dict of str to str")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectLink:
    """The target of a link: an object, or without ``name`` a whole bucket."""

    bucket: str
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """An object without its content."""

    bucket: str
    name: str
    nuid: str
    """The id of this version of the object: each put has a new one."""
    description: str | None = None
    headers: Headers = field(default_factory=Headers)
    metadata: Mapping[str, str] = field(default_factory=dict)
    size_bytes: int = 0
    chunks: int = 0
    chunk_bytes: int | None = None
    """Size of every chunk but the last, if its writer recorded it."""
    digest: str = ""
    """``SHA-256=`` and the digest in base64."""
    mtime: datetime.datetime | None = None
    """When the bucket stored this metadata."""
    link: ObjectLink | None = None
    is_deleted: bool = False
    sequence: int = 0
    """The stream sequence of the metadata."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of other clients that are not known here; kept when metadata is updated."""

    @property
    def meta(self) -> ObjectMeta:
        """The part that :meth:`ObjectStore.update_meta` changes; ``dataclasses.replace`` makes a changed copy."""
        return ObjectMeta(
            name=self.name, description=self.description, headers=self.headers, metadata=dict(self.metadata)
        )

    def with_meta(self, meta: ObjectMeta) -> ObjectInfo:
        return dataclasses.replace(
            self,
            name=meta.name,
            description=meta.description,
            headers=Headers(meta.headers),
            metadata=dict(meta.metadata or {}),
        )

    def encode(self) -> bytes:
        """The metadata message for the stream."""
        headers: dict[str, list[str]] = {}
        for name, value in self.headers.multi_items():
            headers.setdefault(name, []).append(value)
        options: dict[str, Any] = {}
        if self.link is not None:
            options["link"] = {"bucket": self.link.bucket} | ({"name": self.link.name} if self.link.name else {})
        if self.chunk_bytes is not None:
            options["max_chunk_size"] = self.chunk_bytes
        optional = {
            "description": self.description,
            "headers": headers,
            "metadata": dict(self.metadata),
            "options": options,
        }
        fields: dict[str, Any] = dict(self.extra) | {"name": self.name}
        fields |= {name: content for name, content in optional.items() if content}
        fields |= {
            "bucket": self.bucket,
            "nuid": self.nuid,
            "size": self.size_bytes,
            # Go's client cannot read an empty one. Readers take the time of the message instead.
            "mtime": wire.time_text(self.mtime) if self.mtime is not None else "0001-01-01T00:00:00Z",
            "chunks": self.chunks,
        }
        if self.digest:
            fields["digest"] = self.digest
        if self.is_deleted:
            fields["deleted"] = True
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, mtime: datetime.datetime, sequence: int) -> ObjectInfo:
        """Read a metadata message.

        Raises:
            ProtocolError: The message is not object metadata.
        """
        try:
            fields = dict(json.loads(data))
            options = dict(fields.pop("options", None) or {})
            link = options.get("link")
            fields.pop("mtime", None)
            info = cls(
                bucket=str(fields.pop("bucket")),
                name=str(fields.pop("name")),
                nuid=str(fields.pop("nuid", None) or ""),
                description=fields.pop("description", None) or None,
                headers=Headers(fields.pop("headers", None) or {}),
                metadata=dict(fields.pop("metadata", None) or {}),
                size_bytes=int(fields.pop("size", None) or 0),
                chunks=int(fields.pop("chunks", None) or 0),
                chunk_bytes=options.get("max_chunk_size"),
                digest=str(fields.pop("digest", None) or ""),
                mtime=mtime,
                link=None if not link else ObjectLink(bucket=str(link["bucket"]), name=link.get("name") or None),
                is_deleted=bool(fields.pop("deleted", None)),
                sequence=sequence,
                extra=fields,
            )
            check_types(info)
            if info.link is not None:
                check_types(info.link)
            return info
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"object metadata we cannot read: {error!r} in {data[:80]!r}") from error

    @classmethod
    def of(cls, message: StoredMessage) -> ObjectInfo:
        return cls.decode(message.data, message.timestamp, message.sequence)


def info_of_delivery(message: AckableMessage) -> ObjectInfo:
    """From a consumer's message."""
    metadata = message.metadata
    return ObjectInfo.decode(message.data, metadata.timestamp, metadata.stream_sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreStatus:
    """A bucket's configuration and size."""

    bucket: str
    stream: StreamInfo

    @property
    def bytes(self) -> int:
        """Size of all objects in the bucket, metadata included."""
        return self.stream.state.bytes

    @property
    def ttl_s(self) -> float:
        """Seconds until an object expires; 0 means never."""
        return self.stream.config.max_age_s or 0.0

    @property
    def is_sealed(self) -> bool:
        return bool(self.stream.config.sealed)


def stream_of(bucket: str) -> str:
    return f"OBJ_{check_bucket(bucket)}"


def check_object_name(name: str) -> None:
    """Refuse an empty name, and one that cannot be written as UTF-8."""
    if not text("name", name, "the name of an object"):
        raise ConfigError("name='': expected the name of an object")
    try:
        name.encode()
    except UnicodeEncodeError as error:  # of a file whose name is in another encoding, for instance
        raise ConfigError(
            f"name={name!r}: expected text that can be written in UTF-8, which has no {name[error.start]!r}; "
            "decode its bytes by their own encoding"
        ) from None


def chunk_subject(bucket: str, nuid: str) -> str:
    return f"$O.{bucket}.C.{nuid}"


def meta_subject(bucket: str, name: str) -> str:
    """The subject of metadata; base64 with padding, as every client writes it."""
    check_object_name(name)
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def watch_options(bucket: str, *, updates_only: bool = False) -> OrderedOptions:
    """The ordered consumer that a watch needs; metadata has no history."""
    policy: DeliverPolicy = "new" if flag("updates_only", updates_only) else "last_per_subject"
    return OrderedOptions(filter_subjects=(f"$O.{bucket}.M.>",), deliver_policy=policy)


# ---- content ---------------------------------------------------------------------------------------------------------


class Upload:
    """Cuts input pieces of any size into chunks, and counts and hashes them."""

    def __init__(self, nuid: str, chunk_bytes: int, block_bytes: int = BLOCK_BYTES) -> None:
        chunk_bytes = whole("chunk_bytes", chunk_bytes)
        self.nuid = nuid
        self.chunk_bytes = chunk_bytes
        self.block_bytes = max(block_bytes // chunk_bytes, 1) * chunk_bytes
        """The best input size, for sources with a choice."""
        self.size_bytes = 0
        self.chunks = 0
        self.replaced_nuid = ""
        """The version that the metadata replaced, whose chunks can be removed; empty if none."""
        self._hash = hashlib.sha256()
        self._rest = b""

    def feed(self, data: BytesLike) -> list[bytes]:
        """The chunks that ``data`` completes."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ConfigError(f"source gives {type(data).__name__}: expected bytes (a file opened in binary mode)")
        self._hash.update(data)
        if self._rest:
            data = self._rest + bytes(data)
        elif isinstance(data, bytes) and len(data) == self.chunk_bytes:
            return self._counted([data])
        view = memoryview(data).cast("B") if isinstance(data, memoryview) else memoryview(data)
        whole = len(view) // self.chunk_bytes * self.chunk_bytes
        self._rest = bytes(view[whole:])
        return self._counted([bytes(view[i : i + self.chunk_bytes]) for i in range(0, whole, self.chunk_bytes)])

    def finish(self) -> list[bytes]:
        """The last chunk, if it is shorter than the others."""
        rest, self._rest = self._rest, b""
        return self._counted([rest] if rest else [])

    def info(self, bucket: str, meta: ObjectMeta, now: datetime.datetime) -> ObjectInfo:
        """The metadata to write when every chunk is stored."""
        return ObjectInfo(
            bucket=bucket,
            name=meta.name,
            nuid=self.nuid,
            size_bytes=self.size_bytes,
            chunks=self.chunks,
            chunk_bytes=self.chunk_bytes,
            digest=_DIGEST_PREFIX + base64.urlsafe_b64encode(self._hash.digest()).decode(),
            mtime=now,
        ).with_meta(meta)

    def _counted(self, chunks: list[bytes]) -> list[bytes]:
        self.chunks += len(chunks)
        self.size_bytes += sum(map(len, chunks))
        return chunks


def steps(
    upload: Upload, source: BytesLike | os.PathLike[str] | BinaryReader | Iterable[BytesLike]
) -> Iterator[list[bytes]]:
    """The chunks of a source, some at a time. Each step reads once, and may block as that does.

    A path is opened and closed by the thread that reads it, which may outlive a cancelled put.

    Raises:
        ConfigError: The source has a type without bytes.
    """
    if isinstance(source, os.PathLike):
        with open(source, "rb") as file:
            yield from steps(upload, file)
        return
    for piece in _pieces(source, upload.block_bytes):
        yield upload.feed(piece)
    yield upload.finish()


def _pieces(source: BytesLike | BinaryReader | Iterable[BytesLike], block_bytes: int) -> Iterator[BytesLike]:
    if isinstance(source, bytes | bytearray | memoryview):
        view = memoryview(source).cast("B")
        yield from (view[start : start + block_bytes] for start in range(0, len(view), block_bytes))
    elif callable(getattr(source, "read", None)):
        read: Callable[[int], bytes | None] = source.read  # type: ignore[union-attr]
        while data := read(block_bytes):
            yield data
        if data is None:
            raise ConfigError("source is a file in non-blocking mode: expected one that waits for its data")
    elif isinstance(source, str):
        raise ConfigError("source is a str: expected bytes (text.encode()) or pathlib.Path(text)")
    elif isinstance(source, Iterable):
        yield from source
    else:
        raise ConfigError(f"source is {type(source).__name__}: expected bytes, a path, a binary file or an iterator")


def fast_options(
    config: StreamConfig, upload: Upload, max_payload_bytes: int, timeout_s: float
) -> Mapping[str, Any] | None:
    """The options of fast ingest for the chunks; None if the stream or the chunk size rules it out."""
    limits = [limit for limit in (max_payload_bytes, config.max_message_bytes or 0) if limit > 0]
    if not config.allow_batched or upload.chunk_bytes + ID_HEADER_BYTES > min(limits):
        return None
    # A chunk in doubt must be sent again while its id is still known.
    patience_s = min(timeout_s, (config.duplicate_window_s or 120.0) / 2)
    return {
        "message_ids": True,
        "id_prefix": upload.nuid,
        "max_pending_bytes": WINDOW_BYTES,
        # Acknowledgements come after ``flow`` chunks, few enough to fit into the window.
        "flow": min(MAX_FLOW, max(1, FAST_WINDOW_BYTES // upload.chunk_bytes // 2)),
        "patience_s": patience_s,
        # Time for a second batch when the first is lost.
        "batch_timeout_s": min(BATCH_TIMEOUT_S, patience_s / 2),
        "wait_for_stream_s": patience_s,  # the store was opened, so the stream exists
    }


class Progress:
    """The timeout of a put, which applies to each wait for an acknowledgement."""

    def __init__(self, bucket: str, name: str, timeout_s: float) -> None:
        self.what = f"put of object {name!r} into bucket {bucket!r}"
        self.timeout_s = timeout_s
        self.is_missed = False

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """A context for each wait for the server.

        Raises:
            RequestTimeout: In place of the same error for a chunk, or for a batch of chunks.
        """
        try:
            yield
        except (RequestTimeout, BatchInDoubt) as error:
            self.is_missed = True
            why = f" ({error})" if isinstance(error, BatchInDoubt) else ""
            raise RequestTimeout(self.what + why, self.timeout_s) from error

    def in_flight_wait_s(self, timeout_s: float) -> float:
        """After a failure: seconds to wait for messages on their way; 0 if the server has just let a wait time out."""
        return 0.0 if self.is_missed else timeout_s

    def clean_up_s(self, timeout_s: float, left_s: float) -> float:
        """Seconds to wait for the removal of the chunks, when ``left_s`` of the first wait are left."""
        return max(left_s, min(CLEAN_UP_S, timeout_s))


def write_chunks(file: BinaryWriter, chunks: Iterable[bytes]) -> None:
    for chunk in chunks:
        rest = memoryview(chunk)
        # An unbuffered file may write a part only, and returns its size.
        while isinstance(written := file.write(rest), int) and written < len(rest):  # type: ignore[arg-type]
            rest = rest[written:]


class Download:
    """Checks the chunks read of an object against its metadata."""

    def __init__(self, info: ObjectInfo) -> None:
        self._info = info
        self._hash = hashlib.sha256()
        self.chunks = 0
        self.size_bytes = 0
        typical_bytes = info.chunk_bytes or info.size_bytes // max(info.chunks, 1) or 1
        self._batch = max(READ_AHEAD_BYTES // typical_bytes, 1)

    @property
    def max_messages(self) -> int:
        """Number of chunks to request next; at the end one more than expected, to detect surplus chunks."""
        return min(self._batch, self.missing_chunks + 1)

    @property
    def missing_chunks(self) -> int:
        return self._info.chunks - self.chunks

    @property
    def is_short(self) -> bool:
        return self.missing_chunks > 0

    def feed(self, chunk: bytes) -> bytes:
        """Count a chunk in; returns it.

        Raises:
            DigestMismatch: There are more chunks than expected.
        """
        self.chunks += 1
        self.size_bytes += len(chunk)
        if self.chunks > self._info.chunks:
            raise self._mismatch(f"more than {self._info.chunks} chunks")
        self._hash.update(chunk)
        return chunk

    def finish(self) -> None:
        """Check that the object is complete.

        Raises:
            DigestMismatch: The bytes differ from the object that was put.
        """
        info = self._info
        if self.is_short:
            raise self._mismatch(f"{self.chunks} of {info.chunks} chunks; was it replaced or deleted meanwhile?")
        if self.size_bytes != info.size_bytes:
            raise self._mismatch(f"{self.size_bytes} bytes instead of {info.size_bytes}")
        kind, _, expected = info.digest.partition("=")
        if expected:
            if kind.upper() != "SHA-256":
                raise self._mismatch(f"a digest of kind {kind!r} we cannot compute")
            actual = base64.urlsafe_b64encode(self._hash.digest()).decode()
            if actual.rstrip("=") != expected.rstrip("="):
                raise self._mismatch(f"digest {_DIGEST_PREFIX}{actual} instead of {info.digest}")

    def _mismatch(self, reason: str) -> DigestMismatch:
        return DigestMismatch(self._info.bucket, self._info.name, reason)


def lag_pauses(config: StreamConfig) -> list[float]:
    """Seconds to wait for missing chunks: the answering replica may be slightly behind the leader."""
    return [0.05, 0.2, 1.0] if (config.replicas or 1) > 1 else []


# ---- operations ------------------------------------------------------------------------------------------------------


class Objects:
    """The requests of one bucket, written once for both drivers. Metadata is read from the leader: never stale."""

    def __init__(self, api: Api, config: StreamConfig) -> None:
        self.name = config.name.removeprefix("OBJ_")
        self._api = api
        self._stream = config.name

    def info(self, name: str, *, include_deleted: bool = False) -> Operation[ObjectInfo]:
        flag("include_deleted", include_deleted)
        info, _ = yield from self._last(name)
        if info is None or (info.is_deleted and not include_deleted):
            raise ObjectNotFound(self.name, name)
        return info

    def commit(self, upload: Upload, info: ObjectInfo) -> Operation[ObjectInfo]:
        """Make an object visible, replacing the present one. May be repeated when the outcome is unknown."""
        for _ in range(MAX_WRITE_ATTEMPTS):
            present, sequence = yield from self._last(info.name)
            if present is not None and present.nuid == info.nuid:
                return present  # an earlier attempt, whose acknowledgement was lost
            upload.replaced_nuid = "" if present is None or present.is_deleted else present.nuid
            try:
                return (yield from self._write(info, sequence))
            except WrongLastSequence:
                continue
        raise Conflict(self.name, (info.name,))

    def check_chunks(self, upload: Upload) -> Operation[None]:
        """Count the stored chunks, after chunks were sent again or may have been purged.

        Raises:
            ConnectionLost: Some chunks are stored twice, because their ids had expired; or some are missing.
        """
        subject = chunk_subject(self.name, upload.nuid)
        stored = (yield from self._api.stream_info(self._stream, subject)).state.subjects.get(subject, 0)
        if stored != upload.chunks:
            why = "when the connection was lost" if stored > upload.chunks else "before all were sent: they were purged"
            raise ConnectionLost(f"{upload.chunks} chunks became {stored} {why}; put it again")

    def delete(self, name: str) -> Operation[str]:
        """Returns the nuid whose chunks can be removed."""
        for _ in range(MAX_WRITE_ATTEMPTS):
            info = yield from self.info(name)
            gone = dataclasses.replace(info, is_deleted=True, size_bytes=0, chunks=0, digest="", mtime=None)
            try:
                yield from self._write(gone, info.sequence)
            except WrongLastSequence:
                continue
            return info.nuid
        raise Conflict(self.name, (name,))

    def finish_delete(self, name: str) -> Operation[str]:
        """As :meth:`delete`, after an interrupted attempt that may have deleted it already."""
        try:
            return (yield from self.delete(name))
        except ObjectNotFound:
            return (yield from self.info(name, include_deleted=True)).nuid

    def update_meta(self, name: str, meta: ObjectMeta) -> Operation[ObjectInfo]:
        instance("meta", meta, ObjectMeta)
        info = yield from self.info(name)
        changed = info.with_meta(meta)
        if meta.name == name:
            try:
                return (yield from self._write(changed, info.sequence))
            except WrongLastSequence:
                raise Conflict(self.name, (name,)) from None
        return (yield from self._rename(info, changed))

    def _rename(self, info: ObjectInfo, changed: ObjectInfo) -> Operation[ObjectInfo]:
        """Between the two writes both names share the chunks, which are removed if the old name is replaced or
        deleted."""
        there, sequence = yield from self._last(changed.name)
        is_resumed = False
        if there is not None and not there.is_deleted:
            # It may be from an earlier attempt that was interrupted.
            is_resumed = bool(info.nuid) and (there.nuid, there.link) == (info.nuid, info.link)
            if not is_resumed:
                raise KeyExists(self.name, (changed.name,))
        renamed = yield from self._create(changed, sequence)
        # Up to the sequence read, and no further: the old name may have a new object by now.
        if not (yield from self._remove(info)):
            present, _ = yield from self._last(info.name)
            if present is not None or not is_resumed:  # else another attempt has completed the rename
                yield from self._remove(renamed)
                raise Conflict(self.name, (info.name,))
        return renamed

    def finish_rename(self, name: str, new_name: str) -> Operation[None]:
        """After an interrupted attempt: if both names have the object, remove the old name."""
        old, _ = yield from self._last(name)
        new, _ = yield from self._last(new_name)
        if old is not None and new is not None and old.nuid == new.nuid and not (old.is_deleted or new.is_deleted):
            yield from self._remove(old)

    def _remove(self, info: ObjectInfo) -> Operation[int]:
        """Remove metadata up to the sequence read; returns 0 if it is missing, or newer by now."""
        return (yield from self._api.purge_stream(self._stream, meta_subject(self.name, info.name), info.sequence))

    def add_link(self, name: str, nuid: str, link: ObjectLink, now: datetime.datetime) -> Operation[ObjectInfo]:
        info = ObjectInfo(bucket=self.name, name=name, nuid=nuid, link=link, mtime=now)
        present, sequence = yield from self._last(name)
        if present is not None and not present.is_deleted and present.link is None:
            raise KeyExists(self.name, (name,))
        return (yield from self._create(info, sequence))

    def purge_chunks(self, nuid: str) -> Operation[int]:
        return (yield from self._api.purge_stream(self._stream, chunk_subject(self.name, nuid)))

    def status(self) -> Operation[ObjectStoreStatus]:
        info = yield from self._api.stream_info(self._stream)
        return ObjectStoreStatus(bucket=self.name, stream=info)

    def _create(self, info: ObjectInfo, last_sequence: int) -> Operation[ObjectInfo]:
        """Write metadata for a name without an object."""
        try:
            return (yield from self._write(info, last_sequence))
        except WrongLastSequence:
            raise KeyExists(self.name, (info.name,)) from None

    def _last(self, name: str) -> Operation[tuple[ObjectInfo | None, int]]:
        """The present metadata, and its sequence."""
        query = message_query(last_for=meta_subject(self.name, name))
        try:
            message = yield from self._api.get_message(self._stream, query, direct=False)
        except MessageNotFound:
            return None, 0
        return ObjectInfo.of(message), message.sequence

    def _write(self, info: ObjectInfo, last_sequence: int) -> Operation[ObjectInfo]:
        expect = Expect(last_subject_sequence=last_sequence)
        headers = publish_headers({"Nats-Rollup": "sub"}, None, expect, None)
        ack = yield from publish(meta_subject(self.name, info.name), info.encode(), headers)
        return dataclasses.replace(info, sequence=ack.sequence)


def create_bucket(api: Api, config: ObjectStoreConfig) -> Operation[StreamInfo]:
    """Create a bucket's stream; an existing one with the same configuration is returned."""
    facts = yield from api.facts()
    try:
        return (yield from api.create_stream(config.to_stream(facts.level or 0)))
    except StreamNameInUse:
        # A bucket of another client, or of an older server, lacks only fast ingest, which is optional.
        return (yield from api.create_stream(config.to_stream()))


def resolve(objects: Objects, name: str) -> Operation[tuple[StreamInfo | None, ObjectInfo]]:
    """The object behind a name, through any links, and the stream of its bucket unless it is this one."""
    api, stream = objects._api, None
    info, seen = (yield from objects.info(name)), 0
    while info.link is not None:
        bucket, target = next_link(info, seen)
        if bucket != objects.name:
            stream = yield from api.stream_info(stream_of(bucket))
            objects = Objects(api, stream.config)
        info, seen = (yield from objects.info(target)), seen + 1
    return stream, info


def link_to(target: ObjectInfo) -> ObjectLink:
    """
    Raises:
        ConfigError: The target is deleted, or a link itself.
    """
    instance("target", target, ObjectInfo, "an ObjectInfo, as info() returns it")
    if target.is_deleted:
        raise ConfigError(f"target {target.name!r}: it is deleted")
    if target.link is not None:
        raise ConfigError(f"target {target.name!r}: it is a link itself; link to what it leads to")
    return ObjectLink(bucket=target.bucket, name=target.name)


def next_link(info: ObjectInfo, seen: int) -> tuple[str, str]:
    """Bucket and name of a link's target.

    Raises:
        ConfigError: The link leads to a whole bucket, or through too many links.
    """
    assert info.link is not None
    if info.link.name is None:
        raise ConfigError(f"{info.name!r} is a link to bucket {info.link.bucket!r}: expected one to an object")
    if seen >= MAX_LINKS:
        raise ConfigError(f"{info.name!r}: more than {MAX_LINKS} links in a row")
    return info.link.bucket, info.link.name
