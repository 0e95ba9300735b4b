"""Writing and reading events: the bytes, the other forms that are read, and every way in which a message is none."""

import copy
import datetime
import json
import pickle
import sys
import uuid
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from jetspark import errors
from jetspark.app import Catalogue, Decoded, Event, Timestamp, decode, derived_id, encode, event, upcast
from jetspark.app.contracts.envelope import read_data, read_envelope, read_event, read_key, whole_reader
from jetspark.core import headers as header_block

NOW = datetime.datetime(2026, 3, 31, 10, 15, 30, tzinfo=datetime.UTC)


class Item(msgspec.Struct, frozen=True):
    sku: str
    qty: int = 1


class OrderPaid(Event, type="order.paid", version=3, key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    amount_cents: Annotated[int, msgspec.Meta(ge=0)]
    items: list[Item] = []
    at: Timestamp | None = None


@upcast(OrderPaid, from_version=1)
def _first(old: dict[str, Any]) -> dict[str, Any]:
    return {"order_id": old["id"], "total_cents": old["total_cents"]}


@upcast(OrderPaid, from_version=2)
def _second(old: dict[str, Any]) -> dict[str, Any]:
    return {"order_id": old["order_id"], "amount_cents": old["total_cents"]}


class Tick(Event, type="clock.tick"):
    pass


@event(type="order.shipped", key="order_id")
class OrderShipped(BaseModel, frozen=True):
    order_id: str
    parcels: int = Field(default=1, ge=1)


class OrderQuoted(Event, type="order.quoted"):
    quote: "Quote"


class Quote(msgspec.Struct):
    price: float


CATALOGUE = Catalogue(OrderPaid, Tick, OrderShipped)
PAID = OrderPaid(order_id="o-1", amount_cents=500)


def read(body: object, headers: Any = None, catalogue: Catalogue = CATALOGUE) -> Decoded:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return decode("orders.o-1.paid", data, headers, catalogue)


def test_the_bytes_of_an_event() -> None:
    subject, data, headers = encode(
        PAID,
        id="evt-1",
        source="/shop/orders",
        time=NOW,
        correlation_id="req-1",
        causation_id="cmd-1",
        traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    )
    assert subject == "orders.o-1.paid"
    assert data == (
        b'{"specversion":"1.0","id":"evt-1","source":"/shop/orders","type":"order.paid","time":"2026-03-31T10:15:30Z",'
        b'"subject":"o-1","datacontenttype":"application/json","schemaversion":3,"correlationid":"req-1",'
        b'"causationid":"cmd-1","data":{"order_id":"o-1","amount_cents":500,"items":[],"at":null}}'
    )
    assert headers == {
        "Nats-Msg-Id": "evt-1",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    }


def test_an_event_that_nothing_led_to_is_its_own_correlation_and_has_no_cause() -> None:
    subject, data, headers = encode(Tick(), id="evt-1", source="/clock", time=NOW)
    assert (subject, headers) == ("clock.tick", {"Nats-Msg-Id": "evt-1"})
    assert json.loads(data) == {
        "specversion": "1.0",
        "id": "evt-1",
        "source": "/clock",
        "type": "clock.tick",
        "time": "2026-03-31T10:15:30Z",
        "datacontenttype": "application/json",
        "schemaversion": 1,
        "correlationid": "evt-1",
        "data": {},
    }


@pytest.mark.parametrize("which", ["raw", "mapping", "none"])
def test_an_event_is_read_with_all_that_its_envelope_says(which: str) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    subject, data, headers = encode(
        PAID, id="evt-1", source="/shop", time=NOW, correlation_id="req-1", causation_id="cmd-1", traceparent=trace
    )
    given_headers = {"raw": header_block.encode(headers), "mapping": headers, "none": None}[which]
    read = decode(subject, data, given_headers, CATALOGUE)
    assert read.event == PAID
    assert read.contract.kind is OrderPaid
    assert (read.id, read.type, read.version, read.source, read.time) == ("evt-1", "order.paid", 3, "/shop", NOW)
    assert (read.key, read.subject) == ("o-1", subject)
    assert (read.correlation_id, read.causation_id) == ("req-1", "cmd-1")
    assert read.traceparent == (None if which == "none" else trace)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"id": ""}, "id='', source='/shop': an envelope needs both"),
        ({"source": ""}, "an envelope needs both"),
        ({"time": datetime.datetime(2026, 3, 31)}, "expected a time with a zone"),
    ],
)
def test_an_envelope_without_its_attributes_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(errors.ConfigError, match=reason):
        encode(PAID, **{"id": "evt-1", "source": "/shop", "time": NOW, **arguments})


