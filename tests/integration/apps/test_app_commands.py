"""Commands on a real server: decided once, guarded, answered again, and found as a service."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import msgspec
import nats
import pytest
from support.accounts import (
    AccountOpened,
    Deposit,
    Deposited,
    Enter,
    Entered,
    OpenAccount,
    Transfer,
    Withdrawn,
    bank,
    bank_with_balances,
)
from support.apps import until
from support.commands import WAYS, are_serving, deciding, served, start_worker

import jetspark
from jetspark import StreamConfig
from jetspark.aio.context import context_of
from jetspark.app import (
    App,
    AppClient,
    Command,
    CommandOptions,
    CommandReply,
    Decision,
    Event,
    Past,
    Refused,
    Template,
    decode,
)
from jetspark.app.causes import Cause, current_cause
from jetspark.app.commands import wire
from jetspark.app.commands.decision_messages import MAX_REPLY_BYTES
from jetspark.app.commands.decision_store import CommandStore
from jetspark.server import NatsServer


@pytest.mark.parametrize("way", WAYS)
async def test_a_command_is_decided_stored_and_answered_again(url: str, way: str) -> None:
    app = bank()
    async with deciding(app, url, way) as client:
        first = await client.call(OpenAccount(account="a", cents=100), command_id="open-a")
        again = await client.call(OpenAccount(account="a", cents=100), command_id="open-a")
        assert (first, first.events, first.is_repeated, again.is_repeated) == (again, 1, False, True)
        with pytest.raises(Refused, match="the account is open"):
            await client.call(OpenAccount(account="a", cents=5))
        await client.call(OpenAccount(account="b", cents=0))
        moved = await client.call(Transfer(source="a", target="b", cents=30), command_id="t-1")
        assert (moved.events, moved.data) == (2, {"left": 70})
        assert await client.call(Transfer(source="a", target="b", cents=30), command_id="t-1") == moved


@pytest.mark.parametrize("way", WAYS)
async def test_a_retry_after_the_duplicate_window_gets_the_recorded_reply(url: str, way: str) -> None:
    config = StreamConfig(name="BANK", subjects=["accounts.>", "ledgers.>"], duplicate_window_s=0.1)
    app = App("bank", stream=config, events=[Entered])
    app.command("ledgers.enter")(Enter)
    async with deciding(app, url, way) as client:
        first = await client.call(Enter(ledger="x", writer="w"), command_id="e-1")
    await asyncio.sleep(0.3)  # the window is over, and so is the worker that decided
    async with deciding(app, url, way) as client:
        again = await client.call(Enter(ledger="x", writer="w"), command_id="e-1")
        assert (again, again.is_repeated) == (first, True)


@pytest.mark.parametrize("way", WAYS)
async def test_an_id_that_was_used_elsewhere_is_an_error_and_not_a_conflict(url: str, way: str) -> None:
    app = bank()
    async with deciding(app, url, way) as client:
        await client.call(Enter(ledger="x", writer="w"), command_id="same")
        with pytest.raises(jetspark.CommandFailed, match="command_id was used before with other fields"):
            await client.call(Enter(ledger="y", writer="w"), command_id="same")


@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize("way", WAYS)
async def test_an_event_with_the_same_cause_is_not_taken_for_one_of_the_command(
    url: str, way: str, is_remembered: bool
) -> None:
    """A handler publishes an event, and calls a command with the id of the message that it handles."""
    app = bank()
    async with deciding(app, url, way) as client:
        if is_remembered:
            await client.call(Enter(ledger="x", writer="before"))
        token = current_cause.set(Cause("message-1", "message-1", None))
        try:
            await client.publish(Entered(ledger="x", number=0, writer="handler"))
        finally:
            current_cause.reset(token)
        first = await client.call(Enter(ledger="x", writer="w"), command_id="message-1")
        assert (first.is_repeated, first.data) == (False, 2 + is_remembered)
        again = await client.call(Enter(ledger="x", writer="w"), command_id="message-1")
        assert (again, again.is_repeated) == (first, True)


IDS = ["a.b", "ü", "a b", "", "*", ">", "a*", "=2A", "x/y"]
LEDGER = Template("ledgers.{ledger}")


class EnterSafely(Enter):
    def reads(self) -> list[str]:
        return [f"{LEDGER.fill(ledger=self.ledger)}.>"]


async def test_values_that_are_filled_by_a_template_make_a_boundary_of_their_own(url: str) -> None:
    app = bank()
    app.command("ledgers.enter_safely")(EnterSafely)
    await app.apply(url)
    async with app.connect(url, decide_here=True) as client:
        await client.call(Enter(ledger="x", writer="w"))
        for number in (1, 2):
            replies = [await client.call(EnterSafely(ledger=each, writer="w")) for each in IDS]
            assert [reply.data for reply in replies] == [number] * len(IDS)


@pytest.mark.parametrize("ledger", ["a.b", "ü", "a*"])
async def test_values_that_are_not_escaped_are_told_with_the_remedy(url: str, ledger: str) -> None:
    app = bank()
    await app.apply(url)
    async with app.connect(url, decide_here=True) as client:
        with pytest.raises(
            jetspark.CommandFailed, match=r"is inside what it reads .* fill those of reads with Template"
        ):
            await client.call(Enter(ledger=ledger, writer="w"))


ENTERED = Entered(ledger="x", number=1, writer="w")
# Fields of a decision that have another form, and what is said of them.
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "one event": ({"events": ENTERED}, r"events=Entered\(.*\): expected a list"),
    "no events": ({"events": None}, "events=None: expected a list"),
    "a text for events": ({"events": "ab"}, "events='ab': expected a list"),
    "no cancels": ({"cancels": None}, "cancels=None: expected a list"),
    "a timer without a time": ({"timers": {"t": ENTERED}}, r"timers: 't' is Entered\(.*\): expected \(event, when\)"),
    "a timer with too much": ({"timers": {"t": (ENTERED, 1, 2)}}, r"timers: 't' is .*: expected \(event, when\)"),
    "timers as a list": ({"timers": [("t", ENTERED, 1)]}, r"timers=\[.*\]: expected a dict of name -> \(event, when\)"),
    "a timer with a number": ({"timers": {5: (ENTERED, 1)}}, r"timers=\{5: .*\}: expected a dict of name ->"),
    "no timers": ({"timers": None}, r"timers=None: expected a dict"),
    "commands as a list": (
        {"commands": [Enter(ledger="x", writer="w")]},
        "commands=.*: expected a dict of name -> command",
    ),
    "one compensation": ({"compensations": ENTERED}, "compensations=Entered.*: expected a list"),
    "a text for a claim": ({"is_done": "no"}, "is_done='no': expected True or False"),
    "a claim for a reason": ({"failed": True}, "failed=True: expected a text that says why, or None"),
}


class EnterOddly(Enter):
    odd: str

    def decide(self, past: Past) -> Decision:
        return Decision(**{"events": [ENTERED], **ODD[self.odd][0]})


async def test_a_decision_of_another_form_is_told_by_field_value_and_remedy(url: str) -> None:
    app = bank()
    app.command("ledgers.enter_oddly")(EnterOddly)
    await app.apply(url)
    async with app.connect(url, decide_here=True) as client:
        for odd, (_, said) in ODD.items():
            with pytest.raises(jetspark.CommandFailed, match=said):
                await client.call(EnterOddly(ledger="x", writer="w", odd=odd))
        assert (await client.js.stream(app.stream)).cached_info.state.messages == 0


class TooMuch(Event, type="ledger.too_much", key="ledger", subject="ledgers.{ledger}.too_much"):
    ledger: str


# Decisions that cannot be stored.
WRONG: dict[str, Any] = {
    "breaks its contract": Entered(ledger="x", number="none", writer="w"),  # type: ignore[arg-type]
    "is outside of the boundary": Entered(ledger="y", number=1, writer="w"),
    "is of a type that the app does not know": TooMuch(ledger="x"),
    "has a reply that is too large": Decision(
        events=[Entered(ledger="x", number=1, writer="w")], reply="x" * (MAX_REPLY_BYTES + 1)
    ),
}


class EnterAfterFirst(Enter):
    """Decides something wrong where there is nothing yet."""

    wrong: str

    def decide(self, past: Past) -> Any:
        return super().decide(past) if len(past) else WRONG[self.wrong]


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_decision_that_cannot_be_stored_counts_only_on_what_the_leader_has(url: str, wrong: str) -> None:
    app = bank()
    app.command("ledgers.enter_after_first")(EnterAfterFirst)
    await app.apply(url)
    command = EnterAfterFirst(ledger="x", writer="w", wrong=wrong)
    async with app.connect(url, decide_here=True) as one, app.connect(url, decide_here=True) as other:
        with pytest.raises(jetspark.CommandFailed):
            await one.call(command)
        await other.call(Enter(ledger="x", writer="w"))
        decided = await other.call(command, command_id="c-1")
        # This program remembers that there was nothing.
        again = await one.call(command, command_id="c-1")
        assert (again, again.is_repeated) == (decided, True)


async def test_many_callers_of_one_boundary_get_each_number_once_from_several_workers(url: str) -> None:
    app = bank()
    async with served(app, url, workers=3) as client:
        calls = [client.call(Enter(ledger="x", writer=f"w-{n}"), timeout=30.0) for n in range(60)]
        replies = await asyncio.gather(*calls)
    assert sorted(reply.data for reply in replies) == list(range(1, 61))


@pytest.mark.parametrize("way", WAYS)
async def test_transfers_never_change_the_sum_at_any_sequence(url: str, way: str) -> None:
    """Each transfer is one atomic batch with a guard for each account, so no reader sees half of one."""
    app, accounts, rng = bank(), [f"a{n}" for n in range(20)], random.Random(7)
    async with deciding(app, url, way, workers=2) as client:
        await asyncio.gather(*(client.call(OpenAccount(account=each, cents=50)) for each in accounts))

        async def transfer(number: int) -> None:
            source, target = rng.sample(accounts, 2)
            command = Transfer(source=source, target=target, cents=rng.randint(1, 40))
            try:
                await client.call(command, command_id=f"t-{number}", timeout=30.0)
            except Refused:
                return

        await asyncio.gather(*(transfer(number) for number in range(100)))
        await check_balances(client.js, app, 20 * 50)


async def check_balances(js: jetspark.JetStream, app: App, total: int) -> int:
    """No account is ever below zero, and after each transfer the sum is what it was; returns how many there were."""
    balances: dict[str, int] = {}
    transfers = 0
    async for message in (await js.stream(app.stream)).get_messages(1):
        event = decode(message.subject, message.data, message.headers, app.catalogue).event
        balances[event.account] = balances.get(event.account, 0) + (
            -event.cents if isinstance(event, Withdrawn) else event.cents
        )
        assert balances[event.account] >= 0, message.sequence
        transfers += isinstance(event, Deposited)
        if not isinstance(event, Withdrawn | AccountOpened):
            assert sum(balances.values()) == total, message.sequence
    return transfers


async def test_without_a_worker_the_error_says_how_to_start_one(url: str) -> None:
    app = bank()
    await app.apply(url)
    async with app.connect(url) as client:
        with pytest.raises(jetspark.NoWorkers, match=r"no worker of app 'bank' is running.*jetspark run"):
            await client.call(Enter(ledger="x", writer="w"))


Answer = tuple[bytes, dict[str, str]]
STORED: Answer = wire.write_reply(CommandReply(command_id="c-1", sequence=7, events=1, data="stored")), {}
NO_EVENTS: Answer = wire.write_reply(CommandReply(command_id="c-1", sequence=0, events=0)), {}
REFUSED = wire.write_error(Refused("no"))
IN_DOUBT = wire.write_error(jetspark.CommandInDoubt("ledgers.enter", "c-1", 1.0))
NO_ANSWER: Answer = b"what?", {}


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([REFUSED, STORED], "stored"),
        ([STORED], "stored"),
        ([NO_EVENTS, STORED], "stored"),
        ([IN_DOUBT, STORED], "stored"),
        ([NO_ANSWER, STORED], "stored"),
        ([REFUSED, REFUSED], "CommandRefused"),
        ([REFUSED, NO_EVENTS], None),
        ([NO_EVENTS, REFUSED], "CommandRefused"),
        ([REFUSED, IN_DOUBT], "CommandInDoubt"),
        ([IN_DOUBT, REFUSED], "CommandInDoubt"),
        ([REFUSED], "CommandInDoubt"),
        ([], "CommandInDoubt"),
    ],
)
async def test_of_two_answers_to_one_command_the_one_that_tells_more_counts(
    url: str, answers: list[Answer], told: str | None
) -> None:
    """That nothing is stored is not true before both workers have said so."""
    app, timeout_s = bank(), 60.0 if len(answers) == 2 else 1.0
    await app.apply(url)
    async with app.connect(url) as client, jetspark.connect(url) as nc:
        requests = await nc.subscribe(wire.command_subject("bank", "ledgers.enter"))
        await nc.flush()
        with mock.patch("jetspark.app.commands.caller.REPEATED_AFTER", 0.2 / timeout_s):
            call = asyncio.create_task(client.call(Enter(ledger="x", writer="w"), command_id="c-1", timeout=timeout_s))
            asked = [await requests.next(30.0), await requests.next(30.0)]
            for request, (body, headers) in zip(reversed(asked), answers, strict=False):
                assert not call.done()
                await request.respond(body, headers=headers)
                await nc.flush()
                await asyncio.sleep(0.05)
            [outcome] = await asyncio.gather(call, return_exceptions=True)
    left = [float(request.headers[wire.TIMEOUT]) for request in asked]
    assert timeout_s >= left[0] > left[1] > 0.0
    assert told == (outcome.data if isinstance(outcome, CommandReply) else type(outcome).__name__)


async def test_a_call_without_a_connection_is_not_sent_when_its_time_is_over() -> None:
    app = bank()
    with NatsServer() as server:
        await app.apply(server.url)
        async with app.connect(server.url, reconnect_wait_s=0.05) as client:
            server.stop()
            await until(lambda: not context_of(client.js).client.is_connected)
            with pytest.raises(jetspark.RequestTimeout) as timed_out:
                await client.call(Enter(ledger="x", writer="w"), timeout=0.2)
            assert not timed_out.value.was_sent
            waiting = asyncio.create_task(client.call(Enter(ledger="x", writer="w"), timeout=60.0))
            await asyncio.sleep(0.1)
            server.start()
            async with jetspark.connect(server.url) as nc:
                requests = await nc.subscribe(wire.command_subject("bank", "ledgers.enter"))
                request = await requests.next(30.0)
                assert 0.0 < float(request.headers[wire.TIMEOUT]) < 60.0
                await request.respond(STORED[0])
                assert (await waiting).data == "stored"
                with pytest.raises(TimeoutError):
                    await requests.next(0.2)


class Slow(Command):
    """Decides when it is told to; a decision must not wait, but this is a test of what happens meanwhile."""

    name: str
    gate: Any = None

    def reads(self) -> list[str]:
        return [f"ledgers.{self.name}.>"]

    def decide(self, past: Past) -> Decision:
        import time

        time.sleep(0.3)
        return Decision(events=[Entered(ledger=self.name, number=len(past) + 1, writer="slow")], reply=self.name)


@pytest.mark.parametrize("way", WAYS)
async def test_a_caller_that_gave_up_learns_the_truth_by_asking_again(url: str, way: str) -> None:
    app = bank()
    app.command("slow")(Slow)
    async with deciding(app, url, way) as client:
        with pytest.raises(jetspark.CommandInDoubt, match="command_id='s-1'"):
            await client.call(Slow(name="x"), command_id="s-1", timeout=0.1)
        for _ in range(2):
            assert (await client.call(Slow(name="x"), command_id="s-1", timeout=20.0)).data == "x"
        stream = await client.js.stream(app.stream)
        assert (await stream.info()).state.messages == 1


@pytest.mark.parametrize("way", WAYS)
async def test_a_worker_with_a_full_queue_says_that_it_is_busy(url: str, way: str) -> None:
    app = bank()
    app.command("slow")(Slow)
    async with deciding(app, url, way, serving=CommandOptions(concurrency=1, queue=1)) as client:
        calls = [client.call(Slow(name=f"n{n}"), timeout=20.0) for n in range(6)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        busy = [each for each in answers if isinstance(each, jetspark.WorkersBusy)]
        assert (len(busy), all(each.may_pass for each in busy)) == (4, True)
        assert "busy" in str(busy[0])


@pytest.mark.parametrize("way", WAYS)
async def test_a_long_past_is_read_as_a_projections_state_and_its_tail(url: str, way: str) -> None:
    app = bank_with_balances(remember_s=0.001)
    async with deciding(app, url, way) as client:
        for number in range(1, 6):
            reply = await client.call(Deposit(account="a", cents=1), command_id=f"d-{number}", timeout=20.0)
        assert reply.data == 5
        assert await client.view("balances").get("a", at_least=reply.sequence, timeout=30.0) == 5
        # What is older than the snapshot is not read any more: five events would be more than it may read.
    app = bank_with_balances(remember_s=0.001, max_past=3)
    async with deciding(app, url, way) as client:
        assert (await client.call(Deposit(account="a", cents=1), timeout=20.0)).data == 6


@pytest.mark.parametrize("way", WAYS)
async def test_a_snapshot_does_not_hide_commands_that_were_decided_lately(url: str, way: str) -> None:
    app = bank_with_balances()
    async with deciding(app, url, way) as client:
        first = await client.call(Deposit(account="a", cents=1), command_id="d-1", timeout=20.0)
        last = await client.call(Deposit(account="a", cents=1), command_id="d-2", timeout=20.0)
        await client.view("balances").get("a", at_least=last.sequence, timeout=30.0)
    async with deciding(app, url, way) as client:
        assert await client.call(Deposit(account="a", cents=1), command_id="d-1", timeout=20.0) == first


@pytest.mark.parametrize("way", WAYS)
async def test_a_worker_notices_that_its_stream_was_deleted_and_made_again(url: str, way: str) -> None:
    """Sequences begin at 1 again, and the boundary ends where the worker remembers it: the guard would hold."""
    app = bank()
    async with deciding(app, url, way) as client:
        await client.call(Enter(ledger="x", writer="w"), command_id="e-1")
        second = await client.call(Enter(ledger="x", writer="w"), command_id="e-2")
        await client.js.delete_stream(app.stream)
        await app.apply(url)
        await client.publish(Entered(ledger="y", number=1, writer="plain"))
        one = await client.publish(Entered(ledger="x", number=1, writer="plain"))
        assert one.sequence == second.sequence
        again = await client.call(Enter(ledger="x", writer="w"), command_id="e-2", timeout=20.0)
        assert (again.data, again.sequence, again.is_repeated) == (2, 3, False)


async def test_a_state_of_a_stream_that_was_deleted_and_made_again_is_no_past(url: str) -> None:
    app = bank_with_balances()
    await app.apply(url)
    async with app.connect(url, decide_here=True) as one:
        async with deciding(app, url, "here") as client:
            for _ in range(4):
                last = await one.call(Deposit(account="a", cents=10), timeout=20.0)
            assert await client.view("balances").get("a", at_least=last.sequence, timeout=30.0) == 40
            await until(lambda: _is_noted(client, last.sequence))
        await one.js.delete_stream(app.stream)
        await app.apply(url)
        replies = [await one.call(Deposit(account="a", cents=1), timeout=20.0) for _ in range(2)]
    async with app.connect(url, decide_here=True) as other:
        replies.append(await other.call(Deposit(account="a", cents=1), timeout=20.0))
    assert [reply.data for reply in replies] == [1, 2, 3]


async def _is_noted(client: AppClient, sequence: int) -> bool:
    return (await client.view("balances").position()).sequence >= sequence


@pytest.mark.parametrize("way", WAYS)
async def test_a_worker_without_a_stream_says_so_and_goes_on_when_there_is_one(url: str, way: str) -> None:
    app = bank()
    async with deciding(app, url, way) as client:
        await client.call(Enter(ledger="x", writer="w"))
        await client.js.delete_stream(app.stream)
        with pytest.raises(jetspark.CommandFailed, match="StreamNotFound"):
            await client.call(Enter(ledger="x", writer="w"), timeout=20.0)
        await app.apply(url)
        assert (await client.call(Enter(ledger="x", writer="w"), timeout=20.0)).data == 1


@pytest.mark.parametrize("way", WAYS)
async def test_a_server_that_hangs_leaves_callers_in_doubt_and_each_command_is_decided_once(way: str) -> None:
    """The worker's own message may be on its way: it is neither sent twice nor forgotten."""
    app = bank()
    with NatsServer() as server:
        async with deciding(app, server.url, way, serving=CommandOptions(concurrency=4)) as client:
            await client.call(Enter(ledger="x", writer="w"))
            commands = {f"e-{n}": Enter(ledger=f"l{n % 3}", writer="w") for n in range(12)}
            calls = [client.call(each, command_id=id, timeout=1.0) for id, each in commands.items()]
            waiting = asyncio.gather(*calls, return_exceptions=True)
            await asyncio.sleep(0)
            server.pause()
            answers = await waiting
            server.resume()
            assert {type(each) for each in answers} <= {jetspark.CommandInDoubt, CommandReply}
            for id, each in commands.items():
                await client.call(each, command_id=id, timeout=30.0)
            assert (await (await client.js.stream(app.stream)).info()).state.messages == 13


