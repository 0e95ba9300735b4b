"""Messages that are no event of a type, one for each way in which they can fail to be."""

from __future__ import annotations

import datetime
import json
from typing import Annotated, Any

import msgspec

from jetspark.app import Event, encode, upcast
from jetspark.errors import (
    BrokenRule,
    ContractViolation,
    MissingField,
    NotAnEnvelope,
    NotJson,
    UnknownEventType,
    UnknownEventVersion,
    UpcastFailed,
    WrongFieldType,
)

__all__ = ["BROKEN", "Paid", "message"]


class Paid(Event, type="order.paid", version=2, key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    number: Annotated[int, msgspec.Meta(ge=0)] = 0


@upcast(Paid, from_version=1)
def _(old: dict[str, Any]) -> dict[str, Any]:
    return {"order_id": old["id"]}


def _envelope(data: object, **changes: Any) -> bytes:
    fields = {"specversion": "1.0", "id": "e-1", "source": "/", "type": "order.paid", "schemaversion": 2, "data": data}
    return json.dumps({name: value for name, value in (fields | changes).items() if value is not None}).encode()


BROKEN: dict[str, tuple[type[ContractViolation], bytes]] = {
    "not JSON": (NotJson, b"not json"),
    "JSON and no envelope": (NotAnEnvelope, b"[1, 2]"),
    "an envelope without an id": (NotAnEnvelope, _envelope({"order_id": "o-1"}, id=None)),
    "an unknown type": (UnknownEventType, _envelope({"order_id": "o-1"}, type="order.lost")),
    "an unknown version": (UnknownEventVersion, _envelope({"order_id": "o-1"}, schemaversion=3)),
    "a missing field": (MissingField, _envelope({"number": 1})),
    "a field of another type": (WrongFieldType, _envelope({"order_id": "o-1", "number": "one"})),
    "a value that is not allowed": (BrokenRule, _envelope({"order_id": "o-1", "number": -1})),
    "an upcast that fails": (UpcastFailed, _envelope({}, schemaversion=1)),
}
"""What is wrong with it -> the error that says so, and a body."""


def message(event: Event) -> tuple[str, bytes]:
    """Subject and body of an event that is one."""
    encoded = encode(event, id="e-1", source="/", time=datetime.datetime(2026, 3, 31, tzinfo=datetime.UTC))
    return encoded.subject, encoded.data
