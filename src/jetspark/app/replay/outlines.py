"""The outline of a range before it is read: subjects, times, and gaps, from a few requests to the server."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jetspark.aio.stream import Stream
from jetspark.app.extents import Extent
from jetspark.app.stream_history import StreamHistory
from jetspark.errors import MessageNotFound, StreamNotFound

__all__ = ["RangeOutline", "gaps_between", "outline_of"]

MAX_NAMED = 20
"""Subjects and gaps that an outline names; it counts the others."""
# The server lists deleted messages one by one. Beyond this number they are counted only.
MAX_LISTED = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeOutline:
    """The subjects, times and gaps of a range."""

    subjects: tuple[str, ...] = ()
    """The filters that are read; the first ``MAX_NAMED``."""
    subject_count: int = 0
    first_time: datetime.datetime | None = None
    """When the first remaining message of the range was stored; None for a range without messages."""
    last_time: datetime.datetime | None = None
    deleted: int = 0
    """Messages that were deleted from the middle of the whole stream."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Deleted sequences of the range, as first and last of each gap; the first ``MAX_NAMED`` gaps."""
    gap_count: int | None = 0
    """None when the stream has more than ``MAX_LISTED`` deleted messages."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "subjects": list(self.subjects),
            "subject_count": self.subject_count,
            "first_time": None if self.first_time is None else self.first_time.isoformat(),
            "last_time": None if self.last_time is None else self.last_time.isoformat(),
            "deleted": self.deleted,
            "gaps": [list(gap) for gap in self.gaps],
            "gap_count": self.gap_count,
        }

    def lines(self, *, reader: str = "fold") -> list[str]:
        """The outline as text; ``reader`` is the noun for the work that reads the range."""
        subjects = f"on {_listed(self.subjects, self.subject_count)}"
        if self.first_time is None or self.last_time is None:
            lines = [subjects]
        else:
            lines = [f"stored from {_text(self.first_time)} to {_text(self.last_time)}, {subjects}"]
        if self.deleted:
            deleted = f"{self.deleted} messages were deleted from the middle of the stream: no {reader} sees them"
            if self.gaps:
                texts = [str(first) if first == last else f"{first} to {last}" for first, last in self.gaps]
                deleted += f"; in this range {_listed(texts, self.gap_count or 0)}"
            elif self.gap_count == 0:
                deleted += "; none of them in this range"
            lines.append(deleted)
        return lines


async def outline_of(history: StreamHistory, extent: Extent, subject: str | None) -> RangeOutline:
    """Get the outline of a range from the server, and from files of the archive that have gaps; the number of requests
    does not grow with its length.
    """
    subjects = history.filters if subject is None else (subject,)
    archived, deleted, is_listed = await history.archived(extent), 0, True
    gaps, times = list[tuple[int, int]](), list[datetime.datetime | None]()
    if archived is not None:
        gaps, times = archived.gaps, list(archived.times)
        deleted = sum(last + 1 - first for first, last in gaps)
        extent = dataclasses.replace(extent, first=archived.following)
    try:
        stream = await history.stream()
        state = (await stream.info()).state
        deleted, is_listed = deleted + state.deleted_count, state.deleted_count <= MAX_LISTED
        if state.deleted_count and is_listed:
            listed = (await stream.info(deleted_details=True)).state.deleted
            gaps = [*gaps, *gaps_between(listed, extent.first, extent.last)]
        times += [await _time_from(stream, extent), await _time_to(stream, extent)]
    except StreamNotFound:
        if archived is None:
            raise
    known = [each for each in times if each is not None]
    return RangeOutline(
        subjects=subjects[:MAX_NAMED],
        subject_count=len(subjects),
        first_time=known[0] if known else None,
        last_time=known[-1] if known else None,
        deleted=deleted,
        gaps=tuple(gaps[:MAX_NAMED]),
        gap_count=len(gaps) if is_listed else None,
    )


def gaps_between(deleted: Iterable[int], first: int, last: int) -> list[tuple[int, int]]:
    """The deleted sequences between ``first`` and ``last``, as gaps."""
    gaps: list[tuple[int, int]] = []
    for sequence in sorted(each for each in deleted if first <= each <= last):
        if gaps and gaps[-1][1] == sequence - 1:
            gaps[-1] = (gaps[-1][0], sequence)
        else:
            gaps.append((sequence, sequence))
    return gaps


async def _time_from(stream: Stream, extent: Extent) -> datetime.datetime | None:
    found = await _next(stream, max(1, extent.first))
    return None if found is None or found[0] > extent.last else found[1]


async def _time_to(stream: Stream, extent: Extent) -> datetime.datetime | None:
    """When the last remaining message was stored. The server only finds the next message after a sequence, so this is a
    binary search if the last sequence of the range is gone.
    """
    low, high, last_time = max(1, extent.first), extent.last, None
    at = high
    while low <= high:
        found = await _next(stream, at)
        if found is not None and found[0] <= extent.last:
            low, last_time = found[0] + 1, found[1]
        else:
            high = at - 1
        at = (low + high) // 2
    return last_time


async def _next(stream: Stream, sequence: int) -> tuple[int, datetime.datetime] | None:
    """The sequence and time of the first message at or after a sequence."""
    try:
        found = await stream.get_message(sequence, next_for=">", direct=False)
    except MessageNotFound:
        return None
    return found.sequence, found.timestamp


def _listed(names: Sequence[str], count: int) -> str:
    more = f" and {count - len(names)} more" if count > len(names) else ""
    return f"{', '.join(names)}{more}"


def _text(moment: datetime.datetime) -> str:
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
