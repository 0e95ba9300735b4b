"""An application whose producers store events more than once; Spark's workers import ``support.repeated:app``."""

from __future__ import annotations

import datetime
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from jetspark.app import DELETE, App, Encoded, Event, encode
from jetspark.app.projections.router import Recorded
from jetspark.app.projections.state_header import digest_of

WINDOW = 3
app = App("ledger", stream="LEDGER", subjects=["ledger.>"])


class Moved(Event, type="ledger.moved", version=1, key="source", subject="ledger.{source}.moved"):
    source: str
    target: str
    cents: int


class Closed(Event, type="ledger.closed", version=1, key="account", subject="ledger.{account}.closed"):
    account: str


class Sums:
    def key(self, event: Moved | Closed) -> Any:
        return [event.source, event.target] if isinstance(event, Moved) else event.account

    def apply(self, state: int | None, event: Moved | Closed, key: str) -> Any:
        if isinstance(event, Closed):
            return DELETE
        if event.cents == 0:
            return state  # ignored, also where the key has no state
        if event.cents == 66:
            raise ValueError("cannot be applied")
        return (state or 0) + (event.cents if key == event.target else -event.cents)


app.projection("sums", events=[Moved, Closed], bucket="ledger_sums", unique_ids=WINDOW)(Sums)
app.projection("plain", events=[Moved, Closed], bucket="ledger_plain")(Sums)


def some_messages(count: int, seed: int = 1, accounts: int = 8, *, far: int = 12) -> list[Encoded]:
    """Events of which many are stored again, up to ``far`` messages later."""
    rng, found = random.Random(seed), list[Encoded]()
    while len(found) < count:
        if found and rng.random() < 0.4:
            found.append(found[-rng.randint(1, min(far, len(found)))])
            continue
        source, target = f"a{rng.randrange(accounts)}", f"b{rng.randrange(accounts)}"
        event = (
            Closed(account=source)
            if rng.random() < 0.15
            else Moved(source=source, target=target, cents=rng.randrange(9))
        )
        if rng.random() < 0.003:
            event = Moved(source=source, target=target, cents=66)
        now = datetime.datetime(2026, 3, 31, 10, tzinfo=datetime.UTC)
        found.append(encode(event, id=f"e-{seed}-{len(found)}", source=app.source, time=now))
    return found


class Held(NamedTuple):
    value: bytes | None
    sequence: int
    ids: tuple[bytes, ...]
    parked: int | None


def oracle(messages: Iterable[Recorded], window: int = WINDOW) -> dict[str, Held]:
    """What keys of ``sums`` have to hold, by a loop that uses nothing of the engines."""
    states: dict[str, Any] = {}
    ids: dict[str, list[str]] = {}
    last: dict[str, int] = {}
    parked: dict[str, int] = {}
    for message in messages:
        envelope = msgspec.json.decode(message.data)
        data, id = envelope["data"], envelope["id"]
        keys = [data["account"]] if "account" in data else [data["source"], data["target"]]
        for key in keys:
            if key in parked or id in ids.setdefault(key, [])[-window:]:
                continue
            if data.get("cents") == 66:
                parked[key] = message.sequence
                continue
            if "account" in data:
                states.pop(key, None)
            elif data["cents"]:
                states[key] = states.get(key, 0) + data["cents"] * (1 if key == data["target"] else -1)
            ids[key].append(id)
            last[key] = message.sequence
    return {
        key: Held(
            msgspec.json.encode(states[key]) if key in states else None,
            last.get(key, 0),
            tuple(digest_of(app.source, id) for id in ids[key][-window:]),
            parked.get(key),
        )
        for key in ids
    }
