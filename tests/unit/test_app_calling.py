"""Calling a handler's own code: which cancellation is the time-out, and which one is somebody who ends the worker."""

from __future__ import annotations

import asyncio
import datetime
import logging
import operator
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jetspark.app import (
    App,
    AttemptResult,
    Context,
    Event,
    HandlerAttempt,
    HandlerObserver,
    Reject,
    Retry,
    RetryIn,
    Skip,
)
from jetspark.app.clock import utc_now
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.contracts.envelope import decode, encode
from jetspark.app.handlers.context import Dependencies
from jetspark.app.handlers.handler_spec import HandlerSpec
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.app.handlers.invocation import HandlerCalls
from jetspark.app.handlers.lanes import WorkItem
from jetspark.app.handlers.machine import HandlerLimits, HandlerMachine
from jetspark.app.handlers.retry import HandlerTimeout, RetryPolicy
from jetspark.app.testing import TestApp, run_handler
from jetspark.errors import ConfigError

APP = App("orders", stream="ORDERS", subjects=["orders.>"])


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str


class Call:
    """A handler that has been called and waits, as a task."""

    def __init__(self, batch: int | None) -> None:
        self.begun = asyncio.Event()

        async def handle(event: Any) -> None:
            self.begun.set()
            await asyncio.get_running_loop().create_future()

        spec = HandlerSpec(function=handle, events=(Paid,), durable="billing", batch=batch, in_order=batch is None)
        store = cast(HandlerStore, SimpleNamespace(js=None, records=None, server_now=None))
        calls = HandlerCalls(APP.spec, spec, store, Dependencies(), utc_now, logging.getLogger("test"))
        catalogue = Catalogue()
        catalogue.add(Paid)
        now = datetime.datetime(2026, 3, 15, tzinfo=datetime.UTC)
        made = encode(Paid(order_id="a"), id="e1", source="/test", time=now)
        self.item = WorkItem("a", 1, None, decode(made.subject, made.data, made.headers, catalogue))
        work: Awaitable[Any] = calls.call(self.item) if batch is None else calls.call_batch([self.item])
        self.task: asyncio.Task[Any] = asyncio.ensure_future(work)

    def time_out(self) -> None:
        """As the worker's timer does."""
        self.item.is_timed_out = True
        assert self.item.runner is not None
        self.item.runner.cancel()


@pytest.mark.parametrize("batch", [None, 10])
async def test_a_time_out_is_an_error_and_the_task_goes_on(batch: int | None) -> None:
    call = Call(batch)
    await call.begun.wait()
    call.time_out()
    assert isinstance(await call.task, HandlerTimeout)
    assert call.task.cancelling() == 0


@pytest.mark.parametrize("batch", [None, 10])
async def test_who_cancels_at_the_moment_of_the_time_out_is_heard(batch: int | None) -> None:
    call = Call(batch)
    await call.begun.wait()
    call.time_out()
    call.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.task


async def test_a_look_up_that_took_too_long_is_no_time_out_of_the_handler() -> None:
    machine = HandlerMachine(HandlerLimits(timeout_s=5.0), RetryPolicy(), lambda: 0.0)
    item = WorkItem("a", 1)
    machine.receive(item, 0.0)
    assert machine.take(0.0) is item
    assert machine.on_time(6.0).timed_out == [item]  # nothing runs yet that could be cancelled
    machine.restart_clock(item, 7.0)
    assert not item.is_timed_out


@pytest.mark.timeout(60)
async def test_an_end_comes_although_a_handler_ignores_it_and_the_server_is_gone() -> None:
    app, begun = App("deaf", stream="DEAF", subjects=["orders.>"]), []

    @app.handler(Paid, durable="deaf", timeout=3600, retry=Retry(first_s=1))
    async def wait(event: Paid) -> None:
        begun.append(event)
        try:
            await asyncio.sleep(3000)
        except asyncio.CancelledError:
            raise OSError("rather an error") from None  # so its attempts have to be written, and nobody takes them

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="a"))
        test.advance(10)
        test.network.kill_server(1e9)
    assert len(begun) == 1


class Shipped(Event, type="order.shipped", key="parcel", subject="orders.{parcel}.shipped"):
    parcel: str


