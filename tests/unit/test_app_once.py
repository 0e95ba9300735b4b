"""Effects that happen once: what is recorded of them, what is published after a commit, how long it is known."""

from __future__ import annotations

import asyncio
import datetime
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from jetspark import KVConfig, connect
from jetspark.app import App, Context, Event, Retry
from jetspark.app.handlers import once
from jetspark.app.handlers.once import EffectTransaction, OnceRecords
from jetspark.app.testing import TestApp
from jetspark.core.backoff import Backoff
from jetspark.errors import ConfigError, Conflict, KeyNotFound, RequestTimeout, UsageError
from jetspark.testing import run_in_virtual_time

DAY_S = 86400.0


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str


class Totalled(Event, type="order.totalled", key="order_id", subject="orders.{order_id}.totalled"):
    order_id: str
    total: int


def new_app() -> App:
    return App("orders", stream="ORDERS", subjects=["orders.>"], events=[Totalled])


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (object(), "object"),
        ("x" * (2 << 20), "str"),
        (float("nan"), "float"),
        ({"rate": float("inf")}, "dict"),
        ([{1: "a", "1": "b"}], "list"),
    ],
    ids=["not JSON", "larger than a message", "NaN", "infinity inside", "one name twice"],
)
async def test_an_effect_whose_result_cannot_be_recorded_is_not_repeated(result: object, kind: str) -> None:
    app, effects, errors = new_app(), [], []

    async def charge() -> object:
        effects.append("charged")
        return result

    @app.handler(Paid, durable="billing", retry=Retry(attempts=3, first_s=1))
    async def bill(event: Paid, ctx: Context) -> None:
        try:
            await ctx.once("charge", charge)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            raise

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="o-1"))
        await test.settled()
        assert effects == ["charged"]
        assert len(test.dead_letters) == 1
    assert len(errors) == 3
    assert len(set(errors)) == 1
    assert f"once('charge'): its result of type {kind}" in errors[0]
    assert "give the effect another name" in errors[0]


async def test_an_effect_that_runs_is_not_begun_again_by_the_same_process() -> None:
    app, effects, results = new_app(), list[str](), list[str]()

    async def charge() -> str:
        effects.append("charged")
        await asyncio.sleep(5)
        return "receipt"

    @app.handler(Paid, durable="billing", timeout=60)
    async def bill(event: Paid, ctx: Context) -> None:
        results.extend(await asyncio.gather(ctx.once("charge", charge), ctx.once("charge", charge)))

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="o-1"))
        await test.settled()
        assert test.dead_letters == []
    assert (effects, results) == (["charged"], ["receipt", "receipt"])


async def test_an_effect_that_is_not_async_happens_once_too() -> None:
    app, effects, results = new_app(), list[str](), list[str]()

    def charge(order_id: str, *, idempotency_key: str) -> str:
        effects.append(order_id)
        return f"receipt {order_id}"

    @app.handler(Paid, durable="billing", retry=Retry(attempts=2, first_s=1))
    async def bill(event: Paid, ctx: Context) -> None:
        results.append(await ctx.once("charge", charge, event.order_id))  # type: ignore[arg-type]  # what users do
        if ctx.attempt == 1:
            raise OSError("again")

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="o-1"))
        await test.settled()
    assert (effects, results) == (["o-1"], ["receipt o-1"] * 2)


@dataclass(frozen=True)
class Receipt:
    number: int
    at: datetime.datetime
    parts: dict[int, str]


