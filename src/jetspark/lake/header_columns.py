"""Header blocks as columns, and columns as blocks again.

Other engines read headers as a map of names to lists of values. A block whose map, encoded again, is another block (it
has the lines of one name apart, is not UTF-8, or cannot be decoded at all) is kept beside its map as it was stored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from jetspark.core.headers import decode
from jetspark.errors import ProtocolError

__all__ = ["HEADERS_TYPE", "blocks_of", "header_columns", "utf8"]

_logger = logging.getLogger("jetspark.lake")

HEADERS_TYPE = pa.map_(pa.string(), pa.list_(pa.string()))

_VERSION = "NATS/1.0"

_Pairs = list[tuple[str, list[str]]]


def header_columns(blocks: Sequence[bytes | None]) -> tuple[Any, Any]:
    """The column of maps, and that of the blocks that differ from their maps.

    A message without headers has an empty map; a block that cannot be decoded has none.
    """
    if not any(blocks):
        count = len(blocks)
        return pa.array([[]] * count, HEADERS_TYPE), pa.nulls(count, pa.binary())
    maps: list[_Pairs | None] = []
    raw: list[bytes | None] = []
    for block in blocks:
        pairs = [] if block is None else _pairs(block)
        maps.append(pairs)
        raw.append(block if block is not None and (not pairs or _block(pairs) != block) else None)
    return pa.array(maps, HEADERS_TYPE), pa.array(raw, pa.binary())


def blocks_of(headers: Any, raw_headers: Any) -> list[bytes | None]:
    """The stored blocks of two columns that :func:`header_columns` made."""
    return [
        stored if stored is not None else _block(pairs) if pairs else None
        for pairs, stored in zip(headers.to_pylist(), raw_headers.to_pylist(), strict=True)
    ]


def utf8(text: str) -> str:
    """The text as UTF-8 allows it: other bytes, which are lone surrogates in it, become U+FFFD."""
    return text if text.isascii() else text.encode(errors="surrogateescape").decode(errors="replace")


def _pairs(block: bytes) -> _Pairs | None:
    try:
        headers = decode(block)
    except ProtocolError:
        # The server stores any header block; a publisher's mistake must not end an archive.
        return None
    return [(utf8(name), [utf8(value) for value in headers.get_all(name)]) for name in headers]


def _block(pairs: Iterable[tuple[str, Iterable[str]]]) -> bytes:
    lines = [f"{name}: {value}" for name, values in pairs for value in values]
    return "\r\n".join([_VERSION, *lines, "\r\n"]).encode()