@pytest.mark.parametrize("way", WAYS)
async def test_callers_that_are_cancelled_anywhere_leave_a_worker_that_goes_on(url: str, way: str) -> None:
    app, rng = bank(), random.Random(3)
    async with deciding(app, url, way, serving=CommandOptions(concurrency=2)) as client:
        for n in range(60):
            call = asyncio.create_task(client.call(Enter(ledger=f"l{n % 2}", writer="w"), command_id=f"e-{n}"))
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            call.cancel()
        for n in range(60):
            await client.call(Enter(ledger=f"l{n % 2}", writer="w"), command_id=f"e-{n}", timeout=30.0)
        assert (await (await client.js.stream(app.stream)).info()).state.messages == 60


# ---- requests of strangers -------------------------------------------------------------------------------------------


def raw_request(command: Command, name: str, id: str = "raw-1") -> bytes:
    data = json.loads(msgspec.json.encode(command))
    return json.dumps({"specversion": "1.0", "id": id, "source": "/x", "type": name, "data": data}).encode()


async def test_a_command_on_the_subject_of_another_is_not_decided(url: str) -> None:
    """Who may publish to the subject of one command need not be allowed to send another."""
    app = bank()
    async with served(app, url) as client, jetspark.connect(url) as nc:
        body = raw_request(OpenAccount(account="a", cents=5), "accounts.open")
        answer = await nc.request("cmd.bank.ledgers.enter", body)
        with pytest.raises(jetspark.CommandFailed, match="send it to its own subject"):
            wire.read_reply(answer.data, answer.headers)
        assert (await (await client.js.stream(app.stream)).info()).state.messages == 0


