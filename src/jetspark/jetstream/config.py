"""Streams and consumers as their owners describe them. Each field is declared once, here: its name in Python, its
name on the wire and its unit; :mod:`jetspark.jetstream.wire` does the rest.

``None`` means "not mentioned": the server's default when something is created, the present value when it is updated.
Durations are seconds, sizes bytes. What a newer server says that is not known here is kept in ``extra`` and sent back
untouched.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from jetspark.core.subjects import validate_filter
from jetspark.errors import ConfigError

__all__ = [
    "ConsumerConfig",
    "ConsumerLimits",
    "External",
    "Placement",
    "Republish",
    "StreamConfig",
    "StreamSource",
    "SubjectTransform",
]

Retention: TypeAlias = Literal["limits", "interest", "workqueue"]
Storage: TypeAlias = Literal["file", "memory"]
Discard: TypeAlias = Literal["old", "new"]
Compression: TypeAlias = Literal["none", "s2"]
PersistMode: TypeAlias = Literal["default", "async"]
AckPolicy: TypeAlias = Literal["none", "all", "explicit", "flow_control"]
DeliverPolicy: TypeAlias = Literal["all", "last", "new", "by_start_sequence", "by_start_time", "last_per_subject"]
ReplayPolicy: TypeAlias = Literal["instant", "original"]
PriorityPolicy: TypeAlias = Literal["none", "overflow", "pinned_client", "prioritized"]


def _wire(name: str, *, unit: str = "", level: int = 0, default: Any = None) -> Any:
    """A field whose name, unit or needed API level on the wire differs from the obvious."""
    return field(default=default, metadata={"wire": name, "unit": unit, "level": level})


def _seconds(name: str, *, level: int = 0) -> Any:
    return _wire(name, unit="ns", level=level)


def _seconds_list(name: str) -> Any:
    return _wire(name, unit="ns_list")


def _level(level: int) -> Any:
    return field(default=None, metadata={"level": level})


def _extra() -> Any:
    return field(default_factory=dict, metadata={"wire": ""})


def check_name(what: str, name: str) -> str:
    """Names of streams, consumers and buckets travel as one token of a subject, and as a folder on the server."""
    if not name or not isinstance(name, str):
        raise ConfigError(f"{what}={name!r}: expected a name")
    # Exactly what the server refuses: streams with other blanks in their names exist, and we must be able to read them.
    if bad := sorted({character for character in name if character in ".*>/\\ \t\r\n\f"}):
        raise ConfigError(f"{what}={name!r}: {', '.join(map(repr, bad))} not allowed; use letters, digits, '-' and '_'")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where replicas should live."""

    cluster: str | None = None
    tags: Sequence[str] | None = None
    preferred: str | None = None
    """For a step-down only: the server that should lead next."""
    extra: Mapping[str, Any] = _extra()

    def __post_init__(self) -> None:
        _check_list("tags", self.tags, "tags")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectTransform:
    """Messages on ``source`` are stored under ``destination``, which may use ``{{wildcard(1)}}`` and its like."""

    source: str = _wire("src", default="")
    destination: str = _wire("dest", default="")
    extra: Mapping[str, Any] = _extra()


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """A stream reached through another account or domain."""

    api_prefix: str = _wire("api", default="")
    deliver_prefix: str | None = _wire("deliver")
    extra: Mapping[str, Any] = _extra()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSource:
    """Another stream to copy from, as the only one (``mirror``) or one of several (``sources``)."""

    name: str
    start_sequence: int | None = _wire("opt_start_seq")
    start_time: datetime.datetime | None = _wire("opt_start_time", unit="time")
    filter_subject: str | None = None
    subject_transforms: Sequence[SubjectTransform] | None = None
    external: External | None = None
    extra: Mapping[str, Any] = _extra()

    def __post_init__(self) -> None:
        check_name("name", self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Republish:
    """Every stored message is published once more, under ``destination``."""

    source: str = _wire("src", default="")
    destination: str = _wire("dest", default="")
    headers_only: bool | None = None
    extra: Mapping[str, Any] = _extra()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLimits:
    """Bounds and defaults for the consumers of a stream."""

    inactive_threshold_s: float | None = _seconds("inactive_threshold")
    max_ack_pending: int | None = None
    extra: Mapping[str, Any] = _extra()

    def __post_init__(self) -> None:
        _check_seconds(self, "inactive_threshold_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """A stream: what it stores, how much of it, and what may be done with it."""

    name: str
    description: str | None = None
    subjects: Sequence[str] | None = None
    retention: Retention | None = None
    storage: Storage | None = None
    replicas: int | None = _wire("num_replicas")

    max_messages: int | None = _wire("max_msgs")
    max_messages_per_subject: int | None = _wire("max_msgs_per_subject")
    max_bytes: int | None = None
    max_age_s: float | None = _seconds("max_age")
    max_message_bytes: int | None = _wire("max_msg_size")
    max_consumers: int | None = None
    discard: Discard | None = None
    discard_new_per_subject: bool | None = None
    duplicate_window_s: float | None = _seconds("duplicate_window")

    allow_direct: bool | None = None
    mirror_direct: bool | None = None
    allow_rollup: bool | None = _wire("allow_rollup_hdrs")
    allow_message_ttl: bool | None = _wire("allow_msg_ttl", level=1)
    subject_delete_marker_ttl_s: float | None = _seconds("subject_delete_marker_ttl", level=1)
    allow_atomic: bool | None = _level(2)
    allow_message_counter: bool | None = _wire("allow_msg_counter", level=2)
    allow_message_schedules: bool | None = _wire("allow_msg_schedules", level=2)
    persist_mode: PersistMode | None = _level(2)
    allow_batched: bool | None = _level(4)
    deny_delete: bool | None = None
    deny_purge: bool | None = None
    sealed: bool | None = None
    no_ack: bool | None = None

    mirror: StreamSource | None = None
    sources: Sequence[StreamSource] | None = None
    subject_transform: SubjectTransform | None = None
    republish: Republish | None = None
    placement: Placement | None = None
    compression: Compression | None = None
    first_sequence: int | None = _wire("first_seq")
    consumer_limits: ConsumerLimits | None = None
    metadata: Mapping[str, str] | None = None
    extra: Mapping[str, Any] = _extra()

    def __post_init__(self) -> None:
        check_name("name", self.name)
        _check_list("subjects", self.subjects)
        for subject in self.subjects or ():
            validate_filter(subject)
        _check_seconds(self, "max_age_s", "duplicate_window_s", "subject_delete_marker_ttl_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig:
    """A consumer: which messages of its stream, from where on, and how they are acknowledged.

    With ``durable_name`` it stays until it is deleted; with ``name`` alone, or neither, it goes away when nobody has
    used it for ``inactive_threshold_s``. With ``deliver_subject`` the server pushes, without it clients pull.
    """

    name: str | None = None
    durable_name: str | None = None
    description: str | None = None

    deliver_policy: DeliverPolicy | None = None
    start_sequence: int | None = _wire("opt_start_seq")
    start_time: datetime.datetime | None = _wire("opt_start_time", unit="time")
    filter_subject: str | None = None
    filter_subjects: Sequence[str] | None = None
    replay_policy: ReplayPolicy | None = None
    headers_only: bool | None = None

    ack_policy: AckPolicy | None = None
    ack_wait_s: float | None = _seconds("ack_wait")
    max_deliver: int | None = None
    backoff_s: Sequence[float] | None = _seconds_list("backoff")
    max_ack_pending: int | None = None
    sample_frequency: str | None = _wire("sample_freq")

    max_waiting: int | None = None
    max_batch: int | None = None
    max_expires_s: float | None = _seconds("max_expires")
    max_batch_bytes: int | None = _wire("max_bytes")

    deliver_subject: str | None = None
    deliver_group: str | None = None
    flow_control: bool | None = None
    idle_heartbeat_s: float | None = _seconds("idle_heartbeat")
    rate_limit_bits_per_s: int | None = _wire("rate_limit_bps")

    inactive_threshold_s: float | None = _seconds("inactive_threshold")
    replicas: int | None = _wire("num_replicas")
    memory_storage: bool | None = _wire("mem_storage")
    pause_until: datetime.datetime | None = _wire("pause_until", unit="time", level=1)
    priority_groups: Sequence[str] | None = _level(1)
    priority_policy: PriorityPolicy | None = _level(1)
    priority_timeout_s: float | None = _seconds("priority_timeout", level=1)
    metadata: Mapping[str, str] | None = None
    extra: Mapping[str, Any] = _extra()

    def __post_init__(self) -> None:
        for what in ("name", "durable_name"):
            if (value := getattr(self, what)) is not None:
                check_name(what, value)
        if self.name and self.durable_name and self.name != self.durable_name:
            raise ConfigError(f"name={self.name!r} with durable_name={self.durable_name!r}: expected one, or the same")
        if self.filter_subject and self.filter_subjects:
            raise ConfigError("filter_subject with filter_subjects: expected one of the two")
        _check_list("filter_subjects", self.filter_subjects)
        for subject in (*([self.filter_subject] if self.filter_subject else []), *(self.filter_subjects or ())):
            validate_filter(subject)
        _check_seconds(
            self, "ack_wait_s", "max_expires_s", "idle_heartbeat_s", "inactive_threshold_s", "priority_timeout_s"
        )
        _check_list("priority_groups", self.priority_groups, "names")
        for value in self.backoff_s or ():
            if not _is_seconds(value):
                raise ConfigError(f"backoff_s={list(self.backoff_s or ())}: expected seconds of 0 or more")
        if self.start_sequence is not None and self.start_time is not None:
            raise ConfigError("start_sequence with start_time: expected one of the two")
        if self.start_sequence is not None and self.deliver_policy not in (None, "by_start_sequence"):
            raise ConfigError(
                f"start_sequence={self.start_sequence} with deliver_policy={self.deliver_policy!r}: "
                "expected 'by_start_sequence', or leave it out"
            )
        if self.start_time is not None and self.deliver_policy not in (None, "by_start_time"):
            raise ConfigError(
                f"start_time with deliver_policy={self.deliver_policy!r}: expected 'by_start_time', or leave it out"
            )


def _check_list(name: str, value: Sequence[str] | None, what: str = "subjects") -> None:
    # A str is a sequence of its characters: "orders.>" would become eight one-letter subjects.
    if isinstance(value, str):
        raise ConfigError(f"{name}={value!r}: expected a list of {what}")


def _check_seconds(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not _is_seconds(value):
            raise ConfigError(f"{name}={value!r}: expected seconds of 0 or more")


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < float("inf")
