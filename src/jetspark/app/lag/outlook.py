"""Where the lag of a reader is going: its slope, and whether it catches up before the stream drops messages. Pure.

A series has the last samples of one reader. Slopes are Theil-Sen estimates, the median of the slopes between all pairs
of samples: a single sample that is off, such as one taken in a burst, changes nothing.

A series starts again when its samples are not comparable: the stream or the consumer was re-created, the position went
back, or more messages are gone than the reader can have processed, as after a purge.

The stream overtakes a reader when it drops the oldest message that the reader still needs:

* ``max_age``: the age of that message reaches the limit. A reader that stands still ages by a second each second;
* ``max_messages`` and ``max_bytes``: the messages from it to the end of the stream reach the limit. Bytes are converted
  by the mean size of the stored messages.

A stream that refuses new messages at its limit (``discard="new"``) overtakes no reader by number or size.
"""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jetspark.jetstream.info import StreamInfo

__all__ = ["LagOutlook", "LagSample", "LagSeries", "StreamLimits"]

MAX_SAMPLES = 30
# Two samples have a slope whatever happens between them.
MIN_SAMPLES = 3
# Estimates beyond this are noise.
FAR_S = 10 * 366 * 86_400.0


class StreamLimits(NamedTuple):
    """The limits at which a stream drops its oldest messages; infinite without a limit."""

    age_s: float = math.inf
    messages: float = math.inf
    bytes: float = math.inf
    bytes_per_message: float = 0.0

    @classmethod
    def of(cls, info: StreamInfo) -> StreamLimits:
        config, state = info.config, info.state
        drops = config.discard != "new"
        return cls(
            _limit(config.max_age_s),
            _limit(config.max_messages) if drops else math.inf,
            _limit(config.max_bytes) if drops else math.inf,
            state.bytes / max(1, state.messages),
        )


class LagSample(NamedTuple):
    """The lag of one reader at one moment."""

    at: datetime.datetime
    """By the server's clock."""
    messages: int
    position: int
    """The last sequence that was read."""
    progress: int
    """Grows by one or more with each message that is read, and not with messages that are removed."""
    underway: int
    """Messages that can be done without progress: they were read before."""
    oldest_s: float | None
    """Age of the oldest message that the stream must keep for the reader; None if it is unknown, 0.0 without one."""
    distance: int
    """Sequences from that message to the end of its stream; 0 without one."""
    identity: tuple[str, ...]

    def continues(self, before: LagSample) -> bool:
        """True if it is comparable with an earlier sample."""
        read = self.progress - before.progress
        return (
            self.identity == before.identity
            and self.at > before.at
            and self.position >= before.position
            and read >= 0
            and before.messages - self.messages <= read + before.underway
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LagOutlook:
    """The direction in which a lag moves. A field is None if it is unknown or will not happen."""

    messages_per_s: float | None = None
    """Change of the lag; negative while the reader catches up."""
    caught_up_in_s: float | None = None
    overtaken_in_s: float | None = None
    """When the stream drops the oldest message that the reader needs, if that is before it has caught up."""
    overtaken_by: Literal["max_age", "max_messages", "max_bytes"] | None = None
    kept_for_s: float | None = None
    """How long ``max_age`` still keeps the oldest message: the time that a reader has that stands still."""


class LagSeries:
    """The last comparable samples of one reader."""

    def __init__(self) -> None:
        self._samples: deque[LagSample] = deque(maxlen=MAX_SAMPLES)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: LagSample) -> None:
        """Add a sample. If it does not continue the others, they are dropped."""
        if self._samples and not sample.continues(self._samples[-1]):
            self._samples.clear()
        self._samples.append(sample)

    def outlook(self, limits: StreamLimits) -> LagOutlook:
        """The direction, from the samples so far; at least three are needed for more than ``kept_for_s``."""
        if not self._samples:
            return LagOutlook()
        last = self._samples[-1]
        kept_for_s = None
        if last.distance and last.oldest_s is not None and math.isfinite(limits.age_s):
            kept_for_s = max(0.0, limits.age_s - last.oldest_s)
        slope = self._slope(lambda sample: sample.messages)
        if slope is None:
            return LagOutlook(kept_for_s=kept_for_s)
        caught_up_in_s = _time_to(last.messages, -slope) if last.messages else 0.0
        overtaken_in_s, overtaken_by = self._overtaken(limits)
        if overtaken_in_s is not None and caught_up_in_s is not None and caught_up_in_s <= overtaken_in_s:
            overtaken_in_s = overtaken_by = None
        return LagOutlook(
            messages_per_s=slope,
            caught_up_in_s=caught_up_in_s,
            overtaken_in_s=overtaken_in_s,
            overtaken_by=overtaken_by,
            kept_for_s=kept_for_s,
        )

    def _overtaken(
        self, limits: StreamLimits
    ) -> tuple[float, Literal["max_age", "max_messages", "max_bytes"]] | tuple[None, None]:
        last = self._samples[-1]
        if not last.distance:
            return None, None
        growth = self._slope(lambda sample: sample.distance)
        ageing = self._slope(lambda sample: sample.oldest_s)
        by_bytes = limits.bytes / limits.bytes_per_message if limits.bytes_per_message else math.inf
        times = {
            "max_age": None if last.oldest_s is None else _time_to(limits.age_s - last.oldest_s, ageing),
            "max_messages": _time_to(limits.messages - last.distance, growth),
            "max_bytes": _time_to(by_bytes - last.distance, growth),
        }
        known = [(seconds, name) for name, seconds in times.items() if seconds is not None]
        return min(known, default=(None, None))  # type: ignore[return-value]

    def _slope(self, value: Callable[[LagSample], float | None]) -> float | None:
        points = [(sample.at, known) for sample in self._samples if (known := value(sample)) is not None]
        if len(points) < MIN_SAMPLES:
            return None
        pairs = itertools.combinations(points, 2)
        return statistics.median((high - low) / (end - begin).total_seconds() for (begin, low), (end, high) in pairs)


def _time_to(room: float, growth: float | None) -> float | None:
    """When something that grows by so much each second has filled the room; None if it never does."""
    if not growth or growth < 0 or not math.isfinite(room):
        return None
    seconds = max(0.0, room / growth)
    return seconds if seconds <= FAR_S else None


def _limit(value: float | None) -> float:
    return math.inf if value is None or value <= 0 else value
