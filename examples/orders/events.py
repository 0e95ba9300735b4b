"""What happened to some orders: always the same for the same number of events.

Most are well-formed. Some are not, as in real life: a few cannot be read, and a few come twice.
"""

import datetime
import json
import random
from collections.abc import Iterator

FIRST_DAY = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)
DAYS = 30
EVERY_MALFORMED = 4000
EVERY_DUPLICATE = 2500

_REST = b'"at":"2026-03-02T00:00:00Z","event_id":"x"}'
MALFORMED = [
    ("not JSON", b'{"type": "order.paid", "order'),
    ("no order_id", b'{"type":"order.paid","amount_cents":5,' + _REST),
    ("unknown type", b'{"type":"order.eaten","order_id":"o-1","amount_cents":5,' + _REST),
    ("negative amount", b'{"type":"order.paid","order_id":"o-1","amount_cents":-5,' + _REST),
]


def events(count: int, prefix: str = "orders") -> Iterator[tuple[str, bytes]]:
    """Subject, below ``prefix``, and data of each event, in the order of publishing."""
    for kind, data in _in_real_life(count):
        yield f"{prefix}.{kind}", data


def _in_real_life(count: int) -> Iterator[tuple[str, bytes]]:
    rng = random.Random(2026)
    recent: list[tuple[str, bytes]] = []
    good = _good(rng, count)
    for number in range(1, count + 1):
        if number % EVERY_MALFORMED == 0:
            yield "unknown", MALFORMED[number // EVERY_MALFORMED % len(MALFORMED)][1]
        elif number % EVERY_DUPLICATE == 0 and recent:
            yield rng.choice(recent)  # the same event once more, as a retry without an id would publish it
        else:
            event = next(good)
            recent = [*recent[-199:], event]
            yield event


def _good(rng: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Orders are created, then paid or cancelled, then shipped, while others are."""
    open_orders: list[tuple[str, int, str]] = []
    number = 0
    while True:
        at = FIRST_DAY + datetime.timedelta(seconds=DAYS * 86_400 * min(number, count) / count)
        number += 1
        if len(open_orders) < 100 or rng.random() < 0.35:
            order, amount = f"o-{number}", rng.randrange(100, 50_000)
            open_orders.append((order, amount, "created"))
            yield _event("created", order, amount, at)
            continue
        index = rng.randrange(len(open_orders))
        order, amount, status = open_orders.pop(index)
        if status == "paid":
            yield _event("shipped", order, amount, at)
        elif rng.random() < 0.1:
            yield _event("cancelled", order, amount, at)
        else:
            open_orders.append((order, amount, "paid"))
            yield _event("paid", order, amount, at)


def _event(kind: str, order: str, amount: int, at: datetime.datetime) -> tuple[str, bytes]:
    body = {
        "event_id": f"{order}.{kind}",
        "type": f"order.{kind}",
        "order_id": order,
        "amount_cents": amount,
        "at": at.isoformat(timespec="seconds").replace("+00:00", "Z"),
    }
    return kind, json.dumps(body, separators=(",", ":")).encode()
