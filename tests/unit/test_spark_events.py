"""Rows of typed events: the values that live handlers get, and the envelope beside them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark")

import pyarrow as pa
from support import typed
from support.typed import Cash, Moved, Paid, Placed, Refunded, app, message, placed, unreadable

from jetspark.app import App, Event
from jetspark.app.columns import EventColumns
from jetspark.app.contracts.envelope import Decoded, decode
from jetspark.core import headers as header_block
from jetspark.core.headers import Headers
from jetspark.core.message import CoreMessage
from jetspark.errors import ConfigError, ContractViolation, UnreadableEvent
from jetspark.jetstream.info import StoredMessage
from jetspark.lake.rows import rows_of as archived
from jetspark.spark.options import describe
from jetspark.spark.stream.source_options import SourceOptions
from jetspark.spark.typed.event_options import EventOptions, typed_read
from jetspark.spark.typed.event_rows import EventRowMaker, arrow_schema
from jetspark.spark.typed.event_source import schema_of
from jetspark.state.scan import Range

STORED = datetime.datetime(2026, 3, 20, 10, 14, 30, 123456, tzinfo=datetime.UTC)
Sent = tuple[str, bytes, Mapping[str, str]]


def maker(types: str = "order.paid", names: Sequence[str] = (), **options: str) -> EventRowMaker:
    read = typed_read({"app": "support.typed:app", "type": types, **options})
    schema = arrow_schema(read.contracts, keeps=read.options.keeps)
    schema = pa.schema([schema.field(name) for name in names or schema.names])
    part = Range("TYPED", "", 1, 1000, read.options.subjects)
    return EventRowMaker(read.app, read.contracts, read.options, schema, part)


def delivered(sent: Sequence[Sent]) -> list[CoreMessage]:
    found = []
    for sequence, (subject, data, headers) in enumerate(sent, 1):
        reply = f"$JS.ACK.TYPED.c.1.{sequence}.{sequence}.1774001670123456789.4".encode()
        found.append(CoreMessage(subject, data, reply, header_block.encode(headers) if headers else None, None))
    return found


def stored(sent: Sequence[Sent]) -> list[StoredMessage]:
    return [
        StoredMessage(
            stream="TYPED",
            subject=subject,
            sequence=sequence,
            timestamp=STORED,
            data=data,
            headers=Headers(dict(headers)),
            raw_headers=header_block.encode(headers) if headers else None,
        )
        for sequence, (subject, data, headers) in enumerate(sent, 1)
    ]


def rows_of(rows: EventRowMaker, sent: Sequence[Sent]) -> list[dict[str, Any]]:
    """The rows; of delivered messages, of those read without a consumer and of archived ones, which are the same."""
    made = rows.of_messages("TYPED", delivered(sent))
    made.validate(full=True)
    assert rows.of_stored("TYPED", stored(sent)) == made
    assert rows.of_archived("TYPED", archived("TYPED", delivered(sent))) == made
    return list(made.to_pylist())


def plain(*sent: tuple[str, bytes]) -> list[Sent]:
    return [(*each, {}) for each in sent]


# ---- the values of live handlers -------------------------------------------------------------------------------------

BINARY = {
    "ce-specversion": "1.0",
    "ce-id": "b-1",
    "ce-source": "/elsewhere",
    "ce-type": "order.paid",
    "ce-time": "2026-03-15T10:15:30Z",
    "ce-subject": "o-%C3%A4",
    "ce-correlationid": "co",
}
FORMS: list[Sent] = [
    (*message(Paid(order_id="a", cents=1), "p-1"), {}),
    (*message(Paid(order_id="a.b ä", cents=2**63 - 1), "p-2", time=None, causationid=None), {}),
    (*message(Paid(order_id="a", cents=3), "p-3", schemaversion=None, correlationid="c"), {"Nats-Msg-Id": "p-3"}),
    (*message(Paid(order_id="a", cents=4), "p-4", subject="other"), {}),
    ("typed.x.paid", b'{"order_id": "x", "cents": 5}', BINARY),
    ("typed.x.paid", b'{"eventId": "f", "type": "order.paid", "order_id": "x", "cents": 6}', {}),
    (*message(Paid(order_id="a", cents=7), "p-7"), {"Nats-Schedule-Next": "2026-03-15T10:15:30Z"}),
    (*message(Paid(order_id="a", cents=8), "p-8"), {"Nats-Schedule-Next": "purge"}),
    (*message(Refunded(order_id="a", cents=9), "r-1"), {}),
    *[(*message(placed(number), f"o-{number}"), {}) for number in range(12)],
    (*message(placed(5), "v1", schemaversion=1, data=json.loads(typed.V1)), {}),
    *[(subject, data, {}) for _, subject, data in unreadable()],
    ("elsewhere", message(Paid(order_id="a", cents=1), "far")[1], {}),
    (*message(Moved(place="x"), "m"), {}),
    ("typed.x.paid", message(Moved(place="x"), "m")[1].replace(b'"place"', b'"palce"'), {}),
]


def told_of(found: Decoded) -> dict[str, Any]:
    return {
        "id": found.id,
        "key": found.key,
        "time": found.time,
        "type": found.type,
        "version": found.version,
        "source": found.source,
        "correlation": found.correlation_id,
        "causation": found.causation_id,
    }


@given(st.lists(st.sampled_from(FORMS), max_size=12), st.sampled_from(["order.paid", "order.placed", "all"]))
def test_rows_have_the_values_of_live_handlers(sent: list[Sent], which: str) -> None:
    types = "order.placed, order.paid,order.refunded" if which == "all" else which
    rows = maker(types, unreadable="drop")
    kinds = {each.kind for each in typed_read({"app": "support.typed:app", "type": types}).contracts}
    expected = []
    if not sent:
        return
    for sequence, (subject, data, headers) in enumerate(sent, 1):
        try:
            found = decode(subject, data, headers, app.catalogue)
        except ContractViolation:
            continue
        is_its_subject = found.contract.subject.values_of(subject) is not None
        if found.contract.kind in kinds and is_its_subject and getattr(found.event, "cents", 0) < 2**63:
            expected.append((sequence, found))
    made = rows_of(rows, sent)
    assert [row["_event"]["sequence"] for row in made] == [sequence for sequence, _ in expected]
    for row, (sequence, found) in zip(made, expected, strict=True):
        its = row["_event"]
        assert {name: its[name] for name in told_of(found)} == told_of(found)
        assert (its["stream"], its["subject"], its["stored"]) == ("TYPED", sent[sequence - 1][0], STORED)
        columns = EventColumns(found.contract)
        fields = row if which != "all" else row[found.type.replace(".", "_")]
        if which == "all":
            names = ("order_placed", "order_paid", "order_refunded")
            assert row["type"] == found.type
            assert [name for name in names if row[name] is not None] == [found.type.replace(".", "_")]
        cells = {name: fields[name] for name in columns.schema.names}
        batch = pa.RecordBatch.from_pylist([cells], schema=columns.schema)
        assert columns.from_arrow(batch) == ([found.event], {})


def test_the_columns_of_an_event_in_words_of_spark() -> None:
    assert schema_of({"app": "support.typed:app", "type": "order.placed"}).simpleString() == (
        "struct<order_id:string,at:timestamp,lines:array<struct<sku:string,quantity:bigint>>,price:decimal(38,18),"
        "token:string,payment:struct<card:struct<number:string>,cash:struct<_present:boolean>>,labels:map<string,bigint>,"
        "note:string,visits:bigint,_event:struct<id:string,key:string,time:timestamp,type:string,version:int,"
        "source:string,correlation:string,causation:string,subject:string,sequence:bigint,stored:timestamp,"
        "stream:string,headers:map<string,array<string>>>>"
    )
    kept = schema_of({"app": "support.typed:app", "type": "order.refunded,order.paid", "unreadable": "keep"})
    assert kept.names == ["type", "order_refunded", "order_paid", "_event", "_unreadable"]
    assert [field.nullable for field in kept] == [True, True, True, False, True]
    assert kept["_unreadable"].dataType.simpleString() == (
        "struct<error:string,reason:string,data:binary,headers:map<string,array<string>>>"
    )


def test_headers_come_with_the_option() -> None:
    sent = [(*message(Paid(order_id="a", cents=1), "p"), {"A": "1"}), (*message(Paid(order_id="a", cents=1), "q"), {})]
    found = [row["_event"]["headers"] for row in rows_of(maker(includeHeaders="true"), sent)]
    assert found == [[("A", ["1"])], []]
    assert [row["_event"]["headers"] for row in rows_of(maker(), sent)] == [None, None]


def test_a_header_that_is_not_utf8_is_shown_with_replacement_characters() -> None:
    _, [sent] = None, delivered([("typed.x.paid", b'{"order_id": "x", "cents": 5}', BINARY)])
    assert sent.raw_headers is not None
    odd = CoreMessage(sent.subject, sent.data, sent.raw_reply, sent.raw_headers.replace(b"b-1", b"b\xff"), None)
    assert maker().of_messages("TYPED", [odd]).to_pylist()[0]["_event"]["id"] == "b\ufffd"


def test_fewer_columns_are_honoured() -> None:
    sent = plain(message(Paid(order_id="a", cents=1), "p"))
    assert rows_of(maker(names=["cents"]), sent) == [{"cents": 1}]
    read = typed_read({"app": "support.typed:app", "type": "order.paid"})
    its = pa.struct([pa.field("sequence", pa.int64()), pa.field("id", pa.string())])
    schema = pa.schema([pa.field("_event", its, False), pa.field("order_id", pa.string(), False)])
    rows = EventRowMaker(read.app, read.contracts, read.options, schema, Range("TYPED", "", 1, 9))
    assert rows_of(rows, sent) == [{"_event": {"sequence": 1, "id": "p"}, "order_id": "a"}]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (pa.field("money", pa.int64()), "column 'money' as int64: the columns are order_id, cents, _event"),
        (pa.field("cents", pa.string(), False), "column 'cents' as string: expected int64.*ship the same code to all"),
        (pa.field("_event", pa.struct([pa.field("at", pa.string())]), False), "column '_event' as struct"),
    ],
)
def test_other_columns_than_those_of_the_application_here_are_refused(field: pa.Field, message: str) -> None:
    read = typed_read({"app": "support.typed:app", "type": "order.paid"})
    with pytest.raises(ConfigError, match=message):
        EventRowMaker(read.app, read.contracts, read.options, pa.schema([field]), Range("TYPED", "", 1, 9))


# ---- messages that cannot be read ------------------------------------------------------------------------------------

GOOD = plain(message(Paid(order_id="a", cents=1), "p-1"), message(Paid(order_id="a", cents=2), "p-2"))


@pytest.mark.parametrize(("error", "subject", "data"), list(unreadable()))
def test_an_unreadable_message_fails_is_dropped_or_is_kept(error: str, subject: str, data: bytes) -> None:
    sent = [GOOD[0], (subject, data, {"A": "1"}), GOOD[1]]
    with pytest.raises(
        UnreadableEvent, match=rf"stream 'TYPED', sequence 2, subject '{subject}': {error}: .*keep"
    ) as failed:
        maker().of_messages("TYPED", delivered(sent))
    assert (failed.value.stream, failed.value.sequence, failed.value.subject) == ("TYPED", 2, subject)
    rows = maker(unreadable="drop")
    assert [row["cents"] for row in rows_of(rows, sent)] == [1, 2]
    rows = maker(unreadable="keep")
    first, kept, last = rows_of(rows, sent)
    assert (first["_unreadable"], last["_unreadable"]) == (None, None)
    assert (kept["order_id"], kept["cents"], kept["_event"]["id"]) == (None, None, None)
    assert (kept["_event"]["sequence"], kept["_event"]["subject"]) == (2, subject)
    its = kept["_unreadable"]
    assert (its["error"], its["data"], its["headers"]) == (error, data, [("A", ["1"])])
    assert f"message on '{subject}'" in its["reason"]


def test_unreadable_messages_are_logged_once_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    rows = maker("order.paid,order.refunded", unreadable="drop")
    for _ in range(2):
        rows.of_messages("TYPED", delivered([*GOOD, ("typed.x.paid", b"{", {})]))
    rows.warn()
    maker(unreadable="drop").warn()
    [record] = caplog.records
    assert record.getMessage().startswith(
        "stream TYPED, sequences 1 to 999: 2 messages cannot be read as order.paid, order.refunded; the first: message "
        "on 'typed.x.paid': "
    )


def test_a_broken_message_of_another_declared_type_is_not_a_row() -> None:
    _, data = message(Refunded(order_id="a", cents=1), "r", data={"order_id": "a"})
    assert [row["cents"] for row in rows_of(maker(), [*plain(("typed.a.paid", data)), *GOOD])] == [1, 2]
    with pytest.raises(UnreadableEvent, match=r"order\.refunded"):
        rows_of(maker("order.refunded"), plain(("typed.a.paid", data)))


def test_a_piece_without_rows_is_an_empty_batch() -> None:
    assert rows_of(maker(), plain(("typed.a.placed", b"{"), ("elsewhere", b"{"))) == []


# ---- options ---------------------------------------------------------------------------------------------------------


def test_stream_and_subjects_are_those_of_the_application() -> None:
    def read(**options: str) -> EventOptions:
        return typed_read({"app": "support.typed:app", "type": "order.paid,order.refunded", **options}).options

    found = read()  # of the application's own stream, which is read whole
    assert (found.stream, found.subjects, found.wanted_subjects) == (("TYPED",), (), ("typed.*.paid",))
    assert read(filtered="true").subjects == ("typed.*.paid",)
    assert read(stream="COPY").subjects == ("typed.*.paid",)
    found = read(Subjects="typed.o-1.paid", StreamPattern="COPY.*")
    assert (found.stream, found.subjects, found.wanted_subjects) == ((), ("typed.o-1.paid",), ("typed.o-1.paid",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "order.paid"}, "'app' is missing: expected 'package.module:name'"),
        ({"app": "support.typed:app"}, "'type' is missing: expected one or more of order.moved, order.paid"),
        ({"app": "support.typed:app", "type": "order.pad"}, "type='order.pad': app 'typed' has order.moved, order.pa"),
        ({"app": "support.nowhere:app", "type": "x"}, "app='support.nowhere:app': No module named"),
        ({"app": "support.typed:app", "type": "order.paid", "unreadable": "skip"}, "unreadable='skip': expected fail,"),
        ({"app": "support.typed:app", "type": "order.paid", "topic": "x"}, "unknown option 'topic'; did you mean"),
        ({"app": "support.typed:app", "type": "order.shaped"}, r"Shaped.parts\[\].inside\[\]: Shape contains itself"),
    ],
)
def test_what_cannot_be_read_is_refused_when_it_is_planned(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schema_of(options)


class Dotted(Event, type="a.b", subject="x"):
    pass


class Underlined(Event, type="a_b", subject="x"):
    pass


def test_types_of_several_versions_and_of_equal_names() -> None:
    read = typed_read({"app": "support.typed:app", "type": "order.moved"})
    assert arrow_schema(read.contracts, keeps=False).names == ["type", "order_moved_v1", "order_moved_v2", "_event"]
    own = App("own", stream="OWN", subjects=["x"], events=[Dotted, Underlined])
    with pytest.raises(ConfigError, match="type='a_b': another column is called 'a_b'"):
        arrow_schema(list(own.catalogue), keeps=False)
    assert arrow_schema([Dotted.__contract__], keeps=False).names == ["_event"]


def test_every_option_is_in_the_documentation_with_its_own_words() -> None:
    page = (Path(__file__).parents[2] / "docs" / "spark-events.md").read_text(encoding="utf-8")
    own = [each for each in describe(EventOptions) if each not in describe(SourceOptions)]
    own = [each for each in own if not each.doc.startswith("internal")]
    assert [each.name for each in own if f"| `{each.name}` | {each.doc} |" not in page] == []
    assert len(own) == 5


def test_the_documentation_shows_the_example_that_runs() -> None:
    root = Path(__file__).parents[2]
    example = (root / "examples" / "events_on_spark.py").read_text(encoding="utf-8")
    assert f"```py\n{example}```\n" in (root / "docs" / "spark-events.md").read_text(encoding="utf-8")


def test_a_union_reads_as_the_member_that_is_there() -> None:
    [row] = rows_of(maker("order.placed"), plain(message(placed(1), "p")))
    assert isinstance(placed(1).payment, Cash)
    assert row["payment"] == {"card": None, "cash": {"_present": True}}
    assert Placed.__contract__.version == row["_event"]["version"]
