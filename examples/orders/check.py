"""The same result, computed in the plainest way from the same events: what the pipeline is compared with."""

import json
from dataclasses import dataclass, field
from typing import Any

from jetspark.app.dead_letters.letters import DeadEvent
from jetspark.blocking import JetStream
from orders.app import STATUS, OrderPaid, app
from orders.events import history


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
    seen = set()
    for sequence, message in enumerate(history(count), 1):
        event = message.event
        if event is None:
            result.dead[sequence] = str(message.reason)
            continue
        if message.data in seen:
            continue
        seen.add(message.data)
        result.orders[event.order_id] = (STATUS[type(event)], event.amount_cents)
        if isinstance(event, OrderPaid):
            day = f"{event.at:%Y-%m-%d}"
            orders, cents = result.revenue.get(day, (0, 0))
            result.revenue[day] = (orders + 1, cents + event.amount_cents)
    return result


def stored(js: JetStream) -> Result:
    """What the pipeline has left behind."""
    result = Result()
    for key, state in _latest(js, "order_state").items():
        result.orders[key] = (state["status"], state["amount_cents"])
    for key, state in _latest(js, "daily_revenue").items():
        result.revenue[key] = (state["orders"], state["revenue_cents"])
    for message in js.stream(app.dead_letter_stream).get_messages():
        letter = DeadEvent.of(message.headers, message.data)
        assert letter.origin.sequence not in result.dead, f"event {letter.origin.sequence} has two letters"
        result.dead[letter.origin.sequence] = letter.cause.error.rpartition(".")[2] if letter.cause else ""
    return result


def bucket_of(projection: str) -> str:
    return app.projections[projection].bucket.bucket


def writes(js: JetStream) -> list[int]:
    """The last sequence of everything the pipeline writes to: equal before and after means that nothing was written."""
    names = [f"KV_{bucket_of(name)}" for name in app.projections] + [app.dead_letter_stream]
    return [js.stream(name).info().state.last_sequence for name in names]


def _latest(js: JetStream, projection: str) -> dict[str, Any]:
    bucket = bucket_of(projection)
    skip = len(f"$KV.{bucket}.")
    messages = js.stream(f"KV_{bucket}").get_messages()
    found = {message.subject[skip:]: json.loads(message.data) for message in messages}
    return {key: value for key, value in found.items() if not key.startswith("_jetspark.")}
