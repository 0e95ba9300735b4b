"""Stores folded states by compare-and-set: load, fold, store, and fold again after a conflict. Procedures for both
drivers.

This is the only way by which engines write states. A round stores the changed states, each conditional on its loaded
revision (:func:`store_round`). The leader compares the revisions. A key that another writer has changed is returned
with its present entry, and its events are folded onto that for the next round. An engine that keeps the events in
memory does so by itself (:class:`~jetspark.app.projections.live_states.LiveStates`). Otherwise the events are read
again: :func:`store_rounds`.

The leader does not compare keys that are not written. Whether a key needs a write is decided from its loaded state,
which is right only because loads never lag (:mod:`jetspark.state.store`).
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

# Rounds before giving up. A lost race is folded again, but twenty in a row have another cause.
MAX_ROUNDS = 20
# Longer after each lost race.
PAUSE_S = 0.01

P = TypeVar("P", contravariant=True)


class KeysInHand(Protocol):
    """States of keys of one bucket: as they were loaded, with the events applied since. Pure."""

    def unsure(self) -> Sequence[str]:
        """Keys to load again before :meth:`take_changes`: they were stored under unknown revisions."""

    def reload(self, keys: Iterable[str], loaded: Mapping[str, Current]) -> None:
        """Take the present entries of those keys."""

    def take_changes(self) -> list[Change]:
        """The changes to store now."""

    def commit(self, changes: Sequence[Change], outcome: Outcome) -> None:
        """Take the outcome. Keys in conflict are based on their present entries (``outcome.present``)."""


class RepeatableFold(Protocol[P]):
    """A fold of pieces of rows that can be read again, into one bucket or several."""

    @property
    def hands(self) -> Sequence[KeysInHand]:
        """One for each bucket."""

    def missing(self, piece: P) -> Sequence[Sequence[str]]:
        """For each bucket the keys to load before a piece can be applied."""

    def add(self, number: int, keys: Sequence[str], loaded: Mapping[str, Current]) -> None:
        """Add loaded keys of a bucket."""

    def apply(self, piece: P) -> None:
        """Apply rows of loaded keys; sequences of later pieces are not lower."""

    def repeat(self) -> None:
        """Start again with the keys in conflict: pieces are applied once more, without rows of other keys."""


def store_round(bucket: StateBucket, keys: KeysInHand, also: Iterable[Change] = ()) -> Procedure[Outcome]:
    """Store the changed states, followed by other changes of the same bucket."""
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
    """Load the keys of rows from the buckets, and apply the rows."""
    for piece in pieces:
        for number, keys in enumerate(fold.missing(piece)):
            if keys:
                fold.add(number, keys, (yield from buckets[number].load_all(keys)))
        fold.apply(piece)


def store_rounds(
    buckets: Sequence[StateBucket], fold: RepeatableFold[P], pieces: Callable[[], Iterable[Any]]
) -> Procedure[int]:
    """Store the states of all keys, in as many rounds as conflicts need; returns the number of writes.

    Args:
        pieces: Reads the rows again, for keys that another writer has changed.

    Raises:
        Conflict: Keys were changed by others in each of ``MAX_ROUNDS`` rounds.
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
