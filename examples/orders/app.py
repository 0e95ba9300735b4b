"""The application: the status of each order, the revenue of each day, and refunds.

``jetspark run orders.app:app --apply`` runs it; so does Spark: ``jetspark run orders.app:app --engine spark``.
"""

from collections.abc import AsyncIterator
from typing import TypedDict

from jetspark.app import App, Context, Reject, Window
from orders.events import OrderCancelled, OrderPaid, OrderPlaced, OrderRefunded, ParcelScanned

app = App("demo_orders", stream="DEMO_ORDERS", subjects=["demo.orders.>"], source="/demo/orders")


# ---- State: classes that fold events, live or on Spark ---------------------------------------------------------------


class Order(TypedDict):
    status: str
    amount_cents: int
    place: str


@app.projection(
    "order_status", events=[OrderPlaced, OrderPaid, ParcelScanned, OrderCancelled], bucket="demo_orders_status"
)
class OrderStatus:
    """The status of each order, and the location of its parcel."""

    def key(self, event: OrderPlaced | OrderPaid | ParcelScanned | OrderCancelled) -> str:
        return event.order_id

    def apply(
        self, state: Order | None, event: OrderPlaced | OrderPaid | ParcelScanned | OrderCancelled
    ) -> Order | None:
        if isinstance(event, OrderPlaced):
            return {"status": "placed", "amount_cents": event.amount_cents, "place": ""}
        if state is None:
            return None  # an order that was never placed: nothing happens
        if isinstance(event, ParcelScanned):
            state["status"], state["place"] = "on its way", event.place
        else:
            state["status"] = "paid" if isinstance(event, OrderPaid) else "cancelled"
        return state


# One state for each country and day. A payment counts on its own day, however late it is stored.
DAY = Window(size_s=86_400, time=lambda event: event.at, late="keep")


class Revenue(TypedDict):
    orders: int
    cents: int


@app.projection("daily_revenue", events=[OrderPaid], bucket="demo_orders_revenue", window=DAY)
class DailyRevenue:
    """The number and total amount of paid orders, by country and day."""

    def key(self, event: OrderPaid) -> str:
        return event.country

    def apply(self, state: Revenue | None, event: OrderPaid) -> Revenue:
        before = state or {"orders": 0, "cents": 0}
        return {"orders": before["orders"] + 1, "cents": before["cents"] + event.amount_cents}


@app.projection("parcels", events=[ParcelScanned], bucket="demo_orders_parcels", window=DAY)
class Parcels:
    """The number of scanned parcels, by place and day."""

    def key(self, event: ParcelScanned) -> str:
        return event.place

    def apply(self, state: int | None, event: ParcelScanned) -> int:
        return (state or 0) + 1


# ---- Effects: a handler, which is retried, and gives up in the dead letters ------------------------------------------


class Bank:
    """Pays money back; a call with an idempotency key that it knows returns the first receipt. Here: does nothing."""

    async def pay_back(self, order_id: str, amount_cents: int, *, idempotency_key: str) -> str:
        return f"receipt of {order_id}"


@app.lifespan
async def resources() -> AsyncIterator[Bank]:
    yield Bank()  # connect here; code after the yield runs when the workers have ended


MAX_REFUND_CENTS = 40_000


@app.handler(OrderCancelled, durable="refunds", timeout=4, ack_wait_s=5)  # what a dead worker had is done 5 s later
async def refund(event: OrderCancelled, ctx: Context, bank: Bank) -> OrderRefunded:
    if event.amount_cents > MAX_REFUND_CENTS:
        raise Reject(f"more than {MAX_REFUND_CENTS / 100:.2f}: somebody has to look at it")
    return await pay_back(event, ctx, bank)


async def pay_back(event: OrderCancelled, ctx: Context, bank: Bank) -> OrderRefunded:
    receipt = await ctx.once("pay back", bank.pay_back, event.order_id, event.amount_cents)
    return OrderRefunded(
        order_id=event.order_id,
        country=event.country,
        amount_cents=event.amount_cents,
        receipt=receipt,
        at=event.at,
    )
