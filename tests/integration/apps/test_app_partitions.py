"""Handlers with partitions: one reader for each, handed on in order when workers come and go."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from typing import Any

import pytest
from support.apps import publish, running, set_up, until

import jetspark
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Breaker, Context, Event, Reject, Retry, RetryIn
from jetspark.app.dead_letters.redriving import DeadLetterFilter, run_redrive
from jetspark.app.handlers.consumers import consumers_of
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.app.handlers.inheritance import tidy_copies
from jetspark.app.handlers.intake import Intake
from jetspark.app.handlers.partitions import PIN_GROUP, partition_consumer
from jetspark.app.topology.names import partition_stream
from jetspark.core.headers import Headers
from jetspark.errors import TopologyRefused
from jetspark.jetstream.config import StreamConfig, StreamSource, SubjectTransform
from jetspark.server import NatsServer
from jetspark.testing.model import ModelServer


class Moved(Event, type="moved", key="name", subject="moves.{name}.moved"):
    name: str
    number: int = 0


class Named(Event, type="named", key="name", subject="moves.named.{name}"):
    name: str
    number: int = 0


async def are_done(js: JetStream, app: App, name: str) -> bool:
    for place in consumers_of(app.spec, app.handlers[name]):
        info = await (await (await js.stream(place.stream)).consumer(place.name)).info()
        if info.pending or info.ack_pending:
            return False
    waits = await (await js.stream(app.spec.retry_stream)).info(subjects_filter=f"retry.{app.name}.{name}.wait.>")
    return not waits.state.subjects


def app_of(partitions: int | None = 4, **options: Any) -> tuple[App, list[tuple[str, int]]]:
    app, done = App("moving", stream="MOVING", subjects=["moves.>"]), []
    options = {"takeover_s": 1.0, "ack_wait_s": 2.0} | options

    @app.handler(Moved, Named, durable="m", partitions=partitions, **options)
    async def move(event: Moved | Named, ctx: Context) -> None:
        assert ctx.stream == "MOVING"
        await asyncio.sleep(0.001)
        done.append((event.name, event.number))

    return app, done


async def test_workers_share_the_partitions_and_keep_the_order_of_keys(server: NatsServer, js: JetStream) -> None:
    apps = [app_of() for _ in range(3)]
    app = apps[0][0]
    await set_up(js, app)
    keys = [f"k{number}" for number in range(20)]
    events = [kind(name=key, number=number) for number in range(10) for key in keys for kind in [Moved]]
    async with running(apps[0][0], server.url), running(apps[1][0], server.url):
        await publish(js, app, *events[:60])
        async with running(apps[2][0], server.url):
            await publish(js, app, *events[60:140])
            await until(lambda: apps[2][1])
        await publish(js, app, *events[140:])
        await until(lambda: sum(len(done) for _, done in apps) >= 200)
        await until(lambda: are_done(js, app, "m"))
    assert all(done for _, done in apps)
    everything = [each for _, done in apps for each in done]
    assert sorted(everything) == sorted((key, number) for key in keys for number in range(10))
    for _, done in apps:
        by_key = defaultdict(list)
        for key, number in done:
            by_key[key].append(number)
        assert all(numbers == sorted(numbers) for numbers in by_key.values())


async def test_events_of_one_key_share_a_partition_whatever_their_subjects(server: NatsServer, js: JetStream) -> None:
    app, done = app_of(concurrency=1)
    await set_up(js, app)
    async with running(app, server.url):
        await publish(js, app, *(kind(name="a", number=n) for n, kind in enumerate([Moved, Named, Moved, Named])))
        await until(lambda: len(done) == 4)
    assert done == [("a", number) for number in range(4)]
    copies = await (await js.stream("MOVING_m_PARTITIONS")).info(subjects_filter="parts.>")
    assert len({subject.split(".")[3] for subject in copies.state.subjects or {}}) == 1


async def test_retries_parked_keys_and_redrives_stay_in_their_partition(server: NatsServer, js: JetStream) -> None:
    app = App("moving", stream="MOVING", subjects=["moves.>"])
    done: list[tuple[str, int]] = []
    mended = False

    @app.handler(
        Moved,
        durable="m",
        partitions=4,
        takeover_s=1.0,
        ack_wait_s=2.0,
        retry=Retry(attempts=3, first_s=0.01, in_lane_s=0.5),
    )
    async def move(event: Moved, ctx: Context) -> None:
        if event.number == 1 and event.name == "later" and ctx.attempt == 1:
            raise RetryIn(1.0)
        if event.number == 1 and event.name == "poison" and not mended:
            raise Reject("not yet")
        done.append((event.name, event.number))

    await set_up(js, app)
    store = await HandlerStore.open(js, app.name, "m")
    async with running(app, server.url):
        await publish(js, app, *(Moved(name=name, number=n) for n in range(4) for name in ("later", "poison", "fine")))
        await until(lambda: [number for name, number in done if name == "later"] == [0, 1, 2, 3])
        await until(lambda: are_done(js, app, "m"))
        dead_letters = [each.dead_letter async for each in store.all_dead_letters()]
        assert {(each.key, each.status, each.origin.stream) for each in dead_letters} == {
            ("poison", "open", "MOVING"),
            ("poison", "behind", "MOVING"),
        }
        assert {each.subject for each in dead_letters} == {"moves.poison.moved"}
        assert not any(name.lower().startswith("nats-stream") for each in dead_letters for name in each.headers)
        mended = True
        await run_redrive(js, app, DeadLetterFilter())
        await until(lambda: [number for name, number in done if name == "poison"] == [0, 1, 2, 3])
        await until(lambda: are_done(js, app, "m"))
    assert [each async for each in store.all_dead_letters()] == []
    assert [number for name, number in done if name == "fine"] == [0, 1, 2, 3]


async def test_a_breaker_pauses_every_partition_for_every_worker(server: NatsServer, js: JetStream) -> None:
    is_away, begun = True, []

    def failing() -> App:
        app = App("moving", stream="MOVING", subjects=["moves.>"])

        @app.handler(
            Moved,
            durable="m",
            partitions=4,
            takeover_s=1.0,
            ack_wait_s=2.0,
            concurrency=1,
            breaker=Breaker(failures=3, open_s=3.0),
            retry=Retry(attempts=50, first_s=0.01, max_s=0.05),
        )
        async def move(event: Moved) -> None:
            begun.append(event.name)
            if is_away:
                raise OSError("away")

        return app

    first, second = failing(), failing()
    await set_up(js, first)
    places = [
        place for place in consumers_of(first.spec, first.handlers["m"]) if place.stream != first.spec.retry_stream
    ]
    consumers = [await (await js.stream(place.stream)).consumer(place.name) for place in places]

    async def are_paused() -> bool:
        return all([(await each.info()).is_paused for each in consumers])

    async with running(first, server.url):
        await publish(js, first, *(Moved(name=f"n{number}") for number in range(8)))
        await until(are_paused)
        before = set(begun)
        async with running(second, server.url):
            is_away = False
            await until(lambda: set(begun) - before or len(set(begun)) == 8)
            await until(lambda: are_done(js, first, "m"))
    assert len(set(begun)) == 8


async def test_the_number_of_partitions_cannot_change(server: NatsServer, js: JetStream) -> None:
    await set_up(js, app_of(4)[0])
    await set_up(js, app_of(4)[0])
    with pytest.raises(TopologyRefused, match=r"sources.*\[impossible: with other partitions.*another\s+durable"):
        await set_up(js, app_of(8)[0])
    with pytest.raises(TopologyRefused, match="until now the handler read stream MOVING_m_PARTITIONS"):
        await set_up(js, app_of(None)[0])


async def test_a_handler_that_had_no_partitions_is_not_given_any(server: NatsServer, js: JetStream) -> None:
    await set_up(js, app_of(None)[0])
    with pytest.raises(TopologyRefused, match="until now the handler read consumer m of MOVING, without partitions"):
        await set_up(js, app_of(4)[0])


async def test_an_orderly_end_does_not_wait_for_a_server_that_is_gone() -> None:
    app, done = app_of(8)
    with NatsServer() as server:
        async with jetspark.connect(server.url) as client:
            js = client.jetstream()
            await set_up(js, app)
            await publish(js, app, Moved(name="a"))
            task = asyncio.create_task(app.run(server.url, stop_timeout=0.5))
            await until(lambda: done)
        server.pause()
        task.cancel()
        async with asyncio.timeout(60):
            await asyncio.wait([task])
        server.resume()


async def test_the_models_copies_are_those_of_the_server(js: JetStream) -> None:
    transforms = [
        SubjectTransform(source="moves.*.moved", destination="parts.{{partition(7,1)}}.moves.{{wildcard(1)}}.moved"),
        SubjectTransform(source="moves.named.*.of.*", destination="parts.{{partition(9,2,1)}}.{{wildcard(2)}}"),
    ]
    configs = [
        StreamConfig(name="ALL", subjects=["moves.>"]),
        StreamConfig(
            name="COPIES", allow_direct=True, sources=[StreamSource(name="ALL", subject_transforms=transforms)]
        ),
    ]
    subjects = [f"moves.k-{number}.moved" for number in range(30)]
    subjects += [f"moves.named.a{number}.of.b{number}" for number in range(30)] + ["moves.else"]
    model = ModelServer()
    for config in configs:
        await js.create_stream(config)
        model.create_stream(config)
    for subject in subjects:
        await js.publish(subject, b"x", headers={"own": "kept"})
        model.publish(subject, b"x", headers={"own": "kept"}, now=1.0)
    copies = await js.stream("COPIES")

    async def are_copied() -> bool:
        return (await copies.info()).state.messages == 60

    await until(are_copied)
    real = [message async for message in copies.get_messages(1)]
    mine = model.messages("COPIES")
    assert [each.subject for each in real] == [each.subject for each in mine]
    for one, other in zip(real, mine, strict=True):
        words = [Headers(each)["Nats-Stream-Source"].split(" ")[:5] for each in (one.headers, other.headers)]
        assert words[0] == words[1]
        assert one.headers.get("own") == "kept"


@pytest.mark.parametrize("partitions", [None, 4])
async def test_what_is_given_back_before_it_began_is_no_attempt(
    server: NatsServer, js: JetStream, partitions: int | None
) -> None:
    app = App("moving", stream="MOVING", subjects=["moves.>"])
    done: list[str] = []

    @app.handler(
        Moved,
        durable="m",
        partitions=partitions,
        takeover_s=1.0,
        ack_wait_s=2.0,
        concurrency=1,
        retry=Retry(attempts=1),
    )
    async def move(event: Moved) -> None:
        await asyncio.sleep(0.3)
        done.append(event.name)

    await set_up(js, app)
    await publish(js, app, *(Moved(name=f"k{number}") for number in range(6)))
    async with running(app, server.url):
        await until(lambda: len(done) == 2)
    async with running(app, server.url):
        await until(lambda: are_done(js, app, "m"))
    assert sorted(done) == [f"k{number}" for number in range(6)]
    store = await HandlerStore.open(js, app.name, "m")
    assert [each async for each in store.all_dead_letters()] == []


@pytest.mark.parametrize("partitions", [None, 4])
async def test_an_event_that_was_given_back_has_all_its_attempts(
    server: NatsServer, js: JetStream, partitions: int | None
) -> None:
    app = App("moving", stream="MOVING", subjects=["moves.>"])
    starts: list[str] = []
    failing: set[str] = set()

    @app.handler(
        Moved,
        durable="m",
        partitions=partitions,
        takeover_s=1.0,
        ack_wait_s=2.0,
        concurrency=1,
        retry=Retry(attempts=3, first_s=0.01),
    )
    async def move(event: Moved) -> None:
        starts.append(event.name)
        if event.name in failing:
            raise OSError("away")
        await asyncio.sleep(0.1)

    await set_up(js, app)
    names = [f"k{number}" for number in range(6)]
    await publish(js, app, *(Moved(name=name) for name in names))
    async with running(app, server.url):
        await until(lambda: len(starts) == 2)
    failing |= set(names) - set(starts)
    assert failing
    async with running(app, server.url):
        await until(lambda: are_done(js, app, "m"))
    assert {name: starts.count(name) for name in failing} == dict.fromkeys(failing, 3)
    store = await HandlerStore.open(js, app.name, "m")
    assert {each.dead_letter.attempts async for each in store.all_dead_letters()} == {3}


async def test_copies_are_removed_once_every_partition_has_settled_them_but_for_the_last(js: JetStream) -> None:
    app, _ = app_of(partitions=2)
    await set_up(js, app)
    copies = await js.stream(partition_stream(app.name, "m"))
    consumers = [await copies.consumer(partition_consumer("m", number)) for number in range(2)]
    await publish(js, app, *(Moved(name=f"k{number}") for number in range(20)))

    async def are_there(first: int) -> bool:
        state = (await copies.info()).state
        return (state.first_sequence, state.last_sequence) == (first, 20)

    await until(lambda: are_there(1))
    found = [await consumer.fetch(20, no_wait=True, group=PIN_GROUP) for consumer in consumers]
    held = found[1][2]  # its partition is not done with this one, and with what comes after it
    for message in itertools.chain(*found):
        if message is not held:
            await message.ack_sync()
    tidying = asyncio.create_task(tidy_copies(copies, consumers, every_s=0.01, keep_s=0.05))
    try:
        floor = (await consumers[1].info()).ack_floor.stream_sequence
        assert 1 < floor < held.metadata.stream_sequence
        await until(lambda: are_there(floor + 1))
        await asyncio.sleep(0.2)
        assert await are_there(floor + 1)
        await held.ack_sync()
        await until(lambda: are_there(20))  # a server that finds no copy would copy everything again
    finally:
        tidying.cancel()


async def test_a_partition_that_moves_away_and_back_has_one_reader_at_a_time(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, done = app_of(1)
    await set_up(js, app)
    intakes: list[Intake] = []
    order: list[str] = []
    begun, may_end = asyncio.Event(), asyncio.Event()
    start, give_back = Intake.start, Intake.give_back

    async def start_known(self: Intake, tasks: asyncio.TaskGroup) -> None:
        if self not in intakes:
            intakes.append(self)
        order.append(f"start {intakes.index(self)}")
        await start(self, tasks)

    async def give_back_late(self: Intake, *, running: bool) -> None:
        begun.set()
        await may_end.wait()
        await give_back(self, running=running)
        order.append(f"gave back {intakes.index(self)}")

    monkeypatch.setattr(Intake, "start", start_known)
    monkeypatch.setattr(Intake, "give_back", give_back_late)
    async with running(app, server.url):
        await until(lambda: intakes)
        [old] = intakes
        readers, tasks = old._worker._readers, old._tasks
        assert readers is not None
        assert tasks is not None

        async def move_away_and_back() -> None:
            await readers._hand_on(0)
            await readers._rebalance(tasks)

        renewing = asyncio.create_task(old.renew([]))
        await begun.wait()
        moving = asyncio.create_task(move_away_and_back())
        await until(lambda: old not in readers.intakes)
        may_end.set()
        await asyncio.gather(renewing, moving)
        await old.renew([])  # it is no reader any more
        assert order == ["start 0", "gave back 0", "gave back 0", "start 1"]
        await publish(js, app, *(Moved(name=f"k{number}") for number in range(20)))
        await until(lambda: len(done) == 20)
