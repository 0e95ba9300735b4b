"""Observers: what they are told of handlers, and that they cannot hurt an event."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from jetspark.app import (
    App,
    AttemptResult,
    Breaker,
    Context,
    DeadLetterChange,
    Event,
    HandlerAttempt,
    HandlerObserver,
    Reject,
    Retry,
    RetryIn,
    Skip,
)
from jetspark.app.testing import TestApp

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    number: int = 0


class Billed(Event, type="order.billed", key="order_id", subject="orders.{order_id}.billed"):
    order_id: str


class Record(HandlerObserver):
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.attempts: list[HandlerAttempt] = []
        self.results: list[AttemptResult] = []
        self.tasks: list[Any] = []

    def on_started(self, attempt: HandlerAttempt) -> None:
        self.attempts.append(attempt)
        self.tasks.append(asyncio.current_task())
        self.seen.append(("started", attempt.key, attempt.sequence, attempt.attempt))

    def on_finished(self, attempt: HandlerAttempt, result: AttemptResult) -> None:
        assert attempt in self.attempts
        self.results.append(result)
        self.tasks.append(asyncio.current_task())
        self.seen.append((result.outcome, attempt.key, attempt.sequence, attempt.attempt))

    def on_dead_letter(self, dead_letter: DeadLetterChange) -> None:
        self.seen.append(
            (f"dead letter {dead_letter.status}", dead_letter.key, dead_letter.sequence, dead_letter.error)
        )

    def on_paused(self, handler: str, seconds: float) -> None:
        self.seen.append(("paused", handler, seconds))


def observed(app: App) -> Record:
    record = Record()
    assert app.observe(record) is record
    return record


def new_app() -> App:
    return App("orders", stream="ORDERS", subjects=["orders.>"], events=[Billed])


async def test_every_attempt_and_every_dead_letter_is_told() -> None:
    app = new_app()
    record = observed(app)
    is_mended = False

    @app.handler(Paid, durable="billing", retry=Retry(first_s=1, jitter=0))
    async def bill(event: Paid, ctx: Context) -> None:
        await asyncio.sleep(2)
        if event.order_id == "short" and ctx.attempt == 1:
            raise OSError("away")
        if event.order_id == "long" and ctx.attempt == 1:
            raise RetryIn(60)
        if event.order_id == "skip":
            raise Skip("not ours")
        if event.order_id == "dead" and event.number == 0 and not is_mended:
            raise Reject("no such card")

    async with TestApp(app) as test:
        for order_id in ("done", "short", "long", "skip", "dead"):
            await test.publish(Paid(order_id=order_id), traceparent=TRACE, correlation_id="c-1")
            await test.settled()
        await test.publish_raw("orders.x.paid", b"not an event")
        await test.settled()
        await test.publish(Paid(order_id="dead", number=1))
        test.advance(120)
        await test.settled()
        is_mended = True
        await test.redrive(None, "key=dead")
        await test.settled()
    assert record.seen == [
        ("started", "done", 1, 1),
        ("done", "done", 1, 1),
        ("started", "short", 2, 1),
        ("retry", "short", 2, 1),
        ("started", "short", 2, 2),
        ("done", "short", 2, 2),
        ("started", "long", 3, 1),
        ("retry", "long", 3, 1),
        ("started", "skip", 4, 1),
        ("skipped", "skip", 4, 1),
        ("started", "dead", 5, 1),
        ("dead letter open", "dead", 5, "jetspark.app.handlers.retry.Reject"),
        ("dead_letter", "dead", 5, 1),
        ("started", "x", 6, 1),
        ("dead letter open", "x", 6, "jetspark.errors.NotJson"),
        ("dead_letter", "x", 6, 1),
        ("dead letter behind", "dead", 7, None),
        ("started", "long", 3, 2),
        ("done", "long", 3, 2),
        ("started", "dead", 5, 1),
        ("dead letter closed", "dead", 5, None),
        ("done", "dead", 5, 1),
        ("started", "dead", 7, 1),
        ("dead letter closed", "dead", 7, None),
        ("done", "dead", 7, 1),
    ]
    first, result = record.attempts[0], record.results[0]
    assert (first.app, first.handler, first.event_type, first.stream) == ("orders", "billing", "order.paid", "ORDERS")
    assert (first.correlation_id, first.redrives) == ("c-1", 0)
    assert first.traceparent is not None
    assert first.traceparent.split("-")[1] == TRACE.split("-")[1]
    assert result == AttemptResult(outcome="done", seconds=2.0)
    assert [each.retry_in_s for each in record.results if each.outcome == "retry"] == [1.0, 60.0]
    assert record.tasks[0] is record.tasks[1]


async def test_a_batch_tells_of_each_event_and_a_breaker_that_it_paused() -> None:
    app = new_app()
    record = observed(app)

    @app.batch_handler(Paid, durable="report", batch=10, breaker=Breaker(failures=1, open_s=5), retry=Retry(first_s=1))
    async def report(events: list[Paid]) -> None:
        if len(record.attempts) < 3:
            raise OSError("away")

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="a"))
        await test.settled()
        assert ("paused", "report", 5) in record.seen
        assert [each.outcome for each in record.results] == ["retry", "retry", "done"]


async def test_what_an_observer_raises_hurts_nobody_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    app, done = new_app(), []

    class Broken(HandlerObserver):
        def on_started(self, attempt: HandlerAttempt) -> None:
            raise ValueError("of mine")

        def on_finished(self, attempt: HandlerAttempt, result: AttemptResult) -> None:
            raise ValueError("of mine, too")

    app.observe(Broken())
    record = observed(app)

    @app.handler(Paid, durable="billing")
    async def bill(event: Paid) -> None:
        done.append(event.number)

    with caplog.at_level(logging.ERROR, logger="jetspark.app"):
        async with TestApp(app) as test:
            for number in range(3):
                await test.publish(Paid(order_id="a", number=number))
            await test.settled()
            assert test.dead_letters == []
    assert done == [0, 1, 2]
    assert [each[0] for each in record.seen] == ["started", "done"] * 3
    assert [each.getMessage().split(": ")[1].split(" ")[0] for each in caplog.records] == ["on_started", "on_finished"]


async def test_an_attempt_that_the_end_of_the_worker_cuts_off_is_given_back() -> None:
    app = new_app()
    record = observed(app)

    @app.handler(Paid, durable="billing", timeout=3600)
    async def bill(event: Paid) -> None:
        await asyncio.sleep(3000)

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="a"))
        test.advance(10)
    assert [each[0] for each in record.seen] == ["started", "given_back"]


async def test_the_trace_of_an_event_is_that_of_what_it_leads_to() -> None:
    app, seen = new_app(), []

    @app.handler(Paid, durable="billing")
    async def bill(event: Paid, ctx: Context) -> Billed:
        seen.append(ctx.traceparent)
        return Billed(order_id=event.order_id)

    @app.handler(Billed, durable="mail")
    async def mail(event: Billed, ctx: Context) -> None:
        seen.append(ctx.traceparent)

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="a"), traceparent=TRACE)
        await test.settled()
    assert [(each or "").split("-")[1] for each in seen] == [TRACE.split("-")[1]] * 2
