"""What happened to some orders: always the same for the same number of events.

Most are well-formed. Some are not, as in real life: a few cannot be read, and a few come twice.
"""

import datetime
import random
from collections.abc import Iterator
from typing import NamedTuple

from jetspark.app import encode
from orders.app import NAME, OrderCancelled, OrderCreated, OrderEvent, OrderPaid, OrderShipped, app

FIRST_DAY = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)
DAYS = 30
EVERY_MALFORMED = 4000
EVERY_DUPLICATE = 2500

_HEAD = b'{"specversion":"1.0","id":"x","source":"/demo/orders","type":"order.'
MALFORMED = [
    ("NotJson", b'{"type": "order.paid", "order'),
    ("MissingField", _HEAD + b'paid","data":{"amount_cents":5,"at":"2026-03-02T00:00:00Z"}}'),
    ("UnknownEventType", _HEAD + b'eaten","data":{"order_id":"o-1","amount_cents":5,"at":"2026-03-02T00:00:00Z"}}'),
    ("BrokenRule", _HEAD + b'paid","data":{"order_id":"o-1","amount_cents":-5,"at":"2026-03-02T00:00:00Z"}}'),
]


class Published(NamedTuple):
    """A message, and what it says."""

    subject: str
    data: bytes
    event: OrderEvent | None
    reason: str | None = None
    """Why it cannot be read."""


def history(count: int) -> Iterator[Published]:
    """So many messages, in the order of publishing."""
    rng = random.Random(2026)
    recent: list[Published] = []
    good = _good(rng, count)
    for number in range(1, count + 1):
        if number % EVERY_MALFORMED == 0:
            reason, data = MALFORMED[number // EVERY_MALFORMED % len(MALFORMED)]
            yield Published(f"{NAME}.unknown.paid", data, None, reason)
        elif number % EVERY_DUPLICATE == 0 and recent:
            yield rng.choice(recent)  # the same event once more, as a retry without an id would publish it
        else:
            event = next(good)
            encoded = encode(event, id=f"{event.order_id}.{number}", source=app.source, time=event.at)
            published = Published(encoded.subject, encoded.data, event)
            recent = [*recent[-199:], published]
            yield published


def _good(rng: random.Random, count: int) -> Iterator[OrderEvent]:
    """Orders are created, then paid or cancelled, then shipped, while others are."""
    open_orders: list[tuple[str, int, bool]] = []
    number = 0
    while True:
        at = FIRST_DAY + datetime.timedelta(seconds=DAYS * 86_400 * min(number, count) // count)
        number += 1
        if len(open_orders) < 100 or rng.random() < 0.35:
            order, amount = f"o-{number}", rng.randrange(100, 50_000)
            open_orders.append((order, amount, False))
            yield OrderCreated(order_id=order, amount_cents=amount, at=at)
            continue
        order, amount, is_paid = open_orders.pop(rng.randrange(len(open_orders)))
        if is_paid:
            yield OrderShipped(order_id=order, amount_cents=amount, at=at)
        elif rng.random() < 0.1:
            yield OrderCancelled(order_id=order, amount_cents=amount, at=at)
        else:
            open_orders.append((order, amount, True))
            yield OrderPaid(order_id=order, amount_cents=amount, at=at)
