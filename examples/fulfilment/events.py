"""What happens: facts in the past tense, and what a workflow asks handlers to do."""

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


class ReserveStock(Event, type="stock.reserve", key="article", subject="stock.{article}.reserve"):
    order_id: str
    article: str
    count: int


class ReleaseStock(Event, type="stock.release", key="article", subject="stock.{article}.release"):
    order_id: str
    article: str


class StockReserved(Event, type="stock.reserved", key="order_id", subject="orders.{order_id}.reserved"):
    order_id: str


class StockMissing(Event, type="stock.missing", key="order_id", subject="orders.{order_id}.missing"):
    order_id: str


class ShipOrder(Event, type="order.ship", key="order_id", subject="orders.{order_id}.ship"):
    order_id: str
