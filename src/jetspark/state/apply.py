"""Folding events into a bucket: load the states, apply the events, store the values; as procedures for both drivers.

The rule, and why it loses nothing, is in :mod:`jetspark.state.fold`. A key that others write between the load and the
store is loaded and folded again (:meth:`Folding.fold_and_store`). Who has values and no longer the events
(:func:`store_values`) leaves out what the bucket is beyond by now, and otherwise fails with
:class:`~jetspark.errors.Conflict`, for the whole to be done again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from jetspark.errors import Conflict
from jetspark.jetstream.operations import Pause
from jetspark.publish.steps import Procedure
from jetspark.state.changes import Change, Current, Outcome
from jetspark.state.fold import MAX_NAMED, Applied, Fold, Piece, Stamp, States, other_write
from jetspark.state.store import load, store

__all__ = ["PATIENCE_S", "Folding", "fold_into", "store_values"]

# Others may write the same keys; who loses a race loads again. This many times is no race any more.
MAX_ROUNDS = 20
# Longer after each lost race.
PAUSE_S = 0.01
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

    def fold(self, pieces: Iterable[Piece], only: Collection[str] | None = None) -> Procedure[States]:
        """What the rows make of the present values; of some keys, if they are given."""
        states = States(self._fold, self._batch)
        for piece in pieces:
            rows: Iterable[tuple[str, int, Any]] = zip(*piece, strict=True)
            names: Iterable[str] = piece.keys
            if only is not None:
                rows = [row for row in rows if row[0] in only]
                names = [row[0] for row in rows]
            if unknown := states.unknown(names):
                if self._check_keys is not None:
                    self._check_keys(len(states) + len(unknown))
                states.add(unknown, (yield from load(self._bucket, unknown, patience_s=self._patience_s)))
            states.apply(rows, self._parse)
        return states

    def fold_and_store(self, pieces: Callable[[], Iterable[Piece]]) -> Procedure[Outcome]:
        """Keys that others write meanwhile are folded again; ``pieces`` is called for each round.

        Raises:
            Conflict: Others write the same keys faster than this.
        """
        written = dropped = 0
        left: frozenset[str] | None = None
        for attempt in range(MAX_ROUNDS):
            states = yield from self.fold(pieces(), left)
            outcome = yield from store(self._bucket, states.changes(), patience_s=self._patience_s)
            written += outcome.written
            dropped += states.dropped if attempt == 0 else 0
            left = frozenset(outcome.conflicts)
            if not left:
                return Outcome(written, (), dropped)
            yield Pause(PAUSE_S * (attempt + 1))
        raise Conflict(self._bucket, tuple(sorted(left or ())))


def store_values(bucket: str, changes: list[Change], *, patience_s: float = PATIENCE_S) -> Procedure[Outcome]:
    """Store values that events were folded into, without the events.

    Raises:
        Conflict: Others have written a key meanwhile, and are not beyond this value: fold its events again.
        UsageError: Another write of the same batch has stored other events of a key.
    """
    outcome = yield from store(bucket, changes, patience_s=patience_s)
    if not outcome.conflicts:
        return outcome
    present = yield from load(bucket, outcome.conflicts, patience_s=patience_s)
    of_key = {change.key: change for change in changes}
    clashing, behind = [], []
    for key in outcome.conflicts:
        change, found = of_key[key], present.get(key, Current(None, 0, 0))
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
