"""Entities on a real server: state, events and timers of a change are stored together, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import nats
import pytest

from jetspark import KVConfig
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Event
from jetspark.app.client import AppClient
from jetspark.errors import (
    ConfigError,
    Conflict,
    DuplicateMessageId,
    InvalidEvent,
    JetSparkError,
    NetworkError,
    RequestTimeout,
    UsageError,
)
from jetspark.server import NatsServer


class Account(msgspec.Struct, frozen=True):
    cents: int


class Moved(Event, type="account.moved", key="account", subject="accounts.{account}.moved"):
    account: str
    cents: int
    balance: int

    def event_id(self) -> str | None:
        return "the one" if self.account == "twice" else None


class Overdrawn(Event, type="account.overdrawn", key="account", subject="accounts.{account}.overdrawn"):
    account: str


STREAMS = ("KV_bank", "BANK")
"""Of a bucket, and of any other name."""


def bank(stream: str = "KV_bank") -> App:
    app = App("bank", stream=stream, subjects=["accounts.>"], events=[Moved, Overdrawn], timers=True)
    app.entities("accounts", state=Account)
    return app


async def move(client: AppClient, account: str, cents: int) -> None:
    def decide(change: Any) -> None:
        balance = (change.state.cents if change.state else 0) + cents
        change.set(Account(balance))
        change.emit(Moved(account=account, cents=cents, balance=balance))

    await client.entities("accounts").modify(account, decide)


async def count(client: AppClient, filter: str) -> int:
    info = await (await client.js.stream(client.app.stream)).info(subjects_filter=filter)
    return sum((info.state.subjects or {}).values())


@pytest.mark.parametrize("stream", STREAMS)
async def test_a_change_stores_state_events_and_timers_together(nats_url: str, stream: str) -> None:
    app = bank(stream)
    await app.apply(nats_url)
    async with app.connect(nats_url) as client:
        accounts = client.entities("accounts")
        async with accounts.change("a") as change:
            assert change.state is None
            change.set(Account(-5))
            change.emit(Moved(account="a", cents=-5, balance=-5))
            change.set_timer("overdrawn a", Overdrawn(account="a"), after=3600)
        assert await accounts.get("a") == Account(-5)
        assert await client.timers.get("overdrawn a") is not None
        first = change.revision
        async with accounts.change("a") as change:
            assert (change.state, change.revision) == (Account(-5), first)
            change.set(Account(5))
            change.emit(Moved(account="a", cents=10, balance=5))
            change.cancel_timer("overdrawn a")
        assert await client.timers.get("overdrawn a") is None
        assert (await accounts.get("a"), await count(client, "accounts.>")) == (Account(5), 2)
        async with accounts.change("a") as change:
            change.delete()
        assert await accounts.get("a") is None
        async with accounts.change("a") as change:
            assert change.state is None
            change.set(Account(1))
        assert await accounts.get("a") == Account(1)


@pytest.mark.parametrize("is_set_before", [False, True])
@pytest.mark.parametrize("done", ["sc", "cs", "ss", "cc", "scs", "csc", "ssc"])
async def test_of_all_that_a_change_does_to_a_timer_the_last_counts(
    nats_url: str, done: str, is_set_before: bool
) -> None:
    """``s`` sets it, and ``c`` cancels it."""
    app = bank("KV_bank")
    await app.apply(nats_url)
    async with app.connect(nats_url) as client:
        if is_set_before:
            await client.timers.set("overdrawn a", Overdrawn(account="a"), after=3600)
        ids: list[str] = []
        async with client.entities("accounts").change("a") as change:
            change.set(Account(-5))
            for each in done:
                if each == "s":
                    ids.append(change.set_timer("overdrawn a", Overdrawn(account="a"), after=3600))
                else:
                    change.cancel_timer("overdrawn a")
        timer = await client.timers.get("overdrawn a")
        assert len({*ids}) == done.count("s")
        if done.endswith("c"):
            assert timer is None
        else:
            assert timer is not None
            assert json.loads(timer.data)["id"] == ids[-1]


@pytest.mark.parametrize("emitted", [0, 2, 8])
async def test_a_change_ends_more_timers_than_it_has_messages(nats_url: str, emitted: int) -> None:
    app = bank()
    await app.apply(nats_url)
    async with app.connect(nats_url) as client:
        accounts, names = client.entities("accounts"), [f"timer {number}" for number in range(7)]
        async with accounts.change("a") as change:
            for name in names:
                change.set_timer(name, Overdrawn(account="a"), after=3600)
        async with accounts.change("a") as change:
            change.set(Account(1))
            change.set_timer("another", Overdrawn(account="a"), after=3600)
            for _ in range(emitted):
                change.emit(Moved(account="a", cents=1, balance=1))
            for name in names[1:]:
                change.cancel_timer(name)
            change.cancel_timer("never set")
        assert {timer.name async for timer in client.timers.list()} == {"another", names[0]}
        assert (await accounts.get("a"), await count(client, "accounts.>")) == (Account(1), emitted)

        async def end_too_many() -> None:
            async with accounts.change("a") as change:
                for number in range(1001):
                    change.cancel_timer(f"timer {number}")

        with pytest.raises(UsageError, match="a change of 1001 messages"):
            await end_too_many()
        assert {timer.name async for timer in client.timers.list()} == {"another", names[0]}


@pytest.mark.parametrize("stream", STREAMS)
async def test_what_was_overtaken_or_left_by_an_exception_stores_nothing(nats_url: str, stream: str) -> None:
    app = bank(stream)
    await app.apply(nats_url)
    async with app.connect(nats_url) as client, app.connect(nats_url) as other:
        accounts = client.entities("accounts")

        async def be_overtaken() -> None:
            async with accounts.change("a") as change:
                change.set(Account(1))
                change.emit(Moved(account="a", cents=1, balance=1))
                change.set_timer("x", Overdrawn(account="a"), after=3600)
                await move(other, "a", 7)

        with pytest.raises(Conflict, match=r"accounts\.a"):
            await be_overtaken()
        assert await accounts.get("a") == Account(7)

        async def fail() -> None:
            async with accounts.change("a") as change:
                change.set(Account(1))
                raise RuntimeError

        with pytest.raises(RuntimeError):
            await fail()
        with pytest.raises(InvalidEvent):
            async with accounts.change("a") as change:
                change.set("text")
        async with accounts.change("a"):
            pass  # nothing to store
        assert (await accounts.get("a"), await count(client, "accounts.>"), await count(client, "timers.>")) == (
            Account(7),
            1,
            0,
        )
        with pytest.raises(UsageError, match="inside of its block"):
            change.set(Account(2))
        with pytest.raises(ConfigError, match="expected one of those of app 'bank': accounts"):
            client.entities("orders")


@pytest.mark.parametrize("emitted", [0, 1])
@pytest.mark.parametrize(("setting", "cancelling"), [("a", "b"), ("b", "a")])
async def test_a_timer_that_one_entity_sets_and_another_cancels_is_refused(
    nats_url: str, setting: str, cancelling: str, emitted: int
) -> None:
    app = bank()
    await app.apply(nats_url)
    async with app.connect(nats_url) as client:
        accounts = client.entities("accounts")

        async def change() -> None:
            async with accounts.changes("a", "b") as parts:
                by_key = {part.key: part for part in parts}
                for part in parts:
                    part.set(Account(1))
                    for _ in range(emitted):
                        part.emit(Moved(account=part.key, cents=1, balance=1))
                by_key[setting].set_timer("overdraft", Overdrawn(account="a"), after=3600)
                by_key[cancelling].cancel_timer("overdraft")

        with pytest.raises(UsageError, match="two of them set or cancel a timer of the same name"):
            await change()
        assert (await accounts.get("a"), await accounts.get("b")) == (None, None)
        assert await client.timers.get("overdraft") is None


@pytest.mark.parametrize("stream", STREAMS)
async def test_several_entities_change_together_or_not_at_all(nats_url: str, stream: str) -> None:
    app = bank(stream)
    app.entities("transfers", state=Account)
    await app.apply(nats_url)
    async with app.connect(nats_url) as client, app.connect(nats_url) as other:
        accounts, transfers = client.entities("accounts"), client.entities("transfers")
        async with accounts.changes("a", "b", transfers.change("t1")) as (a, b, log):
            for change, cents in ((a, -5), (b, 5)):
                change.set(Account(cents))
                change.emit(Moved(account=change.key, cents=cents, balance=cents))
            log.set(Account(5))
        assert [await accounts.get("a"), await accounts.get("b"), await transfers.get("t1")] == [
            Account(-5),
            Account(5),
            Account(5),
        ]
        assert (await accounts.read("b")).revision == b.revision

        async def be_overtaken() -> None:
            async with accounts.changes("a", "b") as (a, _):
                a.set(Account(0))
                a.emit(Moved(account="a", cents=5, balance=0))
                await move(other, "b", 1)  # only read by the change, and so part of it

        with pytest.raises(Conflict, match=r"accounts\.b") as caught:
            await be_overtaken()
        assert caught.value.keys == ("accounts.b",)
        assert await accounts.get("a") == Account(-5)
        async with accounts.changes("a", "b"):
            pass  # nothing to store
        assert await count(client, "accounts.>") == 3


async def test_transfers_at_the_same_time_share_batches(nats_url: str) -> None:
    app = bank()
    await app.apply(nats_url)
    async with app.connect(nats_url) as client:
        accounts = client.entities("accounts")

        def one_cent(source: Any, target: Any) -> None:
            for change, cents in ((source, -1), (target, 1)):
                change.set(Account((change.state.cents if change.state else 0) + cents))

        pairs = [(f"a{number % 16}", f"a{(number + 5) % 16}") for number in range(64)]
        await asyncio.gather(*(accounts.modify_many(pair, one_cent) for pair in pairs))
        assert client._committer is not None
        assert client._committer.changes == 64
        assert client._committer.batches <= 60
        assert {each.key: each.state async for each in accounts.list()} == {
            f"a{number}": Account(0) for number in range(16)
        }


@pytest.mark.parametrize("stream", STREAMS)
async def test_entities_are_listed_by_their_keys(nats_url: str, stream: str) -> None:
    app = bank(stream)
    app.entities("other", state=Account)
    await app.apply(nats_url)
    names = ["a", "a.b", "ä b", "long" * 100]
    async with app.connect(nats_url) as client:
        accounts = client.entities("accounts")
        for number, key in enumerate([*names, "gone"]):
            async with accounts.change(key) as change:
                change.set(Account(number))
        async with accounts.change("gone") as change:
            change.delete()
        async with client.entities("other").change("a") as change:
            change.set(Account(9))
        assert sorted([key async for key in accounts.keys()]) == sorted(names)  # noqa: SIM118
        listed = [each async for each in accounts.list()]
        assert {each.key: each.state.cents for each in listed} == {key: number for number, key in enumerate(names)}
        assert {each.revision for each in listed} == {(await accounts.read(key)).revision for key in names}
        assert [key async for key in client.entities("other").keys()] == ["a"]  # noqa: SIM118


@pytest.mark.parametrize("stream", STREAMS)
async def test_an_entity_is_watched_from_its_present_state_on(nats_url: str, stream: str) -> None:
    app = bank(stream)
    await app.apply(nats_url)
    async with app.connect(nats_url) as client, asyncio.timeout(60):
        accounts = client.entities("accounts")
        async with contextlib.aclosing(accounts.watch("a")) as states:  # type: ignore[type-var]
            assert await anext(states) is None
            await move(client, "b", 1)
            for cents in (5, 7):
                await move(client, "a", cents)
                assert await anext(states) == await accounts.get("a")
            async with accounts.change("a") as change:
                change.delete()
            assert await anext(states) is None
        await move(client, "a", 9)
        async with contextlib.aclosing(accounts.watch("a")) as states:  # type: ignore[type-var]
            assert await anext(states) == Account(9)


async def test_states_in_a_stream_of_another_name_are_no_bucket(nats_url: str) -> None:
    app = bank("BANK")
    await app.apply(nats_url)
    async with app.connect(nats_url) as client:
        await move(client, "a", 5)
        accounts = client.entities("accounts")
        assert (accounts.bucket, client.app.entities["accounts"].state_subjects.prefix) == (None, "states.bank.")
        assert await count(client, accounts.subject_of("a")) == 1
        # A bucket of the name can still be made: nobody has its subjects.
        await client.js.create_kv(KVConfig(bucket="BANK"))


async def test_other_clients_read_the_bucket(nats_url: str) -> None:
    app = bank()
    await app.apply(nats_url)
    async with app.connect(nats_url) as client:
        await move(client, "a", 5)
        theirs = await nats.connect(nats_url)
        bucket = await theirs.jetstream().key_value("bank")
        entry = await bucket.get("accounts.a")
        assert entry.value == b'{"cents":5}'
        # And write it, if they must: their state is what the next change finds.
        await bucket.put("accounts.a", b'{"cents":50}')
        await move(client, "a", 5)
        assert await client.entities("accounts").get("a") == Account(55)
        await theirs.close()


async def test_an_event_whose_id_is_taken_is_an_error_and_no_conflict(nats_url: str) -> None:
    app = bank()
    await app.apply(nats_url)
    async with app.connect(nats_url) as client:
        await move(client, "twice", 1)
        with pytest.raises(DuplicateMessageId):
            await move(client, "twice", 1)
        assert await client.entities("accounts").get("twice") == Account(1)


async def test_changes_at_the_same_time_share_batches(nats_url: str) -> None:
    app = bank()
    await app.apply(nats_url)
    async with app.connect(nats_url) as client:
        await asyncio.gather(*(move(client, f"a{number % 16}", 1) for number in range(64)))
        assert client._committer is not None
        assert client._committer.changes == 64
        assert client._committer.batches <= 40
        states = [await client.entities("accounts").get(f"a{number}") for number in range(16)]
        assert states == [Account(4)] * 16


async def test_a_program_that_changes_one_entity_many_times_at_once_is_not_in_its_own_way(nats_url: str) -> None:
    app = bank()
    await app.apply(nats_url)
    async with app.connect(nats_url) as client:
        moves = [asyncio.create_task(move(client, name, 1)) for _ in range(40) for name in "ab"]
        await asyncio.sleep(0.05)
        for task in moves[20::10]:
            task.cancel()
        results = await asyncio.gather(*moves, return_exceptions=True)
        assert {type(result) for result in results} == {type(None), asyncio.CancelledError}
        assert client._committer is not None
        stored = await count(client, "accounts.>")
        states = [await client.entities("accounts").get(name) for name in "ab"]
        assert stored == sum(state.cents for state in states) == client._committer.changes
        assert 74 <= stored <= 80
        assert client._committer.sent <= stored  # nothing was sent that was sure to be refused


async def test_of_changes_that_have_read_the_same_one_is_stored_and_the_others_are_not_sent(nats_url: str) -> None:
    app = bank()
    await app.apply(nats_url)
    async with app.connect(nats_url) as client:
        accounts = client.entities("accounts")
        blocks = [accounts.change("a") for _ in range(20)]
        for number, block in enumerate(blocks):
            await block.begin()
            block.set(Account(number))
            block.emit(Moved(account="a", cents=number, balance=number))
        results = await asyncio.gather(*(block.end() for block in blocks), return_exceptions=True)
        conflict = results[1]
        assert isinstance(conflict, Conflict)
        assert (results[0], str(conflict)) == (None, str(Conflict("bank", ("accounts.a",))))
        assert [type(result) for result in results[1:]] == [Conflict] * 19
        assert client._committer is not None
        assert (client._committer.sent, await accounts.get("a")) == (1, Account(0))


async def test_a_function_that_changes_entities_itself_waits_for_nobody_who_waits_for_it(nats_url: str) -> None:
    app = bank()
    await app.apply(nats_url)
    async with app.connect(nats_url) as client, asyncio.timeout(60):
        accounts = client.entities("accounts")

        calls = 0

        async def decide(change: Any) -> None:
            nonlocal calls
            calls += 1
            await asyncio.sleep(0.1)  # by then the other one has its turn
            await move(client, "b" if change.key == "a" else "a", 1)
            await asyncio.create_task(move(client, "c", 1))
            change.emit(Overdrawn(account=change.key))

        results = await asyncio.gather(
            accounts.modify("a", decide, tries=2), accounts.modify("b", decide, tries=2), return_exceptions=True
        )
        # Each disturbs the other one, which is told.
        assert Conflict in [type(result) for result in results]
        assert (await accounts.get("c")).cents == calls > 2


async def test_money_is_neither_made_nor_lost_whatever_is_killed() -> None:
    """Transfers between accounts by several clients, with the server killed: every event fits its state."""
    app, rng, moves = bank(), random.Random(5), Counter[str]()
    async with NatsServer() as server:
        await app.apply(server.url)

        async def work() -> None:
            async with app.connect(server.url) as client:
                for _ in range(40):
                    one, other = rng.sample("abcdefgh", 2)
                    for account, cents in ((one, -1), (other, 1)):
                        while True:
                            try:
                                await move(client, account, cents)
                                moves[account] += 1
                                break
                            except NetworkError:
                                raise
                            except JetSparkError:
                                await asyncio.sleep(0.05)

        workers = [asyncio.create_task(work()) for _ in range(4)]
        for _ in range(2):
            await asyncio.sleep(0.4)
            server.kill()
            await asyncio.to_thread(server.restart)
        await asyncio.gather(*workers)
        async with app.connect(server.url) as client:
            states = {account: await client.entities("accounts").get(account) for account in "abcdefgh"}
            assert sum(state.cents for state in states.values() if state is not None) == 0
            stream = await client.js.stream("KV_bank")
            balances: dict[str, int] = {}
            events: Counter[str] = Counter()
            async for message in stream.get_messages(1, subject="accounts.*.moved"):
                data = msgspec.json.decode(message.data)["data"]
                account = data["account"]
                assert balances.get(account, 0) + data["cents"] == data["balance"], "an event that fits no state"
                balances[account] = data["balance"]
                events[account] += 1
            assert balances == {account: state.cents for account, state in states.items() if state is not None}
            assert events == moves


async def change_whose_answer_is_lost(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, others: int, *, is_stored: bool
) -> tuple[Account | None, list[int]]:
    """One program takes 50 out, and others put in 1 each before it asks again; returns the account and its moves."""
    app = bank()
    await app.apply(nats_url)
    async with app.connect(nats_url) as client, app.connect(nats_url) as other:
        await move(other, "a", 100)
        real, batches = JetStream.atomic_batch, list[str]()

        class Lost:
            """A batch that never arrives."""

            async def add(self, *message: Any, **options: Any) -> None:
                pass

        @contextlib.asynccontextmanager
        async def lossy(js: JetStream, **options: Any) -> AsyncIterator[Any]:
            batches.append("sent")
            if is_stored or len(batches) > 1:
                async with real(js, **options) as batch:
                    yield batch
            else:
                yield Lost()
            if len(batches) == 1:
                for _ in range(others):
                    await move(other, "a", 1)
                raise RequestTimeout("the commit of a batch", 1.0)

        def atomic_batch(js: JetStream, **options: Any) -> Any:
            return lossy(js, **options) if js is client.js else real(js, **options)

        monkeypatch.setattr(JetStream, "atomic_batch", atomic_batch)
        await move(client, "a", -50)
        stream = await client.js.stream("KV_bank")
        events = [msgspec.json.decode(each.data) async for each in stream.get_messages(1, subject="accounts.a.moved")]
        return await client.entities("accounts").get("a"), [event["data"]["cents"] for event in events]


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("others", [3, 40])
async def test_a_change_whose_answer_is_lost_is_made_once_however_often_others_change_the_entity(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, others: int, is_stored: bool
) -> None:
    """A state remembers sixteen changes; what it has forgotten is looked for among the events."""
    account, moves = await change_whose_answer_is_lost(nats_url, monkeypatch, others, is_stored=is_stored)
    assert account == Account(50 + others)
    assert sorted(moves) == [-50, *[1] * others, 100]


async def test_a_change_is_not_looked_for_among_too_many_events(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetspark.app.entities.committer.MAX_LOOKS", 39)
    with pytest.raises(RequestTimeout):  # nobody knows
        await change_whose_answer_is_lost(nats_url, monkeypatch, 40, is_stored=False)


async def test_a_change_without_events_that_its_state_has_forgotten_is_in_doubt(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = bank()
    await app.apply(nats_url)
    async with app.connect(nats_url) as client, app.connect(nats_url) as other:
        real, answers = JetStream.publish, list[str]()

        async def publish(js: JetStream, *message: Any, **options: Any) -> Any:
            answer = await real(js, *message, **options)
            if js is client.js and not answers:
                answers.append("lost")
                for _ in range(20):
                    await move(other, "a", 1)
                raise RequestTimeout("a publish", 1.0)
            return answer

        monkeypatch.setattr(JetStream, "publish", publish)
        with pytest.raises(RequestTimeout):
            await client.entities("accounts").modify("a", lambda change: change.set(Account(50)))
        assert await client.entities("accounts").get("a") == Account(70)


async def test_wrong_arguments_of_a_change_are_told(nats_url: str) -> None:
    app = bank()
    await app.apply(nats_url)
    async with app.connect(nats_url) as client:
        accounts = client.entities("accounts")
        wrong: Any
        for wrong in (None, 5, b"a", ""):
            for keys in ([wrong], ["a", wrong]):
                with pytest.raises(ConfigError, match="entity key="):
                    await accounts.modify_many(keys, lambda *changes: None)
        for wrong in (None, 5, Account(1)):
            with pytest.raises(ConfigError, match="decide="):
                await accounts.modify("a", wrong)
