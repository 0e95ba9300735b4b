"""A workflow that sends commands: an order reserves its article, and is packed; or it is given up, and released."""

from __future__ import annotations

from typing import Any

import msgspec

from jetspark.app import App, Command, CommandAnswered, Decision, Event, Past, Refused, Retry


class Ordered(Event, type="order.placed", key="order_id", subject="orders.{order_id}.placed"):
    order_id: str
    article: str = "tea"


class Dropped(Event, type="order.dropped", key="order_id", subject="orders.{order_id}.dropped"):
    order_id: str


class Packed(Event, type="order.packed", key="order_id", subject="orders.{order_id}.packed"):
    order_id: str
    receipt: str


class Reserved(Event, type="stock.reserved", key="article", subject="stock.{article}.reserved"):
    article: str
    order_id: str


class Released(Event, type="stock.released", key="article", subject="stock.{article}.released"):
    article: str
    order_id: str


class OrderFlow(msgspec.Struct, frozen=True):
    article: str


class Reserving:
    """One article is there once: the first order gets it."""

    def react(self, state: OrderFlow | None, event: Ordered | Dropped | CommandAnswered) -> Decision | None:
        if isinstance(event, Ordered):
            if state is not None:
                return None
            return Decision(
                state=OrderFlow(event.article),
                commands={"reserve": Reserve(order_id=event.order_id, article=event.article)},
                compensations=[Release(order_id=event.order_id, article=event.article)],
            )
        if state is None:
            return None
        match event:
            case CommandAnswered(name="reserve", refused=None):
                return Decision(events=[Packed(order_id=event.run, receipt=event.reply["receipt"])], is_done=True)
            case CommandAnswered(name="reserve"):
                return Decision(failed=f"no {state.article}: {event.refused}")
        return Decision(failed="dropped")


class Reserve(Command):
    order_id: str
    article: str

    def reads(self) -> list[str]:
        return [f"stock.{self.article}.>"]

    def decide(self, past: Past) -> Decision:
        if len(past.of(Reserved)) > len(past.of(Released)):
            raise Refused("taken")
        return Decision(
            events=[Reserved(article=self.article, order_id=self.order_id)], reply={"receipt": f"r-{self.order_id}"}
        )


class Release(Command):
    order_id: str
    article: str

    def reads(self) -> list[str]:
        return [f"stock.{self.article}.>"]

    def decide(self, past: Past) -> list[Event]:
        if self.order_id not in [each.order_id for each in past.of(Reserved)]:
            return []  # it never got it
        return [Released(article=self.article, order_id=self.order_id)]


def reserving(**options: Any) -> App:
    app = App(
        "shop",
        stream="KV_shop",
        subjects=["orders.>", "stock.>"],
        events=[Packed, Reserved, Released, Dropped],
        timers=True,
    )
    app.command("stock.reserve")(Reserve)
    app.command("stock.release")(Release)
    chosen = {"key": "order_id", "ack_wait_s": 5.0, "retry": Retry(attempts=20, first_s=0.1, max_s=5.0), **options}
    app.workflow("reserving", **chosen)(Reserving)
    return app
