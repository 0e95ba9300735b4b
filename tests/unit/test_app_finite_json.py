"""Numbers that JSON does not have are refused wherever a value of the user's is stored."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from jetspark.app import App, Decision, Event, Flag, Setting
from jetspark.app.commands.boundaries import outcome_of
from jetspark.app.commands.command_spec import CommandReply
from jetspark.app.commands.wire import write_reply
from jetspark.app.finite_json import check_finite
from jetspark.errors import ConfigError, InvalidEvent


class Measured(Event, type="measured", key="sensor", subject="measured.{sensor}"):
    sensor: str


class Rates(msgspec.Struct):
    rates: dict[str, float | None] = {}
    last: float | None = None


@dataclass
class Place:
    at: tuple[float, float]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "it is nan, which"),
        (-math.inf, "it is -inf, which"),
        ({"a": [1.0, math.inf]}, "it has inf at a[1]"),
        (Rates({"usd": math.nan}), "has nan at rates.usd"),
        (Place((1.0, math.nan)), "has nan at at[1]"),
        ([10**30, math.nan], "has nan at [1]"),
        ({1: {math.inf}}, "has inf at 1[0]"),
    ],
    ids=str,
)
def test_a_number_that_json_does_not_have_is_named(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match="which JSON has no number for") as raised:
        check_finite("it", value, msgspec.json.encode(value))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "value",
    [None, "null", {"nan": None}, [10**30, None], Rates({"usd": None}), b"\xcb\x7f\xf0 null", ["\x7f\xff", None]],
    ids=str,
)
def test_a_value_that_has_a_null_of_its_own_passes(value: Any) -> None:
    check_finite("it", value, msgspec.json.encode(value))


@pytest.mark.parametrize("state", [Rates({"usd": math.nan}), Rates(last=math.inf)], ids=str)
def test_a_state_with_a_lost_number_is_refused(state: Rates) -> None:
    app = App("lab", stream="LAB", subjects=["measured.>"])

    @app.projection("rates", events=[Measured], bucket="rates")
    class ByProjection:
        def key(self, event: Measured) -> str:
            return event.sensor

        def apply(self, known: Rates | None, event: Measured) -> Rates:
            return state

    spec = app.projections["rates"]
    with pytest.raises(ValueError, match="which JSON has no number for"):
        spec.fold("s1", None, Measured(sensor="s1"))
    with pytest.raises(InvalidEvent, match="which JSON has no number for"):
        app.entities("sensors", state=Rates).encode(state)


def test_a_workflow_state_with_a_lost_number_is_refused() -> None:
    app = App("lab", stream="LAB", subjects=["measured.>"])

    @app.workflow("watching", key="sensor")
    class Watching:
        def react(self, state: Rates | None, event: Measured) -> Decision | None:
            return Decision(state=Rates(last=math.nan))

    spec = app.workflows["watching"]
    with pytest.raises(ConfigError, match="the state has nan at last"):
        spec.step(
            None,
            Measured(sensor="s1"),
            id="1",
            sequence=1,
            time=datetime.datetime.now(datetime.UTC),
            catalogue=app.catalogue,
        )


def test_a_reply_with_a_lost_number_is_refused() -> None:
    with pytest.raises(ValueError, match="the reply has nan at rate"):
        outcome_of(0, 1, {"rate": math.nan})
    with pytest.raises(ValueError, match="nan"):
        write_reply(CommandReply(command_id="c", sequence=1, events=1, data=math.nan))


def test_a_setting_with_a_lost_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="which JSON has no number for"):
        Setting(float | None, math.nan)  # type: ignore[arg-type]
    Flag()
