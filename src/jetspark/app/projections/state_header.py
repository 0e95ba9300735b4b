"""Headers of the states in a projection's bucket. Pure.

A key of the bucket holds the state as canonical JSON with two headers. ``JetSpark-Sequence`` is the sequence of the
last event in the state. ``JetSpark-Projection``, the *mark*, has the version of the projection that folded the state;
with ``unique_ids`` the ids of the key's last events; and for a stuck key the event and the error that it is stuck at. A
deleted key keeps both headers, so that an old event cannot bring the state back::

    3
    3 parked 17 ValueError: cannot be applied
    3 unique 100:w6Uxq0yC1v5gN3Ba parked 17 ValueError: cannot be applied

A value without a mark was written by another program. It is never overwritten, because the events in it are unknown.

**Ids of recent events.** The server drops an event whose id it has seen within its duplicate window, two minutes by
default. An event that a producer stores again after that has the same id and another sequence: a new event to the
fold. A projection declared with ``unique_ids=n`` keeps the ids of the last ``n`` events of each key in the mark, and
skips an event whose id is among them. The ids are written with every change of the key, also with the marker of a
deleted key. They are a function of the key's events in stream order, so every engine stores the same bytes.

An id is stored as the first 12 bytes of a SHA-256: a collision among 10^12 ids has a probability below 1 in 100,000. In
CloudEvents ``source`` and ``id`` together identify an event, so both are hashed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import NamedTuple

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

# A header is one line. The log of the engine that met the error has the full text.
_MAX_REASON = 300


class Parked(NamedTuple):
    """The event and the reason that a key is stuck at: later events of the key wait until it is repaired."""

    sequence: int
    """The event that could not be applied; 0 if the cause is not an event."""
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
        """Parse the header; None for text in another format."""
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
    """The key of a reader's position. It is in the same bucket as the states, so it cannot outlive them.

    The key has two tokens; no key of an event has these two.
    """
    return f"_jetspark.position{f'.{part}' if part else ''}"


def is_reserved(key: str) -> bool:
    """True for the positions of readers: these keys hold no state.

    With windows ``_jetspark`` can be a key of the projection; its second token is a window then.
    """
    return key == position_key() or key.startswith(f"{position_key()}.")


def mark_of(current: Current) -> Mark | None:
    """The mark of a bucket's entry; None if the key is missing or its value is of another program."""
    return None if current.mark is None else Mark.read(current.mark)


def parked_of(current: Current) -> Parked | None:
    """Event and reason that a key is stuck at; None if it is not stuck."""
    mark = mark_of(current)
    if mark is not None:
        return mark.parked
    return FOREIGN if current.revision else None


def reach_of(sequence: int, parked: Parked | None) -> int:
    """The last event that the entry shows: the last event applied, or the event that the key is stuck at."""
    return sequence if parked is None else max(sequence, parked.sequence)


ID_BYTES = 12
MAX_UNIQUE_IDS = 2000
"""Upper bound of ``unique_ids``: 32,000 bytes of the 65,535 that a server stores as headers of a message."""


class Identified(NamedTuple):
    """An event of a projection with ``unique_ids``, on its way to a key."""

    id: bytes
    """Made by :func:`digest_of`."""
    event: object


def digest_of(source: str, id: str) -> bytes:
    """The stored form of an id, ``ID_BYTES`` long."""
    text = f"{len(source)}:{source}{id}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:ID_BYTES]


def is_among(id: bytes, ids: bytes) -> bool:
    """True if ``ids``, a concatenation of stored ids, contains ``id``."""
    index = ids.find(id)
    while index > 0 and index % ID_BYTES:
        index = ids.find(id, index + 1)
    return index >= 0


def ids_text(ids: bytes) -> str:
    """The ids as text of a mark, without spaces."""
    return base64.b64encode(ids).decode()


def read_ids(text: str) -> bytes | None:
    """The inverse of :func:`ids_text`; None if the text is not in that form."""
    try:
        ids = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return None if len(ids) % ID_BYTES else ids


def room_for(unique_ids: int) -> int:
    """Bytes of the mark that ``unique_ids`` ids need at most, their prefix included."""
    return 0 if not unique_ids else unique_ids * ID_BYTES * 4 // 3 + 32