@pytest.mark.parametrize("is_annotated", [True, False])
async def test_a_recorded_result_is_what_the_function_returned(is_annotated: bool) -> None:
    app, results = new_app(), list[Any]()
    receipt = Receipt(5, datetime.datetime(2026, 3, 15, tzinfo=datetime.UTC), {1: "book"})

    async def charge() -> tuple[Receipt, str]:
        return receipt, "paid"

    async def charge_somehow():  # type: ignore[no-untyped-def]
        return receipt, "paid"

    @app.handler(Paid, durable="billing", retry=Retry(first_s=1))
    async def bill(event: Paid, ctx: Context) -> None:
        results.append(await ctx.once("charge", charge if is_annotated else charge_somehow))
        if ctx.attempt == 1:
            raise OSError("away")

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="o-1"))
        await test.settled()
    plain = [{"number": 5, "at": "2026-03-15T00:00:00Z", "parts": {"1": "book"}}, "paid"]
    assert results == [(receipt, "paid") if is_annotated else plain] * 2


async def test_a_result_type_converts_the_result_in_every_attempt() -> None:
    app, results, given = new_app(), list[Any](), list[dict[str, Any]]()
    receipt = Receipt(5, datetime.datetime(2026, 3, 15, tzinfo=datetime.UTC), {1: "book"})

    async def charge(**named: Any):  # type: ignore[no-untyped-def]
        given.append(named)
        return receipt

    @app.handler(Paid, durable="billing", retry=Retry(first_s=1))
    async def bill(event: Paid, ctx: Context) -> None:
        results.append(await ctx.once("charge", charge, result_type=Receipt))
        if ctx.attempt == 1:
            raise OSError("away")

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="o-1"))
        await test.settled()
    assert results == [receipt, receipt]
    assert given == [{}]


async def test_a_result_that_is_not_of_the_wanted_type_is_an_error_and_no_second_effect() -> None:
    app, effects = new_app(), []

    async def charge() -> str:
        effects.append("charged")
        return "paid"

    @app.handler(Paid, durable="billing", retry=Retry(attempts=2, first_s=1))
    async def bill(event: Paid, ctx: Context) -> None:
        await ctx.once("charge", charge, result_type=int)

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="o-1"))
        await test.settled()
        [dead_letter] = test.dead_letters
        assert effects == ["charged"]
        assert "once('charge'): its recorded result 'paid' is not a <class 'int'>" in str(dead_letter)


@pytest.mark.parametrize("idempotent", ["none", "transaction"])
@pytest.mark.parametrize("fault", ["breaks its contract", "larger than a message"])
async def test_returned_events_are_published_all_or_none(idempotent: Any, fault: str) -> None:
    app, bucket = new_app(), "totals" if idempotent == "transaction" else None
    order_id = "x" * (2 << 20) if fault == "larger than a message" else "a"
    total: Any = "many" if fault == "breaks its contract" else 1

    @app.handler(Paid, durable="totals", retry=Retry(attempts=2, first_s=1), idempotent=idempotent, bucket=bucket)
    async def add(event: Paid, ctx: Context) -> list[Totalled]:
        if idempotent == "transaction":
            await ctx.tx.put("total", b"1")
        return [Totalled(order_id="a", total=1), Totalled(order_id=order_id, total=total)]

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="a"))
        await test.settled()
        assert test.published(Totalled) == []
        assert len(test.dead_letters) == 1
        if idempotent == "transaction":
            assert await keys_of(test) == ["_done"], "that it was given up, and nothing else"


@pytest.mark.parametrize("ending", ["returns", "raises"])
@pytest.mark.parametrize("verb", ["get", "put", "delete"])
async def test_a_transaction_that_has_ended_takes_nothing_more(verb: str, ending: str) -> None:
    app, left, errors = new_app(), list[asyncio.Task[None]](), list[str]()

    @app.handler(Paid, durable="totals", retry=Retry(attempts=1), idempotent="transaction", bucket="totals")
    async def add(event: Paid, ctx: Context) -> None:
        tx = ctx.tx

        async def late() -> None:
            await asyncio.sleep(5)
            try:
                await (tx.put("late", b"1") if verb == "put" else getattr(tx, verb)("late"))
            except UsageError as error:
                errors.append(str(error))

        left.append(asyncio.create_task(late()))
        await tx.put("total", b"1")
        if ending == "raises":
            raise ValueError("no")

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="a"))
        await test.settled()
        test.advance(10)
        assert await keys_of(test) == (["_done", "total"] if ending == "returns" else ["_done"])
    assert errors == [
        f"ctx.tx.{verb}('late') after the handler's transaction has ended: nothing would be written. Await every task "
        "that uses ctx.tx before the handler returns"
    ]


