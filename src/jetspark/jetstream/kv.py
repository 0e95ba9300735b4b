"""Key-value buckets: a stream seen as a map. Buckets, keys and entries on the wire (ADR-8 of NATS).

A bucket is a stream ``KV_<bucket>`` with a subject ``$KV.<bucket>.<key>`` for each key; a revision is a sequence in it.
Deleting writes a marker; purging writes a marker that also removes the earlier revisions.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict

from jetspark.core.arguments import explained, flag, octets, texts, unfit
from jetspark.core.backoff import Backoff
from jetspark.core.headers import Headers, HeadersLike
from jetspark.core.numbers import UINT64, seconds, whole
from jetspark.core.step_runner import Sleep
from jetspark.core.subjects import is_subset, matches, overlaps
from jetspark.errors import (
    ConfigError,
    Conflict,
    KeyExists,
    KeyNotFound,
    MessageNotFound,
    PermissionDenied,
    ProtocolError,
    StreamNotFound,
    WrongLastSequence,
)
from jetspark.jetstream.acks import AckableMessage
from jetspark.jetstream.checks import INT32, check_config, check_description, check_fields, check_name
from jetspark.jetstream.config import (
    MAX_REPLICAS,
    Compression,
    DeliverPolicy,
    Placement,
    Republish,
    Storage,
    StreamConfig,
    StreamSource,
    SubjectTransform,
    ruled,
)
from jetspark.jetstream.features import LAST_GET, MESSAGE_TTL
from jetspark.jetstream.info import PubAck, StoredMessage, StreamInfo
from jetspark.jetstream.operations import DEFAULT_PREFIX, Api, Operation, message_query
from jetspark.jetstream.ordered import OrderedOptions
from jetspark.jetstream.publishing import Expect, publish, publish_headers

__all__ = [
    "Bucket",
    "KVConfig",
    "KVEntry",
    "KVOperation",
    "KVStatus",
    "KeyWrite",
    "Writes",
    "check_filter",
    "check_key",
    "check_keys",
    "create_bucket",
    "create_or_update_bucket",
    "subject_of",
]

KVOperation: TypeAlias = Literal["put", "delete", "purge"]

MAX_HISTORY = 64

# Pauses between reads of a replica that is behind its leader; it catches up within milliseconds.
STALE = Backoff(first_s=0.005, max_s=0.25)
# Number of such reads, over some two seconds. Then the write is tried with the replica's answer: the message that the
# leader has named may have been deleted.
STALE_READS = 12

# Where the server compares with the last message of a subject, it names the sequence of that.
_NAMED_SEQUENCE = re.compile(r"wrong last sequence: (\d+)")

_is_bucket = re.compile(r"[a-zA-Z0-9_-]+").fullmatch
_KEY = r"[-/_=a-zA-Z0-9]++(?:\.[-/_=a-zA-Z0-9]++)*+"
_is_key = re.compile(_KEY).fullmatch
_are_keys = re.compile(rf"(?:{_KEY}\n)*+").fullmatch
_is_filter = re.compile(r"(?:(?:[-/_=a-zA-Z0-9]+|\*)\.)*(?:[-/_=a-zA-Z0-9]+|\*|>)").fullmatch


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    """A bucket. ``None`` means "not mentioned", as in :class:`StreamConfig`."""

    bucket: str = field(metadata={"check": lambda _, bucket: check_bucket(bucket)})
    description: str | None = ruled(check=check_description)
    history: int | None = ruled(low=1, high=MAX_HISTORY)
    """Revisions kept of each key, 1 to 64; the server's default is 1."""
    ttl_s: float | None = ruled(low=0.1)
    """Seconds after which an entry is removed."""
    limit_marker_ttl_s: float | None = ruled(low=1)
    """Lets single keys have a TTL (needs nats-server 2.11): when one goes away, a marker stays for this many seconds
    for watchers to see. In a bucket with more than one revision of history no key can have a shorter TTL than this.
    """
    max_bytes: int | None = ruled(low=-1)
    max_value_bytes: int | None = ruled(low=-1, high=INT32)
    storage: Storage | None = None
    replicas: int | None = ruled(low=1, high=MAX_REPLICAS)
    compression: Compression | None = None
    placement: Placement | None = None
    republish: Republish | None = None
    mirror: StreamSource | None = None
    """Another bucket to copy, named by its stream (``KV_<bucket>``) or its bucket name."""
    sources: Sequence[StreamSource] | None = None
    allow_atomic: bool | None = None
    """Lets several keys be written together or not at all (needs nats-server 2.12)."""
    allow_batched: bool | None = None
    """Lets many keys be written by fast ingest (needs nats-server 2.14)."""
    metadata: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.limit_marker_ttl_s is not None and self.limit_marker_ttl_s < 1:
            raise ConfigError(f"limit_marker_ttl_s={self.limit_marker_ttl_s}: expected 1 second or more")

    @classmethod
    def of(cls, config: KVConfig | str) -> KVConfig:
        """The configuration itself, or the default one for a bucket name."""
        return check_config(cls, config, name="bucket")

    def to_stream(self, api_level: int = 0) -> StreamConfig:
        """The stream behind the bucket, as every NATS client makes it.

        ``api_level`` is the server's, for a new bucket: where transactions and fast ingest are possible they are
        allowed, unless the configuration says otherwise.
        """

        def where_possible(wish: bool | None, level: int) -> bool | None:
            return True if wish is None and api_level >= level and not is_mirror else wish

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
            allow_atomic=where_possible(self.allow_atomic, 2),
            allow_batched=where_possible(self.allow_batched, 4),
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
    """One revision of a key. ``operation`` tells a value from a delete or purge marker."""

    bucket: str
    key: str
    value: bytes
    revision: int
    created: datetime.datetime
    operation: KVOperation = "put"
    pending: int = 0
    """In a watch: number of entries still to come of the initial ones."""

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
        """Seconds until a value expires; 0 means never."""
        return self.stream.config.max_age_s or 0.0


