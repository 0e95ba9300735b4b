"""What `jetspark check` says of functions that come to another result the next time."""

from __future__ import annotations

import datetime
import functools
import os
import random
import secrets
import tempfile
import time
import uuid
from datetime import datetime as moment
from os import urandom
from random import choice
from time import monotonic
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from support import stamping

from jetspark.app import App, Command, Decision, Event, Past, upcast
from jetspark.app.checks.lints import lint_apps
from jetspark.app.checks.purity import impure_names

CHANCE = random.Random(5)
EVENT_META: Any = type(Event)


class Paid(Event, type="order.paid", version=2, key="order_id", subject="orders.paid.{order_id}"):
    order_id: str
    stamp: float = 0.0


@upcast(Paid, from_version=1)
def from_1(old: dict[str, Any]) -> dict[str, Any]:
    return {**old, "stamp": time.time()}


def helper() -> str:
    return uuid4().hex


def imports_a_module(state: Any, event: Any) -> Any:
    import time as clock

    return clock.time()


def imports_a_function(state: Any, event: Any) -> Any:
    from uuid import NAMESPACE_URL, uuid4

    return [uuid4() for _ in range(event)] if event else NAMESPACE_URL


def imports_a_submodule(state: Any, event: Any) -> Any:
    import support.stamping as stamping

    return stamping.stamp()


def imports_a_helper(state: Any, event: Any) -> Any:
    from support.stamping import stamp

    return stamp()


def imports_nothing(state: Any, event: Any) -> Any:
    import not_installed  # type: ignore[import-not-found]
    from support import not_there  # type: ignore[attr-defined]

    return not_installed.now(), not_there()


def enclosed(module: Any, function: Any) -> list[Any]:
    return [lambda state, event: module.time(), lambda state, event: [function() for _ in event]]


def logged(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return sorted(function(*args))

    return wrapper


@functools.lru_cache
def cached() -> str:
    return uuid4().hex


class Stamps:
    @staticmethod
    def new() -> float:
        return time.time()

    @classmethod
    def newest(cls) -> float:
        return max(cls.new() for _ in range(2))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda state, event: time.time(), "time.time"),
        (lambda state, event: monotonic(), "monotonic"),
        (lambda state, event: datetime.datetime.now(datetime.UTC), "datetime.datetime.now"),
        (lambda state, event: moment.utcnow(), "moment.utcnow"),
        (lambda state, event: datetime.date.today(), "datetime.date.today"),
        (lambda state, event: random.random(), "random.random"),
        (lambda state, event: choice([1, 2]), "choice"),
        (lambda state, event: CHANCE.random(), "CHANCE.random"),
        (lambda state, event: secrets.token_hex(), "secrets.token_hex"),
        (lambda state, event: uuid.uuid4(), "uuid.uuid4"),
        (lambda state, event: os.urandom(4), "os.urandom"),
        (lambda state, event: os.environ["REGION"], "os.environ"),
        (lambda state, event: [helper() for _ in range(event)], "uuid4"),
        (lambda state, event: urandom(event), "urandom"),
        (imports_a_module, "clock.time"),
        (imports_a_function, "uuid4"),
        (imports_a_helper, "datetime.now"),
        (imports_a_submodule, "datetime.now"),
        (lambda state, event: stamping.stamp(), "datetime.now"),
        (lambda state, event: stamping.stamped_twice(), "datetime.now"),
        (enclosed(time, helper)[0], "module.time"),
        (enclosed(time, helper)[1], "uuid4"),
        (logged(lambda state, event: time.time()), "time.time"),
        (functools.partial(lambda state, event, zone: time.time(), zone="UTC"), "time.time"),
        (lambda state, event: cached(), "uuid4"),
        (lambda state, event: Stamps.newest(), "time.time"),
        (lambda state, event: moment.fromtimestamp(max(event.at, 0)), "moment.fromtimestamp without a time zone"),
        (lambda state, event: datetime.date.fromtimestamp(event.at), "datetime.date.fromtimestamp"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_clock_or_chance_is_found(function: Any, name: str) -> None:
    assert name in impure_names(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda state, event: event.time.now,
        lambda state, event: datetime.datetime.fromisoformat(event.at) + datetime.timedelta(days=1),
        lambda state, event: uuid.uuid5(uuid.NAMESPACE_URL, event.id),
        lambda state, event: UUID(event.id),
        lambda state, event: os.path.basename(event.name),
        lambda state, event: time.strftime("%H", event.at),
        lambda state, event: event.random.choice + state.time(),
        lambda state, event: moment.fromtimestamp(float(event.at), datetime.UTC),
        lambda state, event: moment.fromtimestamp(max(event.at, 0), tz=datetime.UTC),
        lambda state, event: stamping.plus(event.at, 1),
        lambda state, event: tempfile.mkdtemp() and msgspec.json.encode(event),
        enclosed(None, len)[0],
        logged(lambda state, event: state),
        imports_nothing,
        len,
    ],
)
def test_what_follows_from_the_event_is_not(function: Any) -> None:
    assert impure_names(function) == []


