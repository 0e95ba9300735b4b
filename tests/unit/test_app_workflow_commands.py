"""Commands that workflows send: stored with the step, decided once, and their answers come back by name."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec
import pytest
from support.reserving import (
    Dropped,
    Ordered,
    OrderFlow,
    Packed,
    Released,
    Reserve,
    Reserved,
    Reserving,
    reserving,
)

from jetspark.app import App, Catalogue, Command, CommandAnswered, Decision, Event, Retry, WorkflowRun, contract_of
from jetspark.app.checks.lints import lint_apps
from jetspark.app.contracts.envelope import decode
from jetspark.app.testing import TestApp
from jetspark.app.workflows.command_events import CommandKinds, CommandSent
from jetspark.app.workflows.workflow_spec import RunRecord, WorkflowSpec
from jetspark.errors import ConfigError

reserving()  # gives the commands their names
NOW = datetime.datetime(2026, 3, 31, tzinfo=datetime.UTC)
WITH: Any = {"time": NOW, "catalogue": Catalogue(Ordered, Dropped, Packed)}


def spec(kind: type = Reserving, **options: Any) -> WorkflowSpec:
    return WorkflowSpec(
        "reserving", kind, **{"app": "shop", "key": "order_id", "events": None, "version": 1, **options}
    )


async def run_of(test: TestApp, key: str) -> WorkflowRun:
    run = await test.do(lambda shop: shop.workflow("reserving").get(key))
    assert run is not None
    return run


# ---- steps, without a server -----------------------------------------------------------------------------------------


def test_a_command_is_an_event_of_its_step_and_its_answer_counts_once() -> None:
    workflow = spec()
    step = workflow.step(None, Ordered(order_id="o"), id="e", sequence=1, **WITH)
    assert step is not None
    [sent] = step.events
    assert isinstance(sent, CommandSent)
    assert (sent.name, sent.command, sent.fields) == ("reserve", "stock.reserve", {"order_id": "o", "article": "tea"})
    assert contract_of(sent).subject.format(sent) == "workflows.shop.reserving.o.sent"
    assert workflow.command_kinds is not None
    waiting = msgspec.structs.replace(step.record, commands={"reserve": "c"})
    answered = workflow.command_kinds.make_answered(sent, command_id="c", reply={"receipt": "r"})
    old = workflow.command_kinds.make_answered(sent, command_id="b", reply={"receipt": "old"})
    assert workflow.step(waiting, old, id="x", sequence=2, **WITH) is None
    done = workflow.step(waiting, answered, id="y", sequence=3, **WITH)
    assert done is not None
    assert (done.record.status, done.record.commands) == ("done", {})
    assert done.events == [Packed(order_id="o", receipt="r")]
    running = msgspec.structs.replace(waiting, commands={})
    assert workflow.step(running, answered, id="y", sequence=4, **WITH) is None  # answered before


def test_compensating_commands_are_sent_last_one_first_among_the_events() -> None:
    class Undoes:
        def react(self, state: OrderFlow | None, event: Ordered | Dropped | CommandAnswered) -> Decision:
            if isinstance(event, Dropped):
                return Decision(failed="dropped")
            undo = [Packed(order_id="o", receipt="1"), Reserve(order_id="o", article="2")]
            return Decision(state=OrderFlow("tea"), compensations=undo)

    step = spec(Undoes).step(None, Ordered(order_id="o"), id="e", sequence=1, **WITH)
    assert step is not None
    again = msgspec.json.decode(msgspec.json.encode(step.record), type=RunRecord)
    failed = spec(Undoes).step(again, Dropped(order_id="o"), id="f", sequence=2, **WITH)
    assert failed is not None
    command, event = failed.events
    assert (command.fields["article"], command.is_awaited) == ("2", False)
    assert event == Packed(order_id="o", receipt="1")


@pytest.mark.parametrize(
    ("waits_for", "takes", "words"),
    [
        ({"reserve": "c"}, Ordered | CommandAnswered, "is not answered yet"),
        ({}, Ordered, "add CommandAnswered"),
    ],
)
def test_a_command_whose_answer_nobody_could_tell_is_refused(waits_for: dict[str, str], takes: Any, words: str) -> None:
    class Sends:
        def react(self, state: OrderFlow | None, event: Ordered) -> Decision:
            return Decision(commands={"reserve": Reserve(order_id="o", article="tea")})

    Sends.react.__annotations__["event"] = takes
    record = RunRecord(1, key="o", commands=waits_for)
    with pytest.raises(ConfigError, match=words):
        spec(Sends).step(record, Ordered(order_id="o"), id="e", sequence=9, **WITH)


class Undeclared(Command):
    order_id: str


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (Decision(commands={"x": Undeclared(order_id="o")}), "write @app.command"),
        (Decision(commands={"x": Packed(order_id="o", receipt="r")}), "expected commands, not events"),  # type: ignore[dict-item]
        (Decision(events=[Reserve(order_id="o", article="tea")]), "expected it in commands="),
    ],
)
def test_what_is_no_command_is_refused(decision: Decision, words: str) -> None:
    class Sends:
        def react(self, state: OrderFlow | None, event: Ordered | CommandAnswered) -> Decision:
            return decision

    with pytest.raises(ConfigError, match=words):
        spec(Sends).step(None, Ordered(order_id="o"), id="e", sequence=1, **WITH)


def test_the_key_may_be_a_function_and_may_not_be_a_field_of_ours() -> None:
    by_function = spec(key=lambda event: event.order_id)
    assert by_function.command_kinds is not None
    sent = by_function.command_kinds.make_sent("o", name="n", command="c", fields={})
    assert by_function.key_of(by_function.command_kinds.make_answered(sent, command_id="i")) == "o"
    assert callable(by_function.lane_key)
    with pytest.raises(ConfigError, match="means something else"):
        CommandKinds.of("shop", "flow", "name")


def test_nothing_is_said_against_what_the_framework_stores() -> None:
    assert [lint for lint in lint_apps([reserving()]) if "command" in lint.where or lint.rule == "subject_depth"] == []


def test_partitions_see_the_run_of_an_answer() -> None:
    app = reserving(partitions=4)
    assert {"reserving", "reserving-commands"} <= set(app.handlers)
    assert {spec.partitions for spec in app.handlers.values()} == {4}
    app.topology()


# ---- in virtual time -------------------------------------------------------------------------------------------------


async def test_what_a_command_replies_or_why_it_is_refused_comes_back_by_name() -> None:
    async with TestApp(reserving()) as test:
        await test.publish(Ordered(order_id="o-1"))
        await test.settled()
        await test.publish(Ordered(order_id="o-2"))
        await test.settled()
        first, second = await run_of(test, "o-1"), await run_of(test, "o-2")
        assert (first.status, first.commands) == ("done", ())
        assert (second.status, second.reason) == ("failed", "no tea: taken")
        assert test.published(Packed) == [Packed(order_id="o-1", receipt="r-o-1")]
        assert test.published(Reserved) == [Reserved(article="tea", order_id="o-1")]
        assert test.dead_letters == []


async def test_correlation_and_cause_go_through_the_command() -> None:
    async with TestApp(reserving()) as test:
        await test.publish(Ordered(order_id="o-1"), id="begin", correlation_id="all")
        await test.settled()

        async def chain(shop: Any) -> list[tuple[str, str, str | None, str]]:
            stream = await shop.js.stream("KV_shop")
            found = []
            async for message in stream.get_messages(1):
                if not message.subject.startswith("$KV"):
                    read = decode(message.subject, message.data, message.headers, shop.app.catalogue)
                    found.append((read.type, read.id, read.causation_id, read.correlation_id))
            return found

        ordered, sent, reserved, answered, packed = await test.do(chain)
        assert ordered[:2] == ("order.placed", "begin")
        assert [sent[0], reserved[0], answered[0], packed[0]] == [
            "reserving.command_sent",
            "stock.reserved",
            "reserving.command_answered",
            "order.packed",
        ]
        assert [sent[2], reserved[2], answered[2], packed[2]] == ["begin", sent[1], sent[1], answered[1]]
        assert {each[3] for each in (ordered, sent, reserved, answered, packed)} == {"all"}


@pytest.mark.parametrize(
    ("moment", "order"),
    [
        ("before RunHandler", "o-1"),  # between the commit of the step and the sending
        ("after ClaimEffect", "o-1"),
        ("before RecordEffect", "o-1"),  # between the answer and its record
        ("after RecordEffect", "o-1"),
        ("before Acknowledge", "o-1"),
        ("before RecordEffect", "o-2"),
        ("after RecordEffect", "o-2"),
    ],
)
async def test_a_worker_that_dies_while_it_sends_has_each_command_decided_once(moment: str, order: str) -> None:
    async with TestApp(reserving()) as test:
        if order == "o-2":  # is refused
            await test.publish(Ordered(order_id="o-1"))
            await test.settled()
        crash = test.crash(moment, handler="reserving-commands", times=2)
        await test.publish(Ordered(order_id=order))
        await test.settled()
        test.advance(120)
        await test.settled()
        assert crash.happened >= 1
        assert (await run_of(test, order)).status == ("done" if order == "o-1" else "failed")
        assert test.published(Reserved) == [Reserved(article="tea", order_id="o-1")]
        assert test.published(Packed) == [Packed(order_id="o-1", receipt="r-o-1")]
        assert test.dead_letters == []


async def test_a_worker_that_dies_between_sending_and_answer_has_the_command_decided_once() -> None:
    async with TestApp(reserving()) as test:

        def on_sent(message: Any) -> bool:
            if message.subject == "stock.tea.reserved":
                test.network.front.gates.remove(on_sent)
                test._kill(1.0)  # the command is stored, and nobody is told
            return True

        test.network.front.gates.append(on_sent)
        await test.publish(Ordered(order_id="o-1"))
        await test.settled()
        test.advance(120)
        await test.settled()
        assert on_sent not in test.network.front.gates
        assert (await run_of(test, "o-1")).status == "done"
        assert test.published(Reserved) == [Reserved(article="tea", order_id="o-1")]


async def test_a_refusal_that_was_recorded_stays_so_when_the_command_would_be_decided_now() -> None:
    async with TestApp(reserving()) as test:
        await test.publish(Ordered(order_id="o-1"))
        await test.settled()
        crash = test.crash("after RecordEffect", handler="reserving-commands")
        await test.publish(Ordered(order_id="o-2"))
        test.advance(0.5)
        assert crash.happened == 1
        await test.publish(Released(article="tea", order_id="o-1"))  # there it is again
        await test.settled()
        test.advance(60)
        await test.settled()
        assert (await run_of(test, "o-2")).reason == "no tea: taken"
        assert len(test.published(Reserved)) == 1


async def test_a_compensating_command_comes_after_the_one_it_undoes() -> None:
    async with TestApp(reserving()) as test:
        crash = test.crash("before RunHandler", handler="reserving-commands")
        await test.publish(Ordered(order_id="o-1"))
        await test.publish(Dropped(order_id="o-1"))  # given up while the command is on its way
        await test.settled()
        test.advance(60)
        await test.settled()
        assert crash.happened == 1
        assert (await run_of(test, "o-1")).reason == "dropped"
        assert test.published(Reserved) == [Reserved(article="tea", order_id="o-1")]
        assert test.published(Released) == [Released(article="tea", order_id="o-1")]


async def test_a_refused_command_that_nobody_waits_for_is_a_dead_letter() -> None:
    app = App("shop", stream="KV_shop", subjects=["orders.>", "stock.>"], events=[Reserved, Released], timers=True)
    app.command("stock.reserve")(Reserve)

    @app.workflow("ending", key="order_id")
    class Ending:
        def react(self, state: OrderFlow | None, event: Ordered | CommandAnswered) -> Decision | None:
            if state is not None or not isinstance(event, Ordered):
                return None
            last = {"reserve": Reserve(order_id=event.order_id, article="tea")}
            return Decision(state=OrderFlow("tea"), commands=last, is_done=True)

    async with TestApp(app) as test:
        await test.publish(Reserved(article="tea", order_id="another"))
        await test.publish(Ordered(order_id="o-1"))
        await test.settled()
        [dead_letter] = test.dead_letters
        assert (dead_letter.handler, dead_letter.key) == ("ending-commands", "o-1")
        assert dead_letter.cause is not None
        assert "its run is over: taken" in dead_letter.cause.message


async def test_a_command_that_failed_is_sent_again_by_a_retry_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Reserve, past: Any) -> Decision:
        raise ZeroDivisionError

    async with TestApp(reserving(retry=Retry(attempts=2, first_s=0.1, max_s=0.2))) as test:
        with monkeypatch.context() as patch:
            patch.setattr(Reserve, "decide", broken)
            await test.publish(Ordered(order_id="o-1"))
            await test.settled()
        [dead_letter] = test.dead_letters
        assert dead_letter.handler == "reserving-commands"
        run = await run_of(test, "o-1")
        assert (run.status, run.commands) == ("running", ("reserve",))
        again = await test.do(lambda shop: shop.workflow("reserving").retry("o-1", wait_s=60))
        assert (again.dead_letters, again.is_restarted) == (1, False)
        await test.settled()
        assert (await run_of(test, "o-1")).status == "done"


async def test_a_command_of_another_application_is_refused_with_the_step() -> None:
    class Elsewhere(Command):
        def reads(self) -> list[str]:
            return ["elsewhere"]

        def decide(self, past: Any) -> list[Event]:
            return []

    App("other", stream="OTHER", subjects=["elsewhere"]).command("other.do")(Elsewhere)
    app = App("shop", stream="KV_shop", subjects=["orders.>"])

    @app.workflow("ending", key="order_id")
    class Ending:
        def react(self, state: OrderFlow | None, event: Ordered | CommandAnswered) -> Decision | None:
            return Decision(state=OrderFlow("tea"), commands={"do": Elsewhere()})

    async with TestApp(app) as test:
        await test.publish(Ordered(order_id="o-1"))
        test.advance(60)
        await test.settled()
        [dead_letter] = test.dead_letters
        assert dead_letter.cause is not None
        assert "'other.do': expected one of app 'shop'" in dead_letter.cause.message
        assert await test.do(lambda shop: shop.workflow("ending").get("o-1")) is None