def test_an_event_that_breaks_its_contract_is_refused() -> None:
    with pytest.raises(errors.InvalidEvent, match="field 'amount_cents': Expected int >= 0; it was not published"):
        encode(OrderPaid(order_id="o-1", amount_cents=-1), id="evt-1", source="/shop", time=NOW)
    with pytest.raises(errors.ConfigError, match="int is not an event type"):
        encode(3, id="evt-1", source="/shop", time=NOW)


# ---- versions --------------------------------------------------------------------------------------------------------

ENVELOPE = {"specversion": "1.0", "id": "evt-1", "source": "/shop", "type": "order.paid", "schemaversion": 3}
DATA = {"order_id": "o-1", "amount_cents": 500}


@pytest.mark.parametrize(
    ("version", "data"),
    [
        (1, {"id": "o-1", "total_cents": 500}),
        (None, {"id": "o-1", "total_cents": 500}),
        (2, {"order_id": "o-1", "total_cents": 500}),
        (3, {"order_id": "o-1", "amount_cents": 500}),
    ],
)
def test_every_version_is_read_as_the_newest_class(version: int | None, data: dict[str, Any]) -> None:
    envelope = {**ENVELOPE, "schemaversion": version, "data": data}
    decoded = read(envelope)
    assert decoded.event == PAID
    assert decoded.version == (version or 1)
    assert decoded.key == "o-1"


def test_the_key_is_that_of_the_class_and_else_that_of_the_envelope() -> None:
    assert read({**ENVELOPE, "subject": "somebody else", "data": DATA}).key == "o-1"
    tick = {**ENVELOPE, "type": "clock.tick", "schemaversion": 1, "data": {}}
    assert read({**tick, "subject": "wall"}).key == "wall"
    assert read(tick).key is None


def test_an_envelope_may_say_more_than_we_know_and_less_than_we_write() -> None:
    decoded = read({"data": DATA, "dataschema": "x", "extension": [1], **ENVELOPE})
    assert decoded.event == PAID
    assert (decoded.time, decoded.causation_id, decoded.correlation_id) == (None, None, "evt-1")


# ---- other forms -----------------------------------------------------------------------------------------------------

BINARY = {
    "ce-specversion": "1.0",
    "ce-id": "evt-1",
    "ce-source": "/shop",
    "ce-type": "order.paid",
    "ce-schemaversion": "3",
    "ce-time": "2026-03-31T10:15:30Z",
    "ce-subject": "caf%C3%A9",
    "ce-correlationid": "req-1",
    "ce-causationid": "cmd-1",
    "ce-traceparent": "00-a-b-01",
    "content-type": "application/json",
}


def test_the_binary_mode_of_cloudevents_is_read() -> None:
    decoded = read(DATA, header_block.encode(BINARY))
    assert decoded.event == PAID
    assert decoded.envelope.subject == "café"
    assert (decoded.id, decoded.version, decoded.source, decoded.time) == ("evt-1", 3, "/shop", NOW)
    assert (decoded.correlation_id, decoded.causation_id) == ("req-1", "cmd-1")
    assert decoded.traceparent == "00-a-b-01"


def test_the_names_of_headers_are_read_in_any_case() -> None:
    assert read(DATA, {name.title(): value for name, value in BINARY.items()}).event == PAID


def test_data_in_base64_is_read() -> None:
    assert read({**ENVELOPE, "data_base64": "eyJvcmRlcl9pZCI6Im8tMSIsImFtb3VudF9jZW50cyI6NTAwfQ=="}).event == PAID


