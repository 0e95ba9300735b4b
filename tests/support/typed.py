"""An application whose events Spark reads as typed rows; workers import it by name: ``support.typed:app``."""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec

from jetspark.app import App, Event, encode, upcast
from jetspark.app.contracts.field_rules import Timestamp

app = App("typed", stream="TYPED", subjects=["typed.>"])

NOW = datetime.datetime(2026, 3, 15, 10, 15, 30, 123456, tzinfo=datetime.UTC)


class Line(msgspec.Struct, frozen=True):
    sku: str
    quantity: int = 1


class Card(msgspec.Struct, frozen=True, tag="card"):
    number: str


class Cash(msgspec.Struct, frozen=True, tag="cash"):
    """Without fields."""


class Placed(Event, type="order.placed", version=2, key="order_id", subject="typed.{order_id}.placed"):
    order_id: str
    at: Timestamp
    lines: list[Line]
    price: Decimal
    token: uuid.UUID
    payment: Card | Cash
    labels: dict[str, int]
    note: str | None = None
    visits: int = 0


@upcast(Placed, from_version=1)
def _(old: dict[str, Any]) -> dict[str, Any]:
    return {**old, "lines": [{"sku": sku} for sku in old["skus"]]}


class Paid(Event, type="order.paid", key="order_id", subject="typed.{order_id}.paid"):
    order_id: str
    cents: int


class Refunded(Event, type="order.refunded", key="order_id", subject="typed.{order_id}.paid"):
    """On the subject of another type."""

    order_id: str
    cents: int


class Old(Event, type="order.moved", version=1, subject="typed.moved"):
    """Of a version that no upcast leads away from."""

    place: str


class Moved(Event, type="order.moved", version=2, subject="typed.moved"):
    place: str


class Shaped(Event, type="order.shaped", subject="typed.shaped"):
    """Not a type of columns."""

    parts: dict[str, Shape]


class Shape(msgspec.Struct, frozen=True):
    inside: list[Shape]


app.register(Placed)
for kind in (Paid, Refunded, Old, Moved, Shaped):
    app.register(kind)


def placed(number: int) -> Placed:
    """Events that differ in every field."""
    return Placed(
        order_id=f"o-{number % 7}",
        at=NOW + datetime.timedelta(hours=number),
        lines=[Line(sku=f"s{each}", quantity=number) for each in range(number % 3)],
        price=Decimal(number) / 4,
        token=uuid.UUID(int=number + 1),
        payment=Cash() if number % 2 else Card(number=f"c{number}"),
        labels={f"l{each}": each for each in range(number % 4)},
        note=None if number % 3 else f"ä{number}",
        visits=number,
    )


def message(event: object, id: str, **changes: Any) -> tuple[str, bytes]:
    """Subject and data, with some attributes of the envelope changed; those that are None are left out."""
    encoded = encode(event, id=id, source="/typed", time=NOW, causation_id=f"cause-of-{id}")
    body = {name: each for name, each in (json.loads(encoded.data) | changes).items() if each is not None}
    return encoded.subject, json.dumps(body).encode()


def unreadable(order: str = "o-1") -> Iterator[tuple[str, str, bytes]]:
    """The error of a message on the subject of ``Paid``, the subject and the data."""
    subject, data = message(Paid(order_id=order, cents=1), "x")
    broken = {"order_id": order, "cents": "1"}
    yield "NotJson", subject, b"{"
    yield "NotJson", subject, b""
    yield "NotAnEnvelope", subject, b"[1]"
    yield "UnknownEventType", subject, data.replace(b"order.paid", b"order.lost")
    yield "UnknownEventVersion", *message(Paid(order_id=order, cents=1), "x", schemaversion=9)
    yield "MissingField", *message(Paid(order_id=order, cents=1), "x", data={"order_id": order})
    yield "WrongFieldType", *message(Paid(order_id=order, cents=1), "x", data=broken)
    yield "WrongFieldType", subject, data.replace(b'"cents": 1', b'"cents": 9223372036854775808')


V1 = json.dumps(
    {
        "order_id": "o-9",
        "at": "2025-03-15T10:15:30Z",
        "skus": ["a", "b"],
        "price": "9.5",
        "token": str(uuid.UUID(int=9)),
        "payment": {"type": "cash"},
        "labels": {},
    }
)
"""Data of the first version of ``Placed``."""
