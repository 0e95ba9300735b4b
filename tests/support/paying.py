"""Commands with timers: an order is placed with a time-out for its payment, prolonged, and paid, which ends that."""

from __future__ import annotations

from typing import Any

from jetspark import StreamConfig
from jetspark.app import App, Command, Decision, Event, Past, Refused

PAYMENT_S = 1800.0


class Placed(Event, type="order.placed", key="order_id", subject="orders.{order_id}.placed"):
    order_id: str


class Prolonged(Event, type="order.prolonged", key="order_id", subject="orders.{order_id}.prolonged"):
    order_id: str


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str


class Overdue(Event, type="order.overdue", key="order_id", subject="orders.{order_id}.overdue"):
    order_id: str


class OrderCommand(Command):
    order_id: str
    wait_s: float = PAYMENT_S

    def reads(self) -> list[str]:
        return [f"orders.{self.order_id}.>"]

    @property
    def timer(self) -> str:
        return f"payment of {self.order_id}"

    @property
    def overdue(self) -> dict[str, tuple[Event, float]]:
        return {self.timer: (Overdue(order_id=self.order_id), self.wait_s)}


class Place(OrderCommand):
    def decide(self, past: Past) -> Decision:
        if past.of(Placed):
            raise Refused("placed before")
        return Decision(events=[Placed(order_id=self.order_id)], timers=self.overdue, reply="placed")


class Prolong(OrderCommand):
    def decide(self, past: Past) -> Decision:
        if past.of(Overdue):
            raise Refused("too late")
        return Decision(events=[Prolonged(order_id=self.order_id)], timers=self.overdue, cancels=[self.timer])


class Pay(OrderCommand):
    def decide(self, past: Past) -> Decision:
        if any(isinstance(event, Overdue | Paid) for event in past):
            raise Refused("too late")
        return Decision(events=[Paid(order_id=self.order_id)], cancels=[self.timer])


class Look(OrderCommand):
    """Says which events a decision sees."""

    def decide(self, past: Past) -> Decision:
        return Decision(reply=[type(event).__name__ for event in past])


def paying(*, timers: bool = True, guard: Any = "auto", replicas: int = 1) -> App:
    stream = StreamConfig(name="ORDERS", subjects=["orders.>"], replicas=replicas)
    app = App("orders", stream=stream, events=[Placed, Prolonged, Paid, Overdue], timers=timers)
    commands = {"orders.place": Place, "orders.prolong": Prolong, "orders.pay": Pay, "orders.look": Look}
    for name, kind in commands.items():
        app.command(name, guard=guard)(kind)
    return app
