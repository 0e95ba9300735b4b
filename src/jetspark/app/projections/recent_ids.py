"""Ids of the events that a key has taken last, so that an event stored twice is folded once. Pure.

The server leaves out an event whose id it has seen within its duplicate window, two minutes by default. An event that a
producer stores again after that has the same id and another sequence: to the fold it is a new event. A projection
declared with ``unique_ids=n`` keeps the ids of the last ``n`` events that each key has taken, and passes by an event
whose id is among them. The ids are part of the stored state: they are in its mark, next to its version, and go with
every write of the key, also with the marker of a deleted one. So they are a function of the key's events in the order
of the stream, like the value itself, and every engine stores the same bytes.

An id is kept as the first 12 bytes of a SHA-256: among a million million of them two are equal with a chance of less
than 1 in 100,000. By CloudEvents ``source`` and ``id`` together identify an event, so both are hashed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any, NamedTuple

__all__ = ["ID_BYTES", "MAX_UNIQUE_IDS", "Identified", "digest_of", "ids_text", "is_among", "read_ids", "room_for"]

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
