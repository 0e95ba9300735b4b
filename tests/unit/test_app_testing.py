"""Applications on the model server, in virtual time: the real workers, and what a test sees of them."""

from __future__ import annotations

import datetime
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support import seeds
from support.accounts import Enter, Entered, Transfer, bank

from jetspark import CommandInDoubt, ConfigError, NoWorkers, RequestTimeout, StreamConfig
from jetspark.app import App, Context, DeadLetterChange, Event, HandlerObserver, Refused, Reject, Retry, RetryIn
from jetspark.app.testing import STEPS, TestApp


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    number: int = 0


class Billed(Event, type="order.billed", key="order_id", subject="orders.{order_id}.billed"):
    order_id: str
    number: int


Failures = dict[tuple[str, int], list[Exception]]


def new_app(failures: Failures, seen: list[Any], *, replicas: int | None = None, **options: Any) -> App:
    config = StreamConfig(name="ORDERS", subjects=["orders.>"], replicas=replicas)
    app = App("orders", stream=config, events=[Billed])
    retry = Retry(attempts=4, first_s=0.1, max_s=3600, in_lane_s=5)

    @app.handler(Paid, durable="billing", **({"retry": retry} | options))
    async def bill(event: Paid, ctx: Context) -> Billed:
        seen.append((event.order_id, event.number, ctx.now()))
        if errors := failures.get((event.order_id, event.number)):
            raise errors.pop(0)
        return Billed(order_id=event.order_id, number=event.number)

    return app


async def test_what_handlers_return_is_published() -> None:
    app = new_app({}, [])
    async with TestApp(app) as test:
        for number in range(3):
            await test.publish(Paid(order_id="a", number=number))
        await test.settled()
        assert test.published(Billed) == [Billed(order_id="a", number=number) for number in range(3)]
        assert [each.number for each in test.published(Paid)] == [0, 1, 2]
        assert test.dead_letters == []


async def test_a_retry_after_an_hour_happens_when_the_hour_has_passed() -> None:
    seen: list[Any] = []
    app = new_app({("a", 1): [RetryIn(3600)]}, seen)
    async with TestApp(app) as test:
        for number in range(3):
            await test.publish(Paid(order_id="a", number=number))
        await test.publish(Paid(order_id="b"))
        await test.settled()
        assert [(each.order_id, each.number) for each in test.published(Billed)] == [("a", 0), ("b", 0)]
        test.advance(3500)
        assert len(test.published(Billed)) == 2
        test.advance(200)
        await test.settled()
        # In the order of the key: what came behind the one that had to wait has waited too.
        assert [each.number for each in test.published(Billed) if each.order_id == "a"] == [0, 1, 2]
        first, *_, last = [when for order, number, when in seen if (order, number) == ("a", 1)]
        assert datetime.timedelta(hours=1) <= last - first < datetime.timedelta(hours=1, seconds=60)


async def test_a_day_of_retries_takes_a_few_hundred_steps() -> None:
    """Every step of the loop costs about 0.1 ms. With idle requests renewed as in real time, a day takes 230 000."""
    seen: list[Any] = []
    app = new_app({("a", 0): [OSError("bank") for _ in range(40)]}, seen, retry=Retry(attempts=50, first_s=1))
    async with TestApp(app) as test:
        assert test._virtual is not None
        loop = test._virtual.loop
        await test.publish(Paid(order_id="a"))
        await test.settled()
        before = loop.rounds
        test.advance(86400)
        assert len(seen) > 24
        assert loop.rounds - before < 40 * len(seen)
        test.advance(86400)  # the last ones
        before = loop.rounds
        test.advance(30 * 86400)
        assert loop.rounds - before < 5000  # a month in which next to nothing happens


async def test_dead_letters_are_there_and_can_be_redriven() -> None:
    failures: Failures = {("a", 1): [Reject("not now")]}
    app = new_app(failures, [])
    async with TestApp(app) as test:
        for number in range(3):
            await test.publish(Paid(order_id="a", number=number))
        await test.settled()
        assert [each.status for each in test.dead_letters] == ["open", "behind"]
        assert test.dead_letters[0].cause is not None
        assert test.dead_letters[0].cause.message == "not now"
        await test.redrive()
        await test.settled()
        assert test.dead_letters == []
        assert [each.number for each in test.published(Billed)] == [0, 1, 2]


