"""What a message is to a handler: its event and its key, also where it cannot be read."""

from __future__ import annotations

import datetime
import enum
import json
import operator
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.broken import BROKEN, Paid, message

from jetspark.app import App, Event, Reject, encode
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.contracts.envelope import Decoded, RawHeaders, decode
from jetspark.app.handlers.reading import HandlerReading
from jetspark.errors import (
    BrokenRule,
    ContractViolation,
    InvalidEvent,
    MissingField,
    NotAnEnvelope,
    NotJson,
    UnknownEventType,
    UnknownEventVersion,
    UpcastFailed,
    WrongFieldType,
)

NOW = datetime.datetime(2026, 3, 31, tzinfo=datetime.UTC)


class Size(enum.Enum):
    SMALL = "s"


class Moved(Event, type="moved", key="{house}.{item}", subject="moved.{item}.{house}.{customer}"):
    house: str
    item: str
    customer: str = "c"


class Unplaced(Event, type="unplaced", key="item", subject="unplaced"):
    item: str
    customer: str = "c"


class Sized(Event, type="sized", key="size", subject="sized.{size}.{number}.{day}.{which}.{good}"):
    size: Size
    number: int
    day: datetime.date
    which: uuid.UUID
    good: bool


def reading(*events: type, keyed: bool = True, **options: Any) -> Callable[..., tuple[Any, str | None]]:
    app = App("app", stream="S", subjects=[">"])

    @app.handler(*events, durable="h", **options)
    async def handle(event: Any) -> None: ...

    return HandlerReading(app.handlers["h"], app.catalogue, keyed=keyed).read


READ_UNPLACED = reading(Unplaced)


def test_there_is_a_message_for_each_kind_of_violation() -> None:
    assert (
        {kind for kind, _ in BROKEN.values()}
        == set(ContractViolation.__subclasses__())
        == {
            NotJson,
            NotAnEnvelope,
            UnknownEventType,
            UnknownEventVersion,
            MissingField,
            WrongFieldType,
            BrokenRule,
            UpcastFailed,
        }
    )


@pytest.mark.parametrize("name", BROKEN)
def test_a_message_that_breaks_its_contract_has_the_key_of_its_subject(name: str) -> None:
    kind, data = BROKEN[name]
    error, key = reading(Paid)("orders.o-1.paid", data, None)
    assert (type(error), key) == (kind, "o-1")
    assert reading(Paid, key="order_id")("orders.o-1.paid", data, None)[1] == "o-1"
    # Neither the subject nor the envelope has it, or nobody can tell.
    assert reading(Paid, key="number")("orders.o-1.paid", data, None)[1] is None
    assert reading(Paid, key=lambda event: event.order_id)("orders.o-1.paid", data, None)[1] is None
    assert reading(Paid, keyed=False)("orders.o-1.paid", data, None)[1] is None
    assert reading(Paid)("orders.o-1.other", data, None)[1] is None


@pytest.mark.parametrize("name", [name for name, (_, data) in BROKEN.items() if data.startswith(b"{")])
def test_the_envelope_names_the_key_before_the_subject_does(name: str) -> None:
    _, data = BROKEN[name]
    named = json.dumps({**json.loads(data), "specversion": "1.0", "subject": "o-2"}).encode()
    assert reading(Paid)("orders.o-1.paid", named, None)[1] == "o-2"
    assert reading(Unplaced)("unplaced", named, None)[1] == "o-2"
    assert reading(Unplaced, key="item")("unplaced", named, None)[1] == "o-2"
    assert reading(Unplaced, key="customer")("unplaced", named, None)[1] is None  # it is the event's key, not this one
    binary = {"ce-specversion": "1.0", "ce-subject": "o%202", "ce-type": "?"}
    assert reading(Unplaced)("unplaced", b"{", binary)[1] == "o 2"


VALUES = st.none() | st.integers() | st.text(max_size=3) | st.just("2026-03-31T00:00:00Z")
ATTRIBUTES = "id", "type", "version", "source", "time", "correlation_id", "causation_id", "event", "contract", "key"