def create_bucket(api: Api, config: KVConfig) -> Operation[StreamInfo]:
    """Create a bucket's stream; an existing one with the same configuration is returned."""
    facts = yield from api.facts()
    return (yield from api.create_stream(config.to_stream(facts.level or 0)))


def create_or_update_bucket(api: Api, config: KVConfig) -> Operation[StreamInfo]:
    """Change what ``config`` mentions in a bucket that exists; otherwise create it, as :func:`create_bucket` does."""
    # `history` has a default of 1 in a new bucket; in an existing bucket this default would delete revisions.
    changes = dataclasses.replace(config.to_stream(), max_messages_per_subject=config.history)
    try:
        return (yield from api.update_stream(changes))
    except StreamNotFound:
        return (yield from create_bucket(api, config))


def check_bucket(bucket: str) -> str:
    check_name("bucket", bucket)
    if not _is_bucket(bucket):
        raise ConfigError(f"bucket={bucket!r}: expected letters, digits, '_' and '-'")
    return bucket


def check_key(key: str, what: str = "key") -> str:
    """A key is one or more tokens, joined by dots, of letters, digits and ``-/_=``.

    Raises:
        ConfigError: The key is invalid; the message has a valid spelling if one is obvious.
    """
    if not isinstance(key, str):
        raise unfit(what, key, "a key, such as 'order.1'")
    if not _is_key(key):
        # A wildcard here is a mistake: this call takes exactly one key, so no other spelling is proposed.
        better = "" if set(key) & set("*>") else re.sub(r"[^-/_=.a-zA-Z0-9]+", ".", key).strip(".")
        hint = f"; {better!r} would do" if _is_key(better) else ""
        raise ConfigError(f"key={key!r}: expected tokens of letters, digits and -/_= joined by dots{hint}")
    return key


def check_keys(keys: Sequence[str]) -> None:
    """As :func:`check_key`, for many: one check of all together costs a tenth of single checks."""
    with suppress(TypeError):
        # A key with a line break in it would look like two keys.
        lines = "\n".join([*keys, ""])
        if _are_keys(lines) and lines.count("\n") == len(keys):
            return
    for key in keys:
        check_key(key)


def check_filter(pattern: str, what: str = "filters") -> str:
    """A key, or a pattern with ``*`` for single tokens and ``>`` for the rest."""
    if not isinstance(pattern, str):
        raise unfit(what, pattern, "a key or a pattern, such as 'order.>'")
    return pattern if _is_filter(pattern) else check_key(pattern)


def subject_of(bucket: str, key: str) -> str:
    return f"$KV.{bucket}.{key}"


