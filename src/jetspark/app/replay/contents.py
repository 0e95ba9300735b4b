"""What a key of a projection holds, as far as all engines must agree on it: comparing, digesting, repair. Pure.

The digest is the sum, modulo 2**256, of the sha256 of one line for each key that has a value or is parked::

    key \\0 sequence \\0 sequence of the event it is parked at, or nothing \\0 value \\n

Where the projection keeps ids of events (``unique_ids``), ``\\0`` and those, 12 bytes each, stand before the ``\\n``.
It is a sum because keys come in no order where many processes fold: each adds up its own, and so do those who bring
together what they have. It tells states apart that differ by accident, and is no proof against who wants them to agree.

Values are canonical, so equal bytes are equal states. A deleted key is not part of it: whether the bucket still has the
marker of its end depends on who tidied up, and when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.state_header import Parked, mark_of, parked_of, reach_of
from jetspark.state.changes import Change, Current

__all__ = [
    "Difference",
    "DifferenceKind",
    "Digest",
    "KeyContent",
    "change_to",
    "compare",
    "reaches",
]

DifferenceKind: TypeAlias = Literal["missing", "extra", "value", "sequence", "ids", "parked", "foreign", "version"]
_DIGESTS = 1 << 256
# Of a value in a message: it has to fit a line.
_SHOWN = 120


class KeyContent(NamedTuple):
    """What a key holds."""

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
        """The last event it shows a trace of: applied, or that it is parked at."""
        return reach_of(self.sequence, self.parked)

    @property
    def is_held(self) -> bool:
        """Whether it is part of the digest."""
        return self.value is not None or self.parked is not None

    def __str__(self) -> str:
        if not self.is_held:
            return f"deleted at {self.sequence}" if self.sequence else "nothing"
        value = "nothing" if self.value is None else self.value[:_SHOWN].decode(errors="replace")
        at = f" at {self.sequence}"
        return f"{value}{at}{f', parked at {self.parked.sequence}' if self.parked is not None else ''}"


class Difference(NamedTuple):
    """A key that is not what its events make of it."""

    key: str
    kind: DifferenceKind
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.key}: {self.kind}: expected {self.expected}, found {self.found}"


def reaches(current: Mapping[str, Current], boundary: int) -> dict[str, int]:
    """How far keys are that are beyond a boundary: what their events make has to be looked at there."""
    found = {key: KeyContent.of_current(each).reach for key, each in current.items()}
    return {key: reach for key, reach in found.items() if reach > boundary}


class Digest:
    """Of keys in any order."""

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
    """How what a bucket has differs from what the events make; None if it does not. Without ``version`` any will do."""
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
        kind = "sequence"  # the marker of a deleted key: with a lower one, an old event would raise the dead
    elif found.revision and content.ids != expected.ids:
        kind = "ids"
    return None if kind is None else Difference(key, kind, str(expected), str(content))


def change_to(
    spec: ProjectionSpec, key: str, wanted: KeyContent, current: Current, *, position: int = 0
) -> Change | None:
    """The write that makes a key hold what is wanted; None if it does.

    Args:
        position: How far the engine of the bucket is. The marker of a deleted key that it is beyond may have been
            tidied away, and is not needed any more; with one before it, the engine would fold old events on nothing.
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