async def test_nothing_is_lost_when_the_server_dies() -> None:
    app = new_app({("a", number): [OSError("bank")] for number in range(0, 20, 3)}, [])
    async with TestApp(app, seed=3) as test:
        for number in range(20):
            if number == 10:
                test.network.kill_server(3)
                test.advance(10)
            await test.publish(Paid(order_id="a", number=number))
        await test.settled()
        assert [each.number for each in test.published(Billed)] == list(range(20))
        assert test.dead_letters == []


async def publish_once(test: TestApp, event: Paid) -> None:
    """While connections are lost: by its id it is stored once."""
    id = f"{event.order_id}-{event.number}"
    try:
        await test.publish(event, id=id)
    except RequestTimeout:  # its answer was on its way
        await test.publish(event, id=id)


@pytest.mark.parametrize("seed", seeds.tried(range(6), 2))
async def test_the_order_of_a_key_holds_through_lost_connections(seed: int) -> None:
    """What was on its way when a connection was lost comes again late; nothing of its key may overtake it."""
    rng = random.Random(seed)
    failures: Failures = {(key, number): [OSError("bank")] for key in "abc" for number in range(0, 15, 4)}
    app = new_app(failures, [])
    async with TestApp(app, seed=seed) as test:
        for number in range(15):
            for key in "abc":
                if rng.random() < 0.15:
                    test.network.cut()
                    test.advance(rng.uniform(0.0, 8.0))
                await publish_once(test, Paid(order_id=key, number=number))
        await test.settled()
        for key in "abc":
            billed = [each.number for each in test.published(Billed) if each.order_id == key]
            assert billed == list(range(15)), f"{seeds.again(seed)}: {key}"
        assert test.dead_letters == []


# ---- faults by name --------------------------------------------------------------------------------------------------


def counting_app(effects: list[str], once: list[str]) -> App:
    app = App("orders", stream="ORDERS", subjects=["orders.>"], events=[Billed])

    async def ship(number: int) -> str:
        once.append(str(number))
        return f"shipped {number}"

    @app.handler(Paid, durable="billing", retry=Retry(attempts=4, first_s=0.1))
    async def bill(event: Paid, ctx: Context) -> Billed:
        try:
            effects.append(f"{event.number}.{ctx.attempt}")
            await ctx.once("ship", ship, event.number)
            if event.number == 7 and ctx.redrives == 0:
                raise Reject("seven")
            if event.number == 8 and ctx.attempt == 1:
                raise RetryIn(60)
            if event.number == 9 and ctx.attempt == 1:
                raise OSError("bank")
            return Billed(order_id=event.order_id, number=event.number)
        except GeneratorExit:
            effects.append("a dead worker goes on")
            raise

    return app


async def test_an_acknowledgement_is_lost() -> None:
    effects: list[str] = []
    async with TestApp(counting_app(effects, [])) as test:
        fault = test.drop_ack()
        await test.publish(Paid(order_id="a"))
        before = test.now
        await test.settled()
        assert fault.happened == 1
        assert test.now - before > 20  # it came again, and the worker remembered it
        assert effects == ["0.1"]
        assert test.published(Billed) == [Billed(order_id="a", number=0)]


async def test_an_event_is_rejected_and_others_go_on_until_it_is_redriven() -> None:
    async with TestApp(new_app({}, [])) as test:
        fault, other = test.reject(handler="billing", after=1), test.reject(handler="another")
        for order, number in (("a", 0), ("a", 1), ("a", 2), ("b", 0)):
            await test.publish(Paid(order_id=order, number=number))
            await test.settled()
        assert (fault.happened, other.happened) == (1, 0)
        assert [(each.order_id, each.number) for each in test.published(Billed)] == [("a", 0), ("b", 0)]
        assert len(test.dead_letters) == 2  # the one behind it has its key
        await test.redrive()
        await test.settled()
        assert [each.number for each in test.published(Billed) if each.order_id == "a"] == [0, 1, 2]
        assert test.dead_letters == []


