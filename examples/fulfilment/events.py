"""What happens: facts, in the past tense. What is asked for is a command, in ``shop.py``."""

from jetspark.app import Event


class OrderPlaced(Event, type="order.placed", key="order_id", subject="orders.{order_id}.placed"):
    order_id: str
    article: str
    count: int


class OrderPaid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str


class PaymentOverdue(Event, type="order.payment_overdue", key="order_id", subject="orders.{order_id}.overdue"):
    """Published by a timer."""

    order_id: str


class OrderConfirmed(Event, type="order.confirmed", key="order_id", subject="orders.{order_id}.confirmed"):
    """Its stock is reserved, and it is paid."""

    order_id: str


class OrderShipped(Event, type="order.shipped", key="order_id", subject="orders.{order_id}.shipped"):
    order_id: str
    label: str


class StockAdded(Event, type="stock.added", key="article", subject="stock.{article}.added"):
    article: str
    count: int


class StockReserved(Event, type="stock.reserved", key="article", subject="stock.{article}.reserved"):
    article: str
    order_id: str
    count: int


class StockReleased(Event, type="stock.released", key="article", subject="stock.{article}.released"):
    article: str
    order_id: str
    count: int
