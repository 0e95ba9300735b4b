"""The application: commands for orders and stock, the workflow that holds them together, and the parcels as entities.

``jetspark run fulfilment.shop:app --apply`` runs all of it. Deploy as many processes as you like.

The workflow reserves stock with commands, not with events for handlers, because the commands of one run have an
order. The stock is released after it was reserved, even if the reservation fails at first, waits in the dead letters
beyond the payment's time-out, and is done a day later. Two handlers that take two events have no order between them:
the release would find nothing to release, and the later reservation would hold the stock permanently.
"""

import msgspec

from fulfilment.events import (
    OrderConfirmed,
    OrderPaid,
    OrderPlaced,
    OrderShipped,
    PaymentOverdue,
    StockAdded,
    StockReleased,
    StockReserved,
)
from jetspark.app import App, Command, CommandAnswered, Context, Decision, EntityChange, Event, Past, Refused, Template

PAYMENT_S = 30 * 60
# As subjects of events have their values, escaped: an article may be called anything.
PLACED, ARTICLE = Template("orders.placed.{order_id}"), Template("{article}")

app = App(
    "shop",
    stream="KV_shop",  # states, events and timers in one stream, which is that of bucket `shop`
    subjects=["orders.>", "stock.>"],
    source="/shop",
    events=[OrderShipped],
    timers=True,
)


# ---- placing: decided on the past events of this order ---------------------------------------------------------------


@app.command("orders.place")
class PlaceOrder(Command):
    order_id: str
    article: str
    count: int

    def reads(self) -> list[str]:
        return [PLACED.fill(order_id=self.order_id)]

    def decide(self, past: Past) -> list[Event]:
        if len(past):
            raise Refused(f"order {self.order_id} exists already")
        if self.count < 1:
            raise Refused(f"count={self.count}: expected 1 or more")
        return [OrderPlaced(order_id=self.order_id, article=self.article, count=self.count)]


# ---- the stock: its events are the truth, and commands decide on them ------------------------------------------------


class Stock(msgspec.Struct, frozen=True):
    free: int = 0
    reserved: dict[str, int] = {}
    """Reservations by order, including shipped ones, so that a repeated request is recognised."""


@app.projection("stock", events=[StockAdded, StockReserved, StockReleased], bucket="stock")
class StockLevels:
    """The stock of each article, for queries and for the commands below."""

    def key(self, event: StockAdded | StockReserved | StockReleased) -> str:
        return event.article

    def apply(self, state: Stock | None, event: StockAdded | StockReserved | StockReleased) -> Stock:
        free, reserved = (0, {}) if state is None else (state.free, state.reserved)
        match event:
            case StockAdded():
                return Stock(free + event.count, reserved)
            case StockReserved():
                return Stock(free - event.count, reserved | {event.order_id: event.count})
            case StockReleased():
                return Stock(free + event.count, {key: reserved[key] for key in reserved if key != event.order_id})


class StockCommand(Command):
    """A command that is decided on all past events of an article."""

    article: str

    def reads(self) -> list[str]:
        return [f"stock.*.{ARTICLE.fill(article=self.article)}"]

    def snapshot_key(self) -> str:
        return self.article


@app.command("stock.add", snapshot="stock")
class AddStock(StockCommand):
    count: int

    def decide(self, past: Past) -> list[Event]:
        return [StockAdded(article=self.article, count=self.count)]


@app.command("stock.reserve", snapshot="stock")
class ReserveStock(StockCommand):
    order_id: str
    count: int

    def decide(self, past: Past) -> list[Event]:
        stock: Stock = past.state or Stock()
        if self.order_id in stock.reserved:
            return []
        if stock.free < self.count:
            raise Refused("out of stock")
        return [StockReserved(article=self.article, order_id=self.order_id, count=self.count)]


@app.command("stock.release", snapshot="stock")
class ReleaseStock(StockCommand):
    order_id: str

    def decide(self, past: Past) -> list[Event]:
        stock: Stock = past.state or Stock()
        if self.order_id not in stock.reserved:
            return []  # the reservation was refused
        count = stock.reserved[self.order_id]
        return [StockReleased(article=self.article, order_id=self.order_id, count=count)]


# ---- the workflow ----------------------------------------------------------------------------------------------------


class Flow(msgspec.Struct, frozen=True):
    step: str
    is_paid: bool = False


@app.workflow("fulfilment", key="order_id")
class Fulfilment:
    """Placed, reserved and paid, the last two in any order, and shipped; or given up, with the stock released."""

    def react(
        self, state: Flow | None, event: OrderPlaced | CommandAnswered | OrderPaid | PaymentOverdue | OrderShipped
    ) -> Decision | None:
        if state is None:
            return self._begin(event) if isinstance(event, OrderPlaced) else None
        match event:
            case CommandAnswered(name="reserve", refused=str(reason)):
                return Decision(failed=reason)
            case CommandAnswered(name="reserve") if state.is_paid:
                return self._confirm(event.run)
            case CommandAnswered(name="reserve"):
                return Decision(state=Flow("waiting for payment"))
            case OrderPaid() if state.step == "waiting for payment":
                return self._confirm(event.order_id)
            case OrderPaid() if state.step == "reserving":
                return Decision(state=Flow("reserving", is_paid=True), cancels=["payment"])
            case PaymentOverdue():
                return Decision(failed="not paid in time")
            case OrderShipped():
                return Decision(state=Flow("shipped", is_paid=True), is_done=True)
        return None

    def _begin(self, event: OrderPlaced) -> Decision:
        id, article = event.order_id, event.article
        return Decision(
            state=Flow("reserving"),
            commands={"reserve": ReserveStock(order_id=id, article=article, count=event.count)},
            # Declared here, and not when the answer comes: the run may fail while the command is in transit.
            compensations=[ReleaseStock(order_id=id, article=article)],
            timers={"payment": (PaymentOverdue(order_id=id), PAYMENT_S)},
        )

    def _confirm(self, id: str) -> Decision:
        confirmed = Flow("shipping", is_paid=True)
        return Decision(state=confirmed, events=[OrderConfirmed(order_id=id)], cancels=["payment"])


# ---- the parcels: a handler does the external work, and an entity keeps its result -----------------------------------


class Parcel(msgspec.Struct, frozen=True):
    label: str


app.entities("parcels", state=Parcel)


@app.handler(OrderConfirmed, durable="shipping")
async def ship(event: OrderConfirmed, ctx: Context) -> None:
    label = await ctx.once("label", print_label, event.order_id)

    def decide(change: EntityChange) -> None:
        change.set(Parcel(label))
        change.emit(OrderShipped(order_id=event.order_id, label=label))

    await ctx.entities("parcels").modify(event.order_id, decide)


async def print_label(order_id: str) -> str:
    return f"label of {order_id}"  # ask a carrier here