def key_of(bucket: str, subject: str) -> str:
    # A mirror, or a stream with a subject transform, may keep the other bucket's prefix.
    if subject.startswith(f"$KV.{bucket}."):
        return subject.removeprefix(f"$KV.{bucket}.")
    tokens = subject.split(".", 2)
    if len(tokens) < 3:
        raise ProtocolError(f"a message on {subject!r} in bucket {bucket!r}, which is no key's subject")
    return tokens[2]


def operation_of(headers: Headers) -> KVOperation:
    marker = headers.get("KV-Operation")
    if marker is not None:
        return "delete" if marker == "DEL" else "purge" if marker == "PURGE" else "put"
    # The server's own markers, left by a TTL or a limit that removed the last value.
    reason = headers.get("Nats-Marker-Reason")
    if reason is not None:
        return "delete" if reason == "Remove" else "purge"
    return "put"


def marker_headers(operation: Literal["delete", "purge"]) -> dict[str, str]:
    if operation == "delete":
        return {"KV-Operation": "DEL"}
    return {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}


def entry_of_delivery(bucket: str, message: AckableMessage) -> KVEntry:
    """From a consumer's message, whose reply subject has its metadata."""
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


class WatchKeywords(TypedDict, total=False):
    """Start and content of a watch: keywords of ``KeyValue.watch``, for type checkers."""

    include_history: bool
    updates_only: bool
    meta_only: bool
    from_revision: int | None


def watch_options(
    bucket: str,
    filters: Sequence[str],
    *,
    include_history: bool = False,
    updates_only: bool = False,
    meta_only: bool = False,
    from_revision: int | None = None,
) -> OrderedOptions:
    """The ordered consumer that a watch needs.

    Raises:
        ConfigError: More than one start is given.
    """
    flag("meta_only", meta_only)
    chosen = [
        name
        for name, given in (
            ("include_history", flag("include_history", include_history)),
            ("updates_only", flag("updates_only", updates_only)),
            ("from_revision", from_revision is not None),
        )
        if given
    ]
    if len(chosen) > 1:
        raise ConfigError(f"{' with '.join(chosen)}: expected one of them")
    if from_revision is not None:
        from_revision = whole("from_revision", from_revision, high=UINT64)
    subjects = tuple(subject_of(bucket, each) for each in _distinct(filters)) or (subject_of(bucket, ">"),)
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


def _distinct(filters: Sequence[str]) -> list[str]:
    """The same keys by filters that do not overlap, as the server requires.

    Raises:
        ConfigError: Two filters have some keys in common, and no filter includes the other.
    """
    unique = list(dict.fromkeys(check_filter(each) for each in filters))
    patterns = [each for each in unique if "*" in each or ">" in each]
    widest = [each for each in unique if not any(each != other and is_subset(each, other) for other in patterns)]
    for pattern in filter(set(patterns).__contains__, widest):
        other = next((each for each in widest if each != pattern and overlaps(pattern, each)), None)
        if other is not None:
            raise ConfigError(
                f"filters {pattern!r} and {other!r}: some keys match both, and the server takes only filters that do "
                "not overlap; give a wider one, or use two watches"
            )
    return widest


# ---- operations ------------------------------------------------------------------------------------------------------


