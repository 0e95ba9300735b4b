"""Events of customers and carriers, always the same for the same seed, and their expected sums.

``python -m orders.traffic 10000`` publishes some.
"""

import asyncio
import datetime
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from jetspark.app import Event
from orders.app import app
from orders.events import OrderCancelled, OrderPaid, OrderPlaced, ParcelScanned

FIRST_DAY = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)
DAYS = 30
COUNTRIES = ["AT", "CH", "DE", "FR", "IT"]
PLACES = ["Basel", "Berlin", "Graz", "Hamburg", "Lyon", "Milan", "Munich", "Paris", "Rome", "Vienna"]
SCANS = 6
"""Number of scans of each parcel."""
EVERY_CANCELLED = 50
"""One order in this many is cancelled after it was paid, and a larger one than most."""

_HEAD = b'{"specversion":"1.0","id":"x","source":"/demo/orders","type":"order.paid","schemaversion":2,"data":'
UNREADABLE = [
    b'{"type": "order.paid", "order',
    _HEAD + b'{"order_id":"o-1","country":"DE","at":"2026-03-02T00:00:00Z"}}',
    _HEAD + b'{"order_id":"o-1","country":"DE","amount_cents":-5,"at":"2026-03-02T00:00:00Z"}}',
]
"""Payments as they come in real life: half a message, one without an amount, one with an amount below nothing."""


@dataclass
class Tally:
    """The expected sums of the events, counted where they are produced."""

    orders: int = 0
    paid: int = 0
    paid_cents: int = 0
    scans: int = 0
    cancelled: list[OrderCancelled] = field(default_factory=list)


def history(count: int, tally: Tally, *, seed: int = 2026, prefix: str = "o") -> Iterator[Event]:
    """``count`` events of thirty days: orders are placed, paid and carried around, many at a time."""
    rng = random.Random(seed)
    going: list[list[Event]] = []
    begun = 0
    for number in range(count):
        at = FIRST_DAY + datetime.timedelta(seconds=DAYS * 86_400 * number // count)
        if len(going) < 100:
            begun += 1
            going.append(_order(rng, f"{prefix}-{begun}", at, begun % EVERY_CANCELLED == 0))
        index = rng.randrange(len(going))
        event = going[index].pop(0)
        if not going[index]:
            going[index] = going[-1]
            going.pop()
        _count(tally, event)
        yield event


def old_payments(count: int, tally: Tally) -> Iterator[tuple[str, bytes]]:
    """Payments of version 1, as the program of that time published them: subject and body."""
    for number in range(count):
        cents = 1000 + number % 4000
        envelope = {
            "specversion": "1.0",
            "id": f"old-{number}",
            "source": "/demo/orders",
            "type": "order.paid",
            "schemaversion": 1,
            "data": {"order_id": f"old-{number}", "amount": f"{cents / 100:.2f}", "at": "2026-02-28T12:00:00Z"},
        }
        tally.paid += 1
        tally.paid_cents += cents
        yield f"demo.orders.paid.old-{number}", msgspec.json.encode(envelope)


def _order(rng: random.Random, order_id: str, at: datetime.datetime, is_cancelled: bool) -> list[Event]:
    """Everything that happens to one order, in its order."""
    cents = rng.randrange(30_000, 60_000) if is_cancelled else rng.randrange(100, 50_000)
    country = COUNTRIES[rng.randrange(len(COUNTRIES))]
    events: list[Event] = [
        OrderPlaced(order_id=order_id, customer=f"c-{rng.randrange(5000)}", amount_cents=cents, at=at),
        OrderPaid(order_id=order_id, country=country, amount_cents=cents, at=at),
    ]
    if is_cancelled:
        return [*events, OrderCancelled(order_id=order_id, country=country, amount_cents=cents, at=at)]
    places = [PLACES[rng.randrange(len(PLACES))] for _ in range(SCANS)]
    return events + [ParcelScanned(order_id=order_id, place=place, at=at) for place in places]


def _count(tally: Tally, event: Event) -> None:
    if isinstance(event, OrderPlaced):
        tally.orders += 1
    elif isinstance(event, OrderPaid):
        tally.paid += 1
        tally.paid_cents += event.amount_cents
    elif isinstance(event, ParcelScanned):
        tally.scans += 1
    elif isinstance(event, OrderCancelled):
        tally.cancelled.append(event)


async def publish(count: int) -> None:
    servers = os.environ.get("JETSPARK_SERVERS", "nats://127.0.0.1:4222")
    async with app.connect(servers) as orders, orders.bulk() as bulk:
        await bulk.publish_many(history(count, Tally()))


if __name__ == "__main__":
    asyncio.run(publish(int(sys.argv[1])))
