"""The table of failures: right handlers pass it, and each kind of wrong one is caught where it is wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from jetspark import ConfigError, KeyExists, KeyValue
from jetspark.app import App, Context, Event, Reject, Retry
from jetspark.app.causes import current_cause
from jetspark.app.testing import FAILURES, ReliabilityReport, UnreliableHandler, check_reliability
from jetspark.app.testing.observations import RunObserver
from jetspark.app.testing.steps import SeenStep


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    cents: int = 5


class Billed(Event, type="order.billed", key="order_id", subject="orders.{order_id}.billed"):
    order_id: str
    receipt: str


class Bank:
    """A service that knows idempotency keys, and forgets none."""

    def __init__(self) -> None:
        self.charges: list[str] = []

    async def charge(self, order_id: str, *, idempotency_key: str) -> str:
        await asyncio.sleep(0.05)
        self.charges.append(f"{order_id} {idempotency_key}")
        return f"receipt of {order_id}"

    async def charge_without_key(self, order_id: str) -> str:
        self.charges.append(order_id)
        return f"receipt of {order_id}"


Handle = Callable[..., Any]


def new_app(bank: Bank, handle: Handle, **options: Any) -> App:
    app = App("orders", stream="ORDERS", subjects=["orders.>"], events=[Billed])

    @app.lifespan
    async def resources() -> AsyncIterator[Bank]:
        yield bank

    app.handler(Paid, durable="billing", **({"retry": Retry(attempts=5, first_s=0.2)} | options))(handle)
    return app


def all_but(*failures: str) -> list[str]:
    return [each.name for each in FAILURES[1:] if each.name not in failures]


async def wrong(handle: Handle, *failures: str, **options: Any) -> tuple[ReliabilityReport, set[tuple[str, str]]]:
    """The cells that are wrong, of some failures."""
    bank = Bank()
    app = new_app(bank, handle, **options)
    skip = all_but(*failures)
    with pytest.raises(UnreliableHandler) as caught:
        await check_reliability(app, Paid(order_id="a"), effects=lambda: bank.charges, skip=skip)
    report = caught.value.report
    cells = {(row.name, column) for row in report.rows for column, problem in row.cells.items() if problem}
    assert all(row in str(caught.value) for row, _ in cells)
    return report, cells


async def right(event: Paid, ctx: Context, bank: Bank) -> Billed:
    receipt = await ctx.once("charge", bank.charge, event.order_id)
    return Billed(order_id=event.order_id, receipt=receipt)


async def test_a_right_handler_passes_every_row() -> None:
    bank = Bank()
    app = new_app(Bank(), right)
    report = await check_reliability(app, Paid(order_id="a"), effects=lambda: bank.charges, dependencies=[bank])
    assert [row.name for row in report.rows] == [each.name for each in FAILURES]
    assert report.problems == []
    happened = {row.name for row in report.rows if row.cells["end"] is not None}
    assert {each.name for each in FAILURES} - happened == {
        "the worker dies before a commit",
        "the worker dies after a commit",
    }
    attempts = {row.name: row.attempts for row in report.rows}
    assert attempts["nothing fails"] == 3
    assert attempts["the worker dies after the handler"] == 4
    assert attempts["the handler fails for hours"] == 3 + 4
    table = str(report).splitlines()
    assert table[0].split() == ["effects", "published", "state", "dead_letters", "order", "end", "attempts"]
    assert table[1].split() == ["nothing", "fails", "ok", "ok", "-", "ok", "ok", "ok", "3"]


async def test_several_keys_and_the_default_policy_pass_too() -> None:
    bank = Bank()
    app = new_app(bank, right, retry=Retry())
    events = [Paid(order_id=key, cents=cents) for cents in (1, 2) for key in "abc"]
    failures = ["the stream loses its leader", "the server restarts after the handler", "the event cannot be handled"]
    failures += ["the worker dies before it acknowledges", "the connection is lost"]
    report = await check_reliability(app, *events, effects=lambda: bank.charges, seed=5, skip=all_but(*failures))
    assert {row.name for row in report.rows if row.cells["end"] == ""} == {"nothing fails", *failures}


async def test_a_service_that_remembers_keys_is_reset_between_runs() -> None:
    bank, known = Bank(), set[str]()

    async def charge_by_key(order_id: str, *, idempotency_key: str) -> str:
        if idempotency_key not in known:
            known.add(idempotency_key)
            bank.charges.append(order_id)
        return f"receipt of {order_id}"

    async def bill(event: Paid, ctx: Context) -> None:
        await charge_by_key(event.order_id, idempotency_key=ctx.idempotency_key("charge"))

    skip = all_but("the worker dies after the handler", "the handler fails after its effects")
    app = new_app(bank, bill)
    options: dict[str, Any] = {"effects": lambda: bank.charges, "skip": skip}
    with pytest.raises(UnreliableHandler, match="done 0 times instead of 3"):
        await check_reliability(app, Paid(order_id="a"), **options)
    known.clear()
    await check_reliability(app, Paid(order_id="a"), reset=known.clear, **options)


async def test_a_transaction_passes() -> None:
    app = App("ledger", stream="LEDGER", subjects=["orders.>"])

    @app.handler(Paid, durable="totals", idempotent="transaction", bucket="totals")
    async def add(event: Paid, ctx: Context) -> None:
        total = int(await ctx.tx.get(event.order_id) or 0)
        await ctx.tx.put(event.order_id, str(total + event.cents).encode())

    commits = ["the worker dies before a commit", "the worker dies after a commit", "the event is published again"]
    report = await check_reliability(app, Paid(order_id="a"), skip=all_but(*commits))
    rows = {row.name: row for row in report.rows}
    assert rows["the worker dies after a commit"].cells["state"] == ""
    assert rows["the worker dies after a commit"].cells["effects"] is None


async def test_an_effect_without_once_is_caught() -> None:
    async def twice(event: Paid, bank: Bank) -> Billed:
        return Billed(order_id=event.order_id, receipt=await bank.charge_without_key(event.order_id))

    report, cells = await wrong(
        twice,
        "the worker dies after the handler",
        "the handler fails before its effects",
        "the handler fails after its effects",
        "the event is published again",
    )
    assert cells == {
        ("the worker dies after the handler", "effects"),
        ("the handler fails after its effects", "effects"),
        ("the event is published again", "effects"),
    }
    assert "the worker dies after the handler: effects: 'a' is done 4 times instead of 3" in report.problems


async def test_a_swallowed_error_is_caught() -> None:
    async def swallow(event: Paid, ctx: Context, bank: Bank) -> Billed | None:
        try:
            return await right(event, ctx, bank)
        except Exception:
            return None

    _, cells = await wrong(swallow, "its dependencies are down", "the server restarts before the handler")
    assert ("its dependencies are down", "effects") in cells
    assert ("its dependencies are down", "published") in cells
    assert ("the server restarts before the handler", "published") in cells


async def test_a_handler_that_depends_on_the_time_is_caught() -> None:
    async def late(event: Paid, ctx: Context, bank: Bank) -> Billed:
        await ctx.once("charge", bank.charge, event.order_id)
        return Billed(order_id=event.order_id, receipt=ctx.now().isoformat())

    report, cells = await wrong(
        late, "the handler fails before its effects", "the worker dies after it published", "the handler is slow"
    )
    assert ("the handler fails before its effects", "published") in cells
    assert ("the worker dies after it published", "published") in cells
    assert {column for _, column in cells} == {"published"}
    assert any("attempts differ" in each for each in report.problems)


async def test_a_handler_that_depends_on_chance_is_caught() -> None:
    async def dice(event: Paid, ctx: Context, bank: Bank) -> Billed:
        await ctx.once("charge", bank.charge, event.order_id)
        return Billed(order_id=event.order_id, receipt=str(random.random()))

    _, cells = await wrong(dice, "the worker dies after it published")
    assert ("the worker dies after it published", "published") in cells


async def test_state_that_is_not_written_exactly_once_is_caught() -> None:
    app = App("ledger", stream="LEDGER", subjects=["orders.>"], buckets=["totals"])

    @app.lifespan
    async def resources() -> AsyncIterator[KeyValue]:
        async with app.connect("nats://model") as ledger:
            totals = await ledger.js.kv("totals")
            with suppress(KeyExists):
                await totals.create("total", b"0")
            yield totals

    @app.handler(Paid, durable="totals")
    async def add(event: Paid, totals: KeyValue) -> None:
        total = int((await totals.get("total")).value)
        await totals.put("total", str(total + event.cents).encode())

    with pytest.raises(UnreliableHandler, match=r"the worker dies after the handler: state: .* b'20' instead of b'15'"):
        await check_reliability(app, Paid(order_id="a"), skip=all_but("the worker dies after the handler"))


async def test_work_that_goes_on_after_its_handler_is_caught() -> None:
    background = set()

    async def forget(event: Paid, bank: Bank) -> None:
        async def later() -> None:
            await asyncio.sleep(0.2)
            await bank.charge_without_key(event.order_id)

        background.add(asyncio.get_running_loop().create_task(later()))

    _, cells = await wrong(forget, "the worker dies after it acknowledged")
    assert ("the worker dies after it acknowledged", "effects") in cells


async def test_keys_out_of_order_are_noticed() -> None:
    app = new_app(Bank(), right)
    observers: list[Any] = []
    observer = RunObserver(app, SimpleNamespace(observers=observers))  # type: ignore[arg-type]
    sequences = {f"e{number}": number for number in range(1, 5)}

    def end(id: str, key: str) -> None:
        current_cause.set(SimpleNamespace(id=id, key=key))
        observers[0]("after", SeenStep("RunHandler", "billing"), None)

    for id, key in [("e1", "a"), ("e3", "b"), ("e2", "a"), ("e1", "a")]:
        end(id, key)
    assert observer.order_problem(sequences) == ""  # another key, and a second time, are no matter
    end("e4", "a")
    end("e2", "b")
    assert observer.order_problem(sequences) == "handler 'billing', key 'b': e3, e2"


async def test_an_event_that_is_not_handled_without_a_failure_says_so_first() -> None:
    async def reject(event: Paid) -> None:
        raise Reject("never")

    report, cells = await wrong(reject, "the handler is slow")
    assert cells == {("nothing fails", "dead_letters")}
    assert len(report.rows) == 1
    assert "Reject: never" in report.problems[0]


async def test_a_handler_without_an_end_is_caught() -> None:
    async def again(event: Paid, ctx: Context) -> list[Paid]:
        return [event] if ctx.sequence < 10_000 else []

    app = App("orders", stream="ORDERS", subjects=["orders.>"])
    app.handler(Paid, durable="echo")(again)
    with pytest.raises(UnreliableHandler, match=r"nothing fails: end: .*'echo' has events"):
        await check_reliability(app, Paid(order_id="a"))


async def test_a_policy_that_gives_up_too_early_is_caught() -> None:
    _, cells = await wrong(right, "the server restarts before the handler", retry=Retry(attempts=1))
    assert ("the server restarts before the handler", "dead_letters") in cells


async def test_wrong_calls_say_what_is_wrong() -> None:
    app = new_app(Bank(), right)
    with pytest.raises(ConfigError, match="no event: expected an event that a handler takes; they take Paid"):
        await check_reliability(app)
    with pytest.raises(ConfigError, match="Billed: expected an event"):
        await check_reliability(app, Billed(order_id="a", receipt="r"))
    with pytest.raises(ConfigError, match="expected one of billing"):
        await check_reliability(app, Paid(order_id="a"), handler="shipping")
    with pytest.raises(ConfigError, match="'the handler is slow'"):
        await check_reliability(app, Paid(order_id="a"), skip=["the handler is fast"])
