"""An application with one of everything, for tests of what its users may do; and what the documentation grants them."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jetspark.app import App, Breaker, Command, Context, Decision, Event, Past, Refused, Reject, Retry, RetryIn, Setting


class Placed(Event, type="order.placed", key="order_id", subject="orders.{order_id}.placed"):
    order_id: str


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str


class Overdue(Event, type="order.overdue", key="order_id", subject="orders.{order_id}.overdue"):
    order_id: str


class Billed(Event, type="order.billed", key="order_id", subject="billed.{order_id}"):
    order_id: str


class Thing(msgspec.Struct, frozen=True):
    count: int = 0


class Things:
    def key(self, event: Paid) -> str:
        return event.order_id

    def apply(self, state: Thing | None, event: Paid) -> Thing:
        return Thing(1 if state is None else state.count + 1)


HELD: dict[str, asyncio.Event] = {}
"""Orders whose event the handlers of `shop` do not finish; the event is set when one has begun."""
REJECTED: set[str] = set()
"""Orders whose events `shop` rejects."""


class Place(Command):
    order_id: str

    def reads(self) -> list[str]:
        return [f"orders.{self.order_id}.>"]

    def decide(self, past: Past) -> Decision:
        if past.of(Placed):
            raise Refused("the order exists")
        return Decision(events=[Placed(order_id=self.order_id)], reply={"order": self.order_id})


class Remind(Command):
    order_id: str

    def reads(self) -> list[str]:
        return [f"orders.{self.order_id}.>"]

    def decide(self, past: Past) -> Decision:
        overdue = Overdue(order_id=self.order_id)
        return Decision(events=[Placed(order_id=self.order_id)], timers={self.order_id: (overdue, 3600)})


class Repeat(Command):
    order_id: str

    def reads(self) -> list[str]:
        return [f"orders.{self.order_id}.placed"]

    def snapshot_key(self) -> str:
        return self.order_id

    def decide(self, past: Past) -> Decision:
        return Decision(events=[Placed(order_id=self.order_id)])


def shop(**options: Any) -> App:
    """Handlers, one of which fails; a projection, entities, a workflow, and a command."""
    app = App("shop", stream="ORDERS", subjects=["orders.>", "billed.>"], timers=True, events=[Paid], **options)

    @app.handler(Placed, durable="billing")
    async def bill(event: Placed) -> Billed:
        return Billed(order_id=event.order_id)

    @app.handler(Placed, durable="failing")
    async def fail(event: Placed) -> None:
        raise Reject("never")

    @app.handler(Placed, durable="oncer")
    async def once(event: Placed, ctx: Context) -> None:
        async def effect() -> str:
            return event.order_id

        await ctx.once("effect", effect)
        await ctx.schedule(Overdue(order_id=event.order_id), after=3600, name=f"once {event.order_id}")

    @app.handler(Placed, durable="waiting", retry=Retry(in_lane_s=0.1))
    async def wait(event: Placed, ctx: Context) -> None:
        if ctx.attempt == 1:
            raise RetryIn(0.5)

    breaker, soon = Breaker(failures=1, open_s=300), Retry(in_lane_s=0.1)

    @app.handler(Placed, durable="breaking", breaker=breaker, retry=soon)
    @app.handler(Placed, durable="parted_breaking", breaker=breaker, retry=soon, partitions=1)
    async def break_down(event: Placed) -> None:
        raise ConnectionError("away")

    @app.handler(Placed, durable="picky", ack_wait_s=1.0)
    @app.handler(Placed, durable="parted_picky", ack_wait_s=1.0, partitions=1)
    async def pick(event: Placed) -> None:
        if event.order_id in HELD:
            HELD[event.order_id].set()
            await asyncio.Event().wait()
        if event.order_id in REJECTED:
            raise Reject("not now")

    @app.handler(Placed, durable="later")
    async def later(event: Placed) -> None:
        raise RetryIn(3600)

    @app.handler(Placed, durable="parted", partitions=1, retry=Retry(in_lane_s=0.1))
    async def parted(event: Placed, ctx: Context) -> None:
        if ctx.attempt == 1:
            raise RetryIn(0.5)

    @app.projection("status", events=[Placed], bucket="status")
    class Status:
        def key(self, event: Placed) -> str:
            return event.order_id

        def apply(self, state: Any, event: Placed) -> dict[str, int]:
            return {"placed": (state or {"placed": 0})["placed"] + 1}

    app.entities("things", state=Thing, truth="events", events=[Paid], fold=Things)
    app.settings("knobs", size=Setting(int, 1))

    @app.workflow("flow", key="order_id")
    class Flow:
        def react(self, state: Any, event: Placed | Overdue) -> Decision:
            if isinstance(event, Overdue):
                return Decision(failed="not paid")
            return Decision(state={"late": False}, timers={"payment": (Overdue(order_id=event.order_id), 3600)})

    app.command("orders.place")(Place)
    app.command("orders.remind")(Remind)
    app.command("orders.repeat", snapshot="status")(Repeat)
    return app


# ---- the documentation -----------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "permissions.md"
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class WorkerRow:
    """One line of the table of workers."""

    worker: str
    subjects: tuple[str, ...]
    """None where the line describes them in words."""
    is_subscribed: bool
    when: str
    without: str


def _rows(section: str) -> list[list[str]]:
    lines = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in rows if row[0] not in ("call", "worker")]


def _subjects(text: str) -> tuple[str, ...]:
    return tuple(each for each in _CODE.findall(text) if "." in each and not each.startswith(("_INBOX", "view(")))


def client_rows() -> dict[str, tuple[str, ...]]:
    """The calls of clients, and what each publishes to always."""
    return {label: _subjects(needs.split(";")[0]) for label, needs in _rows("Clients")}


def worker_rows(*workers: str) -> list[WorkerRow]:
    """What the workers of these kinds need, in one list."""
    rows = [
        WorkerRow(worker, _subjects(what), what.startswith("subscribe"), when, without)
        for worker, what, when, without in _rows("Workers")
    ]
    return [row for row in rows if row.worker in workers]


def filled(subject: str, **names: str) -> str:
    """A subject of the documentation with the names of this application."""
    names = {"app": "shop", "APP": "SHOP", "stream": "ORDERS", "bucket": "status", "projection": "status"} | names
    return re.sub(r"<(\w+)>", lambda found: names[found[1]], subject)
