"""An application with two projections, which Spark's workers import by name: ``support.projected:app``."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from jetspark.app import DELETE, App, Event, encode, upcast
from jetspark.app.clock import microseconds, utc_now
from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.router import Recorded, Router
from jetspark.app.projections.windows import Window
from jetspark.blocking import JetStream
from jetspark.errors import StreamNotFound
from jetspark.state.changes import Current
from support.oracle import AccountsOracle, cell_of
from support.projections import route_one

app = App("bank", stream="BANK", subjects=["bank.>"])


class Opened(Event, type="account.opened", version=2, key="account", subject="bank.{account}.opened"):
    account: str
    owner: str


@upcast(Opened, from_version=1)
def _(old: dict[str, Any]) -> dict[str, Any]:
    return {"account": old["account"], "owner": old["name"].title()}


class Moved(Event, type="account.moved", version=1, key="source", subject="bank.{source}.moved"):
    source: str
    target: str
    cents: int


class Closed(Event, type="account.closed", version=1, key="account", subject="bank.{account}.closed"):
    account: str


class Dropped(Event, type="account.dropped", version=1, key="account", subject="bank.{account}.dropped"):
    """Kills the process that folds it, if the file is there; and removes it, so that it happens once."""

    account: str
    flag: str


class Account(msgspec.Struct):
    owner: str
    cents: int = 0
    events: int = 0
    link: int = 0
    """A checksum of all events: one too many, too few, or out of order shows."""


def is_solvent(state: Account) -> bool:
    return state.cents > -700


@app.projection("accounts", events=[Opened, Moved, Closed, Dropped], bucket="accounts", invariants=[is_solvent])
class Accounts:
    def key(self, event: Opened | Moved | Closed | Dropped) -> Any:
        return [event.source, event.target] if isinstance(event, Moved) else event.account

    def apply(self, state: Account | None, event: Opened | Moved | Closed | Dropped, key: str) -> Any:
        match event:
            case Dropped():
                with contextlib.suppress(FileNotFoundError):
                    Path(event.flag).unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
                return state
            case Opened():
                return Account(event.owner)
            case Closed():
                return DELETE
            case Moved() if state is not None:
                state.cents += event.cents if key == event.target else -event.cents
                state.events += 1
                state.link = crc32(b"%d" % event.cents, state.link)
                return state


@app.projection("totals", events=[Moved], bucket="totals")
class Totals:
    def key(self, event: Moved) -> str:
        return "all" if event.cents % 2 else "even.ones"

    def apply(self, state: list[int] | None, event: Moved) -> list[int]:
        count, total, link = state or (0, 0, 0)
        return [count + 1, total + event.cents, crc32(b"%d" % event.cents, link)]


@app.projection("recent", events=[Moved], bucket="recent", window=Window(size_s=60, every_s=30, grace_s=600.0))
class Recent:
    """By account and minute, beginning every half; what comes ten minutes late is apart."""

    def key(self, event: Moved) -> str:
        return event.source

    def apply(self, state: int | None, event: Moved) -> int:
        return (state or 0) * 31 % 1_000_003 + event.cents


def messages(count: int, *, accounts: int = 40, unreadable: int = 3, seed: int = 1) -> Iterator[tuple[str, bytes, Any]]:
    """A history of so many messages, the same for the same seed: subject, data, headers."""
    rng = random.Random(seed)
    broken = {each: number for number, each in enumerate(rng.sample(range(count // 2, count), unreadable))}
    for number in range(count):
        one, other = (f"a{each}" for each in rng.sample(range(accounts), 2))
        if number in broken:
            yield f"bank.{one}.moved", (b"{", b'{"id":"x"}')[broken[number] % 2], {"note": str(number)}
            continue
        event: Event
        if number < accounts or rng.random() < 0.02:
            event = Opened(account=f"a{number % accounts}", owner=f"Owner {number}")
        elif rng.random() < 0.01:
            event = Closed(account=one)
        else:
            event = Moved(source=one, target=other, cents=rng.randrange(1, 200))
        sent = utc_now() - datetime.timedelta(seconds=rng.choice([0, 0, 0, 45, 7200]))
        encoded = encode(event, id=f"e{seed}-{number}", source="/bank", time=sent)
        data = encoded.data
        if isinstance(event, Opened) and number % 3 == 0:  # as the version before has written it
            data = data.replace(b'"owner":"Owner', b'"name":"owner').replace(b'"schemaversion":2', b'"schemaversion":1')
        yield encoded.subject, data, encoded.headers


def fresh(url: str | list[str], js: JetStream) -> JetStream:
    """With an empty stream and empty buckets."""
    topology = app.topology()
    for name in [each.name for each in topology.streams] + [f"KV_{each.bucket}" for each in topology.buckets]:
        with contextlib.suppress(StreamNotFound):
            js.delete_stream(name)
    asyncio.run(app.apply(url))
    return js


def publish(js: JetStream, history: Iterator[tuple[str, bytes, Any]]) -> None:
    with js.fast_batch() as batch:
        batch.add_many(history)


State = tuple[bytes | None, int, str | None]
"""Value, sequence and mark."""


def folded(js: JetStream, name: str, *, last: int | None = None) -> dict[str, State]:
    """What one process that folds the stream message by message comes to, from the first to the last.

    It has to agree with one that uses nothing of the product.
    """
    spec = app.projections[name]
    router, oracle = Router([spec], app.catalogue), AccountsOracle()
    states: dict[str, KeyState] = {}
    for message in js.stream(app.stream).get_messages(1):
        if last is not None and message.sequence > last:
            break
        time_us = microseconds(message.timestamp)
        oracle.take(message.sequence, message.subject, message.data, time_us)
        recorded = Recorded(message.sequence, message.subject, message.data, message.headers, time_us)
        for row in route_one(router, recorded).rows:
            state = states.setdefault(row.key, KeyState(spec, row.key, Current(None, 0, 0)))
            state.apply(spec, row.key, row.sequence, row.event)
    changes = {key: state.change(spec, key) for key, state in states.items()}
    found = {
        key: (change.value if change.operation == "put" else None, change.sequence or 0, change.mark)
        for key, change in changes.items()
        if change is not None
    }
    assert {key: cell_of(*each) for key, each in found.items()} == oracle.tables[name]
    return found


def stored(js: JetStream, bucket: str) -> dict[str, State]:
    """What a bucket has, but for what engines note of themselves."""
    found: dict[str, State] = {}
    prefix = f"$KV.{bucket}."
    for message in js.stream(f"KV_{bucket}").get_messages(1):
        key = message.subject.removeprefix(prefix)
        if key.startswith("_jetspark."):
            continue
        headers = message.headers
        value = None if "KV-Operation" in headers else message.data
        found[key] = (value, int(headers.get("JetSpark-Sequence") or 0), headers.get("JetSpark-Projection"))
    return found
