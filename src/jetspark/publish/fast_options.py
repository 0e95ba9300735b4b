"""Options of fast batches and fast publishers, and the receipts and refusals that their callers get. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict

from jetspark.core.arguments import flag, function, text
from jetspark.core.headers import HeadersLike
from jetspark.core.numbers import seconds, seconds_above_0, whole
from jetspark.core.options import check_keywords
from jetspark.errors import ConfigError, ServerError
from jetspark.jetstream.publishing import check_batch_id

__all__ = [
    "FastBatchKeywords",
    "FastBatchOptions",
    "FastPublisherKeywords",
    "FastPublisherOptions",
    "FastReceipt",
    "GapMode",
    "Refusal",
    "Refused",
]

GapMode = Literal["fail", "ok"]

# The server allows at most 500, and reduces larger values.
MAX_FLOW = 500
# The highest number of the protocol: it bounds the window against any value from a server.
HIGHEST_FLOW = 65535
# As long as a single publish is repeated: enough for a leader that steps down, but not after the death of one.
WAIT_FOR_STREAM_S = 1.0


class FastReceipt(NamedTuple):
    """The sequence of a message in its batch, and the batch's progress."""

    sequence: int
    acknowledged: int
    """The server has processed all messages up to this one. In mode ``"fail"`` they are stored; for ``"ok"`` see
    ``gaps``."""


class Refusal(NamedTuple):
    """A message of the batch that the server did not store."""

    sequence: int
    error: ServerError


@dataclass(frozen=True, slots=True, kw_only=True)
class FastBatchOptions:
    """Options of a fast batch."""

    gap: GapMode = "fail"
    """``"fail"``: a lost or refused message ends the batch, so that the stored messages have no holes. ``"ok"``: it
    does not."""
    batch_id: str | None = None
    flow: int = MAX_FLOW
    """The server acknowledges after at most this many messages; it may choose fewer."""
    max_outstanding_acks: int = 2
    """1 waits for each acknowledgement. 2 keeps the server busy during the wait. 3 is for long distances only."""
    timeout: float = 30.0
    """Longest time without any progress, in seconds. Electing a leader takes up to ten."""
    wait_for_stream_s: float = WAIT_FOR_STREAM_S
    """How long the first message is repeated while no stream answers. Then ``JetStreamUnavailable`` is raised:
    JetStream is off, no stream stores the subject, or it has no leader. For a stream that certainly exists, allow the
    ten seconds that electing a leader may take."""
    ping_after_s: float = 1.0
    """Silence of the server before it is asked."""
    keep_alive_s: float = 3.0
    """Seconds without a message after which an open batch is kept alive; the server drops it after 10 s."""
    on_gap: Callable[[range], None] | None = None
    """Called with each range of lost sequences."""
    on_error: Callable[[Refusal], None] | None = None
    """Called with each refused message."""

    def __post_init__(self) -> None:
        if self.gap not in ("fail", "ok"):
            raise ConfigError(f"gap={self.gap!r}: expected 'fail' or 'ok'")
        if self.batch_id is not None:
            check_batch_id(self.batch_id)
        whole("flow", self.flow, high=HIGHEST_FLOW)
        whole("max_outstanding_acks", self.max_outstanding_acks, high=3)
        for name in ("timeout", "ping_after_s", "keep_alive_s"):
            seconds_above_0(name, getattr(self, name))
        seconds("wait_for_stream_s", self.wait_for_stream_s)
        for name in ("on_gap", "on_error"):
            if (callback := getattr(self, name)) is not None:
                function(name, callback)

    @classmethod
    def of(cls, gap: GapMode, given: FastBatchKeywords) -> FastBatchOptions:
        """The options in keywords; an unknown keyword is an error that lists the known ones."""
        check_keywords(cls, "fast batch", given)
        return cls(gap=gap, **given)