class Bucket:
    """The requests of one bucket, written once for both drivers."""

    def __init__(
        self,
        api: Api,
        bucket: str,
        origin: str,
        *,
        direct: bool,
        atomic: bool,
        write_prefix: str = DEFAULT_PREFIX,
        least_ttl_s: float = 0,
    ) -> None:
        self.name = check_bucket(bucket)
        self.origin = origin
        """The bucket whose subjects are used: this one, or the mirrored one, which takes the writes."""
        self._api = api
        self._stream = f"KV_{bucket}"
        self._direct = direct
        self.is_atomic = atomic
        self._least_ttl_s = least_ttl_s
        """The server extends a shorter TTL to this time; 0 if it does not, or if that is unknown."""
        # Between two domains the server does not route a bucket's own subjects: there they have an API prefix.
        self._write_prefix = "" if write_prefix == DEFAULT_PREFIX else f"{write_prefix}."

    @classmethod
    def of(cls, api: Api, config: StreamConfig) -> Bucket:
        name = config.name.removeprefix("KV_")
        origin = name if config.mirror is None else config.mirror.name.removeprefix("KV_")
        external = None if config.mirror is None else config.mirror.external
        # nats-server 2.15 extends shorter TTLs in buckets that keep more than one revision.
        raises_ttls = origin == name and config.max_messages_per_subject != 1
        least_ttl_s = (config.subject_delete_marker_ttl_s or 0) if raises_ttls else 0
        # Some clients create buckets without direct access; these are read from the leader.
        return cls(
            api,
            name,
            origin,
            direct=bool(config.allow_direct),
            atomic=bool(config.allow_atomic),
            write_prefix=api.prefix if external is None else external.api_prefix or api.prefix,
            least_ttl_s=least_ttl_s,
        )

    def snapshot_of_one(self, key: str) -> Operation[list[StoredMessage]]:
        """The last message of a key, by the request of :meth:`get`: a user's permissions can be limited to single
        keys."""
        query = message_query(last_for=subject_of(self.origin, check_key(key)))
        try:
            return [(yield from self._api.get_message(self._stream, query, direct=self._direct))]
        except MessageNotFound:
            return []

    def subjects(self, filters: Iterable[str]) -> list[str]:
        """The subjects of keys or patterns."""
        return [subject_of(self.origin, check_filter(each)) for each in texts("filters", filters, "a list of keys")]

    def write_subject(self, key: str) -> str:
        """The subject for a publish of the key's value; it is stored under ``subject_of``."""
        return f"{self._write_prefix}{subject_of(self.origin, check_key(key))}"

    def write_subjects(self, keys: Sequence[str]) -> list[str]:
        """As :meth:`write_subject`, for many."""
        check_keys(keys)
        prefix = f"{self._write_prefix}{subject_of(self.origin, '')}"
        return [prefix + key for key in keys]

    def put(self, key: str, value: bytes, expect: Expect | None = None, ttl_s: float | None = None) -> Operation[int]:
        headers = publish_headers(None, None, expect, ttl_s)
        yield from self.check_ttl(ttl_s)
        ack = yield from publish(self.write_subject(key), octets("value", value), headers)
        return ack.sequence

    def get(self, key: str, revision: int | None, direct: bool | None = None) -> Operation[KVEntry]:
        subject = subject_of(self.origin, check_key(key))
        if revision is not None:
            query = message_query(sequence=whole("revision", revision, high=UINT64))
        else:
            query = message_query(last_for=subject)
        use_direct = self._direct if direct is None else flag("direct", direct)
        try:
            message = yield from self._api.get_message(self._stream, query, direct=use_direct)
        except MessageNotFound:
            raise KeyNotFound(self.name, key) from None
        entry = KVEntry.of(self.name, message)
        # A revision is a sequence of the whole bucket: it may be another key's.
        if entry.key != key or entry.operation != "put":
            raise KeyNotFound(self.name, key)
        return entry

    def create(self, key: str, value: bytes, ttl_s: float | None) -> Operation[int]:
        """Write a key that has no value, because it is new or was deleted."""
        revision, last = 0, -1
        while True:
            try:
                return (yield from self.put(key, value, Expect(last_subject_sequence=revision), ttl_s))
            except WrongLastSequence as refused:
                named = _NAMED_SEQUENCE.search(refused.description)
            before, last = last, int(named[1]) if named is not None else 0
            # Named twice, the message still exists and the replica is still behind. The call's timeout bounds the loop.
            if before >= 0 and not before == last > revision:
                raise KeyExists(self.name, (key,))
            revision = yield from self.vacant_revision(key, at_least=last)

    def vacant_revision(self, key: str, *, at_least: int = 0) -> Operation[int]:
        """The revision of a key without a value: its deletion's revision, or 0.

        A direct get is tried first, because the permission for it can be limited to this key; its answer may be
        slightly out of date. So the leader is asked as well, if we may, unless the answer is as recent as ``at_least``,
        the revision that the leader has named. A replica that stays behind, or has no such message because it was
        deleted, is trusted after two seconds: every writer expects the revision, so nothing is overwritten in any case.
        """
        check_key(key)
        if not self._direct:
            return (yield from self._vacant(key, direct=False))
        revision, operation = yield from self._last(key, direct=True)
        if (operation != "put" or at_least) and revision >= at_least:
            return self._checked_vacant(key, revision, operation)
        try:
            return (yield from self._vacant(key, direct=False))
        except PermissionDenied:
            pass
        # The replica is behind the leader, or it is unknown whether it is.
        for number in range(1, STALE_READS + 1):
            if revision >= at_least:
                break
            yield Sleep(STALE.wait_s(number))
            revision, operation = yield from self._last(key, direct=True)
        if revision < at_least and operation == "put":
            return 0  # out of date, or written again: the server refuses the write if so
        return self._checked_vacant(key, revision, operation)

    def _vacant(self, key: str, *, direct: bool) -> Operation[int]:
        revision, operation = yield from self._last(key, direct=direct)
        return self._checked_vacant(key, revision, operation)

    def _checked_vacant(self, key: str, revision: int, operation: KVOperation) -> int:
        if operation == "put":
            raise KeyExists(self.name, (key,))
        return revision

    def _last(self, key: str, *, direct: bool = False) -> Operation[tuple[int, KVOperation]]:
        """The last sequence and operation of a key, or of all keys of a pattern; by default read from the leader."""
        query = message_query(last_for=subject_of(self.origin, check_filter(key)))
        try:
            last = yield from self._api.get_message(self._stream, query, direct=direct)
        except MessageNotFound:
            return 0, "delete"
        return last.sequence, operation_of(last.headers)

    def update(self, key: str, value: bytes, revision: int, ttl_s: float | None) -> Operation[int]:
        try:
            return (yield from self.put(key, value, _expected(revision), ttl_s))
        except WrongLastSequence:
            raise Conflict(self.name, (key,)) from None

    def mark(
        self, key: str, operation: Literal["delete", "purge"], revision: int | None, ttl_s: float | None
    ) -> Operation[None]:
        """Write a delete or purge marker; with ``revision`` only if this is the last revision."""
        expect = None if revision is None else _expected(revision)
        headers = publish_headers(marker_headers(operation), None, expect, ttl_s)
        yield from self.check_ttl(ttl_s)
        try:
            yield from publish(self.write_subject(key), b"", headers)
        except WrongLastSequence:
            raise Conflict(self.name, (key,)) from None

    def check_ttl(self, ttl_s: float | None) -> Operation[None]:
        if ttl_s is None:
            return
        seconds("ttl", ttl_s, low=1)
        yield from self._api.require(MESSAGE_TTL)
        if ttl_s < self._least_ttl_s:
            # The server extends it silently: a lock for a second would be held for thirty.
            raise ConfigError(
                f"ttl={ttl_s}: expected at least limit_marker_ttl_s={self._least_ttl_s:g} of bucket {self.name!r}, "
                "because with history the server makes a shorter one that long; lower limit_marker_ttl_s with "
                "create_or_update_kv, or use a bucket with history=1"
            )

    def snapshot_sequence(self, at: int) -> Operation[int]:
        """The sequence to read for the values at ``at``: at most the stream's last one."""
        yield from self._api.require(LAST_GET)  # first, so that the requests share one timeout
        info = yield from self._api.stream_info(self._stream)
        # Beyond its end the server finds no message at all (nats-server 2.15).
        return min(at, info.state.last_sequence)

    def status(self) -> Operation[KVStatus]:
        info = yield from self._api.stream_info(self._stream)
        return KVStatus(bucket=self.name, stream=info)


