"""Commands that set and end timers: one batch with their events, known by the events, and nothing without one."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from support.command_log import NOW, Log, Worker
from support.paying import PAYMENT_S, Look, Overdue, Paid, Pay, Place, Placed, Prolong, paying

from jetspark.app import AppClient, Command, Decision, Past, Refused
from jetspark.app.commands.decider import Append, AppendMoved, AppendUnknown
from jetspark.app.commands.decision_messages import Guard
from jetspark.app.contracts.envelope import decode
from jetspark.app.testing import TestApp
from jetspark.errors import CommandFailed, ConfigError

TIMER = "timers.orders.payment=20of=20o-1"
SUBJECTS = ("orders.>", "timers.orders.>")


@pytest.fixture
def log() -> Log:
    return Log(subjects=SUBJECTS)


@pytest.fixture
def worker(log: Log) -> Worker:
    return Worker(paying(), log)


def appended(worker: Worker, command: Command, id: str) -> Append:
    """What a command would store; nothing is."""
    steps = worker.steps(command, id)
    step = next(steps)
    while not isinstance(step, Append):
        step = steps.send(worker.log.perform(step))
    steps.close()
    return step


def test_a_timer_is_stored_with_the_event_and_the_event_has_the_guard(worker: Worker) -> None:
    event, timer = appended(worker, Place(order_id="o-1"), "c-1").messages
    assert (event.encoded.subject, event.guard) == ("orders.o-1.placed", Guard("orders.o-1.>", 0))
    assert (timer.encoded.subject, timer.guard) == (TIMER, None)
    due = NOW + datetime.timedelta(seconds=PAYMENT_S)
    assert timer.encoded.headers["Nats-Schedule"] == f"@at {due.isoformat().replace('+00:00', 'Z')}"
    assert timer.encoded.headers["Nats-Schedule-Target"] == "orders.o-1.overdue"
    assert "Nats-Msg-Id" not in timer.encoded.headers
    fired = decode("orders.o-1.overdue", timer.encoded.data, None, worker.app.catalogue)
    assert (fired.event, fired.time, fired.causation_id) == (Overdue(order_id="o-1"), due, "c-1")
    assert fired.id != event.encoded.headers["Nats-Msg-Id"]


def test_an_event_that_ends_a_timer_is_one_guarded_message(worker: Worker) -> None:
    worker.call(Place(order_id="o-1"), "c-1")
    [event] = appended(worker, Pay(order_id="o-1"), "c-2").messages
    assert event.guard == Guard("orders.o-1.>", 1)
    assert (event.encoded.headers["Nats-Scheduler"], event.encoded.headers["Nats-Schedule-Next"]) == (TIMER, "purge")


def test_a_timer_that_is_set_anew_is_not_ended(worker: Worker) -> None:
    event, timer = appended(worker, Prolong(order_id="o-1"), "c-1").messages
    assert "Nats-Scheduler" not in event.encoded.headers
    assert timer.encoded.subject == TIMER


def test_the_reply_is_that_of_the_events_and_a_retry_gets_it_from_any_worker(worker: Worker, log: Log) -> None:
    first = worker.call(Place(order_id="o-1"), "c-1")
    assert (first.sequence, first.events, first.data) == (1, 1, "placed")
    for other in (worker, Worker(worker.app, log)):
        again = other.call(Place(order_id="o-1"), "c-1")
        assert (again, again.is_repeated) == (first, True)
    assert len(log.messages) == 2
    with pytest.raises(Refused, match="placed before"):
        worker.call(Place(order_id="o-1"), "c-2")


def test_what_is_remembered_is_right_behind_a_timer(log: Log) -> None:
    """Where the whole stream is guarded, its end is that of the timer."""
    worker = Worker(paying(guard="stream"), log)
    worker.call(Place(order_id="o-1"), "c-1")
    looks = log.looks
    assert worker.call(Prolong(order_id="o-1"), "c-2").sequence == 3
    assert worker.call(Pay(order_id="o-1"), "c-3").sequence == 5
    assert log.looks == looks


def fire(log: Log, timer: Append) -> None:
    """Store the event of the timer that a command has set, as the server does, though it may have ended since."""
    encoded = timer.messages[-1].encoded
    kept = {name: value for name, value in encoded.headers.items() if not name.startswith("Nats-")}
    headers = kept | {"Nats-Scheduler": encoded.subject, "Nats-Schedule-Next": "purge"}
    log.store(encoded.headers["Nats-Schedule-Target"], encoded.data, headers)


def test_the_event_of_a_timer_counts_while_nothing_else_was_decided_about_it(worker: Worker, log: Log) -> None:
    set_timer = appended(worker, Place(order_id="o-1"), "c-1")
    worker.call(Place(order_id="o-1"), "c-1")
    fire(log, set_timer)
    for each in (worker, Worker(worker.app, log)):
        assert each.call(Look(order_id="o-1"), "c-2").data == ["Placed", "Overdue"]
        with pytest.raises(Refused, match="too late"):
            each.call(Pay(order_id="o-1"), "c-3")


def test_the_event_of_a_timer_that_has_ended_before_it_is_none_of_the_past(worker: Worker, log: Log) -> None:
    """The server stores what it was about to store."""
    worker.call(Place(order_id="o-1"), "c-1")
    timer = appended(worker, Prolong(order_id="o-1"), "c-2")
    worker.call(Prolong(order_id="o-1"), "c-2")
    paid = worker.call(Pay(order_id="o-1"), "c-3")
    fire(log, timer)
    for each in (worker, Worker(worker.app, log)):
        assert each.call(Look(order_id="o-1"), "c-4").data == ["Placed", "Prolonged", "Paid"]
        assert each.call(Pay(order_id="o-1"), "c-3") == paid


def test_a_timer_that_was_set_after_one_of_its_name_had_ended_counts(worker: Worker, log: Log) -> None:
    worker.call(Place(order_id="o-1"), "c-1")
    worker.call(Pay(order_id="o-1"), "c-2")
    timer = appended(worker, Prolong(order_id="o-1"), "c-3")
    worker.call(Prolong(order_id="o-1"), "c-3")
    fire(log, timer)
    assert worker.call(Look(order_id="o-1"), "c-4").data == ["Placed", "Paid", "Prolonged", "Overdue"]


def test_the_event_of_a_timer_counts_though_it_is_stored_behind_a_new_setting(worker: Worker, log: Log) -> None:
    """It has removed that, and there is no other."""
    timer = appended(worker, Place(order_id="o-1"), "c-1")
    worker.call(Place(order_id="o-1"), "c-1")
    worker.call(Prolong(order_id="o-1"), "c-2")
    fire(log, timer)
    assert worker.call(Look(order_id="o-1"), "c-3").data == ["Placed", "Prolonged", "Overdue"]


def test_the_event_of_a_timer_that_no_command_has_set_always_counts(worker: Worker, log: Log) -> None:
    timer = appended(worker, Place(order_id="o-1"), "c-0")  # which is nowhere
    worker.call(Place(order_id="o-1"), "c-1")
    worker.call(Pay(order_id="o-1"), "c-2")
    fire(log, timer)
    assert worker.call(Look(order_id="o-1"), "c-3").data == ["Placed", "Paid", "Overdue"]


@pytest.mark.parametrize("is_stored", [True, False])
def test_an_append_that_nobody_answers_sets_its_timer_once(worker: Worker, log: Log, is_stored: bool) -> None:
    steps = worker.steps(Place(order_id="o-1"), "c-1")
    step = next(steps)
    while not isinstance(step, Append):
        step = steps.send(log.perform(step))
    if is_stored:
        log.append(step)
    reply = worker.finish(steps, AppendUnknown())
    assert (reply.is_repeated, reply.sequence) == (is_stored, 1)
    assert [message.subject for message in log.messages] == ["orders.o-1.placed", TIMER]
    assert isinstance(log.append(step), AppendMoved)  # if it was on its way


class Odd(Command):
    answer: str

    def reads(self) -> list[str]:
        return ["orders.o-1.>"]

    def decide(self, past: Past) -> Any:
        paid, overdue = Paid(order_id="o-1"), Overdue(order_id="o-1")
        match self.answer:
            case "two ends":
                return Decision(events=[paid], cancels=["a", "b"])
            case "timer alone":
                return Decision(timers={"a": (overdue, 5)})
            case "end alone":
                return Decision(cancels=["a"])
            case "no time":
                return Decision(events=[paid], timers={"a": (overdue, "soon")})  # type: ignore[dict-item]
            case "no pair":
                return Decision(events=[paid], timers={"a": overdue})  # type: ignore[dict-item]
            case "no name":
                return Decision(events=[paid], timers={"": (overdue, 5)})
            case "no list":
                return Decision(events=[paid], cancels="payment")
            case "a state":
                return Decision(events=[paid], state=1)
            case "too many":
                return Decision(events=[paid], timers={str(number): (overdue, 5) for number in range(1000)})
        return Decision(events=[paid, paid], cancels=["a", "b", "a"])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("two ends", "ends 2 timers and stores 1 events: expected an event for each"),
        ("timer alone", "timers are set and ended with an event"),
        ("end alone", "timers are set and ended with an event"),
        ("no time", "after='soon': expected seconds"),
        ("no pair", r"timers: 'a' is Overdue\(.*\): expected \(event, when\)"),
        ("no name", "expected a text that is not empty"),
        ("no list", r"cancels='payment': expected a list of names, such as \['payment'\]"),
        ("a state", "events, a reply, timers and cancels, and nothing else"),
        ("too many", "1001 events and timers; at most 1000"),
    ],
)
def test_a_decision_whose_timers_cannot_be_stored_with_it_says_why(log: Log, answer: str, reason: str) -> None:
    app = paying()
    app.command("odd")(Odd)
    with pytest.raises(CommandFailed, match=reason):
        Worker(app, log).call(Odd(answer=answer), "odd-1")
    assert log.messages == []


def test_every_timer_ends_with_an_event_of_its_own(worker: Worker, log: Log) -> None:
    worker.app.command("odd")(Odd)
    worker.call(Odd(answer="all"), "odd-1")
    assert [message.headers["Nats-Scheduler"] for message in log.messages] == ["timers.orders.a", "timers.orders.b"]


def test_an_application_without_timers_says_how_to_have_them(log: Log) -> None:
    with pytest.raises(CommandFailed, match=r"declare it with App\(..., timers=True\)"):
        Worker(paying(timers=False), log).call(Place(order_id="o-1"), "c-1")
    assert log.messages == []


def test_names_that_are_no_list_are_refused_of_a_workflow_too() -> None:
    with pytest.raises(ConfigError, match="expected a list of names"):
        Decision(cancels="payment")


# ---- in virtual time -------------------------------------------------------------------------------------------------


async def timers_of(test: TestApp) -> list[str]:
    async def names(orders: AppClient) -> list[str]:
        return [timer.name async for timer in orders.timers.list()]

    return await test.do(names)


async def test_a_payment_ends_the_time_out_that_the_order_began_with() -> None:
    async with TestApp(paying()) as test:
        for id in ("o-1", "o-2", "o-3"):
            await test.call(Place(order_id=id))
        await test.call(Pay(order_id="o-1"))
        test.advance(PAYMENT_S / 2)
        await test.call(Prolong(order_id="o-2"))
        assert await timers_of(test) == ["payment of o-3", "payment of o-2"]
        test.advance(PAYMENT_S / 2 + 10)
        assert test.published(Overdue) == [Overdue(order_id="o-3")]
        with pytest.raises(Refused, match="too late"):
            await test.call(Pay(order_id="o-3"))
        test.advance(PAYMENT_S / 2)
        assert test.published(Overdue) == [Overdue(order_id="o-3"), Overdue(order_id="o-2")]
        assert await timers_of(test) == []


@pytest.mark.parametrize("times", [1, 2])
async def test_a_command_that_is_asked_again_after_its_timer_has_fired_sets_none(times: int) -> None:
    async with TestApp(paying()) as test:
        for _ in range(times):
            await test.call(Place(order_id="o-1"), command_id="c-1")
        test.advance(PAYMENT_S + 600)  # longer than the stream remembers ids
        again = await test.call(Place(order_id="o-1"), command_id="c-1")
        assert (again.is_repeated, await timers_of(test)) == (True, [])
        assert (test.published(Placed), test.published(Overdue)) == (
            [Placed(order_id="o-1")],
            [Overdue(order_id="o-1")],
        )
