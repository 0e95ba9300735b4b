"""Events: facts, in the past tense. Requests are commands, in ``shop.py``."""

from jetspark.app import Event


class OrderPlaced(Event, type="order.placed", key="order_id", subject="orders.placed.{order_id}"):
    order_id: str
    article: str
    count: int


class OrderPaid(Event, type="order.paid", key="order_id", subject="orders.paid.{order_id}"):
    order_id: str


class PaymentOverdue(Event, type="order.payment_overdue", key="order_id", subject="orders.overdue.{order_id}"):
    """Published by a timer."""

    order_id: str


class OrderConfirmed(Event, type="order.confirmed", key="order_id", subject="orders.confirmed.{order_id}"):
    """Its stock is reserved, and it is paid."""

    order_id: str


class OrderShipped(Event, type="order.shipped", key="order_id", subject="orders.shipped.{order_id}"):
    order_id: str
    label: str


class StockAdded(Event, type="stock.added", key="article", subject="stock.added.{article}"):
    article: str
    count: int


class StockReserved(Event, type="stock.reserved", key="article", subject="stock.reserved.{article}"):
    article: str
    order_id: str
    count: int


class StockReleased(Event, type="stock.released", key="article", subject="stock.released.{article}"):
    article: str
    order_id: str
    count: int
