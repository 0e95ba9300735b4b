"""An event that ends the process while it is read stops neither the application nor the keys of other events."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from integration.apps.reading_worker import ATTEMPTS, POISON, Read, make_app
from support.apps import is_settled, running, set_up, until

import jetspark
from jetspark import ConsumerConfig, KVConfig, StreamConfig
from jetspark.aio.client import Client
from jetspark.aio.jetstream import JetStream
from jetspark.aio.kv import KeyValue
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.app import App, Decision, Event, Retry, encode
from jetspark.app.dead_letters.redriving import DeadLetterFilter, read_dead_letters, run_redrive
from jetspark.app.handlers.crash_records import CrashRecords, spans_of
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.app.stored_events import StoredEvent
from jetspark.server import NatsServer

WORKER = Path(__file__).parent / "reading_worker.py"
KEYS, NUMBERS = "abcd", range(6)


async def publish(js: JetStream, app: App) -> None:
    """Events of the older version, so that each goes through every piece of code that reads."""
    for number in NUMBERS:
        for key in KEYS:
            now = datetime.datetime.now(datetime.UTC)
            encoded = encode(Read(name=key, number=number), id=f"{key}{number}", source=app.source, time=now)
            data = json.dumps(json.loads(encoded.data) | {"schemaversion": 1}).encode()
            await js.publish(encoded.subject, data, headers=encoded.headers)


class Supervisor:
    """Starts a worker again whenever it has ended, and counts how often it did."""

    def __init__(
        self, server: NatsServer, log: Path, place: str, ending: str, partitions: int | None, attempts: int = ATTEMPTS
    ) -> None:
        self.ends = 0
        self.arguments = [server.url, str(log), place, ending, str(partitions or 0), str(attempts)]

    async def run(self) -> None:
        while True:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(WORKER),
                *self.arguments,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            try:
                await process.wait()
            finally:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
            self.ends += 1


@asynccontextmanager
async def supervised(supervisor: Supervisor) -> AsyncIterator[None]:
    task = asyncio.create_task(supervisor.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def done_of(log: Path) -> Counter[tuple[str, int]]:
    return Counter(done_in_order(log))


def done_in_order(log: Path) -> list[tuple[str, int]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [(line["key"], line["number"]) for line in lines if line["what"] == "done"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "ending", "partitions"),
    [
        ("upcast", "os._exit", None),
        ("post_init", "os._exit", None),
        ("key", "os._exit", None),
        ("post_init", "os._exit", 2),
        ("upcast", "sys.exit", None),
        ("post_init", "sys.exit", None),
        ("key", "sys.exit", None),
        ("post_init", "GeneratorExit", None),
    ],
)
async def test_an_event_that_ends_the_process_while_it_is_read_becomes_a_dead_letter(
    server: NatsServer, js: JetStream, tmp_path: Path, place: str, ending: str, partitions: int | None
) -> None:
    app = make_app(place, partitions)
    await set_up(js, app)
    await publish(js, app)
    log = tmp_path / "log"
    log.touch()
    store = await HandlerStore.open(js, app.name, "reader")
    supervisor = Supervisor(server, log, place, ending, partitions)

    async def is_over() -> bool:
        assert supervisor.ends <= ATTEMPTS, log.read_text()
        if partitions is not None:
            settled = {dead_letter.dead_letter.origin.sequence async for dead_letter in store.all_dead_letters()}
            return len(done_of(log)) + len(settled) == len(KEYS) * len(NUMBERS)
        return await is_settled(js, app, "reader")

    async with supervised(supervisor):
        await until(is_over)
        dead_letters = {each.dead_letter.origin.sequence: each.dead_letter async for each in store.all_dead_letters()}
        poison = next(each for each in dead_letters.values() if each.status == "open")
        assert json.loads(poison.data)["data"] == {"name": POISON[0], "number": POISON[1]}
        is_death = ending == "os._exit"
        assert supervisor.ends == (ATTEMPTS if is_death else 0)
        assert poison.cause is not None
        if is_death:
            assert (poison.cause.error, poison.attempts) == ("WorkerDied", ATTEMPTS)
            assert f"{ATTEMPTS} processes ended" in poison.cause.message
        # Its key is read from its subject, and has to wait; a key that only its own code can tell does not.
        behind = 0 if place == "key" else sum(number > POISON[1] for number in NUMBERS)
        assert [each.status for each in dead_letters.values()].count("behind") == behind == len(dead_letters) - 1
    assert len(done_of(log)) == len(KEYS) * len(NUMBERS) - len(dead_letters)
    assert len([key async for key in store.records.keys("reading.>")]) <= ATTEMPTS

    # Redriven by code that can read it, it is read, and its key goes on behind it.
    async with supervised(Supervisor(server, log, place, "", partitions)):
        await run_redrive(js, app, DeadLetterFilter())
        await until(lambda: len(done_of(log)) == len(KEYS) * len(NUMBERS))
    assert set(done_of(log).values()) == {1}
    assert [number for key, number in done_in_order(log) if key == "a"] == list(NUMBERS)


@pytest.mark.slow
async def test_an_event_that_was_given_up_and_ends_the_process_while_it_is_read_becomes_a_dead_letter(
    server: NatsServer, js: JetStream, tmp_path: Path
) -> None:
    app = make_app("post_init", None, 1)  # the server waits for ten seconds before it tells of it again
    await set_up(js, app)
    await publish(js, app)
    log = tmp_path / "log"
    log.touch()
    store = await HandlerStore.open(js, app.name, "reader")
    consumer = await (await js.stream(app.stream)).consumer("reader")
    for message in await consumer.fetch(len(KEYS) * len(NUMBERS)):
        event = json.loads(message.data)["data"]
        await (message.term() if (event["name"], event["number"]) == POISON else message.nak())
    supervisor = Supervisor(server, log, "post_init", "os._exit", None, 1)

    async def is_over() -> bool:
        assert supervisor.ends <= 4, log.read_text()  # and three of those who inherit it
        return "open" in [each.dead_letter.status async for each in store.all_dead_letters()]

    async with supervised(supervisor):
        await until(is_over)
    assert 1 <= supervisor.ends <= 4


class Plain(Event, type="plain", version=2, key="name", subject="plain.{name}"):
    name: str
    number: int = 0

    def __post_init__(self) -> None:
        if self.name.startswith("post_init"):
            raise_end(self.name)


class Seen(Event, type="seen", key="name", subject="seen.{name}"):
    name: str


class Panic(BaseException):
    """Not an ``Exception``, as what an extension written in Rust raises when it panics."""


ENDS = {each.__name__: each for each in (SystemExit, GeneratorExit, asyncio.CancelledError, Panic)}


def raise_end(name: str) -> None:
    raise ENDS[name.rpartition("-")[2]]


class Total(msgspec.Struct, frozen=True):
    count: int = 0


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("place", ["post_init", "handler", "batch", "react", "key", "apply"])
async def test_code_of_the_application_ends_no_worker(url: str, place: str, name: str) -> None:
    app = App("exits", stream="EXITS", subjects=["plain.>", "seen.>"], events=[Seen])
    bad = f"{place}-{name}"

    def end_at(here: str, event: Plain) -> None:
        if event.name == f"{here}-{name}":
            raise ENDS[name]

    policy = Retry(attempts=2, first_s=0.01)

    @app.handler(Plain, durable="h", retry=policy, ack_wait_s=2.0)
    async def handle(event: Plain) -> None:
        end_at("handler", event)

    @app.batch_handler(Plain, durable="b", retry=policy, ack_wait_s=2.0, batch=2)
    async def handle_many(events: list[Plain]) -> None:
        for event in events:
            end_at("batch", event)

    @app.workflow("w", key="name", retry=policy, ack_wait_s=2.0)
    class Workflow:
        def react(self, state: Total | None, event: Plain) -> Decision | None:
            end_at("react", event)
            return Decision(state=Total(1), events=[Seen(name=event.name)])

    @app.projection("p", events=[Plain], bucket="exits_p")
    class Totals:
        def key(self, event: Plain) -> str:
            end_at("key", event)
            return event.name

        def apply(self, state: Total | None, event: Plain) -> Total:
            end_at("apply", event)
            return Total((state.count if state else 0) + 1)

    dead_letters = {"post_init": {"h", "b", "w", "projections"}, "apply": set(), "react": {"w"}, "handler": {"h"}}
    expected = dead_letters.get(place, {"b" if place == "batch" else "projections"})
    async with jetspark.connect(url) as client:
        js = client.jetstream()
        await set_up(js, app)
        async with running(app, url):
            data = encode(Plain(name="good"), id="1", source="/s", time=datetime.datetime.now(datetime.UTC)).data
            for id, key in (("1", bad), ("2", "good")):
                fields = json.loads(data) | {"id": id, "subject": key, "data": {"name": key, "number": 1}}
                await js.publish(f"plain.{key}", json.dumps(fields).encode(), headers={"Nats-Msg-Id": id})

            async def is_over() -> bool:
                found = {dead_letter.handler for dead_letter in await dead_letters_of(js, app)}
                done = [await is_settled(js, app, each) for each in ("h", "b", "w")]
                state = await (await js.kv("exits_p")).snapshot(["good"])
                return found == expected and all(done) and bool(state)

            await until(is_over)


async def dead_letters_of(js: JetStream, app: App) -> list[StoredEvent]:
    return [each.dead_letter for each in await read_dead_letters(js, app, DeadLetterFilter())]


LEASE_S = 1.0


class Readers:
    """Readers of a consumer with four messages, each with a connection of its own; one that dies loses it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clients: dict[CrashRecords, Client] = {}

    async def new(self, attempts: int = 3, spans: Iterable[tuple[int, int]] = ((1, 4),)) -> CrashRecords:
        client = await jetspark.connect(self.url, reconnect_wait_max_s=0.1)
        js = client.jetstream()
        info = await (await (await js.stream("CRASHES")).consumer("c")).info()
        reader = CrashRecords(await js.kv("crash_records"), "h", "stream", attempts, spans, lease_s=LEASE_S)
        self.clients[reader] = client
        await reader.load(info)
        return reader

    async def die(self, reader: CrashRecords) -> None:
        await self.clients.pop(reader).close()

    async def end(self) -> None:
        for reader in [*self.clients]:
            await reader.close()
            await self.die(reader)


