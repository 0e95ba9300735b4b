"""A bank: accounts as events, transfers as commands. What is in it never changes."""

from __future__ import annotations

from typing import Any

from jetspark import StreamConfig
from jetspark.app import App, Command, Decision, Event, Past, Refused


class AccountOpened(Event, type="account.opened", key="account", subject="accounts.{account}"):
    account: str
    cents: int


class Withdrawn(Event, type="account.withdrawn", key="account", subject="accounts.{account}"):
    account: str
    cents: int


class Deposited(Event, type="account.deposited", key="account", subject="accounts.{account}"):
    account: str
    cents: int


class Entered(Event, type="ledger.entered", key="ledger", subject="ledgers.{ledger}.entered"):
    """One of many in a row: each says what it was decided on."""

    ledger: str
    number: int
    writer: str


def balance(past: Past, account: str) -> int | None:
    found: int | None = None
    for event in past:
        if event.account == account:
            found = (found or 0) + (-event.cents if isinstance(event, Withdrawn) else event.cents)
    return found


class OpenAccount(Command):
    account: str
    cents: int

    def reads(self) -> list[str]:
        return [f"accounts.{self.account}"]

    def decide(self, past: Past) -> list[Event]:
        if len(past):
            raise Refused("the account is open")
        return [AccountOpened(account=self.account, cents=self.cents)]


class Transfer(Command):
    """Two accounts, two events, each guarded by its own account."""

    source: str
    target: str
    cents: int

    def reads(self) -> list[str]:
        return [f"accounts.{self.source}", f"accounts.{self.target}"]

    def decide(self, past: Past) -> Decision:
        have = balance(past, self.source)
        if have is None or balance(past, self.target) is None:
            raise Refused("no such account")
        if have < self.cents:
            raise Refused(f"{self.source} has {have} cents")
        return Decision(
            events=[
                Withdrawn(account=self.source, cents=self.cents),
                Deposited(account=self.target, cents=self.cents),
            ],
            reply={"left": have - self.cents},
        )


class Enter(Command):
    """The next number in a ledger: linearizable if each number is given once, and none before it is reached."""

    ledger: str
    writer: str

    def reads(self) -> list[str]:
        return [f"ledgers.{self.ledger}.>"]

    def decide(self, past: Past) -> Decision:
        number = len(past) + 1
        return Decision(events=[Entered(ledger=self.ledger, number=number, writer=self.writer)], reply=number)


class EnterFive(Enter):
    """The same, until there are five; so that some are refused."""

    def decide(self, past: Past) -> Decision:
        if len(past) >= 5:
            raise Refused("full")
        return super().decide(past)


class EnterBlindly(EnterFive):
    """Does not look at the whole past."""

    def decide(self, past: Past) -> Decision:
        return Decision(events=[Entered(ledger=self.ledger, number=min(len(past), 2) + 1, writer=self.writer)], reply=1)


def ledger_model(limit: int) -> Any:
    """What entering has to do, for the checker of linearizability: the state is how many there are."""

    def model(state: int, command: Any) -> tuple[int, int, int] | None:
        return None if state >= limit else (state + 1, state + 1, state + 1)

    return model


def bank(name: str = "bank", replicas: int = 1) -> App:
    """A new application, so that tests can declare more."""
    app = App(
        name,
        stream=StreamConfig(name=f"{name.upper()}", subjects=["accounts.>", "ledgers.>"], replicas=replicas),
        events=[AccountOpened, Withdrawn, Deposited, Entered],
    )
    app.command("accounts.open")(OpenAccount)
    app.command("accounts.transfer")(Transfer)
    app.command("ledgers.enter")(Enter)
    return app


class Balances:
    def key(self, event: Event) -> str:
        return event.account  # type: ignore[attr-defined,no-any-return]

    def apply(self, state: int | None, event: Event) -> int:
        return (state or 0) + (-event.cents if isinstance(event, Withdrawn) else event.cents)  # type: ignore[attr-defined]


class Deposit(Command):
    account: str
    cents: int

    def reads(self) -> list[str]:
        return [f"accounts.{self.account}"]

    def snapshot_key(self) -> str:
        return self.account

    def decide(self, past: Past) -> Decision:
        return Decision(
            events=[Deposited(account=self.account, cents=self.cents)], reply=(past.state or 0) + self.cents
        )


def bank_with_balances(**options: Any) -> App:
    """A bank whose deposits are decided on the balance that a projection keeps."""
    app = bank()
    app.projection("balances", events=[AccountOpened, Withdrawn, Deposited], bucket="balances")(Balances)
    app.command("accounts.deposit", snapshot="balances", **options)(Deposit)
    return app
