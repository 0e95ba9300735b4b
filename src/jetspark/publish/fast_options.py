"""What callers of a fast batch give and get: options, receipts, refusals. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict

from jetspark.core.arguments import function
from jetspark.core.numbers import seconds, seconds_above_0, whole
from jetspark.core.options import check_keywords
from jetspark.errors import ConfigError, ServerError
from jetspark.jetstream.publishing import check_batch_id

__all__ = ["FastBatchKeywords", "FastBatchOptions", "FastReceipt", "GapMode", "Refusal"]

GapMode = Literal["fail", "ok"]

# The server allows 500 at most, whatever is asked for.
MAX_FLOW = 500
# The highest number that the protocol knows: the window has a bound, whatever a server says.
HIGHEST_FLOW = 65535
# As long as a single publish tries again. A leader that steps down has a successor by then; one that died has not.
WAIT_FOR_STREAM_S = 1.0


class FastReceipt(NamedTuple):
    """Where a message stands in its batch."""

    sequence: int
    acknowledged: int
    """The server is done with all up to here. In mode ``"fail"`` they are stored; in mode ``"ok"`` see ``gaps``."""


class Refusal(NamedTuple):
    """A message of the batch that the server did not store."""

    sequence: int
    error: ServerError


@dataclass(frozen=True, slots=True, kw_only=True)
class FastBatchOptions:
    """How a fast batch behaves."""

    gap: GapMode = "fail"
    """What a lost or refused message means: the end of the batch, so that what is stored has no holes; or nothing."""
    batch_id: str | None = None
    flow: int = MAX_FLOW
    """The server acknowledges after this many messages at most; it may choose to do so more often."""
    max_outstanding_acks: int = 2
    """1 waits for each. 2 keeps the server busy meanwhile. 3 is for long ways only."""
    timeout: float = 30.0
    """Longest time without any progress, in seconds. Electing a leader takes up to ten."""
    wait_for_stream_s: float = WAIT_FOR_STREAM_S
    """How long to try again when nobody listens to the first message: then ``JetStreamUnavailable`` says that JetStream
    is off, no stream stores the subject, or it has no leader. For a stream that is there for sure, give it the ten
    seconds that electing a leader may take."""
    ping_after_s: float = 1.0
    """How long to wait for the server before asking."""
    keep_alive_s: float = 3.0
    """Seconds without a message after which an open batch is kept alive; the server forgets it after 10 s."""
    on_gap: Callable[[range], None] | None = None
    """Called with the sequences that were lost."""
    on_error: Callable[[Refusal], None] | None = None
    """Called with each message that was refused."""

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
        """From keywords; an unknown one is an error that lists the known ones."""
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