def adding(app: App, *, slow: str = "", **options: Any) -> list[str]:
    """A handler that counts in a transaction and returns the total; returns the order ids it was called with."""
    calls: list[str] = []

    @app.handler(Paid, durable="totals", idempotent="transaction", bucket="totals", **options)
    async def add(event: Paid, ctx: Context) -> Totalled:
        total = int(await ctx.tx.get("total") or 0) + 1
        calls.append(event.order_id)
        if event.order_id == slow and calls.count(slow) == 1:
            await asyncio.sleep(1.0)  # so that another event changes the total meanwhile
        await ctx.tx.put("total", str(total).encode())
        return Totalled(order_id=event.order_id, total=total)

    return calls


async def test_a_try_that_lost_its_race_publishes_nothing() -> None:
    app = new_app()
    calls = adding(app, slow="a")
    async with TestApp(app) as test:
        await test.publish(Paid(order_id="a"))
        await test.publish(Paid(order_id="b"))
        await test.settled()
        assert calls.count("a") == 2
        assert test.published(Totalled) == [Totalled(order_id="b", total=1), Totalled(order_id="a", total=2)]


@pytest.mark.parametrize(
    "at", ["before Commit", "after Commit", "before Publish", "after Publish", "before Acknowledge"]
)
async def test_a_crash_around_the_commit_publishes_what_was_committed_once(at: str) -> None:
    app = new_app()
    calls = adding(app)
    async with TestApp(app) as test:
        crash = test.crash(at)
        await test.publish(Paid(order_id="a"))
        await test.settled()
        assert crash.happened == 1
        assert test.published(Totalled) == [Totalled(order_id="a", total=1)]
        assert calls == (["a", "a"] if at == "before Commit" else ["a"])
        assert test.dead_letters == []


async def test_marks_of_transactions_go_away_when_they_are_not_needed_any_more() -> None:
    app = new_app()
    adding(app, remember_s=2 * DAY_S)
    async with TestApp(app) as test:
        await test.publish(Paid(order_id="a"))
        await test.settled()
        test.advance(DAY_S)
        assert await keys_of(test) == ["_done", "total"]
        test.advance(DAY_S + 120)
        assert await keys_of(test) == ["total"]


def test_a_transaction_that_was_given_up_cannot_commit_and_a_later_try_can() -> None:
    async def main() -> None:
        async with connect("nats://model:4222") as client:
            bucket = await client.jetstream().create_kv(KVConfig(bucket="totals", limit_marker_ttl_s=60))

            def attempt() -> EffectTransaction:
                return EffectTransaction(bucket, "totals", "e-1", remember_s=DAY_S)

            late = attempt()
            assert await late.committed() is None
            await late.put("total", b"1")
            assert await attempt().give_up() is None
            with pytest.raises(Conflict):
                await late.commit([])
            with pytest.raises(KeyNotFound):
                await bucket.get("total")
            assert await attempt().give_up() is None, "given up again, as after a crash"
            redriven = attempt()
            assert await redriven.committed() is None
            await redriven.put("total", b"2")
            assert await redriven.commit([]) == []
            assert await attempt().give_up() == [], "it has its effects"
            assert await attempt().committed() == []
            assert (await bucket.get("total")).value == b"2"

    run_in_virtual_time(main())


async def keys_of(test: TestApp) -> list[str]:
    """The first tokens of the keys in the bucket."""

    async def read() -> list[str]:
        kv = await test._client.js.kv("totals")
        return sorted([key.split(".")[0] async for key in kv.keys(">")])

    return await test._stage.run(read())


