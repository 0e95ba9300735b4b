"""Timers without a server: when they fire, what they are called, and which streams would lose them."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspark import StreamConfig
from jetspark.app import App, AppClient, Context, Event
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.contracts.envelope import decode, encode
from jetspark.app.testing import TestApp, run_handler
from jetspark.app.timers import When, timer_subject
from jetspark.core.subjects import validate_subject
from jetspark.errors import ConfigError
from jetspark.jetstream.config import StreamSource

NOW = datetime.datetime(2026, 3, 31, 10, 0, tzinfo=datetime.UTC)
HOUR = datetime.timedelta(hours=1)


class Placed(Event, type="order.placed", key="order_id", subject="orders.{order_id}.placed"):
    order_id: str


class Overdue(Event, type="order.overdue", key="order_id", subject="orders.{order_id}.overdue"):
    order_id: str


@pytest.mark.parametrize(
    ("options", "schedule"),
    [
        ({"at": NOW + HOUR}, "@at 2026-03-31T11:00:00Z"),
        ({"at": (NOW + HOUR).astimezone(datetime.timezone(HOUR))}, "@at 2026-03-31T11:00:00Z"),
        ({"at": NOW - HOUR}, "@at 2026-03-31T09:00:00Z"),
        ({"at": datetime.datetime.min.replace(tzinfo=datetime.UTC)}, "@at 1970-01-01T00:00:00Z"),
        ({"at": datetime.datetime(2262, 4, 11, 23, 47, 16, tzinfo=datetime.UTC)}, "@at 2262-04-11T23:47:16Z"),
        ({"after": 90}, "@at 2026-03-31T10:01:30Z"),
        ({"after": 0.25}, "@at 2026-03-31T10:00:00.250000Z"),
        ({"after": HOUR}, "@at 2026-03-31T11:00:00Z"),
        ({"after": 0}, "@at 2026-03-31T10:00:00Z"),
        ({"every": 1}, "@every 1s"),
        ({"every": HOUR}, "@every 3600s"),
        ({"cron": "@daily"}, "@daily"),
        ({"cron": " 0  30 9 * * MON-FRI"}, "0 30 9 * * MON-FRI"),
    ],
)
def test_a_time_is_told_to_the_server_in_its_words(options: dict[str, Any], schedule: str) -> None:
    assert When.of(NOW, **options).schedule == schedule


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "no time"),
        ({"at": NOW, "after": 1}, "at and after"),
        ({"every": 1, "cron": "@daily"}, "every and cron"),
        ({"at": datetime.datetime(2026, 1, 1)}, "with a zone"),
        ({"at": "tomorrow"}, "with a zone"),
        ({"at": datetime.datetime(2262, 4, 11, 23, 47, 17, tzinfo=datetime.UTC)}, "up to 2262-04-11"),
        ({"at": datetime.datetime.max.replace(tzinfo=datetime.timezone(-HOUR))}, "up to 2262-04-11"),
        ({"after": 1e10}, "up to a hundred years"),
        ({"after": -1}, "0 or more"),
        ({"after": float("nan")}, "0 or more"),
        ({"after": float("inf")}, "0 or more"),
        ({"after": True}, "0 or more"),
        ({"after": "5"}, "0 or more"),
        ({"every": 0}, "1 or more"),
        ({"every": 1.5}, "whole seconds"),
        ({"cron": "30 9 * * *"}, "seconds first"),
        ({"cron": "@every 5s"}, "six fields"),
        ({"cron": 5}, "six fields"),
        ({"cron": ", * * * * *"}, "at least one value"),
        ({"cron": "@daily", "time_zone": "Europe Berlin"}, "Europe/Berlin"),
        ({"after": 5, "time_zone": "Europe/Berlin"}, "cron="),
    ],
)
def test_a_time_that_is_none_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        When.of(NOW, **options)


@given(st.text(min_size=1), st.text(min_size=1))
def test_two_names_have_two_subjects(one: str, other: str) -> None:
    subjects = {validate_subject(timer_subject("shop", name)) for name in (one, other)}
    assert len(subjects) == len({one, other})


@pytest.mark.parametrize("name", ["", None, 5])
def test_a_timer_has_a_name(name: Any) -> None:
    with pytest.raises(ConfigError, match="not empty"):
        timer_subject("shop", name)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_messages": 1000},
        {"max_bytes": 1 << 20},
        {"retention": "workqueue"},
        {"retention": "interest"},
        {"discard": "new"},
        {"sources": [StreamSource(name="OTHER")]},
    ],
)
def test_a_stream_that_would_drop_timers_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"timers=True with {next(iter(fields))}"):
        App("shop", stream=StreamConfig(name="ORDERS", subjects=["orders.>"], **fields), timers=True)


def test_timers_need_a_stream_of_the_apps_own() -> None:
    with pytest.raises(ConfigError, match="expected subjects="):
        App("shop", stream="ORDERS", timers=True)


def test_what_fires_again_has_an_id_of_its_own_each_time() -> None:
    sent = encode(Overdue(order_id="o-1"), id="evt-1", source="/shop", time=NOW)

    def fired(following: str) -> tuple[str, str, datetime.datetime | None]:
        headers = {"Nats-Scheduler": "timers.shop.x", "Nats-Schedule-Next": following}
        as_bytes = b"NATS/1.0\r\n" + "".join(f"{n}: {v}\r\n" for n, v in headers.items()).encode() + b"\r\n"
        found, same = (decode(sent.subject, sent.data, each, Catalogue(Overdue)) for each in (headers, as_bytes))
        assert (found.id, found.time) == (same.id, same.time)
        return found.id, found.correlation_id, found.time

    assert fired("purge") == ("evt-1", "evt-1", NOW)
    one, other = fired("2026-03-31T10:00:01Z"), fired("2026-03-31T10:00:02Z")
    assert len({"evt-1", one[0], other[0]}) == 3
    assert one[1:] == other[1:] == ("evt-1", None)
    assert fired("2026-03-31T10:00:01Z") == one


def shop() -> App:
    app = App("shop", stream="ORDERS", subjects=["orders.>"], events=[Placed, Overdue], timers=True)

    @app.handler(Placed, durable="reminding")
    async def remind(event: Placed, ctx: Context) -> None:
        await ctx.schedule(Overdue(order_id=event.order_id), after=86_400, name=f"overdue {event.order_id}")

    @app.handler(Overdue, durable="counting")
    async def count(event: Overdue, ctx: Context) -> None:
        ctx.log.info("overdue")

    return app


async def test_a_day_passes_at_once_in_a_test() -> None:
    async with TestApp(shop()) as test:
        await test.publish(Placed(order_id="o-1"))
        await test.publish(Placed(order_id="o-2"))
        await test.settled()
        assert await test.do(lambda orders: orders.timers.cancel("overdue o-2"))
        test.advance(86_000)
        await test.settled()
        assert test.published(Overdue) == []
        test.advance(500)
        await test.settled()
        assert test.published(Overdue) == [Overdue(order_id="o-1")]


async def test_a_handler_alone_says_what_it_would_schedule() -> None:
    run = await run_handler("reminding", Placed(order_id="o-1"), app=shop())
    assert run.scheduled == [Overdue(order_id="o-1")]
    [message] = run.messages
    assert message.headers["Nats-Schedule-Target"] == "orders.o-1.overdue"
    assert message.subject == timer_subject("shop", "overdue o-1")
    assert "Nats-Msg-Id" in message.headers


async def test_a_hundred_timers_are_listed_with_a_few_requests() -> None:
    names = [f"reminder {number}" for number in range(100)]
    async with TestApp(shop()) as test:

        async def set_all(orders: AppClient) -> None:
            for name in names:
                await orders.timers.set(name, Overdue(order_id="o"), after=3600)

        async def listed(orders: AppClient) -> list[str]:
            return [timer.name async for timer in orders.timers.list()]

        await test.do(set_all)
        requests: list[str] = []
        test.network.front.watchers.append(lambda message: requests.append(message.subject))
        assert await test.do(listed) == names
        assert 0 < len([each for each in requests if each.startswith("$JS.API.")]) < 10
