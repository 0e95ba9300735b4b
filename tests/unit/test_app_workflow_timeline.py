"""The timeline of a run: every event it took, and what each step decided, as it was stored."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.fulfilment import PAYMENT_S, Paid, Placed, fulfilment
from support.reserving import Ordered, reserving

from jetspark.app import App, AppClient, Catalogue, Decision, Event
from jetspark.app.testing import TestApp
from jetspark.app.workflows.timeline import read_timeline
from jetspark.app.workflows.workflow_spec import KEPT_STEPS, REMEMBERED, RunRecord, StepRecord
from jetspark.cli.workflow import _lines


async def timeline(test: TestApp, key: str, name: str = "fulfilment") -> list[dict[str, Any]]:
    async def read(shop: AppClient) -> list[dict[str, Any]]:
        return [step async for step in shop.workflow(name).timeline(key)]

    return await test.do(read)


def summary(step: dict[str, Any]) -> dict[str, Any]:
    """What happened, without times, ids and numbers."""
    decided = step["decided"]
    return {
        "type": step["type"],
        "fired": step["fired"],
        "by_hand": step["by_hand"],
        "events": [each["type"] for each in decided["events"]],
        "commands": [(each["name"], each["command"]) for each in decided["commands"]],
        "timers": list(decided["timers"]),
        "cancels": decided["cancels"],
        "end": (decided["status"], decided["reason"]),
    }


def expected(type: str | None, **fields: Any) -> dict[str, Any]:
    nothing: dict[str, Any] = {
        "fired": None,
        "by_hand": None,
        "events": [],
        "commands": [],
        "timers": [],
        "cancels": [],
    }
    return {"type": type, **nothing, "end": ("running", None), **fields}


async def test_a_step_tells_its_event_and_everything_it_decided() -> None:
    async with TestApp(fulfilment()) as test:
        for id in ("late", "paid"):
            await test.publish(Placed(order_id=id))
            await test.settled()
        await test.publish(Paid(order_id="paid"))
        await test.settled()
        test.advance(2 * PAYMENT_S + 60)
        await test.settled()
        begun = expected("order.placed", events=["stock.reserve"], timers=["payment"])
        assert [summary(step) for step in await timeline(test, "paid")] == [
            begun,
            expected("order.paid", events=["order.shipped"], cancels=["payment"], end=("done", None)),
        ]
        steps = await timeline(test, "late")
        assert [summary(step) for step in steps] == [
            begun,
            expected("order.payment_overdue", fired="payment", timers=["payment"]),
            expected("order.payment_overdue", fired="payment", events=["stock.release"], end=("failed", "not paid")),
        ]
        # It fired when it was due, and what was published is where it says.
        assert steps[0]["decided"]["timers"]["payment"] <= steps[1]["time"]
        [released] = steps[2]["decided"]["events"]
        stream = test.network.front.model.messages("KV_shop")
        assert [each.sequence for each in stream if each.subject == "orders.late.release"] == [released["sequence"]]
        assert await timeline(test, "nobody") == []


async def test_commands_and_what_became_of_them_are_told() -> None:
    async with TestApp(reserving()) as test:
        for id in ("o-1", "o-2"):
            await test.publish(Ordered(order_id=id))
            await test.settled()
        first, second = await timeline(test, "o-1", "reserving"), await timeline(test, "o-2", "reserving")
        asked = expected("order.placed", commands=[("reserve", "stock.reserve")])
        answered = "reserving.command_answered"
        assert [summary(step) for step in first] == [
            asked,
            expected(answered, events=["order.packed"], end=("done", None)),
        ]
        assert [summary(step) for step in second] == [
            asked,
            expected(answered, commands=[("compensation", "stock.release")], end=("failed", "no tea: taken")),
        ]
        lines = "\n".join(line for step in first + second for line in _lines(step))
        assert "command reserve was decided  {'receipt': 'r-o-1'}\n" in lines
        assert "command reserve was refused: taken\n" in lines
        assert "sends reserve: stock.reserve  {'order_id': 'o-1', 'article': 'tea'}\n" in lines


async def test_what_was_done_by_hand_is_told_as_that() -> None:
    async with TestApp(fulfilment()) as test:
        await test.publish(Placed(order_id="o"))
        await test.settled()
        await test.do(lambda shop: shop.workflow("fulfilment").cancel("o", "no stock"))
        await test.do(lambda shop: shop.workflow("fulfilment").retry("o"))
        placed, cancelled, anew = await timeline(test, "o")
        assert summary(cancelled) == expected(
            None, by_hand="cancelled", events=["stock.release"], cancels=["payment"], end=("failed", "no stock")
        )
        assert summary(anew) == summary(placed) | {"by_hand": "begun anew"}
        assert [next(_lines(each)).split("  ")[-1] for each in (cancelled, anew)] == ["cancelled", "begun anew"]


class Counted(Event, type="count.made", key="id", subject="counts.{id}.made"):
    id: str
    number: int


class Doubled(Event, type="count.doubled", key="id", subject="counts.{id}.doubled"):
    id: str
    number: int


def counting() -> App:
    app = App("counts", stream="COUNTS", subjects=["counts.>"], events=[Doubled])

    @app.workflow("counting", key="id")
    class Counting:
        def react(self, state: int | None, event: Counted) -> Decision:
            return Decision(state=event.number, events=[Doubled(id=event.id, number=2 * event.number)])

    return app


async def test_what_is_decided_is_told_of_the_last_steps_and_events_of_more() -> None:
    async with TestApp(counting()) as test:
        for number in range(KEPT_STEPS + 6):
            await test.publish(Counted(id="x", number=number))
        await test.settled()
        steps = await timeline(test, "x", "counting")
        assert [step["data"]["number"] for step in steps] == list(range(KEPT_STEPS + 6))
        assert [step["decided"] is None for step in steps] == [True] * 6 + [False] * KEPT_STEPS
        for step in steps[6:]:
            [doubled] = step["decided"]["events"]
            assert doubled["data"]["number"] == 2 * step["data"]["number"]


@pytest.mark.parametrize("subject", ["counts.x.made", "counts.x.doubled"])
async def test_what_the_stream_no_longer_has_is_left_out(subject: str) -> None:
    async with TestApp(counting()) as test:
        await test.publish(Counted(id="x", number=1))
        await test.settled()

        async def purge(counts: AppClient) -> int:
            return await (await counts.js.stream("COUNTS")).purge(subject=subject)

        assert await test.do(purge) == 1
        [step] = await timeline(test, "x", "counting")
        if subject.endswith("made"):
            assert (step["type"], len(step["decided"]["events"])) == (None, 1)
            assert "no longer has" in next(_lines(step))
        else:
            assert (step["type"], step["decided"]["events"]) == ("count.made", [])


async def test_what_cannot_be_read_any_more_is_told_as_that() -> None:
    async with TestApp(counting()) as test:
        await test.publish(Counted(id="x", number=1))
        await test.settled()

        async def read(counts: AppClient) -> list[dict[str, Any]]:
            """By a program that does not know one of the events."""
            run, stream = await counts.entities("counting").read("x"), await counts.js.stream("COUNTS")
            return [each async for each in read_timeline(stream, Catalogue(Counted), run.state, run.revision)]

        [step] = await test.do(read)
        [doubled] = step["decided"]["events"]
        assert (doubled["type"], doubled["data"][:14]) == (None, "cannot be read")


def test_a_record_without_notes_is_read_and_gets_them() -> None:
    old = msgspec.json.decode(b'{"version":1,"key":"o","events":[4,9]}', type=RunRecord)
    new = old.with_step(StepRecord(12, events=1), revision=10)
    assert new.steps == (StepRecord(12, events=1),)
    again = new.with_step(StepRecord(15), revision=13)
    assert [(each.sequence, list(each.stored)) for each in again.steps] == [(12, [14]), (15, [])]
    assert len(again.events) <= REMEMBERED