def _divide(event: Any) -> str:
    return str(1 // len(event.order_id))


@pytest.mark.parametrize(
    ("key", "wrong", "why"),
    [
        (operator.attrgetter("order_id"), Shipped(parcel="a"), "'Shipped' object has no attribute 'order_id'"),
        (_divide, Paid(order_id=""), "integer division or modulo by zero"),
    ],
)
async def test_an_event_whose_key_cannot_be_told_is_a_dead_letter_and_stops_nobody(
    key: Any, wrong: Any, why: str
) -> None:
    app, done = App("keys", stream="KEYS", subjects=["orders.>"]), []

    @app.handler(Paid, Shipped, durable="keys", key=key)
    async def handle(event: Paid | Shipped) -> None:
        done.append(event)

    async with TestApp(app) as test:
        await test.publish(wrong)
        await test.publish(Paid(order_id="o-1"))
        await test.settled()
        assert done == [Paid(order_id="o-1")]
        [dead_letter] = test.dead_letters
        assert dead_letter.cause is not None
        assert dead_letter.cause.message == f"key={key!r} of handler 'keys' failed for this event: {why}"


@pytest.mark.parametrize(
    ("raised", "outcomes"),
    [
        (Reject("no such card"), ["dead_letter"]),
        (Skip("not ours"), ["skipped"]),
        (RetryIn(7.5), ["retry", "done"]),
        (ConnectionError("away"), ["retry", "done"]),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_what_a_task_of_a_task_group_raises_decides(raised: Exception, outcomes: list[str]) -> None:
    app, results = App("groups", stream="GROUPS", subjects=["orders.>"]), list[AttemptResult]()

    class Results(HandlerObserver):
        def on_finished(self, attempt: HandlerAttempt, result: AttemptResult) -> None:
            results.append(result)

    app.observe(Results())

    async def charge() -> None:
        raise raised

    @app.handler(Paid, durable="billing")
    async def bill(event: Paid, ctx: Context) -> None:
        if ctx.attempt == 1:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.sleep(3600))
                tasks.create_task(charge())

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="a"))
        await test.settled()
    assert [result.outcome for result in results] == outcomes
    assert results[0].error is raised
    assert results[0].retry_in_s == 7.5 if isinstance(raised, RetryIn) else True
    run = await run_handler("billing", Paid(order_id="a"), app=app)
    assert (run.outcome, run.error) == (outcomes[0], raised)


async def test_a_batch_handler_that_returns_something_is_told_so() -> None:
    app = App("batches", stream="BATCHES", subjects=["orders.>"])

    async def ship(events: list[Paid]) -> list[Shipped]:
        return [Shipped(parcel=event.order_id) for event in events]

    with pytest.raises(ConfigError, match=r"batch handler 'ship': its events cannot be published: it returns Shipped"):
        app.batch_handler(Paid, durable="ship")(ship)

    async def ship_somehow(events: Any) -> Any:
        return await ship(events)

    app.batch_handler(Paid, durable="somehow", retry=Retry(attempts=1))(ship_somehow)
    async with TestApp(app) as test:
        await test.publish(Paid(order_id="o-1"))
        await test.settled()
        [dead_letter] = test.dead_letters
        assert dead_letter.cause is not None
        assert "batch handler 'somehow': expected it to return nothing, got list" in dead_letter.cause.message


async def cancelled_inside() -> None:
    inner = asyncio.ensure_future(asyncio.sleep(60))
    inner.cancel()
    await inner


def this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def cancels_itself() -> None:
    this_task().cancel()
    await asyncio.sleep(60)


async def exits() -> None:
    raise SystemExit("on purpose")