@asynccontextmanager
async def readers_at(url: str) -> AsyncIterator[tuple[Readers, KeyValue, list[JetStreamMessage]]]:
    async with jetspark.connect(url, reconnect_wait_max_s=0.1) as client:
        js = client.jetstream()
        stream = await js.create_stream(StreamConfig(name="CRASHES", subjects=("crashes",)))
        for _ in range(4):
            await js.publish("crashes", b"")
        consumer = await stream.create_consumer(ConsumerConfig(durable_name="c", ack_wait_s=3600.0))
        messages = await consumer.fetch(4)
        readers = Readers(url)
        try:
            yield readers, await js.create_kv(KVConfig(bucket="crash_records", limit_marker_ttl_s=60.0)), messages
        finally:
            await readers.end()


async def test_only_a_message_that_is_read_alone_is_counted_and_settled_ones_are_forgotten(url: str) -> None:
    async with readers_at(url) as (readers, records, messages):
        first = await readers.new(4, spans_of([4, 1, 2, 3]))
        await first.announce(1)
        await first.announce(2)  # in the same record
        assert len(await records.snapshot(["reading.>"])) == 1
        await readers.die(first)
        for deaths in (2, 3):  # the third message ends every process
            reader = await readers.new(4)
            assert [reader.deaths(each) for each in (1, 2, 3, 4)] == [2, 2, deaths, 2]
            assert [reader.died(each) for each in (1, 2, 3, 4)] == [None] * 4
            for sequence in (1, 2, 3):
                await reader.announce(sequence)
            await readers.die(reader)
        reader = await readers.new(4)
        died = reader.died(3)
        assert died is not None
        assert died.deaths == 4
        assert [reader.died(each) for each in (1, 2, 4)] == [None] * 3
        await reader.announce(4)
        await reader.close()
        assert [(await readers.new(4)).deaths(4), len(await records.snapshot(["reading.>"]))] == [2, 2]
        for message in messages:
            await message.ack_sync()
        assert (await readers.new(4)).deaths(3) == 0
        assert await records.snapshot(["reading.>"]) == {}


