"""Key-value buckets: a stream seen as a map. What a bucket, a key and an entry are on the wire (ADR-8 of NATS).

A bucket is a stream ``KV_<bucket>`` with a subject ``$KV.<bucket>.<key>`` for each key; a revision is a sequence of it.
Deleting writes a marker, purging writes a marker that also removes what was before.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jetspark.core.headers import Headers
from jetspark.errors import (
    ConfigError,
    Conflict,
    KeyExists,
    KeyNotFound,
    MessageNotFound,
    ProtocolError,
    WrongLastSequence,
)
from jetspark.jetstream.acks import AckableMessage
from jetspark.jetstream.config import (
    Compression,
    DeliverPolicy,
    Placement,
    Republish,
    Storage,
    StreamConfig,
    StreamSource,
    SubjectTransform,
    check_name,
)
from jetspark.jetstream.info import StoredMessage, StreamInfo
from jetspark.jetstream.operations import Api, Request, message_query
from jetspark.jetstream.operations import Operation as Requests
from jetspark.jetstream.ordered import OrderedOptions
from jetspark.jetstream.publishing import Expect, publish, publish_headers, read_pub_ack

__all__ = [
    "Bucket",
    "KVConfig",
    "KVEntry",
    "KVStatus",
    "Operation",
    "Writes",
    "check_filter",
    "check_key",
    "subject_of",
]

Operation: TypeAlias = Literal["put", "delete", "purge"]

MAX_HISTORY = 64

_is_bucket = re.compile(r"[a-zA-Z0-9_-]+").fullmatch
_is_key = re.compile(r"[-/_=a-zA-Z0-9]+(?:\.[-/_=a-zA-Z0-9]+)*").fullmatch
_is_filter = re.compile(r"(?:(?:[-/_=a-zA-Z0-9]+|\*)\.)*(?:[-/_=a-zA-Z0-9]+|\*|>)").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    """A bucket. ``None`` means "not mentioned", as in :class:`StreamConfig`."""

    bucket: str
    description: str | None = None
    history: int | None = None
    """Revisions kept of each key, 1 to 64; the server's default is 1."""
    ttl_s: float | None = None
    """Every entry goes away after so long."""
    limit_marker_ttl_s: float | None = None
    """Lets single keys have a TTL (needs nats-server 2.11): when one goes away, a marker stays for so long, so that
    watchers see it.
    """
    max_bytes: int | None = None
    max_value_bytes: int | None = None
    storage: Storage | None = None
    replicas: int | None = None
    compression: Compression | None = None
    placement: Placement | None = None
    republish: Republish | None = None
    mirror: StreamSource | None = None
    """Another bucket to copy, named by its stream (``KV_<bucket>``) or its bucket name."""
    sources: Sequence[StreamSource] | None = None
    allow_atomic: bool | None = None
    """Lets several keys be written together or not at all (needs nats-server 2.12)."""
    metadata: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        check_bucket(self.bucket)
        if self.history is not None and not 1 <= self.history <= MAX_HISTORY:
            raise ConfigError(f"history={self.history}: expected 1 to {MAX_HISTORY}")
        if self.limit_marker_ttl_s is not None and self.limit_marker_ttl_s < 1:
            raise ConfigError(f"limit_marker_ttl_s={self.limit_marker_ttl_s}: expected 1 second or more")

    def to_stream(self, api_level: int = 0) -> StreamConfig:
        """The stream behind the bucket, as every NATS client makes it.

        ``api_level`` is the server's, for a new bucket: where transactions are possible they are allowed, unless the
        configuration says otherwise.
        """
        duplicate_window_s = None if not self.ttl_s else min(self.ttl_s, 120.0)
        is_mirror = self.mirror is not None
        return StreamConfig(
            name=f"KV_{self.bucket}",
            description=self.description,
            subjects=None if is_mirror else [f"$KV.{self.bucket}.>"],
            max_messages_per_subject=1 if self.history is None else self.history,
            max_bytes=self.max_bytes,
            max_age_s=self.ttl_s,
            max_message_bytes=self.max_value_bytes,
            storage=self.storage,
            replicas=self.replicas,
            compression=self.compression,
            placement=self.placement,
            republish=self.republish,
            discard="new",
            duplicate_window_s=duplicate_window_s,
            allow_rollup=True,
            deny_delete=True,
            allow_direct=True,
            mirror_direct=True if is_mirror else None,
            mirror=None if self.mirror is None else _bucket_source(self.mirror),
            sources=None if self.sources is None else [self._gathered(each) for each in self.sources],
            allow_message_ttl=None if self.limit_marker_ttl_s is None else True,
            subject_delete_marker_ttl_s=self.limit_marker_ttl_s,
            allow_atomic=True if self.allow_atomic is None and api_level >= 2 and not is_mirror else self.allow_atomic,
            metadata=self.metadata,
        )

    def _gathered(self, source: StreamSource) -> StreamSource:
        """A source whose keys become keys of this bucket, as other NATS clients make it."""
        source = _bucket_source(source)
        origin = source.name.removeprefix("KV_")
        if source.subject_transforms or source.external is not None or origin == self.bucket:
            return source
        transform = SubjectTransform(source=subject_of(origin, ">"), destination=subject_of(self.bucket, ">"))
        return dataclasses.replace(source, subject_transforms=[transform])


