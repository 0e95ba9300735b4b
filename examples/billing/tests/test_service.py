"""The service on a model of the server, in virtual time: hours of retries take milliseconds."""

from pathlib import Path

from billing.events import InvoiceDue, InvoicePaid, PaymentDeclined
from billing.outside import CardDeclined, Mailer, Provider, UnknownCustomer
from billing.service import app, charge

from jetspark.app import check_contracts
from jetspark.app.testing import TestApp, check_reliability, run_handler


class FakeProvider(Provider):
    """Fails with what a test puts into ``failures``, one after the other, and then works."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__()
        self.failures = list(failures)

    async def charge(self, customer: str, invoice: str, cents: int, *, idempotency_key: str) -> str:
        if self.failures:
            raise self.failures.pop(0)
        return await super().charge(customer, invoice, cents, idempotency_key=idempotency_key)


def due(invoice: str, customer: str = "acme", currency: str = "EUR") -> InvoiceDue:
    return InvoiceDue(
        customer=customer, invoice=invoice, amount_cents=1999, currency=currency, email=f"{customer}@example.org"
    )


async def test_an_invoice_is_charged_and_the_customer_is_told() -> None:
    provider, mailer = FakeProvider(), Mailer()
    async with TestApp(app, dependencies=[provider, mailer]) as test:
        await test.publish(due("i-1"))
        await test.settled()
        [paid] = test.published(InvoicePaid)
        assert (paid.invoice, paid.receipt) == ("i-1", "receipt of i-1")
        assert mailer.sent == [("acme@example.org", "Thank you for 19.99 EUR (receipt of i-1).")]
        assert test.dead_letters == []


async def test_an_invoice_that_is_announced_twice_is_charged_once() -> None:
    provider = FakeProvider()
    async with TestApp(app, dependencies=[provider, Mailer()]) as test:
        assert not (await test.publish(due("i-1"))).duplicate
        assert (await test.publish(due("i-1"))).duplicate
        await test.settled()
        assert len(provider.receipts) == 1


async def test_a_declined_card_is_an_answer() -> None:
    mailer = Mailer()
    async with TestApp(app, dependencies=[FakeProvider(CardDeclined("insufficient funds")), mailer]) as test:
        await test.publish(due("i-1"))
        await test.settled()
        assert [each.reason for each in test.published(PaymentDeclined)] == ["insufficient funds"]
        assert test.published(InvoicePaid) == []
        assert "insufficient funds" in mailer.sent[0][1]


async def test_an_outage_delays_invoices_and_keeps_their_order() -> None:
    outage = [ConnectionError("the provider is away")] * 6
    async with TestApp(app, dependencies=[FakeProvider(*outage), Mailer()]) as test:
        for number in range(3):
            await test.publish(due(f"i-{number}"))
        await test.settled()  # longer waits than ten seconds are stored in the server, and nothing is busy meanwhile
        assert test.published(InvoicePaid) == []
        test.advance(6 * 3600)
        await test.settled()
        assert [each.invoice for each in test.published(InvoicePaid)] == ["i-0", "i-1", "i-2"]
        assert test.dead_letters == []


async def test_an_unknown_customer_is_a_dead_letter_until_somebody_has_mended_it() -> None:
    provider = FakeProvider(UnknownCustomer("no card"))
    async with TestApp(app, dependencies=[provider, Mailer()]) as test:
        await test.publish(due("i-1"))
        await test.publish(due("i-2"))  # of the same customer: it waits behind the first
        await test.publish(due("i-3", customer="bird"))
        await test.settled()
        assert [each.invoice for each in test.published(InvoicePaid)] == ["i-3"]
        assert [(each.status, each.key) for each in test.dead_letters] == [("open", "acme"), ("behind", "acme")]

        await test.redrive("charge", "error=UnknownCustomer")
        await test.settled()
        assert [each.invoice for each in test.published(InvoicePaid)] == ["i-3", "i-1", "i-2"]
        assert test.dead_letters == []


async def test_a_foreign_currency_is_not_tried_twice() -> None:
    async with TestApp(app, dependencies=[FakeProvider(), Mailer()]) as test:
        await test.publish(due("i-1", currency="USD"))
        await test.settled()
        [dead_letter] = test.dead_letters
        assert dead_letter.attempts == 1
        assert dead_letter.cause is not None
        assert dead_letter.cause.message == "no account in USD"


async def test_a_worker_that_dies_after_the_charge_takes_no_money_twice() -> None:
    provider = FakeProvider()
    async with TestApp(app, dependencies=[provider, Mailer()]) as test:
        crash = test.crash_after_effect(handler="charge")
        await test.publish(due("i-1"))
        await test.settled()
        assert crash.happened == 1
        assert len(provider.receipts) == 1
        assert [each.receipt for each in test.published(InvoicePaid)] == ["receipt of i-1"]


async def test_a_charge_that_was_recorded_is_not_repeated() -> None:
    """One handler alone, as it would run again after its worker died: the fastest kind of test."""
    provider = FakeProvider(ConnectionError("must not be asked"))
    again = await run_handler(charge, due("i-1"), provider, app=app, attempt=2, recorded={"charge": "receipt of i-1"})
    assert again.outcome == "done"
    assert [each.receipt for each in again.published] == ["receipt of i-1"]
    assert again.effects == []


async def test_two_dozen_failures_change_nothing() -> None:
    """Lost acknowledgements, workers that die at any step, a server that restarts: the same end each time."""
    provider = Provider()
    await check_reliability(
        app,
        due("i-1"),
        due("i-2"),
        due("i-3", customer="bird"),
        dependencies=[provider, Mailer()],
        effects=provider.receipts.items,
        reset=provider.receipts.clear,
    )


def test_what_was_promised_can_still_be_read() -> None:
    check_contracts(app, Path(__file__).parent / "golden")
