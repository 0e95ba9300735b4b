"""The smallest fold into a bucket, for tests of how states get there: a key's state is a checksum of its events.

What an application has instead, with versions, parked keys and lookups, is in ``app/projections/``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

from jetspark.publish.steps import Procedure
from jetspark.state.changes import DELETE, NOTHING, Change, Current, Outcome
from jetspark.state.rounds import fold_pieces, store_rounds
from jetspark.state.store import open_bucket

Rows = Sequence[tuple[str, int]]
"""Keys, and the sequences of their events, ascending. An event is its sequence."""


def chain(state: Any, event: int) -> Any:
    """How many events there were, and a checksum of all of them: one too many, too few, or out of order shows."""
    count, link = state or (0, 0)
    return [count + 1, crc32(b"%d" % event, link)]


def chained(events: Iterable[int]) -> Any:
    state = None
    for event in events:
        state = chain(state, event)
    return state


class ChainFold:
    """Keys of one bucket with their events: a ``RepeatableFold``, and the ``KeysInHand`` of its only bucket."""

    def __init__(self, apply: Callable[[Any, int], Any] = chain) -> None:
        self._apply = apply
        self._loaded: dict[str, Current] = {}
        self._states: dict[str, tuple[Any, int]] = {}
        self._is_repeated = False
        self.known = 0
        """Events that the bucket had already."""
        self.hands = [self]

    def unsure(self) -> list[str]:
        return []  # a key is stored once, and then forgotten

    def reload(self, keys: Iterable[str], loaded: Mapping[str, Current]) -> None:
        self.add(0, list(keys), loaded)

    def take_changes(self) -> list[Change]:
        return [
            Change(key, b"", "delete", sequence, self._loaded[key].revision)
            if state is DELETE
            else Change(key, json.dumps(state).encode(), "put", sequence, self._loaded[key].revision)
            for key, (state, sequence) in self._states.items()
            if sequence > self._loaded[key].sequence
        ]

    def commit(self, changes: Sequence[Change], outcome: Outcome) -> None:
        self._loaded, self._states = {}, {}
        self.add(0, outcome.conflicts, outcome.present)

    def missing(self, piece: Rows) -> list[list[str]]:
        return [
            []
            if self._is_repeated
            else [key for key in dict.fromkeys(row[0] for row in piece) if key not in self._loaded]
        ]

    def add(self, number: int, keys: Sequence[str], loaded: Mapping[str, Current]) -> None:
        for key in keys:
            self._loaded[key] = found = loaded.get(key, NOTHING)
            self._states[key] = None if found.value is None else json.loads(found.value), found.sequence

    def apply(self, piece: Rows) -> None:
        for key, sequence in piece:
            if key not in self._loaded:
                continue  # of a round before, and stored
            state, last = self._states[key]
            if sequence > last:
                self._states[key] = self._apply(state, sequence), sequence
            else:
                self.known += 1

    def repeat(self) -> None:
        self._is_repeated = True


def fold_into(
    bucket: str,
    pieces: Callable[[], Iterable[Rows]],
    apply: Callable[[Any, int], Any] = chain,
    patience_s: float = 60.0,
) -> Procedure[Outcome]:
    """Fold rows into a bucket; ``pieces`` is called again for keys that others have written in the meantime."""
    fold, buckets = ChainFold(apply), [(yield from open_bucket(bucket, patience_s=patience_s))]
    yield from fold_pieces(buckets, fold, pieces())
    known = fold.known
    return Outcome((yield from store_rounds(buckets, fold, pieces)), (), known)