class LossyRecords:
    """A bucket that stores what it is told, and whose first answers to each question are lost."""

    def __init__(self, lost_updates: int, lost_gets: int) -> None:
        self.value, self.revision = b"claimed", 1
        self._lost_updates, self._lost_gets = lost_updates, lost_gets

    async def update(self, key: str, value: bytes, *, revision: int, ttl: float) -> int:
        if revision != self.revision:
            raise Conflict("records", (key,))
        self.value, self.revision = value, revision + 1
        if self._lost_updates:
            self._lost_updates -= 1
            raise RequestTimeout("update", 1.0)
        return self.revision

    async def get(self, key: str) -> SimpleNamespace:
        if self._lost_gets:
            self._lost_gets -= 1
            raise RequestTimeout("get", 1.0)
        return SimpleNamespace(value=self.value, revision=self.revision)


async def server_now() -> datetime.datetime:
    return datetime.datetime(2026, 3, 31, 12, tzinfo=datetime.UTC)


@pytest.mark.parametrize("lost_gets", [0, 1, 3])
async def test_a_record_whose_answer_was_lost_is_found_however_often_it_takes(
    lost_gets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "RECORD_PAUSE", Backoff(0.0, 0.0))
    records: Any = LossyRecords(lost_updates=1, lost_gets=lost_gets)
    await OnceRecords(records, "billing", server_now, lease_s=1.0, remember_s=1.0)._record("key", b"done", 1)
    assert (records.value, records.revision) == (b"done", 2)


@pytest.mark.parametrize("lost_updates", [0, 1])
async def test_a_record_that_another_worker_wrote_is_not_taken_for_ours(
    lost_updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "RECORD_PAUSE", Backoff(0.0, 0.0))
    records: Any = LossyRecords(lost_updates, lost_gets=0)
    records.revision = 5
    with pytest.raises(Conflict):
        await OnceRecords(records, "billing", server_now, lease_s=1.0, remember_s=1.0)._record("key", b"done", 1)


@pytest.mark.parametrize("way", ["at once", "by another effect", "by another task"])
async def test_an_effect_inside_of_itself_is_an_error_at_once(way: str) -> None:
    app, errors, effects = new_app(), [], []

    @app.handler(Paid, durable="billing", timeout=600.0, retry=Retry(attempts=1))
    async def bill(event: Paid, ctx: Context) -> None:
        async def charge() -> None:
            effects.append("charge")
            if way == "at once":
                await ctx.once("charge", charge)
            elif way == "by another effect":
                await ctx.once("tell", ctx.once, "charge", charge)
            else:
                await asyncio.gather(ctx.once("charge", charge), ctx.once("tell", asyncio.sleep, 0))

        try:
            await ctx.once("charge", charge)
        except ConfigError as error:
            errors.append(str(error))
        await ctx.once("after", asyncio.sleep, 0)

    async with TestApp(app) as test:
        began = test.now
        await test.publish(Paid(order_id="o-1"))
        await test.settled()
        assert (errors, effects) == (
            ["once('charge') inside of the effect 'charge': it would wait for itself; expected another name"],
            ["charge"],
        )
        assert test.now - began < 60
        assert test.dead_letters == []


async def test_what_an_effect_leaves_behind_finds_its_result() -> None:
    app, found, left = new_app(), [], []

    @app.handler(Paid, durable="billing")
    async def bill(event: Paid, ctx: Context) -> None:
        async def charge() -> int:
            async def look() -> None:
                await asyncio.sleep(0.5)
                found.append(await ctx.once("charge", charge))

            left.append(asyncio.create_task(look()))
            return 7

        found.append(await ctx.once("charge", charge))
        await asyncio.gather(*left)

    async with TestApp(app) as test:
        await test.publish(Paid(order_id="o-1"))
        await test.settled()
        assert (found, test.dead_letters) == ([7, 7], [])
