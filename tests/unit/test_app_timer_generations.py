"""An event of a timer that is handled late does not count if the timer was set anew or cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock
from zoneinfo import ZoneInfo

import pytest
from support.apps import until
from support.reminding import (
    ENDS,
    LATE,
    TIMER,
    Order,
    Overdue,
    Paid,
    do_at_that_moment,
    reminding,
    reminding_by_entity,
    set_by_entity,
    set_timer,
)

from jetspark.app import App, AppClient, Context, Decision, EntityChange, Event, WorkflowRun
from jetspark.app.testing import TestApp, run_handler
from jetspark.app.timers import CLOCKS_DIFFER_S, LATER_EVENTS, REMEMBERED_S, TRIES, Timers, firing_subject
from jetspark.app.topology.names import escape_token
from jetspark.app.workflows.workflow_spec import timer_name
from jetspark.errors import ConfigError, ServerError


@pytest.mark.parametrize(("happens", "counted"), LATE.values(), ids=LATE)
async def test_a_late_event_of_a_timer_counts_only_if_nothing_has_ended_it(
    happens: Callable[[AppClient], Awaitable[None]], counted: list[tuple[int, bool]]
) -> None:
    seen: list[tuple[int, bool]] = []
    async with TestApp(reminding(seen)) as test:
        rejected = test.reject(handler="reminding")
        await test.do(lambda orders: set_timer(orders, 1, after=10.0))
        test.advance(20.0)
        await test.settled()
        assert (rejected.happened, seen) == (1, [])
        await test.do(happens)
        await test.redrive()
        await test.settled()
        assert seen == counted


@pytest.mark.parametrize(("after", "marks"), [(CLOCKS_DIFFER_S + 5.0, 0), (CLOCKS_DIFFER_S - 5.0, 1)])
async def test_a_cancel_long_before_a_timer_is_due_leaves_nothing_behind(after: float, marks: int) -> None:
    seen: list[tuple[int, bool]] = []
    async with TestApp(reminding(seen)) as test:
        for end in (lambda o: o.timers.cancel(TIMER), lambda o: o.publish(Paid(order_id="o-1"), cancels=TIMER)):
            await test.do(lambda orders: set_timer(orders, 1, after=after))
            await test.do(end)
            test.advance(2.0)  # a message ends a timer, and the server keeps each for a second
            stored = test.network.front.model.messages("ORDERS")
            assert [each.subject.rpartition(".")[2] for each in stored if "timers" in each.subject] == [
                "cancelled"
            ] * marks
        test.advance(2 * CLOCKS_DIFFER_S)
        await test.settled()
        assert seen == []


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
async def test_an_event_that_is_stored_behind_the_end_of_its_timer_does_not_count(
    ends: Callable[[AppClient], Awaitable[object]],
) -> None:
    seen: list[tuple[int, bool]] = []
    async with TestApp(reminding(seen)) as test:
        await test.do(lambda orders: set_timer(orders, 1, after=30.0))
        await test.do(lambda orders: do_at_that_moment(orders, ends))
        await test.settled()
        await test.do(lambda orders: set_timer(orders, 3, after=1.0))
        test.advance(5.0)
        await test.settled()
        assert seen == [(1, False), (3, True)]


async def test_the_mark_of_a_cancel_goes_by_itself() -> None:
    async with TestApp(reminding([])) as test:
        await test.do(lambda orders: orders.timers.cancel(TIMER))
        count = len(test.network.front.model.messages("ORDERS"))
        test.advance(REMEMBERED_S + 60.0)
        assert (count, len(test.network.front.model.messages("ORDERS"))) == (1, 0)


async def test_a_month_of_nights_passes_in_virtual_time() -> None:
    nights: list[str] = []
    app = App("shop", stream="ORDERS", subjects=["orders.>"], timers=True)

    @app.handler(Overdue, durable="reminding")
    async def remind(event: Overdue, ctx: Context) -> None:
        assert await ctx.is_current_timer()
        nights.append(ctx.now().astimezone(ZoneInfo("Europe/Berlin")).strftime("%H:%M"))

    async with TestApp(app) as test:
        due = Overdue(order_id="o-1")
        await test.do(lambda orders: orders.timers.set(TIMER, due, cron="0 30 3 * * *", time_zone="Europe/Berlin"))
        test.advance(30 * 86_400.0)
        await test.settled()
        assert nights == ["03:30"] * 30
        with pytest.raises(ConfigError, match="does not understand the schedule"):
            await test.do(lambda orders: orders.timers.set(TIMER, due, cron="0 30 24 * * *"))
        with pytest.raises(ConfigError, match="does not know the time zone"):
            await test.do(lambda orders: orders.timers.set(TIMER, due, cron="@daily", time_zone="Mars/Crater"))
        with pytest.raises(ServerError, match="not in the model"):
            await test.do(lambda orders: orders.timers.set(TIMER, due, cron="@daily", time_zone="Local"))


@pytest.mark.parametrize("schedule", [{"every": 60}, {"cron": "0 * * * * *"}])
async def test_what_a_repeated_timer_missed_comes_once_when_the_server_is_back(schedule: dict[str, Any]) -> None:
    seen: list[tuple[int, bool]] = []
    async with TestApp(reminding(seen)) as test:
        await test.do(lambda orders: orders.timers.set(TIMER, Overdue(order_id="o-1"), **schedule))
        test.advance(61.0)
        await test.settled()
        assert len(seen) == 1
        test.restart_server(600.0)
        test.advance(610.0)
        await test.settled()
        assert len(seen) == 2
        test.advance(600.0)
        await test.settled()
        assert len(seen) == 12


async def test_events_of_a_timer_that_repeats_count_while_it_is_set() -> None:
    seen: list[tuple[int, bool]] = []
    async with TestApp(reminding(seen)) as test:

        async def repeat(orders: AppClient, number: int) -> None:
            await orders.timers.set(TIMER, Overdue(order_id="o-1", number=number), every=60)

        await test.do(lambda orders: repeat(orders, 1))
        test.advance(70.0)
        await test.settled()
        assert seen == [(1, True)]
        test.reject(handler="reminding", times=1)
        test.advance(60.0)
        await test.settled()
        await test.do(lambda orders: repeat(orders, 2))
        await test.redrive()
        await test.settled()
        assert seen == [(1, True), (1, False)]
        test.reject(handler="reminding", times=1)
        test.advance(70.0)
        await test.settled()
        assert await test.do(lambda orders: orders.timers.cancel(TIMER))
        await test.redrive()
        await test.settled()
        assert seen == [(1, True), (1, False), (2, False)]


async def test_what_is_behind_very_many_events_is_not_looked_for() -> None:
    """The event counts then: a timer is rather heard of too often than lost."""
    seen: list[tuple[int, bool]] = []
    async with TestApp(reminding(seen)) as test:
        test.reject(handler="reminding")
        await test.do(lambda orders: set_timer(orders, 1, after=1.0))
        test.advance(5.0)
        for _ in range(LATER_EVENTS):
            await test.publish(Paid(order_id="o-1"))
        await test.do(lambda orders: set_timer(orders, 2, after=1.0))
        test.advance(5.0)
        await test.settled()
        await test.redrive()
        await test.settled()
        assert seen == [(1, True), (2, True)]


async def test_a_timer_that_fires_while_an_event_is_about_to_end_it_does_not_count() -> None:
    """The event is guarded by the timer that was read, and comes again without one, with a mark."""
    seen: list[tuple[int, bool]] = []
    async with TestApp(reminding(seen)) as test:
        test.reject(handler="reminding")

        async def pay_at_that_moment(orders: AppClient) -> None:
            timers = orders.timers
            await set_timer(orders, 1, after=1.0)
            read = await timers._last_on(f"timers.shop.{escape_token(TIMER)}")
            await asyncio.sleep(5.0)
            answers = [read]

            async def as_it_was(subject: str, *, direct: bool = True) -> Any:
                return answers.pop() if answers else None

            with mock.patch.object(timers, "_last_on", as_it_was):
                await timers.publish_ending(TIMER, orders.encode(Paid(order_id="o-1")))

        await test.do(pay_at_that_moment)
        await test.settled()
        await test.redrive()
        await test.settled()
        assert (seen, len(test.published(Paid))) == ([(1, False)], 1)


@pytest.mark.parametrize("stale_reads", [1, 3, TRIES])
@pytest.mark.parametrize("stale", ["nothing", "an older setting"])
@pytest.mark.parametrize("ends_by", ["cancel", "publish"])
async def test_a_replica_that_is_behind_leaves_no_timer_set(ends_by: str, stale: str, stale_reads: int) -> None:
    """What is read is guarded; the last try ends what is there, whatever was read."""
    seen: list[tuple[int, bool]] = []
    async with TestApp(reminding(seen)) as test:

        async def end(orders: AppClient) -> None:
            timers, subject = orders.timers, f"timers.shop.{escape_token(TIMER)}"
            await set_timer(orders, 1, after=600.0)
            behind = await timers._last_on(subject) if stale == "an older setting" else None
            await set_timer(orders, 2, after=600.0)
            answers, read = [behind] * stale_reads, timers._last_on

            async def last_on(asked: str, *, direct: bool = True) -> Any:
                assert direct
                return answers.pop() if answers and asked == subject else await read(asked)

            with mock.patch.object(timers, "_last_on", last_on):
                if ends_by == "publish":
                    await timers.publish_ending(TIMER, orders.encode(Paid(order_id="o-1")))
                else:
                    is_known = stale_reads < TRIES or stale == "an older setting"
                    assert await timers.cancel(TIMER) == is_known
            assert await timers.get(TIMER) is None

        await test.do(end)
        test.advance(1200.0)
        await test.settled()
        assert (seen, len(test.published(Paid))) == ([], 1 if ends_by == "publish" else 0)


async def test_an_event_that_a_program_published_always_counts() -> None:
    seen: list[tuple[str | None, bool]] = []
    app = App("shop", stream="ORDERS", subjects=["orders.>"], timers=True)

    @app.handler(Paid, durable="paying")
    async def pay(event: Paid, ctx: Context) -> None:
        seen.append((None if ctx.timer is None else ctx.timer.name, await ctx.is_current_timer()))

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="o-1"), cancels=TIMER)  # names the timer, as one that it had published
        await test.settled()
    assert seen == [(None, True)]
    await run_handler(pay, Paid(order_id="o-1"))
    assert seen == [(None, True)] * 2


async def test_an_event_cannot_end_timers_where_there_are_none() -> None:
    app = App("shop", stream="ORDERS", subjects=["orders.>"], events=[Paid])

    @app.handler(Overdue, durable="ending")
    async def end(event: Overdue, ctx: Context) -> None:
        await ctx.publish(Paid(order_id="o-1"), cancels=TIMER)

    async with TestApp(app) as test:
        with pytest.raises(ConfigError, match="timers=True"):
            await test.publish(Paid(order_id="o-1"), cancels=TIMER)
        await test.publish(Overdue(order_id="o-1"))
        await test.settled()
        test.advance(86_400.0)
        await test.settled()
        [dead_letter] = test.dead_letters
        assert dead_letter.cause is not None
        assert "timers=True" in dead_letter.cause.message
        assert test.published(Paid) == []


# ---- entities: the state has the id --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("happens", "counted"), [("nothing", [1]), ("set anew", [2]), ("cancelled", []), ("deleted", [])]
)
async def test_an_entity_knows_its_timer_by_the_id_that_was_returned(happens: str, counted: list[int]) -> None:
    seen: list[int] = []
    async with TestApp(reminding_by_entity(seen)) as test:
        test.reject(handler="reminding")
        await test.do(lambda orders: set_by_entity(orders, 1, after=10.0))
        test.advance(20.0)
        await test.settled()

        def decide(change: EntityChange) -> None:
            change.cancel_timer(TIMER)
            if happens == "deleted":
                change.delete()
            else:
                change.set(Order("paid"))

        if happens == "set anew":
            await test.do(lambda orders: set_by_entity(orders, 2, after=10.0))
        elif happens != "nothing":
            await test.do(lambda orders: orders.entities("orders").modify("o-1", decide))
        test.advance(20.0)
        await test.redrive()
        await test.settled()
        assert seen == counted


@pytest.mark.parametrize(("happens", "counted"), [("set anew", [1]), ("cancelled", [])])
async def test_an_entity_whose_new_timer_was_removed_takes_the_event_that_has_removed_it(
    happens: str, counted: list[int]
) -> None:
    """And none of a timer that it has ended."""
    seen: list[int] = []
    app = App("shop", stream="KV_shop", subjects=["orders.>"], events=[Paid], timers=True)
    app.entities("orders", state=Order)

    @app.handler(Overdue, durable="reminding")
    async def remind(event: Overdue, ctx: Context) -> None:
        async with ctx.entities("orders").change(event.order_id) as change:
            timer = change.state.timer
            if timer != ctx.event_id and not (timer and await ctx.is_current_timer()):
                return
            seen.append(event.number)
            change.set(Order("reminded"))

    async def happen(orders: AppClient) -> None:
        def cancel(change: EntityChange) -> None:
            change.cancel_timer(TIMER)
            change.set(Order("paid"))

        if happens == "cancelled":
            await orders.entities("orders").modify("o-1", cancel)
        else:
            await set_by_entity(orders, 2)

    async with TestApp(app) as test:
        await test.do(lambda orders: set_by_entity(orders, 1, after=30.0))
        await test.do(lambda orders: do_at_that_moment(orders, happen))
        await test.settled()
        assert seen == counted


# ---- workflows do it by themselves -----------------------------------------------------------------------------------


class Begun(Event, type="order.begun", key="order_id", subject="orders.{order_id}"):
    order_id: str


class Confirmed(Event, type="order.confirmed", key="order_id", subject="orders.{order_id}"):
    order_id: str


async def test_a_workflow_takes_an_event_of_its_own_that_has_ended_its_timer() -> None:
    """The event names the timer, as if the timer had published it."""
    app = App("shop", stream="KV_shop", subjects=["orders.>"], timers=True)

    @app.workflow("flow", key="order_id")
    class Flow:
        def react(self, state: str | None, event: Begun | Paid | Confirmed | Overdue) -> Decision | None:
            match event:
                case Begun():
                    return Decision(state="waiting", timers={"payment": (Overdue(order_id="o-1"), 3600)})
                case Paid():
                    return Decision(state="paid", events=[Confirmed(order_id="o-1")], cancels=["payment"])
                case Confirmed():
                    return Decision(state="confirmed", is_done=True)
            return None

    async with TestApp(app) as test:
        await test.publish(Begun(order_id="o-1"))
        await test.publish(Paid(order_id="o-1"))
        await test.settled()
        run: WorkflowRun | None = await test.do(lambda shop: shop.workflow("flow").get("o-1"))
        assert run is not None
        assert (run.status, run.state) == ("done", "confirmed")


@pytest.mark.parametrize("is_current", [None, False])
async def test_a_workflow_goes_on_with_an_event_that_has_removed_the_new_setting_of_its_timer(
    is_current: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with no other event of an earlier setting."""
    app = App("shop", stream="KV_shop", subjects=["orders.>"], timers=True)

    @app.workflow("flow", key="order_id")
    class Flow:
        def react(self, state: int | None, event: Begun | Confirmed | Overdue) -> Decision | None:
            number = (state or 0) + 1
            if isinstance(event, Overdue):
                return Decision(state=10 * event.number, is_done=True)
            return Decision(state=number, timers={"payment": (Overdue(order_id="o-1", number=number), 3600)})

    async def prolong(shop: AppClient) -> None:
        await shop.publish(Confirmed(order_id="o-1"))

        async def is_prolonged() -> bool:
            run = await shop.workflow("flow").get("o-1")
            return run is not None and run.state == 2

        await until(is_prolonged)

    async with TestApp(app) as test:
        await test.publish(Begun(order_id="o-1"))
        await test.settled()
        if is_current is not None:
            monkeypatch.setattr(Timers, "is_current", mock.AsyncMock(return_value=is_current))
        await test.do(lambda shop: do_at_that_moment(shop, prolong, timer_name("flow", "o-1", "payment")))
        await test.settled()
        run: WorkflowRun | None = await test.do(lambda shop: shop.workflow("flow").get("o-1"))
        assert run is not None
        assert (run.status, run.state) == (("done", 10) if is_current is None else ("running", 2))


def test_only_the_server_publishes_without_an_id() -> None:
    fired = {"Nats-Scheduler": "timers.shop.x", "Nats-Schedule-Next": "purge"}
    assert firing_subject(fired) == "timers.shop.x"
    assert firing_subject(fired | {"Nats-Msg-Id": "e-1"}) is None
    assert firing_subject({}) is None
