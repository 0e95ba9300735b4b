"""An application with one kind of entity, for the benchmark of entities."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from jetspark.app import App, EntityChange, Event, encode
from jetspark.app.contracts.envelope import Encoded

__all__ = ["SUBJECT", "Account", "Moved", "accounts", "add_one", "moved"]

SUBJECT = "bench-accounts"


@dataclass(frozen=True, slots=True)
class Account:
    cents: int


class Moved(Event, type="account.moved", key="account", subject="bench-accounts.{account}"):
    account: str
    cents: int


def accounts() -> App:
    app = App("bench-accounts", stream="BENCH_ACCOUNTS", subjects=[f"{SUBJECT}.>"], events=[Moved])
    app.entities("accounts", state=Account)
    return app


def add_one(change: EntityChange) -> None:
    cents = (change.state.cents if change.state else 0) + 1
    change.set(Account(cents))
    change.emit(Moved(account=change.key, cents=cents))


def moved(number: int, cents: int) -> Encoded:
    """The event of a change, as entities write it."""
    event = Moved(account=f"a{number}", cents=cents)
    return encode(event, id=f"{number}.{cents}", source="/bench", time=datetime.datetime.now(datetime.UTC))
