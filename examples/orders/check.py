"""The same result, computed in the plainest way from the same events: what the pipeline is compared with."""

import json
from dataclasses import dataclass, field
from typing import Any

from jetspark.blocking import JetStream
from orders.events import MALFORMED, events
from orders.pipeline import Place


@dataclass
class Result:
    orders: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Status and amount of each order."""
    revenue: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Paid orders and cents of each day."""
    dead: dict[int, str] = field(default_factory=dict)
    """Sequence and reason of each event that cannot be used."""

    @property
    def revenue_cents(self) -> int:
        return sum(cents for _, cents in self.revenue.values())


def expected(count: int) -> Result:
    """From the events themselves; sequences count from 1."""
    result = Result()
    reasons = {data: reason for reason, data in MALFORMED}
    seen = set()
    for sequence, (_, data) in enumerate(events(count), 1):
        if data in reasons:
            result.dead[sequence] = reasons[data]
            continue
        event = json.loads(data)
        if event["event_id"] in seen:
            continue
        seen.add(event["event_id"])
        kind = event["type"].removeprefix("order.")
        result.orders[event["order_id"]] = (kind, event["amount_cents"])
        if kind == "paid":
            day = event["at"][:10]
            orders, cents = result.revenue.get(day, (0, 0))
            result.revenue[day] = (orders + 1, cents + event["amount_cents"])
    return result


def stored(js: JetStream, place: Place) -> Result:
    """What the pipeline has left behind."""
    result = Result()
    for key, state in _latest(js, place.order_state).items():
        result.orders[key] = (state["status"], state["amount_cents"])
    for key, state in _latest(js, place.daily_revenue).items():
        result.revenue[key] = (state["orders"], state["revenue_cents"])
    for message in js.stream(place.dead_letters).get_messages():
        sequence = int(message.headers["Origin-Sequence"])
        assert sequence not in result.dead, f"event {sequence} was put aside twice"
        result.dead[sequence] = message.headers["Reason"]
    return result


def writes(js: JetStream, place: Place) -> list[int]:
    """The last sequence of everything the pipeline writes to: equal before and after means that nothing was written."""
    names = [f"KV_{place.order_state}", f"KV_{place.daily_revenue}", place.dead_letters]
    return [js.stream(name).info().state.last_sequence for name in names]


def _latest(js: JetStream, bucket: str) -> dict[str, Any]:
    stream = js.stream(f"KV_{bucket}")
    skip = len(f"$KV.{bucket}.")
    return {message.subject[skip:]: json.loads(message.data) for message in stream.get_messages()}