class FastBatchKeywords(TypedDict, total=False):
    """The fields of :class:`FastBatchOptions` as keywords of ``fast_batch``, for type checkers."""

    batch_id: str | None
    flow: int
    max_outstanding_acks: int
    timeout: float
    wait_for_stream_s: float
    ping_after_s: float
    keep_alive_s: float
    on_gap: Callable[[range], None] | None
    on_error: Callable[[Refusal], None] | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A message that the stream refused, and its error."""

    position: int
    subject: str
    data: bytes
    headers: HeadersLike | bytes | None
    error: ServerError


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPublisherOptions:
    """Options of a fast publisher."""

    message_ids: bool = False
    """Give every message an id, so that messages in doubt are stored once; costs the server a lookup for each."""
    id_prefix: str | None = None
    """An id is this prefix, a dash and the position. The default is unique; set one for the same ids in every run."""
    max_pending_messages: int = 10_000
    """Bound on messages accepted and not yet known to be stored; beyond it ``publish`` waits."""
    max_pending_bytes: int = 64 << 20
    flow: int = 500
    max_outstanding_acks: int = 2
    patience_s: float = 120.0
    """Longest time without progress before giving up. By default as long as a stream's duplicate window, for the
    ids."""
    batch_timeout_s: float = 15.0
    """Longest time without an answer before a batch is given up for the next."""
    wait_for_stream_s: float = WAIT_FOR_STREAM_S
    """How long the very first message is repeated while no stream answers. Then ``JetStreamUnavailable`` is raised:
    JetStream is off, no stream stores the subject, or it has no leader, and nothing is stored. After the first answer
    ``patience_s`` holds instead."""
    on_refused: Callable[[Refused], None] | None = None
    """Called with each refused message, which is then skipped. Without it a refusal ends the publisher."""

    def __post_init__(self) -> None:
        flag("message_ids", self.message_ids)
        if self.id_prefix is not None:
            text("id_prefix", self.id_prefix)
        if self.on_refused is not None:
            function("on_refused", self.on_refused)
        for name in ("max_pending_messages", "max_pending_bytes"):
            whole(name, getattr(self, name))
        for name in ("patience_s", "batch_timeout_s"):
            seconds_above_0(name, getattr(self, name))
        seconds("wait_for_stream_s", self.wait_for_stream_s)
        if self.id_prefix is not None and not self.message_ids:
            raise ConfigError(f"id_prefix={self.id_prefix!r}: expected message_ids=True beside it")
        if self.id_prefix is not None and (not self.id_prefix.isprintable() or self.id_prefix[:1] in ("", " ")):
            raise ConfigError(f"id_prefix={self.id_prefix!r}: expected printable characters, no blank first")
        FastBatchOptions(flow=self.flow, max_outstanding_acks=self.max_outstanding_acks)  # has checks of its own

    def batch_options(self, *, is_stream_known: bool) -> FastBatchOptions:
        return FastBatchOptions(
            gap="fail",
            # An acknowledgement has to come before the pending messages reach their bound.
            flow=max(1, min(self.flow, self.max_pending_messages // (self.max_outstanding_acks + 1))),
            max_outstanding_acks=self.max_outstanding_acks,
            timeout=self.batch_timeout_s,
            wait_for_stream_s=self.batch_timeout_s if is_stream_known else self.wait_for_stream_s,
        )

    @classmethod
    def of(cls, message_ids: bool, given: FastPublisherKeywords) -> FastPublisherOptions:
        """The options in keywords; an unknown keyword is an error that lists the known ones."""
        check_keywords(cls, "fast publisher", given)
        return cls(message_ids=message_ids, **given)


class FastPublisherKeywords(TypedDict, total=False):
    """The fields of :class:`FastPublisherOptions` as keywords of ``fast_publisher``, for type checkers."""

    id_prefix: str | None
    max_pending_messages: int
    max_pending_bytes: int
    flow: int
    max_outstanding_acks: int
    patience_s: float
    batch_timeout_s: float
    wait_for_stream_s: float
    on_refused: Callable[[Refused], None] | None