@pytest.mark.parametrize("reply", ["accounts.a", "ledgers.x.entered", "$JS.API.STREAM.PURGE.BANK"])
async def test_an_answer_goes_to_callers_and_not_into_the_stream_or_to_the_server(url: str, reply: str) -> None:
    app = bank()
    async with served(app, url) as client, jetspark.connect(url) as nc:
        kept = await client.call(Enter(ledger="x", writer="w"))
        await nc.publish(
            "cmd.bank.ledgers.enter", raw_request(Enter(ledger="y", writer="w"), "ledgers.enter"), reply=reply
        )
        await nc.flush()
        assert (await client.call(Enter(ledger="x", writer="w"))).sequence == kept.sequence + 1
        assert (await (await client.js.stream(app.stream)).info()).state.messages == 2


@pytest.mark.parametrize("header", ["Jetspark-Timeout", "Jetspark-Expected-Version"])
async def test_headers_that_make_no_sense_are_answered_and_harm_nobody(url: str, header: str) -> None:
    app = bank()
    async with served(app, url) as client, jetspark.connect(url) as nc:
        answers = []
        for number, value in enumerate(("nan", "-1", "\u00b2")):
            body = raw_request(Enter(ledger="x", writer="w"), "ledgers.enter", f"raw-{number}")
            answers.append(await nc.request("cmd.bank.ledgers.enter", body, headers={header: value}, timeout=20.0))
        errors = [each.headers.get("Nats-Service-Error-Code") for each in answers]
        assert errors == ([None] * 3 if header == "Jetspark-Timeout" else ["500"] * 3)
        assert (await client.call(Enter(ledger="x", writer="w"), timeout=20.0)).events == 1


