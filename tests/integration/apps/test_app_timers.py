"""Timers on a real server: they fire once, late by a moment and never early, whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
import datetime
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.apps import running, until
from support.cluster import apply_on_new_cluster
from support.reminding import ENDS, LATE, do_at_that_moment, reminding, set_timer

import jetspark
from jetspark import StreamConfig
from jetspark.app import App, AppClient, Context, Event, Reject, Retry, RetryIn, Timers
from jetspark.app.dead_letters.redriving import DeadLetterFilter, run_redrive
from jetspark.errors import ConfigError, TopologyDrift
from jetspark.server import NatsCluster, NatsServer


class Placed(Event, type="order.placed", key="order_id", subject="orders.{order_id}.placed"):
    order_id: str


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str


class Overdue(Event, type="order.overdue", key="order_id", subject="orders.{order_id}.overdue"):
    order_id: str


def shop(*, timers: bool = True) -> App:
    return App("shop", stream="ORDERS", subjects=["orders.>"], events=[Placed, Paid, Overdue], timers=timers)


async def stored(js: jetspark.JetStream, subject: str) -> int:
    info = await (await js.stream("ORDERS")).info(subjects_filter=subject)
    return sum((info.state.subjects or {}).values())


async def test_a_timer_publishes_its_event_when_it_is_due_and_not_before(nats_url: str) -> None:
    app = shop()
    await app.apply(nats_url)
    async with app.connect(nats_url) as orders:
        due = await orders.timers.set("overdue o-1", Overdue(order_id="o-1"), after=0.5)
        timer = await orders.timers.get("overdue o-1")
        assert timer is not None
        assert (timer.name, timer.due, timer.target) == ("overdue o-1", due, "orders.o-1.overdue")
        assert [each.name async for each in orders.timers.list()] == ["overdue o-1"]
        stream = await orders.js.stream("ORDERS")

        async def has_fired() -> bool:
            return await stored(orders.js, "orders.o-1.overdue") == 1

        await until(has_fired)
        fired = await stream.get_message(last_for="orders.o-1.overdue")
        assert due is not None
        assert fired.timestamp >= due
        assert b'"time":"' + due.isoformat().replace("+00:00", "Z").encode() in fired.data
        assert await orders.timers.get("overdue o-1") is None
        assert [each async for each in orders.timers.list()] == []
        assert not await orders.timers.cancel("overdue o-1")


@pytest.mark.parametrize("name", ["x" * 121, "ご注文のお支払いをお願いいたします", "a b\n" * 100])
async def test_a_timer_with_a_long_name_is_known_by_it(nats_url: str, name: str) -> None:
    app = shop()
    fired: list[str] = []

    @app.handler(Overdue, durable="noting")
    async def note(event: Overdue, ctx: Context) -> None:
        assert ctx.timer is not None
        fired.append(ctx.timer.name)
        assert await ctx.is_current_timer()

    await app.apply(nats_url)
    async with app.connect(nats_url) as orders, running(app, nats_url):
        await orders.timers.set(name, Overdue(order_id="later"), after=3600)
        timer = await orders.timers.get(name)
        assert timer is not None
        [listed] = [each async for each in orders.timers.list()]
        assert (timer.name, listed.name) == (name, name)
        assert await orders.timers.cancel(listed.name)
        assert await orders.timers.get(name) is None
        await orders.timers.set(name, Overdue(order_id="now"), after=0)
        await until(lambda: fired)
    assert fired == [name]


async def test_the_first_moment_of_all_is_at_once_and_the_last_one_is_not_now(nats_url: str) -> None:
    """The server knows 1678 to 2262: outside of that it fires never, and at once."""
    app = shop()
    await app.apply(nats_url)
    async with app.connect(nats_url) as orders:
        last = datetime.datetime(2262, 4, 11, 23, 47, 16, tzinfo=datetime.UTC)
        await orders.timers.set("last", Overdue(order_id="last"), at=last)
        with pytest.raises(ConfigError, match="up to 2262-04-11"):
            await orders.timers.set("later", Overdue(order_id="later"), at=last + datetime.timedelta(seconds=1))
        await orders.timers.set("first", Overdue(order_id="first"), at=datetime.datetime(1, 1, 1, tzinfo=datetime.UTC))

        async def has_fired() -> bool:
            return await stored(orders.js, "orders.first.overdue") == 1

        await until(has_fired)
        assert await stored(orders.js, "orders.*.overdue") == 1
        assert [each.name async for each in orders.timers.list()] == ["last"]


async def test_what_makes_a_timer_needless_ends_it_in_the_same_step(nats_url: str) -> None:
    app = shop()
    await app.apply(nats_url)
    async with app.connect(nats_url) as orders:
        await orders.timers.set("overdue o-1", Overdue(order_id="o-1"), after=3600)
        await orders.timers.set("overdue o-2", Overdue(order_id="o-2"), after=3600)
        await orders.publish(Paid(order_id="o-1"), cancels="overdue o-1")
        assert await orders.timers.get("overdue o-1") is None
        assert await orders.timers.get("overdue o-2") is not None
        await orders.publish(Paid(order_id="o-3"), cancels="never set")
        assert await stored(orders.js, "orders.*.paid") == 2
        assert await orders.timers.cancel("overdue o-2")
        assert not await orders.timers.cancel("overdue o-2")


@pytest.mark.parametrize(("happens", "counted"), LATE.values(), ids=LATE)
async def test_a_late_event_of_a_timer_counts_only_if_nothing_has_ended_it(
    nats_url: str, happens: Callable[[AppClient], Awaitable[None]], counted: list[tuple[int, bool]]
) -> None:
    seen: list[tuple[int, bool]] = []
    app = reminding(seen)
    await app.apply(nats_url)
    async with app.connect(nats_url) as orders:
        await set_timer(orders, 1, after=0.0)

        async def has_fired() -> bool:
            return await stored(orders.js, "orders.o-1") == 1

        await until(has_fired)
        await happens(orders)
        async with running(app, nats_url):  # only now
            await until(lambda: len(seen) == len(counted))
    assert seen == counted


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
async def test_an_event_that_is_stored_behind_the_end_of_its_timer_does_not_count(
    nats_url: str, ends: Callable[[AppClient], Awaitable[object]]
) -> None:
    seen: list[tuple[int, bool]] = []
    app = reminding(seen)
    await app.apply(nats_url)
    async with app.connect(nats_url) as orders, running(app, nats_url):
        await set_timer(orders, 1, after=30.0)
        await do_at_that_moment(orders, ends)
        await until(lambda: len(seen) == 1)
        await set_timer(orders, 3, after=0.0)
        await until(lambda: len(seen) == 2)
    assert seen == [(1, False), (3, True)]


async def test_an_event_that_is_stored_behind_a_new_setting_of_its_timer_counts_for_it(nats_url: str) -> None:
    """It has removed that."""
    seen: list[tuple[int, bool]] = []
    app = reminding(seen)
    await app.apply(nats_url)
    async with app.connect(nats_url) as orders, running(app, nats_url):
        await set_timer(orders, 1, after=30.0)
        await do_at_that_moment(orders, lambda orders: set_timer(orders, 2))
        await until(lambda: len(seen) == 1)
        assert [each async for each in orders.timers.list()] == []
    assert seen == [(1, True)]


@pytest.mark.parametrize("ends_by", ["publish", "cancel"])
async def test_no_timer_counts_that_was_ended_at_about_the_time_it_fired(nats_url: str, ends_by: str) -> None:
    """Many that are due at once, and each is ended at about that time: the server stores some all the same."""
    count, counted, ended = 200, set[str](), set[str]()
    app = App("shop", stream="ORDERS", subjects=["orders.>"], events=[Paid], timers=True)
    handled = 0

    @app.handler(Overdue, durable="counting", concurrency=20)
    async def on_overdue(event: Overdue, ctx: Context) -> None:
        nonlocal handled
        if await ctx.is_current_timer():
            counted.add(event.order_id)
        handled += 1

    async def pay(orders: AppClient, number: int) -> None:
        due = await orders.timers.set(f"of {number}", Overdue(order_id=f"o-{number}"), after=1.0)
        assert due is not None
        left_s = (due - datetime.datetime.now(datetime.UTC)).total_seconds()
        await asyncio.sleep(max(0.0, left_s + number / count * 0.3 - 0.05))
        if ends_by == "publish":
            await orders.publish(Paid(order_id=f"o-{number}"), cancels=f"of {number}")
        elif await orders.timers.cancel(f"of {number}"):
            ended.add(f"o-{number}")

    await app.apply(nats_url)
    async with app.connect(nats_url) as orders:
        await asyncio.gather(*(pay(orders, number) for number in range(count)))
        await asyncio.sleep(1.0)  # what is about to be stored
        fired = await stored(orders.js, "orders.*.overdue")
        async with running(app, nats_url):  # only now: what was paid for does not count
            await until(lambda: handled >= fired)  # one may still have been on its way
    assert 0 < fired <= count
    assert counted == set()
    if ends_by == "cancel":  # True says that it was set; the others had fired
        assert fired >= count - len(ended)


async def test_a_timer_that_was_set_just_now_is_ended_though_replicas_are_behind(cluster: NatsCluster) -> None:
    """Any replica may be asked what is set: one that is behind must not have a timer go on that was to end."""
    urls = [node.url for node in cluster.nodes]
    app = App("replicated", stream=StreamConfig(name="REPLICATED", replicas=3), subjects=["orders.>"], timers=True)
    app.register(Overdue)
    await apply_on_new_cluster(app, urls)
    async with app.connect(urls) as orders:
        for number in range(100):
            await orders.timers.set("x", Overdue(order_id=f"o-{number}"), after=3600)
            assert await orders.timers.cancel("x")
        assert not await orders.timers.cancel("x")
        assert [timer async for timer in orders.timers.list()] == []


async def test_a_timer_of_the_same_name_replaces_the_one_before(nats_url: str) -> None:
    app = shop()
    await app.apply(nats_url)
    async with app.connect(nats_url) as orders:
        await orders.timers.set("x", Overdue(order_id="early"), after=3600)
        await orders.timers.set("x", Overdue(order_id="late"), after=0)

        async def has_fired() -> bool:
            return await stored(orders.js, "orders.late.overdue") == 1

        await until(has_fired)
        assert [each async for each in orders.timers.list()] == []


async def test_the_id_of_a_setting_is_that_of_its_timer_alone(nats_url: str) -> None:
    app = shop()
    await app.apply(nats_url)

    @app.register
    class Packed(Event, type="order.packed", key="order_id", subject="orders.{order_id}.packed"):
        order_id: str

        def event_id(self) -> str:
            return self.order_id

    async with app.connect(nats_url) as orders:

        async def set_reminder(name: str) -> datetime.datetime | None:
            return await orders.timers.set(name, Overdue(order_id="o-1"), after=3600, set_id="o-1")

        await orders.publish(Packed(order_id="o-1"))
        dues = {name: await set_reminder(name) for name in ("first", "second")}
        assert {timer.name: timer.due async for timer in orders.timers.list()} == dues
        # Set once more, they stay as they are, and so is what is told.
        assert {name: await set_reminder(name) for name in dues} == dues
        assert not (await orders.publish(Paid(order_id="o-1"))).duplicate
        await orders.timers.set("third", Overdue(order_id="o-2"), after=3600, set_id="o-2")
        assert not (await orders.publish(Packed(order_id="o-2"))).duplicate
        assert await orders.timers.cancel("first")
        assert await set_reminder("first") is None
        for wrong in ("", 5, b"x"):
            with pytest.raises(ConfigError, match=f"set_id={wrong!r}: expected a text"):
                await orders.timers.set("x", Overdue(order_id="x"), after=1, set_id=wrong)  # type: ignore[arg-type]


async def test_each_event_of_a_timer_that_repeats_is_another(nats_url: str) -> None:
    app, effects, enough = shop(), list[str](), asyncio.Event()

    async def count(*, idempotency_key: str) -> None:
        effects.append(idempotency_key)
        if len(effects) == 2:
            enough.set()

    @app.handler(Overdue, durable="counting")
    async def on_overdue(event: Overdue, ctx: Context) -> None:
        await ctx.once("count", count)

    await app.apply(nats_url)
    async with running(app, nats_url), app.connect(nats_url) as orders:
        await orders.timers.set("every second", Overdue(order_id="o-1"), every=1)
        async with asyncio.timeout(30):
            await enough.wait()
        assert await orders.timers.cancel("every second")
        assert len(set(effects)) == len(effects)


async def test_a_handler_that_runs_again_sets_no_second_timer(nats_url: str) -> None:
    app, runs, overdue = shop(), Counter[str](), Counter[str]()

    @app.handler(Placed, durable="reminding", retry=Retry(attempts=5, first_s=0.01, max_s=0.02))
    async def remind(event: Placed, ctx: Context) -> None:
        runs[event.order_id] += 1
        await ctx.schedule(Overdue(order_id=event.order_id), after=0.2)
        if runs[event.order_id] == 2:
            await until(lambda: overdue[event.order_id])  # it has fired before the last attempt
        if runs[event.order_id] < 3:
            raise RuntimeError("again")

    @app.handler(Overdue, durable="counting")
    async def on_overdue(event: Overdue) -> None:
        overdue[event.order_id] += 1

    await app.apply(nats_url)
    async with running(app, nats_url), app.connect(nats_url) as orders:
        await orders.publish(Placed(order_id="o-1"))

        async def is_done() -> bool:
            return runs["o-1"] == 3 and overdue["o-1"] == 1

        await until(is_done)
        assert [each async for each in orders.timers.list()] == []
        assert await stored(orders.js, "orders.o-1.overdue") == 1


async def test_an_event_of_a_timer_is_retried_and_redriven_like_any_other(nats_url: str) -> None:
    app, handled, is_mended = shop(), list[str](), False

    @app.handler(Overdue, durable="counting")
    async def on_overdue(event: Overdue) -> None:
        if is_mended:
            handled.append(event.order_id)
        elif event.order_id == "waits":
            raise RetryIn(3600)  # by way of the retry stream
        else:
            raise Reject("no")

    await app.apply(nats_url)
    async with running(app, nats_url), app.connect(nats_url) as orders:
        retries, dead_letters = await orders.js.stream("SHOP_RETRY"), await orders.js.stream("SHOP_DLQ")
        await orders.timers.set("other", Overdue(order_id="other"), after=3600)
        for name in ("waits", "rejected"):
            await orders.timers.set(name, Overdue(order_id=name), after=0)

        async def is_over() -> bool:
            return (await retries.info()).state.messages == (await dead_letters.info()).state.messages == 1

        await until(is_over)
        # What the server says of the timer in the event's headers must not be taken for an order to end it.
        assert [each.name async for each in orders.timers.list()] == ["other"]
        is_mended = True
        await run_redrive(orders.js, app, DeadLetterFilter.parse("counting", []))

        async def is_handled() -> bool:
            return handled == ["rejected"]

        await until(is_handled)


async def test_timers_survive_a_server_that_is_killed_and_those_that_were_due_fire() -> None:
    app, count = shop(), 200
    async with NatsServer() as server:
        await app.apply(server.url)
        async with app.connect(server.url) as orders:
            for number in range(count):
                after = 0.5 if number % 2 else 5.0
                await orders.timers.set(f"overdue {number}", Overdue(order_id=str(number)), after=after)
            due = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=5)
            server.kill()
            await asyncio.sleep(1.0)  # half of them fall due meanwhile
            await asyncio.to_thread(server.restart)

            async def have_fired() -> bool:
                return await stored(orders.js, "orders.*.overdue") == count

            await until(have_fired)
            assert await stored(orders.js, "timers.>") == 0
            assert datetime.datetime.now(datetime.UTC) >= due - datetime.timedelta(seconds=5)
            info = await (await orders.js.stream("ORDERS")).info(subjects_filter="orders.*.overdue")
            assert set((info.state.subjects or {}).values()) == {1}


async def test_what_the_server_does_not_understand_is_said_in_words(nats_url: str) -> None:
    app = shop()
    await app.apply(nats_url)
    async with app.connect(nats_url) as orders:
        with pytest.raises(ConfigError, match="does not understand the schedule '0 99 9"):
            await orders.timers.set("x", Overdue(order_id="o-1"), cron="0 99 9 * * *")
        with pytest.raises(ConfigError, match="time zone 'Mars/Crater'"):
            await orders.timers.set("x", Overdue(order_id="o-1"), cron="@daily", time_zone="Mars/Crater")
        assert [each async for each in orders.timers.list()] == []


LIMITS: list[tuple[str, dict[str, Any]]] = [
    ("timers", {"max_messages": 10}),
    ("timers", {"max_bytes": 10_000}),
    ("entities", {"max_messages": 10}),
    ("entities", {"max_bytes": 10_000}),
    ("entities", {"max_age_s": 3600.0}),
    ("entities", {"max_messages_per_subject": 5}),
]


@pytest.mark.parametrize(("keeps", "limit"), LIMITS, ids=[f"{keeps}-{next(iter(limit))}" for keeps, limit in LIMITS])
async def test_a_limit_that_others_give_the_stream_is_a_difference(
    nats_url: str, keeps: str, limit: dict[str, Any]
) -> None:
    """The stream would drop timers or states at its limit, and nobody would hear of it."""
    app = shop(timers=keeps == "timers")
    if keeps == "entities":
        app.entities("counts", state=int)

    @app.handler(Placed, durable="placing")
    async def place(event: Placed) -> None:
        pass

    await app.apply(nats_url)
    async with jetspark.connect(nats_url) as nc:
        stream = await nc.jetstream().stream("ORDERS")
        await stream.update(**limit)
        with pytest.raises(TopologyDrift, match=f"{next(iter(limit))}: "):
            await app.run(nats_url)
        await app.apply(nats_url)
        [found] = [getattr((await stream.info()).config, name) for name in limit]
        assert (found or 0) <= 0
        assert (await app.plan(nats_url)).is_empty


async def test_an_app_without_timers_says_how_to_have_them(nats_url: str) -> None:
    app = App("shop", stream="ORDERS", subjects=["orders.>", "timers.>"], events=[Overdue])
    await app.apply(nats_url)
    async with app.connect(nats_url) as orders:
        with pytest.raises(ConfigError, match=r"App\(..., timers=True\)"):
            await orders.timers.set("x", Overdue(order_id="o-1"), after=1)
        timers = Timers("shop", "ORDERS", orders.js, orders.encode)  # of an app that is not applied yet
        with pytest.raises(ConfigError, match=r"apply the app"):
            await timers.set("x", Overdue(order_id="o-1"), after=1)


async def test_a_handler_of_an_app_without_timers_is_told_how_to_have_them(nats_url: str) -> None:
    app, found = shop(timers=False), list[str]()

    @app.handler(Placed, durable="reminding")
    async def remind(event: Placed, ctx: Context) -> None:
        for attempt in (ctx.schedule(Overdue(order_id="o-1"), after=1), ctx.timers.cancel("x")):
            try:
                await attempt
            except ConfigError as error:
                found.append(str(error))

    await app.apply(nats_url)
    async with running(app, nats_url), app.connect(nats_url) as orders:
        await orders.publish(Placed(order_id="o-1"))
        await until(lambda: len(found) == 2)
    assert all("timers=True" in each for each in found), found
