"""States of a fold that are compared with a bucket: in memory up to a limit, and the others in a temporary file.

So a history is folded in one pass, whatever the number of keys. The value in the bucket is kept beside the state of
each key that differs; one more pass applies the events after the boundary, for each key up to the event in the bucket.

SQLite removes the file from its folder (``TMPDIR``) as soon as it is open, so a process that is killed leaves no file
behind. The file is created when the first key has to leave memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.live_states import CacheLimits
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.router import KeyRows
from jetspark.app.replay.comparison import KeyContent, compare, reaches
from jetspark.errors import UsageError
from jetspark.state.changes import NOTHING, Current

if TYPE_CHECKING:
    import sqlite3

__all__ = ["Scratch", "ScratchStates"]

# Memory of a state besides its key and its value: 320 bytes measured, on CPython 3.11.
ENTRY_BYTES = 320
# Keys of one query; SQLite takes 999 parameters in its smallest builds.
QUERY_KEYS = 500
CACHE_KIB = 65_536
# Nothing is ever restored from the file.
PRAGMAS = ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{CACHE_KIB}")

_CREATE = (
    "CREATE TABLE states (key BLOB PRIMARY KEY, value BLOB, sequence INTEGER, mark TEXT, is_equal INTEGER, found BLOB) "
    "WITHOUT ROWID"
)
_WRITE = "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?, ?)"
_DIFFERING = "SELECT key FROM states WHERE key > ? AND NOT is_equal ORDER BY key LIMIT ?"

_Row: TypeAlias = "tuple[bytes, bytes | None, int, str, int, bytes | None]"


class Scratch(NamedTuple):
    """A key with the fold of its events, and the result of comparing it with the bucket."""

    key: str
    content: KeyContent
    is_equal: bool
    """False for a parked key: the reason is read from the bucket."""
    found: Current
    """The value in the bucket; NOTHING for a key that is equal."""


class ScratchStates:
    """States in memory and in a file. Leave the context manager to close the file."""

    def __init__(self, spec: ProjectionSpec, limits: CacheLimits) -> None:
        self._spec, self._limits = spec, limits
        self._states: dict[str, KeyState] = {}
        self._equal: set[str] = set()
        """Keys in memory that are equal to the bucket."""
        self._found: dict[str, Current] = {}
        """The value in the bucket of each key in memory that differs."""
        self._size = 0
        self._file: sqlite3.Connection | None = None
        self.spilled = 0
        """How many states were written to the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._states.clear()
        self._found.clear()
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        """States in memory."""
        return len(self._states)

    def begin_all(self, states: Mapping[str, Current]) -> None:
        """Set the states to begin with; other keys have no state."""
        spec = self._spec
        for key, current in states.items():
            state = self._states[key] = KeyState(spec, key, current)
            self._size += _size_of(key, state)
        self._shrink()

    def apply(self, rows: KeyRows) -> None:
        """Apply the next rows, by ascending sequence."""
        spec, states = self._spec, self._states
        touched = dict.fromkeys(rows.keys)
        self._load(touched)
        before = sum([_size_of(key, states[key]) for key in touched])
        for key, sequence, event in rows:
            states[key].apply(spec, key, sequence, event)
        self._size += sum([_size_of(key, states[key]) for key in touched]) - before
        self._shrink()

    def continue_with(self, rows: KeyRows) -> None:
        """Apply the next rows of keys that differ, each key up to the last event that its value in the bucket shows."""
        touched = dict.fromkeys(rows.keys)
        self._load(touched)
        # An event has a sequence above 0.
        reach = dict.fromkeys(touched, 0) | reaches({key: self._found[key] for key in touched if key in self._found}, 0)
        self.apply(KeyRows(row for row in rows if row[1] <= reach[row[0]]))

    def compare(self, found: Mapping[str, Current], version: int | None) -> None:
        """Compare keys with their value in a bucket. The last comparison of a key counts.

        A key of the bucket without an event becomes a key with an empty state.
        """
        states, equal, plain_mark = self._states, self._equal, self._spec.plain_mark
        self._load(found)
        for key, current in found.items():
            state = states[key]
            # Most states are equal. This test is cheap, since it decodes nothing.
            is_same = (
                current.value is not None
                and current.mark == plain_mark
                and current.sequence == state.sequence
                and current.value == state.value
                and state.parked is None
            )
            if is_same or self._is_equal(key, current, version):
                equal.add(key)
                if key in self._found:
                    self._keep(key, None)
            else:
                equal.discard(key)
                self._keep(key, current)
        self._shrink()

    def _keep(self, key: str, found: Current | None) -> None:
        """Keep the bucket's value of a key beside its state in memory; None removes it."""
        before = self._found.pop(key, None)
        if before is not None:
            self._size -= _size_of_found(before)
        if found is not None:
            self._found[key] = found
            self._size += _size_of_found(found)

    def _is_equal(self, key: str, current: Current, version: int | None) -> bool:
        state = self._states[key]
        return state.parked is None and compare(key, KeyContent.of_state(state), current, version) is None

    def differing(self, size: int) -> Iterator[Sequence[str]]:
        """Yield the keys that differ from the bucket, each once; the caller may compare them in the meantime."""
        in_memory = [key for key in self._states if key not in self._equal]
        for begin in range(0, len(in_memory), size):
            yield in_memory[begin : begin + size]
        passed, last = set(in_memory), b""
        while self._file is not None and (rows := self._file.execute(_DIFFERING, (last, size)).fetchall()):
            last = rows[-1][0]
            # A key in memory was yielded before, or is equal: its row in the file is stale.
            keys = [key for key in (_text(row[0]) for row in rows) if key not in passed and key not in self._states]
            if keys:
                yield keys

    def items(self) -> Iterator[Sequence[Scratch]]:
        """Yield all keys, in parts. The caller must not apply or compare rows in the meantime."""
        states, equal = self._states, self._equal
        part: list[Scratch] = []
        for key, state in states.items():
            part.append(Scratch(key, KeyContent.of_state(state), key in equal, self._found.get(key, NOTHING)))
            if len(part) == QUERY_KEYS:
                yield part
                part = []
        yield part
        if self._file is None:
            return
        rows = self._file.execute("SELECT * FROM states")
        while some := rows.fetchmany(QUERY_KEYS):
            # The row of a key that is in memory again is stale.
            found = ((_text(row[0]), row) for row in some)
            yield [
                Scratch(key, KeyContent.of_current(_current(row)), bool(row[4]), _found(row) or NOTHING)
                for key, row in found
                if key not in states
            ]

    # ---- memory and the file -------------------------------------------------------------------------------------

    def _load(self, keys: Mapping[str, object]) -> None:
        """Load keys into memory, and mark them as the most recently used."""
        states, spec = self._states, self._spec
        if self._file is not None:
            for key in keys:
                if key in states:
                    states[key] = states.pop(key)
        missing = [key for key in keys if key not in states]
        stored = self._read(missing) if self._file is not None else {}
        for key in missing:
            row = stored.get(key)
            state = states[key] = KeyState(spec, key, NOTHING if row is None else _current(row))
            self._size += _size_of(key, state)
            if row is not None and row[4]:
                self._equal.add(key)
            elif row is not None:
                self._keep(key, _found(row))

    def _read(self, keys: Sequence[str]) -> dict[str, _Row]:
        assert self._file is not None
        found = {}
        for begin in range(0, len(keys), QUERY_KEYS):
            some = [_octets(key) for key in keys[begin : begin + QUERY_KEYS]]
            query = f"SELECT * FROM states WHERE key IN ({','.join('?' * len(some))})"
            found.update({_text(row[0]): row for row in self._file.execute(query, some)})
        return found

    def _shrink(self) -> None:
        """Move the least recently used states to the file, until memory is within its limits."""
        limits, states, spec = self._limits, self._states, self._spec
        if len(states) <= limits.keys and self._size <= limits.bytes:
            return
        rows = []
        for key in list(states):
            if len(states) <= limits.keys * 7 // 8 and self._size <= limits.bytes * 7 // 8:
                break
            state = states.pop(key)
            self._size -= _size_of(key, state)
            is_equal = key in self._equal
            self._equal.discard(key)
            mark, found = spec.mark(state.parked, state.ids), self._found.get(key)
            self._keep(key, None)
            # The sequence in a bucket may be any number, which a column may not.
            of_bucket = None if found is None else pickle.dumps(found)
            rows.append((_octets(key), state.value, state.sequence, mark, is_equal, of_bucket))
        self._write(rows)

    def _write(self, rows: Iterable[_Row]) -> None:
        import sqlite3

        try:
            if self._file is None:
                self._file = sqlite3.connect("", isolation_level=None)
                for pragma in PRAGMAS:
                    self._file.execute(f"PRAGMA {pragma}")
                self._file.execute(_CREATE)
            self._file.execute("BEGIN")
            self.spilled += self._file.executemany(_WRITE, rows).rowcount
            self._file.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise UsageError(
                f"the temporary file of states that do not fit memory: {error}, after {self.spilled} states: expected "
                "room for all keys in the folder TMPDIR, or more states in memory (cache_keys, cache_bytes)"
            ) from error


def _size_of(key: str, state: KeyState) -> int:
    value = state.value
    return ENTRY_BYTES + len(key) + len(state.ids) + (0 if value is None else len(value))


def _size_of_found(found: Current) -> int:
    return ENTRY_BYTES + (0 if found.value is None else len(found.value))


def _current(row: _Row) -> Current:
    return Current(row[1], row[2], 1, row[3])


def _found(row: _Row) -> Current | None:
    found: Current | None = None if row[5] is None else pickle.loads(row[5])
    return found


def _octets(key: str) -> bytes:
    return key.encode(errors="surrogateescape")


def _text(key: bytes) -> str:
    return key.decode(errors="surrogateescape")
