"""The application as it will be after the next release: a day knows its largest order, and no refund is too large.

In a project of your own this is not another file: it is the next commit of ``app.py``. Another fold has another
``version``, so ``jetspark rebuild`` makes its states beside the live ones, and swaps.
"""

from typing import TypedDict

from jetspark.app import App, Context
from orders import app as release1
from orders.app import DAY, Bank, OrderStatus, Parcels, pay_back
from orders.events import OrderCancelled, OrderPaid, OrderPlaced, OrderRefunded, ParcelScanned

app = App("demo_orders", stream="DEMO_ORDERS", subjects=["demo.orders.>"], source="/demo/orders")
app.lifespan(release1.resources)
app.projection(
    "order_status", events=[OrderPlaced, OrderPaid, ParcelScanned, OrderCancelled], bucket="demo_orders_status"
)(OrderStatus)
app.projection("parcels", events=[ParcelScanned], bucket="demo_orders_parcels", window=DAY)(Parcels)


class Revenue(TypedDict):
    orders: int
    cents: int
    largest_cents: int


@app.projection("daily_revenue", events=[OrderPaid], bucket="demo_orders_revenue", window=DAY, version=2)
class DailyRevenue:
    """By country and day: how many orders were paid, how much that was, and the largest of them."""

    def key(self, event: OrderPaid) -> str:
        return event.country

    def apply(self, state: Revenue | None, event: OrderPaid) -> Revenue:
        before = state or {"orders": 0, "cents": 0, "largest_cents": 0}
        return {
            "orders": before["orders"] + 1,
            "cents": before["cents"] + event.amount_cents,
            "largest_cents": max(before["largest_cents"], event.amount_cents),
        }


@app.handler(OrderCancelled, durable="refunds", timeout=4, ack_wait_s=5)
async def refund(event: OrderCancelled, ctx: Context, bank: Bank) -> OrderRefunded:
    return await pay_back(event, ctx, bank)
