"""The same service on a real nats-server, which the fixture `nats_url` of JetSpark's pytest plugin starts."""

from billing.events import InvoiceDue
from billing.outside import Mailer, Provider
from billing.service import app

import jetspark
from jetspark.app.testing import TestApp


async def test_balances_are_the_sum_of_what_was_paid(nats_url: str) -> None:
    async with TestApp(app, server=nats_url, dependencies=[Provider(), Mailer()]) as test:
        for number in range(10):
            await test.publish(
                InvoiceDue(
                    customer=f"c-{number % 2}",
                    invoice=f"i-{number}",
                    amount_cents=100 + number,
                    currency="EUR",
                    email="somebody@example.org",
                )
            )
        await test.settled()
    async with jetspark.connect(nats_url) as nc:
        balances = await nc.jetstream().kv("balances")
        assert [(await balances.get(customer)).value for customer in ("c-0", "c-1")] == [b"520", b"525"]
