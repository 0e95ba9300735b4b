"""Commands that a program decides itself, on a real server: alone, beside workers, and in every kind of trouble."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import random
import time
from typing import Any

import msgspec
import pytest
from support.accounts import Enter, OpenAccount, Transfer, bank, ledger_model
from support.commands import WAYS, deciding, served
from support.linear import Entry, Operation, check_linearizable

import jetspark
from jetspark.app import AppClient, Command, CommandOptions, Decision, Past, decode
from jetspark.app.causes import Cause, current_cause
from jetspark.app.commands.local_decider import CLOSING_S
from jetspark.server import NatsServer, Permissions, User

CALLERS, CALLS = 64, 3


async def answered(client: AppClient, command: Command, id: str) -> Any:
    """The reply, however often it has to be asked for."""
    while True:
        try:
            return await client.call(command, command_id=id, timeout=5.0)
        except (jetspark.NetworkError, jetspark.BoundaryConflict):
            await asyncio.sleep(0.05)


async def entries_of(client: AppClient) -> list[Entry]:
    found = []
    async for message in (await client.js.stream(client.app.stream)).get_messages(1):
        decoded = decode(message.subject, message.data, message.headers, client.app.catalogue)
        found.append(Entry(decoded.causation_id or "", decoded.event.number))
    return found


async def call_all(clients: list[AppClient], operations: list[Operation]) -> None:
    """Have all callers enter in one ledger, each with one of the clients. Some give up, and some ask twice."""
    rng = random.Random(9)

    async def caller(number: int) -> None:
        client = clients[number % len(clients)]
        for count in range(CALLS):
            id = f"c{number}-{count}"
            operation = Operation(id, Enter(ledger="x", writer=id), time.monotonic())
            operations.append(operation)
            if rng.random() < 0.2:
                with contextlib.suppress(TimeoutError, jetspark.JetSparkError):
                    async with asyncio.timeout(rng.uniform(0.0, 0.02)):
                        await client.call(operation.command, command_id=id)
            for _ in range(rng.choice((1, 1, 2))):
                operation.replies.append((await answered(client, operation.command, id)).data)
                operation.returned = min(operation.returned, time.monotonic())

    await asyncio.gather(*map(caller, range(CALLERS)))


@pytest.mark.parametrize("is_killed", [False, True], ids=["in peace", "server killed"])
async def test_workers_and_programs_that_decide_see_one_order(is_killed: bool) -> None:
    app, operations = bank(), list[Operation]()
    with NatsServer() as server:
        async with (
            served(app, server.url, workers=2) as asking,
            app.connect(server.url, decide_here=True) as one,
            app.connect(server.url, decide_here=CommandOptions(concurrency=2)) as other,
        ):
            calling = asyncio.create_task(call_all([asking, one, other, one], operations))
            for _ in range(2 if is_killed else 0):
                await asyncio.sleep(0.3)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            await calling
            entries = await entries_of(asking)
    check_linearizable(operations, entries, ledger_model(len(operations) + 1), 0)
    assert len(entries) == len(operations) == CALLERS * CALLS


# ---- told as by a worker ---------------------------------------------------------------------------------------------


class Echo(Command):
    """Replies with something, which may be nothing that can be sent."""

    what: str
    items: list[int] = []

    def reads(self) -> list[str]:
        return ["ledgers.echo.>"]

    def decide(self, past: Past) -> Decision:
        moment = datetime.datetime(2026, 3, 15, tzinfo=datetime.UTC)
        replies = {"tuple": (1, {"at": moment}), "items": self.items, "object": object(), "text": "\ud800"}
        return Decision(reply=replies[self.what])


@pytest.mark.parametrize("way", WAYS)
async def test_a_reply_is_what_json_makes_of_it(url: str, way: str) -> None:
    app = bank()
    app.command("echo")(Echo)
    async with deciding(app, url, way) as client:
        assert (await client.call(Echo(what="tuple"))).data == [1, {"at": "2026-03-15T00:00:00Z"}]
        for what in ("object", "text"):
            with pytest.raises(jetspark.CommandFailed, match=r"TypeError|UnicodeEncodeError"):
                await client.call(Echo(what=what))


@pytest.mark.parametrize("way", WAYS)
async def test_a_command_is_what_it_was_when_it_was_called(url: str, way: str) -> None:
    app, items = bank(), [1]
    app.command("echo")(Echo)
    async with deciding(app, url, way) as client:
        call = asyncio.create_task(client.call(Echo(what="items", items=items)))
        await asyncio.sleep(0)
        items.append(2)
        assert (await call).data == [1]


@pytest.mark.parametrize("way", WAYS)
async def test_what_cannot_be_sent_is_refused_by_the_caller(url: str, way: str) -> None:
    app = bank()
    async with deciding(app, url, way) as client:
        with pytest.raises(jetspark.PayloadTooLarge):
            await client.call(Enter(ledger="x", writer="w" * 1_100_000))
        with pytest.raises(jetspark.InvalidEvent):
            await client.call(Enter(ledger="x", writer=7))  # type: ignore[arg-type]
        with pytest.raises(jetspark.ConfigError, match="is not a command of app 'bank'"):
            await client.call(Echo(what="items"))
        assert (await (await client.js.stream(app.stream)).info()).state.messages == 0


class Positive(Command):
    """A rule that is only looked at when a command is made or read."""

    number: int

    def __post_init__(self) -> None:
        if self.number == 7:
            raise ValueError("no sevens")

    def reads(self) -> list[str]:
        return ["ledgers.x.>"]

    def decide(self, past: Past) -> None:
        return None


@pytest.mark.parametrize("way", WAYS)
async def test_a_command_that_could_not_be_read_is_not_decided(url: str, way: str) -> None:
    app = bank()
    app.command("positive")(Positive)
    command = Positive(number=6)
    msgspec.structs.force_setattr(command, "number", 7)
    async with deciding(app, url, way) as client:
        with pytest.raises(jetspark.InvalidEvent, match="no sevens"):
            await client.call(command)


@pytest.mark.parametrize("way", WAYS)
async def test_versions_correlation_and_trace_are_those_of_the_call(url: str, way: str) -> None:
    app = bank()
    async with deciding(app, url, way) as client:
        first = await client.call(Enter(ledger="x", writer="w"), command_id="e-1", expected_version=0)
        with pytest.raises(jetspark.WrongVersion) as caught:
            await client.call(Enter(ledger="x", writer="w"), expected_version=0)
        assert (caught.value.boundary, caught.value.expected, caught.value.found) == (("ledgers.x.>",), 0, 1)
        trace = f"00-{'1' * 32}-{'2' * 16}-01"
        token = current_cause.set(Cause("event-1", "request-1", trace))
        try:
            await client.call(Enter(ledger="x", writer="w"), command_id="e-2", expected_version=first.sequence)
        finally:
            current_cause.reset(token)
        message = await (await client.js.stream(app.stream)).get_message(2)
        stored = decode(message.subject, message.data, message.headers, app.catalogue)
        assert (stored.causation_id, stored.correlation_id) == ("e-2", "request-1")
        assert message.headers["traceparent"].startswith(f"00-{'1' * 32}-")


# ---- the life of the client ------------------------------------------------------------------------------------------


async def test_closing_the_client_finishes_what_is_being_decided(url: str) -> None:
    app = bank()
    await app.apply(url)
    async with app.connect(url, decide_here=True) as client:
        calls = [asyncio.create_task(client.call(Enter(ledger=f"l{n % 3}", writer="w"))) for n in range(30)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        late = asyncio.create_task(client.call(Enter(ledger="x", writer="w"), command_id="late"))
        await asyncio.sleep(0)
    assert sorted(each.data for each in await asyncio.gather(*calls)) == sorted([*range(1, 11)] * 3)
    assert (await late).data == 1
    with pytest.raises(jetspark.UsageError, match="not connected"):
        await client.call(Enter(ledger="x", writer="w"))


async def test_closing_the_client_of_a_server_that_hangs_is_bounded_and_tells_the_callers() -> None:
    app = bank()
    with NatsServer() as server:
        await app.apply(server.url)
        async with app.connect(server.url, decide_here=CommandOptions(concurrency=2), drain_timeout_s=0.3) as client:
            await client.call(Enter(ledger="x", writer="w"))
            server.pause()
            # On its way, waiting for its turn, waiting for a place, and not begun.
            ids = {"on its way": "x", "turn": "x", "reading": "y", "place": "z"}
            calls = {
                id: asyncio.create_task(client.call(Enter(ledger=ledger, writer="w"), command_id=id, timeout=60.0))
                for id, ledger in ids.items()
            }
            await asyncio.sleep(0.1)
            began = time.monotonic()
            with contextlib.suppress(jetspark.ConnectionLost):  # what was sent is not confirmed
                await client.__aexit__(None, None, None)
            took_s = time.monotonic() - began
            answers = await asyncio.gather(*calls.values(), return_exceptions=True)
            server.resume()
        assert [type(each) for each in answers] == [jetspark.CommandInDoubt] * 4
        assert took_s < CLOSING_S + 5.0
        async with app.connect(server.url, decide_here=True) as client:
            for id, ledger in ids.items():
                await client.call(Enter(ledger=ledger, writer="w"), command_id=id, timeout=30.0)
            assert (await (await client.js.stream(app.stream)).info()).state.messages == 5


async def test_a_call_that_was_cancelled_before_its_turn_is_not_decided(url: str) -> None:
    app = bank()
    await app.apply(url)
    async with app.connect(url, decide_here=True) as client:
        await client.call(Enter(ledger="x", writer="w"))
        first, second, third = [
            asyncio.create_task(client.call(Enter(ledger="x", writer="w"), command_id=id)) for id in "abc"
        ]
        await asyncio.sleep(0)
        second.cancel()
        assert [(await each).data for each in (first, third)] == [2, 3]
        assert [entry.id for entry in (await entries_of(client))[1:]] == ["a", "c"]


async def test_a_program_that_connects_before_there_is_a_stream_decides_when_there_is_one(url: str) -> None:
    app = bank()
    async with app.connect(url, decide_here=True) as client:
        with pytest.raises(jetspark.CommandFailed, match="StreamNotFound"):
            await client.call(Enter(ledger="x", writer="w"))
        await app.apply(url)
        replies = await asyncio.gather(*(client.call(Enter(ledger="x", writer="w")) for _ in range(5)))
        assert sorted(reply.data for reply in replies) == [1, 2, 3, 4, 5]


async def test_a_connection_that_is_closed_decides_nothing(url: str) -> None:
    app = bank()
    await app.apply(url)
    async with app.connect(url, decide_here=True) as client:
        await client.call(Enter(ledger="x", writer="w"))
        await client._nc.close()  # type: ignore[union-attr]
        for _ in range(2):
            with pytest.raises(jetspark.ConnectionClosed):
                await client.call(Enter(ledger="x", writer="w"))


def test_where_commands_are_decided_is_said_with_options_or_a_word() -> None:
    for wrong in (1, "here", None):
        with pytest.raises(jetspark.ConfigError, match="decide_here="):
            bank().connect("nats://127.0.0.1:4222", decide_here=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("may_hear", [True, False], ids=["with advisories", "without"])
async def test_the_permissions_that_the_documentation_names_are_enough(may_hear: bool) -> None:
    advisories = ["$JS.EVENT.ADVISORY.STREAM.*.BANK"] if may_hear else []
    needed = Permissions(
        publish_allow=[
            "accounts.>",
            "ledgers.>",
            "$JS.API.STREAM.INFO.BANK",
            "$JS.API.STREAM.MSG.GET.BANK",
            "$JS.API.DIRECT.GET.BANK",
        ],
        subscribe_allow=["_INBOX.>", *advisories],
    )
    users = [User(user="admin", password="a"), User(user="shop", password="s", permissions=needed)]
    app = bank()
    with NatsServer(users=users) as server:
        await app.apply(server.url, auth=jetspark.UserPassword("admin", "a"))
        shop = jetspark.UserPassword("shop", "s")
        for number in (1, 2):
            async with app.connect(server.url, decide_here=True, auth=shop) as client:
                assert (await client.call(Enter(ledger="x", writer="w"))).data == number
                await client.call(OpenAccount(account=f"a-{number}", cents=1))
                moving = Transfer(source=f"a-{number}", target="a-1", cents=0)
                if number == 2:  # one batch, and what the first program has stored
                    assert (await client.call(moving)).events == 2
