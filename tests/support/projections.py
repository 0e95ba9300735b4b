"""An application with projections, and what its buckets must have: the checkers of the engines."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from jetspark import StreamConfig
from jetspark.aio.jetstream import JetStream
from jetspark.app import DELETE, App, Event
from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.router import Failure, KeyRows, Recorded, Router
from jetspark.app.projections.state_header import Mark, mark_of
from jetspark.jetstream.kv import operation_of
from jetspark.state.changes import MARK_HEADER, SEQUENCE_HEADER, Current
from support.oracle import BankOracle, Cell, cell_of


class Opened(Event, type="bank.opened", version=1, key="account", subject="bank.{account}.opened"):
    account: str


class Moved(Event, type="bank.moved", version=1, key="source", subject="bank.{source}.moved"):
    source: str
    target: str
    cents: int


class Closed(Event, type="bank.closed", version=1, key="account", subject="bank.{account}.closed"):
    account: str


class Account(msgspec.Struct):
    cents: int = 0
    moves: int = 0


class Balances:
    """Two keys for one event, deleted keys, events that are ignored, and events that cannot be applied."""

    def key(self, event: Opened | Moved | Closed) -> Any:
        if isinstance(event, Moved):
            if event.cents == 13:
                raise ValueError("no key for 13 cents")
            return [event.source, event.target]
        return event.account

    def apply(self, state: Account | None, event: Opened | Moved | Closed, key: str) -> Any:
        match event:
            case Opened():
                return Account()
            case Closed():
                return DELETE
            case Moved():
                if event.cents == 666:
                    raise ValueError("cannot be applied")
                if state is None:
                    return None
                state.cents += event.cents if key == event.target else -event.cents
                state.moves += 1
                return state


class Moves:
    """One key for everything: the same key again and again."""

    def key(self, event: Moved) -> str:
        return f"all.{event.cents % 2}"

    def apply(self, state: dict[str, int] | None, event: Moved) -> dict[str, int]:
        state = state or {}
        state["last"] = event.cents
        state["sum"] = state.get("sum", 0) * 3 % 1_000_003 + event.cents  # depends on the order
        return state


class Large:
    """Payments of more than the account has: a fact of two projections."""

    def key(self, event: Moved) -> str:
        return event.source

    def apply(self, state: list[int] | None, event: Moved, lookup: Any, key: str) -> list[int] | None:
        account = lookup["balances"]
        if account is None or event.cents <= account.cents:
            return state
        account.cents = -1  # changes nothing
        return [*(state or []), event.cents]


def bank(name: str = "bank", stream: str = "BANK", *, has_lookups: bool = False, replicas: int | None = None) -> App:
    app = App(name, stream=StreamConfig(name=stream, subjects=["bank.>"], replicas=replicas))
    app.projection("balances", events=[Opened, Moved, Closed], bucket=f"{name}_balances")(Balances)
    app.projection("moves", events=[Moved], bucket=f"{name}_moves")(Moves)
    if has_lookups:
        app.projection("large", events=[Moved], bucket=f"{name}_large", lookups=["balances"])(Large)
    return app


def some_events(rng: random.Random, count: int, accounts: int = 6, *, is_bad: bool = True) -> list[Event]:
    """Some of which cannot be applied, or have no key."""
    found: list[Event] = []
    for _ in range(count):
        name = f"a{rng.randrange(accounts)}"
        chance = rng.random()
        if chance < 0.15:
            found.append(Opened(account=name))
        elif chance < 0.22:
            found.append(Closed(account=name))
        else:
            cents = rng.randrange(1, 10)
            if is_bad and chance > 0.99:
                cents = rng.choice([13, 666])
            found.append(Moved(source=name, target=f"a{rng.randrange(accounts)}", cents=cents))
    return found


Table = dict[str, tuple[bytes | None, int, str]]


def folded(app: App, messages: Iterable[Recorded]) -> tuple[dict[str, Table], list[int]]:
    """What the buckets have to have, and which messages have to have a letter: a plain loop over all events.

    With the folds above, it has to agree with one that uses nothing of the product.
    """
    messages = list(messages)
    tables, dead_letters = _folded(app, messages)
    if all(spec.kind in (Balances, Moves, Large) and spec.version == 1 for spec in app.projections.values()):
        oracle = BankOracle().fold((each.sequence, each.subject, each.data, each.time_us) for each in messages)
        for name in app.projections:
            assert cells(tables[name]) == oracle.tables[name]
        assert dead_letters == oracle.dead_letters
    return tables, dead_letters


def cells(table: Table) -> dict[str, Cell]:
    return {key: cell_of(*each) for key, each in table.items()}


def _folded(app: App, messages: Iterable[Recorded]) -> tuple[dict[str, Table], list[int]]:
    router = Router(app.projections.values(), app.catalogue)
    states: dict[tuple[str, str], KeyState] = {}
    dead_letters = []
    for message in messages:
        routing = route_one(router, message)
        for row in routing.rows:
            spec = app.projections[row.projection]
            place = row.projection, row.key
            if place not in states:
                states[place] = KeyState(spec, row.key, Current(None, 0, 0))
            states[place].apply(spec, row.key, row.sequence, row.event)
        if routing.failures:
            dead_letters.append(message.sequence)
    tables: dict[str, Table] = {name: {} for name in app.projections}
    for (name, key), state in states.items():
        change = state.change(app.projections[name], key)
        if change is not None:
            value = change.value if change.operation == "put" else None
            tables[name][key] = (value, change.sequence or 0, change.mark or "")
    return tables, dead_letters


def in_model(network: Any, app: App) -> tuple[dict[str, Table], list[int]]:
    """What the buckets of the model have, and which messages have a letter."""
    model = network.front.model
    tables = {}
    for name, spec in app.projections.items():
        table: Table = {}
        prefix = f"$KV.{spec.bucket.bucket}."
        for message in model.messages(f"KV_{spec.bucket.bucket}"):
            _note(table, message.subject.removeprefix(prefix), message.data, message.headers)
        tables[name] = table
    dead_letters = [int(each.subject.split(".")[5]) for each in model.messages(app.spec.dead_letter_stream)]
    return tables, sorted(dead_letters)


async def in_buckets(js: JetStream, app: App, buckets: dict[str, str] | None = None) -> dict[str, Table]:
    """What the buckets have."""
    tables = {}
    for name, spec in app.projections.items():
        bucket = (buckets or {}).get(name, spec.bucket.bucket)
        stream = await js.stream(f"KV_{bucket}")
        table: Table = {}
        async for message in stream.get_messages(1):
            _note(table, message.subject.removeprefix(f"$KV.{bucket}."), message.data, message.headers)
        tables[name] = table
    return tables


async def in_stream(js: JetStream, app: App) -> list[Recorded]:
    stream = await js.stream(app.stream)
    return [Recorded(each.sequence, each.subject, each.data, each.headers, 0) async for each in stream.get_messages(1)]


def _note(table: Table, key: str, data: bytes, headers: Any) -> None:
    if key.startswith("_jetspark."):
        return
    value = data if operation_of(headers) == "put" else None
    table[key] = (value, int(headers.get(SEQUENCE_HEADER) or 0), headers.get(MARK_HEADER) or "")


def parked(table: Table) -> list[str]:
    found = {key: Mark.read(mark) for key, (_, _, mark) in table.items()}
    return sorted(key for key, mark in found.items() if mark is not None and mark.parked is not None)


class Row(NamedTuple):
    """An event on its way to one key of one projection."""

    projection: str
    key: str
    sequence: int
    event: Any


class Routing(NamedTuple):
    rows: list[Row]
    failures: list[Failure]


def route_one(router: Router, message: Recorded) -> Routing:
    """The rows of one message, as if it came alone."""
    rows = {name: KeyRows() for name in router.specs}
    failures = [failure for _, found in sorted_into(rows, router, [message]) for failure in found]
    return Routing([Row(name, *row) for name, found in rows.items() for row in found], failures)


def sorted_into(
    rows: Mapping[str, KeyRows], router: Router, messages: Sequence[Recorded]
) -> list[tuple[Recorded, list[Failure]]]:
    """Sort messages as a stream has them; returns those that cannot be read."""
    return router.add_rows(messages, [each.sequence for each in messages], lambda message: message, rows)


__all__ = [
    "Account",
    "Balances",
    "Closed",
    "Moved",
    "Moves",
    "Opened",
    "Routing",
    "Row",
    "bank",
    "cells",
    "folded",
    "in_buckets",
    "in_model",
    "in_stream",
    "mark_of",
    "parked",
    "route_one",
    "some_events",
    "sorted_into",
]
