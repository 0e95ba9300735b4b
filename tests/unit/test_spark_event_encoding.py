"""Rows as messages of events: ids, metadata, and the rules that rows break."""

from __future__ import annotations

import datetime
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from support.derived import Flagged, Picky, Settled, app

from jetspark.app import encode
from jetspark.app.columns import EventColumns
from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.contracts.envelope import derived_id
from jetspark.app.stored_events import StoredEvent
from jetspark.core.headers import decode as decode_headers
from jetspark.errors import ConfigError, InvalidRows
from jetspark.spark.options import describe
from jetspark.spark.stream.sink import WritingOptions
from jetspark.spark.stream.writing import Destination, Rows
from jetspark.spark.tasks import TaskId
from jetspark.spark.typed.event_encoding import EventEncoder, MetadataColumns, RowSpool
from jetspark.spark.typed.event_sink import EventSinkOptions
from jetspark.spark.typed.event_writes import EventSinkKeywords
from jetspark.spark.typed.refused_rows import RefusedRows

PAGE = Path(__file__).parents[2] / "docs" / "spark-events.md"

NOW = datetime.datetime(2026, 3, 15, 10, 15, 30, 123456, tzinfo=datetime.UTC)
TASK = TaskId("query", 7, 3)
LONG = "x" * 1001


def encoder(
    kind: type[Any] = Flagged,
    letters: list[StoredEvent] | None = None,
    stores: str = "derived.",
    max_bytes: int = 10_000,
    is_expected: bool = False,
    **options: Any,
) -> EventEncoder:
    given: dict[str, Any] = {"has_ids": True, "has_own_ids": False, "with_digest": False, "max_held_bytes": 1 << 20}
    metadata = MetadataColumns(**{name: options.pop(name) for name in [*options] if name not in given})
    destination = Destination(
        stream="DERIVED",
        is_stored=lambda subject: subject.startswith(stores),
        max_bytes=max_bytes,
        is_expected=is_expected,
    )
    refused = RefusedRows(TASK, None if letters is None else letters.extend)
    return EventEncoder(app, {"": contract_of(kind)}, metadata, destination, TASK, refused, **given | options)


def batch(*rows: dict[str, Any], **types: pa.DataType) -> pa.RecordBatch:
    names = {name: None for row in rows for name in row}
    arrays = [pa.array([row.get(name) for row in rows], types.get(name)) for name in names]
    return pa.RecordBatch.from_arrays(arrays, names=list(names))


def row(**values: Any) -> dict[str, Any]:
    return {"order_id": "a", "cents": 1} | values


def ids(rows: Rows) -> list[str]:
    return [json.loads(data)["id"] for data in rows.data]


def test_write_events_takes_the_options_of_the_format_that_no_argument_says() -> None:
    said = {"servers", "app", "appFolder", "type"}
    assert {*EventSinkKeywords.__annotations__} == {each.name for each in describe(EventSinkOptions)} - said


def test_every_option_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shared = {entry.name for entry in describe(WritingOptions)} | {"app", "appFolder", "type"}
    own = {entry.name for entry in describe(EventSinkOptions)} - shared
    assert [name for name in sorted(own) if f"| `{name}` |" not in page] == []


# ---- messages --------------------------------------------------------------------------------------------------------


def test_a_message_is_that_of_publish_with_the_id_as_a_header() -> None:
    events = [Flagged(order_id=f"o.{number}", cents=number, at=NOW) for number in range(3)]
    columns = EventColumns(contract_of(Flagged))
    made = columns.to_arrow(events)
    batch_ = pa.RecordBatch.from_arrays(
        [*made.arrays, pa.array(["i-0", "i-1", "i-2"]), pa.array([NOW] * 3)], names=[*columns.schema.names, "i", "t"]
    )
    rows = encoder(id="i", time="t", has_own_ids=True, is_expected=True).encode(batch_)
    assert rows.subjects is not None
    assert rows.blocks is not None
    for number, event in enumerate(events):
        expected = encode(event, id=f"i-{number}", source="/derived", time=NOW)
        assert (rows.subjects[number], rows.data[number]) == (expected.subject, expected.data)
        headers = decode_headers(rows.blocks[number])
        assert list(headers) == ["Nats-Expected-Stream", "Nats-Msg-Id", "traceparent"]
        assert (headers["Nats-Msg-Id"], headers["Nats-Expected-Stream"]) == (f"i-{number}", "DERIVED")
    assert rows.ids == [b"i-0", b"i-1", b"i-2"]


