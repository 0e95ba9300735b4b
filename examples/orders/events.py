"""The events of an order. These classes are the contract with all readers of the stream."""

from typing import Annotated, Any

from msgspec import Meta

from jetspark.app import Event, Timestamp, upcast

Cents = Annotated[int, Meta(ge=1)]


class OrderPlaced(Event, type="order.placed", key="order_id", subject="demo.orders.placed.{order_id}"):
    order_id: str
    customer: str
    amount_cents: Cents
    at: Timestamp


class OrderPaid(Event, type="order.paid", version=2, key="order_id", subject="demo.orders.paid.{order_id}"):
    """The first version had the amount as a text, "12.34", and no country: the shop sold in Germany only."""

    order_id: str
    country: str
    amount_cents: Cents
    at: Timestamp


@upcast(OrderPaid, from_version=1)
def _in_cents(old: dict[str, Any]) -> dict[str, Any]:
    euros, _, cents = old["amount"].partition(".")
    return {"order_id": old["order_id"], "country": "DE", "amount_cents": int(euros + cents), "at": old["at"]}


class ParcelScanned(Event, type="parcel.scanned", key="order_id", subject="demo.orders.scanned.{order_id}"):
    order_id: str
    place: str
    at: Timestamp


class OrderCancelled(Event, type="order.cancelled", key="order_id", subject="demo.orders.cancelled.{order_id}"):
    order_id: str
    country: str
    amount_cents: Cents
    at: Timestamp


class OrderRefunded(Event, type="order.refunded", key="order_id", subject="demo.orders.refunded.{order_id}"):
    order_id: str
    country: str
    amount_cents: Cents
    receipt: str
    at: Timestamp