async def test_headers_that_cannot_be_read_are_answered(url: str) -> None:
    app = bank()
    async with served(app, url) as client, jetspark.connect(url) as nc:
        answers = await nc.subscribe("_INBOX.raw")
        await nc.flush()
        body, headers = raw_request(Enter(ledger="x", writer="w"), "ledgers.enter"), b"NATS/1.0\r\nno colon\r\n\r\n"
        where, size = urlsplit(url), len(headers)
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        login = json.dumps({"verbose": False, "headers": True, "user": where.username, "pass": where.password})
        line = f"HPUB cmd.bank.ledgers.enter _INBOX.raw {size} {size + len(body)}"
        writer.write(f"CONNECT {login}\r\n{line}\r\n".encode() + headers + body + b"\r\n")
        answer = await answers.next(20.0)
        with pytest.raises(jetspark.CommandFailed, match="header line 'no colon': expected 'Name: value'"):
            wire.read_reply(answer.data, answer.headers)
        writer.close()
        assert (await (await client.js.stream(app.stream)).info()).state.messages == 0


class Say(Command):
    """Refuses with what is said."""

    how: str

    def reads(self) -> list[str]:
        return ["ledgers.said.>"]

    def decide(self, past: Past) -> Decision:
        raise OddRefusal({"surrogate": "\ud800", "long": "x" * 3_000_000, "lines": "a\r\nb"}[self.how], object())


