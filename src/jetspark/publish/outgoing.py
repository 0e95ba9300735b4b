"""Messages as they are given to publishers, many at a time. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import TypeAlias

from jetspark.core.connection import Connection
from jetspark.core.headers import HeadersLike
from jetspark.errors import InvalidSubject

__all__ = ["CHUNK_BYTES", "CHUNK_MESSAGES", "Item", "are_plain", "data_of", "some_of", "take"]

Item: TypeAlias = tuple[str, bytes] | tuple[str, bytes, HeadersLike | bytes | None]
"""Subject, data, and headers if there are any; bytes are a header block that is encoded already, and sent unchecked."""

# What is taken from an iterable at a time: enough to make one large write, and a bound for memory.
CHUNK_MESSAGES = 500
CHUNK_BYTES = 256 << 10

_subject_of, data_of = itemgetter(0), itemgetter(1)


def take(items: Iterator[Item], chunk: list[Item], max_messages: int, max_bytes: int) -> None:
    """Move some items into ``chunk``, which keeps what it got when the iterator raises.

    The last one may be larger than what is left of ``max_bytes``.
    """
    for item in islice(items, max_messages):
        chunk.append(item)
        try:
            max_bytes -= len(item[1])
        except (TypeError, IndexError):
            return  # not a message; making a frame of it raises
        if max_bytes <= 0:
            return


def some_of(items: list[Item], at: int, max_messages: int, max_bytes: int) -> list[Item]:
    """Those that :func:`take` would take, from the place ``at`` on, of messages that are known to be messages."""
    chunk = items[at : at + max_messages]
    if sum(map(len, map(data_of, chunk))) <= max_bytes:
        return chunk
    fitting: list[Item] = []
    take(iter(chunk), fitting, max_messages, max_bytes)
    return fitting


def are_plain(machine: Connection, items: Sequence[Item], *, beside: int = 0) -> bool:
    """Whether all of them have no headers and can be sent as they are, or with headers of ``beside`` bytes.

    The loops are the interpreter's own: publishers do this for every message. What is not plain is looked at one by
    one, by the caller, and may well be sent.
    """
    try:
        if set(map(type, items)) != {tuple} or sum(map(len, items)) != 2 * len(items):
            return False
        if set(map(type, map(data_of, items))) != {bytes}:
            return False
        if max(map(len, map(data_of, items))) + beside > machine.info.max_payload_bytes:
            return False
        return all(map(machine.address, set(map(_subject_of, items))))
    except (TypeError, LookupError, InvalidSubject):  # something that is no message, or goes nowhere
        return False