def test_a_module_of_the_application_may_have_the_name_of_one_of_python_s() -> None:
    module: dict[str, Any] = {"__name__": "statistics", "random": random}
    code = "def draw():\n    return random.random()\n\ndef apply(state, event):\n    return draw()\n"
    exec(compile(code, "/srv/shop/statistics.py", "exec"), module)
    assert impure_names(module["apply"]) == ["random.random"]


def test_check_names_each_function_that_is_run_again() -> None:
    app = App("shop", stream="SHOP", subjects=["orders.>"], events=[Paid])

    @app.projection("totals", events=[Paid], bucket="totals")
    class Totals:
        def key(self, event: Paid) -> str:
            return event.order_id

        def apply(self, state: int | None, event: Paid) -> int:
            return self.later(state or 0)

        def later(self, state: int) -> int:
            return state + int(time.time()) if state else self.later(state)

    @app.workflow("ordering", key="order_id")
    class Ordering:
        def react(self, state: Any, event: Paid) -> Decision | None:
            return Decision(state={"at": datetime.datetime.now(datetime.UTC)})

    @app.command("orders.pay")
    class Pay(Command):
        order_id: str

        def reads(self) -> list[str]:
            return [f"orders.*.{self.order_id}"]

        def decide(self, past: Past) -> list[Paid]:
            return [Paid(order_id=random.choice(["a", "b"]))]

    found = {
        (lint.level, lint.where, lint.reason.partition(":")[0]) for lint in lint_apps([app]) if lint.rule == "impure"
    }
    assert found == {
        ("warning", "projection totals", "apply uses time.time"),
        ("warning", "workflow ordering", "react uses datetime.datetime.now"),
        ("warning", "command orders.pay", "decide uses random.choice"),
        ("warning", "event order.paid", "the upcast from version 1 uses time.time"),
    }


@pytest.mark.parametrize(
    ("subject", "better"),
    [
        ("orders.{order_id}.made", "orders.made.{order_id}"),
        ("{order_id}.orders.made", "orders.made.{order_id}"),
        ("a.{order_id}.{line}.made", "a.made.{order_id}.{line}"),
        ("orders.made.{order_id}", None),
        ("orders.{order_id}.{line}", None),
        ("orders.made", None),
    ],
)
def test_check_warns_of_a_key_in_the_middle_of_a_subject(subject: str, better: str | None) -> None:
    namespace = {"__annotations__": {"order_id": str, "line": int}, "__module__": __name__}
    kind = EVENT_META("Made", (Event,), namespace, type="order.made", key="order_id", subject=subject)
    found = [lint for lint in lint_apps([App("shop", stream="SHOP", events=[kind])]) if lint.rule == "key_in_middle"]
    assert [lint.level for lint in found] == ["warning"] * (better is not None)
    assert better is None or f"by '{better}'" in found[0].reason


def test_check_does_not_warn_of_the_subjects_of_workflows() -> None:
    from support.reserving import reserving

    assert not [lint for lint in lint_apps([reserving()]) if lint.where.startswith("event reserving.command")]