async def test_workers_die_after_the_effect() -> None:
    effects: list[str] = []
    once: list[str] = []
    async with TestApp(counting_app(effects, once)) as test:
        fault = test.crash_after_effect()
        await test.publish(Paid(order_id="a"))
        await test.publish(Paid(order_id="b", number=1))
        await test.settled()
        assert fault.happened == 1
        assert effects.count("0.1") == 1
        assert "0.2" in effects  # the next one counts the attempt of the dead
        assert sorted(once) == ["0", "1"]  # recorded, so not repeated
        assert sorted(each.number for each in test.published(Billed)) == [0, 1]
        assert test.dead_letters == []


@pytest.mark.parametrize(
    "at",
    [f"{when} {step}" for step in STEPS for when in ("before", "after") if step not in ("Commit", "InProgress")],
)
async def test_workers_die_at_any_step_and_nothing_is_lost_or_doubled(at: str) -> None:
    effects: list[str] = []
    once: list[str] = []
    async with TestApp(counting_app(effects, once)) as test:
        fault = test.crash(at)
        for number in (6, 7, 8, 9):
            await test.publish(Paid(order_id=f"k{number}", number=number))
        await test.publish(Paid(order_id="k7", number=10))
        await test.settled()
        test.advance(300)
        await test.settled()
        await test.redrive()
        await test.settled()
        test.advance(300)
        await test.settled()
        assert fault.happened == 1
        assert sorted(each.number for each in test.published(Billed)) == [6, 7, 8, 9, 10]
        assert test.dead_letters == []
        extra = 1 if at in ("before RecordEffect",) else 0  # between the effect and its record
        assert len(once) == 5 + extra
        assert set(once) == {"6", "7", "8", "9", "10"}


async def _course(seed: int) -> list[Any]:
    """Everything that a handler sees, through a lost connection, a crash and a restart of the server."""
    app, seen = App("orders", stream="ORDERS", subjects=["orders.>"], events=[Billed]), list[Any]()

    @app.handler(Paid, durable="billing", retry=Retry(first_s=0.1))
    async def bill(event: Paid, ctx: Context) -> Billed:
        seen.append((ctx.event_id, ctx.new_id(), ctx.correlation_id, ctx.traceparent, ctx.now(), ctx.attempt))
        if ctx.attempt == 1:
            raise OSError("away")
        return Billed(order_id=event.order_id, number=event.number)

    @app.handler(Billed, durable="mail")
    async def mail(event: Billed, ctx: Context) -> None:
        seen.append((ctx.event_id, ctx.now(), ctx.stream, ctx.sequence))

    async with TestApp(app, seed=seed) as test:
        for number in range(4):
            await test.publish(Paid(order_id="a", number=number))
        test.crash_after_effect(handler="billing")
        test.network.cut()
        await publish_once(test, Paid(order_id="b"))
        await publish_once(test, Paid(order_id="c"))
        await test.settled()
        test.restart_server(3)
        await publish_once(test, Paid(order_id="d"))
        await test.settled()
    return seen


async def test_a_seed_is_one_course_of_events_ids_and_times_included() -> None:
    first = await _course(3)
    assert len(first) > 14
    assert await _course(3) == first
    assert await _course(4) != first


class Invoiced(Event, type="order.invoiced", key="order_id", subject="orders.{order_id}.invoiced"):
    order_id: str
    way: str

    def event_id(self) -> str:
        return f"invoice-{self.order_id}-{self.way}"


@pytest.mark.parametrize("is_killed", [False, True])
async def test_an_event_with_its_own_id_has_it_however_a_handler_publishes_it(is_killed: bool) -> None:
    app, ids = App("orders", stream="ORDERS", subjects=["orders.>"], timers=True), list[tuple[str, str]]()

    @app.handler(Paid, durable="billing")
    async def bill(event: Paid, ctx: Context) -> list[Invoiced]:
        await ctx.publish(Invoiced(order_id=event.order_id, way="published"))
        await ctx.schedule(Invoiced(order_id=event.order_id, way="scheduled"), after=60)
        await ctx.timers.set("reminder", Invoiced(order_id=event.order_id, way="set"), after=120)
        return [Invoiced(order_id=event.order_id, way="returned")]

    @app.handler(Invoiced, durable="mail")
    async def mail(event: Invoiced, ctx: Context) -> None:
        ids.append((event.way, ctx.event_id))

    async with TestApp(app) as test:
        fault = test.crash_after_effect(handler="billing") if is_killed else None
        await test.publish(Paid(order_id="a"))
        await test.settled()
        test.advance(300)
        await test.settled()
        assert fault is None or fault.happened == 1
    ways = ["published", "returned", "scheduled", "set"]
    assert sorted(ids) == [(way, f"invoice-a-{way}") for way in ways]


