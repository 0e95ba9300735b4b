"""Messages as rows, and back: byte for byte."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

import pyarrow as pa
from support.archived import DAY_NS, NOON_NS, contents, delivered, stored
from support.header_blocks import BLOCKS

from jetspark.core.headers import Headers, encode, readable
from jetspark.errors import ProtocolError
from jetspark.jetstream.info import StoredMessage
from jetspark.lake.header_columns import block_column, header_columns
from jetspark.lake.rows import RAW_SCHEMA, messages_of, rows_of, texts

NAMES = st.sampled_from(["A", "a", "Nats-Msg-Id", "traceparent", "X:", "Größe", "with blank", "\udcff"])
VALUES = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(
    ["", " led", "\tled", "trailed ", "a: b", "\udcfe\udcff", "a\rb", "a\nb"]
)


def _written(pairs: list[tuple[str, str]], mark: str, end: str) -> bytes:
    """A block as some publisher might write it."""
    lines = [f"{name}{mark}{value}" for name, value in pairs]
    return "\r\n".join(["NATS/1.0", *lines, end]).encode(errors="surrogateescape")


CANONICAL = st.lists(st.tuples(st.sampled_from(["A", "a", "B", "Nats-Msg-Id"]), VALUES), max_size=4).map(
    lambda pairs: _written(pairs, ": ", "\r\n")
)
ODD = st.builds(
    _written,
    st.lists(st.tuples(NAMES, VALUES), max_size=4),
    st.sampled_from([": ", ":", " "]),
    st.sampled_from(["\r\n", ""]),
)
A_BLOCK = st.none() | CANONICAL | ODD | st.binary(max_size=30) | st.sampled_from(list(BLOCKS.values()))
SUBJECTS = st.binary(min_size=1, max_size=12).map(lambda raw: raw.decode(errors="surrogateescape"))
MESSAGES = st.lists(
    st.tuples(SUBJECTS, st.binary(max_size=40), A_BLOCK, st.integers(1, 2**62)), min_size=1, max_size=12
)


@given(MESSAGES, st.booleans())
def test_messages_come_back_byte_for_byte(made: list[tuple[str, bytes, bytes | None, int]], is_consumed: bool) -> None:
    messages = [
        stored(7 * number, subject=subject, data=data, block=block, time_ns=time_ns)
        for number, (subject, data, block, time_ns) in enumerate(made, start=1)
    ]
    rows = rows_of("ORDERS", messages if is_consumed else [delivered(each) for each in messages])
    assert rows.schema == RAW_SCHEMA
    rows.validate(full=True)
    back = messages_of(rows)
    assert contents(back) == contents(messages)
    assert [each.headers.multi_items() for each in back] == [each.headers.multi_items() for each in messages]
    # A part of a batch, as readers cut it.
    assert contents(messages_of(rows.slice(len(made) // 2))) == contents(messages[len(made) // 2 :])


@given(st.lists(A_BLOCK, max_size=8))
@example([b"NATS/1.0\r\nA: 1\r\nB: 2\r\nA: 3\r\n\r\n"])  # the lines of a name are apart
@example([b"NATS/1.0\r\nA: 1\r\nA: 2\r\nB: 3\r\n\r\n", None])
@example([b"NATS/1.0\r\n\r\n"])
def test_maps_are_the_headers_and_blocks_are_kept_where_a_map_is_not_enough(blocks: list[bytes | None]) -> None:
    maps, kept = header_columns(blocks)
    assert block_column(maps, kept).to_pylist() == blocks
    encoded = block_column(maps).to_pylist()
    for block, pairs, raw, again in zip(blocks, maps.to_pylist(), kept.to_pylist(), encoded, strict=True):
        assert (raw is None) == (again == block)
        if block is None:
            assert pairs == []
        elif pairs is not None:
            text = {_text(name): [_text(each) for each in readable(block).get_all(name)] for name in readable(block)}
            if len(text) == len(readable(block)):
                assert dict(pairs) == text


@given(st.lists(st.none() | CANONICAL, min_size=1, max_size=6), ODD)
def test_an_odd_block_changes_nothing_for_its_neighbours(blocks: list[bytes | None], odd: bytes) -> None:
    maps, kept = header_columns(blocks)
    beside, kept_beside = header_columns([*blocks, odd])
    assert beside[:-1].to_pylist() == maps.to_pylist()
    assert kept_beside[:-1].to_pylist() == kept.to_pylist()


def _text(name: str) -> str:
    return name.encode(errors="surrogateescape").decode(errors="replace")


def test_columns_are_what_other_engines_expect() -> None:
    block = encode(Headers([("Nats-Msg-Id", "evt-1"), ("X", "1"), ("X", "2")]))
    rows = rows_of("ORDERS", [stored(5, data=b"{}", block=block), stored(8, time_ns=NOON_NS + DAY_NS + 1999)])
    first, second = rows.to_pylist()
    assert first["sequence"] == 5
    assert first["headers"] == [("Nats-Msg-Id", ["evt-1"]), ("X", ["1", "2"])]
    assert (first["raw_headers"], first["raw_subject"]) == (None, None)
    assert second["timestamp"].isoformat() == "2026-11-20T12:00:00.000001+00:00"
    assert second["timestamp_ns"] == NOON_NS + DAY_NS + 1999
    assert second["headers"] == []


def test_text_columns_replace_other_bytes_and_raw_columns_keep_them() -> None:
    rows = rows_of("ORDERS", [stored(1, subject="o.\udcff"), stored(2, subject="o.é")]).to_pylist()
    assert [(each["subject"], each["raw_subject"]) for each in rows] == [("o.\ufffd", b"o.\xff"), ("o.é", None)]
    assert texts(["a", "\udcff"]).to_pylist() == ["a", "\ufffd"]


def test_a_message_made_by_hand_has_the_block_of_its_headers() -> None:
    message = stored(1)
    made = StoredMessage(
        stream="ORDERS",
        subject="o",
        sequence=1,
        timestamp=message.timestamp,
        data=b"",
        headers=Headers({"A": "1"}),
    )
    (back,) = messages_of(rows_of("ORDERS", [made]))
    assert back == made
    assert back.raw_headers == b"NATS/1.0\r\nA: 1\r\n\r\n"
    assert back.time_ns == NOON_NS // 1000 * 1000


def test_no_messages_are_no_rows() -> None:
    assert rows_of("ORDERS", []).schema == RAW_SCHEMA
    assert messages_of(rows_of("ORDERS", [])) == []


def test_rows_of_other_columns_or_messages_without_a_place_are_errors() -> None:
    with pytest.raises(KeyError, match="raw_headers"):
        messages_of(rows_of("ORDERS", [stored(1)]).drop_columns(["raw_headers"]))
    nowhere = delivered(stored(1))
    nowhere.raw_reply = b"elsewhere"
    with pytest.raises(ProtocolError, match="reply subject"):
        rows_of("ORDERS", [nowhere])
    assert isinstance(rows_of("ORDERS", [delivered(stored(1))]), pa.RecordBatch)
