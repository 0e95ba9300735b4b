"""A bank whose accounts are entities, programs that move money there, and what has to be true of what they stored.

An account's event says what it changed and what the account has then. A transfer changes two accounts, in one batch. So
the stream alone tells: the sum is the same at the end of each batch, and each event fits the one before it. A witness
reads along while the bank is open, and sees states before they are replaced: each has to be what the event of its batch
says.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import msgspec

from jetspark import StreamConfig
from jetspark.app import App, AppClient, EntityChange, Event
from jetspark.app.contracts.envelope import read_envelope
from jetspark.errors import JetSparkError
from support.apps import until
from support.processes import start_process

OPENED = 100


class Account(msgspec.Struct, frozen=True):
    cents: int


class Opened(Event, type="account.opened", key="account", subject="accounts.{account}.opened"):
    account: str
    cents: int
    balance: int


class Moved(Event, type="account.moved", key="account", subject="accounts.{account}.moved"):
    account: str
    cents: int
    balance: int
    transfer: str


class Corrected(Event, type="account.corrected", key="account", subject="accounts.{account}.corrected"):
    """By which the events come to say what the state says."""

    account: str
    cents: int
    balance: int


class Balances:
    def key(self, event: Opened | Moved | Corrected) -> str:
        return event.account

    def apply(self, state: Account | None, event: Opened | Moved | Corrected) -> Account:
        return Account((state.cents if state else 0) + event.cents)

    def correct(self, key: str, folded: Account | None, state: Account | None) -> list[Event]:
        had, has = (each.cents if each else 0 for each in (folded, state))
        return [Corrected(account=key, cents=has - had, balance=has)]


def bank(truth: str = "state", replicas: int = 1) -> App:
    app = App("bank", stream=StreamConfig(name="KV_bank", replicas=replicas), subjects=["accounts.>"])
    events = [Opened, Moved, Corrected]
    app.entities("accounts", state=Account, truth=truth, events=events, fold=Balances)  # type: ignore[arg-type]
    return app


def names(count: int) -> list[str]:
    return [f"a{number}" for number in range(count)]


async def open_accounts(client: AppClient, accounts: Iterable[str]) -> None:
    def open_one(change: EntityChange) -> None:
        if change.state is None:
            change.set(Account(OPENED))
            change.emit(Opened(account=change.key, cents=OPENED, balance=OPENED))

    entities = client.entities("accounts")
    await asyncio.gather(*(entities.modify(account, open_one) for account in accounts))


async def transfer(client: AppClient, source: str, target: str, cents: int, id: str) -> bool:
    """False if there is not enough in the source."""

    def decide(one: EntityChange, other: EntityChange) -> None:
        if one.state.cents < cents:
            return
        for change, amount in ((one, -cents), (other, cents)):
            balance = change.state.cents + amount
            change.set(Account(balance))
            change.emit(Moved(account=change.key, cents=amount, balance=balance, transfer=id))

    changes = await client.entities("accounts").modify_many([source, target], decide, tries=1000)
    return changes[0].is_something


# ---- programs that are killed ----------------------------------------------------------------------------------------


def start_transfers(urls: list[str], name: str, acknowledged: Path, accounts: int, replicas: int) -> BaseProcess:
    """A program that moves money until it is killed, and writes down what was acknowledged."""
    return start_process(_transfer_for_ever, urls, name, acknowledged, accounts, replicas)


def _transfer_for_ever(urls: list[str], name: str, acknowledged: Path, accounts: int, replicas: int) -> None:
    async def work() -> None:
        async with bank(replicas=replicas).connect(urls) as client:
            with acknowledged.open("a", buffering=1) as done:
                await asyncio.gather(*(one_after_the_other(client, number, done) for number in range(8)))

    async def one_after_the_other(client: AppClient, number: int, done: object) -> None:
        rng, count, known = random.Random(f"{name}-{number}"), 0, names(accounts)
        while True:
            count += 1
            id = f"{name}-{number}-{count}"
            source, target = rng.sample(known, 2)
            with contextlib.suppress(JetSparkError):  # in doubt, or a leader away for long: the next one, then
                if await transfer(client, source, target, rng.randint(1, 80), id):
                    print(id, file=done)  # type: ignore[call-overload]

    asyncio.run(work())


# ---- what was stored -------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """A message of the bank's stream."""

    sequence: int
    subject: str
    data: bytes
    batch: str
    is_last: bool
    """Of its batch, or of nothing."""