@pytest.mark.parametrize(
    "body",
    [
        # Each is how one chapter of the book writes an event.
        {
            "type": "order.paid",
            "id": "evt-1",
            "correlationId": "req-1",
            "timestamp": "2026-03-31T10:15:30Z",
            "payload": 0,
        },
        {
            "eventType": "order.paid",
            "schemaVersion": 3,
            "producerId": "/shop",
            "correlationId": "req-1",
            "eventTime": "2026-03-31T10:15:30Z",
            "id": "evt-1",
            "payload": 0,
        },
        {
            "eventId": "evt-1",
            "type": "order.paid",
            "subject": "orders.o-1.paid",
            "occurredAt": "2026-03-31T10:15:30Z",
            "data": 0,
        },
        {"schemaVersion": 3, "eventId": "evt-1", "correlationId": "req-1", "type": "order.paid", "payload": 0},
        {"event_id": "evt-1", "occurred_at": "2026-03-31T10:15:30Z", "schema_version": 3, "type": "order.paid"},
        {"eventId": "evt-1", "type": "order.paid", "producerTime": "2026-03-31T10:15:30Z", "schemaVersion": 3},
    ],
)
def test_the_spellings_of_the_book_are_read(body: dict[str, Any]) -> None:
    for name in ("payload", "data"):
        if name in body:
            body = {**body, name: DATA}
    if "payload" not in body and "data" not in body:
        body = {**body, **DATA}
    if not any(name in body for name in ("schemaVersion", "schema_version")):
        body["schemaVersion"] = 3
    decoded = read(body)
    assert decoded.event == PAID
    assert decoded.id == "evt-1"
    assert decoded.envelope.subject is None  # the book's `subject` is the NATS subject
    assert decoded.time in (NOW, None)


class Stamped(Event, type="stamped"):
    id: str = ""
    timestamp: str = ""
    name: str


def test_the_data_of_a_flat_envelope_is_what_the_envelope_does_not_use_itself() -> None:
    body = {"id": "evt-1", "type": "stamped", "timestamp": "2026-03-31T10:15:30Z", "name": "x"}
    assert read(body, None, Catalogue(Stamped)).event == Stamped(name="x")


def test_a_cloudevent_with_data_in_base64_keeps_its_key() -> None:
    tick = {**ENVELOPE, "type": "clock.tick", "schemaversion": 1, "data_base64": "e30="}
    assert read({**tick, "subject": "wall"}).key == "wall"
    assert read(tick).key is None


def test_headers_stand_in_for_what_such_an_envelope_does_not_say() -> None:
    body = {"type": "order.paid", "schemaVersion": 3, "payload": DATA}
    decoded = read(body, {"Nats-Msg-Id": "evt-1", "correlation_id": "req-1"})
    assert (decoded.id, decoded.correlation_id) == ("evt-1", "req-1")


# ---- what is no event ------------------------------------------------------------------------------------------------


def _violation(body: object, headers: Any = None, catalogue: Catalogue = CATALOGUE) -> errors.ContractViolation:
    with pytest.raises(errors.ContractViolation) as caught:
        read(body, headers, catalogue)
    error = caught.value
    assert error.subject == "orders.o-1.paid"
    assert not error.may_pass
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), again.args, str(again)) == (type(error), error.args, str(error))
    return error


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"hello", b'{"a":', b'{"specversion":"1.0"', b"{} {}"])
def test_a_body_that_is_no_json(body: bytes) -> None:
    error = _violation(body)
    assert type(error) is errors.NotJson
    assert "it begins with b'" in str(error)


@pytest.mark.parametrize("body", [b"hello", b'{"order_id":"o-1","amount_cents":500,"more":"\xff"}'])
@pytest.mark.parametrize("kind", ["order.paid", "order.lost"])
def test_binary_data_that_is_no_json(body: bytes, kind: str) -> None:
    assert type(_violation(body, {**BINARY, "ce-type": kind})) is errors.NotJson


