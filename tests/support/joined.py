"""An application whose projection looks up another one, which Spark's workers import: ``support.joined:app``."""

from __future__ import annotations

from typing import Any
from zlib import crc32

from jetspark.app import App, Event

app = App("joined", stream="JOINED", subjects=["joined.>"])


class Rated(Event, type="customer.rated", version=1, key="customer", subject="joined.{customer}.rated"):
    customer: str
    rating: int


class Ordered(Event, type="customer.ordered", version=1, key="customer", subject="joined.{customer}.ordered"):
    customer: str
    cents: int


@app.projection("ratings", events=[Rated], bucket="ratings")
class Ratings:
    def key(self, event: Rated) -> str:
        return event.customer

    def apply(self, state: int | None, event: Rated) -> int:
        return event.rating


@app.projection("rated_orders", events=[Ordered], bucket="rated_orders", lookups=["ratings"])
class RatedOrders:
    def key(self, event: Ordered) -> str:
        return event.customer

    def apply(self, state: int | None, event: Ordered, lookup: Any) -> int:
        """A checksum of all orders, each with the rating at its time."""
        return crc32(f"{event.cents} {lookup['ratings']}".encode(), state or 0)
