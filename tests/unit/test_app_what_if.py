"""What another version of a workflow would have decided for recorded history: each difference, and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support import fulfilment as shop
from support.fulfilment import PAYMENT_S, Paid, Placed, fulfilment
from support.reserving import Ordered, Reserving, reserving

from jetspark.app.replay import NewCode, ReplayRequest, WhatIf, what_if
from jetspark.app.testing import TestApp
from jetspark.errors import ConfigError

TEXT = Path(shop.__file__).read_text()


def code(*changes: tuple[str, str]) -> NewCode:
    """The workflow with some places of its text changed."""
    text = TEXT
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    return NewCode("new.py", text)


@pytest.fixture
async def history() -> AsyncIterator[TestApp]:
    """Orders: one is paid after ten minutes, one after twenty, and one never, so it is reminded of and given up."""
    async with TestApp(fulfilment(PAYMENT_S)) as test:
        for id in ("o-1", "o-2", "o-3"):
            await test.publish(Placed(order_id=id))
        for id in ("o-1", "o-2"):
            test.advance(600)
            await test.settled()
            await test.publish(Paid(order_id=id))
        for _ in range(3):
            test.advance(PAYMENT_S)
            await test.settled()
        yield test


async def compared(test: TestApp, new: NewCode, **request: Any) -> WhatIf:
    asked = ReplayRequest(**request)
    return await test.do(lambda client: what_if(client.js, test.app, "fulfilment", new, asked))


def steps(found: WhatIf) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """Type and kinds of each difference, by run."""
    return {run.key: [(step.type, step.kinds) for step in run.differences] for run in found.different}


async def test_the_same_code_decides_the_same(history: TestApp) -> None:
    found = await compared(history, code())
    assert (found.runs, found.equal, found.is_equal, found.different) == (3, 3, True, [])
    assert "3 runs compared, 3 equal, 0 different" in str(found)


async def test_a_planted_change_is_listed_exactly(history: TestApp) -> None:
    found = await compared(history, code(('Flow("shipped")', 'Flow("sent")')))
    assert steps(found) == {"o-1": [("order.paid", ("state",))], "o-2": [("order.paid", ("state",))]}
    [step] = found.different[0].differences
    assert step.old == {"state": {"step": "shipped", "reminders": 0}}
    assert step.new == {"state": {"step": "sent", "reminders": 0}}
    assert (found.runs, found.equal, dict(found.by_kind)) == (3, 1, {"state": 2})
    dropped = await compared(history, code(("events=[Shipped(order_id=id)], is_done", "is_done")))
    assert steps(dropped) == {"o-1": [("order.paid", ("events",))], "o-2": [("order.paid", ("events",))]}


async def test_an_end_that_comes_earlier_is_a_difference_with_what_it_undoes(history: TestApp) -> None:
    found = await compared(history, code(("state.reminders == 0", "state.reminders == 9")))
    assert list(steps(found)) == ["o-3"]
    first, second = found.different[0].differences
    assert first.kinds == ("end", "events", "state", "timers")
    assert (first.new["end"], [each["type"] for each in first.new["events"]]) == ("failed: not paid", ["stock.release"])
    # The old version fails at the second reminder, when the new one's run is over.
    assert (second.kinds, second.new) == (("end", "events"), {"end": None, "events": None})
    assert (found.different[0].old_status, found.different[0].new_status) == ("failed", "failed")


async def test_what_a_timer_would_have_brought_is_not_made_up(history: TestApp) -> None:
    found = await compared(history, code(("PAYMENT_S = 1800.0", "PAYMENT_S = 900.0")))
    # Paid after ten minutes, before the shorter time is over: history answers all of it.
    one, two, three = found.different
    assert [step.kinds for step in one.differences] == [("timers",)]
    assert (one.diverged, one.old_status, one.new_status) == (None, "done", "done")
    # Paid after twenty: nobody knows whether it would have been, after the reminder.
    for run in (two, three):
        assert run.diverged is not None
        assert (run.diverged.kind, run.diverged.name, run.new_status) == ("timer", "payment", "running")
        assert [step.kinds for step in run.differences] == [("timers",)]
    assert (found.diverged, dict(found.by_kind)) == (2, {"diverged": 2, "timers": 3})
    assert "diverged here: timer 'payment'" in str(found)


async def test_a_timer_that_only_the_new_version_leaves_on_diverges_when_it_is_due(history: TestApp) -> None:
    goes_on = code(("events=[Shipped(order_id=id)], is_done=True", "events=[Shipped(order_id=id)]"))
    found = await compared(history, goes_on)
    assert steps(found) == {"o-1": [("order.paid", ("cancels", "end"))], "o-2": [("order.paid", ("cancels", "end"))]}
    assert all(run.diverged is not None and run.diverged.sequence is None for run in found.different)
    last = found.different[1].differences[0].sequence
    until_paid = await compared(history, goes_on, to_seq=last)
    assert until_paid.diverged == 0  # neither is due by then


async def test_the_new_version_takes_over_where_the_range_begins(history: TestApp) -> None:
    found = await compared(history, code(('Flow("waiting")', 'Flow("waits")')), from_seq=4)
    assert (found.runs, found.is_equal) == (3, True)
    all_of_it = await compared(history, code(('Flow("waiting")', 'Flow("waits")')), keys=("o-2",))
    assert steps(all_of_it) == {"o-2": [("order.placed", ("state",))]}
    assert all_of_it.runs == 1


async def test_code_that_raises_is_a_difference_and_ends_the_run(history: TestApp) -> None:
    found = await compared(
        history, code(("if state is None:\n                    return None\n", "raise KeyError(id)\n"))
    )
    assert list(steps(found)) == ["o-1", "o-2"]
    [step] = found.different[0].differences
    assert step.new["error"] == "KeyError: 'o-1'"
    assert found.different[0].new_status == "running"


async def test_states_of_another_version_are_compared_after_their_upcast(history: TestApp) -> None:
    upcast = """
    version = 2

    def upcast(self, state, version):
        return {**state, "note": ""}

    def react("""
    renewed = code(
        ("class Fulfilment:\n    def react(", f"class Fulfilment:{upcast}"),
        ("reminders: int = 0", "reminders: int = 0\n    note: str = ''"),
    )
    assert (await compared(history, renewed, from_seq=4)).is_equal
    assert (await compared(history, renewed)).is_equal


async def test_code_that_cannot_be_compared_is_refused(history: TestApp) -> None:
    with pytest.raises(ConfigError, match="such classes are none"):
        await compared(history, NewCode("new.py", "x = 1"))
    with pytest.raises(ConfigError, match="raised NameError"):
        await compared(history, NewCode("new.py", "x = y"))
    other_key = """
app = App("shop", stream="KV_shop", subjects=["orders.>"], timers=True)
app.workflow("fulfilment", key=lambda event: "all")(Fulfilment)
"""
    with pytest.raises(ConfigError, match="same key"):
        await compared(history, NewCode("new.py", TEXT + other_key))
    with pytest.raises(ConfigError, match="must not be set: a run is compared with all"):
        await compared(history, code(), subject="orders.>")
    with pytest.raises(ConfigError, match="has no workflow of this name; it has fulfilment"):
        await history.do(lambda client: what_if(client.js, history.app, "other", code()))


@pytest.mark.parametrize("ends", ["import sys\nsys.exit()", "raise SystemExit(0)", "exit(7)", "raise SystemExit('no')"])
async def test_code_that_ends_its_process_while_it_is_loaded_is_refused(history: TestApp, ends: str) -> None:
    with pytest.raises(ConfigError, match=r"code='new.py' raised SystemExit"):
        await compared(history, NewCode("new.py", f"{TEXT}\n{ends}\n"))


# ---- commands --------------------------------------------------------------------------------------------------------

RESERVING = "from support.reserving import *\n" + inspect.getsource(Reserving)


@pytest.fixture
async def reservations() -> AsyncIterator[TestApp]:
    """Two orders of the last tea: the first one gets it."""
    async with TestApp(reserving()) as test:
        for id in ("o-1", "o-2"):
            await test.publish(Ordered(order_id=id))
            await test.settled()
        yield test


async def reserved(test: TestApp, *changes: tuple[str, str]) -> WhatIf:
    text = RESERVING
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    return await test.do(lambda client: what_if(client.js, test.app, "reserving", NewCode("new.py", text)))


async def test_answers_to_commands_that_both_versions_send_are_taken_by_both(reservations: TestApp) -> None:
    same = await reserved(reservations)
    assert (same.runs, same.is_equal) == (2, True)
    packed = await reserved(reservations, ("receipt=event.reply", "receipt=event.name + event.reply"))
    assert steps(packed) == {"o-1": [("reserving.command_answered", ("events",))]}
    assert packed.different[0].new_status == "done"
    refused = await reserved(reservations, ('failed=f"no', 'failed=f"there is no'))
    assert steps(refused) == {"o-2": [("reserving.command_answered", ("end",))]}


async def test_a_command_that_only_the_new_version_sends_has_no_answer_in_history(reservations: TestApp) -> None:
    found = await reserved(
        reservations,
        (
            "Reserve(order_id=event.order_id, article=event.article)",
            "Release(order_id=event.order_id, article=event.article)",
        ),
    )
    assert steps(found) == {id: [("order.placed", ("commands",))] for id in ("o-1", "o-2")}
    for run in found.different:
        assert run.diverged is not None
        assert (run.diverged.kind, run.diverged.name, run.new_status) == ("command", "reserve", "running")
    undone = await reserved(reservations, ("[Release(", "[Reserve("))
    assert steps(undone)["o-2"] == [("order.placed", ("compensations",)), ("reserving.command_answered", ("commands",))]
    assert undone.diverged == 0