def test_a_null_in_a_column_of_times_is_now() -> None:
    before = datetime.datetime.now(datetime.UTC)
    [data] = encoder(time="t").encode(batch(row(t=None), t=pa.timestamp("us", "Asia/Tokyo"))).data
    assert before <= datetime.datetime.fromisoformat(json.loads(data)["time"]) <= datetime.datetime.now(datetime.UTC)


def test_times_of_another_zone_are_written_in_utc() -> None:
    [data] = encoder(time="t").encode(batch(row(t=NOW), t=pa.timestamp("us", "Asia/Tokyo"))).data
    assert json.loads(data)["time"] == "2026-03-15T10:15:30.123456Z"


# ---- ids -------------------------------------------------------------------------------------------------------------


def test_an_id_is_the_place_of_its_row_and_a_checksum_of_all_that_the_row_says() -> None:
    rows = encoder().encode(batch(row(), row(cents=2)))
    first, second = ids(rows)
    assert (first[:12], second[:12]) == ("query:7:3:0:", "query:7:3:1:")
    assert rows.ids == [first[10:].encode(), second[10:].encode()]  # the stream is asked for the prefix
    assert ids(encoder().encode(batch(row(), row(cents=2)))) == [first, second]
    others = [
        encoder().encode(batch(row(cents=3))),
        encoder(correlation="c").encode(batch(row(c="x"))),
        encoder(correlation="c").encode(batch(row(c="y"))),
        encoder(causation="c").encode(batch(row(c="x"))),
        encoder(time="t").encode(batch(row(t=NOW))),
    ]
    assert len({first, *(ids(each)[0] for each in others)}) == 6


def test_rows_are_numbered_over_the_batches_of_a_partition() -> None:
    made = encoder()
    assert [each[10] for _ in range(2) for each in ids(made.encode(batch(row(), row())))] == ["0", "1", "2", "3"]


def test_an_id_is_that_of_the_column_or_of_the_class_before_it_is_made() -> None:
    day = NOW.date()
    both = batch({"order_id": "a", "day": day, "i": 5}, {"order_id": "b", "day": None, "i": 6})
    assert ids(encoder(Settled, id="i", has_own_ids=True).encode(both)) == ["5", "6"]
    rows = encoder(Settled, has_own_ids=True).encode(both)
    assert ids(rows)[0] == "settled-a-2026-03-15"
    assert ids(rows)[1].startswith("query:7:3:1:")
    assert rows.ids == [each.encode() for each in ids(rows)]  # whole, as they have no prefix in common


def test_an_id_that_follows_from_the_cause_is_independent_of_place_and_order() -> None:
    cause = {"id": "c-1", "correlation": "all"}
    pairs = [row(_event=cause), row(cents=2, _event=cause), row(_event={"id": "c-2", "correlation": None})]
    made = [encoder(cause="_event", has_own_ids=True).encode(batch(*each)) for each in (pairs, [*reversed(pairs)])]
    assert ids(made[0]) == [*reversed(ids(made[1]))]
    [first, *_] = [json.loads(data) for data in made[0].data]
    data = '{"order_id":"a","cents":1,"why":"late","at":null,"price":null,"parts":[],"note":null}'
    assert first["id"] == derived_id("c-1", f"order.flagged\n{data}", 0)
    assert (first["causationid"], first["correlationid"]) == ("c-1", "all")
    assert [json.loads(data)["correlationid"] for data in made[0].data] == ["all", "all", "c-2"]