@pytest.mark.parametrize("batch", [None, 10])
@pytest.mark.parametrize("dead_letter", [True, False])
async def test_attempts_are_bounded_through_crashes(dead_letter: bool, batch: int | None) -> None:
    """Without dead letters what has killed its workers is dropped, and told; its key goes on."""
    app, begun, told = App("bounded", stream="BOUNDED", subjects=["orders.>"]), list[int](), list[DeadLetterChange]()

    class Letters(HandlerObserver):
        def on_dead_letter(self, dead_letter: DeadLetterChange) -> None:
            told.append(dead_letter)

    app.observe(Letters())
    options: Any = {"durable": "billing", "retry": Retry(attempts=2), "dead_letter": dead_letter}

    if batch is None:

        @app.handler(Paid, **options)
        async def bill(event: Paid) -> None:
            begun.append(event.number)

    else:

        @app.batch_handler(Paid, batch=batch, **options)
        async def bill_all(events: list[Paid]) -> None:
            begun.extend(event.number for event in events)

    async with TestApp(app) as test:
        crash = test.crash("after RunHandler", times=2)
        await test.publish(Paid(order_id="a", number=1))
        await test.settled()
        assert (begun, crash.happened) == ([1, 1], 2)
        # In the order of a key what comes after a letter waits for it; what is dropped holds up nothing.
        await test.publish(Paid(order_id="a", number=2))
        await test.settled()
        waits = dead_letter and batch is None
        assert begun == ([1, 1] if waits else [1, 1, 2])
        assert [each.cause.error for each in test.dead_letters if each.cause] == ["WorkerDied"] * dead_letter
    assert [(each.status, each.sequence, each.error, each.attempts) for each in told] == (
        [("open" if dead_letter else "dropped", 1, "WorkerDied", 3)] + [("behind", 2, None, 0)] * waits
    )


@pytest.mark.parametrize("at", [None, "before Acknowledge", "after RunHandler", "before Publish"])
async def test_the_server_restarts(at: str | None) -> None:
    effects: list[str] = []
    async with TestApp(counting_app(effects, [])) as test:
        if at is not None:
            fault = test.restart_server(3, at=at)
        for number in range(3):
            await publish_once(test, Paid(order_id="a", number=number))
        if at is None:
            fault = test.restart_server(3)
        await test.settled()
        assert fault.happened == 1
        assert [each.number for each in test.published(Billed)] == [0, 1, 2]


async def test_the_leader_is_lost() -> None:
    app = new_app({}, [], retry=Retry(attempts=10, first_s=0.5))
    async with TestApp(app) as test:
        with pytest.raises(ConfigError, match="one replica"):
            test.lose_leader()
    replicated = new_app({}, [], replicas=3, retry=Retry(attempts=10, first_s=0.5))
    async with TestApp(replicated) as test:
        await test.publish(Paid(order_id="a"))
        assert test.lose_leader(4).happened == 1
        test.advance(10)
        await test.publish(Paid(order_id="a", number=1))
        fault = test.lose_leader(4, at="before Publish")
        await test.publish(Paid(order_id="a", number=2))
        await test.settled()
        assert fault.happened == 1
        assert [each.number for each in test.published(Billed)] == [0, 1, 2]


async def test_the_connection_is_cut() -> None:
    async with TestApp(counting_app([], [])) as test:
        fault = test.cut_connection(at="after RunHandler")
        for number in range(3):
            await test.publish(Paid(order_id="a", number=number))
        await test.settled()
        assert fault.happened == 1
        assert [each.number for each in test.published(Billed)] == [0, 1, 2]