def test_a_version_in_binary_mode_is_a_number() -> None:
    error = _violation(DATA, {**BINARY, "ce-schemaversion": "new"})
    assert (type(error), error.field) == (errors.NotAnEnvelope, "schemaversion")
    without = {name: value for name, value in BINARY.items() if name != "ce-schemaversion"}
    assert read({"id": "o-1", "total_cents": 500}, without).version == 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"specversion":"1.0","id":"\xff","source":"/shop","type":"order.paid","data":{}}',
        b'{"id":"evt-1","type":"\xff","payload":{}}',
    ],
)
def test_half_a_character_is_no_json(body: bytes) -> None:
    assert type(_violation(body)) is errors.NotJson


def test_more_brackets_than_python_has_frames_are_no_json() -> None:
    depth = 10 * sys.getrecursionlimit()  # which other tests of this process may have raised
    body = b'{"id":"evt-1","type":"order.paid","payload":' + b"[" * depth + b"]" * depth + b"}"
    assert type(_violation(body)) is errors.NotJson


def test_data_that_is_no_json_inside_of_an_envelope() -> None:
    body = json.dumps({**ENVELOPE, "data": "x"}).encode().replace(b'"x"', b'{"order_id":"\xff","amount_cents":5}')
    assert type(_violation(body)) is errors.NotJson


@pytest.mark.parametrize(
    ("body", "field", "rule"),
    [
        (b"[]", "", "expected a JSON object"),
        (b"3", "", "expected a JSON object"),
        (b"null", "", "expected a JSON object"),
        ({}, "id", "required, and not there"),
        ({"id": "evt-1"}, "type", "required, and not there"),
        ({"type": "order.paid"}, "id", "required, and not there"),
        ({**ENVELOPE, "id": ""}, "data", "required, and not there"),
        ({**ENVELOPE, "id": "", "data": DATA}, "id", "Expected str of length >= 1"),
        ({**ENVELOPE, "id": 7, "data": DATA}, "id", "Expected str, got int"),
        ({**ENVELOPE, "specversion": "0.3", "data": DATA}, "specversion", "Invalid enum value '0.3'"),
        ({**ENVELOPE, "time": "yesterday", "data": DATA}, "time", "Invalid RFC3339"),
        ({**ENVELOPE, "time": "2026-03-31T10:15:30", "data": DATA}, "time", "timezone"),
        ({**ENVELOPE, "schemaversion": "new", "data": DATA}, "schemaversion", "got str"),
        ({**ENVELOPE, "data_base64": "%"}, "data_base64", "expected Base64"),
        ({**ENVELOPE, "data_base64": 3}, "data_base64", "expected Base64"),
        (ENVELOPE, "data", "required, and not there"),
    ],
)
def test_a_body_that_is_no_envelope(body: object, field: str, rule: str) -> None:
    error = _violation(body)
    assert type(error) is errors.NotAnEnvelope
    assert error.field == field
    assert rule in error.rule
    assert error.kind == "structural"


@pytest.mark.parametrize(("kind", "told"), [("order.paid", "order.paid"), (7, "")])
def test_what_is_no_envelope_is_told_with_the_type_it_names(kind: object, told: str) -> None:
    error = _violation({**ENVELOPE, "id": 7, "type": kind, "data": DATA})
    assert (type(error), error.event_type) == (errors.NotAnEnvelope, told)


def test_a_type_that_nobody_declared() -> None:
    error = _violation({**ENVELOPE, "type": "order.lost", "data": DATA})
    assert type(error) is errors.UnknownEventType
    assert (error.event_type, error.version) == ("order.lost", 3)
    assert "known are clock.tick, order.paid, order.shipped" in str(error)
    assert "known are none" in str(_violation({**ENVELOPE, "data": DATA}, None, Catalogue()))


@pytest.mark.parametrize("version", [4, 0, -1])
def test_a_version_that_nobody_declared(version: int) -> None:
    error = _violation({**ENVELOPE, "schemaversion": version, "data": DATA})
    if version == 0:  # as good as none
        assert type(error) is errors.UpcastFailed
        return
    assert type(error) is errors.UnknownEventVersion
    assert (error.event_type, error.version) == ("order.paid", version)
    assert "known are 1, 2, 3" in str(error)


