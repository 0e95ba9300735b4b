"""Declaring an application."""

from __future__ import annotations

import typing
from collections.abc import AsyncIterator

import pytest

from jetspark.app import App
from jetspark.app.application import BatchHandlerOptions, HandlerOptions, HandlerSpec
from jetspark.app.topology.names import escape_token
from jetspark.errors import ConfigError


class Paid: ...


async def bill(event: Paid) -> None: ...


def test_an_app_collects_its_handlers() -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])
    assert app.handler(Paid, durable="billing", concurrency=3)(bill) is bill
    spec = app.handlers["billing"]
    assert (spec.function, spec.events, spec.concurrency) == (bill, (Paid,), 3)
    assert (app.source, app.dead_letter_stream, app.retry_stream) == ("/orders", "ORDERS_DLQ", "ORDERS_RETRY")


@pytest.mark.parametrize(
    "wrong",
    [
        {"durable": "a.b"},
        {"concurrency": 0},
        {"rate": 0},
        {"timeout": 0},
        {"max_messages": 0},
        {"max_messages": 1},
        {"batch": 10, "max_messages": 5},
        {"batch": 10, "batch_wait_s": -1},
        {"batch": 10},
        {"max_bytes": 0},
        {"idempotent": "transaction"},
        {"remember_s": 1},
    ],
)
def test_a_declaration_names_the_value_it_cannot_use(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        HandlerSpec(function=bill, events=(Paid,), **({"durable": "billing"} | wrong))  # type: ignore[arg-type]


def test_a_durable_name_belongs_to_one_handler() -> None:
    app = App("orders", stream="ORDERS")
    app.handler(Paid, durable="billing")(bill)
    with pytest.raises(ConfigError, match="another handler has it"):
        app.handler(Paid, durable="billing")(bill)
    with pytest.raises(ConfigError, match="at least one event type"):
        app.handler(durable="nothing")(bill)


def test_a_handler_is_async_and_a_lifespan_yields() -> None:
    app = App("orders", stream="ORDERS")
    with pytest.raises(ConfigError, match="async function"):
        app.handler(Paid, durable="billing")(lambda event: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="yields once"):
        app.lifespan(bill)  # type: ignore[arg-type]

    async def resources() -> AsyncIterator[object]:
        yield object()

    assert app.lifespan(resources) is resources


def test_any_text_is_one_token_of_a_subject() -> None:
    assert escape_token("o-1_A") == "o-1_A"
    assert escape_token("a.b *>é") == "a=2Eb=20=2A=3E=C3=A9"
    assert escape_token("") == "="
    assert len({escape_token(text) for text in ("a=2E", "a.", "a=", "x" * 121, "x" * 122)}) == 5
    assert len(escape_token("x" * 1000)) < 120


def test_an_option_that_there_is_not_is_refused_with_those_there_are() -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])
    with pytest.raises(ConfigError, match=r"handler 'billing': concurency: expected some of ack_wait_s, .*concurrency"):
        app.handler(Paid, durable="billing", concurency=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"handler 'report': in_order: expected some of"):
        app.batch_handler(Paid, durable="report", in_order=True)  # type: ignore[call-arg]


def test_the_options_of_handlers_are_the_fields_of_their_declaration() -> None:
    declared = typing.get_type_hints(HandlerSpec)
    options = typing.get_type_hints(HandlerOptions)
    assert options == {name: declared[name] for name in options}
    assert declared.keys() - options.keys() == {"function", "events", "durable", "batch", "batch_wait_s"}
    for_batches = typing.get_type_hints(BatchHandlerOptions)
    assert for_batches == {name: declared[name] for name in for_batches}
