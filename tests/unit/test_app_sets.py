"""Sets in events and states have one order in every process: that of their elements."""

from __future__ import annotations

import collections.abc
import datetime
import decimal
import enum
import os
import subprocess
import sys
import uuid
from typing import Any, Literal

import msgspec
import pydantic
import pytest

from jetspark.app import App, Decision, Event, contract_of, event
from jetspark.errors import ConfigError, InvalidEvent

EVENT_META: Any = type(Event)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.StrEnum):
    SMALL = "small"
    LARGE = "large"


class Line(msgspec.Struct, frozen=True):
    sku: str


class Box(msgspec.Struct):
    labels: set[str] = set()


class Tagged(Event, type="order.tagged", key="order_id", subject="orders.tagged.{order_id}"):
    order_id: str
    tags: set[str]
    sizes: frozenset[Size] = frozenset()
    by_number: dict[int, collections.abc.Set[tuple[int, str]]] = {}
    box: Box = msgspec.field(default_factory=Box)


@event(type="order.colored", subject="orders.colored")
class Colored(pydantic.BaseModel, frozen=True):
    colors: frozenset[Color]
    tags: set[str] | None = None
    by_number: dict[int, set[str]] = {}


WORDS = ["a", "b", "c", "d", "e", "f", "g"]


def show_all() -> None:
    """What a process prints, whose texts have hashes of its own."""
    tagged = Tagged(
        order_id="o-1",
        tags=set(WORDS),
        sizes=frozenset(Size),
        by_number={2: {(2, "b"), (1, "c"), (1, "b")}, 1: {(9, "x")}},
        box=Box(set(WORDS)),
    )
    colored = Colored(colors=frozenset(Color), tags=set(WORDS), by_number={2: set(WORDS)})
    state = spec_of(Box).fold("o-1", None, tagged)
    print([contract_of(each).encode(each) for each in (tagged, colored)], state)


def spec_of(state_type: Any) -> Any:
    app = App("shop", stream="SHOP", subjects=["orders.>"])

    class Boxes:
        def key(self, event: Tagged) -> str:
            return event.order_id

        def apply(self, state: Any, event: Tagged) -> Any:
            return event.box

    Boxes.apply.__annotations__["state"] = state_type
    app.projection("boxes", events=[Tagged], bucket="boxes")(Boxes)
    return app.projections["boxes"]


def test_equal_events_and_states_have_equal_bytes_in_every_process() -> None:
    code = "from tests.unit.test_app_sets import show_all; show_all()"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in range(1, 4)
    }
    [output] = outputs
    assert output.count('["a","b","c","d","e","f","g"]') == 5
    assert '"sizes":["large","small"],"by_number":{"1":[[9,"x"]],"2":[[1,"b"],[1,"c"],[2,"b"]]}' in output
    assert '"colors":["blue","red"]' in output


@pytest.mark.parametrize(
    "hint",
    [
        set[str],
        set[int],
        set[bool | int],
        set[float],
        frozenset[uuid.UUID],
        set[datetime.date],
        set[decimal.Decimal],
        set[bytes],
        set[Size],
        set[Literal["a", "b"]],
        set[tuple[str, int]],
        set[tuple[str, ...]],
        collections.abc.Set[str],
        set,
        set[Any],
    ],
    ids=str,
)
def test_a_set_that_can_be_sorted_may_be_in_an_event_and_a_state(hint: Any) -> None:
    kind = EVENT_META("Made", (Event,), {"__annotations__": {"values": hint}, "__module__": __name__}, type="made")
    assert contract_of(kind).encode(kind(values=set())) == b'{"values":[]}'
    spec_of(hint)


@pytest.mark.parametrize(
    "hint",
    [
        set[Color],
        set[Line],
        frozenset[frozenset[int]],
        set[int | str],
        set[Literal["a", 1]],
        dict[str, list[set[Line]]],
    ],
    ids=str,
)
def test_a_set_that_has_no_order_is_refused_where_it_is_declared(hint: Any) -> None:
    said = "equal sets would be written in several orders"
    with pytest.raises(ConfigError, match=rf"Made\.values: a set of .*: {said}"):
        EVENT_META("Made", (Event,), {"__annotations__": {"values": hint}, "__module__": __name__}, type="made")
    with pytest.raises(ConfigError, match=f"projection 'boxes': state: a set of .*: {said}"):
        spec_of(hint)
    app = App("shop", stream="SHOP", subjects=["orders.>"])
    with pytest.raises(ConfigError, match=f"entities 'boxes': state: a set of .*: {said}"):
        app.entities("boxes", state=hint)

    class Boxing:
        def react(self, state: Any, event: Tagged) -> Decision | None: ...

    Boxing.react.__annotations__ = {"state": hint, "event": Tagged}
    with pytest.raises(ConfigError, match=f"workflow 'boxing': state: a set of .*: {said}"):
        app.workflow("boxing", key="order_id")(Boxing)


def test_a_set_of_anything_that_turns_out_to_have_no_order_is_not_published() -> None:
    kind = EVENT_META("Made", (Event,), {"__annotations__": {"values": set[Any]}, "__module__": __name__}, type="made")
    with pytest.raises(InvalidEvent, match="not supported between instances of"):
        contract_of(kind).encode(kind(values={1, "a"}))
