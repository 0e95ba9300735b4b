"""What replays want of another engine than this process: to read, to fold, and to fold into a bucket.

The decisions, the records and everything that is stored beside live engines stay here, so that a replay does the same
on every engine. An engine does what takes long. :class:`jetspark.spark.ReplayEngine` is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from jetspark.app.extents import Extent
from jetspark.app.replay.compared import ComparedKeys
from jetspark.errors import ConfigError
from jetspark.state.changes import Current

__all__ = ["FoldEngine", "RangeFold", "RangeSurvey", "check_no_rate"]


class RangeSurvey(NamedTuple):
    """Which keys the events of a range are of."""

    events: Mapping[str, int]
    """How many, by key."""
    last_of: Mapping[str, int]
    """The sequence of the last of them, by key."""
    unreadable: int


class RangeFold(NamedTuple):
    """What became of a range that was folded into a bucket."""

    events: int
    unreadable: int
    changed: int
    """Keys that were stored."""
    parked: int
    """Keys that an event of the range has parked."""


class FoldEngine(Protocol):
    """Folds one projection."""

    async def compare(self, bucket: str, boundary: int, version: int | None) -> ComparedKeys:
        """Compare a bucket, which has all events up to a boundary, with a fresh fold; nothing is stored.

        A key that is beyond the boundary is compared at the sequence that its value says. Without ``version`` the
        bucket may be of any.
        """

    async def survey(self, part: Extent, subject: str | None) -> RangeSurvey:
        """The keys of a range; nothing is stored."""

    async def fold_on(self, part: Extent, bases: Mapping[str, Current]) -> Mapping[str, Current]:
        """What the events of a range make of some keys that have these states; nothing is stored."""

    async def fold_into(self, bucket: str, part: Extent) -> RangeFold:
        """Fold a range into a bucket that has everything before it, and note in the bucket that it has the range."""


def check_no_rate(rate: float | None, engine: FoldEngine | None) -> None:
    """
    Raises:
        ConfigError: Another engine is asked to keep a rate.
    """
    if rate is not None and engine is not None:
        raise ConfigError(f"rate={rate}: expected none with another engine, which folds as fast as it can")