@asynccontextmanager
async def witness(client: AppClient) -> AsyncIterator[dict[int, Seen]]:
    """Everything that is stored while the block lasts, by sequence; states that are replaced at once may be missing."""
    seen: dict[int, Seen] = {}
    stream = await client.js.stream("KV_bank")
    first = (await stream.info()).state.last_sequence + 1

    async def read() -> None:
        async for message in stream.ordered_consumer(start_sequence=max(1, first)).messages():
            headers = message.headers
            seen[message.metadata.stream_sequence] = Seen(
                message.metadata.stream_sequence,
                message.subject,
                message.data,
                headers.get("Nats-Batch-Id", ""),
                "Nats-Batch-Id" not in headers or "Nats-Batch-Commit" in headers,
            )

    reading = asyncio.create_task(read())
    try:
        yield seen
        last = (await stream.info()).state.last_sequence
        await until(lambda: reading.done() or max(seen, default=0) >= last)
        if reading.done():
            reading.result()
    finally:
        reading.cancel()
        await asyncio.wait([reading])


class BrokenBank(AssertionError):
    """Money was made or lost, or an event does not fit its state."""


class Checked(NamedTuple):
    transfers: set[str]
    states: int
    """That were compared with the event of their batch."""
    batches: int


def check_bank(seen: Mapping[int, Seen], final: Mapping[str, int]) -> Checked:
    """Whether the sum was what it had to be at the end of every batch, and each event fits its state.

    Args:
        seen: All messages of the stream, and states that were replaced since, by sequence.
        final: What the accounts have in the end.

    Raises:
        BrokenBank: With the sequence.
    """
    balances, halves = dict[str, int](), dict[str, list[Seen]]()
    total = compared = batches = 0
    states: dict[str, int] = {}
    for sequence in sorted(seen):
        message = seen[sequence]
        if message.subject.startswith("$KV."):
            states[message.subject.rpartition(".")[2]] = msgspec.json.decode(message.data)["cents"]
        else:
            envelope = read_envelope(message.data)
            event = msgspec.json.decode(envelope.data)
            account, cents, balance = event["account"], event["cents"], event["balance"]
            if balances.get(account, 0) + cents != balance or balance < 0:
                raise BrokenBank(f"{sequence}: {account} had {balances.get(account, 0)}, and the event says {event}")
            balances[account] = balance
            total += cents if envelope.type == "account.opened" else 0
            if envelope.type == "account.moved":
                halves.setdefault(event["transfer"], []).append(message)
            if account in states:
                compared += 1
                if states.pop(account) != balance:
                    raise BrokenBank(f"{sequence}: the state of {account} is not what its event says: {event}")
        if message.is_last:
            batches += 1
            if sum(balances.values()) != total:
                raise BrokenBank(f"{sequence}: the sum is {sum(balances.values())}, and {total} were paid in")
            if states:
                raise BrokenBank(f"{sequence}: states without an event: {states}")
    for id, both in halves.items():
        if len(both) != 2 or both[0].batch != both[1].batch:
            raise BrokenBank(f"transfer {id} has {len(both)} halves, at {[each.sequence for each in both]}")
    if balances != dict(final):
        wrong = [name for name in balances.keys() | final.keys() if balances.get(name) != final.get(name)]
        raise BrokenBank(f"accounts whose state is not what their events make: {wrong[:5]}")
    return Checked(set(halves), compared, batches)
