"""The application: a command that places orders, the stock as entities, and the workflow that holds them together.

``jetspark run fulfilment.shop:app --apply`` runs all of it. Deploy as many processes as you like.
"""

import msgspec

from fulfilment.events import (
    OrderPaid,
    OrderPlaced,
    PaymentOverdue,
    ReleaseStock,
    ReserveStock,
    ShipOrder,
    StockMissing,
    StockReserved,
)
from jetspark.app import App, Command, Context, Decision, EntityChange, Event, Past, Refused

PAYMENT_S = 30 * 60

app = App(
    "shop",
    stream="KV_shop",  # states, events and timers in one stream, which is that of bucket `shop`
    subjects=["orders.>", "stock.>"],
    source="/shop",
    events=[ReleaseStock, ShipOrder, StockMissing, StockReserved],
    timers=True,
)


# ---- placing: decided on what has happened to this order -------------------------------------------------------------


@app.command("orders.place")
class PlaceOrder(Command):
    order_id: str
    article: str
    count: int

    def reads(self) -> list[str]:
        return [f"orders.{self.order_id}.placed"]

    def decide(self, past: Past) -> list[Event]:
        if len(past):
            raise Refused(f"order {self.order_id} exists already")
        if self.count < 1:
            raise Refused(f"count={self.count}: expected 1 or more")
        return [OrderPlaced(order_id=self.order_id, article=self.article, count=self.count)]


# ---- the stock: its state is the truth -------------------------------------------------------------------------------


class Stock(msgspec.Struct, frozen=True):
    free: int = 0
    reserved: dict[str, int] = {}
    """By order. So a request that comes again is recognised."""


app.entities("stock", state=Stock)


@app.handler(ReserveStock, durable="reserve")
async def reserve(event: ReserveStock, ctx: Context) -> None:
    def decide(change: EntityChange) -> None:
        stock: Stock = change.state or Stock()
        if event.order_id in stock.reserved:
            return  # done, and told with it
        if stock.free < event.count:
            change.emit(StockMissing(order_id=event.order_id))
            return
        reserved = stock.reserved | {event.order_id: event.count}
        change.set(Stock(free=stock.free - event.count, reserved=reserved))
        change.emit(StockReserved(order_id=event.order_id))

    await ctx.entities("stock").modify(event.article, decide)


@app.handler(ReleaseStock, durable="release")
async def release(event: ReleaseStock, ctx: Context) -> None:
    def decide(change: EntityChange) -> None:
        stock: Stock = change.state or Stock()
        if event.order_id in stock.reserved:
            reserved = {order: count for order, count in stock.reserved.items() if order != event.order_id}
            change.set(Stock(free=stock.free + stock.reserved[event.order_id], reserved=reserved))

    await ctx.entities("stock").modify(event.article, decide)


# ---- the workflow ----------------------------------------------------------------------------------------------------


class Flow(msgspec.Struct, frozen=True):
    article: str
    step: str
    is_paid: bool = False


@app.workflow("fulfilment", key="order_id")
class Fulfilment:
    """Placed, reserved and paid in whatever order the last two come; or given up, with the stock released."""

    def react(
        self, state: Flow | None, event: OrderPlaced | StockReserved | StockMissing | OrderPaid | PaymentOverdue
    ) -> Decision | None:
        id = event.order_id
        if state is None:
            if not isinstance(event, OrderPlaced):
                return None
            return Decision(
                state=Flow(event.article, "reserving"),
                events=[ReserveStock(order_id=id, article=event.article, count=event.count)],
                compensations=[ReleaseStock(order_id=id, article=event.article)],
                timers={"payment": (PaymentOverdue(order_id=id), PAYMENT_S)},
            )
        match event:
            case StockReserved() if state.is_paid:
                return self._ship(id, state)
            case StockReserved():
                return Decision(state=msgspec.structs.replace(state, step="waiting for payment"))
            case OrderPaid() if state.step == "waiting for payment":
                return self._ship(id, state)
            case OrderPaid():
                return Decision(state=msgspec.structs.replace(state, is_paid=True), cancels=["payment"])
            case StockMissing():
                return Decision(failed="out of stock")
            case PaymentOverdue():
                return Decision(failed="not paid in time")
        return None

    def _ship(self, id: str, state: Flow) -> Decision:
        shipped = msgspec.structs.replace(state, step="shipped", is_paid=True)
        return Decision(state=shipped, events=[ShipOrder(order_id=id)], is_done=True)
