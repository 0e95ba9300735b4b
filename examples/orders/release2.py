"""The application as it will be after the next release: refunds lower the revenue, and none is too large.

In a project of your own this is not another file: it is the next commit of ``app.py``. Another fold has another
``version``, so ``jetspark rebuild`` makes its states beside the live ones, and swaps.
"""

from jetspark.app import App, Context
from orders import app as release1
from orders.app import DAY, Bank, OrderStatus, Parcels, Revenue, pay_back
from orders.events import OrderCancelled, OrderPaid, OrderPlaced, OrderRefunded, ParcelScanned

app = App("demo_orders", stream="DEMO_ORDERS", subjects=["demo.orders.>"], source="/demo/orders")
app.lifespan(release1.resources)
app.projection(
    "order_status", events=[OrderPlaced, OrderPaid, ParcelScanned, OrderCancelled], bucket="demo_orders_status"
)(OrderStatus)
app.projection("parcels", events=[ParcelScanned], bucket="demo_orders_parcels", window=DAY)(Parcels)


@app.projection("daily_revenue", events=[OrderPaid, OrderRefunded], bucket="demo_orders_revenue", window=DAY, version=2)
class DailyRevenue:
    """By country and day: how many orders were paid and not refunded, and how much that was."""

    def key(self, event: OrderPaid | OrderRefunded) -> str:
        return event.country

    def apply(self, state: Revenue | None, event: OrderPaid | OrderRefunded) -> Revenue:
        before = state or {"orders": 0, "cents": 0}
        sign = 1 if isinstance(event, OrderPaid) else -1
        return {"orders": before["orders"] + sign, "cents": before["cents"] + sign * event.amount_cents}


@app.handler(OrderCancelled, durable="refunds", timeout=4, ack_wait_s=5)
async def refund(event: OrderCancelled, ctx: Context, bank: Bank) -> OrderRefunded:
    return await pay_back(event, ctx, bank)
