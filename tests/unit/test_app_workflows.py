"""Workflows: one step at a time, each whole; timers by name; what comes late or twice changes nothing."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec
import pytest
from support.fulfilment import (
    PAYMENT_S,
    Flow,
    Fulfilment,
    Paid,
    PaymentOverdue,
    Placed,
    Release,
    Reserve,
    Shipped,
    fulfilment,
)

from jetspark import StreamConfig
from jetspark.app import App, AppClient, Catalogue, Decision, Event, Retry, upcast
from jetspark.app.testing import TestApp
from jetspark.app.workflows.workflow_spec import (
    KEPT_STEPS,
    LATE,
    REMEMBERED,
    RunRecord,
    StepRecord,
    StoredCompensation,
    WorkflowSpec,
    timer_name,
)
from jetspark.errors import ConfigError

NOW = datetime.datetime(2026, 3, 31, tzinfo=datetime.UTC)


WITH: Any = {"time": NOW, "catalogue": Catalogue(Placed, Paid, PaymentOverdue, Reserve, Release, Shipped)}


def spec(kind: type = Fulfilment, **options: Any) -> WorkflowSpec:
    return WorkflowSpec(
        "fulfilment", kind, **{"app": "shop", "key": "order_id", "events": None, "version": 1, **options}
    )


# ---- steps, without a server -----------------------------------------------------------------------------------------


def test_an_event_is_taken_once() -> None:
    workflow = spec()
    first = workflow.step(None, Placed(order_id="o"), id="e1", sequence=5, **WITH)
    assert first is not None
    assert (first.record.status, workflow.state_of(first.record)) == ("running", Flow("waiting"))
    assert first.events == [Reserve(order_id="o")]
    assert workflow.step(first.record, Placed(order_id="o"), id="e1", sequence=5, **WITH) is None
    assert workflow.step(None, Paid(order_id="o"), id="e2", sequence=6, **WITH) is None  # begins no run


def test_a_timer_counts_only_while_it_is_the_one_that_is_set() -> None:
    workflow = spec()
    record = RunRecord(1, state=msgspec.Raw(b'{"step":"waiting"}'), timers={"payment": "t2"})
    late: Any = {"event": PaymentOverdue(order_id="o"), "sequence": 9, "timer": "payment", **WITH}
    assert workflow.step(record, id="t1", **late) is None  # set anew since
    step = workflow.step(record, id="t2", **late)
    assert step is not None
    assert workflow.state_of(step.record) == Flow("reminded", 1)
    assert step.record.timers == {"payment": ""}  # the driver notes the new one's id
    assert workflow.step(msgspec.structs.replace(record, timers={"payment": ""}), id="t2", **late) is None  # cancelled


def test_a_run_that_is_over_takes_nothing_and_ends_its_timers() -> None:
    workflow = spec()
    record = RunRecord(1, state=msgspec.Raw(b'{"step":"waiting"}'), timers={"payment": "t1", "old": ""})
    step = workflow.step(record, Paid(order_id="o"), id="e", sequence=7, **WITH)
    assert step is not None
    assert (step.record.status, step.cancels, step.record.timers) == ("done", ["payment"], {"payment": "", "old": ""})
    assert workflow.step(step.record, Paid(order_id="o"), id="f", sequence=8, **WITH) is None


def test_what_is_too_old_to_be_known_is_refused() -> None:
    workflow = spec()
    record = RunRecord(1, state=msgspec.Raw(b'{"step":"waiting"}'), events=tuple(range(100, 100 + REMEMBERED)))
    with pytest.raises(ConfigError, match="event 99 is older"):
        workflow.step(record, Paid(order_id="o"), id="e", sequence=99, **WITH)
    step = workflow.step(record, Placed(order_id="o"), id="e", sequence=900, **WITH)
    assert step is not None
    assert len(step.record.events) == REMEMBERED
    assert step.record.events[-1] == 900


def test_a_timer_that_did_not_fit_into_the_batch_that_ended_it_is_never_forgotten() -> None:
    before = RunRecord(1, timers={"old": "", "left": "t1"})
    record = RunRecord(1, timers={"old": "", "left": ""}, events=tuple(range(5000, 5000 + REMEMBERED)))
    for revision in (10, 20, 30):
        record, before = record.without_old_timers(before, revision, ["left"] if revision == 10 else []), record
        assert record.timers == {"left": ""}


def test_an_older_state_is_brought_up_to_date() -> None:
    class Newer(Fulfilment):
        def upcast(self, state: dict[str, Any], version: int) -> dict[str, Any]:
            return {"step": state["stage"] if version == 1 else state["step"] + "!"}

    record = RunRecord(1, state=msgspec.Raw(b'{"stage":"waiting"}'))
    assert spec(Newer, version=3).state_of(record) == Flow("waiting!")
    with pytest.raises(ConfigError, match="def upcast"):
        spec(version=2).state_of(record)
    fits = RunRecord(1, state=msgspec.Raw(b'{"step":"waiting"}'))
    assert spec(version=2).state_of(fits) == Flow("waiting")  # all new fields have a default
    with pytest.raises(ConfigError, match="run the newer one"):
        spec().state_of(RunRecord(2))


def test_an_upcast_may_leave_the_keys_of_numbers_as_json_has_them() -> None:
    class Counting:
        def react(self, state: dict[int, str] | None, event: Placed) -> Decision | None: ...

        def upcast(self, state: dict[str, Any], version: int) -> dict[str, Any]:
            return dict(state["shelves"])

    workflow = spec(Counting, version=2)
    for version, state in ((1, b'{"shelves":{"7":"books"}}'), (2, b'{"7":"books"}')):
        assert workflow.state_of(RunRecord(version, state=msgspec.Raw(state))) == {7: "books"}


def test_an_upcast_that_returns_nothing_does_not_empty_a_run() -> None:
    class Forgetful(Fulfilment):
        def upcast(self, state: dict[str, Any], version: int) -> None:
            state["step"] = "waiting"

    with pytest.raises(ConfigError, match="upcast of version 1 returned None, and not the state"):
        spec(Forgetful, version=2).state_of(RunRecord(1, state=msgspec.Raw(b'{"stage":"waiting"}')))
    assert spec(Forgetful, version=2).state_of(RunRecord(1, state=msgspec.Raw(b"null"))) is None


def test_a_state_that_a_step_leaves_alone_stays_as_it_is_or_becomes_one_of_the_new_version() -> None:
    class Patient(Fulfilment):
        def react(self, state: Flow | None, event: Placed | Paid | PaymentOverdue) -> Decision | None:
            return Decision()

        def upcast(self, state: dict[str, Any], version: int) -> dict[str, Any]:
            return {"step": state["stage"]}

    def left_alone(version: int, state: bytes) -> bytes:
        record = RunRecord(1, state=msgspec.Raw(state))
        step = spec(Patient, version=version).step(record, Paid(order_id="o"), id="e", sequence=7, **WITH)
        assert step is not None
        assert step.record.version == version
        return bytes(step.record.state)

    assert left_alone(1, b'{"step":"waiting","more":1}') == b'{"step":"waiting","more":1}'
    assert left_alone(2, b'{"stage":"waiting"}') == b'{"reminders":0,"step":"waiting"}'


def test_a_run_waits_for_its_commands_until_it_is_over() -> None:
    record = RunRecord(1, state=msgspec.Raw(b'{"step":"waiting"}'), commands={"charge": "c1"})
    for event, commands in ((Placed(order_id="o"), {"charge": "c1"}), (Paid(order_id="o"), {})):
        step = spec().step(record, event, id="e", sequence=7, **WITH)
        assert step is not None
        assert step.record.commands == commands


RELEASE = StoredCompensation("stock.release", 1, msgspec.Raw(b'{"order_id":"o"}'))


def test_a_run_that_was_undone_has_nothing_more_to_undo() -> None:
    record = RunRecord(1, key="o", state=msgspec.Raw(b'{"step":"waiting"}'), compensations=(RELEASE,))
    step = spec().fail(record, "by hand", **WITH)
    assert step.events == [Release(order_id="o")]
    assert (step.record.status, step.record.reason, step.record.compensations) == ("failed", "by hand", ())


def test_a_run_that_is_begun_anew_knows_what_it_has_taken_and_nothing_else() -> None:
    failed = RunRecord(
        1,
        key="o",
        status="failed",
        reason="not paid",
        state=msgspec.Raw(b'{"stage":"gone"}'),
        first=5,
        events=(5, 6),
        timers={"payment": "t1"},
        commands={"charge": "c1"},
        compensations=(RELEASE, RELEASE),
        retries=2,
    )
    step = spec(version=2).restart(failed, Placed(order_id="o"), **WITH)
    record = step.record
    assert (record.version, record.status, record.reason, record.retries) == (2, "running", None, 3)
    assert (record.first, record.events, record.started) == (5, (5, 6), NOW)
    assert (record.timers, record.commands, record.compensations) == ({"payment": ""}, {}, (RELEASE,))
    assert (step.events, list(step.timers), step.cancels) == ([Reserve(order_id="o")], ["payment"], [])
    with pytest.raises(ConfigError, match="react begins no run with Paid"):
        spec().restart(failed, Paid(order_id="o"), **WITH)


def test_what_is_stored_of_a_run_has_the_same_form_for_ever() -> None:
    record = RunRecord(1, key="o", compensations=(RELEASE,), steps=(StepRecord(5),))
    stored = (
        b'{"version":1,"key":"o","compensations":[["stock.release",1,{"order_id":"o"},false]],"steps":[{"sequence":5}]}'
    )
    assert msgspec.json.encode(record) == stored
    read = msgspec.json.decode(stored.replace(b",false", b""), type=RunRecord)  # as it was before there were commands
    assert (read, read.first, read.retries) == (record, 0, 0)
    assert not read.compensations[0].is_command
    assert (read.steps[0].revision, read.steps[0].events) == (0, 0)
    assert timer_name("fulfilment", "o", "payment") == "fulfilment/o/payment"
    for part, name in ((read, "status"), (read.compensations[0], "type"), (read.steps[0], "sequence")):
        with pytest.raises(AttributeError):
            setattr(part, name, None)


def test_a_step_is_noted_with_what_it_stored_once_the_next_one_is_taken() -> None:
    record = RunRecord(1)
    for number, revision in ((1, 0), (2, 10), (3, 20)):
        record = record.with_step(StepRecord(number, events=2), revision)
    assert [(note.sequence, note.revision, note.stored) for note in record.steps] == [
        (1, 10, range(11, 13)),
        (2, 20, range(21, 23)),
        (3, 0, range(0)),
    ]
    for number in range(4, KEPT_STEPS + 4):
        record = record.with_step(StepRecord(number), 30)
    assert [note.sequence for note in record.steps] == list(range(4, KEPT_STEPS + 4))


class OldRelease(Event, type="stock.release", version=1, key="order", subject="orders.{order}.release"):
    order: str


class NewRelease(Event, type="stock.release", version=2, key="order_id", subject="orders.{order_id}.release"):
    order_id: str


@upcast(NewRelease, from_version=1)
def _(old: dict[str, Any]) -> dict[str, Any]:
    return {"order_id": old["order"]}


def test_a_compensation_of_an_older_version_is_published_as_the_newest() -> None:
    class Undoes:
        def react(self, state: Flow | None, event: Placed) -> Decision:
            return Decision(state=Flow("waiting"), compensations=[OldRelease(order="o")])

    old = Catalogue(Placed, OldRelease)
    step = spec(Undoes).step(None, Placed(order_id="o"), id="e", sequence=1, time=NOW, catalogue=old)
    assert step is not None
    failed = spec(Undoes).fail(step.record, "by hand", NOW, Catalogue(Placed, NewRelease))
    assert failed.events == [NewRelease(order_id="o")]
    # What a program can read is a matter of that program, not of the one that ran before in this process.
    assert spec(Undoes).fail(step.record, "by hand", NOW, old).events == [OldRelease(order="o")]
    with pytest.raises(ConfigError, match=r"'stock\.release' version 1 is not known any more"):
        spec(Undoes).fail(step.record, "by hand", NOW, Catalogue(Placed))


class NoReact: ...


class Async:
    async def react(self, state: Any, event: Placed) -> None: ...


class Untyped:
    def react(self, state: Any, event: Any) -> None: ...


class OneArgument:
    def react(self, event: Placed) -> None: ...


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (NoReact, {}, "def react"),
        (Async, {}, "not async"),
        (Untyped, {}, r"events=\[...\]"),
        (OneArgument, {}, r"\(self, state, event\)"),
        (Untyped, {"events": [int], "key": str}, "int is not an event type"),
        (Fulfilment, {"key": "customer"}, "no such field"),
        (Fulfilment, {"version": 0}, "1 or more"),
    ],
)
def test_what_is_no_workflow_is_refused(kind: type, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec(kind, **options)


def test_a_workflow_needs_a_stream_that_keeps_states() -> None:
    app = App("shop", stream=StreamConfig(name="ORDERS", max_age_s=3600.0), subjects=["orders.>"])
    with pytest.raises(ConfigError, match="drops their states"):
        app.workflow("fulfilment", key="order_id")(Fulfilment)


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (Decision(reply=1), "no caller waits"),
        (Decision(is_done=True, timers={"x": (Paid(order_id="o"), 1)}), "one of the two"),
        (Decision(state=object()), "cannot be stored"),
        (Decision(state={"stage": "waiting"}), "cannot be stored"),
        (5, "expected a Decision"),
        (Decision(state=Flow("x"), is_done=True, failed="no"), r"is_done=True and failed='no'"),
    ],
)
def test_a_decision_that_is_none_is_refused(decision: Any, words: str) -> None:
    class Wrong:
        def react(self, state: Flow | None, event: Placed) -> Any:
            return decision

    with pytest.raises(ConfigError, match=words):
        spec(Wrong).step(None, Placed(order_id="o"), id="e", sequence=1, **WITH)


# ---- in virtual time -------------------------------------------------------------------------------------------------


async def test_a_payment_in_time_ends_the_run_and_its_timer() -> None:
    async with TestApp(fulfilment()) as test:
        await test.publish(Placed(order_id="o"))
        await test.settled()
        test.advance(60)
        await test.publish(Paid(order_id="o"))
        await test.settled()
        test.advance(3 * PAYMENT_S)
        await test.settled()
        assert (test.published(Shipped), test.published(PaymentOverdue)) == ([Shipped(order_id="o")], [])
        run = await test.do(lambda shop: shop.workflow("fulfilment").get("o"))
        assert run is not None
        assert (run.status, run.state, run.timers) == ("done", Flow("shipped"), ())


class Polling:
    """Sets a timer of a new name in each step, and cancels the last one if that has not fired."""

    def react(self, state: int | None, event: Placed | PaymentOverdue) -> Decision | None:
        count = (state or 0) + 1
        cancels = [f"t{count - 1}"] if isinstance(event, Placed) and count > 1 else []
        return Decision(state=count, timers={f"t{count}": (PaymentOverdue(order_id="o"), 60.0)}, cancels=cancels)


@pytest.mark.parametrize("ends_by", ["cancelling", "firing"])
async def test_a_run_forgets_the_names_of_timers_that_ended_long_ago(ends_by: str) -> None:
    app = App("shop", stream="KV_shop", subjects=["orders.>"], timers=True)
    app.workflow("polling", key="order_id")(Polling)
    steps = 2 * REMEMBERED + 20
    async with TestApp(app) as test:
        for number in range(steps):
            if number == 0 or ends_by == "cancelling":
                await test.publish(Placed(order_id="o"))
            else:
                test.advance(61.0)
            await test.settled()
        record = await test.do(lambda shop: shop.workflow("polling")._entities.get("o"))
        count = int(bytes(record.state))
        assert (count >= steps, test.dead_letters) == (True, [])
        assert [name for name, id in record.timers.items() if id] == [f"t{count}"]
        assert f"t{count - REMEMBERED}" in record.timers
        assert len(record.timers) <= REMEMBERED + LATE // 2  # a step stores two messages, or more
        assert len(record.ended) <= len(record.timers)


async def test_what_is_not_paid_is_reminded_once_and_undone() -> None:
    async with TestApp(fulfilment()) as test:
        await test.publish(Placed(order_id="o"))
        await test.settled()
        test.advance(PAYMENT_S + 60)
        await test.settled()
        run = await test.do(lambda shop: shop.workflow("fulfilment").get("o"))
        assert run is not None
        assert (run.status, run.state, run.timers) == ("running", Flow("reminded", 1), ("payment",))
        test.advance(PAYMENT_S)
        await test.settled()
        run = await test.do(lambda shop: shop.workflow("fulfilment").get("o"))
        assert run is not None
        assert (run.status, run.reason) == ("failed", "not paid")
        assert (test.published(Reserve), test.published(Release)) == ([Reserve(order_id="o")], [Release(order_id="o")])
        await test.publish(Paid(order_id="o"))  # too late
        await test.settled()
        assert test.published(Shipped) == []


@pytest.mark.parametrize("moment", ["before Publish", "after Publish", "before Acknowledge", "after Acknowledge"])
async def test_a_worker_that_dies_takes_no_step_twice(moment: str) -> None:
    async with TestApp(fulfilment()) as test:
        fault = test.crash(moment)
        await test.publish(Placed(order_id="o"))
        await test.settled()
        test.advance(120)
        await test.publish(Paid(order_id="o"))
        await test.settled()
        assert fault.happened == 1
        assert (test.published(Reserve), test.published(Shipped)) == ([Reserve(order_id="o")], [Shipped(order_id="o")])


async def test_runs_with_long_keys_are_listed() -> None:
    keys = ["o", "o.1 *", "long " * 50]
    async with TestApp(fulfilment()) as test:
        for key in keys:
            await test.publish(Placed(order_id=key))
        await test.settled()
        await test.publish(Paid(order_id=keys[2]))
        await test.settled()

        async def listed(shop: AppClient, status: Any = None) -> dict[str, str]:
            return {run.key: run.status async for run in shop.workflow("fulfilment").list(status)}

        assert await test.do(listed) == {"o": "running", "o.1 *": "running", keys[2]: "done"}
        assert await test.do(lambda shop: listed(shop, "done")) == {keys[2]: "done"}


async def test_a_run_that_has_failed_begins_anew() -> None:
    async with TestApp(fulfilment()) as test:
        with pytest.raises(ConfigError, match="has no run 'o'"):
            await test.do(lambda shop: shop.workflow("fulfilment").retry("o"))
        await test.publish(Placed(order_id="o"), correlation_id="all")
        await test.settled()
        with pytest.raises(ConfigError, match="is running, and has no event or command"):
            await test.do(lambda shop: shop.workflow("fulfilment").retry("o"))
        await test.do(lambda shop: shop.workflow("fulfilment").cancel("o"))
        again = await test.do(lambda shop: shop.workflow("fulfilment").retry("o"))
        assert again.is_restarted
        run = await test.do(lambda shop: shop.workflow("fulfilment").get("o"))
        assert run is not None
        assert (run.status, run.reason, run.state, run.timers) == ("running", None, Flow("waiting"), ("payment",))
        test.advance(PAYMENT_S + 60)  # the timer of the second time, once
        await test.settled()
        assert len(test.published(PaymentOverdue)) == 1
        await test.publish(Paid(order_id="o"))
        await test.settled()
        run = await test.do(lambda shop: shop.workflow("fulfilment").get("o"))
        assert run is not None
        assert (run.status, run.retries) == ("done", 1)
        assert (len(test.published(Reserve)), len(test.published(Release))) == (2, 1)

        async def correlations(shop: AppClient) -> set[str]:
            stream = await shop.js.stream("KV_shop")
            messages = [message async for message in stream.get_messages(1, subject="orders.o.reserve")]
            messages += [message async for message in stream.get_messages(1, subject="orders.o.release")]
            return {msgspec.json.decode(message.data)["correlationid"] for message in messages}

        assert await test.do(correlations) == {"all"}  # also of what was done by hand


async def test_a_run_whose_step_failed_goes_on_when_the_code_is_mended() -> None:
    is_broken = True
    app = App("shop", stream="KV_shop", subjects=["orders.>"], events=[Reserve, Release, Shipped], timers=True)

    @app.workflow("fulfilment", key="order_id", retry=Retry(attempts=2, first_s=0.1, max_s=0.2))
    class Broken(Fulfilment):
        def react(self, state: Flow | None, event: Placed | Paid | PaymentOverdue) -> Decision | None:
            if is_broken and isinstance(event, Paid):
                raise ZeroDivisionError
            return super().react(state, event)

    async with TestApp(app) as test:
        for event in (Placed(order_id="o"), Paid(order_id="o"), Paid(order_id="o")):
            await test.publish(event)
        await test.settled()
        assert [dead_letter.status for dead_letter in test.dead_letters] == ["open", "behind"]
        is_broken = False
        again = await test.do(lambda shop: shop.workflow("fulfilment").retry("o", wait_s=60))
        assert again.dead_letters == 2
        assert again.results is not None
        assert (again.results.handled, again.results.waiting) == (2, 0)
        run = await test.do(lambda shop: shop.workflow("fulfilment").get("o"))
        assert run is not None
        assert run.status == "done"
        assert test.published(Shipped) == [Shipped(order_id="o")]


async def test_a_run_is_ended_from_outside() -> None:
    async with TestApp(fulfilment()) as test:
        await test.publish(Placed(order_id="o"))
        await test.settled()
        assert await test.do(lambda shop: shop.workflow("fulfilment").cancel("o", "by hand"))
        assert not await test.do(lambda shop: shop.workflow("fulfilment").cancel("o"))
        assert not await test.do(lambda shop: shop.workflow("fulfilment").cancel("nobody"))
        assert test.published(Release) == [Release(order_id="o")]
        test.advance(PAYMENT_S * 2)
        await test.settled()
        assert test.published(PaymentOverdue) == []