def _bucket_source(source: StreamSource) -> StreamSource:
    if source.name.startswith("KV_"):
        return source
    return dataclasses.replace(source, name=f"KV_{source.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEntry:
    """One revision of a key. ``operation`` says whether it is a value or the mark of its end."""

    bucket: str
    key: str
    value: bytes
    revision: int
    created: datetime.datetime
    operation: Operation = "put"
    pending: int = 0
    """In a watch: how many entries of the beginning are still to come."""

    @classmethod
    def of(cls, bucket: str, message: StoredMessage) -> KVEntry:
        return cls(
            bucket=bucket,
            key=key_of(bucket, message.subject),
            value=message.data,
            revision=message.sequence,
            created=message.timestamp,
            operation=operation_of(message.headers),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStatus:
    """A bucket's configuration and size."""

    bucket: str
    stream: StreamInfo

    @property
    def values(self) -> int:
        """Revisions stored, markers included."""
        return self.stream.state.messages

    @property
    def bytes(self) -> int:
        return self.stream.state.bytes

    @property
    def history(self) -> int:
        return self.stream.config.max_messages_per_subject or 1

    @property
    def ttl_s(self) -> float:
        """0 is for ever."""
        return self.stream.config.max_age_s or 0.0


def check_bucket(bucket: str) -> str:
    check_name("bucket", bucket)
    if not _is_bucket(bucket):
        raise ConfigError(f"bucket={bucket!r}: expected letters, digits, '_' and '-'")
    return bucket


def check_key(key: str) -> str:
    """A key is one or more tokens, joined by dots, of letters, digits and ``-/_=``.

    Raises:
        ConfigError: With the spelling that works, where one is obvious.
    """
    if not _is_key(key):
        better = re.sub(r"[^-/_=.a-zA-Z0-9]+", ".", key).strip(".")
        hint = f"; {better!r} would do" if better and better != key and _is_key(better) else ""
        raise ConfigError(f"key={key!r}: expected tokens of letters, digits and -/_= joined by dots{hint}")
    return key


def check_filter(text: str) -> str:
    """A key, or one with ``*`` for single tokens and ``>`` for the rest."""
    return text if _is_filter(text) else check_key(text)


def subject_of(bucket: str, key: str) -> str:
    return f"$KV.{bucket}.{key}"


def key_of(bucket: str, subject: str) -> str:
    # A mirror, or a stream with a subject transform, may keep the other bucket's prefix.
    return subject.removeprefix(f"$KV.{bucket}.") if subject.startswith(f"$KV.{bucket}.") else subject.split(".", 2)[2]


def operation_of(headers: Headers) -> Operation:
    marker = headers.get("KV-Operation")
    if marker is not None:
        return "delete" if marker == "DEL" else "purge" if marker == "PURGE" else "put"
    # The server's own marks, left where a TTL or a limit removed the last value.
    reason = headers.get("Nats-Marker-Reason")
    if reason is not None:
        return "delete" if reason == "Remove" else "purge"
    return "put"


def marker_headers(operation: Literal["delete", "purge"]) -> dict[str, str]:
    if operation == "delete":
        return {"KV-Operation": "DEL"}
    return {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}


def entry_of_delivery(bucket: str, message: AckableMessage) -> KVEntry:
    """From a consumer: what the stream says of the message is in its reply subject."""
    metadata = message.metadata
    return KVEntry(
        bucket=bucket,
        key=key_of(bucket, message.subject),
        value=message.data,
        revision=metadata.stream_sequence,
        created=metadata.timestamp,
        operation=operation_of(message.headers) if message.raw_headers is not None else "put",
        pending=metadata.pending,
    )


def watch_options(
    bucket: str,
    filters: Sequence[str],
    *,
    include_history: bool = False,
    updates_only: bool = False,
    meta_only: bool = False,
    from_revision: int | None = None,
) -> OrderedOptions:
    """How to read a bucket's stream for a watch.

    Raises:
        ConfigError: Two beginnings at once.
    """
    chosen = [
        name
        for name, given in (
            ("include_history", include_history),
            ("updates_only", updates_only),
            ("from_revision", from_revision is not None),
        )
        if given
    ]
    if len(chosen) > 1:
        raise ConfigError(f"{' with '.join(chosen)}: expected one of them")
    subjects = tuple(subject_of(bucket, check_filter(each)) for each in filters) or (subject_of(bucket, ">"),)
    policy: DeliverPolicy | None = "last_per_subject"
    if include_history:
        policy = "all"
    elif updates_only:
        policy = "new"
    elif from_revision is not None:
        policy = None
    return OrderedOptions(
        filter_subjects=subjects, deliver_policy=policy, start_sequence=from_revision, headers_only=meta_only
    )


# ---- operations ------------------------------------------------------------------------------------------------------


class Bucket:
    """The requests of one bucket, written once for both drivers."""

    def __init__(self, api: Api, bucket: str, origin: str, *, direct: bool, atomic: bool) -> None:
        self.name = check_bucket(bucket)
        self.origin = origin
        """The bucket whose subjects are used: this one, or the one it mirrors, which takes the writes."""
        self._api = api
        self._stream = f"KV_{bucket}"
        self._direct = direct
        self.is_atomic = atomic

    @classmethod
    def of(cls, api: Api, config: StreamConfig) -> Bucket:
        name = config.name.removeprefix("KV_")
        origin = name if config.mirror is None else config.mirror.name.removeprefix("KV_")
        # Some clients make buckets without direct access; reading those asks the leader.
        return cls(api, name, origin, direct=bool(config.allow_direct), atomic=bool(config.allow_atomic))

    def subjects(self, filters: Sequence[str]) -> list[str]:
        """Of keys or patterns."""
        if isinstance(filters, str):
            raise ConfigError(f"filters={filters!r}: expected a list of keys")
        return [subject_of(self.origin, check_filter(each)) for each in filters]

    def put(self, key: str, value: bytes, expect: Expect | None = None, ttl_s: float | None = None) -> Requests[int]:
        headers = publish_headers(None, None, expect, ttl_s)
        ack = yield from publish(subject_of(self.origin, check_key(key)), value, headers)
        return ack.sequence

    def get(self, key: str, revision: int | None) -> Requests[KVEntry]:
        subject = subject_of(self.origin, check_key(key))
        query = message_query(sequence=revision) if revision is not None else message_query(last_for=subject)
        try:
            message = yield from self._api.get_message(self._stream, query, direct=self._direct)
        except MessageNotFound:
            raise KeyNotFound(self.name, key) from None
        entry = KVEntry.of(self.name, message)
        # A revision is a sequence of the whole bucket: it may be another key's.
        if entry.key != key or entry.operation != "put":
            raise KeyNotFound(self.name, key)
        return entry

    def create(self, key: str, value: bytes, ttl_s: float | None) -> Requests[int]:
        """Write a key that has no value; one that was deleted has none."""
        try:
            return (yield from self.put(key, value, Expect(last_subject_sequence=0), ttl_s))
        except WrongLastSequence:
            pass
        revision = yield from self.vacant_revision(key)
        try:
            return (yield from self.put(key, value, Expect(last_subject_sequence=revision), ttl_s))
        except WrongLastSequence:
            raise KeyExists(self.name, (key,)) from None

    def vacant_revision(self, key: str) -> Requests[int]:
        """The revision of a key without a value: that of its deletion, or 0. Asks the leader."""
        revision, operation = yield from self._last(key)
        if operation == "put":
            raise KeyExists(self.name, (key,))
        return revision

    def _last(self, key: str) -> Requests[tuple[int, Operation]]:
        query = message_query(last_for=subject_of(self.origin, check_key(key)))
        try:
            last = yield from self._api.get_message(self._stream, query, direct=False)
        except MessageNotFound:
            return 0, "delete"
        return last.sequence, operation_of(last.headers)

    def update(self, key: str, value: bytes, revision: int, ttl_s: float | None) -> Requests[int]:
        try:
            return (yield from self.put(key, value, Expect(last_subject_sequence=revision), ttl_s))
        except WrongLastSequence:
            raise Conflict(self.name, (key,)) from None

    def mark(
        self, key: str, operation: Literal["delete", "purge"], revision: int | None, ttl_s: float | None
    ) -> Requests[None]:
        """Delete or purge; with ``revision`` only if that is the last one."""
        expect = None if revision is None else Expect(last_subject_sequence=revision)
        headers = publish_headers(marker_headers(operation), None, expect, ttl_s)
        try:
            yield from publish(subject_of(self.origin, check_key(key)), b"", headers)
        except WrongLastSequence:
            raise Conflict(self.name, (key,)) from None

    def status(self) -> Requests[KVStatus]:
        info = yield from self._api.stream_info(self._stream)
        return KVStatus(bucket=self.name, stream=info)


class Writes:
    """What a transaction has gathered. It becomes one atomic batch: all of it is stored, or none."""

    MAX_KEYS = 1000
    """The server's limit for a batch, unless it was configured otherwise."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._writes: dict[str, tuple[bytes, dict[str, str]]] = {}
        self._expected: dict[str, int] = {}

    def put(self, key: str, value: bytes, revision: int | None) -> None:
        self._add(key, value, {}, revision)

    def mark(self, key: str, operation: Literal["delete", "purge"], revision: int | None) -> None:
        self._add(key, b"", marker_headers(operation), revision)

    def _add(self, key: str, value: bytes, headers: dict[str, str], revision: int | None) -> None:
        if check_key(key) in self._writes:
            # The server would refuse a second check, and the first value would never be seen.
            raise ConfigError(f"key={key!r}: written twice in one transaction; write its last value only")
        if len(self._writes) >= self.MAX_KEYS:
            raise ConfigError(f"more than {self.MAX_KEYS} keys in one transaction: split it")
        if revision is not None:
            self._expected[key] = revision
            headers = headers | {"Nats-Expected-Last-Subject-Sequence": str(revision)}
        self._writes[key] = (value, headers)

    def commit(self, batch_id: str) -> Requests[dict[str, int]]:
        """Send everything; returns the revision of each key.

        Raises:
            Conflict: Nothing was written.
        """
        if not self._writes:
            return {}
        bucket = self._bucket
        if not bucket.is_atomic:
            raise ConfigError(
                f"bucket {bucket.name!r} does not allow transactions: KVConfig(allow_atomic=True), "
                "with nats-server 2.12 or newer"
            )
        count = len(self._writes)
        for number, (key, (value, headers)) in enumerate(self._writes.items(), 1):
            batch = {"Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(number)}
            subject = subject_of(bucket.origin, key)
            if number < count:
                yield Request(subject, value, headers | batch, is_silent=True)
                continue
            reply = yield Request(subject, value, headers | batch | {"Nats-Batch-Commit": "1"})
            try:
                ack = read_pub_ack(reply)
            except WrongLastSequence as error:
                changed = yield from self._changed()
                raise Conflict(bucket.name, changed) from error
        if ack.batch_size != count:
            raise ProtocolError(f"a batch of {count} messages was acknowledged as one of {ack.batch_size}")
        # The messages of a batch are stored one after the other, whatever else is published meanwhile.
        first = ack.sequence - count + 1
        return {key: first + index for index, key in enumerate(self._writes)}

    def _changed(self) -> Requests[tuple[str, ...]]:
        """Which keys are not as expected; the server does not say. All of them, should they be so again by now."""
        changed = []
        for key, revision in self._expected.items():
            present, _ = yield from self._bucket._last(key)
            if present != revision:
                changed.append(key)
        return tuple(changed or self._expected)