class OddRefusal(Refused):
    def __init__(self, reason: str, fact: object) -> None:
        super().__init__(reason)
        self.args = (reason, fact)


@pytest.mark.parametrize("way", WAYS)
async def test_a_refusal_of_ones_own_class_is_a_refusal_whatever_it_says(url: str, way: str) -> None:
    app = bank()
    app.command("say")(Say)
    async with deciding(app, url, way) as client:
        for how, length in (("surrogate", 1), ("long", wire.MAX_TEXT + 3), ("lines", 4)):
            with pytest.raises(Refused) as caught:
                await client.call(Say(how=how), timeout=20.0)
            assert len(caught.value.reason) == length


RAISED: dict[str, type[BaseException]] = {
    "SystemExit": SystemExit,
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "BaseException": BaseException,
    "ValueError": ValueError,
}


class Misbehave(Command):
    """Raises something, and where it is told to."""

    ledger: str
    where: str
    what: str

    def reads(self) -> list[str]:
        self._raise("reads")
        return [f"ledgers.{self.ledger}"]

    def decide(self, past: Past) -> None:
        self._raise("decide")

    def _raise(self, where: str) -> None:
        if where == self.where:
            raise RAISED[self.what]("on purpose")


@pytest.mark.parametrize("what", RAISED)
@pytest.mark.parametrize("where", ["reads", "decide"])
@pytest.mark.parametrize("way", WAYS)
async def test_whatever_a_command_raises_is_answered_and_its_boundary_goes_on(
    url: str, where: str, what: str, way: str
) -> None:
    app = bank()
    app.command("misbehave")(Misbehave)
    async with deciding(app, url, way) as client:
        for number in (1, 2):  # the boundary is read the first time, and remembered the second
            with pytest.raises(jetspark.CommandFailed, match=f"{where}: {what}: on purpose"):
                await client.call(Misbehave(ledger="x", where=where, what=what), timeout=20.0)
            assert (await client.call(Enter(ledger="x", writer="w"), timeout=20.0)).data == number


