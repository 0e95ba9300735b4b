"""Which part of a stream a write has folded, and what that means for the buckets it went into. Pure.

The rule of a fold, that an event at or below the sequence of a state is in it, needs a reader that leaves none out. A
bucket says how far its readers have come: its position. A write of the sequences ``[start, end)`` may be folded into a
bucket that has everything before ``start``; and when all of it is stored, the bucket has everything before ``end``.

Not if a key of the bucket was repaired meanwhile: a task that found it parked has passed by its events. The repair
has moved the position back and counted itself, so a position with another count is left where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jetspark.errors import Conflict, UsageError

if TYPE_CHECKING:
    from jetspark.app.projections.positions import FoldPosition

__all__ = ["Covered", "advance", "check_reach", "check_seen", "merge"]


class Covered(NamedTuple):
    """Some of a stream's sequences, all of which were read."""

    start: int
    end: int
    """The first that is not among them."""
    is_earliest: bool = False
    """There is nothing before ``start``, and nobody was promised anything."""
    positions: tuple[FoldPosition, ...] = ()
    """Those of the buckets, before anything was loaded from them."""
    revisions: tuple[int, ...] = ()
    """Of those positions: what a bucket had when it was that far has no higher sequences in the bucket."""


def merge(parts: Iterable[Covered]) -> Covered | None:
    """Parts of one write as one; None if there are none, or something between them was not read."""
    whole: Covered | None = None
    for part in sorted(parts, key=lambda each: each.start):
        if whole is None:
            whole = part
        elif part.start > whole.end:
            return None
        else:
            whole = Covered(whole.start, max(whole.end, part.end), *whole[2:])
    return whole


def check_seen(buckets: Sequence[str], whole: Covered, seen: Iterable[Sequence[int]]) -> None:
    """That what tasks have loaded from buckets was not older than the positions that the write was planned with.

    A task asks the leader of a bucket, after the plan has done so. Only one that was replaced and has not noticed can
    say less than the other; then an event may have been passed by on a state of the past.

    Args:
        seen: Of each task, how new what it has loaded from each bucket was, at least; nothing if it has loaded nothing.

    Raises:
        Conflict: It was older. Nothing of it was noted; the same write is to be done again.
    """
    for task in seen:
        for bucket, planned, loaded in zip(buckets, whole.revisions, task, strict=False):
            if loaded < planned:
                raise Conflict(bucket, ("_jetspark.position",))


def check_reach(bucket: str, position: FoldPosition, start: int, *, is_earliest: bool) -> None:
    """That a bucket has everything that comes before a sequence.

    Raises:
        UsageError: Something between the two is missing.
    """
    have = position.sequence
    if _is_reached(have, start, is_earliest):
        return
    raise UsageError(
        f"bucket {bucket} has everything up to sequence {have}, and this begins at {start}: folding it would leave out "
        f"{have + 1} to {start - 1} for ever. Start with a new checkpoint, which begins where the bucket is, or "
        "backfill from there"
    )


def advance(known: FoldPosition, stored: FoldPosition, whole: Covered) -> FoldPosition | None:
    """The position of a bucket after a part was stored in it; None to leave it as it is.

    Args:
        known: What it was before anything was loaded.
        stored: What it is now.
    """
    is_reached = _is_reached(stored.sequence, whole.start, whole.is_earliest)
    if stored.repairs != known.repairs or not is_reached or stored.sequence >= whole.end - 1:
        return None
    return stored._replace(sequence=whole.end - 1)


def _is_reached(have: int, start: int, is_earliest: bool) -> bool:
    """Whether a bucket with everything up to ``have`` has everything before ``start``.

    An empty one does if the stream begins there. One that is not has lost what the stream has removed since.
    """
    return have >= start - 1 or (is_earliest and have == 0)
