"""Another program that publishes: ``python -m billing.bill acme 1999`` says that an invoice is due."""

import asyncio
import os
import sys

from billing.events import InvoiceDue
from billing.service import app


async def main(customer: str, amount_cents: int) -> None:
    servers = os.environ.get("JETSPARK_SERVERS", "nats://127.0.0.1:4222")
    due = InvoiceDue(
        customer=customer,
        invoice=f"{customer}-2026-03",
        amount_cents=amount_cents,
        currency="EUR",
        email=f"{customer}@example.org",
    )
    async with app.connect(servers) as billing:
        ack = await billing.publish(due)
        print("is known already" if ack.duplicate else f"stored as number {ack.sequence}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
