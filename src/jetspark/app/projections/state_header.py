"""What a projected value says of itself besides its bytes. Pure.

A key of a projection's bucket has the state as canonical JSON, and two headers: ``JetSpark-Sequence``, the sequence of
the last event in it, and ``JetSpark-Projection``, its mark: the version of the projection that made it; with
``unique_ids`` the ids of its last events; and where the key cannot go on, at which event and why. A deleted key keeps
both headers, so that an old event cannot raise the dead::

    3
    3 parked 17 ValueError: cannot be applied
    3 unique 100:w6Uxq0yC1v5gN3Ba parked 17 ValueError: cannot be applied

A value without a mark was written by somebody else. It is never overwritten: nobody knows which events are in it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any, NamedTuple

from jetspark.app.stored_events import escape_line, unescape_line
from jetspark.state.changes import Current

__all__ = [
    "FOREIGN",
    "ID_BYTES",
    "MAX_UNIQUE_IDS",
    "Identified",
    "Mark",
    "Parked",
    "digest_of",
    "ids_text",
    "is_among",
    "is_reserved",
    "mark_of",
    "parked_of",
    "position_key",
    "reach_of",
    "read_ids",
    "room_for",
]

# A header is a line, and the whole story is in the log of the engine that met it.
_MAX_REASON = 300


class Parked(NamedTuple):
    """Why a key does not go on."""

    sequence: int
    """Of the event that could not be applied; 0 if it was not an event."""
    reason: str


FOREIGN = Parked(0, "the value was written by another program, which does not say what events are in it")


class Mark(NamedTuple):
    """The header ``JetSpark-Projection``."""

    version: int
    parked: Parked | None = None
    unique_ids: int = 0
    """How many ids the projection keeps of each key; 0 where it was declared without."""
    ids: bytes = b""
    """The ids of the key's last events, the newest last."""

    def __str__(self) -> str:
        unique = f" unique {self.unique_ids}:{ids_text(self.ids)}" if self.unique_ids else ""
        if self.parked is None:
            return f"{self.version}{unique}"
        return f"{self.version}{unique} parked {self.parked.sequence} {escape_line(self.parked.reason[:_MAX_REASON])}"

    @classmethod
    def read(cls, text: str | None) -> Mark | None:
        """None for what is none of ours."""
        version, _, rest = (text or "").partition(" ")
        if not (version.isascii() and version.isdecimal()):
            return None
        limit, ids = 0, b""
        if rest.startswith("unique "):
            unique, _, rest = rest.removeprefix("unique ").partition(" ")
            count, colon, text = unique.partition(":")
            found = read_ids(text) if colon else None
            if found is None or not (count.isascii() and count.isdecimal()):
                return None
            limit, ids = int(count), found
        if not rest:
            return cls(int(version), None, limit, ids)
        word, _, rest = rest.partition(" ")
        sequence, _, reason = rest.partition(" ")
        if word != "parked" or not (sequence.isascii() and sequence.isdecimal()):
            return None
        return cls(int(version), Parked(int(sequence), unescape_line(reason)), limit, ids)


def position_key(part: str = "") -> str:
    """The key under which a reader keeps how far it is, in the bucket itself: a position must not outlive its state.

    It has two tokens, and no key of an event begins with the first of them and has such a second one.
    """
    return f"_jetspark.position{f'.{part}' if part else ''}"


def is_reserved(key: str) -> bool:
    """Whether a key of a bucket is one of its readers' notes, and no key of the projection.

    With windows ``_jetspark`` may be a key as any other; what is behind it is a window then.
    """
    return key == position_key() or key.startswith(f"{position_key()}.")


def mark_of(current: Current) -> Mark | None:
    """The mark of what a bucket has for a key; None for a key that has nothing, or something foreign."""
    return None if current.mark is None else Mark.read(current.mark)


def parked_of(current: Current) -> Parked | None:
    """Why a key does not go on; None for one that does."""
    mark = mark_of(current)
    if mark is not None:
        return mark.parked
    return FOREIGN if current.revision else None


def reach_of(sequence: int, parked: Parked | None) -> int:
    """The last event of which a state shows a trace: applied, or the one that it is parked at."""
    return sequence if parked is None else max(sequence, parked.sequence)


ID_BYTES = 12
MAX_UNIQUE_IDS = 2000
"""Ids kept for each key, at most: 32,000 bytes of headers, of the 65,535 that a server stores with a message."""


class Identified(NamedTuple):
    """An event of a projection with ``unique_ids``, on its way to a key."""

    id: bytes
    """By :func:`digest_of`."""
    event: Any


def digest_of(source: str, id: str) -> bytes:
    """The bytes that an id is kept as."""
    text = f"{len(source)}:{source}{id}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:ID_BYTES]


def is_among(id: bytes, ids: bytes) -> bool:
    """Whether one of some ids, which stand one behind the other, is this one."""
    place = ids.find(id)
    while place > 0 and place % ID_BYTES:
        place = ids.find(id, place + 1)
    return place >= 0


def ids_text(ids: bytes) -> str:
    """Ids as a mark has them; no spaces in it."""
    return base64.b64encode(ids).decode()


def read_ids(text: str) -> bytes | None:
    """What :func:`ids_text` has made; None of another text."""
    try:
        ids = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return None if len(ids) % ID_BYTES else ids


def room_for(unique_ids: int) -> int:
    """How many bytes of a message so many ids take, with all that stands before them in the mark."""
    return 0 if not unique_ids else unique_ids * ID_BYTES * 4 // 3 + 32
