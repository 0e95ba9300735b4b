"""The test kit of applications on a real server: the same test, in real time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jetspark import UsageError
from jetspark.app import App, Context, Event, Reject, Retry
from jetspark.app.testing import TestApp
from jetspark.server import NatsServer


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    number: int = 0


class Billed(Event, type="order.billed", key="order_id", subject="orders.{order_id}.billed"):
    order_id: str
    number: int


class Totals:
    def key(self, event: Billed) -> str:
        return event.order_id

    def apply(self, state: int | None, event: Billed) -> int:
        return (state or 0) + 1


def new_app() -> App:
    app = App("orders", stream="ORDERS", subjects=["orders.>"], events=[Billed])

    @app.handler(Paid, durable="billing", retry=Retry(attempts=4, first_s=0.05))
    async def bill(event: Paid, ctx: Context) -> Billed:
        if event.number == 1 and not ctx.is_redrive:
            raise Reject("one")
        if event.number == 4 and ctx.attempt == 1:
            raise OSError("four")
        return Billed(order_id=event.order_id, number=event.number)

    app.projection("totals", events=[Billed], bucket="totals")(Totals)
    return app


@pytest.mark.parametrize("is_real", [False, True], ids=["model", "server"])
async def test_the_same_test_passes_on_the_model_and_on_a_server(is_real: bool, nats_url: str) -> None:
    async with TestApp(new_app(), server=nats_url if is_real else None) as test:
        for number in range(3):
            await test.publish(Paid(order_id="a", number=number))
        await test.publish(Paid(order_id="b", number=4))
        await test.settled()
        assert sorted(each.number for each in test.published(Billed)) == [0, 4]
        assert [(each.key, each.status) for each in test.dead_letters] == [("a", "open"), ("a", "behind")]
        await test.redrive()
        await test.settled()
        assert test.dead_letters == []
        assert [each.number for each in test.published(Billed) if each.order_id == "a"] == [0, 1, 2]
        assert test.state("totals") == {"a": 3, "b": 1}


async def test_what_only_a_model_can_do_is_refused_with_the_reason(nats_url: str) -> None:
    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(UsageError, match="runs on a real server"):
            call()

    async with TestApp(new_app(), server=nats_url) as test:
        refused(lambda: test.advance(3600))
        refused(lambda: test.now)
        refused(lambda: test.network)
        refused(test.drop_ack)
        refused(test.crash_after_effect)
        refused(lambda: test.crash("before Acknowledge"))
        refused(test.lose_leader)
        refused(test.cut_connection)
        refused(lambda: test.restart_server(at="before Acknowledge"))
        with pytest.raises(UsageError, match="a process is needed"):
            test.restart_server()


async def test_a_server_of_the_tests_own_restarts(new_nats_server: Callable[..., NatsServer]) -> None:
    async with TestApp(new_app(), server=new_nats_server()) as test:
        await test.publish(Paid(order_id="b"))
        await test.settled()
        assert test.restart_server(0.2).happened == 1
        await test.publish(Paid(order_id="b", number=4), timeout=20)
        await test.settled()
        assert [each.number for each in test.published(Billed)] == [0, 4]


async def test_an_error_of_the_workers_is_raised(nats_url: str) -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])

    class Bank:
        pass

    @app.handler(Paid, durable="billing")
    async def bill(event: Paid, bank: Bank) -> None: ...

    with pytest.raises(Exception, match="expected one Bank"):
        async with TestApp(app, server=nats_url) as test:
            await test.settled()
