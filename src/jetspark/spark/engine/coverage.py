"""The range of a stream that a write has folded, and the positions of buckets that follow from it. Pure.

A state contains every event of its key up to its sequence only if readers omit no event. A bucket's position tells how
much of the stream it contains. A write of the sequences ``[start, end)`` may be folded into a bucket that contains
everything before ``start``; when all of it is stored, the bucket contains everything before ``end``.

The exception is a repair during the write: a task that found the key stuck has skipped its events. A repair moves the
position back and increments its ``repairs``, so a position with another count is not advanced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jetspark.errors import Conflict, UsageError

if TYPE_CHECKING:
    from jetspark.app.projections.positions import FoldPosition

__all__ = ["Covered", "advance", "check_reach", "check_seen", "merge"]


class Covered(NamedTuple):
    """A range of a stream's sequences that was read completely."""

    start: int
    end: int
    """First sequence after the range."""
    is_earliest: bool = False
    """``start`` is the first message of the stream, and nothing before it counts as lost."""
    positions: tuple[FoldPosition, ...] = ()
    """Positions of the buckets before the first load."""
    revisions: tuple[int, ...] = ()
    """Revisions of these positions: states that a bucket had at its position have lower revisions."""


def merge(parts: Iterable[Covered]) -> Covered | None:
    """The union of the parts of one write; None if it is empty or has a gap."""
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
    """Check that the states loaded by tasks were at least as new as the positions that the write was planned with.

    Plan and tasks read from the leader of a bucket, the tasks later. Only a leader that was replaced without noticing
    can return older states; a task may then have skipped an event because of an old state.

    Args:
        seen: For each task the lower bound of the revision of each bucket that it has loaded; empty without loads.

    Raises:
        Conflict: A load was older. No position was advanced; the same write must run again.
    """
    for task in seen:
        for bucket, planned, loaded in zip(buckets, whole.revisions, task, strict=False):
            if loaded < planned:
                raise Conflict(bucket, ("_jetspark.position",))


def check_reach(bucket: str, position: FoldPosition, start: int, *, is_earliest: bool) -> None:
    """Check that a bucket contains everything before a sequence.

    Raises:
        UsageError: Events between its position and ``start`` are missing.
    """
    have = position.sequence
    if _is_reached(have, start, is_earliest):
        return
    raise UsageError(
        f"bucket {bucket} has everything up to sequence {have}, and this begins at {start}: folding it would leave out "
        f"{have + 1} to {start - 1} permanently. Start with a new checkpoint, which continues from the bucket's "
        "position, or backfill from there"
    )


def advance(known: FoldPosition, stored: FoldPosition, whole: Covered) -> FoldPosition | None:
    """The new position of a bucket after a range was stored in it; None to leave it unchanged.

    Args:
        known: The position before the first load.
        stored: The present position.
    """
    is_reached = _is_reached(stored.sequence, whole.start, whole.is_earliest)
    if stored.repairs != known.repairs or not is_reached or stored.sequence >= whole.end - 1:
        return None
    return stored._replace(sequence=whole.end - 1)


def _is_reached(have: int, start: int, is_earliest: bool) -> bool:
    """True if a bucket that contains everything up to ``have`` contains everything before ``start``.

    An empty bucket does if the stream begins at ``start``. A non-empty one lacks the events that the stream removed.
    """
    return have >= start - 1 or (is_earliest and have == 0)
