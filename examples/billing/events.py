"""The facts of billing. These classes are the contract with all readers of the stream."""

from typing import Annotated, Any

from msgspec import Meta

from jetspark.app import Event, Private, upcast

Cents = Annotated[int, Meta(ge=1)]


class InvoiceDue(Event, type="invoice.due", version=2, key="customer", subject="billing.invoice.due.{customer}"):
    """A customer owes us something. The first version had no currency: everything was in euros."""

    customer: str
    invoice: str
    amount_cents: Cents
    currency: str
    email: Private[str]

    def event_id(self) -> str:
        return f"{self.invoice}.due"  # an invoice falls due once, however often that is published


@upcast(InvoiceDue, from_version=1)
def in_euros(old: dict[str, Any]) -> dict[str, Any]:
    return old | {"currency": "EUR"}


class InvoicePaid(Event, type="invoice.paid", key="customer", subject="billing.invoice.paid.{customer}"):
    customer: str
    invoice: str
    amount_cents: Cents
    receipt: str
    email: Private[str]


class PaymentDeclined(Event, type="payment.declined", key="customer", subject="billing.payment.declined.{customer}"):
    customer: str
    invoice: str
    reason: str
    email: Private[str]
