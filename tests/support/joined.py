"""An application whose projection looks up another one, which Spark's workers import: ``support.joined:app``."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any
from zlib import crc32

from jetspark.app import App, Event, encode
from jetspark.app.clock import utc_now
from jetspark.blocking import JetStream
from jetspark.errors import StreamNotFound
from support import projected

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


def publish(url: str, js: JetStream, *, count: int) -> dict[str, int]:
    """Make a history of ratings and orders in an empty stream; returns what ``rated_orders`` has to come to."""
    for name in (app.stream, "KV_ratings", "KV_rated_orders"):
        with contextlib.suppress(StreamNotFound):
            js.delete_stream(name)
    asyncio.run(app.apply(url))
    rng = random.Random(5)
    ratings: dict[str, int] = {}
    expected: dict[str, int] = {}
    events: list[Any] = []
    for _ in range(count):
        customer = f"c{rng.randrange(5)}"
        if rng.random() < 0.3:
            events.append(Rated(customer=customer, rating=rng.randrange(10)))
            ratings[customer] = events[-1].rating
        else:
            events.append(Ordered(customer=customer, cents=rng.randrange(1000)))
            order = f"{events[-1].cents} {ratings.get(customer)}"
            expected[customer] = crc32(order.encode(), expected.get(customer, 0))
    encoded = [encode(each, id=f"j{n}", source="/joined", time=utc_now()) for n, each in enumerate(events)]
    projected.publish(js, ((each.subject, each.data, each.headers) for each in encoded))
    return expected


def orders(js: JetStream) -> dict[str, int]:
    """What the bucket of ``rated_orders`` has."""
    spec = app.projections["rated_orders"]
    found = projected.stored(js, "rated_orders")
    return {key: spec.decode_state(value) for key, (value, _, _) in found.items() if value}