def test_equal_events_of_a_cause_that_follow_one_another_are_different_events() -> None:
    cause, other = {"id": "c-1"}, {"id": "c-2"}
    made = encoder(cause="_event", has_own_ids=True)
    found = ids(made.encode(batch(row(_event=cause), row(_event=cause), row(cents=2, _event=cause))))
    found += ids(made.encode(batch(row(_event=cause), row(_event=other), row(_event=cause))))
    assert len(set(found[:5])) == 5
    assert found[5] == found[0]  # not next to it


def test_a_row_without_a_cause_has_the_id_of_its_place() -> None:
    rows = encoder(cause="_event", has_own_ids=True).encode(batch(row(_event={"id": "c"}), row(_event=None)))
    assert ids(rows)[1].startswith("query:7:3:1:")
    assert "causationid" not in json.loads(rows.data[1])


def test_ids_are_new_without_exactly_once() -> None:
    found = [ids(encoder(has_ids=False).encode(batch(row(), row()))) for _ in range(2)]
    assert len({*found[0], *found[1]}) == 4


def test_a_trace_continues_from_the_headers_of_the_cause() -> None:
    parent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    header = pa.map_(pa.string(), pa.list_(pa.string()))
    struct = pa.struct([("id", pa.string()), ("headers", header)])
    causes = [{"id": "1", "headers": [("traceparent", [parent])]}, {"id": "2", "headers": None}]
    rows = encoder(cause="c", has_own_ids=True).encode(batch(*(row(c=each) for each in causes), c=struct))
    assert rows.blocks is not None
    first, second = (decode_headers(block)["traceparent"] for block in rows.blocks)
    assert (first[:36], first[52:]) == (parent[:36], "-01")
    assert first != parent
    assert second[:36] != parent[:36]


def test_a_digest_is_that_of_the_rows_and_not_of_their_order_or_the_time() -> None:
    rows = [row(cents=number) for number in range(10)]

    def digest(*batches: Any) -> int:
        made = encoder(with_digest=True)
        for each in batches:
            made.encode(batch(*each))
        return made.digest

    assert digest(rows) == digest(rows[5:], rows[:5])
    assert digest(rows) != digest(rows[1:])


# ---- invalid rows ----------------------------------------------------------------------------------------------------

INVALID: list[tuple[type[Any], dict[str, Any], dict[str, Any], str]] = [
    (Flagged, row(order_id=None), {}, "field 'order_id': null, and a value is required; expected string"),
    (Flagged, row(order_id=""), {}, "field 'order_id': Expected str of length >= 1"),
    (Flagged, row(cents=-1), {}, "field 'cents': Expected int >= 0"),
    (Flagged, row(why="odd"), {}, "field 'why': 'odd' is not Why: 'odd' is not a valid Why"),
    (Flagged, row(parts=[{"sku": "s", "count": 0}]), {}, "field 'parts[].count': Expected int >= 1"),
    (Flagged, row(parts=[{"sku": None, "count": 1}]), {}, "field 'parts[].sku': null, and a value is required"),
    (Flagged, row(order_id=LONG), {}, "its key has 1001 bytes: expected up to 1000"),
    (Flagged, row(note="x" * 10_000), {}, "are more than the 10000 bytes the server takes (max_payload)"),
    (Flagged, row(i=""), {"id": "i"}, "field 'i': the id is '': expected a text of one line"),
    (Flagged, row(i="a\nb"), {"id": "i"}, "field 'i': the id is 'a\\nb': expected a text of one line"),
    (Flagged, row(i=None), {"id": "i"}, "field 'i': the id is None: expected a text of one line"),
    (Flagged, row(i="i" * 70_000), {"id": "i", "max_bytes": 1 << 20}, "the server takes 65535"),
    (Settled, {"order_id": "\n", "day": NOW.date()}, {}, "field 'event_id()': the id is 'settled-\\n-2026-03-15'"),
    (Picky, {"number": 13}, {}, "RuntimeError: no thirteen"),
]
GOOD: dict[str, Any] = {
    "order_id": "a",
    "day": None,
    "cents": 1,
    "why": "late",
    "number": 1,
    "parts": [],
    "note": "",
    "i": "i",
}
TYPES = {"order_id": pa.string(), "i": pa.string()}


