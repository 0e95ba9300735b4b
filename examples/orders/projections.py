"""The state: what every order is like, and what each day earned. Pure functions of the state and the next event."""

from typing import Any

# A retry comes soon or never: an event that comes twice does so within this many messages.
DUPLICATE_WINDOW = 2000


class OrderState:
    """By order: its status, its amount, and what has happened to it."""

    def apply(self, state: Any, event: dict[str, Any], sequence: int) -> Any:
        kind = event["type"].removeprefix("order.")
        history = [] if state is None else state["history"]
        if kind in history:
            return state  # it happens once to an order
        return {"status": kind, "amount_cents": event["amount_cents"], "history": [*history, kind]}


class DailyRevenue:
    """By day: how many orders were paid, and how much that was."""

    def apply(self, state: Any, event: dict[str, Any], sequence: int) -> Any:
        state = state or {"orders": 0, "revenue_cents": 0, "recent": {}}
        recent = {name: seen for name, seen in state["recent"].items() if seen > sequence - DUPLICATE_WINDOW}
        if event["event_id"] in recent:
            return state | {"recent": recent}
        return {
            "orders": state["orders"] + 1,
            "revenue_cents": state["revenue_cents"] + event["amount_cents"],
            "recent": recent | {event["event_id"]: sequence},
        }