async def test_readers_that_live_count_as_no_death_however_many_read_a_message(url: str) -> None:
    async with readers_at(url) as (readers, _, _):
        group = await readers.new()
        await group.announce(1)
        dead = await readers.new()
        await dead.announce(2)
        await readers.die(dead)
        alone = await readers.new()  # one death is known, and the first reader still reads
        assert [alone.deaths(each) for each in (1, 2, 3, 4)] == [2] * 4
        await alone.announce(2)
        for _ in range(3):
            reader = await readers.new()
            assert [reader.died(each) for each in (1, 2, 3, 4)] == [None] * 4
            await reader.announce(2)
        await readers.die(alone)
        assert (await readers.new()).died(2) is not None


async def test_a_reader_goes_on_when_another_one_has_removed_its_record(url: str) -> None:
    async with readers_at(url) as (readers, records, _):
        reader = await readers.new()
        await reader.announce(1)
        for remove in (records.purge, records.delete):
            [key] = await records.snapshot(["reading.>"])
            await remove(key)
            await until(lambda: records.snapshot(["reading.>"]))
        [key] = await records.snapshot(["reading.>"])
        await records.purge(key)
        await reader.announce(2)
        await reader.close()
        assert await records.snapshot(["reading.>"]) == {}


async def test_a_reader_whose_server_was_away_for_longer_than_a_lease_counts_as_no_death(own: NatsServer) -> None:
    async with readers_at(own.url) as (readers, _, _):
        reader, other = await readers.new(), await readers.new()
        await reader.announce(1)
        own.stop()
        await asyncio.sleep(3 * LEASE_S)
        own.start()
        after = await readers.new()
        assert after.deaths(1) == other.deaths(1) == 0
        await reader.announce(2)


async def test_a_reader_that_was_taken_for_dead_takes_its_death_back(own: NatsServer) -> None:
    async with readers_at(own.url) as (readers, records, _):
        reader = await readers.new()
        await reader.announce(1)
        [(key, entry)] = (await records.snapshot(["reading.>"])).items()
        dead = json.loads(entry.value) | {"dead": True}
        await records.update(key, json.dumps(dead).encode(), revision=entry.revision)
        assert (await readers.new()).deaths(1) == 2

        async def is_alive() -> bool:
            return not json.loads((await records.get(key)).value)["dead"]

        await until(is_alive)
        assert (await readers.new()).deaths(1) == 0
