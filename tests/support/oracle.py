"""What the states of two test applications have to be: plain Python on the bytes of the stream, and nothing of ours.

This repeats the folds of ``support.projections`` and ``support.projected`` with dicts and ``json``. It imports nothing
of the product, so a mistake of its router, codecs, key states or windows is not made here, too.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Self
from zlib import crc32

__all__ = ["AccountsOracle", "BankOracle", "Cell", "Oracle", "cell_of"]


class Cell(NamedTuple):
    """What a key has."""

    value: bytes | None
    sequence: int
    parked_at: int | None = None


def cell_of(value: bytes | None, sequence: int, mark: str | None) -> Cell:
    """The same of what a bucket says: value, ``JetSpark-Sequence`` and ``JetSpark-Projection``."""
    words = (mark or "").split(" ")
    assert words[0] == "1", f"made by version {words[0]!r}"
    return Cell(value, sequence, int(words[2]) if words[1:2] == ["parked"] else None)


class Refused(Exception):
    """The event cannot be applied to its key."""


class Oracle:
    """Folds messages as they are in the stream, one by one."""

    projections: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, Cell]] = {name: {} for name in self.projections}
        """Of each projection what each key has that has ever had something."""
        self.dead_letters: list[int] = []
        """Messages that have no key, or cannot be read."""
        self.past: dict[tuple[str, str], dict[int, bytes | None]] = {}
        """Of each key the value after each event that it has taken; at 0 before all of them."""

    def fold(self, messages: Iterable[tuple[int, str, bytes, int]]) -> Self:
        """Take messages, each with its sequence, its subject, its data, and when it was stored, in microseconds."""
        for message in messages:
            self.take(*message)
        return self

    def take(self, sequence: int, subject: str, data: bytes, stored_us: int) -> None:
        if subject.split(".")[-1] not in ("opened", "moved", "closed", "dropped"):
            return  # no event of the application
        try:
            event = json.loads(data)
            kind, fields = event["type"], event["data"]
        except (ValueError, KeyError):
            self.dead_letters.append(sequence)
            return
        self.event(sequence, kind, fields, event, stored_us)

    def event(self, sequence: int, kind: str, fields: Any, event: Any, stored_us: int) -> None:
        raise AssertionError("each application has its own")

    def change(self, projection: str, key: str, sequence: int, apply: Callable[[Any], Any]) -> None:
        """Have a key take an event: ``apply`` makes a state of a state, None for none."""
        past = self.past.setdefault((projection, key), {0: None})
        cell = self.tables[projection].get(key, Cell(None, 0))
        if cell.parked_at is not None:
            return
        try:
            state = apply(None if cell.value is None else json.loads(cell.value))
        except Refused:
            self.tables[projection][key] = cell._replace(parked_at=sequence)
            return
        if state is None and cell.value is None:
            return  # ignored
        value = None if state is None else json.dumps(state, sort_keys=True, separators=(",", ":")).encode()
        self.tables[projection][key] = Cell(value, sequence)
        past[sequence] = value


class BankOracle(Oracle):
    """``support.projections.bank``; ``large`` is there only with lookups, and harmless otherwise."""

    projections = ("balances", "moves", "large")

    def event(self, sequence: int, kind: str, fields: Any, event: Any, stored_us: int) -> None:
        keys = [fields["account"]] if kind != "bank.moved" else [fields["source"], fields["target"]]
        if kind == "bank.moved":
            cents = fields["cents"]
            # A point in the text would begin a second token.
            self.change("moves", f"all=2E{cents % 2}", sequence, lambda state: _moves(state, cents))
            if cents == 13:
                self.dead_letters.append(sequence)
                return
        for key in dict.fromkeys(keys):
            self.change("balances", key, sequence, partial(_balance, kind=kind, fields=fields, key=key))
            self.change("large", key, sequence, partial(_large, kind=kind, fields=fields, key=key))


class AccountsOracle(Oracle):
    """``support.projected.app``."""

    projections = ("accounts", "totals", "recent")

    def event(self, sequence: int, kind: str, fields: Any, event: Any, stored_us: int) -> None:
        if kind == "account.opened":
            name = fields["name"].title() if event["schemaversion"] == 1 else fields["owner"]
            opened = {"owner": name, "cents": 0, "events": 0, "link": 0}
            self.change("accounts", fields["account"], sequence, lambda state: opened)
        elif kind == "account.closed":
            self.change("accounts", fields["account"], sequence, lambda state: None)
        elif kind == "account.dropped":
            self.change("accounts", fields["account"], sequence, lambda state: state)
        else:
            assert kind == "account.moved", kind
            cents = fields["cents"]
            for key in dict.fromkeys([fields["source"], fields["target"]]):
                sign = 1 if key == fields["target"] else -1
                self.change("accounts", key, sequence, partial(_account, cents=cents, sign=sign))
            total = "all" if cents % 2 else "even=2Eones"
            self.change("totals", total, sequence, lambda state: _total(state, cents))
            for part in _half_minutes(event["time"], stored_us):
                key = f"{fields['source']}.{part}"
                self.change("recent", key, sequence, lambda state: (state or 0) * 31 % 1_000_003 + cents)


# ---- the folds -------------------------------------------------------------------------------------------------------


def _balance(state: Any, kind: str, fields: Any, key: str) -> Any:
    if kind == "bank.opened":
        return {"cents": 0, "moves": 0}
    if kind == "bank.closed":
        return None
    if fields["cents"] == 666:
        raise Refused
    if state is None:
        return None
    sign = 1 if key == fields["target"] else -1
    return {"cents": state["cents"] + sign * fields["cents"], "moves": state["moves"] + 1}


def _moves(state: Any, cents: int) -> Any:
    return {"last": cents, "sum": (state or {}).get("sum", 0) * 3 % 1_000_003 + cents}


def _large(joined: Any, kind: str, fields: Any, key: str) -> Any:
    """Beside its own state it keeps what ``balances`` has, as of the event before."""
    joined = joined or {"lookups": {}, "state": None}
    account = joined["lookups"].get("balances", [1, None])[1]
    own = joined["state"]
    if kind == "bank.moved" and key == fields["source"] and account is not None and fields["cents"] > account["cents"]:
        own = [*(own or []), fields["cents"]]
    account = _balance(account, kind, fields, key)
    if own is None and account is None:
        return None
    return {"lookups": {} if account is None else {"balances": [1, account]}, "state": own}


def _account(state: Any, cents: int, sign: int) -> Any:
    if state is None:
        return None
    moved = state["cents"] + sign * cents
    if not moved > -700:
        raise Refused
    return {
        "owner": state["owner"],
        "cents": moved,
        "events": state["events"] + 1,
        "link": crc32(str(cents).encode(), state["link"]),
    }


def _total(state: Any, cents: int) -> Any:
    count, total, link = state or (0, 0, 0)
    return [count + 1, total + cents, crc32(str(cents).encode(), link)]


def _half_minutes(sent: str, stored_us: int) -> list[str]:
    """The two minutes that a time falls into, which begin every half; ``late`` if both ended ten minutes before."""
    moment = datetime.datetime.fromisoformat(sent.replace("Z", "+00:00"))
    last = int(moment.timestamp() // 30 * 30)
    begins = [begin for begin in (last - 30, last) if (begin + 60) * 1_000_000 >= stored_us - 600_000_000]
    names = [datetime.datetime.fromtimestamp(begin, datetime.UTC).strftime("%Y%m%dT%H%M%SZ") for begin in begins]
    return names or ["late"]
