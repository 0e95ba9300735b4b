"""A bank: accounts as events, transfers as commands. What is in it never changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

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


class EnterAtTurn(Enter):
    """The same, where the number fits the writer; so that what is refused now is not refused a moment later."""

    def decide(self, past: Past) -> Decision:
        if not fits(len(past), self):
            raise Refused("not now")
        return super().decide(past)


def fits(count: int, command: Enter) -> bool:
    return (count + sum(command.writer.encode())) % 2 == 0


def turns_model(state: int, command: Any) -> tuple[int, int, int] | None:
    """What entering at one's turn has to do."""
    return (state + 1, state + 1, state + 1) if fits(state, command) else None


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


class Booked(NamedTuple):
    """What one event of the bank has done to one account."""

    sequence: int
    command: str
    account: str
    cents: int
    is_opening: bool

    @classmethod
    def of(cls, sequence: int, command: str, event: Any) -> Booked:
        cents = -event.cents if isinstance(event, Withdrawn) else event.cents
        return cls(sequence, command, event.account, cents, isinstance(event, AccountOpened))


class BrokenBooks(AssertionError):
    """Money was made or lost."""


def check_books(booked: Iterable[Booked]) -> tuple[set[str], int]:
    """The commands that have moved money, and the sum, which is what was paid in wherever a command ends.

    Raises:
        BrokenBooks: The sum is another one behind a command, one was stored in two places, or an account has less than
            nothing.
    """
    balances, halves, total, last = dict[str, int](), dict[str, int](), 0, 0
    open_half = ""
    for each in booked:
        if open_half and (each.command != open_half or each.sequence != last + 1):
            raise BrokenBooks(f"{each.sequence}: {open_half} is not whole: the sum is not {total}")
        balances[each.account] = balances.get(each.account, 0) + each.cents
        if balances[each.account] < 0:
            raise BrokenBooks(f"{each.sequence}: {each.account} has {balances[each.account]}")
        last = each.sequence
        if each.is_opening:
            total += each.cents
        else:
            halves[each.command] = halves.get(each.command, 0) + 1
            open_half = each.command if halves[each.command] % 2 else ""
        if not open_half and sum(balances.values()) != total:
            raise BrokenBooks(f"{each.sequence}: the sum is {sum(balances.values())}, and {total} were paid in")
    wrong = [command for command, count in halves.items() if count != 2]
    if wrong:
        raise BrokenBooks(f"decided twice, or half: {wrong[:5]}")
    return set(halves), sum(balances.values())