@given(
    st.dictionaries(st.sampled_from(["id", "source", "type", "time", "subject", "schemaversion", "data"]), VALUES),
    st.dictionaries(st.sampled_from(["correlationid", "causationid", "eventId", "payload"]), VALUES),
    st.sampled_from([None, b"NATS/1.0\r\nNats-Schedule-Next: 2026-04-01T00:00:00Z\r\n\r\n", {"ce-id": "e-2"}]),
)
def test_every_message_is_read_as_decode_reads_it(
    changed: dict[str, Any], added: dict[str, Any], headers: RawHeaders
) -> None:
    body = json.loads(encode(Unplaced(item="i"), id="e-1", source="/s", time=NOW).data)
    for fields in ({}, added, changed, changed | added):
        data = json.dumps(body | fields).encode()
        found, key = READ_UNPLACED("unplaced", data, headers)
        if isinstance(found, ContractViolation):
            with pytest.raises(type(found)):
                decode("unplaced", data, headers, Catalogue(Unplaced))
        else:
            expected = decode("unplaced", data, headers, Catalogue(Unplaced))
            assert [getattr(found, name) for name in ATTRIBUTES] == [getattr(expected, name) for name in ATTRIBUTES]
            assert key == expected.key


def test_a_key_of_several_fields_is_made_of_those_in_the_subject() -> None:
    read = reading(Moved)
    good = encode(Moved(house="h 1", item="i.1"), id="1", source="/", time=NOW)
    event, key = read(good.subject, good.data, None)
    assert isinstance(event, Decoded)
    assert read(good.subject, b"junk", None)[1] == key == "h=201.i=2E1"
    assert reading(Moved, key="customer")(good.subject, b"junk", None)[1] == "c"


def test_two_types_on_one_subject_must_agree_on_the_key() -> None:
    class Other(Event, type="other", key="item", subject="orders.{item}.paid"):
        item: str

    class Same(Event, type="same", key="order_id", subject="orders.{order_id}.{state}"):
        order_id: str
        state: str

    class Swapped(Event, type="swapped", key="state", subject="orders.{order_id}.{state}"):
        order_id: str
        state: str

    assert reading(Paid, Other)("orders.o-1.paid", b"junk", None)[1] == "o-1"
    assert reading(Paid, Same)("orders.o-1.paid", b"junk", None)[1] == "o-1"
    assert reading(Paid, Swapped)("orders.o-1.paid", b"junk", None)[1] is None


@pytest.mark.parametrize("field", ["size", "number", "day", "which", "good"])
def test_a_key_is_written_as_it_is_in_a_subject(field: str) -> None:
    event = Sized(size=Size.SMALL, number=7, day=NOW.date(), which=uuid.UUID(int=1), good=True)
    good, read = encode(event, id="1", source="/", time=NOW), reading(Sized, key=field)
    _, key = read(good.subject, good.data, None)
    assert key is not None
    assert read(good.subject, b"junk", None)[1] == key


def test_a_key_that_cannot_be_told_is_a_reason_not_to_handle_the_event() -> None:
    subject, data = message(Paid(order_id="o-1", number=1))
    error, key = reading(Paid, key=operator.attrgetter("nothing"))(subject, data, None)
    assert (type(error), key) == (Reject, None)
    event, key = reading(Paid, key=lambda event: 1.5)(subject, data, None)
    assert (type(event), key) == (Decoded, "1.5")


@pytest.mark.parametrize("key", ["é" * 500, "x" * 1000])
def test_a_key_of_1000_bytes_can_be_kept_in_order(key: str) -> None:
    good = encode(Unplaced(item=key), id="1", source="/", time=NOW)
    assert reading(Unplaced)(good.subject, good.data, None)[1] == key


@pytest.mark.parametrize(
    ("key", "fault"),
    [("x" * 1001, "1001 bytes: expected up to 1000"), ("é" * 501, "1002 bytes"), ("\ud800", "lone surrogate")],
    ids=["long", "long in UTF-8", "half a character"],
)
def test_an_event_whose_key_can_be_in_no_subject_is_not_handled(key: str, fault: str) -> None:
    if fault != "lone surrogate":
        with pytest.raises(InvalidEvent, match=fault):
            encode(Unplaced(item=key), id="1", source="/", time=NOW)
    good = encode(Unplaced(item="i"), id="1", source="/", time=NOW)
    error, found = reading(Unplaced, key=lambda event: key)(good.subject, good.data, None)
    assert (type(error), found) == (Reject, None)
    assert fault in str(error)
    # Of a message that cannot be read there is more to say than that.
    error, found = reading(Unplaced)("unplaced", b"junk", {"ce-subject": key.replace("\ud800", "\udcff")})
    assert (type(error), found) == (NotJson, None)
