"""The same service on a real nats-server, which the fixture `nats_url` of JetSpark's pytest plugin starts."""

import asyncio

from billing.events import InvoiceDue
from billing.service import app


async def test_balances_are_the_sum_of_what_was_paid(nats_url: str) -> None:
    await app.apply(nats_url)
    workers = asyncio.create_task(app.run(nats_url))
    async with app.connect(nats_url) as billing, asyncio.timeout(30):
        for number in range(10):
            await billing.publish(
                InvoiceDue(
                    customer=f"c-{number % 2}",
                    invoice=f"i-{number}",
                    amount_cents=100 + number,
                    currency="EUR",
                    email="somebody@example.org",
                )
            )
        balances = await billing.js.kv("balances")
        for customer, total in (("c-0", 520), ("c-1", 525)):
            async for entry in balances.watch(customer):
                if int(entry.value) == total:
                    break
    workers.cancel()
    await asyncio.wait([workers])
