"""A workflow that tests share: an order waits for its payment, is shipped, or is given up."""

from __future__ import annotations

import dataclasses

import msgspec

from jetspark.app import App, Decision, Event

PAYMENT_S = 1800.0


class Placed(Event, type="order.placed", key="order_id", subject="orders.{order_id}.placed"):
    order_id: str


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str


class PaymentOverdue(Event, type="order.payment_overdue", key="order_id", subject="orders.{order_id}.overdue"):
    order_id: str


class Reserve(Event, type="stock.reserve", key="order_id", subject="orders.{order_id}.reserve"):
    order_id: str


class Release(Event, type="stock.release", key="order_id", subject="orders.{order_id}.release"):
    order_id: str


class Shipped(Event, type="order.shipped", key="order_id", subject="orders.{order_id}.shipped"):
    order_id: str


class Flow(msgspec.Struct, frozen=True):
    step: str
    reminders: int = 0


class Fulfilment:
    def react(self, state: Flow | None, event: Placed | Paid | PaymentOverdue) -> Decision | None:
        id = event.order_id
        match event:
            case Placed():
                if state is not None:
                    return None
                return Decision(
                    state=Flow("waiting"),
                    events=[Reserve(order_id=id)],
                    timers={"payment": (PaymentOverdue(order_id=id), PAYMENT_S)},
                    compensations=[Release(order_id=id)],
                )
            case Paid():
                if state is None:
                    return None
                return Decision(state=Flow("shipped"), events=[Shipped(order_id=id)], is_done=True)
        if state is None:
            return None
        if state.reminders == 0:
            again = {"payment": (PaymentOverdue(order_id=id), PAYMENT_S)}
            return Decision(state=Flow("reminded", 1), timers=again)
        return Decision(failed="not paid")


def fulfilment(payment_s: float = PAYMENT_S) -> App:
    app = App("shop", stream="KV_shop", subjects=["orders.>"], events=[Reserve, Release, Shipped], timers=True)

    @app.workflow("fulfilment", key="order_id", ack_wait_s=5.0)
    class Quick(Fulfilment):
        def react(self, state: Flow | None, event: Placed | Paid | PaymentOverdue) -> Decision | None:
            decided = super().react(state, event)
            if decided is None:
                return None
            timers = {name: (each, payment_s) for name, (each, _) in decided.timers.items()}
            return dataclasses.replace(decided, timers=timers)

    return app
