"""``check_workflow`` finds each kind of mistake that a workflow can have, and tells it as a short history."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from support.fulfilment import Flow, Paid, PaymentOverdue, Placed, Release, Reserve, Shipped, fulfilment
from support.reserving import Dropped, Ordered, reserving
from support.reserving import Reserve as ReserveArticle

from jetspark.app import App, Command, CommandAnswered, Decision, Event, Refused
from jetspark.app.testing import RunView, WorkflowProblem, WorkflowSearch, check_workflow
from jetspark.errors import ConfigError

PLACED, PAID, OVERDUE = Placed(order_id="o"), Paid(order_id="o"), PaymentOverdue(order_id="o")
BOTH = [PLACED, PAID]
React = Callable[[Any, Any, Any], Decision | None]


class Booked(Event, type="stock.booked", key="order_id", subject="orders.{order_id}.booked"):
    order_id: str


class Missing(Event, type="stock.missing", key="order_id", subject="orders.{order_id}.missing"):
    order_id: str


def app_of(react: React, *commands: type[Command], **options: Any) -> App:
    """An application with one workflow, called ``flow``."""
    app = App("shop", stream="KV_shop", subjects=["orders.>"], events=[Reserve, Release, Shipped], timers=True)
    for kind in commands:
        app.command(f"do.{kind.__name__.lower()}")(kind)

    class Plain:
        def react(self, state: Flow | None, event: Any) -> Decision | None:
            return react(self, state, event)

    events = [Placed, Paid, PaymentOverdue, Booked, Missing, *([CommandAnswered] if commands else [])]
    app.workflow("flow", key="order_id", events=events, **options)(Plain)
    return app


def problem_of(app: App, events: list[Any], **options: Any) -> WorkflowProblem:
    with pytest.raises(WorkflowProblem) as found:
        check_workflow(app, "flow", events, **options)
    return found.value


def test_a_workflow_that_is_right_is_told_how_its_runs_end() -> None:
    report = check_workflow(fulfilment(), "fulfilment", BOTH, search=WorkflowSearch(duplicates=2))
    assert report.is_exhaustive
    assert set(report.ends) == {"done", "failed: not paid"}
    assert str(report).startswith(f"workflow fulfilment: {report.states} states, all of them; ends: ")


def test_an_order_of_delivery_that_it_does_not_expect() -> None:
    def react(self: Any, state: Flow | None, event: Any) -> Decision | None:
        if isinstance(event, Placed):
            return Decision(state=Flow("waiting"))
        assert state is not None, "paid before it was placed"
        return Decision(is_done=True)

    found = problem_of(app_of(react), BOTH)
    assert found.problem == "react raised AssertionError: paid before it was placed"
    assert found.history == ["Paid(order_id='o') comes"]
    check_workflow(app_of(react), "flow", BOTH, search=WorkflowSearch(in_order=True))


def test_a_duplicate_that_it_takes_for_something_new() -> None:
    def react(self: Any, state: Flow | None, event: Any) -> Decision | None:
        if isinstance(event, Placed):
            return Decision(state=Flow("waiting"), events=[Reserve(order_id="o")])
        return Decision(is_done=True) if state is not None else None

    def reserves_once(run: RunView) -> bool:
        return run.events.count(Reserve(order_id="o")) <= 1

    found = problem_of(app_of(react), BOTH, invariants=[reserves_once], search=WorkflowSearch(in_order=True))
    assert str(found) == (
        "workflow 'flow': invariant reserves_once does not hold\n"
        "  1. Placed(order_id='o') comes: state Flow(step='waiting', reminders=0); publishes Reserve(order_id='o')\n"
        "  2. Placed(order_id='o') comes again: publishes Reserve(order_id='o')"
    )
    check_workflow(
        app_of(react), "flow", BOTH, invariants=[reserves_once], search=WorkflowSearch(in_order=True, duplicates=0)
    )


def late_timeout(self: Any, state: Flow | None, event: Any) -> Decision | None:
    """A payment is noted, and its time-out goes on."""
    match event:
        case Placed() if state is None:
            return Decision(state=Flow("waiting"), timers={"payment": (OVERDUE, 1800)})
        case Paid() if state is not None:
            return Decision(state=Flow("paid"), events=[Reserve(order_id="o")])
        case Booked() if state is not None:
            return Decision(is_done=True)
        case PaymentOverdue():
            return Decision(failed="not paid")
    return None


def keeps_what_is_paid(run: RunView) -> None:
    assert not (run.status == "failed" and run.state.step == "paid"), "a paid order is given up"


@pytest.mark.parametrize("max_states", [10_000, 1])
def test_a_time_out_that_comes_after_the_completion(max_states: int) -> None:
    answers = {Reserve: lambda event: [Booked(order_id="o")]}
    search = WorkflowSearch(duplicates=3, max_states=max_states)
    found = problem_of(app_of(late_timeout), BOTH, invariants=[keeps_what_is_paid], answers=answers, search=search)
    assert found.problem == "invariant keeps_what_is_paid does not hold: a paid order is given up"
    assert [step.split(":")[0] for step in found.history] == [  # also after a random history is shortened
        "Placed(order_id='o') comes",
        "Paid(order_id='o') comes",
        "timer payment fires with PaymentOverdue(order_id='o')",
    ]


def test_an_answer_that_it_does_not_expect_leaves_it_waiting() -> None:
    def react(self: Any, state: Flow | None, event: Any) -> Decision | None:
        match event:
            case Placed() if state is None:
                return Decision(state=Flow("reserving"), events=[Reserve(order_id="o")])
            case Booked():
                return Decision(is_done=True)
        return None

    def either(event: Reserve) -> list[Event]:
        return [Booked(order_id=event.order_id), Missing(order_id=event.order_id)]

    found = problem_of(app_of(react), [PLACED], answers={Reserve: either})
    assert found.problem.startswith("the run never ends")
    assert found.history[-1] == "Missing(order_id='o') comes: changes nothing"
    check_workflow(app_of(react), "flow", [PLACED], answers={Reserve: either}, must_end=False)
    lost = problem_of(app_of(react), [PLACED], answers={Reserve: lambda event: [Booked(order_id="o"), None]})
    assert lost.history[-1].startswith("what follows Reserve(order_id='o') has no effect")


def test_a_refusal_that_it_does_not_take() -> None:
    class Ask(Command):
        def reads(self) -> list[str]:
            return ["orders.asked"]

        def decide(self, past: Any) -> list[Event]:
            return []

    def react(self: Any, state: Flow | None, event: Any) -> Decision | None:
        match event:
            case Placed() if state is None:
                return Decision(state=Flow("asking"), commands={"ask": Ask()})
            case CommandAnswered(name="ask", refused=None):
                return Decision(is_done=True)
        return None

    found = problem_of(app_of(react, Ask), [PLACED])
    assert found.history[1:] == ["command ask is refused with 'refused': changes nothing"]


def test_a_command_is_answered_as_the_test_says() -> None:
    answers = {ReserveArticle: lambda command: [{"receipt": f"r {command.article}"}, Refused("taken")]}
    report = check_workflow(reserving(), "reserving", [Ordered(order_id="o"), Dropped(order_id="o")], answers=answers)
    assert set(report.ends) == {"done", "failed: no tea: taken", "failed: dropped"}
    with pytest.raises(WorkflowProblem, match="react raised TypeError"):  # it replies with nothing
        check_workflow(reserving(), "reserving", [Ordered(order_id="o")])


@pytest.mark.parametrize("grows", [False, True])
def test_a_timer_that_is_set_for_ever(grows: bool) -> None:
    def react(self: Any, state: Flow | None, event: Any) -> Decision | None:
        if isinstance(event, Paid):
            return Decision(is_done=True) if state is not None else None
        reminders = 0 if state is None else state.reminders + grows
        return Decision(state=Flow("waiting", reminders), timers={"payment": (OVERDUE, 1800)})

    found = problem_of(app_of(react), BOTH, search=WorkflowSearch(max_states=100))
    assert "no end after 200 steps" in found.problem if grows else "never ends" in found.problem


def test_a_react_that_is_not_pure() -> None:
    rng = random.Random(3)

    def react(self: Any, state: Flow | None, event: Any) -> Decision | None:
        return Decision(state=Flow(f"step {rng.random()}"), is_done=True)

    problem = problem_of(app_of(react), [PLACED]).problem
    assert problem.startswith("react is not pure: called twice with the same arguments, it returns")


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (Decision(is_done=True, timers={"x": (OVERDUE, 1)}), "one of the two"),
        (Decision(timers={"x": (OVERDUE, -1)}), "expected seconds"),
        (Decision(events=[Reserve(order_id=5)]), "cannot be stored"),  # type: ignore[arg-type]
    ],
)
def test_a_decision_that_cannot_be_carried_out(decision: Decision, words: str) -> None:
    assert words in problem_of(app_of(lambda self, state, event: decision), [PLACED]).problem


def test_the_same_seed_is_the_same_histories() -> None:
    search = WorkflowSearch(max_states=3, histories=50, seed=7)
    first = check_workflow(fulfilment(), "fulfilment", BOTH, search=search)
    assert not first.is_exhaustive
    assert first == check_workflow(
        fulfilment(), "fulfilment", BOTH, search=WorkflowSearch(max_states=3, histories=50, seed=7)
    )


@pytest.mark.parametrize(
    ("name", "events", "words"),
    [
        ("other", BOTH, "expected one of those of app 'shop': fulfilment"),
        ("fulfilment", [], "expected events of one run"),
        ("fulfilment", [PLACED, Paid(order_id="p")], "expected events of one run"),
        ("fulfilment", [Shipped(order_id="o")], "is not an event of workflow"),
    ],
)
def test_what_cannot_be_checked_is_refused(name: str, events: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_workflow(fulfilment(), name, events)