@pytest.mark.parametrize(
    ("kind", "data", "field", "rule"),
    [
        (errors.MissingField, {"order_id": "o-1"}, "amount_cents", "required, and not there"),
        (errors.MissingField, {**DATA, "items": [{"sku": "a"}, {}]}, "items[1].sku", "required, and not there"),
        (errors.WrongFieldType, {**DATA, "amount_cents": "5"}, "amount_cents", "Expected int, got str"),
        (errors.WrongFieldType, {**DATA, "order_id": None}, "order_id", "Expected str, got null"),
        (errors.WrongFieldType, {**DATA, "items": [{"sku": 1}]}, "items[0].sku", "Expected str, got int"),
        (errors.WrongFieldType, [], "", "Expected object, got array"),
        (errors.BrokenRule, {**DATA, "amount_cents": -1}, "amount_cents", "Expected int >= 0"),
    ],
)
def test_data_that_breaks_its_contract(kind: type[Exception], data: object, field: str, rule: str) -> None:
    error = _violation({**ENVELOPE, "data": data})
    assert type(error) is kind
    assert (error.event_type, error.version, error.field) == ("order.paid", 3, field)
    assert rule in error.rule
    assert error.kind == ("semantic" if kind is errors.BrokenRule else "structural")


@pytest.mark.parametrize(
    ("kind", "data", "field"),
    [
        (errors.MissingField, {}, "order_id"),
        (errors.WrongFieldType, {"order_id": []}, "order_id"),
        (errors.WrongFieldType, {"order_id": "o-1", "parcels": "many"}, "parcels"),
        (errors.BrokenRule, {"order_id": "o-1", "parcels": 0}, "parcels"),
    ],
)
def test_data_that_breaks_the_contract_of_a_pydantic_model(kind: type[Exception], data: object, field: str) -> None:
    error = _violation({**ENVELOPE, "type": "order.shipped", "schemaversion": 1, "data": data})
    assert type(error) is kind
    assert error.field == field


def test_an_upcast_that_raises() -> None:
    error = _violation({**ENVELOPE, "schemaversion": 1, "data": {"id": "o-1"}})
    assert type(error) is errors.UpcastFailed
    assert error.version == 1
    assert "_first from version 1: KeyError: 'total_cents'" in error.rule
    assert isinstance(error.__cause__, KeyError)


def test_an_upcast_that_returns_something_else_than_data() -> None:
    class Second(Event, type="second", version=2):
        name: str

    upcast(Second, from_version=1)(lambda old: None)  # type: ignore[type-var]
    body = {**ENVELOPE, "type": "second", "schemaversion": 1, "data": {}}
    error = _violation(body, None, Catalogue(Second))
    assert "it returned NoneType, and not the data as a dict" in error.rule


@pytest.mark.parametrize("keys_become_numbers", [False, True])
def test_an_upcast_may_leave_the_keys_of_numbers_as_json_has_them(keys_become_numbers: bool) -> None:
    class Counted(Event, type="stock.counted", version=2):
        by_shelf: dict[int, str]

    @upcast(Counted, from_version=1)
    def renamed(old: dict[str, Any]) -> dict[str, Any]:
        return {"by_shelf": {int(key) if keys_become_numbers else key: value for key, value in old["shelves"].items()}}

    catalogue = Catalogue(Counted)
    for version, data in ((1, {"shelves": {"7": "books"}}), (2, {"by_shelf": {"7": "books"}})):
        body = {**ENVELOPE, "type": "stock.counted", "schemaversion": version, "data": data}
        assert read(body, None, catalogue).event == Counted(by_shelf={7: "books"})


def test_an_upcast_whose_result_breaks_the_contract() -> None:
    error = _violation({**ENVELOPE, "schemaversion": 2, "data": {"order_id": "o-1", "total_cents": -5}})
    assert (type(error), error.field, error.version) == (errors.BrokenRule, "amount_cents", 2)


# ---- whatever comes --------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["order_id", "amount_cents", "items", "at", "extra"])


@given(st.binary(max_size=60))
def test_any_bytes_are_an_event_or_a_violation(data: bytes) -> None:
    try:
        decode("a", data, None, CATALOGUE)
    except errors.ContractViolation:
        pass


