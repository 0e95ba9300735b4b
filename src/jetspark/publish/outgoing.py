"""Sequences of messages as callers give them to publishers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, TypeAlias

from jetspark.core.arguments import iterate, unfit
from jetspark.core.connection import Connection
from jetspark.core.headers import HeadersLike
from jetspark.core.subjects import validate_subject
from jetspark.errors import ConfigError, InvalidSubject

__all__ = [
    "CHUNK_BYTES",
    "CHUNK_MESSAGES",
    "Item",
    "all_but_last",
    "are_plain",
    "data_of",
    "each_of",
    "last_message",
    "plain",
    "some_of",
    "take",
    "unsendable",
]

Item: TypeAlias = tuple[str, bytes] | tuple[str, bytes, HeadersLike | bytes | None]
"""Subject, data, and optional headers; bytes are an encoded header block, and are sent unchecked."""

# Messages and bytes taken from an iterator at a time: enough for one large write, and a bound for memory.
CHUNK_MESSAGES = 500
CHUNK_BYTES = 256 << 10

_subject_of, data_of = itemgetter(0), itemgetter(1)


def unsendable(
    item: Any, what: str = "items", expected: str = "each to be (subject, data), or (subject, data, headers)"
) -> ConfigError:
    """The error for an object that is not a message, or has an invalid subject."""
    try:
        subject, *_ = item
        validate_subject(subject)
    except InvalidSubject as error:
        return error
    except (TypeError, ValueError):
        pass
    return unfit(what, item, expected)


def plain(message: Any) -> tuple[str, bytes]:
    """Subject and data of a message without headers.

    Raises:
        ConfigError: The object is not such a message.
    """
    try:
        subject, data = message
    except (TypeError, ValueError):
        raise unsendable(message, "messages", "each to be (subject, data)") from None
    return subject, data


def last_message(subject: str | None, data: bytes, headers: HeadersLike | None) -> Item | None:
    """The last message given to a commit; None without one.

    Raises:
        ConfigError: Data or headers are given without a subject.
    """
    if subject is not None:
        return subject, data, headers
    if data or headers:
        raise ConfigError("commit with data or options and no subject: expected the subject it goes to")
    return None


def each_of(items: Iterable[Item]) -> Iterator[Item]:
    """
    Raises:
        ConfigError: They cannot be iterated over.
    """
    return iterate("items", items, "messages, each (subject, data) or (subject, data, headers)")


def take(items: Iterator[Item], chunk: list[Item], max_messages: int, max_bytes: int) -> None:
    """Move some items into ``chunk``, which keeps them when the iterator raises.

    The last one may exceed the rest of ``max_bytes``.
    """
    for item in islice(items, max_messages):
        chunk.append(item)
        try:
            max_bytes -= len(item[1])
        except (TypeError, LookupError):
            return  # not a message; encoding it raises
        if max_bytes <= 0:
            return


def all_but_last(items: Iterator[Item], held: list[Item], room: Callable[[], int]) -> Iterator[list[Item]]:
    """Chunks of the items, as large as there is room for; the last item stays in ``held``.

    The last item so far may have to be sent as a commit. When the iterator raises, the chunk that it began comes first.
    """
    while True:
        chunk = held.copy()
        before = len(chunk)
        try:
            take(items, chunk, min(max(room(), 1), CHUNK_MESSAGES), CHUNK_BYTES)
        except BaseException:
            yield chunk
            raise
        held[:] = chunk[-1:]
        yield chunk[:-1]
        if len(chunk) == before:
            return


def some_of(items: list[Item], at: int, max_messages: int, max_bytes: int) -> list[Item]:
    """As :func:`take`, from index ``at`` on, for a list of known messages."""
    chunk = items[at : at + max_messages]
    if sum(map(len, map(data_of, chunk))) < max_bytes:
        return chunk
    fitting: list[Item] = []
    take(iter(chunk), fitting, max_messages, max_bytes)
    return fitting


def are_plain(connection: Connection, items: Sequence[Item], *, beside: int = 0) -> bool:
    """True if all messages have no headers and can be sent as they are, or with headers of ``beside`` bytes.

    The loops run in C: publishers do this for every message. If False, the caller checks the messages one by one, and
    may still send them.
    """
    try:
        if set(map(type, items)) != {tuple} or sum(map(len, items)) != 2 * len(items):
            return False
        if set(map(type, map(data_of, items))) != {bytes}:
            return False
        if max(map(len, map(data_of, items))) + beside > connection.info.max_payload_bytes:
            return False
        return all(map(connection.address, set(map(_subject_of, items))))
    except (TypeError, LookupError, InvalidSubject):  # not a message, or without a valid subject
        return False
