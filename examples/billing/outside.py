"""The world outside: a payment provider and a mail server. Replace these two classes by clients of your own."""


class CardDeclined(Exception):
    """The bank says no. That is an answer, not a failure."""


class UnknownCustomer(Exception):
    """The provider has no card of this customer: no retry helps."""


class Provider:
    """Takes money. A call with an idempotency key that it has seen before returns the first receipt."""

    def __init__(self) -> None:
        self.receipts: dict[str, str] = {}

    async def charge(self, customer: str, invoice: str, cents: int, *, idempotency_key: str) -> str:
        return self.receipts.setdefault(idempotency_key, f"receipt of {invoice}")


class Mailer:
    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []

    async def send(self, address: str, text: str) -> None:
        self.sent.append((address, text))