class Tamper(Command):
    ledger: str

    def reads(self) -> list[str]:
        return [f"ledgers.{self.ledger}"]

    def decide(self, past: Past) -> None:
        past.entries.clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", WAYS)
async def test_a_command_cannot_change_the_past_that_others_are_decided_on(url: str, way: str) -> None:
    app = bank()
    app.command("tamper")(Tamper)
    async with deciding(app, url, way) as client:
        assert (await client.call(Enter(ledger="x", writer="w"))).data == 1
        with pytest.raises(jetspark.CommandFailed, match="'tuple' object has no attribute 'clear'"):
            await client.call(Tamper(ledger="x"))
        assert (await client.call(Enter(ledger="x", writer="w"))).data == 2


class Describe(Command):
    ledger: str
    size: int

    def reads(self) -> list[str]:
        return [f"ledgers.{self.ledger}"]

    def decide(self, past: Past) -> Decision:
        return Decision(reply="x" * self.size)


@pytest.mark.parametrize("way", WAYS)
async def test_a_reply_that_no_message_can_carry_is_told_as_what_it_is(url: str, way: str) -> None:
    app = bank()
    app.command("describe")(Describe)
    async with deciding(app, url, way) as client:
        assert len((await client.call(Describe(ledger="x", size=100_000))).data) == 100_000
        with pytest.raises(jetspark.CommandFailed, match=r"its reply cannot be sent: message of .* bytes"):
            await client.call(Describe(ledger="x", size=2_000_000), timeout=20.0)


