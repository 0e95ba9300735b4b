"""The bytes that buckets of projections have. A bucket outlives the code that has written it: these never change.

``state_bytes.json`` has what version 0.1 wrote. A case may be added; one that differs breaks every digest, and every
engine of another version that folds into the same bucket.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import json
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jetspark.app import DELETE, App, Event, Window
from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.positions import FoldPosition, position_change
from jetspark.app.projections.projection_spec import LookupSpec, ProjectionArguments, ProjectionSpec
from jetspark.app.replay.comparison import Digest, KeyContent
from jetspark.state.changes import Change, Current, header_bytes

GOLDEN = json.loads((Path(__file__).parent / "state_bytes.json").read_text())


class Told(Event, type="bytes.told", version=1, key="name", subject="bytes.{name}"):
    name: str
    what: str = ""


class Colour(enum.Enum):
    RED = "red"


class Inner(msgspec.Struct):
    b: int = 2
    a: str = "ä"


class Outer(msgspec.Struct, tag="outer"):
    z: list[Inner] = []
    optional: int | None = None
    colour: Colour = Colour.RED


class Brief(msgspec.Struct, omit_defaults=True):
    left_out: int = 0
    kept: int = 1


STATES: dict[str, Any] = {
    "whole number": 2**53,
    "negative": -7,
    "fraction": 0.1,
    "large fraction": 1e300,
    "whole fraction": 3.0,
    "true": True,
    "text": 'quote " slash / back \\ line \n é € 😀 \u2028 \x7f',
    "empty text": "",
    "list": [3, "2", [1, None]],
    "keys in another order": {"b": 1, "a": {"d": 2, "c": 3}, "ab": 0},
    "set": {"b", "a", "c"},
    "tuple": (1, "x"),
    "struct": Outer(z=[Inner(), Inner(b=1, a="b")]),
    "struct without its defaults": Brief(kept=5),
    "bytes": b"\x00\xff",
    "moment": datetime.datetime(2026, 3, 31, 10, 0, 0, 123000, tzinfo=datetime.UTC),
    "moment elsewhere": datetime.datetime(
        2026, 3, 31, 10, 0, tzinfo=datetime.timezone(datetime.timedelta(hours=5, minutes=30))
    ),
    "day": datetime.date(2026, 3, 31),
    "duration": datetime.timedelta(hours=25, seconds=1),
    "decimal": decimal.Decimal("1.10"),
    "uuid": uuid.UUID("12345678-1234-5678-1234-567812345678"),
    "enumeration": Colour.RED,
}


class Anything:
    def key(self, event: Told) -> str:
        return event.name

    def apply(self, state: Any, event: Told) -> Any:
        if event.what == "delete":
            return DELETE
        if event.what == "refuse":
            raise ValueError("line one\nline two: ümlaut")
        return STATES[event.what]


class Joined:
    def key(self, event: Told) -> str:
        return event.name

    def apply(self, state: Any, event: Told, lookup: Any) -> Any:
        return {"before": lookup["anything"], "z": 1, "a": 2}


SPEC = ProjectionSpec("anything", Anything, ProjectionArguments(events=[Told], bucket="anything", version=3))


def after(spec: ProjectionSpec, *whats: str) -> Change:
    state = KeyState(spec, "k", Current(None, 0, 0))
    for sequence, what in enumerate(whats, start=7):
        state.apply(spec, "k", sequence, Told(name="k", what=what))
    change = state.change(spec, "k")
    assert change is not None
    return change


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_stored_as_ever(name: str) -> None:
    assert after(SPEC, name).value.decode() == GOLDEN["states"][name]


def test_every_case_of_the_file_is_compared() -> None:
    assert set(GOLDEN["states"]) == set(STATES)
    assert set(GOLDEN) == {"states", "joined", "messages", "keys", "position", "digest", "unique"}


def test_a_state_with_lookups_is_stored_as_ever() -> None:
    spec = LookupSpec("joined", Joined, ProjectionArguments(events=[Told], bucket="joined", lookups=[SPEC]))
    assert after(spec, "list", "struct").value.decode() == GOLDEN["joined"]


@pytest.mark.parametrize("name", ["put", "delete", "parked", "parked without a state"])
def test_a_message_has_the_headers_that_it_ever_had(name: str) -> None:
    whats = {
        "put": ["negative"],
        "delete": ["negative", "delete"],
        "parked": ["negative", "refuse"],
        "parked without a state": ["refuse"],
    }[name]
    change = after(SPEC, *whats)._replace(revision=None)
    block = header_bytes(change, "")
    assert block is not None
    assert {"headers": block.decode(), "value": change.value.decode()} == GOLDEN["messages"][name]


@pytest.mark.parametrize("name", ["plain", "escaped", "empty", "window", "late"])
def test_a_key_is_spelled_as_ever(name: str) -> None:
    value = {"escaped": "a.b/ü *", "empty": ""}.get(name, "shop-7")
    window = Window(size_s=3600, grace_s=60.0) if name in ("window", "late") else None
    spec = ProjectionSpec("keys", Anything, ProjectionArguments(events=[Told], bucket="keys", window=window))
    sent = datetime.datetime(2026, 3, 31, 10, 59, tzinfo=datetime.UTC)
    stored_us = int(sent.timestamp() + (7200 if name == "late" else 0)) * 1_000_000
    assert spec.windowed_keys_of(Told(name=value), sent, stored_us) == (GOLDEN["keys"][name],)


def test_a_position_is_stored_as_ever() -> None:
    beginning = FoldPosition.beginning("BANK", datetime.datetime(2026, 3, 31, 10, 0, 0, 5, tzinfo=datetime.UTC))
    position = beginning._replace(version=3).reaching(12, 1, 11).missing(3, 5).repaired(11)
    change = position_change(position, 4)
    assert {change.key: change.value.decode()} == GOLDEN["position"]
    assert FoldPosition.decode(change.value) == position


def test_a_digest_is_what_it_was() -> None:
    digest = Digest()
    for name in ("list", "whole number"):
        change = after(SPEC, name)
        digest.add(name, KeyContent(change.value, change.sequence or 0))
    assert str(digest) == GOLDEN["digest"]


def test_the_file_is_about_an_application_like_any_other() -> None:
    app = App("bytes", stream="BYTES", subjects=["bytes.>"])
    app.projection("anything", events=[Told], bucket="anything", version=3)(Anything)
    assert app.projections["anything"].fold("k", None, Told(name="k", what="list")) == after(SPEC, "list").value
