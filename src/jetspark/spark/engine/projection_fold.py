"""Folds the rows of a Spark task into the states of projections, and stores each key once.

The fold is :mod:`jetspark.app.projections.key_state`, as in all engines. A task must have *all* rows of a key in its
write: Spark shuffles them by a hash of projection and key, and the task sorts them by sequence. Then a task may run
repeatedly, anywhere, and beside other engines. A key is stored by compare-and-set on the loaded revision, with all its
events of the write or none, and a key that another writer has changed is folded again (:mod:`jetspark.state.rounds`).

The loaded states must also contain all events before the write. The plan has read the bucket's position from its
leader. The task returns a lower bound for the revision that its loads have seen, and the driver compares the two
before it advances the position (``coverage``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.state_header import ID_BYTES, Identified
from jetspark.publish.steps import Procedure
from jetspark.state.changes import NOTHING, Change, Current, Outcome
from jetspark.state.rounds import fold_pieces, store_rounds
from jetspark.state.store import open_bucket

__all__ = ["COLUMNS", "ProjectionFold", "Tally"]

COLUMNS = ("target", "key", "sequence", "reading", "data")

Columns: TypeAlias = Sequence[Sequence[Any]]
"""Rows in ascending order of sequences, as one list for each name in ``COLUMNS``."""


@dataclass(slots=True)
class Tally:
    """Counts of folded rows."""

    applied: int = 0
    """Events applied."""
    known: int = 0
    """Events that the states had already."""
    waiting: int = 0
    """Events of keys that are stuck at an earlier event."""
    parked: int = 0
    """Stuck keys among those with rows."""
    written: int = 0
    """Keys stored."""
    letters: int = 0
    newly_parked: int = 0
    """Keys that became stuck at one of the rows; the same number when the rows are folded again."""
    unreadable: int = 0
    """Messages that cannot be read."""


class _TargetStates(dict[str, KeyState]):
    """States of one projection in a task: :class:`~jetspark.state.rounds.KeysInHand`."""

    def __init__(self, spec: ProjectionSpec) -> None:
        self.spec = spec

    def begin(self, keys: Iterable[str], present: Mapping[str, Current]) -> None:
        """Start with keys as they are in the bucket."""
        spec = self.spec
        for key in keys:
            self[key] = KeyState(spec, key, present.get(key, NOTHING))

    def unsure(self) -> list[str]:
        return []  # a key is stored once and dropped

    def reload(self, keys: Iterable[str], loaded: Mapping[str, Current]) -> None:
        self.begin(keys, loaded)

    def take_changes(self) -> list[Change]:
        spec = self.spec
        return [change for key, state in self.items() if (change := state.change(spec, key)) is not None]

    def commit(self, changes: Sequence[Change], outcome: Outcome) -> None:
        self.clear()
        self.begin(outcome.conflicts, outcome.present)


class ProjectionFold:
    """Some projections, and the bucket that each is folded into; a :class:`~jetspark.state.rounds.RepeatableFold`."""

    def __init__(
        self,
        specs: Sequence[ProjectionSpec],
        buckets: Sequence[str],
        readers: Sequence[Callable[[Any], Any]],
        *,
        patience_s: float,
        check_keys: Callable[[int], None],
    ) -> None:
        self._buckets, self._readers = buckets, readers
        self._patience_s, self._check_keys = patience_s, check_keys
        self.hands = [_TargetStates(spec) for spec in specs]
        self._is_repeated = False
        self._first: int | None = None
        """Lowest sequence of the rows."""
        self.seen: list[int] = []
        """For each bucket the revision that its loads have seen at least."""

    def fold_and_store(self, pieces: Callable[[], Iterable[Columns]]) -> Procedure[Tally]:
        """Fold rows into the buckets. ``pieces`` is called again for keys that another writer has changed.

        Raises:
            UsageError: A state is of another version of its projection.
            Conflict: Keys were changed by others in every attempt.
            JetSparkError: As :func:`~jetspark.state.store.store`.
        """
        buckets = []
        for name in self._buckets:
            bucket = yield from open_bucket(name, patience_s=self._patience_s)
            buckets.append(bucket)
        self.seen = [bucket.seen for bucket in buckets]
        yield from fold_pieces(buckets, self, pieces())
        tally = self._tally()
        tally.written = yield from store_rounds(buckets, self, pieces)
        return tally

    def fold_from_nothing(self, pieces: Iterable[Columns]) -> Sequence[Mapping[str, KeyState]]:
        """Fold rows from empty states; returns the states of each projection by key."""
        for piece in pieces:
            for target, keys in enumerate(self.missing(piece)):
                self.add(target, keys, {})
            self.apply(piece)
        return self.hands

    def fold_bases(self, bases: Mapping[str, Current], pieces: Iterable[Columns]) -> Mapping[str, KeyState]:
        """Fold rows of a single projection onto given states; rows of other keys are ignored."""
        [states] = self.hands
        self._check_keys(len(bases))
        states.begin(bases, bases)
        self.repeat()
        for piece in pieces:
            self.apply(piece)
        return states

    # ---- piece by piece ----------------------------------------------------------------------------------------

    def missing(self, piece: Columns) -> list[list[str]]:
        wanted: list[list[str]] = [[] for _ in self.hands]
        if self._is_repeated:
            return wanted
        hands = self.hands
        for target, key in dict.fromkeys(zip(piece[0], piece[1], strict=True)):
            if key not in hands[target]:
                wanted[target].append(key)
        self._check_keys(sum(map(len, hands)) + sum(map(len, wanted)))
        return wanted

    def add(self, number: int, keys: Sequence[str], loaded: Mapping[str, Current]) -> None:
        self.hands[number].begin(keys, loaded)

    def apply(self, piece: Columns) -> None:
        hands, readers = self.hands, self._readers
        rows: Iterable[Any] = zip(*piece, strict=True)
        if self._first is None and piece[2]:
            self._first = piece[2][0]
        if self._is_repeated:
            rows = (row for row in rows if row[1] in hands[row[0]])
        is_identified = [bool(states.spec.unique_ids) for states in hands]
        for target, key, sequence, reading, data in rows:
            states = hands[target]
            state = states[key]
            if sequence <= state.sequence or state.parked is not None:
                state.apply(states.spec, key, sequence, None)  # the event is not needed, and not decoded
            elif is_identified[target]:
                event = Identified(data[:ID_BYTES], readers[reading](data[ID_BYTES:]))
                state.fold(states.spec, key, sequence, event)
            else:
                state.fold(states.spec, key, sequence, readers[reading](data))

    def repeat(self) -> None:
        self._is_repeated = True

    def _tally(self) -> Tally:
        tally, first = Tally(), self._first or 0
        for state in (state for states in self.hands for state in states.values()):
            tally.applied += state.applied
            tally.known += state.known
            tally.waiting += state.waiting
            if state.parked is not None:
                tally.parked += 1
                tally.newly_parked += state.parked.sequence >= first
        return tally