async def test_a_step_that_does_not_exist_is_refused() -> None:
    async with TestApp(counting_app([], [])) as test:
        with pytest.raises(ConfigError, match="'before' or 'after' and one of RunHandler"):
            test.crash("while sleeping")


async def test_what_never_settles_is_an_error_that_says_what_is_left() -> None:
    app = new_app({("a", 0): [RetryIn(4) for _ in range(10_000)]}, [], retry=Retry(attempts=10_000, in_lane_s=5))
    async with TestApp(app) as test:
        await test.publish(Paid(order_id="a"))
        with pytest.raises(RequestTimeout, match="'billing' has events of stream 'ORDERS'"):
            await test.settled(timeout=30)


async def test_an_error_of_the_workers_is_raised() -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])

    class Bank:
        pass

    @app.handler(Paid, durable="billing")
    async def bill(event: Paid, bank: Bank) -> None: ...

    with pytest.raises(Exception, match="Bank"):
        async with TestApp(app) as test:
            await test.settled()


class Bank:
    async def charge(self) -> str:
        raise ConnectionError("this is the real bank, which no test may use")


class FakeBank(Bank):
    async def charge(self) -> str:
        return "receipt"


async def test_a_test_gives_handlers_its_own_dependencies_and_the_lifespans_do_not_run() -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])
    opened: list[str] = []
    receipts: list[str] = []

    @app.lifespan
    async def resources() -> AsyncIterator[Bank]:
        opened.append("the real bank")
        yield Bank()

    @app.handler(Paid, durable="billing")
    async def bill(event: Paid, bank: Bank) -> None:
        receipts.append(await bank.charge())

    async with TestApp(app, dependencies=[FakeBank()]) as test:
        await test.publish(Paid(order_id="a"))
        await test.settled()
    assert (opened, receipts) == ([], ["receipt"])
    with pytest.raises(ConfigError, match="expected one Bank from the lifespan, found 0"):
        async with TestApp(app, dependencies=[]):
            pass


@pytest.mark.parametrize(
    ("has_dead_letters", "end"),
    [(True, "dead letter written"), (False, "dropped, since the handler has no dead letters")],
)
async def test_a_worker_says_what_it_gives_up(
    has_dead_letters: bool, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    retry = Retry(attempts=2, first_s=0.1)
    app = new_app({("a", 0): [ValueError("no")] * 2}, [], retry=retry, dead_letter=has_dead_letters)
    async with TestApp(app) as test:
        await test.publish(Paid(order_id="a"))
        await test.settled()
        assert len(test.dead_letters) == has_dead_letters
    said = [each.getMessage() for each in caplog.records if each.name == "jetspark.app.orders.billing"]
    assert said == [
        "event 1: attempt 1 failed: ValueError: no",
        "event 1: attempt 2 failed: ValueError: no",
        f"event 1: given up after 2 attempts; {end}",
    ]


# ---- projections and partitions --------------------------------------------------------------------------------------


class Totals:
    def key(self, event: Paid | Billed) -> str:
        return event.order_id

    def apply(self, state: dict[str, int] | None, event: Paid | Billed) -> dict[str, int]:
        name = type(event).__name__
        return {**(state or {}), name: (state or {}).get(name, 0) + 1}


def projecting_app() -> App:
    app = new_app({("a", 1): [OSError("bank")]}, [])
    app.projection("totals", events=[Paid, Billed], bucket="totals")(Totals)
    return app


async def test_the_state_of_a_projection_is_there_when_all_is_settled() -> None:
    async with TestApp(projecting_app()) as test:
        for number in range(3):
            await test.publish(Paid(order_id="a", number=number))
        await test.publish(Paid(order_id="b.c"))
        await test.settled()
        assert test.state("totals") == {"a": {"Paid": 3, "Billed": 3}, "b.c": {"Paid": 1, "Billed": 1}}
        with pytest.raises(ConfigError, match="it has totals"):
            test.state("total")


@pytest.mark.parametrize("seed", range(3))
async def test_projections_have_each_event_once_when_workers_and_server_die(seed: int) -> None:
    async with TestApp(projecting_app(), seed=seed) as test:
        crash = test.crash("before Acknowledge", times=2)
        for number in range(6):
            await test.publish(Paid(order_id="a", number=number))
        await test.settled()
        test.restart_server(3)
        test.advance(10)
        await test.publish(Paid(order_id="b"))
        await test.settled()
        assert crash.happened == 2
        assert test.state("totals") == {"a": {"Paid": 6, "Billed": 6}, "b": {"Paid": 1, "Billed": 1}}


async def test_a_day_with_projections_is_cheap() -> None:
    async with TestApp(projecting_app()) as test:
        assert test._virtual is not None
        before = test._virtual.loop.rounds
        test.advance(86400)
        assert test._virtual.loop.rounds - before < 20_000


async def test_an_application_of_projections_alone_runs() -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])
    app.projection("totals", events=[Paid], bucket="totals")(Totals)
    async with TestApp(app) as test:
        await test.publish(Paid(order_id="a"))
        await test.settled()
        assert test.state("totals") == {"a": {"Paid": 1}}


