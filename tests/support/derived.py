"""An application whose events Spark writes; workers import it by name: ``support.derived:app``."""

from __future__ import annotations

import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated

import msgspec

from jetspark.app import App, Event
from jetspark.app.contracts.field_rules import Timestamp

app = App("derived", stream="DERIVED", subjects=["derived.>"], source="/derived")
handled: list[Event] = []


class Why(StrEnum):
    LATE = "late"
    LARGE = "large"


class Part(msgspec.Struct, frozen=True):
    sku: str
    count: Annotated[int, msgspec.Meta(ge=1)] = 1


class Flagged(Event, type="order.flagged", version=2, key="order_id", subject="derived.{order_id}.flagged"):
    order_id: Annotated[str, msgspec.Meta(min_length=1)]
    cents: Annotated[int, msgspec.Meta(ge=0)]
    why: Why = Why.LATE
    at: Timestamp | None = None
    price: Decimal | None = None
    parts: tuple[Part, ...] = ()
    note: str | None = None


class Settled(Event, type="order.settled", key="order_id", subject="derived.{order_id}.settled"):
    """With an id of its own, but for orders without a day."""

    order_id: str
    day: datetime.date | None = None

    def event_id(self) -> str | None:
        return None if self.day is None else f"settled-{self.order_id}-{self.day}"


class Old(Event, type="order.moved", version=1, subject="derived.moved"):
    place: str


class Moved(Event, type="order.moved", version=2, subject="derived.moved"):
    place: str


class Picky(Event, type="picky", subject="derived.picky"):
    """With code that raises."""

    number: int

    def __post_init__(self) -> None:
        if self.number == 13:
            raise RuntimeError("no thirteen")


app.register(Settled)
app.register(Old)
app.register(Moved)
app.register(Picky)


@app.handler(Flagged, durable="flags")
async def flag(event: Flagged) -> None:
    handled.append(event)


silent = App("silent", stream="DERIVED", subjects=[])
"""It publishes to the stream of the other, and has no handlers and so no dead letters."""
silent.register(Flagged)
