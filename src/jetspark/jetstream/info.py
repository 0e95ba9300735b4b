"""The server's reports on streams, consumers, messages and accounts."""

from __future__ import annotations

import base64
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jetspark.codes import Code
from jetspark.core.headers import Headers, Status, last_value, readable, restored
from jetspark.core.message import CoreMessage
from jetspark.core.numbers import UINT64
from jetspark.errors import MessageNotFound, ProtocolError, ServerError
from jetspark.jetstream import wire
from jetspark.jetstream.config import ConsumerConfig, StreamConfig

__all__ = [
    "AccountInfo",
    "AccountLimits",
    "AccountTier",
    "ClusterInfo",
    "ConsumerInfo",
    "PubAck",
    "SequencePair",
    "StoredMessage",
    "StreamInfo",
    "StreamState",
    "direct_status",
]


T = TypeVar("T", str, int)


def _wire(name: str, *, unit: str = "", default: Any = None) -> Any:
    return field(default=default, metadata={"wire": name, "unit": unit})


def _extra() -> Any:
    return field(default_factory=dict, metadata={"wire": ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Size and range of a stream."""

    messages: int = 0
    bytes: int = 0
    first_sequence: int = _wire("first_seq", default=0)
    first_time: datetime.datetime | None = _wire("first_ts", unit="time")
    last_sequence: int = _wire("last_seq", default=0)
    last_time: datetime.datetime | None = _wire("last_ts", unit="time")
    consumers: int = _wire("consumer_count", default=0)
    deleted_count: int = _wire("num_deleted", default=0)
    deleted: Sequence[int] = ()
    """Deleted sequences, if requested with ``deleted_details``."""
    subject_count: int = _wire("num_subjects", default=0)
    subjects: Mapping[str, int] = field(default_factory=dict)
    """Messages per subject, if requested with ``subjects_filter``."""
    extra: Mapping[str, Any] = _extra()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo:
    """The leader and the followers of a stream or consumer."""

    name: str | None = None
    leader: str | None = None
    replicas: Sequence[Mapping[str, Any]] = ()
    extra: Mapping[str, Any] = _extra()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInfo:
    """A stream's configuration and state at one moment."""

    config: StreamConfig
    state: StreamState
    created: datetime.datetime | None = _wire("created", unit="time")
    timestamp: datetime.datetime | None = _wire("ts", unit="time")
    """The server's clock when it answered."""
    cluster: ClusterInfo | None = None
    extra: Mapping[str, Any] = _extra()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePair:
    """A position: counted by the consumer and by the stream."""

    consumer_sequence: int = _wire("consumer_seq", default=0)
    stream_sequence: int = _wire("stream_seq", default=0)
    extra: Mapping[str, Any] = _extra()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerInfo:
    """A consumer's configuration and position at one moment."""

    stream_name: str
    name: str
    config: ConsumerConfig
    created: datetime.datetime | None = _wire("created", unit="time")
    timestamp: datetime.datetime | None = _wire("ts", unit="time")
    """The server's clock when it answered."""
    delivered: SequencePair = field(default_factory=SequencePair)
    ack_floor: SequencePair = field(default_factory=SequencePair)
    ack_pending: int = _wire("num_ack_pending", default=0)
    redelivered: int = _wire("num_redelivered", default=0)
    waiting_pulls: int = _wire("num_waiting", default=0)
    pending: int = _wire("num_pending", default=0)
    """Messages that match and have not been delivered yet: the consumer's lag."""
    is_paused: bool = _wire("paused", default=False)
    pause_remaining_s: float | None = _wire("pause_remaining", unit="ns")
    push_bound: bool = False
    cluster: ClusterInfo | None = None
    extra: Mapping[str, Any] = _extra()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountLimits:
    """Limits of an account. A value of -1 means no limit."""

    max_memory: int = -1
    """Bytes of all streams in memory."""
    max_storage: int = -1
    """Bytes of all streams on disk."""
    max_streams: int = -1
    max_consumers: int = -1
    max_ack_pending: int = -1
    """Highest ``max_ack_pending`` of a consumer."""
    max_stream_memory: int = _wire("memory_max_stream_bytes", default=-1)
    """Bytes of one stream in memory."""
    max_stream_storage: int = _wire("storage_max_stream_bytes", default=-1)
    """Bytes of one stream on disk."""
    is_max_bytes_required: bool = _wire("max_bytes_required", default=False)
    """Every stream must set ``max_bytes``."""
    extra: Mapping[str, Any] = _extra()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountTier:
    """Usage and limits of the streams with one number of replicas."""

    memory: int = 0
    storage: int = 0
    streams: int = 0
    consumers: int = 0
    limits: AccountLimits = field(default_factory=AccountLimits)
    extra: Mapping[str, Any] = _extra()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountInfo(AccountTier):
    """Usage and limits of an account. ``api_level`` says which features the server has."""

    api: Mapping[str, Any] = field(default_factory=dict)
    domain: str | None = None

    @property
    def tiers(self) -> dict[str, AccountTier]:
        """Usage and limits by tier (``R1``, ``R3``), if the account has tiers; ``limits`` is then meaningless."""
        tiers = self.extra.get("tiers")
        return {name: wire.decode(AccountTier, tier) for name, tier in tiers.items()} if isinstance(tiers, dict) else {}

    @property
    def api_level(self) -> int:
        level = self.api.get("level", 0)
        return level if isinstance(level, int) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PubAck:
    """The stream has stored the message (or had, when ``duplicate``)."""

    stream: str
    sequence: int = _wire("seq", default=0)
    duplicate: bool = False
    domain: str | None = None
    batch: str | None = None
    batch_size: int | None = _wire("count")
    value: str | None = _wire("val")
    """The value of a counter after this message."""
    extra: Mapping[str, Any] = _extra()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """A message as stored in a stream."""

    stream: str
    subject: str
    sequence: int
    timestamp: datetime.datetime
    data: bytes
    headers: Headers
    """The readable headers: the server stores any block that a publisher writes."""
    raw_headers: bytes | None = field(default=None, repr=False, compare=False)
    """The stored block of headers; None without one."""
    time_ns: int | None = field(default=None, repr=False, compare=False)
    """``timestamp`` in nanoseconds since 1970, as the server keeps it; None if unknown."""

    @classmethod
    def from_reply(cls, stream: str, reply: Mapping[str, Any]) -> StoredMessage:
        """From the answer to ``STREAM.MSG.GET``: base64 in JSON."""
        message = reply.get("message")
        if not isinstance(message, dict):
            raise ProtocolError(f"a message reply without a message: {str(reply)[:80]}")
        try:
            raw_headers = base64.b64decode(message.get("hdrs", ""), validate=True)
            time = str(message.get("time", ""))
            moment = _moment(time)
            return cls(
                stream=stream,
                subject=_typed(message, "subject", str),
                sequence=_typed(message, "seq", int),
                timestamp=moment,
                data=base64.b64decode(message.get("data", ""), validate=True),
                headers=readable(raw_headers),
                raw_headers=raw_headers or None,
                time_ns=wire.nanoseconds(moment, time),
            )
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"a message we cannot read: {error!r}") from error

    @classmethod
    def from_direct(cls, message: CoreMessage) -> StoredMessage:
        """The message of a direct get; its stream position is in headers, which are removed from the message's own.

        Raises:
            MessageNotFound: The stream has no such message.
            ServerError: The server refused for another reason.
        """
        if (status := direct_status(message)) is not None:
            kind = MessageNotFound if status.code == 404 else ServerError
            raise kind(
                status.code, Code.MESSAGE_NOT_FOUND.value if status.code == 404 else 0, status.description.lower()
            )
        # The server appends its headers behind the message's own, which may have the same names, as republished
        # messages do. So the last header of each name is the server's.
        place: dict[str, str] = {}
        own: list[tuple[str, str]] = []
        pairs = readable(message.raw_headers).multi_items()
        of_the_server = _PLACE + (_BATCH if any(name == "Nats-Num-Pending" for name, _ in pairs) else ())
        for name, value in reversed(pairs):
            if name in of_the_server and name not in place:
                place[name] = value
            else:
                own.append((name, value))
        for name in _PLACE:
            if name not in place and (found := last_value(message.raw_headers, name)) is not None:
                place[name] = found
        try:
            stream, time = place["Nats-Stream"], place["Nats-Time-Stamp"]
            moment = _moment(time)
            return cls(
                stream=stream,
                subject=place["Nats-Subject"],
                sequence=wire.number_in(place["Nats-Sequence"]),
                timestamp=moment,
                data=message.data,
                headers=restored(own[::-1]),
                raw_headers=_without_place(message.raw_headers or b""),
                time_ns=wire.nanoseconds(moment, time),
            )
        except KeyError as error:
            raise ProtocolError(f"a direct message without the header {error}") from None
        except ValueError as error:
            raise ProtocolError(f"a direct message we cannot read: {error}") from error


def _without_place(block: bytes) -> bytes | None:
    """The block of a message's own headers, before the server took its blank line off and appended its headers.

    An empty block looks like a message without headers, and becomes one. A publisher's block that did not end with a
    line break has lost its last two bytes in the server's answer.
    """
    own = block[: block.rfind(b"Nats-Stream:")]
    return None if own == b"NATS/1.0\r\n" else own + b"\r\n"


def direct_status(message: CoreMessage) -> Status | None:
    """The status that a direct get returned instead of a message; None for a message.

    The server stores any block of headers, also one with a status in its first line. Only messages have the header
    that the server appends.
    """
    if last_value(message.raw_headers, "Nats-Sequence") is not None:
        return None
    return message.status


_PLACE = ("Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp")
_BATCH = ("Nats-Num-Pending", "Nats-Last-Sequence")


def _typed(fields: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = fields.get(name)
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value <= UINT64):
        raise ProtocolError(f"a stored message whose {name} is {str(value)[:40]!r}")
    return value


def _moment(text: str) -> datetime.datetime:
    moment = wire.parse_time(text)
    if moment is None:
        raise ProtocolError("a stored message without a time")
    return moment
