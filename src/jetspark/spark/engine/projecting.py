"""What a task does with the rows of an application's projections: fold them, and store each key once.

The rule is that of :mod:`jetspark.app.projections.folding`, with the same code. What has to hold here is that a task
has *all* rows of a key that its write has: Spark brings them together by a hash of projection and key, and the task
sorts them by sequence. Then it does not matter how often, or where, or beside whom it is run: a key is stored by
compare-and-set on the revision that was loaded, with all its events of the write or none of them, and a key that
somebody else has written meanwhile is loaded and folded again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from jetspark.app.projections.declaring import ProjectionSpec
from jetspark.app.projections.folding import KeyState
from jetspark.errors import Conflict
from jetspark.jetstream.operations import Pause
from jetspark.publish.steps import Procedure
from jetspark.state.apply import MAX_ROUNDS, PAUSE_S
from jetspark.state.changes import Current
from jetspark.state.store import load, store

__all__ = ["COLUMNS", "KeyName", "ProjectionFold", "Tally"]

COLUMNS = ("target", "key", "sequence", "reading", "data")

KeyName: TypeAlias = tuple[int, str]
"""The number of a projection, and a key of its bucket."""
ColumnPieces: TypeAlias = Callable[[], Iterable[Sequence[Sequence[Any]]]]
"""Rows by ascending sequence, some at a time, as lists with the columns above."""

_NOTHING = Current(None, 0, 0)


@dataclass(slots=True)
class Tally:
    """What became of rows."""

    applied: int = 0
    """Events."""
    known: int = 0
    """Were in the states already."""
    waiting: int = 0
    """Behind an event that could not be applied."""
    parked: int = 0
    """Keys that cannot go on, as far as rows came for them."""
    written: int = 0
    """Keys."""
    letters: int = 0
    newly_parked: int = 0
    """Keys that one of the rows has parked: the same number when the rows are folded again."""
    unreadable: int = 0
    """Messages."""


class ProjectionFold:
    """Some projections, and the bucket that each is folded into."""

    def __init__(
        self,
        specs: Sequence[ProjectionSpec],
        buckets: Sequence[str],
        readers: Sequence[Callable[[Any], Any]],
        *,
        patience_s: float,
        check_keys: Callable[[int], None],
    ) -> None:
        self._specs, self._buckets, self._readers = specs, buckets, readers
        self._patience_s, self._check_keys = patience_s, check_keys
        self._first = 0
        """The lowest sequence of the rows."""

    def fold_and_store(self, pieces: ColumnPieces) -> Procedure[Tally]:
        """Fold rows into the buckets. ``pieces`` is called again for keys that others have written meanwhile.

        Raises:
            UsageError: A state was made by another version of its projection.
            Conflict: Others write the same keys faster than this.
            JetSparkError: As :func:`~jetspark.state.store.store`.
        """
        tally = Tally()
        left: frozenset[KeyName] | None = None
        for attempt in range(MAX_ROUNDS):
            states = yield from self.fold(pieces(), left)
            if left is None:
                _count(tally, states, self._first)
            left = yield from self._store(states, tally)
            if not left:
                return tally
            yield Pause(PAUSE_S * (attempt + 1))
        target, _ = min(left or ())
        raise Conflict(self._buckets[target], tuple(sorted(key for number, key in left or () if number == target)))

    def fold(
        self, pieces: Iterable[Sequence[Sequence[Any]]], only: Collection[KeyName] | None = None
    ) -> Procedure[list[dict[str, KeyState]]]:
        """What rows make of the present states: of each projection, by key."""
        states: list[dict[str, KeyState]] = [{} for _ in self._specs]
        for number, piece in enumerate(pieces):
            if number == 0:
                self._first = piece[2][0]
            rows: Iterable[Any] = zip(*piece, strict=True)
            names: Iterable[KeyName] = zip(piece[0], piece[1], strict=True)
            if only is not None:
                rows = [row for row in rows if (row[0], row[1]) in only]
                names = [(row[0], row[1]) for row in rows]
            yield from self._load(states, names)
            self.apply(states, rows)
        return states

    def fold_from_nothing(self, pieces: Iterable[Sequence[Sequence[Any]]]) -> list[dict[str, KeyState]]:
        """What rows make of buckets that are empty."""
        states: list[dict[str, KeyState]] = [{} for _ in self._specs]
        for piece in pieces:
            for target, key in dict.fromkeys(zip(piece[0], piece[1], strict=True)):
                if key not in states[target]:
                    self.begin(states, target, [key], {})
            self._check_keys(sum(map(len, states)))
            self.apply(states, zip(*piece, strict=True))
        return states

    def fold_bases(self, bases: dict[str, Current], pieces: Iterable[Sequence[Sequence[Any]]]) -> dict[str, KeyState]:
        """What rows make of some keys of the only projection that have these states; other keys are left out."""
        states: list[dict[str, KeyState]] = [{}]
        self._check_keys(len(bases))
        self.begin(states, 0, bases, bases)
        for piece in pieces:
            self.apply(states, (row for row in zip(*piece, strict=True) if row[1] in bases))
        return states[0]

    def _load(self, states: list[dict[str, KeyState]], names: Iterable[KeyName]) -> Procedure[None]:
        wanted: list[list[str]] = [[] for _ in states]
        for target, key in dict.fromkeys(names):
            if key not in states[target]:
                wanted[target].append(key)
        self._check_keys(sum(map(len, states)) + sum(map(len, wanted)))
        for target, keys in enumerate(wanted):
            if keys:
                present = yield from load(self._buckets[target], keys, patience_s=self._patience_s)
                self.begin(states, target, keys, present)

    def begin(
        self, states: list[dict[str, KeyState]], target: int, keys: Iterable[str], present: dict[str, Current]
    ) -> None:
        """Take keys in hand, as the bucket has them."""
        spec, of_key = self._specs[target], states[target]
        for key in keys:
            of_key[key] = KeyState(spec, key, present.get(key, _NOTHING))

    def apply(self, states: list[dict[str, KeyState]], rows: Iterable[Any]) -> None:
        """Take rows, by ascending sequence, of keys that are in hand."""
        specs, readers = self._specs, self._readers
        for target, key, sequence, reading, data in rows:
            state = states[target][key]
            if sequence <= state.sequence or state.parked is not None:
                state.apply(specs[target], key, sequence, None)  # it will not look at the event, so nobody decodes it
            else:
                state.fold(specs[target], key, sequence, readers[reading](data))

    def _store(self, states: list[dict[str, KeyState]], tally: Tally) -> Procedure[frozenset[KeyName]]:
        """Returns the keys that others have written meanwhile."""
        conflicts: list[KeyName] = []
        for target, (spec, of_key) in enumerate(zip(self._specs, states, strict=True)):
            changes = [change for key, state in of_key.items() if (change := state.change(spec, key)) is not None]
            if changes:
                outcome = yield from store(self._buckets[target], changes, patience_s=self._patience_s)
                tally.written += outcome.written
                conflicts += [(target, key) for key in outcome.conflicts]
        return frozenset(conflicts)


def _count(tally: Tally, states: Iterable[dict[str, KeyState]], first: int) -> None:
    for state in chain.from_iterable(of_key.values() for of_key in states):
        tally.applied += state.applied
        tally.known += state.known
        tally.waiting += state.waiting
        if state.parked is not None:
            tally.parked += 1
            tally.newly_parked += state.parked.sequence >= first