def _expected(revision: int) -> Expect:
    """The condition for this revision; 0 expects a key without revisions."""
    return Expect(last_subject_sequence=whole("revision", revision, low=0, high=UINT64))


@dataclass(frozen=True, slots=True)
class KeyWrite:
    """One message of a transaction."""

    subject: str
    value: bytes
    headers: HeadersLike | None
    expect: Expect | None


class Writes:
    """The writes of a transaction. They become one atomic batch: all are stored, or none.

    A message can carry one condition: on its own key, or a guard, which is a condition on keys that are not written.
    Guards are attached to messages without a condition of their own. The server compares with the bucket before the
    batch, and refuses to compare a key after its write in the batch: so a guard that covers a written key has to come
    with the first write it covers. For guards without a free message the last write is repeated.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._writes: dict[str, tuple[bytes, KVOperation, int | None]] = {}
        self._ttls_s: dict[str, float] = {}
        self._guards: dict[str, int] = {}

    def put(self, key: str, value: bytes, revision: int | None, ttl_s: float | None = None) -> None:
        self._add(key, value, "put", revision)
        if ttl_s is not None:
            self._ttls_s[key] = ttl_s

    def update(self, key: str, value: bytes, revision: int) -> None:
        """Unlike ``put``, always with a revision."""
        self._add(key, value, "put", whole("revision", revision, low=0, high=UINT64))

    def mark(self, key: str, operation: Literal["delete", "purge"], revision: int | None) -> None:
        self._add(key, b"", operation, revision)

    def expect(self, keys: str, revision: int) -> None:
        """``keys`` is a key that is not written, or a pattern."""
        revision = whole("revision", revision, low=0, high=UINT64)
        if check_filter(keys, "keys") in self._guards:
            raise ConfigError(f"key={keys!r}: expected twice in one transaction")
        if keys in self._writes:
            raise self._written_too(keys)
        self._guards[keys] = revision

    def _add(self, key: str, value: bytes, operation: KVOperation, revision: int | None) -> None:
        value = octets("value", value)
        if check_key(key) in self._writes:
            # The server would refuse a second check, and the first value would never be visible.
            raise ConfigError(f"key={key!r}: written twice in one transaction; write its last value only")
        if key in self._guards:
            raise self._written_too(key)
        if revision is not None:
            revision = whole("revision", revision, low=0, high=UINT64)
        self._writes[key] = (value, operation, revision)

    def _written_too(self, key: str) -> ConfigError:
        return ConfigError(f"key={key!r}: expected and written; give the revision to update, delete or purge instead")

    def messages(self) -> list[KeyWrite]:
        """The batch, in order.

        Raises:
            ConfigError: The bucket does not allow transactions, or no message can carry a guard.
        """
        bucket = self._bucket
        if not self._writes:
            if self._guards:
                raise ConfigError("expect without a write: there is nothing to make depend on it")
            return []
        if not bucket.is_atomic:
            raise ConfigError(
                f"bucket {bucket.name!r} does not allow transactions: KVConfig(allow_atomic=True), "
                "with nats-server 2.12 or newer"
            )
        riders, rest = self._seat_guards()
        result = []
        for key, (value, operation, revision) in self._writes.items():
            expect = None
            if revision is not None:
                expect = Expect(last_subject_sequence=revision)
            elif key in riders:
                expect = self._guard(riders[key])
            headers = None if operation == "put" else marker_headers(operation)
            with_ttl = publish_headers(headers, None, None, self._ttls_s.get(key))
            result.append(KeyWrite(bucket.write_subject(key), value, with_ttl, expect))
        last = result[-1]
        # Only the first message of a key may remove its earlier revisions.
        repeated = last.headers if operation != "purge" else marker_headers("delete")
        return result + [KeyWrite(last.subject, last.value, repeated, self._guard(each)) for each in rest]

    def _guard(self, keys: str) -> Expect:
        return Expect(
            last_subject_sequence=self._guards[keys],
            last_subject_sequence_subject=subject_of(self._bucket.origin, keys),
        )

    def _seat_guards(self) -> tuple[dict[str, str], list[str]]:
        """Assign guards to the messages of written keys; returns the assignment and the remaining guards."""
        riders: dict[str, str] = {}
        harmless = []
        for guard in self._guards:
            covered = next((key for key in self._writes if matches(guard, key)), None)
            if covered is None:
                harmless.append(guard)
                continue
            # A guard must be on the first key it covers, or before.
            for key, (_, _, revision) in self._writes.items():
                if revision is None and key not in riders:
                    riders[key] = guard
                    break
                if key == covered:
                    raise ConfigError(
                        f"expect({guard!r}): it covers {covered!r}, which is written with a revision of its own; "
                        "write a key without a revision first, or leave one of the two out"
                    )
        free = [key for key, (_, _, revision) in self._writes.items() if revision is None and key not in riders]
        riders |= dict(zip(free, harmless, strict=False))
        return riders, harmless[len(free) :]

    def revisions(self, ack: PubAck) -> dict[str, int]:
        """The revision of each key, from the acknowledgement of the batch: its sequences are consecutive."""
        size = ack.batch_size or len(self._writes)
        first = ack.sequence - size + 1
        revisions = {key: first + index for index, key in enumerate(self._writes)}
        if size > len(self._writes):  # the last write was repeated
            revisions[next(reversed(self._writes))] = ack.sequence
        return revisions

    def conflict(self) -> Operation[Conflict]:
        """The keys that are not as expected; the server does not name them. All keys if each is as expected by now."""
        expected = {key: revision for key, (_, _, revision) in self._writes.items() if revision is not None}
        expected |= self._guards
        changed = []
        try:
            for key, revision in expected.items():
                present, _ = yield from self._bucket._last(key)
                if present != revision:
                    changed.append(key)
        except PermissionDenied:
            changed = []  # a user who may not read the bucket gets all keys
        return Conflict(self._bucket.name, tuple(changed or expected))