# The first example may take seconds on a busy machine, while Hypothesis reads the tables of Unicode.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*ENVELOPE, "data", "payload", "eventId"]), JSON), st.booleans())
def test_any_object_is_an_event_or_a_violation(body: dict[str, Any], is_half_right: bool) -> None:
    try:
        read({**ENVELOPE, **body} if is_half_right else body)
    except errors.ContractViolation:
        pass


@given(st.dictionaries(NAMES, JSON), st.dictionaries(st.text(max_size=5).map("x_{}".format), JSON))
def test_unknown_fields_change_nothing(data: dict[str, Any], unknown: dict[str, Any]) -> None:
    def outcome(fields: dict[str, Any]) -> object:
        try:
            return read({**ENVELOPE, "data": fields}).event
        except errors.ContractViolation as error:
            return type(error), error.field

    assert outcome({**data, **unknown}) == outcome(data)


def check_whole(data: bytes, catalogue: Catalogue = CATALOGUE) -> bool:
    """Whether a message can be read at once; if so, it has to be the event that is read step by step."""
    try:
        whole = whole_reader(catalogue)(data)
    except Exception:
        return False
    envelope, _, step_by_step = read_event("a", data, None, catalogue)
    assert (whole.data, whole.time, type(whole.data)) == (step_by_step, envelope.time, type(step_by_step))
    return True


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.sampled_from([*ENVELOPE, "data", "payload", "eventId"]), JSON),
    st.dictionaries(NAMES, JSON),
    st.sets(st.sampled_from([*ENVELOPE])),
    st.sampled_from([CATALOGUE, Catalogue(OrderPaid), Catalogue(OrderShipped)]),
)
def test_whatever_is_read_at_once_is_what_is_read_step_by_step(
    body: dict[str, Any], fields: dict[str, Any], missing: set[str], catalogue: Catalogue
) -> None:
    envelope = {name: value for name, value in ENVELOPE.items() if name not in missing}
    for extra in ({}, {"data": fields}, {"data": {"order_id": "o", "amount_cents": 1, **fields}}):
        check_whole(json.dumps({**envelope, **body, **extra}).encode(), catalogue)


@pytest.mark.parametrize("catalogue", [CATALOGUE, Catalogue(OrderPaid)])
@pytest.mark.parametrize("type", [{}, {"type": ""}, {"type": None}, {"type": "order.unknown"}])
def test_nothing_without_a_type_is_read_at_once(type: dict[str, Any], catalogue: Catalogue) -> None:
    body = {**ENVELOPE, "data": DATA}
    assert check_whole(json.dumps(body).encode(), catalogue)
    del body["type"]
    assert not check_whole(json.dumps({**body, **type}).encode(), catalogue)


def test_the_newest_version_is_read_at_once_and_no_older_one() -> None:
    class First(Event, type="order.packed"):
        order_id: str

    class Second(Event, type="order.packed", version=2):
        order_id: str
        parcels: int

    @event(type="order.packed", version=3)
    class Third(BaseModel, frozen=True):
        order_id: str
        parcels: int

    body = {**ENVELOPE, "type": "order.packed", "data": {"order_id": "o-1", "parcels": 2}}
    messages = [json.dumps({**body, "schemaversion": version}).encode() for version in (1, 2, 3)]
    of_structs, with_a_model = Catalogue(Second, First), Catalogue(First, Third, Second)
    assert [check_whole(data, of_structs) for data in messages] == [False, True, False]
    assert [check_whole(data, with_a_model) for data in messages] == [False, False, False]


def test_a_class_that_refers_to_a_later_one_is_checked_before_anything_is_read_at_once() -> None:
    with pytest.raises(errors.ConfigError, match="price"):
        whole_reader(Catalogue(OrderQuoted))


TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT, st.integers(0, 2**63 - 1), TEXT.filter(bool), TEXT.filter(bool))
def test_what_is_written_is_read(order_id: str, amount_cents: int, id: str, source: str) -> None:
    paid = OrderPaid(order_id=order_id, amount_cents=amount_cents, items=[Item(sku=order_id)], at=NOW)
    subject, data, _ = encode(paid, id=id, source=source, time=NOW)
    decoded = decode(subject, data, None, CATALOGUE)
    assert (decoded.event, decoded.id, decoded.source, decoded.key) == (paid, id, source, order_id)
    assert decoded.contract.subject.values_of(subject) == {"order_id": order_id}


