"""What a handler is given besides its event."""

from __future__ import annotations

import datetime
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from jetspark.app import App, Catalogue, Context, Event, decode, encode
from jetspark.app.handlers.context import Dependencies, HandlerSurroundings, open_lifespans, plan_arguments
from jetspark.app.handlers.lanes import Tries, WorkItem
from jetspark.errors import ConfigError

NOW = datetime.datetime(2026, 3, 31, 10, 15, 30, tzinfo=datetime.UTC)


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str


class Bank: ...


class SlowBank(Bank): ...


def plan(function: Any, *objects: Any) -> tuple[bool, dict[str, Any]]:
    return plan_arguments(function, "billing", Dependencies(objects))


def context(event_id: str = "evt-1") -> Context:
    encoded = encode(Paid(order_id="o-1"), id=event_id, source="/shop", time=NOW)
    surroundings = HandlerSurroundings(
        app="shop",
        handler="billing",
        source="/shop",
        stream="ORDERS",
        js=None,  # type: ignore[arg-type]
        once=None,
        clock=lambda: NOW,
        log=logging.getLogger("test"),
    )
    decoded = decode(encoded.subject, encoded.data, encoded.headers, Catalogue(Paid))
    return Context(decoded, WorkItem("o-1", 7, tries=Tries(attempts=2)), surroundings)


def test_arguments_are_found_by_type() -> None:
    bank = SlowBank()

    async def handler(event: Paid, bank: Bank, ctx: Context, limit: int = 3) -> None: ...

    assert plan(handler, bank, "text") == (True, {"bank": bank, "ctx": Context})

    async def plain(event: Paid) -> None: ...

    assert plan(plain) == (False, {})


def test_types_that_only_exist_inside_a_function_are_found_by_name() -> None:
    class Local: ...

    local = Local()

    async def handler(event: Paid, local: Local, ctx: Context) -> None: ...

    assert plan(handler, local) == (True, {"local": local, "ctx": Context})


def test_what_nobody_has_is_an_error_that_says_what_there_is() -> None:
    async def handler(event: Paid, bank: Bank) -> None: ...

    with pytest.raises(ConfigError, match="expected one Bank from the lifespan, found 0; it yielded nothing"):
        plan(handler)
    with pytest.raises(ConfigError, match="found 2; it yielded Bank, SlowBank"):
        plan(handler, Bank(), SlowBank())

    async def untyped(event, bank): ...  # type: ignore[no-untyped-def]

    with pytest.raises(ConfigError, match="'bank' needs a type annotation"):
        plan(untyped)


async def test_lifespans_end_last_one_first_also_after_an_error() -> None:
    app, seen = App("orders", stream="ORDERS"), []

    @app.lifespan
    async def first() -> AsyncIterator[Any]:
        yield 1, "two"
        seen.append("first")

    @app.lifespan
    async def second() -> AsyncIterator[Any]:
        yield 3.0
        seen.append("second")

    async def fail() -> None:
        async with open_lifespans(app.spec.lifespans) as dependencies:
            assert dependencies.find(str, "h", "p") == "two"
            assert dependencies.find("float", "h", "p") == 3.0
            raise OSError("away")

    with pytest.raises(OSError, match="away"):
        await fail()
    assert seen == ["second", "first"]

    async def twice() -> AsyncIterator[Any]:
        yield 1
        yield 2

    with pytest.raises(ConfigError, match="expected one yield"):
        async with open_lifespans([twice]):
            pass

    async def never() -> AsyncIterator[Any]:
        if seen == []:
            yield 1

    with pytest.raises(ConfigError, match="lifespan 'never': expected one yield, and it ended without"):
        async with open_lifespans([never]):
            pass


def test_ids_follow_from_the_event() -> None:
    one, again, other = context(), context(), context("evt-2")
    ids = [one.new_id(), one.new_id()]
    assert [again.new_id(), again.new_id()] == ids
    assert len({*ids, other.new_id()}) == 3
    assert one.idempotency_key("charge") == again.idempotency_key("charge") != one.idempotency_key("ship")
    assert (one.now(), one.event_id, one.correlation_id, one.is_redrive) == (NOW, "evt-1", "evt-1", False)


def test_log_records_say_which_event_they_are_about() -> None:
    assert context().log.extra == {
        "handler": "billing",
        "event_id": "evt-1",
        "event_type": "order.paid",
        "key": "o-1",
        "stream": "ORDERS",
        "sequence": 7,
        "attempt": 2,
        "correlation_id": "evt-1",
    }


async def test_a_context_says_what_its_handler_was_not_declared_for() -> None:
    with pytest.raises(ConfigError, match='declare the handler with idempotent="transaction"'):
        context().tx  # noqa: B018
    with pytest.raises(ConfigError, match="no records"):
        await context().once("x", None)  # type: ignore[call-overload]