@pytest.mark.parametrize("way", WAYS)
async def test_those_that_wait_for_one_boundary_leave_room_for_others(url: str, way: str) -> None:
    """With a place for each that waits, two callers of a slow boundary would stop a worker with two places."""
    app = bank()
    async with deciding(app, url, way, serving=CommandOptions(concurrency=2)) as client:
        worker_may_go_on, is_held = asyncio.Event(), asyncio.Event()
        append = CommandStore._append

        async def held(self: CommandStore, step: Any) -> Any:
            if "slow" in step.messages[0].encoded.subject:
                is_held.set()
                await worker_may_go_on.wait()
            return await append(self, step)

        with mock.patch.object(CommandStore, "_append", held):
            slow = [asyncio.create_task(client.call(Enter(ledger="slow", writer="w"), timeout=60.0)) for _ in range(5)]
            await is_held.wait()
            try:
                assert (await client.call(Enter(ledger="quick", writer="w"), timeout=20.0)).data == 1
            finally:
                worker_may_go_on.set()
            assert sorted(each.data for each in await asyncio.gather(*slow)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "options",
    [
        {"command_id": ""},
        {"command_id": 7},
        {"command_id": "a\ud800"},
        {"correlation_id": 7},
        {"expected_version": -1},
        {"expected_version": True},
        {"expected_version": 1.0},
        {"expected_version": 2**64},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"timeout": "2"},
    ],
    ids=str,
)
async def test_a_wrong_argument_is_said_before_anything_is_sent(url: str, options: dict[str, Any]) -> None:
    [name] = options
    async with bank().connect(url) as client:
        with pytest.raises(jetspark.ConfigError, match=name):
            await client.call(Enter(ledger="x", writer="w"), **options)


