"""An application whose stream holds more than events: states of entities replace each other, and timers go."""

from __future__ import annotations

from typing import Any

import msgspec

from jetspark.app import App, Context, Event
from jetspark.app.client import AppClient

app = App("mixed", stream="KV_mixed", subjects=["accounts.>"], timers=True)
app.entities("accounts", state=int)

# The timers of a stream that is not that of a bucket.
timed = App("timed", stream="TIMED", subjects=["accounts.>"], timers=True)


class Counted(msgspec.Struct):
    events: int = 0
    cents: int = 0


class Paid(Event, type="account.paid", key="account", subject="accounts.{account}.paid"):
    account: str
    cents: int


class Due(Event, type="account.due", key="account", subject="accounts.{account}.due"):
    account: str


class Sums:
    def key(self, event: Paid) -> str:
        return event.account

    def apply(self, state: Counted | None, event: Paid) -> Counted:
        state = state or Counted()
        return Counted(state.events + 1, state.cents * 3 % 1_000_003 + event.cents)


for each in (app, timed):
    each.projection("sums", events=[Paid], bucket=f"{each.name}_sums")(Sums)
    each.register(Due)


@app.handler(Paid, durable="note")
async def note(event: Paid, ctx: Context) -> None:
    """Does nothing: a replay counts."""


async def touch(client: AppClient, account: str, times: int = 1) -> None:
    """Change the state of an entity, without an event: the state before goes."""
    for _ in range(times):
        await client.entities("accounts").modify(account, _count)


async def pay(client: AppClient, account: str, *cents: int) -> None:
    """Change it with events."""
    for each in cents:

        def change(entity: Any, each: int = each) -> None:
            _count(entity)
            entity.emit(Paid(account=account, cents=each))

        await client.entities("accounts").modify(account, change)


def _count(entity: Any) -> None:
    entity.set((entity.state or 0) + 1)
