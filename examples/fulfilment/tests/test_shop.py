"""The shop on a model of the server, in virtual time: half an hour without a payment takes milliseconds."""

import pytest
from fulfilment.events import OrderPaid, ReleaseStock, ShipOrder, StockReserved
from fulfilment.shop import PAYMENT_S, PlaceOrder, Stock, app

from jetspark.app import EntityChange, Refused, WorkflowRun
from jetspark.app.testing import TestApp


async def fill(test: TestApp, free: int) -> None:
    def decide(change: EntityChange) -> None:
        change.set(Stock(free=free))

    await test.do(lambda shop: shop.entities("stock").modify("tea", decide))


async def run_of(test: TestApp, order_id: str) -> WorkflowRun:
    run = await test.do(lambda shop: shop.workflow("fulfilment").get(order_id))
    assert run is not None
    return run


async def stock(test: TestApp) -> Stock:
    found: Stock = await test.do(lambda shop: shop.entities("stock").get("tea"))
    return found


async def test_an_order_that_is_paid_is_shipped() -> None:
    async with TestApp(app) as test:
        await fill(test, 3)
        await test.call(PlaceOrder(order_id="o-1", article="tea", count=2))
        await test.publish(OrderPaid(order_id="o-1"))
        await test.settled()
        test.advance(2 * PAYMENT_S)
        await test.settled()
        assert (await run_of(test, "o-1")).status == "done"
        assert test.published(ShipOrder) == [ShipOrder(order_id="o-1")]
        assert await stock(test) == Stock(free=1, reserved={"o-1": 2})
        assert test.dead_letters == []


async def test_what_is_not_paid_in_time_is_given_up_and_its_stock_is_free_again() -> None:
    async with TestApp(app) as test:
        await fill(test, 3)
        await test.call(PlaceOrder(order_id="o-1", article="tea", count=2))
        await test.settled()
        test.advance(PAYMENT_S + 60)
        await test.settled()
        run = await run_of(test, "o-1")
        assert (run.status, run.reason) == ("failed", "not paid in time")
        assert await stock(test) == Stock(free=3)
        await test.publish(OrderPaid(order_id="o-1"))  # too late: the customer gets it back, by another workflow
        await test.settled()
        assert test.published(ShipOrder) == []


async def test_without_stock_nothing_is_reserved() -> None:
    async with TestApp(app) as test:
        await fill(test, 1)
        await test.call(PlaceOrder(order_id="o-1", article="tea", count=2))
        await test.settled()
        assert (await run_of(test, "o-1")).reason == "out of stock"
        assert (test.published(StockReserved), len(test.published(ReleaseStock))) == ([], 1)


async def test_an_order_is_placed_once() -> None:
    async with TestApp(app) as test:
        order = PlaceOrder(order_id="o-1", article="tea", count=1)
        first = await test.call(order, command_id="a")
        assert await test.call(order, command_id="a") == first  # the same request, asked again
        with pytest.raises(Refused, match="exists already"):
            await test.call(order, command_id="b")
        with pytest.raises(Refused, match="expected 1 or more"):
            await test.call(PlaceOrder(order_id="o-2", article="tea", count=0))


@pytest.mark.parametrize("moment", ["before Publish", "after Publish", "before Acknowledge"])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_worker_that_dies_ships_nothing_twice_and_loses_no_stock(moment: str, times: int) -> None:
    async with TestApp(app) as test:
        await fill(test, 3)
        await test.call(PlaceOrder(order_id="o-1", article="tea", count=2))
        test.crash(moment, times=times)
        await test.publish(OrderPaid(order_id="o-1"))
        await test.settled()
        test.advance(300)
        await test.settled()
        assert test.published(ShipOrder) == [ShipOrder(order_id="o-1")]
        assert await stock(test) == Stock(free=1, reserved={"o-1": 2})
