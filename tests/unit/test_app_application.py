"""Declaring an application."""

from __future__ import annotations

import datetime
import functools
import math
import operator
import typing
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pydantic
import pytest

from jetspark.app import App, Breaker, Context, Decision, Event, Retry, RetryIn, event
from jetspark.app.handlers.handler_spec import BatchHandlerOptions, HandlerOptions, HandlerSpec
from jetspark.app.topology.names import escape_token
from jetspark.errors import ConfigError


class Paid(Event, type="order.paid", key="order_id", subject="orders.paid.{order_id}"):
    order_id: str
    lines: list[str] = []
    cents: int = 0


class Shipped(Event, type="order.shipped", key="parcel", subject="orders.shipped.{parcel}"):
    parcel: str


@event(type="order.seen", subject="orders.seen")
class Seen(pydantic.BaseModel, frozen=True):
    page: str


async def bill(event: Paid) -> None: ...


def test_an_app_collects_its_handlers() -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])
    assert app.handler(Paid, durable="billing", concurrency=3)(bill) is bill
    spec = app.handlers["billing"]
    assert (spec.function, spec.events, spec.concurrency) == (bill, (Paid,), 3)
    assert (app.source, app.spec.dead_letter_stream, app.spec.retry_stream) == ("/orders", "ORDERS_DLQ", "ORDERS_RETRY")


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
        ({"events": (Paid, int)}, "int is not an event type"),
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


def _one(event: Any) -> str:
    return "one"


async def _async_key(event: Any) -> str:
    return "one"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("nope", "key='nope': Paid has no such field; its fields are order_id, lines, cents. Without key= it is the"),
        ("", "key='': Paid has no such field; its fields are"),
        (
            "{order_id}.{cents}",
            "expected the name of a field, or a function such as key=lambda event: f'{event.",
        ),
        ("lines", "key='lines': Paid.lines is a list; expected a field of one value"),
        (lambda: "x", "key=<lambda>(): expected a function that is called with the event alone"),
        (lambda event, ctx: "x", "key=<lambda>(event, ctx): expected a function that is called with the event alone"),
        (_async_key, "key=_async_key: expected a plain function, and it is async"),
        (3, "key=3: expected the name of a field, a function of the event"),
        (["order_id"], "key=['order_id']: expected the name of a field, a function of the event"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_key_that_no_event_has_is_refused_when_it_is_declared(key: Any, expected: str) -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])
    with pytest.raises(ConfigError) as raised:
        app.handler(Paid, durable="billing", key=key)(bill)
    assert "handler 'billing': key=" in str(raised.value)
    assert expected in str(raised.value)
    with pytest.raises(ConfigError) as raised:

        @app.workflow("billing", key=key)
        class Billing:
            def react(self, state: int | None, event: Paid) -> Decision | None: ...

    assert "workflow 'billing': key=" in str(raised.value)
    assert expected in str(raised.value)


def test_a_key_has_to_be_a_field_of_every_event() -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])

    async def handle(event: Paid | Shipped | Seen) -> None: ...

    with pytest.raises(ConfigError, match="key='order_id': Shipped has no such field; its fields are parcel"):
        app.handler(Paid, Shipped, durable="both", key="order_id")(handle)
    with pytest.raises(ConfigError, match="key='parcel': Seen has no such field; its fields are page"):
        app.handler(Shipped, Seen, durable="both", key="parcel")(handle)


@pytest.mark.parametrize(
    "key",
    ["order_id", "cents", None, _one, operator.attrgetter("order_id"), str],
    ids=["text", "int", "own", "def", "getter", "type"],
)
def test_a_key_that_every_event_has_is_taken(key: Any) -> None:
    App("orders", stream="ORDERS", subjects=["orders.>"]).handler(Paid, durable="billing", key=key)(bill)


class Bank: ...


async def _no_event() -> None: ...


async def _event_by_name(*, event: Paid) -> None: ...


async def _context_first(ctx: Context, event: Paid) -> None: ...


async def _another_event(event: Shipped) -> None: ...


async def _no_class(event: Paid, bank: Bank | None) -> None: ...


async def _untyped(event: Paid, bank) -> None: ...  # type: ignore[no-untyped-def]


async def _anything(event: Paid, **more: Any) -> None: ...


async def _by_place(event: Paid, bank: Bank, /) -> None: ...