@pytest.mark.parametrize(("kind", "bad", "options", "message"), INVALID)
def test_rows_that_break_a_rule_keep_all_rows_of_a_task_back(
    kind: type[Any], bad: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    made = encoder(kind, **options)
    batches = [batch({name: GOOD[name] for name in bad}, **TYPES), batch(bad, {**bad}, **TYPES)]
    with pytest.raises(InvalidRows) as caught:
        made.encode_all(batches)  # and nothing needs to be iterated
    assert caught.value.args[:3] == ("partition 3", 3, 2)
    [reason] = caught.value.reasons
    assert reason.startswith(f"2 x {kind.event_type} ")
    assert message in reason
    assert "(first: row 1 of partition 3" in reason
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), InvalidRows)


@pytest.mark.parametrize(("kind", "bad", "options", "message"), INVALID)
def test_rows_that_break_a_rule_become_dead_letters_and_the_others_are_sent(
    kind: type[Any], bad: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    letters: list[StoredEvent] = []
    made = encoder(kind, letters, **options)
    batches = [
        batch({name: GOOD[name] for name in bad}, bad, **TYPES),
        batch({name: GOOD[name] for name in bad}, **TYPES),
    ]
    assert [len(rows) for rows in made.encode_all(batches)] == [1, 1]
    assert (made.rows, made.refused) == (2, 1)
    [letter] = letters
    assert letter.cause is not None
    assert message.replace("parts[]", "parts[0]" if "count" in message else "parts[]") in letter.cause.message
    assert (letter.handler, letter.status, letter.subject) == ("spark", "open", contract_of(kind).subject.filter)
    assert (letter.origin.stream, letter.origin.sequence) == ("spark:query:7:3", 1)
    assert json.loads(letter.data).keys() == bad.keys()
    again: list[StoredEvent] = []
    [*_] = encoder(kind, again, **options).encode_all(batches)
    assert [each.origin for each in again] == [letter.origin]


def test_an_error_names_the_reasons_that_most_rows_have_and_counts_the_others() -> None:
    rows = [row(order_id="k", note="", cents=-1) for _ in range(6)]
    rows += [row(why=f"odd-{number}", cents=1) for number in range(8)]
    with pytest.raises(InvalidRows) as caught:
        encoder().encode_all([batch(*rows)])
    assert len(caught.value.reasons) == 6
    assert caught.value.reasons[-1].endswith("for other reasons")
    assert sum(int(reason.split()[0]) for reason in caught.value.reasons) == caught.value.invalid == 14


def test_a_subject_that_the_stream_does_not_store_is_no_fault_of_a_row() -> None:
    letters: list[StoredEvent] = []
    made = encoder(Flagged, letters, stores="other.")
    with pytest.raises(ConfigError, match=r"stream 'DERIVED' does not store subject 'derived\.a\.flagged'"):
        [*_] = made.encode_all([batch(row())])
    assert letters == []


# ---- rows that wait --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [1, 2000, 1 << 20])
def test_a_spool_returns_rows_in_order_from_memory_and_file(max_bytes: int) -> None:
    spool = RowSpool(max_bytes)
    made = [Rows(number, ["s"], [b"%d" % number * 10], [b"i"], [b"b"]) for number in range(20)]
    for each in made:
        spool.add(each)
    assert len(spool._held) == {1: 0, 2000: 6, 1 << 20: 20}[max_bytes]
    assert [*spool.read()] == made
    assert [*RowSpool(1).read()] == []
