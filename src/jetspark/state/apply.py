"""Folding events into a bucket: load the states, apply the events, store the values; as procedures for both drivers.

The rule, and why it loses nothing, is in :mod:`jetspark.state.fold`; how it gets into the bucket, in
:mod:`jetspark.state.rounds`. Who has values and no longer the events
(:func:`store_values`) leaves out what the bucket is beyond by now, and otherwise fails with
:class:`~jetspark.errors.Conflict`, for the whole to be done again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jetspark.errors import Conflict
from jetspark.publish.steps import Procedure
from jetspark.state.changes import NOTHING, Change, Current, Outcome
from jetspark.state.fold import MAX_NAMED, Applied, Fold, Piece, Stamp, States, other_write
from jetspark.state.rounds import fold_pieces, store_rounds
from jetspark.state.store import StateBucket, open_bucket, store

__all__ = ["PATIENCE_S", "Folding", "fold_into", "store_values"]

# It covers a restart and the election of a leader.
PATIENCE_S = 60.0


class Folding:
    """A bucket to fold into, and how."""

    def __init__(
        self,
        bucket: str,
        fold: Fold,
        *,
        batch: str | None = None,
        parse: Callable[[Any], Any] = json.loads,
        check_keys: Callable[[int], None] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """
        Args:
            batch: A name for the events of this write, the same wherever and however often it is run.
            parse: Makes an event of what a piece has.
            check_keys: Is told how many keys there will be before more are loaded, and may raise.
            patience_s: How long to go on while nobody answers.
        """
        self._bucket, self._fold, self._batch, self._parse = bucket, fold, batch, parse
        self._check_keys, self._patience_s = check_keys, patience_s

    def fold(self, pieces: Iterable[Piece]) -> Procedure[States]:
        """What the rows make of the present values."""
        states = States(self._fold, self._batch)
        yield from fold_pieces([(yield from self._open())], self._rows_of(states), pieces)
        return states

    def fold_and_store(self, pieces: Callable[[], Iterable[Piece]]) -> Procedure[Outcome]:
        """Keys that others write meanwhile are folded again; ``pieces`` is called for each round.

        Raises:
            Conflict: Others write the same keys faster than this.
        """
        states = States(self._fold, self._batch)
        buckets, rows = [(yield from self._open())], self._rows_of(states)
        yield from fold_pieces(buckets, rows, pieces())
        dropped = states.dropped
        return Outcome((yield from store_rounds(buckets, rows, pieces)), (), dropped)

    def _open(self) -> Procedure[StateBucket]:
        return (yield from open_bucket(self._bucket, patience_s=self._patience_s))

    def _rows_of(self, states: States) -> _PieceRows:
        return _PieceRows(states, self._parse, self._check_keys)


class _PieceRows:
    """Pieces of rows for the states of one bucket."""

    def __init__(
        self, states: States, parse: Callable[[Any], Any], check_keys: Callable[[int], None] | None = None
    ) -> None:
        self._states, self._parse, self._check_keys = states, parse, check_keys
        self._is_repeated = False
        self.hands = [states]

    def missing(self, piece: Piece) -> list[list[str]]:
        unknown = [] if self._is_repeated else self._states.unknown(piece.keys)
        if unknown and self._check_keys is not None:
            self._check_keys(len(self._states) + len(unknown))
        return [unknown]

    def add(self, number: int, keys: Sequence[str], loaded: Mapping[str, Current]) -> None:
        self._states.add(keys, loaded)

    def apply(self, piece: Piece) -> None:
        rows: Iterable[tuple[str, int, Any]] = zip(*piece, strict=True)
        if self._is_repeated:
            rows = (row for row in rows if row[0] in self._states)
        self._states.apply(rows, self._parse)

    def repeat(self) -> None:
        self._is_repeated = True


def store_values(bucket: str, changes: list[Change], *, patience_s: float = PATIENCE_S) -> Procedure[Outcome]:
    """Store values that events were folded into, without the events.

    Raises:
        Conflict: Others have written a key meanwhile, and are not beyond this value: fold its events again.
        UsageError: Another write of the same batch has stored other events of a key.
    """
    outcome = yield from store(bucket, changes, patience_s=patience_s)
    if not outcome.conflicts:
        return outcome
    present, of_key = outcome.present, {change.key: change for change in changes}
    clashing, behind = [], []
    for key in outcome.conflicts:
        change, found = of_key[key], present.get(key, NOTHING)
        ours, theirs = Stamp.read(change.stamp), Stamp.read(found.stamp)
        if ours is not None and theirs is not None and ours.batch == theirs.batch and ours != theirs:
            clashing.append(key)
        elif found.sequence < (change.sequence or 0):
            behind.append(key)
    if clashing:
        raise other_write(clashing)
    if behind:
        raise Conflict(bucket, tuple(behind[:MAX_NAMED]))
    return Outcome(outcome.written, (), len(outcome.conflicts))


def fold_into(
    bucket: str, fold: Fold, events: Mapping[str, list[Applied]], *, patience_s: float = PATIENCE_S
) -> Procedure[Outcome]:
    """Apply events, given by key, to a bucket. Those the bucket has already are left alone.

    A server that is away is waited for: whatever was under way is done again, which changes nothing.

    Raises:
        Conflict: Others write the same keys faster than this.
        JetSparkError: As :func:`~jetspark.state.store.store`; or nobody answers for ``patience_s`` seconds.
    """
    rows = sorted(((key, *each) for key, listed in events.items() for each in listed), key=lambda row: row[1])
    piece = Piece([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])
    folding = Folding(bucket, fold, parse=lambda event: event, patience_s=patience_s)
    return (yield from folding.fold_and_store(lambda: [piece] if rows else []))
