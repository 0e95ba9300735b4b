"""The application: its handlers and its projection.

``jetspark run billing.service:app --apply`` runs it. Deploy as many processes as you like.
"""

from collections.abc import AsyncIterator

from billing.events import InvoiceDue, InvoicePaid, PaymentDeclined
from billing.outside import CardDeclined, Mailer, Provider, UnknownCustomer
from jetspark.app import App, Breaker, Context, Reject, Retry

app = App("billing", stream="BILLING", subjects=["billing.>"], source="/shop/billing")


@app.lifespan
async def resources() -> AsyncIterator[tuple[Provider, Mailer]]:
    yield Provider(), Mailer()  # connect here; code after the yield runs when the workers have ended


@app.handler(
    InvoiceDue,
    durable="charge",
    concurrency=8,
    rate=100,  # the provider's limit
    timeout=20,
    retry=Retry(attempts=8, first_s=1, max_s=6 * 3600, final=(UnknownCustomer,)),
    breaker=Breaker(failures=20, open_s=30),
)
async def charge(event: InvoiceDue, ctx: Context, provider: Provider) -> InvoicePaid | PaymentDeclined:
    if event.currency != "EUR":
        raise Reject(f"no account in {event.currency}")
    try:
        receipt = await ctx.once("charge", provider.charge, event.customer, event.invoice, event.amount_cents)
    except CardDeclined as error:
        return PaymentDeclined(customer=event.customer, invoice=event.invoice, reason=str(error), email=event.email)
    ctx.log.info("charged %s", event.invoice)
    return InvoicePaid(
        customer=event.customer,
        invoice=event.invoice,
        amount_cents=event.amount_cents,
        receipt=receipt,
        email=event.email,
    )


@app.handler(InvoicePaid, PaymentDeclined, durable="tell", in_order=False)
async def tell(event: InvoicePaid | PaymentDeclined, ctx: Context, mailer: Mailer) -> None:
    if isinstance(event, InvoicePaid):
        text = f"Thank you for {event.amount_cents / 100:.2f} EUR ({event.receipt})."
    else:
        text = f"We could not charge you for {event.invoice}: {event.reason}."
    await ctx.once("mail", mailer.send, event.email, text)


@app.handler(InvoicePaid, durable="balances", idempotent="transaction", bucket="balances")
async def balance(event: InvoicePaid, ctx: Context) -> None:
    """Sum the payments of each customer, exactly once, because the sum and the event's marker are one write."""
    paid = int(await ctx.tx.get(event.customer) or 0)
    await ctx.tx.put(event.customer, str(paid + event.amount_cents).encode())