# ---- ids -------------------------------------------------------------------------------------------------------------


def test_a_derived_id_is_a_function_of_its_cause() -> None:
    assert derived_id("evt-1", "billing", 0) == "7c43a23b-0d09-8d5d-883d-e2a34928059f"
    triples = [(cause, name, index) for cause in ("a", "a1", "ab") for name in ("b", "1b", "") for index in (0, 1, 11)]
    found = [uuid.UUID(derived_id(*triple)) for triple in triples]
    assert len(set(found)) == len(triples)
    assert {(each.version, each.variant) for each in found} == {(8, uuid.RFC_4122)}
    # These must never change: who runs again publishes what it published before.
    assert derived_id("evt-2", "billing", 1) == "e7dd4775-6c7c-8cac-80de-30ca1dc9a94e"
    assert derived_id("a", "b", 0) == "20f544d3-3a17-8ccf-a53a-8ccba2bb1414"
    assert derived_id("x", "y", 7) == "ad21f6d0-050d-85c8-ba8d-b0cc1c59a3cc"


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_block", [False, True])
@pytest.mark.parametrize(
    ("following", "is_another"), [("2026-04-01T00:00:00Z", True), ("2026-04-02T00:00:00Z", True), ("purge", False)]
)
def test_a_timer_that_fires_again_is_another_event_each_time(following: str, is_another: bool, as_block: bool) -> None:
    body = {**ENVELOPE, "time": "2026-03-31T10:15:30Z", "data": DATA}
    headers: Any = {"Nats-Schedule-Next": following}
    decoded = read(body, header_block.encode(headers) if as_block else headers)
    if is_another:
        assert (decoded.id, decoded.time) == (derived_id("evt-1", following, 0), None)
    else:
        assert (decoded.id, decoded.time) == ("evt-1", NOW)
    assert decoded.event == PAID


def test_other_headers_leave_an_event_as_it_is() -> None:
    body = {**ENVELOPE, "data": DATA}
    for headers in ({"X": "y"}, header_block.encode({"X": "y"}), header_block.encode({"X": "Nats-Schedule-Next"})):
        assert read(body, headers).id == "evt-1"


@pytest.mark.parametrize(
    ("body", "headers", "key"),
    [
        ({**ENVELOPE, "subject": "o-1", "data": "broken"}, None, "o-1"),
        ({"specversion": 7, "subject": "o-1"}, None, "o-1"),
        (ENVELOPE, None, None),
        ({"subject": "o-1"}, None, None),  # no CloudEvent
        ({**ENVELOPE, "subject": 7}, None, None),
        ({**ENVELOPE, "subject": "o-1"}, {"ce-subject": "o%202"}, "o 2"),
        ({}, {"ce-subject": ""}, ""),
    ],
)
def test_a_key_is_read_whatever_is_wrong_with_the_rest(body: object, headers: Any, key: str | None) -> None:
    assert read_key(json.dumps(body).encode(), headers) == key
    assert read_key(b"{", None) is None


def test_an_envelope_is_read_alone() -> None:
    envelope = read_envelope(json.dumps({**ENVELOPE, "data": DATA}).encode())
    assert (envelope.id, envelope.type, envelope.schemaversion) == ("evt-1", "order.paid", 3)
    with pytest.raises(msgspec.DecodeError):
        read_envelope(b"{")


def test_data_is_read_again_as_it_was_before() -> None:
    for version, data in (
        (1, {"id": "o-1", "total_cents": 500}),
        (2, {"order_id": "o-1", "total_cents": 500}),
        (3, {"order_id": "o-1", "amount_cents": 500}),
    ):
        assert read_data(CATALOGUE.readings["order.paid", version], json.dumps(data).encode()) == PAID


@pytest.mark.parametrize(("version", "failing"), [(1, 2), (None, 2), (1, 1), (None, 1), (2, 2)])
def test_an_upcast_that_raises_is_named_with_its_version(version: int | None, failing: int) -> None:
    body = {**ENVELOPE, "type": "broken", "schemaversion": version, "data": {"fails_from": failing}}
    with pytest.raises(errors.UpcastFailed, match=f"from version {failing}: ValueError"):
        read(body, None, Catalogue(Broken))


