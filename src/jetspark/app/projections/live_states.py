"""The states of one projection in a live engine: a bounded cache with changes that are not stored yet. Pure.

Events are folded as they arrive. All changed states are stored at a time, while more events are folded::

    clean ──apply()──> dirty ──take()──> sent ──commit()──> clean, or dirty if there were events since
                         ^                │
                         └── conflict ────┘  folded again, on what the bucket has

Rows that are not stored yet are kept, so that a conflict is resolved without reading them again: the state in the
bucket has all events up to its sequence, and the later ones are in memory. Rows are kept in the order of arrival. The
rows of one key are searched for only after a conflict: an index by key would cost time for every event, and conflicts
are rare. If the state in the bucket is older than the loaded one, another program removed or replaced it, and
the rows in memory do not have all its events: :class:`StateGone`.

An unknown revision is never guessed: the key is loaded again before its next store. :mod:`jetspark.state.rounds` runs
these steps.

Stuck keys are never dropped from the cache. A repair writes the state of such a key together with a position (see
``positions``). Until the engine has noticed the repair it must not fold events onto the repaired state, because it may
have skipped events of the key before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.router import KeyRows
from jetspark.app.projections.state_header import Parked, mark_of
from jetspark.jetstream.kv import KVOperation
from jetspark.state.changes import NOTHING, Change, Current, Outcome

__all__ = ["CACHE", "CacheLimits", "LiveStates", "StateGone"]

GONE = "its state was removed from the bucket, or replaced by an older one"
# Memory of a cache entry without its value and its key: 460 bytes, measured on CPython 3.11.
ENTRY_BYTES = 460


class CacheLimits(NamedTuple):
    """Bounds of the cache. States that are not stored yet and stuck keys stay in memory beyond these bounds."""

    keys: int
    bytes: int


CACHE = CacheLimits(1_000_000, 512 << 20)
"""A million small states: with up to a million keys an event costs the same as with a thousand. A state that is not in
the cache is loaded again, which takes as long as the rest of the work on an event."""


class StateGone(Exception):
    """The bucket has lost states that it had."""

    def __init__(self, projection: str, changes: list[Change]) -> None:
        super().__init__(projection, changes)
        self.projection, self.changes = projection, changes
        """Writes that make these keys stuck: they need a rebuild."""


class _CachedKey(KeyState):
    """A state in the cache, and the progress of its store."""

    __slots__ = ("counted", "is_sure", "passed", "sent", "size")
    size: int
    """Bytes that the entry counts in the cache."""

    def __init__(self, spec: ProjectionSpec, key: str, loaded: Current) -> None:
        super().__init__(spec, key, loaded)
        self.passed = 0
        """Events up to this one were skipped and are not in memory, because the key is stuck in the bucket."""
        self.sent: int | None = None
        """Number of events in the state that is being stored; None if no store is under way."""
        self.counted = 0
        """Number of events in the state that was stored before."""
        self.is_sure = True
        """True if the revision in the bucket is known."""


class LiveStates:
    """Cache of one projection's states; :class:`~jetspark.state.rounds.KeysInHand`."""

    def __init__(self, spec: ProjectionSpec, limits: CacheLimits) -> None:
        self.spec = spec
        self._limits = limits
        self._keys: dict[str, _CachedKey] = {}
        self._dirty: dict[str, _CachedKey] = {}
        self._rows: list[KeyRows] = []
        """Rows that arrived since the last :meth:`take_changes`, in pieces."""
        self._sent_rows: list[KeyRows] = []
        """Rows of the changes that are being stored, until :meth:`commit`."""
        self._last = 0
        """Sequence of the last event applied."""
        self._size = 0
        self._is_all_busy = False
        """No state could be dropped, and no store has ended since."""
        self.applied = self.known = self.waiting = 0
        self.parked: dict[str, Parked] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def is_dirty(self) -> bool:
        return bool(self._dirty)

    # ---- folding -----------------------------------------------------------------------------------------------

    def missing(self, rows: KeyRows) -> list[str]:
        """Keys of the rows that are not in the cache."""
        known = self._keys
        if all(map(known.__contains__, rows.keys)):
            return []
        return list({key: None for key in rows.keys if key not in known})

    def add(self, keys: Iterable[str], loaded: Mapping[str, Current]) -> None:
        """
        Raises:
            UsageError: A state is of another version of the projection.
        """
        spec, known, size = self.spec, self._keys, 0
        for key in keys:
            entry = known[key] = _CachedKey(spec, key, loaded.get(key, NOTHING))
            entry.size = _size_of(key, entry)
            size += entry.size
            if entry.parked is not None:
                self.parked[key] = entry.parked
        self._size += size

    def apply(self, rows: KeyRows) -> None:
        """Fold rows of cached keys, by ascending sequence. The rows are kept; the caller must not change them."""
        spec, keys, dirty = self.spec, self._keys, self._dirty
        is_crowded = 2 * len(keys) > self._limits.keys
        self._rows.append(rows)
        entries = map(keys.__getitem__, rows.keys)
        for key, entry, sequence, event in zip(rows.keys, entries, rows.sequences, rows.events, strict=True):
            if sequence <= entry.sequence:
                self.known += 1
                continue
            if entry.parked is None:
                entry.fold(spec, key, sequence, event)
            else:
                self.waiting += 1
                if entry.is_parked_in_bucket:
                    entry.passed = sequence
                    continue
            dirty[key] = entry
            if is_crowded:
                keys[key] = keys.pop(key)  # to the end: most recently used
        if rows:
            self._last = rows.sequences[-1]

    # ---- storing -----------------------------------------------------------------------------------------------

    def unsure(self) -> list[str]:
        """Changed keys whose revision in the bucket is unknown: reload them before :meth:`take_changes`."""
        return [key for key, entry in self._dirty.items() if not entry.is_sure]

    def reload(self, keys: Iterable[str], loaded: Mapping[str, Current]) -> None:
        """Rebase keys with an unknown revision onto the entries of the bucket.

        Raises:
            StateGone: An entry has fewer events than before.
        """
        self._rebase({key: loaded.get(key, NOTHING) for key in keys})

    def take_changes(self) -> list[Change]:
        """The writes of all changed keys. Changes that follow are part of the next call."""
        spec, changes = self.spec, []
        for key, entry in self._dirty.items():
            change = entry.change(spec, key)
            if change is not None:
                entry.sent = entry.applied
                changes.append(change)
        self._dirty, self._is_all_busy = {}, False
        self._rows, self._sent_rows = [], self._rows if changes else []
        return changes

    def commit(self, changes: Sequence[Change], outcome: Outcome) -> None:
        """Take the outcome of a store. Keys in conflict are rebased and dirty again.

        Raises:
            StateGone: The bucket's entries of some keys have fewer events than before.
        """
        self._is_all_busy = False
        conflicts = set(outcome.conflicts)
        keys, revisions, present = self._keys, outcome.revisions, {}
        for change in changes:
            key = change.key
            entry = keys[key]
            sent, entry.sent = entry.sent, None
            if key in conflicts:
                present[key] = outcome.present.get(key, NOTHING)
                continue
            revision = revisions.get(key)
            entry.is_sure = revision is not None
            entry.stored(change, revision or 0)
            assert sent is not None
            self.applied += sent - entry.counted
            entry.counted = sent
            if entry.parked is not None:
                if entry.is_parked_in_bucket:
                    entry.passed = self._last
                self._update_stuck(key, entry)
            self._measure(key, entry)
        sent_rows, self._sent_rows = self._sent_rows, []
        if present:
            self._rows.insert(0, KeyRows(row for rows in sent_rows for row in rows if row[0] in present))
            self._rebase(present)

    def _rebase(self, present: Mapping[str, Current]) -> None:
        """Fold the kept events onto the present entries of the bucket."""
        gone, in_hand = [], self._in_hand(present)
        for key, found in present.items():
            before = self._keys[key]
            had = before.loaded
            is_foreign = found.revision > 0 and mark_of(found) is None
            if found.sequence < had.sequence and not is_foreign:
                if had.value is not None or found.value is not None:
                    gone.append(self._parking(key, found))
                    continue
                # The marker of the deleted key has expired; its sequence and its ids are still in memory.
                found = found._replace(sequence=had.sequence)
                entry = self._keys[key] = _CachedKey(self.spec, key, found)
                entry.ids = _ids_of(had)
            else:
                entry = self._keys[key] = _CachedKey(self.spec, key, found)
            entry.passed, entry.size = before.passed, before.size
            self._dirty.pop(key, None)
            taken = 0
            for sequence, event in in_hand[key]:
                if sequence > max(entry.sequence, entry.passed):
                    entry.apply(self.spec, key, sequence, event)
                    taken += 1
            if entry.is_parked_in_bucket:
                self.waiting += taken
                entry.passed = self._last
            elif taken:
                self._dirty[key] = entry
            self._update_stuck(key, entry)
            self._measure(key, entry)
        if gone:
            raise StateGone(self.spec.name, gone)

    def _in_hand(self, keys: Iterable[str]) -> dict[str, list[tuple[int, object]]]:
        """Events of some keys that are neither stored nor being stored, from the kept rows."""
        found: dict[str, list[tuple[int, object]]] = {key: [] for key in keys}
        for rows in self._rows if found else ():
            for key, sequence, event in rows:
                if key in found:
                    found[key].append((sequence, event))
        return found

    def _parking(self, key: str, found: Current) -> Change:
        mark = self.spec.mark(Parked(0, GONE), _ids_of(found))
        operation: KVOperation = "delete" if found.value is None else "put"
        return Change(key, found.value or b"", operation, found.sequence, found.revision, mark=mark)

    # ---- the cache ---------------------------------------------------------------------------------------------

    def shrink(self) -> None:
        """Drop the least recently used states beyond the bounds of the cache.

        If no state can be dropped because all wait for a store, the search is not repeated until a store has ended.
        """
        limits = self._limits
        if self._is_all_busy or (len(self._keys) <= limits.keys and self._size <= limits.bytes):
            return
        for key, entry in list(self._keys.items()):
            if len(self._keys) <= limits.keys * 7 // 8 and self._size <= limits.bytes * 7 // 8:
                return
            if key not in self._dirty and entry.sent is None and key not in self.parked:
                del self._keys[key]
                self._size -= entry.size
        self._is_all_busy = True

    def _measure(self, key: str, entry: _CachedKey) -> None:
        size = _size_of(key, entry)
        self._size += size - entry.size
        entry.size = size

    def _update_stuck(self, key: str, entry: _CachedKey) -> None:
        if entry.parked is not None:
            self.parked[key] = entry.parked
        else:
            self.parked.pop(key, None)


def _size_of(key: str, entry: _CachedKey) -> int:
    value = entry.value
    return ENTRY_BYTES + len(key) + len(entry.ids) + (0 if value is None else 2 * len(value))


def _ids_of(current: Current) -> bytes:
    mark = mark_of(current)
    return b"" if mark is None else mark.ids
