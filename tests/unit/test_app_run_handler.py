"""One handler alone: what it did, and what would become of its event."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import pytest

from jetspark import ConfigError
from jetspark.app import App, Context, Event, Reject, Retry, RetryIn, Skip
from jetspark.app.testing import check_contracts, run_handler
from jetspark.errors import InvalidEvent


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    cents: int = 5


class Billed(Event, type="order.billed", key="order_id", subject="orders.{order_id}.billed"):
    order_id: str
    receipt: str


class Bank:
    def __init__(self) -> None:
        self.charges: list[tuple[str, str]] = []

    async def charge(self, order_id: str, *, idempotency_key: str) -> str:
        if order_id == "broken":
            raise OSError("no bank")
        self.charges.append((order_id, idempotency_key))
        return f"receipt {len(self.charges)}"


app = App("orders", stream="ORDERS", subjects=["orders.>"], events=[Billed])


@app.handler(Paid, durable="billing", retry=Retry(attempts=3, first_s=60, max_s=3600))
async def bill(event: Paid, ctx: Context, bank: Bank) -> Billed:
    if event.cents < 0:
        raise Reject("nobody owes less than nothing")
    if event.cents == 0:
        raise Skip("nothing to pay")
    if event.cents == 1:
        raise RetryIn(42)
    receipt = await ctx.once("charge", bank.charge, event.order_id)
    ctx.log.info("charged at %s as %s", ctx.now(), ctx.new_id())
    return Billed(order_id=event.order_id, receipt=receipt)


async def test_what_a_handler_did_is_there() -> None:
    bank = Bank()
    run = await run_handler(bill, Paid(order_id="a"), bank, app=app)
    assert (run.outcome, run.error, run.retry_in_s) == ("done", None, None)
    assert run.published == [Billed(order_id="a", receipt="receipt 1")]
    assert [each.subject for each in run.messages] == ["orders.a.billed"]
    [effect] = run.effects
    assert (effect.name, effect.arguments, effect.result) == ("charge", ("a",), "receipt 1")
    assert bank.charges == [("a", effect.named["idempotency_key"])]
    [record] = run.logged
    assert record.getMessage().startswith("charged at 2026-03-31 10:15:30+00:00 as ")


async def test_an_effect_that_is_not_async_is_seen_as_a_worker_does_it() -> None:
    other = App("orders", stream="ORDERS", subjects=["orders.>"])
    charged: list[str] = []

    def charge(order_id: str) -> int:
        charged.append(order_id)
        return len(charged)

    @other.handler(Paid, durable="billing")
    async def bill_at_once(event: Paid, ctx: Context) -> None:
        await ctx.once("charge", charge, event.order_id)  # type: ignore[arg-type]

    run = await run_handler(bill_at_once, Paid(order_id="a"), app=other)
    assert (run.outcome, run.error) == ("done", None)
    assert [(each.name, each.result) for each in run.effects] == [("charge", 1)]
    assert charged == ["a"]


async def test_the_same_call_has_the_same_result() -> None:
    one, other = [await run_handler(bill, Paid(order_id="a"), Bank(), app=app) for _ in range(2)]
    assert one.messages == other.messages
    assert one.effects == other.effects
    assert [each.getMessage() for each in one.logged] == [each.getMessage() for each in other.logged]
    third = await run_handler(bill, Paid(order_id="a"), Bank(), app=app, id="another")
    assert third.messages != one.messages


async def test_a_recorded_effect_is_not_done_again() -> None:
    bank = Bank()
    run = await run_handler(bill, Paid(order_id="a"), bank, app=app, recorded={"charge": "receipt 7"}, attempt=2)
    assert run.published == [Billed(order_id="a", receipt="receipt 7")]
    assert run.effects == []
    assert bank.charges == []


@pytest.mark.parametrize(
    ("event", "attempt", "outcome", "retry_in_s"),
    [
        (Paid(order_id="a", cents=-1), 1, "dead_letter", None),
        (Paid(order_id="a", cents=0), 1, "skipped", None),
        (Paid(order_id="a", cents=1), 1, "retry", 42),
        (Paid(order_id="broken"), 1, "retry", 60),
        (Paid(order_id="broken"), 2, "retry", 120),
        (Paid(order_id="broken"), 3, "dead_letter", None),
    ],
)
async def test_what_a_handler_raises_decides(event: Paid, attempt: int, outcome: str, retry_in_s: Any) -> None:
    run = await run_handler("billing", event, Bank(), app=app, attempt=attempt)
    assert (run.outcome, run.retry_in_s) == (outcome, retry_in_s)
    assert run.error is not None
    assert run.published == []


async def test_a_failed_effect_is_seen() -> None:
    run = await run_handler(bill, Paid(order_id="broken"), Bank(), app=app)
    [effect] = run.effects
    assert isinstance(effect.error, OSError)


async def test_a_transaction_is_all_or_nothing() -> None:
    ledger = App("ledger", stream="LEDGER", subjects=["orders.>"])

    @ledger.handler(Paid, durable="totals", idempotent="transaction", bucket="totals")
    async def add(event: Paid, ctx: Context) -> None:
        await ctx.tx.put("last", event.order_id.encode())
        await ctx.tx.put("total", str(int(await ctx.tx.get("total") or 0) + event.cents).encode())
        await ctx.tx.delete("first")
        if event.cents > 100:
            raise Reject("too much")

    state = {"total": b"10", "first": b"x"}
    run = await run_handler(add, Paid(order_id="a"), app=ledger, state=state)
    assert run.state == {"total": b"15", "last": b"a"}
    run = await run_handler(add, Paid(order_id="a", cents=101), app=ledger, state=state)
    assert run.outcome == "dead_letter"
    assert run.state == state
    run = await run_handler(add, Paid(order_id="a"), app=ledger, state=state, is_done=True)
    assert run.outcome == "done"
    assert run.state == state


async def test_a_function_needs_no_app() -> None:
    async def ship(event: Paid, ctx: Context) -> list[Billed]:
        return [Billed(order_id=event.order_id, receipt=ctx.now().isoformat()) for _ in range(2)]

    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    run = await run_handler(ship, Paid(order_id="a"), now=now)
    assert [each.receipt for each in run.published] == [now.isoformat()] * 2

    async def report(events: list[Paid]) -> None:
        raise OSError(str(len(events)))

    run = await run_handler(report, [Paid(order_id="a"), Paid(order_id="b")])
    assert (run.outcome, str(run.error)) == ("retry", "2")


async def test_a_handler_without_dead_letters_drops() -> None:
    lossy = App("lossy", stream="LOSSY", subjects=["orders.>"])

    @lossy.handler(Paid, durable="d", dead_letter=False)
    async def drop(event: Paid) -> None:
        raise Reject("no")

    assert (await run_handler("d", Paid(order_id="a"), app=lossy)).outcome == "dropped"


async def test_wrong_calls_say_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="expected one Bank"):
        await run_handler(bill, Paid(order_id="a"), app=app)
    with pytest.raises(ConfigError, match="a name needs app="):
        await run_handler("billing", Paid(order_id="a"))
    with pytest.raises(ConfigError, match="it has billing"):
        await run_handler("shipping", Paid(order_id="a"), app=app)
    with pytest.raises(InvalidEvent):
        await run_handler(bill, Paid(order_id="a", cents="x"), Bank(), app=app)  # type: ignore[arg-type]


def test_contracts_are_checked_from_here_too() -> None:
    assert check_contracts.__name__ == "check_contracts"


async def test_a_cancellation_of_something_else_is_an_error_like_any_other() -> None:
    async def wait(event: Paid) -> None:
        inner = asyncio.ensure_future(asyncio.sleep(60))
        inner.cancel()
        await inner

    run = await run_handler(wait, Paid(order_id="a"))
    assert run.outcome == "retry"
    assert isinstance(run.error, asyncio.CancelledError)
