"""States that are folded to be compared, and never stored: in memory up to a limit, the others in a temporary file.

So a history is folded in one pass however many keys it has. The file is SQLite's, for which it needs no name: it is
removed from its folder (``TMPDIR``) as soon as it is open, so a process that is killed leaves nothing behind. It is
written when the first key has to leave memory, and never for a projection whose states fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from jetspark.app.projections.declaring import ProjectionSpec
from jetspark.app.projections.folding import KeyRows, KeyState
from jetspark.app.projections.states import CacheLimits
from jetspark.app.replay.contents import KeyContent, compare
from jetspark.errors import UsageError
from jetspark.state.changes import NOTHING, Current

if TYPE_CHECKING:
    import sqlite3

__all__ = ["Scratch", "ScratchStates"]

# What a state takes besides its key and its value: 320 bytes measured, on CPython 3.11.
ENTRY_BYTES = 320
# Keys of one query; SQLite takes 999 parameters in its smallest builds.
QUERY_KEYS = 500
CACHE_KIB = 65_536
# Nothing is ever restored from the file.
PRAGMAS = ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{CACHE_KIB}")

_CREATE = (
    "CREATE TABLE states (key BLOB PRIMARY KEY, value BLOB, sequence INTEGER, mark TEXT, is_equal INTEGER) "
    "WITHOUT ROWID"
)
_WRITE = "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?)"


class Scratch(NamedTuple):
    """One key: what its events make of it, and whether the bucket has the same."""

    key: str
    content: KeyContent
    is_equal: bool
    """Never of one that is parked: why is for the bucket to say."""


class ScratchStates:
    """See the module; a context manager, which removes the file."""

    def __init__(self, spec: ProjectionSpec, limits: CacheLimits) -> None:
        self._spec, self._limits = spec, limits
        self._states: dict[str, KeyState] = {}
        self._equal: set[str] = set()
        """Keys in memory of which the bucket has the same."""
        self._size = 0
        self._file: sqlite3.Connection | None = None
        self.spilled = 0
        """How many states were written to the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._states.clear()
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        """States in memory."""
        return len(self._states)

    def begin_all(self, states: Mapping[str, Current]) -> None:
        """Begin with states that keys have; others have none."""
        spec = self._spec
        for key, current in states.items():
            state = self._states[key] = KeyState(spec, key, current)
            self._size += _size_of(key, state)
        self._shrink()

    def apply(self, rows: KeyRows) -> None:
        """Take the next rows, by ascending sequence."""
        spec, states = self._spec, self._states
        touched = dict.fromkeys(rows.keys)
        self._bring(touched)
        before = sum([_size_of(key, states[key]) for key in touched])
        for key, sequence, event in rows:
            states[key].apply(spec, key, sequence, event)
        self._size += sum([_size_of(key, states[key]) for key in touched]) - before
        self._shrink()

    def compare(self, found: Mapping[str, Current], version: int | None) -> None:
        """Note which keys are what a bucket has; of a key that is compared again the last time counts.

        Keys of the bucket that no event came for are keys from now on, with nothing.
        """
        states, equal, plain_mark = self._states, self._equal, self._spec.plain_mark
        self._bring(found)
        for key, current in found.items():
            state = states[key]
            # Most states are the same: to see that, nothing has to be taken apart.
            is_same = (
                current.value is not None
                and current.mark == plain_mark
                and current.sequence == state.sequence
                and current.value == state.value
                and state.parked is None
            )
            if is_same or self._is_equal(key, current, version):
                equal.add(key)
            else:
                equal.discard(key)
        self._shrink()

    def _is_equal(self, key: str, current: Current, version: int | None) -> bool:
        state = self._states[key]
        return state.parked is None and compare(key, KeyContent.of_state(state), current, version) is None

    def items(self) -> Iterator[Sequence[Scratch]]:
        """All keys, some at a time; nothing may be applied or compared meanwhile."""
        states, equal = self._states, self._equal
        part: list[Scratch] = []
        for key, state in states.items():
            part.append(Scratch(key, KeyContent.of_state(state), key in equal))
            if len(part) == QUERY_KEYS:
                yield part
                part = []
        yield part
        if self._file is None:
            return
        rows = self._file.execute("SELECT * FROM states")
        while some := rows.fetchmany(QUERY_KEYS):
            # One that was brought back to memory is there as it was before.
            found = ((_text(row[0]), row) for row in some)
            yield [
                Scratch(key, KeyContent.of_current(_current(row)), bool(row[4]))
                for key, row in found
                if key not in states
            ]

    # ---- memory and the file -------------------------------------------------------------------------------------

    def _bring(self, keys: Mapping[str, object]) -> None:
        """Have keys in memory, as those that are used last."""
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

    def _read(self, keys: Sequence[str]) -> dict[str, tuple[bytes, bytes | None, int, str, int]]:
        assert self._file is not None
        found = {}
        for begin in range(0, len(keys), QUERY_KEYS):
            some = [_octets(key) for key in keys[begin : begin + QUERY_KEYS]]
            query = f"SELECT * FROM states WHERE key IN ({','.join('?' * len(some))})"
            found.update({_text(row[0]): row for row in self._file.execute(query, some)})
        return found

    def _shrink(self) -> None:
        """Write states to the file, those used longest ago first, as far as there are too many in memory."""
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
            rows.append((_octets(key), state.value, state.sequence, spec.mark(state.parked, state.ids), is_equal))
        self._write(rows)

    def _write(self, rows: Iterable[tuple[bytes, bytes | None, int, str, bool]]) -> None:
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


def _current(row: tuple[bytes, bytes | None, int, str, int]) -> Current:
    _, value, sequence, mark, _ = row
    return Current(value, sequence, 1, mark)


def _octets(key: str) -> bytes:
    return key.encode(errors="surrogateescape")


def _text(key: bytes) -> str:
    return key.decode(errors="surrogateescape")