# ---- the service protocol --------------------------------------------------------------------------------------------


async def test_workers_are_found_by_the_service_protocol(url: str) -> None:
    """As ``nats service ls``, ``info`` and ``stats`` ask; the types are those of the official client."""
    from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

    app = bank()
    async with served(app, url, workers=2) as client:
        await client.call(Enter(ledger="x", writer="w"))
        with pytest.raises(Refused):
            await client.call(Transfer(source="a", target="b", cents=1))
        nc = await nats.connect(url)
        try:
            answers: dict[str, list[dict[str, Any]]] = {}
            for verb in ("PING", "INFO", "STATS"):
                inbox = nc.new_inbox()
                subscription = await nc.subscribe(inbox)
                await nc.publish(f"$SRV.{verb}", reply=inbox)
                answers[verb] = [json.loads((await subscription.next_msg(10)).data) for _ in range(2)]
            [one, other] = [ServicePing.from_dict(each) for each in answers["PING"]]
            assert (one.name, one.version, one.type) == ("bank", "0.0.0", "io.nats.micro.v1.ping_response")
            assert one.id != other.id
            info = ServiceInfo.from_dict(answers["INFO"][0])
            assert {(each.name, each.subject, each.queue_group) for each in info.endpoints} == {
                ("accounts_open", "cmd.bank.accounts.open", "q"),
                ("accounts_transfer", "cmd.bank.accounts.transfer", "q"),
                ("ledgers_enter", "cmd.bank.ledgers.enter", "q"),
            }
            stats = [ServiceStats.from_dict(each) for each in answers["STATS"]]
            endpoints = [each for stat in stats for each in stat.endpoints]
            assert sum(each.num_requests for each in endpoints) == 2
            assert [each.last_error for each in endpoints if each.num_errors] == ["CommandRefused: no such account"]
            assert json.loads((await nc.request(f"$SRV.PING.bank.{one.id}", timeout=10)).data)["id"] == one.id
        finally:
            await nc.close()


async def test_a_worker_that_is_told_to_end_answers_what_it_has(url: str) -> None:
    app = bank()
    await app.apply(url)
    process = start_worker(url, app.name)
    try:
        await are_serving(url, "bank")
        async with app.connect(url) as client:
            await client.call(Enter(ledger="x", writer="w"))
            calls = [
                asyncio.create_task(client.call(Enter(ledger="x", writer=f"w-{n}"), timeout=30.0)) for n in range(200)
            ]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            process.terminate()  # SIGTERM
            answers = await asyncio.gather(*calls, return_exceptions=True)
            await asyncio.to_thread(process.join, 30)
            assert process.exitcode == 0
            assert [each for each in answers if isinstance(each, jetspark.CommandInDoubt)] == []
            done = [each.data for each in answers if not isinstance(each, BaseException)]
            assert (await (await client.js.stream("BANK")).info()).state.messages == len(done) + 1
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("accounts", ["a", "ab"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_worker_says_why_a_full_stream_leaves_callers_in_doubt(
    url: str, accounts: str, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    app = bank()
    async with deciding(app, url, way) as client:
        for account in "ab":
            await client.call(OpenAccount(account=account, cents=100))
        info = (await client.js.stream(app.stream)).cached_info
        full = replace(info.config, max_messages=2, discard="new")
        await client.js.update_stream(full)
        one, both = Enter(ledger="x", writer="w"), Transfer(source="a", target="b", cents=1)
        command = one if accounts == "a" else both
        with pytest.raises(jetspark.CommandInDoubt):
            await client.call(command, command_id="late", timeout=1.0)
        text = "not decided before the caller's time-out: the stream refuses its events: "
        await until(lambda: any(text in record.getMessage() for record in caplog.records))
        assert "maximum messages exceeded" in caplog.text
        await client.js.update_stream(replace(full, max_messages=-1))
        assert (await client.call(command, command_id="late")).sequence == 2 + len(accounts)