def test_what_was_read_does_not_change() -> None:
    decoded = read({**ENVELOPE, "data": DATA})
    for part, name in ((decoded, "subject"), (decoded.envelope, "id")):
        with pytest.raises(AttributeError):
            setattr(part, name, "other")


class Broken(Event, type="broken", version=3, subject="broken"):
    fails_from: int


def _fail(old: dict[str, Any], version: int) -> dict[str, Any]:
    if old["fails_from"] == version:
        raise ValueError("no")
    return old


@upcast(Broken, from_version=1)
def _broken_first(old: dict[str, Any]) -> dict[str, Any]:
    return _fail(old, 1)


@upcast(Broken, from_version=2)
def _broken_second(old: dict[str, Any]) -> dict[str, Any]:
    return _fail(old, 2)


class Careful(Event, type="careful", subject="careful"):
    number: int

    def __post_init__(self) -> None:
        if self.number == 7:
            raise RuntimeError("not seven")


def test_what_an_event_class_raises_is_a_broken_rule() -> None:
    catalogue = Catalogue()
    catalogue.add(Careful)
    now = datetime.datetime(2026, 3, 15, tzinfo=datetime.UTC)
    made = encode(Careful(number=6), id="e1", source="/test", time=now)
    with pytest.raises(errors.BrokenRule, match="event 'careful' version 1: RuntimeError: not seven"):
        decode(made.subject, made.data.replace(b":6}", b":7}"), made.headers, catalogue)


def body_of(made: Any, **changes: Any) -> bytes:
    _, data, _ = encode(made, id="e1", source="/test", time=NOW)
    return json.dumps({**json.loads(data), **changes}).encode()


def test_the_newest_version_of_a_type_is_read_at_once_and_nothing_else() -> None:
    assert check_whole(body_of(PAID))
    assert check_whole(body_of(Tick()))
    assert check_whole(body_of(Tick(), schemaversion=None))  # which means 1
    assert check_whole(body_of(Tick(), time=None, subject=None, unknown=1))
    assert not check_whole(body_of(PAID, schemaversion=2, data={"order_id": "o", "total_cents": 1}))  # needs an upcast
    assert not check_whole(body_of(PAID, schemaversion=None))
    assert not check_whole(body_of(PAID, schemaversion=4))
    assert not check_whole(body_of(PAID, type="order.unpaid"))
    assert not check_whole(body_of(PAID, id=""))
    assert not check_whole(body_of(PAID, specversion="0.3"))
    assert not check_whole(body_of(PAID, time="2026-03-31T10:15:30"))  # without a zone
    assert not check_whole(body_of(PAID, data={"order_id": "o", "amount_cents": -1}))
    assert not check_whole(body_of(OrderShipped(order_id="o")))  # pydantic reads it
    assert not check_whole(body_of(Tick()), Catalogue())
    assert not check_whole(body_of(Tick()), Catalogue(OrderShipped))


def test_of_a_name_that_is_twice_the_last_counts_however_it_is_read() -> None:
    for once, twice, is_whole in (
        (b'"type":"order.paid"', b'"type":"clock.tick","type":"order.paid"', False),
        (b'"data":{', b'"data":{"order_id":"x","amount_cents":9},"data":{', True),
        (b'"data":{', b'"data":7,"data":{', False),
    ):
        data = encode(PAID, id="e1", source="/test", time=NOW).data.replace(once, twice)
        assert check_whole(data) is is_whole
        assert read(data).event == PAID


def test_two_classes_of_one_type_are_read_at_once_as_the_newest() -> None:
    class First(Event, type="twice", version=1, subject="twice"):
        number: int

    class Second(Event, type="twice", version=2, subject="twice"):
        number: int

    catalogue = Catalogue(First, Second)
    assert check_whole(body_of(Second(number=1)), catalogue)
    assert not check_whole(body_of(First(number=1)), catalogue)
    assert type(read_event("a", body_of(First(number=1)), None, catalogue)[2]) is First
