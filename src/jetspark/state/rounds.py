"""Load, fold, compare and set, fold again: the one way in which folded events get into a bucket. Procedures for both
drivers.

A round stores what keys in hand have become, each on the revision it was loaded with (:func:`store_round`). The leader
compares; a key that others wrote meanwhile comes back with what the bucket has instead, and its events are folded onto
that, for the next round. Where the events are kept in hand, the keys do that themselves
(:class:`~jetspark.app.projections.live_states.LiveStates`). Where they are too many, they are read once more:
:func:`store_rounds`.

Nobody compares what is not stored. That a key needs no write is decided on what was loaded, and right only because
loads are never behind (:mod:`jetspark.state.store`): no engine has to think of it, and none can forget it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from jetspark.core.step_runner import Sleep
from jetspark.errors import Conflict
from jetspark.publish.steps import Procedure
from jetspark.state.changes import Change, Current, Outcome
from jetspark.state.store import StateBucket

__all__ = ["MAX_ROUNDS", "KeysInHand", "RepeatableFold", "fold_pieces", "store_round", "store_rounds"]

# Others may write the same keys; who loses a race folds again. This many times is no race any more.
MAX_ROUNDS = 20
# Longer after each lost race.
PAUSE_S = 0.01

P = TypeVar("P", contravariant=True)


class KeysInHand(Protocol):
    """Keys of one bucket: as they were loaded, and with the events since. Pure."""

    def unsure(self) -> Sequence[str]:
        """Keys that have to be loaded again before :meth:`take_changes`: they were stored, and nobody has said how."""

    def reload(self, keys: Iterable[str], loaded: Mapping[str, Current]) -> None:
        """What the bucket has for those keys."""

    def take_changes(self) -> list[Change]:
        """What has to be stored now."""

    def commit(self, changes: Sequence[Change], outcome: Outcome) -> None:
        """What became of it. Keys in conflict go on from what the bucket has instead (``outcome.present``)."""


class RepeatableFold(Protocol[P]):
    """A fold of pieces of rows that can be read again, into one bucket or several."""

    @property
    def hands(self) -> Sequence[KeysInHand]:
        """One for each bucket."""

    def missing(self, piece: P) -> Sequence[Sequence[str]]:
        """The keys that have to be loaded before a piece can be applied, for each bucket."""

    def add(self, number: int, keys: Sequence[str], loaded: Mapping[str, Current]) -> None:
        """Take keys of a bucket in hand."""

    def apply(self, piece: P) -> None:
        """Apply rows of keys that are in hand; later pieces have no lower sequences."""

    def repeat(self) -> None:
        """Those in hand are in conflict, and begin anew: pieces come once more, and rows of other keys are left out."""


def store_round(bucket: StateBucket, keys: KeysInHand, also: Iterable[Change] = ()) -> Procedure[Outcome]:
    """Store what keys in hand have become, and other changes of the same bucket behind it."""
    if unsure := keys.unsure():
        keys.reload(unsure, (yield from bucket.load_all(unsure)))
    changes = keys.take_changes()
    wanted = [*changes, *also]
    if not wanted:
        return Outcome()
    outcome = yield from bucket.store_all(wanted)
    keys.commit(changes, outcome)
    return outcome


def fold_pieces(buckets: Sequence[StateBucket], fold: RepeatableFold[P], pieces: Iterable[P]) -> Procedure[None]:
    """Apply rows to what the buckets have."""
    for piece in pieces:
        for number, keys in enumerate(fold.missing(piece)):
            if keys:
                fold.add(number, keys, (yield from buckets[number].load_all(keys)))
        fold.apply(piece)


def store_rounds(
    buckets: Sequence[StateBucket], fold: RepeatableFold[P], pieces: Callable[[], Iterable[Any]]
) -> Procedure[int]:
    """Store what rows have made of their keys, until every key is stored; returns how many were.

    Args:
        pieces: Reads the rows again, for keys that others have written meanwhile.

    Raises:
        Conflict: Others write the same keys faster than this.
        JetSparkError: As :func:`~jetspark.state.store.store`.
    """
    written = 0
    for attempt in range(1, MAX_ROUNDS + 1):
        left: dict[str, tuple[str, ...]] = {}
        for bucket, keys in zip(buckets, fold.hands, strict=True):
            outcome = yield from store_round(bucket, keys)
            written += outcome.written
            if outcome.conflicts:
                left.setdefault(bucket.name, outcome.conflicts)
        if not left:
            return written
        yield Sleep(PAUSE_S * attempt)
        if attempt < MAX_ROUNDS:
            fold.repeat()
            yield from fold_pieces(buckets, fold, pieces())
    name, conflicts = min(left.items())
    raise Conflict(name, tuple(sorted(conflicts)))
