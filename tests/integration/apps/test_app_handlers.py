"""Handlers on a real server."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support import broken
from support.apps import is_settled, publish, running, set_up, until

from jetspark.aio.consumer import Consumer
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Context, Event, Reject, Retry, RetryIn, Skip, upcast
from jetspark.app.dead_letters.redriving import DeadLetterFilter, run_redrive
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.app.handlers.inheritance import tidy_retries
from jetspark.app.handlers.intake import Intake
from jetspark.app.replay import HandlerReplayOptions, replay_handler
from jetspark.app.topology.names import partition_stream
from jetspark.errors import TopologyDrift
from jetspark.server import NatsServer

_numbers = itertools.count(1)


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    number: int = 0


class Billed(Event, type="order.billed", key="order_id", subject="billed.{order_id}"):
    order_id: str
    receipt: str


class Bank:
    def __init__(self) -> None:
        self.charged: list[str] = []

    async def charge(self, order_id: str, *, idempotency_key: str = "") -> str:
        self.charged.append(order_id)
        return f"receipt {order_id}"


def new_app() -> App:
    return App(f"orders{next(_numbers)}", stream="ORDERS", subjects=["orders.>", "billed.>"])


async def test_events_are_handled_with_what_the_lifespan_made(server: NatsServer, js: JetStream) -> None:
    app, bank, seen = new_app(), Bank(), []

    @app.lifespan
    async def resources() -> AsyncIterator[Bank]:
        yield bank
        seen.append("closed")

    @app.handler(Paid, durable="billing")
    async def bill(event: Paid, ctx: Context, bank: Bank) -> Billed:
        seen.append(event.order_id)
        assert (ctx.key, ctx.attempt, ctx.stream) == (event.order_id, 1, "ORDERS")
        return Billed(order_id=event.order_id, receipt=await bank.charge(event.order_id))

    await set_up(js, app)
    await publish(js, app, Paid(order_id="a"), Paid(order_id="b"))
    async with running(app, server.url):
        await until(lambda: len(bank.charged) == 2)
        await until(lambda: is_settled(js, app, "billing"))
    assert sorted(seen) == ["a", "b", "closed"]
    stored = [message async for message in (await js.stream("ORDERS")).get_messages(1, subject="billed.>")]
    assert [message.subject for message in stored] == ["billed.a", "billed.b"]
    assert len({message.headers["Nats-Msg-Id"] for message in stored}) == 2


async def test_every_attempt_gets_the_recorded_result_and_returned_events_are_stored_all_or_none(
    server: NatsServer, js: JetStream
) -> None:
    app, results = new_app(), list[Any]()

    async def charge():  # type: ignore[no-untyped-def]  # what users write
        return ("receipt", datetime.date(2026, 3, 31), {1: 2.5})

    @app.handler(Paid, durable="billing", retry=Retry(attempts=2, first_s=0.01))
    async def bill(event: Paid, ctx: Context) -> list[Billed]:
        results.append(await ctx.once("charge", charge))
        return [Billed(order_id="a", receipt="r"), Billed(order_id="b", receipt=results[-1])]

    await set_up(js, app)
    await publish(js, app, Paid(order_id="a"))
    async with running(app, server.url):
        await until(lambda: len(results) == 2)
        await until(lambda: is_settled(js, app, "billing"))
    assert results == [["receipt", "2026-03-31", {"1": 2.5}]] * 2
    assert (await (await js.stream("ORDERS")).info(subjects_filter="billed.>")).state.subjects in (None, {})


async def test_a_reject_inside_a_task_group_is_a_dead_letter_at_once(server: NatsServer, js: JetStream) -> None:
    app, attempts = new_app(), list[int]()

    async def charge() -> None:
        raise Reject("no such card")

    @app.handler(Paid, durable="billing", retry=Retry(attempts=3, first_s=0.01))
    async def bill(event: Paid, ctx: Context) -> None:
        attempts.append(ctx.attempt)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(charge())

    await set_up(js, app)
    await publish(js, app, Paid(order_id="a"))
    async with running(app, server.url):
        store = await HandlerStore.open(js, app.name, "billing")
        await until(lambda: is_settled(js, app, "billing"))
        [dead_letter] = [each.dead_letter async for each in store.all_dead_letters()]
    assert attempts == [1]
    assert dead_letter.cause is not None
    assert (dead_letter.cause.error.rpartition(".")[2], dead_letter.cause.message) == ("Reject", "no such card")


async def test_a_key_keeps_its_order_through_short_and_long_retries(server: NatsServer, js: JetStream) -> None:
    app, done = new_app(), []
    failures: dict[tuple[str, int], list[Exception]] = {
        ("a", 1): [RetryIn(0.05), OSError()],
        ("b", 0): [RetryIn(1.5)],
    }

    @app.handler(Paid, durable="billing", retry=Retry(first_s=0.05, in_lane_s=0.5))
    async def bill(event: Paid) -> None:
        errors = failures.get((event.order_id, event.number))
        if errors:
            raise errors.pop(0)
        done.append((event.order_id, event.number))

    await set_up(js, app)
    await publish(js, app, *(Paid(order_id=key, number=number) for number in range(3) for key in "abc"))
    async with running(app, server.url):
        await until(lambda: len(done) == 9)
        await until(lambda: is_settled(js, app, "billing"))
        store = await HandlerStore.open(js, app.name, "billing")
        assert [dead_letter async for dead_letter in store.all_dead_letters()] == []
        assert [key async for key in store.records.keys(">")] == []
    for key in "abc":
        assert [number for found, number in done if found == key] == [0, 1, 2]
    assert done.index(("c", 2)) < done.index(("a", 2)) < done.index(("b", 0))


async def test_a_rejected_event_parks_its_key_until_it_is_redriven(server: NatsServer, js: JetStream) -> None:
    app, done, is_mended = new_app(), [], False

    @app.handler(Paid, durable="billing", retry=Retry(attempts=2, first_s=0.01))
    async def bill(event: Paid, ctx: Context) -> None:
        if event.number == 1 and not is_mended:
            raise Reject("no such card") if event.order_id == "a" else ValueError("no")
        done.append((event.order_id, event.number, ctx.redrives))

    await set_up(js, app)
    await publish(js, app, *(Paid(order_id=key, number=number) for number in range(4) for key in "ab"))
    store = await HandlerStore.open(js, app.name, "billing")
    async with running(app, server.url):
        await until(lambda: is_settled(js, app, "billing"))
        assert sorted(done) == [("a", 0, 0), ("b", 0, 0)]
        dead_letters = [each.dead_letter async for each in store.all_dead_letters()]
        assert sorted(
            (each.key, each.origin.sequence, each.status, each.behind, each.attempts) for each in dead_letters
        ) == [
            ("a", 3, "open", None, 1),
            ("a", 5, "behind", 3, 0),
            ("a", 7, "behind", 3, 0),
            ("b", 4, "open", None, 2),
            ("b", 6, "behind", 4, 0),
            ("b", 8, "behind", 4, 0),
        ]
        assert {each.cause.error for each in dead_letters if each.cause} == {
            "jetspark.app.handlers.retry.Reject",
            "ValueError",
        }
        # Redriven without being mended: one letter still.
        [first] = [each async for each in store.all_dead_letters(key="a") if each.dead_letter.status == "open"]
        await store.request(first)
        await store.request(first)
        await until(lambda: is_settled(js, app, "billing"))
        [again] = [each async for each in store.all_dead_letters(key="a") if each.dead_letter.status == "open"]
        assert (again.dead_letter.redrives, again.dead_letter.origin) == (1, first.dead_letter.origin)
        is_mended = True
        await store.request(again)
        await until(lambda: len(done) == 5)
        [other] = [each async for each in store.all_dead_letters(key="b") if each.dead_letter.status == "open"]
        assert await store.discard(other)
        await until(lambda: len(done) == 7)
        await until(lambda: is_settled(js, app, "billing"))
        assert [each async for each in store.all_dead_letters()] == []
        await publish(js, app, Paid(order_id="a", number=9), Paid(order_id="b", number=9))
        await until(lambda: len(done) == 9)
    assert [(number, redrives) for key, number, redrives in done if key == "a"] == [
        (0, 0),
        (1, 2),
        (2, 1),
        (3, 1),
        (9, 0),
    ]
    assert [number for key, number, _ in done if key == "b"] == [0, 2, 3, 9]


async def test_what_is_no_event_is_told_apart_and_ends_in_the_dead_letters(server: NatsServer, js: JetStream) -> None:
    app, done = new_app(), []

    @app.handler(broken.Paid, durable="billing")
    async def bill(event: broken.Paid) -> None:
        if event.number:
            raise Skip("not ours")
        done.append(event.order_id)

    await set_up(js, app)
    for number, (_, data) in enumerate(broken.BROKEN.values()):
        await js.publish(f"orders.o-{number}.paid", data, headers={"Number": f"m-{number}"})
    await publish(js, app, broken.Paid(order_id="x"), broken.Paid(order_id="x", number=1))
    async with running(app, server.url):
        await until(lambda: done == ["x"])
        await until(lambda: is_settled(js, app, "billing"))
    store = await HandlerStore.open(js, app.name, "billing")
    dead_letters = sorted(
        [each.dead_letter async for each in store.all_dead_letters()], key=lambda each: each.origin.sequence
    )
    assert [(each.key, each.status, each.attempts, each.data, each.headers["Number"]) for each in dead_letters] == [
        (f"o-{number}", "open", 1, data, f"m-{number}") for number, (_, data) in enumerate(broken.BROKEN.values())
    ]
    for dead_letter, (kind, _) in zip(dead_letters, broken.BROKEN.values(), strict=True):
        assert dead_letter.cause is not None
        assert dead_letter.cause.error == f"jetspark.errors.{kind.__name__}"
        assert not dead_letter.cause.is_transient


@pytest.mark.parametrize("restarted", [False, True], ids=["one worker", "another worker meanwhile"])
async def test_an_event_that_cannot_be_read_parks_its_key_until_newer_code_has_handled_it(
    server: NatsServer, js: JetStream, restarted: bool
) -> None:
    old, done = new_app(), list[tuple[str, int]]()

    @old.handler(Paid, durable="billing", ack_wait_s=2.0)
    async def bill(event: Paid) -> None:
        done.append((event.order_id, event.number))

    class NewPaid(Event, type="order.paid", version=2, key="order_id", subject="orders.{order_id}.paid"):
        order_id: str
        number: int = 0

    @upcast(NewPaid, from_version=1)
    def _(fields: dict[str, Any]) -> dict[str, Any]:
        return fields

    await set_up(js, old)
    await publish(js, old, *(Paid(order_id=key, number=0) for key in "xy"))
    await publish(js, old, NewPaid(order_id="x", number=1))
    await publish(js, old, *(Paid(order_id=key, number=2) for key in "xy"))
    if restarted:
        # Delivered to somebody who is not heard of again: what comes behind it must wait for it to come once more.
        consumer = await (await js.stream(old.stream)).consumer("billing")
        await consumer.fetch(3, timeout=5)
    async with running(old, server.url):
        await until(lambda: is_settled(js, old, "billing"))
    assert sorted(done) == [("x", 0), ("y", 0), ("y", 2)]
    new = App(old.name, stream=old.stream, subjects=old.spec.subjects)

    @new.handler(NewPaid, durable="billing", ack_wait_s=2.0)
    async def bill_new(event: NewPaid) -> None:
        done.append((event.order_id, event.number))

    await set_up(js, new)
    await publish(js, new, NewPaid(order_id="x", number=3))
    async with running(new, server.url):
        await until(lambda: is_settled(js, new, "billing"))
        assert len(done) == 3
        progress = await run_redrive(js, new, DeadLetterFilter(), wait_s=60.0)
        assert str(progress.results) == "3 handled, 0 failed again, 0 waiting"
        await publish(js, new, NewPaid(order_id="x", number=4))
        await until(lambda: len(done) == 7)
    assert [number for key, number in done if key == "x"] == [0, 1, 2, 3, 4]


async def test_a_handler_that_runs_for_too_long_is_cancelled_and_tried_again(server: NatsServer, js: JetStream) -> None:
    app, begun = new_app(), []

    @app.handler(Paid, durable="billing", timeout=0.2, ack_wait_s=1.0, retry=Retry(attempts=3, first_s=0.01))
    async def bill(event: Paid, ctx: Context) -> None:
        begun.append(ctx.attempt)
        if ctx.attempt < 3:
            await asyncio.sleep(60)

    await set_up(js, app)
    await publish(js, app, Paid(order_id="a"))
    async with running(app, server.url):
        await until(lambda: len(begun) == 3)
        await until(lambda: is_settled(js, app, "billing"))
    assert begun == [1, 2, 3]


async def test_the_smallest_limits_let_everything_through_and_the_largest_take_no_more_than_they_use(
    server: NatsServer, js: JetStream
) -> None:
    app, done = new_app(), list[str]()

    @app.handler(Paid, durable="least", max_messages=2, max_bytes=2)
    async def least(event: Paid) -> None:
        done.append(event.order_id)

    @app.handler(Paid, durable="most", concurrency=200_000, max_messages=64)
    async def most(event: Paid) -> None:
        done.append(event.order_id)

    await set_up(js, app)
    await publish(js, app, *(Paid(order_id=name) for name in "abcd"))
    async with running(app, server.url):
        await until(lambda: len(done) == 8)
        assert len(asyncio.all_tasks()) < 500
    assert sorted(done) == sorted("abcd" * 2)


async def test_a_slow_handler_says_that_it_is_at_work(server: NatsServer, js: JetStream) -> None:
    app, begun = new_app(), []

    @app.handler(Paid, durable="billing", ack_wait_s=1.0, concurrency=1)
    async def bill(event: Paid, ctx: Context) -> None:
        begun.append((event.order_id, ctx.delivered))
        await asyncio.sleep(1.8)

    await set_up(js, app)
    await publish(js, app, Paid(order_id="a"), Paid(order_id="b"))
    async with running(app, server.url):
        await until(lambda: len(begun) == 2)
        await until(lambda: is_settled(js, app, "billing"))
    assert begun == [("a", 1), ("b", 1)]


async def test_settled_messages_of_the_retry_stream_are_removed_after_a_while(
    server: NatsServer, js: JetStream
) -> None:
    app, done = new_app(), []

    @app.handler(Paid, durable="billing", retry=Retry(in_lane_s=0))
    async def bill(event: Paid, ctx: Context) -> None:
        if ctx.attempt == 1:
            raise RetryIn(1)
        done.append(event.order_id)

    await set_up(js, app)
    await publish(js, app, Paid(order_id="a"), Paid(order_id="b"))
    async with running(app, server.url):
        await until(lambda: len(done) == 2)
        await until(lambda: is_settled(js, app, "billing"))
    retries = await js.stream(app.spec.retry_stream)
    prefix = f"retry.{app.name}.billing"
    await retries.purge(subject=f"{prefix}.wait.>")
    assert len((await retries.info(subjects_filter=f"{prefix}.due.>")).state.subjects) == 2
    tidying = asyncio.create_task(
        tidy_retries(retries, await retries.consumer("billing"), prefix, every_s=0.01, keep_s=0.05)
    )

    async def is_tidy() -> bool:
        return not (await retries.info(subjects_filter=">")).state.subjects

    await until(is_tidy)
    tidying.cancel()


async def test_a_batch_is_one_call_and_one_that_fails_is_tried_event_by_event(
    server: NatsServer, js: JetStream
) -> None:
    app, batches = new_app(), []

    @app.batch_handler(Paid, durable="report", batch=4, batch_wait_s=0.1, retry=Retry(attempts=2, first_s=0.01))
    async def report(events: list[Paid]) -> None:
        batches.append([event.number for event in events])
        if any(event.number == 5 for event in events):
            raise ValueError("no fives")

    await set_up(js, app)
    await publish(js, app, *(Paid(order_id="a", number=number) for number in range(10)))
    await js.publish("orders.x.paid", b"not json")
    async with running(app, server.url):
        await until(lambda: is_settled(js, app, "report"))
    whole = [batch for batch in batches if len(batch) > 1]
    assert whole[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches[2:6] == [[4], [5], [6], [7]]
    assert sorted({number for batch in batches for number in batch}) == list(range(10))
    store = await HandlerStore.open(js, app.name, "report")
    dead_letters = [each.dead_letter async for each in store.all_dead_letters()]
    assert sorted(
        (each.origin.sequence, each.cause.error.rsplit(".", 1)[-1]) for each in dead_letters if each.cause
    ) == [
        (6, "ValueError"),
        (11, "NotJson"),
    ]


async def test_a_batch_that_takes_too_long_is_cancelled(server: NatsServer, js: JetStream) -> None:
    app, batches = new_app(), []

    @app.batch_handler(Paid, durable="report", batch=2, timeout=0.2)
    async def report(events: list[Paid]) -> None:
        batches.append([event.number for event in events])
        if len(events) == 2:
            await asyncio.sleep(60)

    await set_up(js, app)
    await publish(js, app, *(Paid(order_id="a", number=number) for number in range(2)))
    async with running(app, server.url):
        await until(lambda: is_settled(js, app, "report"))
    assert batches == [[0, 1], [0], [1]]


async def test_a_handler_of_several_subjects_reads_its_own_stream_whole_and_passes_by_the_rest(
    server: NatsServer, js: JetStream
) -> None:
    """A server takes milliseconds for each message of a consumer with several filters, if there are many subjects."""
    app, seen = new_app(), list[str]()

    @app.handler(Paid, Billed, durable="billing")
    async def note(event: Paid | Billed) -> None:
        seen.append(f"{type(event).__name__} {event.order_id}")

    await set_up(js, app)
    for number in range(20):
        await js.publish(f"orders.o{number}.audited", b"no event")
        await publish(js, app, Paid(order_id=f"o{number}"))
    async with running(app, server.url):
        await until(lambda: len(seen) == 20)
        await publish(js, app, Billed(order_id="o1", receipt="r"))
        last = await js.publish("orders.o1.audited", b"no event")
        consumer = await (await js.stream(app.stream)).consumer("billing")

        async def is_settled_up_to_the_end() -> bool:
            info = await consumer.info()
            return not info.pending and not info.ack_pending and info.ack_floor.stream_sequence == last.sequence

        await until(is_settled_up_to_the_end)
        assert (await consumer.info()).config.filter_subject == ">"
    assert seen == [*(f"Paid o{number}" for number in range(20)), "Billed o1"]
    assert not (await (await js.stream(app.spec.dead_letter_stream)).info()).state.messages
    done = await replay_handler(js, app, "billing", options=HandlerReplayOptions(effects=True))
    assert (done.done, done.failed) == (21, 0)


class Left(Event, type="left", key="name", subject="left.{name}"):
    name: str


class Right(Event, type="right", key="name", subject="right.{name}"):
    name: str


@pytest.mark.parametrize("partitions", [None, 1])
async def test_a_worker_whose_consumer_was_narrowed_ends_and_says_what_is_missing(
    server: NatsServer, js: JetStream, partitions: int | None
) -> None:
    app = App("narrowed", stream="NARROWED", subjects=["left.*", "right.*"])

    @app.handler(Left, Right, durable="both", filtered=True, partitions=partitions)
    async def handle(event: Left | Right) -> None: ...

    await set_up(js, app)
    if partitions is None:
        stream = await js.stream("NARROWED")
        [consumer], narrow = [await stream.consumer("both")], "left.*"
    else:
        stream = await js.stream(partition_stream("narrowed", "both"))
        [consumer] = [await stream.consumer(each.name) async for each in stream.consumers()]
        narrow = "none.of.them"
    workers = asyncio.create_task(app.run(server.url, stop_timeout=5.0))
    await publish(js, app, Left(name="a"))
    await until(lambda: is_settled_once(consumer))
    narrowed = dataclasses.replace((await consumer.info()).config, filter_subject=narrow, filter_subjects=None)
    await stream.update_consumer(narrowed)
    with pytest.raises(TopologyDrift, match="jetspark replay") as raised:
        await asyncio.wait_for(workers, 60)
    assert f"consumer {consumer.name} of {consumer.stream_name} no longer takes " in str(raised.value)


@pytest.mark.parametrize(
    ("partitions", "place"), [(None, "RETRY"), (1, "RETRY"), (1, "both_PARTITIONS"), (None, "ADVISORIES")]
)
async def test_a_filter_that_was_narrowed_before_a_worker_looks_is_compared_with_the_declaration(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch, partitions: int | None, place: str
) -> None:
    app = App("narrowed", stream="NARROWED", subjects=["left.*", "right.*"])

    @app.handler(Left, Right, durable="both", filtered=True, partitions=partitions)
    async def handle(event: Left | Right) -> None: ...

    await set_up(js, app)
    stream = await js.stream(f"NARROWED_{place}")
    [consumer] = [await stream.consumer(each.name) async for each in stream.consumers()]
    intakes: list[Intake] = []
    start = Intake.start

    async def start_known(self: Intake, tasks: asyncio.TaskGroup) -> None:
        await start(self, tasks)
        intakes.append(self)

    monkeypatch.setattr(Intake, "start", start_known)
    workers = asyncio.create_task(app.run(server.url, stop_timeout=5.0))
    await until(lambda: intakes)
    config = (await consumer.info()).config
    one = config.filter_subjects[0] if config.filter_subjects else config.filter_subject
    assert one is not None
    narrow = one.removesuffix(">") + "none.of.them"
    await stream.update_consumer(dataclasses.replace(config, filter_subject=narrow, filter_subjects=None))
    await intakes[0].renew([])  # asks for the consumers' state
    assert len(intakes) == 2
    with pytest.raises(TopologyDrift, match="jetspark replay") as raised:
        await asyncio.wait_for(workers, 60)
    assert f"consumer {consumer.name} of {consumer.stream_name} no longer takes {one}" in str(raised.value)


async def is_settled_once(consumer: Consumer) -> bool:
    info = await consumer.info()
    return info.ack_floor.stream_sequence == 1