async def test_a_handler_with_partitions_runs_as_one() -> None:
    app = new_app({("a", 1): [OSError("bank")]}, [], partitions=4)
    async with TestApp(app) as test:
        for number in range(3):
            await test.publish(Paid(order_id="a", number=number))
        await test.settled()
        assert [each.number for each in test.published(Billed)] == [0, 1, 2]


@pytest.mark.parametrize("fault", ["restart_server", "cut_connection", "drop"])
async def test_an_effect_whose_record_is_not_answered_is_recorded_again_and_not_done_again(fault: str) -> None:
    once: list[str] = []
    async with TestApp(counting_app([], once)) as test:
        match fault:
            case "restart_server":
                injected = test.restart_server(3, at="before RecordEffect")
            case "cut_connection":
                injected = test.cut_connection(at="before RecordEffect")
            case _:
                injected = test.injector.set("before RecordEffect", lambda: True, name=fault, handler=None, times=1)
        await test.publish(Paid(order_id="a"))
        await test.settled()
        assert injected.happened == 1
        assert once == ["0"]
        assert [each.number for each in test.published(Billed)] == [0]


@pytest.mark.parametrize("partitions", [False, True])
async def test_partitions_are_read_for_themselves_if_a_test_says_so(partitions: bool) -> None:
    app = App("parted", stream="PARTED", subjects=["orders.>"])
    starts: list[tuple[str, int]] = []

    @app.handler(Paid, durable="parts", partitions=4, retry=Retry(attempts=5, first_s=1, max_s=4))
    async def place(event: Paid, ctx: Context) -> None:
        starts.append((event.order_id, ctx.attempt))
        if ctx.attempt < 5:
            raise OSError("away")

    async with TestApp(app, partitions=partitions) as test:
        test.advance(60)
        for order_id in "abc":
            await test.publish(Paid(order_id=order_id))
        await test.settled()
        assert sorted(starts) == [(order_id, attempt) for order_id in "abc" for attempt in range(1, 6)]
        assert test.dead_letters == []
        assert (test.app.handlers["parts"].partitions == 4) is partitions


async def test_commands_are_called_and_a_worker_that_dies_decides_nothing_twice() -> None:
    for moment in ("before Publish", "after Publish"):
        async with TestApp(bank()) as test:
            assert (await test.call(Enter(ledger="x", writer="w"))).data == 1
            fault = test.crash(moment)
            reply = await test.call(Enter(ledger="x", writer="w"), command_id="e-2", timeout=20.0)
            assert (reply.data, fault.happened) == (2, 1)
            assert await test.call(Enter(ledger="x", writer="w"), command_id="e-2") == reply
            with pytest.raises(Refused, match="no such account"):
                await test.call(Transfer(source="a", target="b", cents=1))
            assert [each.number for each in test.published(Entered)] == [1, 2]


async def test_without_workers_a_command_says_that_there_are_none() -> None:
    async with TestApp(bank()) as test:
        test.crash("before Publish", restart_after=60.0)
        with pytest.raises(CommandInDoubt):
            await test.call(Enter(ledger="x", writer="w"), timeout=2.0)
        with pytest.raises(NoWorkers, match="Start one"):
            await test.call(Enter(ledger="x", writer="w"), timeout=2.0)
