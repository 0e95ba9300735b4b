"""What users are told when something is not as they think: soon, by name, and with what to do about it."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.drivers import Driver, on_both_drivers
from support.patience import PATIENCE_S

import jetspark
import jetspark.blocking
from jetspark import (
    ConfigError,
    ConsumerConfig,
    ConsumerNotFound,
    InsufficientResources,
    JetStreamNotEnabled,
    JetStreamUnavailable,
    KeyNotFound,
    KVConfig,
    MessageNotFound,
    ObjectNotFound,
    ServerError,
    StreamConfig,
    StreamNotFound,
)
from jetspark.server import NatsServer

# Nothing here may take longer. What it found took 25 seconds and more.
SOON_S = 20.0


@pytest.fixture(scope="module", params=["JetStream off", "no stream"])
def nowhere(request: pytest.FixtureRequest) -> Iterator[NatsServer]:
    """A server that stores nothing that is published to it."""
    with NatsServer(jetstream=request.param == "no stream") as server:
        yield server


# ---- publishing where nothing is stored ------------------------------------------------------------------------------


async def _publish(js: jetspark.JetStream) -> None:
    await js.publish("nowhere.a", b"1")


async def _publish_async(js: jetspark.JetStream) -> None:
    future = await js.publish_async("nowhere.a", b"1")
    await (future if isinstance(future, asyncio.Future) else future.result())


async def _atomic(js: jetspark.JetStream) -> None:
    async with js.atomic_batch() as batch:
        await batch.add("nowhere.a", b"1")
        await batch.add("nowhere.a", b"2")


async def _fast_failing(js: jetspark.JetStream) -> None:
    async with js.fast_batch(gap="fail") as batch:
        await batch.add("nowhere.a", b"1")
        await batch.add("nowhere.a", b"2")


async def _fast_with_gaps(js: jetspark.JetStream) -> None:
    async with js.fast_batch(gap="ok") as batch:
        await batch.add_many(("nowhere.a", b"1") for _ in range(1000))


async def _fast_of_one(js: jetspark.JetStream) -> None:
    async with js.fast_batch() as batch:
        await batch.commit("nowhere.a", b"1")


async def _fast_publisher(js: jetspark.JetStream) -> None:
    async with js.fast_publisher() as publisher:
        await publisher.publish("nowhere.a", b"1")


async def _fast_publisher_with_ids(js: jetspark.JetStream) -> None:
    async with js.fast_publisher(message_ids=True) as publisher:
        await publisher.publish_many(("nowhere.a", b"1") for _ in range(20_000))  # more than it keeps


PUBLISHERS: list[Callable[[Any], Awaitable[None]]] = [
    _publish,
    _publish_async,
    _atomic,
    _fast_failing,
    _fast_with_gaps,
    _fast_of_one,
    _fast_publisher,
    _fast_publisher_with_ids,
]


@on_both_drivers
async def test_publishers_whose_messages_no_stream_stores_say_so_within_seconds(
    driver: Driver, nowhere: NatsServer
) -> None:
    async with driver.connect(nowhere.url) as nc, asyncio.timeout(SOON_S):
        outcomes = await asyncio.gather(*(publish(nc.jetstream()) for publish in PUBLISHERS), return_exceptions=True)
    told = {publish.__name__: outcome for publish, outcome in zip(PUBLISHERS, outcomes, strict=True)}
    for name, outcome in told.items():
        assert isinstance(outcome, JetStreamUnavailable), (name, outcome)
        assert outcome.subject == "nowhere.a", name


# ---- what is not there is named --------------------------------------------------------------------------------------


@on_both_drivers
async def test_what_is_not_found_is_named(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name=f"THERE_{driver.name}", subjects=[f"there.{driver.name}"]))
        bucket = await js.create_kv(KVConfig(bucket=f"there_{driver.name}"))
        files = await js.create_object_store(f"there_{driver.name}")
        config = ConsumerConfig(durable_name="absent_consumer")
        calls: list[tuple[Any, type[Exception], dict[str, str]]] = [
            (js.stream("ABSENT"), StreamNotFound, {"stream": "ABSENT"}),
            (js.update_stream(StreamConfig(name="ABSENT")), StreamNotFound, {"stream": "ABSENT"}),
            (js.delete_stream("ABSENT"), StreamNotFound, {"stream": "ABSENT"}),
            (js.kv("absent"), StreamNotFound, {"stream": "KV_absent", "bucket": "absent"}),
            (js.delete_kv("absent"), StreamNotFound, {"stream": "KV_absent", "bucket": "absent"}),
            (js.object_store("absent"), StreamNotFound, {"stream": "OBJ_absent", "bucket": "absent"}),
            (js.delete_object_store("absent"), StreamNotFound, {"stream": "OBJ_absent", "bucket": "absent"}),
            (stream.consumer("absent"), ConsumerNotFound, {"stream": stream.name, "consumer": "absent"}),
            (stream.delete_consumer("absent"), ConsumerNotFound, {"stream": stream.name, "consumer": "absent"}),
            (stream.update_consumer(config), ConsumerNotFound, {"consumer": "absent_consumer"}),
            (stream.get_message(99), MessageNotFound, {"stream": stream.name, "wanted": "sequence 99"}),
            (stream.get_message(99, direct=False), MessageNotFound, {"stream": stream.name, "wanted": "sequence 99"}),
            (stream.get_message(last_for="a.b"), MessageNotFound, {"wanted": "the last one on 'a.b'"}),
            (stream.delete_message(99), ServerError, {"stream": stream.name}),
            (bucket.get("absent"), KeyNotFound, {"bucket": bucket.bucket, "key": "absent"}),
            (files.info("absent"), ObjectNotFound, {"bucket": files.bucket, "name": "absent"}),
        ]
        for call, kind, facts in calls:
            with pytest.raises(kind) as raised:
                await call
            for name, fact in facts.items():
                assert getattr(raised.value, name) == fact, raised.value
                assert fact in str(raised.value)
            assert vars(pickle.loads(pickle.dumps(raised.value))) == vars(raised.value)


@on_both_drivers
async def test_a_consumer_that_was_deleted_under_its_reader_is_named(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        name = f"DELETED_{driver.name}"
        stream = await nc.jetstream().create_stream(StreamConfig(name=name))
        consumer = await stream.create_consumer(ConsumerConfig(durable_name="brief"))
        fetching = asyncio.ensure_future(consumer.fetch(1, timeout=60))
        async with asyncio.timeout(PATIENCE_S):
            while not (await consumer.info()).waiting_pulls:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await consumer.delete()
        with pytest.raises(ConsumerNotFound, match=f"'brief' of stream '{name}'") as raised:
            await fetching
        assert (raised.value.stream, raised.value.consumer) == (name, "brief")


@on_both_drivers
async def test_a_refused_publish_names_the_stream(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        name = f"FULL_{driver.name}"
        await js.create_stream(StreamConfig(name=name, max_messages=1, discard="new"))
        await js.publish(name, b"1")
        with pytest.raises(ServerError, match=f"stream '{name}': maximum messages exceeded") as raised:
            await js.publish(name, b"2")
        assert raised.value.stream == name


# ---- why nobody answers ----------------------------------------------------------------------------------------------


@on_both_drivers
async def test_jetstream_that_is_off_is_told_without_guessing(driver: Driver, core_server: NatsServer) -> None:
    async with driver.connect(core_server.url) as nc:
        js = nc.jetstream()
        config = StreamConfig(name="S")
        for call in (js.account_info(), js.stream("S"), js.create_stream(config), js.publish("s", b""), js.kv("b")):
            with pytest.raises(JetStreamUnavailable, match="JetStream is off on") as raised:
                await call
            said = str(raised.value)
            assert "no stream stores" not in said
            assert "leader" not in said
            assert "-js" in said
            assert pickle.loads(pickle.dumps(raised.value)).reason == raised.value.reason


@on_both_drivers
async def test_a_subject_no_stream_stores_is_told_without_guessing(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        with pytest.raises(JetStreamUnavailable, match="no stream of this account stores it") as raised:
            await nc.jetstream().publish("nowhere.a", b"")
        assert "is off" not in str(raised.value)
        assert "leader" not in str(raised.value)  # a server on its own elects nobody
        assert "create_stream" in str(raised.value)


@on_both_drivers
async def test_a_domain_that_is_not_there_is_named(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        with pytest.raises(JetStreamUnavailable, match=r"'\$JS\.hub\.API'.*domain"):
            await nc.jetstream(domain="hub").account_info()
        with pytest.raises(JetStreamUnavailable, match=r"'imported\.API'.*prefix"):
            await nc.jetstream(prefix="imported.API").account_info()


@on_both_drivers
async def test_reading_directly_from_a_stream_that_does_not_allow_it_says_so(
    driver: Driver, server: NatsServer
) -> None:
    async with driver.connect(server.url) as nc:
        stream = await nc.jetstream().create_stream(StreamConfig(name=f"INDIRECT_{driver.name}"))
        with pytest.raises(JetStreamUnavailable, match=rf"stream '{stream.name}' is gone.*allow_direct"):
            await stream.get_message(1, direct=True)
        with pytest.raises(JetStreamUnavailable, match=rf"stream '{stream.name}' is gone.*allow_direct"):
            [message async for message in stream.get_messages()]


@on_both_drivers
async def test_an_account_without_jetstream_is_told_the_remedy(driver: Driver, tmp_path: Path) -> None:
    accounts = f"""
        jetstream {{ store_dir: "{tmp_path}" }}
        accounts {{ WITHOUT {{ users: [ {{ user: u, password: p }} ] }} }}
    """
    with NatsServer(jetstream=False, extra_config=accounts) as server:
        async with driver.connect(server.url.replace("//", "//u:p@")) as nc:
            with pytest.raises(JetStreamNotEnabled, match=r"account.*jetstream: enabled"):
                await nc.jetstream().stream("S")


# ---- no room ---------------------------------------------------------------------------------------------------------


@on_both_drivers
async def test_a_limit_of_the_server_says_which_one_and_what_to_do(driver: Driver, tmp_path: Path) -> None:
    limits = f"""
        jetstream {{ store_dir: "{tmp_path}", max_file_store: 2M, max_memory_store: 1M }}
        accounts {{
            FREE {{ jetstream: enabled, users: [ {{ user: free, password: p }} ] }}
            SMALL {{ jetstream {{ max_store: 500K, max_memory: 1K, max_streams: 1 }},
                     users: [ {{ user: small, password: p }} ] }}
        }}
    """
    with NatsServer(jetstream=False, extra_config=limits) as server:
        async with driver.connect(server.url.replace("//", "//small:p@")) as nc:
            js = nc.jetstream()
            await js.create_stream(StreamConfig(name="SMALL", subjects=["small"]))
            with pytest.raises(InsufficientResources, match=r"account.*max_streams"):
                await js.create_stream(StreamConfig(name="SECOND"))
            with pytest.raises(InsufficientResources, match=r"stream 'SMALL'.*account.*max_store"):
                await _fill(js, "small")
        async with driver.connect(server.url.replace("//", "//free:p@")) as nc:
            js = nc.jetstream()
            with pytest.raises(InsufficientResources, match=r"stream 'HUGE'.*max_bytes.*max_file_store"):
                await js.create_stream(StreamConfig(name="HUGE", max_bytes=1 << 40))
            with pytest.raises(InsufficientResources, match=r"stream 'HUGE'.*max_bytes.*max_memory_store"):
                await js.create_stream(StreamConfig(name="HUGE", max_bytes=1 << 40, storage="memory"))
            await js.create_stream(StreamConfig(name="FREE", subjects=["free"]))
            with pytest.raises(InsufficientResources, match=r"stream 'FREE'.*max_file_store"):
                await _fill(js, "free")


async def _fill(js: jetspark.JetStream, subject: str) -> None:
    for _ in range(100):
        await js.publish(subject, b"x" * 100_000)


# ---- forgotten words -------------------------------------------------------------------------------------------------


def test_a_connect_that_nobody_awaited_shows_the_line_that_works() -> None:
    connecting: Any = jetspark.connect("nats://127.0.0.1:1")
    line = r"`async with jetspark\.connect\(\.\.\.\) as nc:` or `nc = await jetspark\.connect\(\.\.\.\)`"
    for name in ("publish", "jetstream", "close"):
        with pytest.raises(AttributeError, match=rf"^{name}: .*{line}") as raised:
            getattr(connecting, name)
        assert isinstance(raised.value, jetspark.UsageError)
    assert not hasattr(connecting, "subscribe")
    with pytest.raises(jetspark.UsageError, match=line), connecting:
        pass
    assert pickle.loads(pickle.dumps(raised.value)).args == raised.value.args


# ---- a name is configuration enough ----------------------------------------------------------------------------------


@on_both_drivers
async def test_a_name_is_enough_to_create_something(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        name = f"NAMED_{driver.name}"
        for create in (js.create_stream, js.create_or_update_stream):
            stream = await create(name)
            assert (stream.name, stream.cached_info.config.subjects) == (name, [name])
        for create_bucket in (js.create_kv, js.create_or_update_kv):
            bucket = await create_bucket(name)
            assert await bucket.put("key", b"value")
        store = await js.create_object_store(name)
        assert store.bucket == name


@on_both_drivers
async def test_a_configuration_of_another_kind_is_refused_by_name(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(f"KINDS_{driver.name}")
        stream_config, kv_config = StreamConfig(name="S"), KVConfig(bucket="b")
        kinds: list[tuple[list[Callable[[Any], Awaitable[object]]], str]] = [
            ([js.create_stream, js.create_or_update_stream], "a StreamConfig, or a name"),
            ([js.update_stream], "a StreamConfig"),
            ([js.create_kv, js.create_or_update_kv], "a KVConfig, or a name"),
            ([js.create_object_store], "an ObjectStoreConfig, or a name"),
            ([stream.create_consumer, stream.update_consumer, stream.create_or_update_consumer], "a ConsumerConfig"),
        ]
        for calls, expected in kinds:
            for wrong in (None, 5, {"name": "S"}, stream_config if "StreamConfig" not in expected else kv_config):
                for call in calls:
                    with pytest.raises(ConfigError, match=f"config=.*: expected {expected}"):
                        await call(wrong)
        for call in [*kinds[1][0], *kinds[-1][0]]:
            with pytest.raises(ConfigError, match=r"config='text': expected a \w+Config\b"):
                await call("text")
        with pytest.raises(ConfigError, match=r"name='a\.b'"):
            await js.create_stream("a.b")


# ---- nothing to say --------------------------------------------------------------------------------------------------


def _readers(stream: Any, consumer: Any, kv: Any) -> list[Callable[[], Any]]:
    """Everything that is read without an end, by either driver."""
    return [consumer.messages, stream.ordered_consumer().messages, kv.watch]


async def _prepared(js: jetspark.JetStream, name: str) -> tuple[Any, Any, Any]:
    stream = await js.create_stream(StreamConfig(name=name))
    for _ in range(3):
        await js.publish(name, b"")
    kv = await js.create_kv(name)
    await kv.put("a", b"")
    return stream, await stream.create_consumer(ConsumerConfig(durable_name="c")), kv


@pytest.mark.parametrize("is_kept", [False, True], ids=["break", "closed after the client"])
@pytest.mark.parametrize("place", [0, 1, 2], ids=["messages", "ordered", "watch"])
def test_leaving_a_loop_and_then_the_client_is_nothing_to_warn_of(
    server: NatsServer, caplog: pytest.LogCaptureFixture, place: int, is_kept: bool
) -> None:
    async def read() -> None:
        async with jetspark.connect(server.url) as nc:
            js = nc.jetstream()
            read = _readers(*await _prepared(js, f"LEFT_{place}_{is_kept}"))[place]
            if is_kept:
                iterator = aiter(read())
                await anext(iterator)
            else:
                async for _ in read():
                    break
        if is_kept:
            await iterator.aclose()
        elif left := asyncio.all_tasks() - {asyncio.current_task()}:  # the program goes on
            await asyncio.wait(left, timeout=60)

    with caplog.at_level(logging.WARNING, "jetspark"):
        asyncio.run(read())
    assert [record.getMessage() for record in caplog.records] == []


def test_a_client_that_is_closed_while_a_loop_is_being_left_is_nothing_to_warn_of(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    """To leave a loop takes some round trips, and so does to close; which is first is different each time."""

    async def read() -> None:
        async with jetspark.connect(server.url) as nc:
            await nc.jetstream().create_stream("LEAVING")
            for _ in range(1000):  # more than is received ahead, so that nothing is under way any more
                await nc.publish("LEAVING")
            await nc.flush()
        for number in range(20):
            async with jetspark.connect(server.url) as nc:
                stream = await nc.jetstream().stream("LEAVING")
                consumer = await stream.create_consumer(ConsumerConfig(durable_name=f"c{number}"))
                async for message in consumer.messages():
                    await message.ack()
                    break
            if left := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(left, timeout=60)

    with caplog.at_level(logging.WARNING, "jetspark"):
        asyncio.run(read())
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("is_kept", [False, True], ids=["break", "closed after the client"])
@pytest.mark.parametrize("place", [0, 1, 2], ids=["messages", "ordered", "watch"])
def test_leaving_a_blocking_loop_and_then_the_client_is_nothing_to_warn_of(
    server: NatsServer, caplog: pytest.LogCaptureFixture, place: int, is_kept: bool
) -> None:
    with caplog.at_level(logging.WARNING, "jetspark"):
        with jetspark.blocking.connect(server.url) as nc:
            js = nc.jetstream()
            name = f"LEFT_BLOCKING_{place}_{is_kept}"
            stream = js.create_stream(StreamConfig(name=name))
            for _ in range(3):
                js.publish(name, b"")
            kv = js.create_kv(name)
            kv.put("a", b"")
            consumer = stream.create_consumer(ConsumerConfig(durable_name="c"))
            read = _readers(stream, consumer, kv)[place]
            iterator = iter(read())
            next(iterator)
            if not is_kept:
                del iterator
        if is_kept:
            iterator.close()
    assert [record.getMessage() for record in caplog.records] == []
