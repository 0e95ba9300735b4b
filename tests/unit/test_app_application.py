"""Declaring an application."""

from __future__ import annotations

import datetime
import math
import typing
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from jetspark.app import App, Breaker, Retry, RetryIn
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
        {"max_bytes": 1},
        {"ack_wait_s": 1e-9},
        {"idempotent": "transaction"},
        {"remember_s": 1},
    ],
)
def test_a_declaration_names_the_value_it_cannot_use(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        HandlerSpec(function=bill, events=(Paid,), **({"durable": "billing"} | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"idempotent": "transactions", "bucket": "b"}, "idempotent='transactions': expected 'none' or 'transaction'"),
        ({"retry": 5}, "retry=5: expected a Retry"),
        ({"retry": None}, "retry=None: expected a Retry"),
        ({"breaker": True}, "breaker=True: expected a Breaker, or None for none"),
        ({"dead_letter": "no"}, "dead_letter='no': expected True or False"),
        ({"in_order": None}, "in_order=None: expected True or False"),
        ({"filtered": 1}, "filtered=1: expected True or False"),
        ({"key": 3}, "key=3: expected the name of a field, a function of the event"),
        ({"rate": "5"}, "rate='5': expected a number above 0, or None for no limit"),
        ({"rate": math.inf}, "rate=inf: expected a number above 0"),
        ({"rate": 5, "burst": 0}, "burst=0: expected 1 or more"),
        ({"rate": 5, "burst": 2.5}, "burst=2.5: expected a whole number"),
        ({"timeout": "30"}, "timeout='30': expected seconds above 0"),
        ({"timeout": math.inf}, "timeout=inf: expected seconds above 0"),
        ({"ack_wait_s": datetime.timedelta(seconds=3)}, "expected seconds above 0, as timedelta.total_seconds()"),
        ({"concurrency": True}, "concurrency=True: expected a whole number"),
        ({"remember_s": None}, "remember_s=None: expected seconds"),
        ({"takeover_s": math.nan}, "takeover_s=nan: expected seconds"),
        ({"partitions": 1.5}, "partitions=1.5: expected a whole number, 1 to 256, or None for none"),
        ({"bucket": 5}, "bucket=5: expected the name of a bucket"),
        ({"events": (Paid, "paid")}, "event='paid': expected a type of event"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_option_of_a_handler_that_is_none_is_told_when_it_is_declared(wrong: dict[str, Any], expected: str) -> None:
    fields: dict[str, Any] = {"function": bill, "events": (Paid,), "durable": "billing"}
    with pytest.raises(ConfigError) as raised:
        HandlerSpec(**(fields | wrong))
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Retry(transient=ConnectionError), "transient=<class 'ConnectionError'>: expected a tuple of types"),  # type: ignore[arg-type]
        (lambda: Retry(final=(int,)), "final=(<class 'int'>,): expected a tuple of types of exceptions"),  # type: ignore[arg-type]
        (lambda: Retry(attempts=2.5), "attempts=2.5: expected a whole number"),  # type: ignore[arg-type]
        (lambda: Retry(first_s="1"), "first_s='1': expected seconds"),  # type: ignore[arg-type]
        (lambda: Retry(jitter=None), "jitter=None: expected a number from 0 to 1"),  # type: ignore[arg-type]
        (lambda: Breaker(open_s="1"), "open_s='1': expected seconds above 0"),  # type: ignore[arg-type]
        (lambda: RetryIn("5"), "RetryIn seconds='5': expected seconds"),  # type: ignore[arg-type]
        (lambda: App("a", stream="S", subjects="orders.>"), "subjects='orders.>': expected a list of subjects"),
        (lambda: App("a", stream=5), "stream=5: expected a StreamConfig"),  # type: ignore[arg-type]
        (lambda: App("a", stream="S", events=Paid), "expected a list of types of events"),  # type: ignore[arg-type]
        (lambda: App("a", stream="S", buckets="prices"), "buckets='prices': expected a list of KVConfig or names"),
        (lambda: App("a", stream="S", timers="yes"), "timers='yes': expected True or False"),  # type: ignore[arg-type]
        (lambda: App("a", stream="S", version=1), "version=1: expected a str"),  # type: ignore[arg-type]
        (lambda: App("a", stream="S", source=5), "source=5: expected a str"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_of_another_type_is_told_with_what_is_expected(make: Callable[[], Any], expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert expected in str(raised.value)


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
