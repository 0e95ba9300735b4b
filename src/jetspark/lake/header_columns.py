"""Header blocks as columns, and columns as blocks again.

Other engines read headers as a map of names to lists of values. A block whose map, encoded again, is another block (it
has the lines of one name apart, is not UTF-8, or cannot be decoded at all) is kept beside its map as it was stored.

Arrow splits and joins the lines of many blocks at once, which takes a tenth of the time that a loop takes. The loop
remains for pieces with a block that Arrow's way does not read right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from jetspark.core.headers import decode
from jetspark.errors import ProtocolError

__all__ = ["HEADERS_TYPE", "block_column", "header_columns", "utf8"]

HEADERS_TYPE = pa.map_(pa.string(), pa.list_(pa.string()))

_PREFIX, _SUFFIX, _LINE_END, _COLON = "NATS/1.0\r\n", "\r\n\r\n", "\r\n", ": "


def header_columns(blocks: Sequence[bytes | None]) -> tuple[Any, Any]:
    """The column of maps, and that of the blocks that differ from their maps.

    A message without headers has an empty map; a block that cannot be decoded has none.
    """
    import pyarrow.compute as pc  # as in reply_subjects: late, because most of Spark's processes need it never

    stored = pa.array(blocks, pa.binary())
    nothing = pa.nulls(len(stored), pa.binary())
    if stored.null_count == len(stored):
        return pa.array([[]] * len(stored), HEADERS_TYPE), stored
    maps = _plain_maps(stored)
    if maps is not None:
        return maps, nothing
    maps = pa.array([[] if block is None else _lists(block) for block in blocks], HEADERS_TYPE)
    is_same = pc.fill_null(pc.equal(block_column(maps), stored), False)
    return maps, pc.if_else(is_same, nothing, stored)


def block_column(maps: Any, raw_headers: Any = None) -> Any:
    """The stored blocks of the two columns; of the maps alone, the blocks that they encode to."""
    import pyarrow.compute as pc

    lists = maps.items
    if not len(lists):
        return pa.nulls(len(maps), pa.binary()) if raw_headers is None else raw_headers
    names = maps.keys.take(pc.list_parent_indices(lists))
    lines = pc.binary_join_element_wise(names, pc.list_flatten(lists), _COLON)
    offsets = pc.subtract(lists.offsets.take(maps.offsets), lists.offsets[0])
    texts = pc.binary_join(pa.ListArray.from_arrays(offsets, lines), _LINE_END)
    blocks = pc.binary_join_element_wise(_PREFIX, texts, _SUFFIX, "").cast(pa.binary())
    has_lines = pc.greater(offsets[1:], offsets[:-1])
    blocks = pc.if_else(has_lines, blocks, pa.scalar(None, pa.binary()))
    return blocks if raw_headers is None else pc.coalesce(raw_headers, blocks)


def utf8(text: str) -> str:
    """The text as UTF-8 allows it: other bytes, which are lone surrogates in it, become U+FFFD."""
    return text if text.isascii() else text.encode(errors="surrogateescape").decode(errors="replace")


def _plain_maps(stored: Any) -> Any:
    """The maps of blocks that are what their maps encode to; None if one of them is not."""
    import pyarrow.compute as pc

    try:
        texts = stored.cast(pa.string())
    except pa.ArrowInvalid:
        return None
    if not pc.all(pc.and_(pc.starts_with(texts, _PREFIX), pc.ends_with(texts, _SUFFIX))).as_py():
        return None
    inner = pc.binary_slice(stored, len(_PREFIX), -len(_SUFFIX)).cast(pa.string())
    lines = pc.split_pattern(inner, _LINE_END)
    pairs = pc.split_pattern(lines.flatten(), _COLON, max_splits=1)
    if pc.min(pc.list_value_length(pairs)).as_py() < 2:
        return None
    names, values = pc.list_element(pairs, 0), pc.list_element(pairs, 1)
    codes = names.dictionary_encode()
    known = codes.dictionary
    # A colon ends the name, and blanks before the value belong to the frame: the loop reads both right.
    faults = [
        pc.equal(known, ""),
        pc.match_substring(known, ":"),
        pc.starts_with(values, " "),
        pc.starts_with(values, "\t"),
    ]
    if any(pc.any(each).as_py() for each in faults):
        return None
    owners = pc.multiply(pc.list_parent_indices(lines).cast(pa.int64()), len(known))
    if pc.count_distinct(pc.add(owners, codes.indices.cast(pa.int64()))).as_py() < len(names):
        return None  # a name comes twice in a block
    ones = pa.repeat(pa.scalar(1, pa.int32()), len(values))
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(ones)])
    return pa.MapArray.from_arrays(lines.offsets, names, pa.ListArray.from_arrays(offsets, values)).cast(HEADERS_TYPE)


def _lists(block: bytes) -> list[tuple[str, list[str]]] | None:
    try:
        headers = decode(block)
    except ProtocolError:
        # The server stores any header block; a publisher's mistake must not end a reader.
        return None
    # Two names that are not UTF-8 may become one, and a map has each name once.
    found: dict[str, list[str]] = {}
    for name, value in headers.multi_items():
        found.setdefault(utf8(name), []).append(utf8(value))
    return list(found.items())