async def raises_what_nobody_expects() -> None:
    raise BaseException("on purpose")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (cancelled_inside, "asyncio.exceptions.CancelledError"),
        (cancels_itself, "asyncio.exceptions.CancelledError"),
        (exits, "SystemExit"),
        (raises_what_nobody_expects, "BaseException"),
    ],
)
@pytest.mark.parametrize("batch", [None, 10])
async def test_what_would_end_a_worker_is_an_error_of_the_handler(
    batch: int | None, body: Callable[[], Awaitable[None]], name: str
) -> None:
    """The event would come to the next worker, and end that one, too."""
    app, starts = App("ends", stream="ENDS", subjects=["orders.>"]), []

    async def handle(event: Any) -> None:
        starts.append(event)
        await body()

    if batch is None:
        app.handler(Paid, durable="ends", concurrency=1, retry=Retry(attempts=2, first_s=1))(handle)
    else:
        app.batch_handler(Paid, durable="ends", batch=batch, retry=Retry(attempts=2, first_s=1))(handle)
    async with TestApp(app) as test:
        await test.publish(Paid(order_id="a"))
        await test.settled()
        [dead_letter] = test.dead_letters
        assert dead_letter.cause is not None
        assert dead_letter.cause.error == name
    assert len(starts) == 2


async def cancel_now() -> None:
    this_task().cancel()  # and no await, so that it is not raised in the handler


async def cancel_later() -> None:
    asyncio.get_running_loop().call_later(5.0, this_task().cancel)


async def swallow_a_cancel() -> None:
    this_task().cancel()
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:  # as libraries that do not know `uncancel` do
        pass


@pytest.mark.parametrize("leave", [cancel_now, cancel_later, swallow_a_cancel])
@pytest.mark.parametrize("batch", [None, 10])
async def test_a_handler_that_leaves_a_cancellation_behind_ends_no_worker(
    batch: int | None, leave: Callable[[], Awaitable[None]]
) -> None:
    """Nothing would tell: the handler would have one place less, and the event would be held for ever."""
    app, done = App("leaves", stream="LEAVES", subjects=["orders.>"]), list[str]()

    async def handle(event: Any) -> None:
        [each] = event if batch is not None else [event]
        done.append(each.order_id)
        if each.order_id == "slow":
            await asyncio.sleep(60)  # its time-out is still one
        await leave()

    options: Any = {"retry": Retry(attempts=2, first_s=1), "timeout": 20.0}
    if batch is None:
        app.handler(Paid, durable="leaves", concurrency=1, **options)(handle)
    else:
        app.batch_handler(Paid, durable="leaves", batch=batch, **options)(handle)
    async with TestApp(app) as test:
        for name in ("a", "b", "slow", "c"):
            await test.publish(Paid(order_id=name))
            test.advance(3.0)
        await test.settled()
        test.advance(200.0)
        await test.settled()
        [dead_letter] = test.dead_letters
        assert dead_letter.cause is not None
        assert (dead_letter.cause.error, dead_letter.attempts) == ("jetspark.app.handlers.retry.HandlerTimeout", 2)
    assert set(done) == {"a", "b", "slow", "c"}
    assert done.count("slow") == 2


async def test_a_batch_that_waits_begins_when_its_timer_fires_however_the_clock_is_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop takes a timer for due that is less than the resolution of its clock away."""
    full_at: list[float] = []
    wait_until = asyncio.timeout_at

    def noted(when: float | None) -> asyncio.Timeout:
        if when is not None:
            full_at.append(when)
        return wait_until(when)

    monkeypatch.setattr("jetspark.app.handlers.handler_worker.asyncio.timeout_at", noted)
    for early_s in (0.0, 5e-7):
        app, batches = App("waits", stream="WAITS", subjects=["orders.>"]), list[int]()

        @app.batch_handler(Paid, durable="waits", batch=10, batch_wait_s=5.0)
        async def handle(events: list[Paid]) -> None:
            batches.append(len(events))  # noqa: B023 - called in this round only

        async with TestApp(app, seed=1) as test:
            await test.publish(Paid(order_id="a"))
            test.advance(1.0)
            assert full_at
            test.advance(full_at[-1] - early_s - test.now)
            await test.settled()
        assert batches == [1]


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


async def test_an_error_without_a_text_is_a_dead_letter_like_any_other() -> None:
    app = App("wordless", stream="WORDLESS", subjects=["orders.>"])

    @app.handler(Paid, durable="wordless", retry=Retry(attempts=2, first_s=0.1))
    async def handle(event: Paid) -> None:
        raise Wordless

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="a"))
        await test.settled()
        [dead_letter] = test.dead_letters
        assert dead_letter.cause is not None
        assert dead_letter.cause.message == "its text is not known: str() raised RuntimeError"
