"""Events that the server or another client gives up end in the dead letters, whether a worker is there or not."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from support.apps import is_settled, publish, running, set_up, until

import jetspark
from jetspark import ConsumerConfig
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Context, Event, Reject, Retry, RetryIn
from jetspark.app.dead_letters.redriving import DeadLetterFilter, read_dead_letters, run_redrive
from jetspark.app.handlers.consumers import consumers_of
from jetspark.app.stored_events import StoredEvent
from jetspark.server import NatsServer

_numbers = itertools.count(1)


class Counted(Event, type="counted", key="name", subject="counts.{name}"):
    name: str
    number: int = 0


def new_app(done: list[int], **options: Any) -> App:
    number = next(_numbers)
    app = App(f"givenup{number}", stream="GIVENUP", subjects=["counts.>"])

    @app.handler(Counted, durable="g", **({"ack_wait_s": 2.0} | options))
    async def add(event: Counted) -> None:
        done.append(event.number)

    return app


async def dead_letters_of(js: JetStream, app: App) -> list[StoredEvent]:
    found = [each.dead_letter for each in await read_dead_letters(js, app, DeadLetterFilter())]
    return sorted(found, key=lambda each: each.origin.sequence)


async def has_dead_letters(js: JetStream, app: App, count: int) -> bool:
    return len(await dead_letters_of(js, app)) == count


async def read_advisories(js: JetStream, app: App) -> bool:
    """Every advisory about the handler is dealt with."""
    info = await (await (await js.stream(app.spec.advisories)).consumer(f"{app.name}-g")).info()
    return not info.pending and not info.ack_pending


async def advised(js: JetStream, app: App, count: int) -> bool:
    return (await (await js.stream(app.spec.advisories)).info()).state.messages == count


@pytest.mark.parametrize("has_worker", [True, False], ids=["while a worker runs", "while none runs"])
async def test_what_others_give_up_ends_in_the_dead_letters(
    server: NatsServer, js: JetStream, has_worker: bool
) -> None:
    done: list[int] = []
    app = new_app(done)
    await set_up(js, app)
    await publish(js, app, Counted(name="a", number=1), Counted(name="b", number=2))
    stream = await js.stream(app.stream)
    terminated, exhausted = await (await stream.consumer("g")).fetch(2)
    assert exhausted.metadata.stream_sequence == 2

    async def give_up() -> None:
        await terminated.term("not wanted")
        await stream.update_consumer(ConsumerConfig(durable_name="g", max_deliver=1))
        await until(lambda: advised(js, app, 2))
        await stream.update_consumer(ConsumerConfig(durable_name="g", max_deliver=-1))

    if has_worker:
        async with running(app, server.url):
            await publish(js, app, Counted(name="c", number=3))
            await until(lambda: done == [3])
            await give_up()
            await until(lambda: has_dead_letters(js, app, 2))
    else:
        await publish(js, app, Counted(name="a", number=3))
        await give_up()
        async with running(app, server.url):
            await until(
                lambda: has_dead_letters(js, app, 2 if done else 3)
            )  # the third may be behind the first, or before it
    dead_letters = await dead_letters_of(js, app)
    assert [(each.key, each.origin.sequence, each.status) for each in dead_letters[:2]] == [
        ("a", 1, "open"),
        ("b", 2, "open"),
    ]
    assert [each.cause and (each.cause.error, each.cause.message) for each in dead_letters[:2]] == [
        ("GivenUp", "by the server or another client: not wanted"),
        ("GivenUp", "by the server or another client: max_deliver"),
    ]
    async with running(app, server.url):
        await run_redrive(js, app, DeadLetterFilter(), wait_s=60.0)
        await until(lambda: read_advisories(js, app))
    assert sorted(done) == [1, 2, 3]
    assert await dead_letters_of(js, app) == []


async def test_an_event_of_a_handler_with_transactions_ends_in_the_dead_letters_as_well(
    server: NatsServer, js: JetStream
) -> None:
    done: list[int] = []
    app = new_app(done, idempotent="transaction", bucket="givenup-effects")
    await set_up(js, app)
    await publish(js, app, Counted(name="a", number=1))
    [message] = await (await (await js.stream(app.stream)).consumer("g")).fetch(1)
    await message.term("not wanted")
    await until(lambda: advised(js, app, 1))
    async with running(app, server.url):
        await until(lambda: has_dead_letters(js, app, 1))
        await publish(js, app, Counted(name="b", number=2))
        await until(lambda: done == [2])


async def test_a_retry_and_a_redrive_that_are_given_up_are_dead_letters_again(
    server: NatsServer, js: JetStream
) -> None:
    app, done, is_mended = App("waiting", stream="GIVENUP", subjects=["counts.>"]), list[tuple[int, int]](), False

    @app.handler(Counted, durable="g", ack_wait_s=2.0, retry=Retry(in_lane_s=0.0))
    async def add(event: Counted, ctx: Context) -> None:
        if event.number == 1 and ctx.attempt == 1 and not is_mended:
            raise RetryIn(1.0)
        if event.number == 2 and not is_mended:
            raise Reject("a letter")
        done.append((event.number, ctx.redrives))

    await set_up(js, app)
    await publish(js, app, *(Counted(name=f"n{number}", number=number) for number in (1, 2)))
    async with running(app, server.url):
        await until(lambda: has_dead_letters(js, app, 1))
        consumer = await (await js.stream(app.stream)).consumer("g")
        await until(lambda: _is_over(consumer))
    await run_redrive(js, app, DeadLetterFilter())
    retries = await (await js.stream(app.spec.retry_stream)).consumer("g")
    for _ in range(2):
        [message] = await retries.fetch(1, timeout=30)
        await message.term("by hand")
    is_mended = True
    async with running(app, server.url):
        await until(lambda: has_dead_letters(js, app, 2))
        dead_letters = await dead_letters_of(js, app)
        assert [(each.key, each.redrives, each.attempts) for each in dead_letters] == [("n1", 0, 1), ("n2", 1, 0)]
        assert {each.cause.error for each in dead_letters if each.cause} == {"GivenUp"}
        progress = await run_redrive(js, app, DeadLetterFilter(), wait_s=60.0)
        assert str(progress.results) == "2 handled, 0 failed again, 0 waiting"
        await until(lambda: is_settled(js, app, "g"))
    assert sorted(done) == [(1, 1), (2, 2)]


async def _is_over(consumer: Any) -> bool:
    info = await consumer.info()
    return not info.pending and not info.ack_pending


async def test_a_copy_of_a_partition_that_is_given_up_is_a_dead_letter(server: NatsServer, js: JetStream) -> None:
    done: list[int] = []
    app = new_app(done, partitions=2)
    await set_up(js, app)
    await publish(js, app, *(Counted(name=f"n{number}", number=number) for number in range(8)))
    copies = [place for place in consumers_of(app.spec, app.handlers["g"]) if place.stream != app.spec.retry_stream]
    for place in copies:
        consumer = await (await js.stream(place.stream)).consumer(place.name)
        [message] = await consumer.fetch(1, timeout=10, group="readers")
        await message.term("by hand")
        await consumer.unpin("readers")
    async with running(app, server.url):
        await until(lambda: has_dead_letters(js, app, 2))
        await until(lambda: len(done) == 6)
        progress = await run_redrive(js, app, DeadLetterFilter(), wait_s=60.0)
        assert str(progress.results) == "2 handled, 0 failed again, 0 waiting"
    assert sorted(done) == list(range(8))


@pytest.mark.parametrize("ends", [True, False], ids=["it ends", "its worker ends first"])
async def test_what_runs_here_is_settled_as_if_nobody_had_given_it_up(
    server: NatsServer, js: JetStream, ends: bool
) -> None:
    number = next(_numbers)
    app, begun, may_end = (
        App(f"ending{number}", stream="GIVENUP", subjects=["counts.>"]),
        asyncio.Event(),
        asyncio.Event(),
    )

    @app.handler(Counted, durable="g", ack_wait_s=5.0)
    async def add(event: Counted) -> None:
        begun.set()
        await may_end.wait()

    await set_up(js, app)
    await publish(js, app, Counted(name="a", number=1))
    advisories = await (await js.stream(app.spec.advisories)).consumer(f"{app.name}-g")

    async def is_taken() -> bool:
        return (await advisories.info()).ack_pending == 1

    async with running(app, server.url, stop_timeout=0.5), jetspark.connect(server.url) as other:
        await begun.wait()
        await other.publish("$JS.ACK.GIVENUP.g.1.1.1.0.0", b"+TERM by hand")
        await until(is_taken)
        assert await dead_letters_of(js, app) == []
        if ends:
            may_end.set()
            await until(lambda: read_advisories(js, app))
    if not ends:
        async with running(app, server.url):
            await until(lambda: has_dead_letters(js, app, 1))
            await until(lambda: read_advisories(js, app))
    assert len(await dead_letters_of(js, app)) == (not ends)


async def _recreate(js: JetStream, app: App) -> None:
    stream = await js.stream(app.stream)
    await stream.delete_consumer("g")
    [place] = [each for each in consumers_of(app.spec, app.handlers["g"]) if each.stream == app.stream]
    await stream.create_consumer(place.config)


async def _reset(js: JetStream, app: App) -> None:
    await (await (await js.stream(app.stream)).consumer("g")).reset(1)


@pytest.mark.parametrize("change", [_recreate, _reset])
async def test_what_comes_again_is_no_dead_letter(server: NatsServer, js: JetStream, change: Any) -> None:
    done: list[int] = []
    app = new_app(done)
    await set_up(js, app)
    await publish(js, app, Counted(name="a", number=1))
    [message] = await (await (await js.stream(app.stream)).consumer("g")).fetch(1)
    await message.term("by mistake")
    await until(lambda: advised(js, app, 1))
    await change(js, app)
    async with running(app, server.url):
        await until(lambda: done == [1])
        await until(lambda: read_advisories(js, app))
    assert await dead_letters_of(js, app) == []


async def test_a_message_of_a_stream_made_anew_is_no_dead_letter(server: NatsServer, js: JetStream) -> None:
    done: list[int] = []
    app = new_app(done)
    await set_up(js, app)
    await publish(js, app, Counted(name="a", number=1))
    [message] = await (await (await js.stream(app.stream)).consumer("g")).fetch(1)
    await message.term("the old one")
    await until(lambda: advised(js, app, 1))
    await js.delete_stream(app.stream)
    await set_up(js, app)
    await publish(js, app, Counted(name="a", number=2))
    async with running(app, server.url):
        await until(lambda: done == [2])
        await until(lambda: read_advisories(js, app))
    assert await dead_letters_of(js, app) == []


async def test_a_handler_without_dead_letters_drops_what_is_given_up(
    server: NatsServer, js: JetStream, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[int] = []
    app = new_app(done, dead_letter=False)
    await set_up(js, app)
    await publish(js, app, Counted(name="a", number=1))
    [message] = await (await (await js.stream(app.stream)).consumer("g")).fetch(1)
    await message.term("by hand")
    async with running(app, server.url):
        await until(lambda: read_advisories(js, app))
    assert await dead_letters_of(js, app) == []
    assert "event 1: given up (GivenUp: by the server or another client: by hand); dropped" in caplog.text


@pytest.mark.parametrize("field", ["none", "timestamp", "stream_seq", "type"])
async def test_what_is_no_advisory_ends_no_worker(server: NatsServer, js: JetStream, field: str) -> None:
    done: list[int] = []
    app = new_app(done)
    await set_up(js, app)
    fields: dict[str, Any] = {"stream": "GIVENUP", "consumer": "g", "stream_seq": 1, "type": "x.y"}
    wrong = {"timestamp": "2026-01-01T00:00:00", "stream_seq": 10**30, "type": 5}
    fields |= {"timestamp": "2026-01-01T00:00:00Z"} | ({field: wrong[field]} if field != "none" else {})
    async with running(app, server.url):
        data = json.dumps(fields).encode() if field != "none" else b"[]"
        await js.publish("$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.GIVENUP.g", data)
        await until(lambda: read_advisories(js, app))
        await publish(js, app, Counted(name="a", number=1))
        await until(lambda: done == [1])