async def _number(event: Paid) -> int:
    return 1


async def _text_or_nothing(event: Paid) -> str | None:
    return event.order_id


async def _lists(event: Paid) -> list[list[Shipped]]:
    return [[]]


async def _generator(event: Paid) -> Iterator[Shipped]:
    return iter(())


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_one, "expected an async function"),
        (_no_event, "expected the event as its first parameter"),
        (_event_by_name, "expected the event as its first parameter"),
        (_context_first, "its first parameter is `ctx: Context`: expected `ctx: Paid`"),
        (_another_event, "its first parameter is `event: Shipped`: expected `event: Paid`"),
        (_no_class, "parameter 'bank' is annotated tests.unit.test_app_application.Bank | None: expected a class"),
        (_untyped, "parameter 'bank' needs a type annotation"),
        (_anything, "parameter '**more': expected one parameter for each object it needs"),
        (_by_place, "parameter 'bank' is positional-only: it is given by its name"),
        (_number, "it returns `int`: expected an event, a list of events, or None"),
        (_text_or_nothing, "it returns `str`: expected"),
        (_lists, "it returns `list[list["),
        (_generator, "it returns `collections.abc.Iterator["),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_function_that_cannot_be_called_is_refused_when_it_is_declared(function: Any, expected: str) -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])
    with pytest.raises(ConfigError) as raised:
        app.handler(Paid, durable="billing")(function)
    assert str(raised.value).startswith("handler 'billing': ")
    assert expected in str(raised.value)


def test_a_function_for_some_of_the_events_is_refused() -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])
    with pytest.raises(ConfigError, match=r"is `event: Paid`: expected `event: Paid | Shipped`"):
        app.handler(Paid, Shipped, durable="both")(bill)


async def _events(events: list[Paid]) -> None: ...


async def _events_and_context(events: list[Paid], ctx: Context) -> None: ...


async def _other_events(events: list[Shipped]) -> None: ...


async def _one_number(events: int) -> None: ...


async def _sequence(events: Sequence[Paid | Shipped] | None) -> None: ...


async def _all(events: tuple[Event, ...] | list[Event]) -> None: ...


async def _anything_at_all(events: Any) -> None: ...


async def _list_of_anything(events: list[Any]) -> None: ...


async def _bare_list(events: list) -> None: ...  # type: ignore[type-arg]


def test_a_batch_handler_takes_a_list_of_its_events() -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])
    with pytest.raises(ConfigError, match=r"Shipped\]`: expected `events: list\[Paid\]`"):
        app.batch_handler(Paid, durable="report")(_other_events)
    with pytest.raises(ConfigError, match=r"is `events: int`: expected `events: list\[Paid\]`"):
        app.batch_handler(Paid, durable="report")(_one_number)
    functions: list[Any] = [_sequence, _all, _bare_list, _anything_at_all, _list_of_anything]
    for number, function in enumerate(functions):
        app.batch_handler(Paid, durable=f"report{number}")(function)


def test_a_batch_handler_takes_a_list_and_no_context() -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])
    with pytest.raises(ConfigError, match=r"is `event: Paid`: expected `event: list\[Paid\]`"):
        app.batch_handler(Paid, durable="report")(bill)
    with pytest.raises(ConfigError, match="a batch handler has no context, since its events have no one cause: 'ctx'"):
        app.batch_handler(Paid, durable="report")(_events_and_context)
    app.batch_handler(Paid, durable="report")(_events)


def test_a_function_is_taken_whose_types_cannot_be_looked_up_or_allow_more() -> None:
    class Local: ...

    app = App("orders", stream="ORDERS", subjects=["orders.>"])

    async def local(event: Paid, local: Local, limit: int = 3) -> None: ...

    async def any_event(event: Event) -> None: ...

    async def anything(event: Any, ctx: Context) -> None: ...

    async def untyped(event): ...  # type: ignore[no-untyped-def]

    async def many(*event: Paid) -> None: ...

    class Service:
        async def handle(self, event: Paid) -> None: ...

    functions: list[Any] = [local, any_event, anything, untyped, many, Service().handle, functools.partial(local)]
    for number, function in enumerate(functions):
        app.handler(Paid, durable=f"h{number}")(function)


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
        app.handler(Paid, durable="billing")(lambda event: None)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="yields once"):
        app.lifespan(bill)  # type: ignore[type-var]

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
