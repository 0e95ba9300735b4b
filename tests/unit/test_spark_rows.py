"""Rows of projections: the quick loop makes what the router, which decides for all engines, makes of each message."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("pyspark")

from support import projected
from support.projections import route_one

from jetspark.app import App, Event, encode
from jetspark.app.clock import utc_now
from jetspark.app.projections.router import Recorded, Router
from jetspark.app.projections.windows import Window
from jetspark.core.headers import Headers
from jetspark.jetstream.info import StoredMessage
from jetspark.spark.engine.rows import LETTER, Readings, RouteRows, unpack

app = App("till", stream="TILL", subjects=["till.>"])


class Paid(Event, type="till.paid", key="name", subject="till.{name}.paid"):
    name: str
    cents: int


class Seen(Event, type="till.seen", key="name", subject="till.{name}.seen"):
    """Of no projection."""

    name: str


@app.projection("first", events=[Paid], bucket="first")
class First:
    def key(self, event: Paid) -> Any:
        return None if event.cents == 1 else [event.name, "all"]

    def apply(self, state: int | None, event: Paid) -> int:
        return (state or 0) + event.cents


@app.projection("second", events=[Paid], bucket="second", window=Window(size_s=60))
class Second:
    def key(self, event: Paid) -> str:
        if event.cents == 2:
            raise ValueError("no key")
        return event.name

    def apply(self, state: int | None, event: Paid) -> int:
        return (state or 0) + event.cents


NAMES = ["first", "second"]


def payment(cents: int, **changes: Any) -> bytes:
    made = encode(Paid(name="a b", cents=cents), id=f"p{cents}", source="/till", time=utc_now()).data
    return json.dumps(json.loads(made) | changes).encode()


HOSTILE: list[tuple[bytes, dict[str, str] | None]] = [
    (payment(0), None),
    (payment(1), None),
    (payment(2), None),  # rows for the first projection, and a letter for the second
    (payment(3, schemaversion=9), None),
    (payment(4, type="till.unknown"), None),
    (payment(5, data={"name": "x"}), None),
    (payment(6, data=None), None),
    (payment(7, specversion="0.3"), None),
    (payment(8, time="yesterday"), None),
    (payment(9, schemaversion=None, time=None), None),
    (b'{"name":"bin","cents":10}', {"ce-specversion": "1.0", "ce-id": "b", "ce-source": "/x", "ce-type": "till.paid"}),
    (b"{", None),
    (b"", None),
    (b"[" * 5000, None),
    (encode(Seen(name="s"), id="s", source="/till", time=utc_now()).data, None),
]


def stored_at(sequence: int, subject: str, data: bytes, headers: dict[str, str] | None) -> StoredMessage:
    return StoredMessage(
        stream="ANY",
        subject=subject,
        sequence=sequence,
        timestamp=utc_now(),
        data=data,
        headers=Headers(headers or {}),
    )


def test_the_quick_loop_makes_the_rows_and_letters_of_the_router() -> None:
    stored = [stored_at(number, "till.x.paid", *each) for number, each in enumerate(HOSTILE, start=1)]
    rows = RouteRows(app, NAMES, subjects=["till.*.paid"])
    assert rows.of_stored("TILL", stored).num_rows > 10
    router = Router([app.projections[name] for name in NAMES], app.catalogue)
    readers = Readings(app).readers
    for message in stored:
        found = rows.of_stored("TILL", [message]).to_pylist()
        recorded = Recorded(message.sequence, message.subject, message.data, message.headers, _us(message))
        wanted = route_one(router, recorded)
        events = [(NAMES[row["target"]], row["key"], row["sequence"]) for row in found if row["target"] >= 0]
        assert events == [(row.projection, row.key, row.sequence) for row in wanted.rows]
        read = [readers[row["reading"]](row["data"]) for row in found if row["target"] >= 0]
        assert read == [row.event for row in wanted.rows]
        letters = [unpack(row["data"]) for row in found if row["target"] == LETTER]
        assert [each.sequence for each in letters] == ([message.sequence] if wanted.failures else [])


def _us(message: StoredMessage) -> int:
    return int(message.timestamp.timestamp() * 1_000_000 + 0.5)


def test_the_quick_loop_makes_the_rows_of_a_history_with_upcasts_and_windows() -> None:
    names = ["accounts", "totals", "recent"]
    stored = [stored_at(number, *each) for number, each in enumerate(projected.messages(600), start=1)]
    rows = RouteRows(projected.app, names, subjects=["bank.>"]).of_stored("BANK", stored).to_pylist()
    router = Router([projected.app.projections[name] for name in names], projected.app.catalogue)
    wanted = []
    for message in stored:
        recorded = Recorded(message.sequence, message.subject, message.data, message.headers, _us(message))
        wanted += [(row.projection, row.key, row.sequence) for row in route_one(router, recorded).rows]
    wanted.sort(key=lambda row: names.index(row[0]))  # stable: those of a projection by sequence
    assert [(names[row["target"]], row["key"], row["sequence"]) for row in rows if row["target"] >= 0] == wanted
    assert sum(row["target"] == LETTER for row in rows) == 3


def test_a_process_that_plans_does_not_load_the_functions_of_arrow() -> None:
    modules = "jetspark.spark.formats, jetspark.spark.engine.projection_source, jetspark.spark.engine.projection_sink"
    code = f"import sys, {modules}; sys.exit('pyarrow.compute' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
