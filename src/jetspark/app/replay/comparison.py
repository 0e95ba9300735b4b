"""The content of a projection's keys: comparing a bucket with a fresh fold, digests, and writes that repair. Pure.

:class:`ComparedKeys` has the result for some keys. Results of different keys add up, and their size does not grow with
the number of keys: they have counts, digests, and the first keys in the order of the bucket. So each process compares
the keys that it has, and only results travel.

The digest is the sum, modulo 2**256, of the sha256 of one line for each key that has a value or is parked::

    key \\0 sequence \\0 sequence of the event it is parked at, or nothing \\0 value \\n

Where the projection keeps ids of events (``unique_ids``), ``\\0`` and those, 12 bytes each, stand before the ``\\n``.
It is a sum because processes that fold in parallel see keys in any order: each one sums up its own keys, and the sums
add up. The digest detects accidental differences; it is not a protection against forgery.

Values are canonical, so equal bytes are equal states. Deleted keys are not in the digest, since their markers expire.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.state_header import Parked, mark_of, parked_of, reach_of
from jetspark.state.changes import Change, Current

__all__ = [
    "MAX_NAMED",
    "ComparedKeys",
    "Difference",
    "DifferenceKind",
    "Digest",
    "KeyContent",
    "ParkedKey",
    "change_to",
    "compare",
    "reaches",
]

DifferenceKind: TypeAlias = Literal["missing", "extra", "value", "sequence", "ids", "parked", "foreign", "version"]
MAX_NAMED = 1000
"""Keys that a result names; it counts the others."""
_DIGESTS = 1 << 256
# Bytes of a value in a message, so that it fits on a line.
_SHOWN = 120


class KeyContent(NamedTuple):
    """The content of a key: its value, its last event, and the event it is parked at."""

    value: bytes | None
    sequence: int = 0
    parked: Parked | None = None
    ids: bytes = b""
    """The ids of its last events, where the projection has ``unique_ids``."""

    @classmethod
    def of_state(cls, state: KeyState | None) -> KeyContent:
        return cls(None) if state is None else cls(state.value, state.sequence, state.parked, state.ids)

    @classmethod
    def of_current(cls, current: Current) -> KeyContent:
        mark = mark_of(current)
        return cls(current.value, current.sequence, parked_of(current), b"" if mark is None else mark.ids)

    @property
    def reach(self) -> int:
        """The last event that left a trace: it was applied, or the key is parked at it."""
        return reach_of(self.sequence, self.parked)

    @property
    def is_held(self) -> bool:
        """True when the key counts in the digest: it has a value, or is parked."""
        return self.value is not None or self.parked is not None

    def __str__(self) -> str:
        if not self.is_held:
            return f"deleted at {self.sequence}" if self.sequence else "nothing"
        value = "nothing" if self.value is None else self.value[:_SHOWN].decode(errors="replace")
        at = f" at {self.sequence}"
        return f"{value}{at}{f', parked at {self.parked.sequence}' if self.parked is not None else ''}"


class Difference(NamedTuple):
    """A key whose content differs from a fold of its events."""

    key: str
    kind: DifferenceKind
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.key}: {self.kind}: expected {self.expected}, found {self.found}"


def reaches(current: Mapping[str, Current], boundary: int) -> dict[str, int]:
    """The last event of each key that is beyond a boundary: such a key has to be compared there."""
    found = {key: KeyContent.of_current(each).reach for key, each in current.items()}
    return {key: reach for key, reach in found.items() if reach > boundary}


class Digest:
    """The digest of keys, added in any order."""

    def __init__(self) -> None:
        self._sum = 0
        self.keys = 0

    def add(self, key: str, content: KeyContent) -> None:
        if content.is_held:
            parked = "" if content.parked is None else str(content.parked.sequence)
            ids = b"\0" + content.ids if content.ids else b""
            line = b"%b%b%b\n" % (f"{key}\0{content.sequence}\0{parked}\0".encode(), content.value or b"", ids)
            self._sum = (self._sum + int.from_bytes(hashlib.sha256(line).digest())) % _DIGESTS
            self.keys += 1

    def include(self, other: Digest) -> None:
        """Add the digest of other keys."""
        self._sum = (self._sum + other._sum) % _DIGESTS
        self.keys += other.keys

    def __str__(self) -> str:
        return f"sum-sha256:{self._sum:064x}"


def compare(key: str, expected: KeyContent, found: Current, version: int | None) -> Difference | None:
    """The difference between a key in the bucket and a fold of its events; None if they are equal.

    With ``version`` None, any version of the fold may have written the key.
    """
    content = KeyContent.of_current(found)
    kind: DifferenceKind | None = None
    mark = mark_of(found)
    if found.revision and mark is None:
        kind = "foreign"
    elif mark is not None and version is not None and mark.version != version:
        kind = "version"
    elif content.value is None and expected.value is not None:
        kind = "missing"
    elif content.value is not None and expected.value is None:
        kind = "extra"
    elif _parked_at(content) != _parked_at(expected):
        kind = "parked"
    elif content.value != expected.value:
        kind = "value"
    elif content.is_held and content.sequence != expected.sequence:
        kind = "sequence"
    elif found.revision and content.sequence != expected.sequence:
        kind = "sequence"  # the marker of a deleted key: a lower sequence would let an old event re-create the key
    elif found.revision and content.ids != expected.ids:
        kind = "ids"
    return None if kind is None else Difference(key, kind, str(expected), str(content))


def change_to(
    spec: ProjectionSpec, key: str, wanted: KeyContent, current: Current, *, position: int = 0
) -> Change | None:
    """The write that gives a key its wanted content; None if the key has it.

    Args:
        position: The position of the bucket's engine. The marker of a deleted key may expire once the engine has passed
            the key's last event. Before that the marker is needed, or the engine would apply old events to an empty
            state.
    """
    is_marker_missing = not current.revision and not wanted.is_held and wanted.sequence > position
    if compare(key, wanted, current, spec.version) is None and not is_marker_missing:
        return None
    mark = spec.mark(wanted.parked, wanted.ids)
    if wanted.value is None:
        return Change(key, b"", "delete", wanted.sequence, current.revision, mark=mark)
    return Change(key, wanted.value, "put", wanted.sequence, current.revision, mark=mark)


def _parked_at(content: KeyContent) -> int | None:
    return None if content.parked is None else content.parked.sequence


class ParkedKey(NamedTuple):
    """A key whose events are not applied since one was refused."""

    key: str
    sequence: int
    """The event that was refused."""
    reason: str


@dataclass(slots=True, kw_only=True)
class ComparedKeys:
    """The result of comparing some keys of a bucket with a fold of their events."""

    found: Digest = field(default_factory=Digest)
    """The digest of the bucket."""
    expected: Digest = field(default_factory=Digest)
    """The digest of the fresh fold."""
    parked: int = 0
    parked_keys: list[ParkedKey] = field(default_factory=list)
    """The first ``MAX_NAMED``."""
    difference_count: int = 0
    differences: list[Difference] = field(default_factory=list)
    """The first ``MAX_NAMED``."""
    events: int = 0
    unreadable: int = 0

    def add(self, key: str, expected: KeyContent, current: Current, version: int | None) -> None:
        """Compare one more key. Keys must come in ascending order, so that the first ones are named."""
        content = KeyContent.of_current(current)
        self.found.add(key, content)
        self.expected.add(key, expected)
        if content.parked is not None:
            self.parked += 1
            if len(self.parked_keys) < MAX_NAMED:
                self.parked_keys.append(ParkedKey(key, *content.parked))
        difference = compare(key, expected, current, version)
        if difference is not None:
            self.difference_count += 1
            if len(self.differences) < MAX_NAMED:
                self.differences.append(difference)

    def add_equal(self, keys: Iterable[tuple[str, KeyContent]]) -> None:
        """Add keys, in any order, that are equal to the fold of their events, and are not parked."""
        same = Digest()
        for key, content in keys:
            same.add(key, content)
        self.found.include(same)
        self.expected.include(same)

    def include(self, other: ComparedKeys) -> None:
        """Add the result for other keys."""
        self.found.include(other.found)
        self.expected.include(other.expected)
        self.parked += other.parked
        self.parked_keys = _first(self.parked_keys, other.parked_keys)
        self.difference_count += other.difference_count
        self.differences = _first(self.differences, other.differences)
        self.events += other.events
        self.unreadable += other.unreadable


Named = TypeVar("Named", ParkedKey, Difference)


def _first(one: Iterable[Named], other: Iterable[Named]) -> list[Named]:
    return list(islice(heapq.merge(one, other, key=attrgetter("key")), MAX_NAMED))
