"""The shop on a model of the server, in virtual time: half an hour without a payment takes milliseconds."""

import pytest
from fulfilment.events import OrderConfirmed, OrderPaid, OrderPlaced, OrderShipped, StockReleased, StockReserved
from fulfilment.shop import PAYMENT_S, AddStock, Parcel, PlaceOrder, ReleaseStock, ReserveStock, Stock, app

from jetspark.app import Refused, WorkflowRun
from jetspark.app.testing import RunView, TestApp, WorkflowSearch, check_workflow

IN_STOCK = 3
TWO_OF_TEA = PlaceOrder(order_id="o-1", article="tea", count=2)
PAID = OrderPaid(order_id="o-1")


async def run_of(test: TestApp, order_id: str) -> WorkflowRun:
    run = await test.do(lambda shop: shop.workflow("fulfilment").get(order_id))
    assert run is not None
    return run


async def test_an_order_that_is_paid_is_shipped() -> None:
    async with TestApp(app) as test:
        await test.call(AddStock(article="tea", count=IN_STOCK))
        await test.call(TWO_OF_TEA)
        await test.publish(PAID)
        await test.settled()
        test.advance(2 * PAYMENT_S)
        await test.settled()
        assert (await run_of(test, "o-1")).status == "done"
        assert test.published(OrderShipped) == [OrderShipped(order_id="o-1", label="label of o-1")]
        assert await test.do(lambda shop: shop.entities("parcels").get("o-1")) == Parcel("label of o-1")
        assert test.state("stock") == {"tea": Stock(free=1, reserved={"o-1": 2})}
        assert test.dead_letters == []


async def test_what_is_not_paid_in_time_is_given_up_and_its_stock_is_free_again() -> None:
    async with TestApp(app) as test:
        await test.call(AddStock(article="tea", count=IN_STOCK))
        await test.call(TWO_OF_TEA)
        await test.settled()
        assert test.state("stock") == {"tea": Stock(free=1, reserved={"o-1": 2})}
        test.advance(PAYMENT_S + 60)
        await test.settled()
        run = await run_of(test, "o-1")
        assert (run.status, run.reason) == ("failed", "not paid in time")
        assert test.state("stock") == {"tea": Stock(free=IN_STOCK)}
        await test.publish(PAID)  # too late: the customer gets it back, by another workflow
        await test.settled()
        assert test.published(OrderConfirmed) == []


async def test_without_stock_nothing_is_reserved() -> None:
    async with TestApp(app) as test:
        await test.call(AddStock(article="tea", count=1))
        await test.call(TWO_OF_TEA)
        await test.settled()
        assert (await run_of(test, "o-1")).reason == "out of stock"
        assert (test.published(StockReserved), test.published(StockReleased)) == ([], [])


async def test_an_order_is_placed_once() -> None:
    async with TestApp(app) as test:
        order = PlaceOrder(order_id="o-1", article="tea", count=1)
        first = await test.call(order, command_id="a")
        assert await test.call(order, command_id="a") == first  # the same request, asked again
        with pytest.raises(Refused, match="exists already"):
            await test.call(order, command_id="b")
        with pytest.raises(Refused, match="expected 1 or more"):
            await test.call(PlaceOrder(order_id="o-2", article="tea", count=0))


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before Publish", "after Publish", "before Acknowledge"])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_worker_that_dies_ships_nothing_twice_and_loses_no_stock(moment: str, times: int) -> None:
    async with TestApp(app) as test:
        await test.call(AddStock(article="tea", count=IN_STOCK))
        await test.call(TWO_OF_TEA)
        test.crash(moment, times=times)
        await test.publish(PAID)
        await test.settled()
        test.advance(300)
        await test.settled()
        assert len(test.published(OrderShipped)) == 1
        assert test.state("stock") == {"tea": Stock(free=1, reserved={"o-1": 2})}


async def test_a_reservation_that_comes_out_of_the_dead_letters_too_late_is_released() -> None:
    async with TestApp(app) as test:
        await test.call(AddStock(article="tea", count=IN_STOCK))
        rejected = test.reject(handler="fulfilment-commands")  # which sends the commands of the workflow
        await test.call(TWO_OF_TEA)
        await test.settled()
        test.advance(PAYMENT_S + 60)
        await test.settled()
        assert rejected.happened == 1
        assert (await run_of(test, "o-1")).reason == "not paid in time"
        assert [letter.handler for letter in test.dead_letters] == ["fulfilment-commands"] * 2  # the release waits, too
        await test.redrive()
        await test.settled()
        assert (len(test.published(StockReserved)), len(test.published(StockReleased))) == (1, 1)
        assert test.state("stock") == {"tea": Stock(free=IN_STOCK)}
        assert test.dead_letters == []


@pytest.mark.parametrize(
    ("handler", "before"),
    [
        ("fulfilment", 0),
        ("fulfilment", 1),
        ("fulfilment", 2),
        ("shipping", 0),
        ("fulfilment-commands", 0),
        ("fulfilment-commands", 1),
    ],
)
@pytest.mark.parametrize("payment", ["in time", "too late", "never"])
@pytest.mark.parametrize("redriven", ["in time", "too late"])
async def test_whatever_waits_in_the_dead_letters_no_stock_is_lost(
    handler: str, before: int, payment: str, redriven: str
) -> None:
    """Each step of each handler in turn: the first of its events, the second, the third."""
    async with TestApp(app) as test:
        await test.call(AddStock(article="tea", count=IN_STOCK))
        test.reject(handler=handler, after=before)
        await test.call(TWO_OF_TEA)
        for moment, seconds in (("in time", PAYMENT_S / 2), ("too late", PAYMENT_S)):
            await test.settled()
            test.advance(seconds)
            if payment == moment:
                await test.publish(PAID)
            await test.settled()
            if redriven == moment:
                await test.redrive()
        test.advance(PAYMENT_S)
        await test.settled()
        await test.redrive()  # the letters of rejected events, only now
        await test.settled()
        assert test.dead_letters == []
        run, shipped = await run_of(test, "o-1"), test.published(OrderShipped)
        # Too late is in time for a run that has begun only when its first event came out of the dead letters.
        assert run.status in {"in time": ["done"], "too late": ["failed", "done"], "never": ["failed"]}[payment]
        if run.status == "done":
            assert (len(shipped), test.state("stock")) == (1, {"tea": Stock(free=1, reserved={"o-1": 2})})
        else:
            assert (shipped, test.state("stock")) == ([], {"tea": Stock(free=IN_STOCK)})


# ---- every order of everything, without a server ---------------------------------------------------------------------


def test_every_run_ends_and_a_run_that_fails_gives_back_what_it_asked_for() -> None:
    def gives_back(run: RunView) -> bool:
        asked = [type(command) for command in run.commands]
        return asked == ([ReserveStock, ReleaseStock] if run.status == "failed" else [ReserveStock])

    def keeps_what_is_confirmed(run: RunView) -> None:
        assert run.status != "failed" or not run.events, "a confirmed order is given up"

    report = check_workflow(
        app,
        "fulfilment",
        [OrderPlaced(order_id="o-1", article="tea", count=2), PAID],
        answers={
            ReserveStock: lambda command: [None, Refused("out of stock")],
            OrderConfirmed: lambda event: [OrderShipped(order_id="o-1", label="l")],
        },
        invariants=[gives_back, keeps_what_is_confirmed],
        search=WorkflowSearch(in_order=True, duplicates=2),
    )
    assert report.is_exhaustive
    assert set(report.ends) == {"done", "failed: not paid in time", "failed: out of stock"}
