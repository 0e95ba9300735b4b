"""Configurations of streams and consumers. Each field is declared once, here: its name in Python, its name on the wire
and its unit; :mod:`jetspark.jetstream.wire` does the rest.

``None`` means "not mentioned": the server's default in a new stream or consumer, the present value in an update.
Durations are seconds, sizes bytes. Unknown fields of a newer server are kept in ``extra`` and sent back unchanged.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from jetspark.core.arguments import explained
from jetspark.errors import ConfigError
from jetspark.jetstream.checks import (
    INT32,
    UINT64,
    check_description,
    check_fields,
    check_filter,
    check_group,
    check_name,
    check_not_empty,
    check_queue,
    check_sample,
    check_subject,
)

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


# The server's own bound.
MAX_REPLICAS = 5


def _wire(name: str, *, unit: str = "", level: int = 0, default: Any = None, **rules: Any) -> Any:
    """A field whose name, unit or needed API level on the wire differs from the obvious; see ``checks`` for rules."""
    return field(default=default, metadata={"wire": name, "unit": unit, "level": level, **rules})


def _seconds(name: str, *, level: int = 0, low: float = 0) -> Any:
    """A duration of 0, or of ``low`` and more."""
    return _wire(name, unit="ns", level=level, low=low)


def _level(level: int, **rules: Any) -> Any:
    return field(default=None, metadata={"level": level, **rules})


def ruled(**rules: Any) -> Any:
    """A field with its usual name, and validation rules of its own.

    ``release`` is the first server release with the field, for fields older than API levels: older servers ignore it.
    """
    return field(default=None, metadata=rules)


def _extra() -> Any:
    return field(default_factory=dict, metadata={"wire": ""})


def _check_source(what: str, text: str) -> None:
    if text:  # empty is everything
        check_filter(what, text)


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where replicas should live."""

    cluster: str | None = ruled(check=check_not_empty)
    tags: Sequence[str] | None = ruled(check=check_not_empty, each="tags")
    preferred: str | None = ruled(check=check_not_empty)
    """For a step-down only: the server that should lead next."""
    extra: Mapping[str, Any] = _extra()

    def __post_init__(self) -> None:
        check_fields(self)


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectTransform:
    """Messages on ``source`` are stored under ``destination``, which may use ``{{wildcard(1)}}`` and its like."""

    source: str = _wire("src", default="", check=_check_source)
    """Empty means everything."""
    destination: str = _wire("dest", default="")
    """Empty, in a :class:`StreamSource`, means that subjects stay as they are."""
    extra: Mapping[str, Any] = _extra()

    def __post_init__(self) -> None:
        check_fields(self)


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """A stream reached through another account or domain."""

    api_prefix: str = field(metadata={"wire": "api", "check": check_subject})
    deliver_prefix: str | None = _wire("deliver", check=check_filter)
    extra: Mapping[str, Any] = _extra()

    def __post_init__(self) -> None:
        check_fields(self)


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSource:
    """Another stream to copy from, as the only one (``mirror``) or one of several (``sources``)."""

    name: str = field(metadata={"check": check_name})
    start_sequence: int | None = _wire("opt_start_seq", high=UINT64)
    start_time: datetime.datetime | None = _wire("opt_start_time", unit="time")
    filter_subject: str | None = ruled(check=_check_source)
    subject_transforms: Sequence[SubjectTransform] | None = None
    external: External | None = None
    extra: Mapping[str, Any] = _extra()

    def __post_init__(self) -> None:
        check_fields(self)


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class Republish:
    """Every stored message is published once more, under ``destination``."""

    source: str = _wire("src", default="", check=_check_source)
    """Empty means everything."""
    destination: str = field(metadata={"wire": "dest", "check": check_not_empty})
    headers_only: bool | None = None
    extra: Mapping[str, Any] = _extra()

    def __post_init__(self) -> None:
        check_fields(self)


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLimits:
    """Bounds and defaults for the consumers of a stream."""

    inactive_threshold_s: float | None = _seconds("inactive_threshold")
    max_ack_pending: int | None = ruled(low=-1)
    extra: Mapping[str, Any] = _extra()

    def __post_init__(self) -> None:
        check_fields(self)


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """A stream: its subjects, its limits, and the operations that it allows."""

    name: str = field(metadata={"check": check_name})
    description: str | None = ruled(check=check_description)
    subjects: Sequence[str] | None = ruled(check=check_filter)
    retention: Retention | None = None
    storage: Storage | None = None
    replicas: int | None = _wire("num_replicas", low=1, high=MAX_REPLICAS)

    # -1 and 0 are no limit.
    max_messages: int | None = _wire("max_msgs", low=-1)
    max_messages_per_subject: int | None = _wire("max_msgs_per_subject", low=-1)
    max_bytes: int | None = ruled(low=-1)
    max_age_s: float | None = _seconds("max_age", low=0.1)
    max_message_bytes: int | None = _wire("max_msg_size", low=-1, high=INT32)
    max_consumers: int | None = ruled(low=-1)
    discard: Discard | None = None
    discard_new_per_subject: bool | None = None
    duplicate_window_s: float | None = _seconds("duplicate_window", low=0.1)

    allow_direct: bool | None = None
    mirror_direct: bool | None = None
    allow_rollup: bool | None = _wire("allow_rollup_hdrs")
    allow_message_ttl: bool | None = _wire("allow_msg_ttl", level=1)
    subject_delete_marker_ttl_s: float | None = _seconds("subject_delete_marker_ttl", level=1, low=1)
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
    subject_transform: SubjectTransform | None = ruled(release="2.10")
    republish: Republish | None = None
    placement: Placement | None = None
    compression: Compression | None = ruled(release="2.10")
    first_sequence: int | None = _wire("first_seq", high=UINT64, release="2.10")
    consumer_limits: ConsumerLimits | None = ruled(release="2.10")
    metadata: Mapping[str, str] | None = ruled(release="2.10")
    extra: Mapping[str, Any] = _extra()

    def __post_init__(self) -> None:
        check_fields(self)


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig:
    """A consumer: which messages of its stream, from where on, and how they are acknowledged.

    With ``durable_name`` it exists until it is deleted; with ``name`` alone, or neither, until it is unused for
    ``inactive_threshold_s``. With ``deliver_subject`` the server pushes, without it clients pull.
    """

    name: str | None = ruled(check=check_name)
    durable_name: str | None = ruled(check=check_name)
    description: str | None = ruled(check=check_description)

    deliver_policy: DeliverPolicy | None = None
    start_sequence: int | None = _wire("opt_start_seq", low=1, high=UINT64)
    start_time: datetime.datetime | None = _wire("opt_start_time", unit="time")
    filter_subject: str | None = ruled(check=_check_source)
    filter_subjects: Sequence[str] | None = ruled(check=check_filter, release="2.10")
    replay_policy: ReplayPolicy | None = None
    headers_only: bool | None = None

    ack_policy: AckPolicy | None = None
    ack_wait_s: float | None = _seconds("ack_wait")
    max_deliver: int | None = ruled(low=-1)
    backoff_s: Sequence[float] | None = _wire("backoff", unit="ns_list")
    max_ack_pending: int | None = ruled(low=-1)
    sample_frequency: str | None = _wire("sample_freq", check=check_sample)

    max_waiting: int | None = None
    max_batch: int | None = None
    max_expires_s: float | None = _seconds("max_expires", low=0.001)
    max_batch_bytes: int | None = _wire("max_bytes")

    deliver_subject: str | None = ruled(check=check_subject)
    deliver_group: str | None = ruled(check=check_queue)
    flow_control: bool | None = None
    idle_heartbeat_s: float | None = _seconds("idle_heartbeat", low=0.1)
    rate_limit_bits_per_s: int | None = _wire("rate_limit_bps", high=UINT64)

    inactive_threshold_s: float | None = _seconds("inactive_threshold")
    replicas: int | None = _wire("num_replicas", high=MAX_REPLICAS)
    memory_storage: bool | None = _wire("mem_storage")
    pause_until: datetime.datetime | None = _wire("pause_until", unit="time", level=1)
    priority_groups: Sequence[str] | None = _level(1, check=check_group, each="names")
    priority_policy: PriorityPolicy | None = _level(1)
    priority_timeout_s: float | None = _seconds("priority_timeout", level=1)
    metadata: Mapping[str, str] | None = ruled(release="2.10")
    extra: Mapping[str, Any] = _extra()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.name and self.durable_name and self.name != self.durable_name:
            raise ConfigError(f"name={self.name!r} with durable_name={self.durable_name!r}: expected one, or the same")
        if self.filter_subject and self.filter_subjects:
            raise ConfigError("filter_subject with filter_subjects: expected one of the two")
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
