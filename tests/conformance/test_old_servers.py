"""What a server is too old for is refused by name and version, before anything is sent; the rest works."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.drivers import Driver, on_both_drivers
from support.old_servers import old_binary, running
from support.servers import domain_config

import jetspark
from jetspark import ConsumerConfig, Expect, KVConfig, StreamConfig
from jetspark.server import NatsServer

NEXT_YEAR = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=365)


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("old-servers")


@pytest.fixture(scope="module")
def v2_10(downloads: Path) -> Iterator[NatsServer]:
    """No API level at all, and unknown fields and headers are ignored."""
    with running(old_binary("2.10.26", downloads)) as server:
        yield server


@pytest.fixture(scope="module")
def v2_11(downloads: Path) -> Iterator[NatsServer]:
    """API level 1, which its INFO does not say."""
    with running(old_binary("2.11.11", downloads)) as server:
        yield server


@pytest.fixture(scope="module")
def v2_12(downloads: Path) -> Iterator[NatsServer]:
    """API level 3: atomic batches without an end-of-batch message, no fast ingest."""
    with running(old_binary("2.12.8", downloads)) as server:
        yield server


def _refused(feature: str, needed: str, present: str) -> Any:
    return pytest.raises(
        jetspark.FeatureUnavailable, match=rf"{feature}.* needs nats-server {needed} or newer, .*this .*is {present}"
    )


async def _stream(js: jetspark.JetStream, driver: Driver, name: str, **config: Any) -> Any:
    name = f"{name}_{driver.name}"
    return await js.create_stream(StreamConfig(name=name, subjects=[f"{name}.>"], storage="memory", **config))


async def _holds(stream: Any) -> int:
    return int((await stream.info()).state.messages)


@on_both_drivers
async def test_fast_ingest_is_refused_and_stores_nothing(driver: Driver, v2_12: NatsServer, v2_10: NatsServer) -> None:
    for server, version in ((v2_12, "2.12.8"), (v2_10, "2.10.26")):
        async with driver.connect(server.url) as nc:
            js = nc.jetstream()
            stream = await _stream(js, driver, "FAST")
            with _refused("fast ingest", "2.14", version):
                async with js.fast_batch() as batch:
                    await batch.add(f"{stream.name}.a", b"1")
            with _refused("fast ingest", "2.14", version):
                async with js.fast_publisher() as publisher:
                    await publisher.publish(f"{stream.name}.a", b"1")
            with _refused("allow_batched", "2.14", version):
                await stream.update(allow_batched=True)
            assert await _holds(stream) == 0


@on_both_drivers
async def test_atomic_batches_work_from_2_12_on(driver: Driver, v2_12: NatsServer) -> None:
    async with driver.connect(v2_12.url) as nc:
        js = nc.jetstream()
        stream = await _stream(js, driver, "ATOMIC", allow_atomic=True, allow_direct=True)
        subject = f"{stream.name}.a"
        for options in ({}, {"ack_first": False}, {"ack_every": 2}):
            before = await _holds(stream)
            async with js.atomic_batch(**options) as batch:
                await batch.add(subject, b"1", expect=Expect(last_sequence=before))
                await batch.add(f"{subject}.b", b"2", headers={"Kind": "x"})
                await batch.add_many((subject, b"%d" % number) for number in range(3, 8))
                assert batch.sequence == 7
            assert (batch.outcome, batch.ack.batch_size, batch.ack.sequence) == ("stored", 7, before + 7)
            stored = [(await stream.get_message(before + number)).data for number in range(1, 8)]
            assert stored == [b"%d" % number for number in range(1, 8)]

        async with js.atomic_batch() as one:
            await one.add(subject, b"alone")
        assert (one.ack.batch_size, (await stream.get_message(22)).data) == (1, b"alone")

        async with js.atomic_batch() as batch:
            await batch.add(subject, b"first")
            ack = await batch.commit(subject, b"last")
        assert (ack.batch_size, await _holds(stream)) == (2, 24)


@on_both_drivers
async def test_an_atomic_batch_that_is_not_committed_stores_nothing_on_2_12(driver: Driver, v2_12: NatsServer) -> None:
    async with driver.connect(v2_12.url) as nc:
        js = nc.jetstream()
        stream = await _stream(js, driver, "NOTHING", allow_atomic=True)
        subject = f"{stream.name}.a"
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the whole block is what fails
            async with js.atomic_batch() as batch:
                await batch.add(subject, b"1")
                await batch.add(subject, b"2")
                _ = 1 / 0
        assert batch.outcome == "not stored"
        async with js.atomic_batch() as empty:
            pass
        assert empty.outcome == "not stored"
        with pytest.raises(jetspark.WrongLastSequence):  # noqa: PT012 - its end is what fails
            async with js.atomic_batch() as refused:
                await refused.add(subject, b"1")
                await refused.add(f"{subject}.b", b"2", expect=Expect(last_subject_sequence=7))
        assert refused.outcome == "not stored"
        # What is refused here leaves the batch as it was, and is not the message that commits it.
        async with js.atomic_batch() as batch:
            await batch.add(subject, b"1", msg_id="one")
            with pytest.raises(jetspark.ConfigError, match="msg_id='one'"):
                await batch.add(subject, b"2", msg_id="one")
            with pytest.raises(jetspark.ConfigError, match="last_subject_sequence"):
                await batch.add(subject, b"3", expect=Expect(last_subject_sequence=0))
            with pytest.raises(jetspark.ConfigError, match="last_sequence"):
                await batch.add(f"{subject}.c", b"3", expect=Expect(last_sequence=0))
            with pytest.raises(jetspark.PayloadTooLarge):
                await batch.add(subject, b"x" * (1 << 20))
            with pytest.raises(jetspark.InvalidSubject):
                await batch.add(f"{subject}.>", b"4")
        assert (batch.ack.batch_size, await _holds(stream)) == (1, 1)


@on_both_drivers
async def test_transactions_work_from_2_12_on(driver: Driver, v2_12: NatsServer) -> None:
    async with driver.connect(v2_12.url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket=f"tx-{driver.name}", storage="memory"))
        async with kv.transaction() as tx:
            await tx.put("a", b"1")
            await tx.create("b", b"2")
        assert {key: (await kv.get(key)).value for key in ("a", "b")} == {"a": b"1", "b": b"2"}
        assert tx.revisions == {"a": 1, "b": 2}
        async with kv.transaction() as tx:
            await tx.update("a", b"3", revision=1)
        with pytest.raises(jetspark.Conflict):  # noqa: PT012 - its end is what fails
            async with kv.transaction() as tx:
                await tx.put("b", b"4")
                await tx.update("a", b"5", revision=1)
        assert ((await kv.get("a")).value, (await kv.get("b")).value) == (b"3", b"2")


@on_both_drivers
async def test_atomic_batches_are_refused_before_2_12(driver: Driver, v2_11: NatsServer, v2_10: NatsServer) -> None:
    for server, version in ((v2_11, "2.11.11"), (v2_10, "2.10.26")):
        async with driver.connect(server.url) as nc:
            js = nc.jetstream()
            stream = await _stream(js, driver, "OLD")
            for ack_first in (True, False):
                with _refused("atomic_batch", "2.12", version):
                    async with js.atomic_batch(ack_first=ack_first) as batch:
                        await batch.add(f"{stream.name}.a", b"1")
            with _refused("allow_atomic", "2.12", version):
                await stream.update(allow_atomic=True)
            with _refused("priority_policy", "2.12" if server is v2_11 else "2.1[12]", version):
                await stream.create_consumer(ConsumerConfig(priority_policy="prioritized", priority_groups=["a"]))
            assert await _holds(stream) == 0


@on_both_drivers
async def test_ttls_are_refused_where_they_would_be_ignored(driver: Driver, v2_10: NatsServer) -> None:
    async with driver.connect(v2_10.url) as nc:
        js = nc.jetstream()
        stream = await _stream(js, driver, "TTL")
        with _refused("ttl", "2.11", "2.10.26"):
            await js.publish(f"{stream.name}.a", b"", ttl=5)
        with _refused("ttl", "2.11", "2.10.26"):
            await js.publish_async(f"{stream.name}.a", b"", ttl=5)
        assert await _holds(stream) == 0
        with _refused("allow_message_ttl", "2.11", "2.10.26"):
            await js.create_kv(KVConfig(bucket="marks", limit_marker_ttl_s=5))
        kv = await js.create_kv(KVConfig(bucket=f"ttl-{driver.name}", storage="memory"))
        revision = await kv.put("a", b"")
        for call in (
            lambda: kv.create("b", b"", ttl=5),
            lambda: kv.update("a", b"", revision=revision, ttl=5),
            lambda: kv.purge("a", ttl=5),
        ):
            with _refused("ttl", "2.11", "2.10.26"):
                await call()
        assert (await kv.status()).values == 1


@on_both_drivers
async def test_other_features_are_refused_where_they_would_be_ignored(driver: Driver, v2_10: NatsServer) -> None:
    async with driver.connect(v2_10.url) as nc:
        js = nc.jetstream()
        stream = await _stream(js, driver, "REST", allow_direct=True)
        consumer = await stream.create_consumer(ConsumerConfig(durable_name="c"))
        calls: list[tuple[str, Callable[[], Awaitable[object]]]] = [
            ("consumer.pause", lambda: consumer.pause(NEXT_YEAR)),
            ("consumer.unpin", lambda: consumer.unpin("group")),
            ("get_last_messages", lambda: stream.get_last_messages(["a"])),
            ("pause_until", lambda: stream.create_consumer(ConsumerConfig(pause_until=NEXT_YEAR))),
            ("priority", lambda: stream.create_consumer(ConsumerConfig(priority_groups=["a"]))),
            ("allow_message_ttl", lambda: stream.update(allow_message_ttl=True)),
        ]
        for feature, call in calls:
            with _refused(feature, "2.11", "2.10.26"):
                await call()
        with _refused("get_messages", "2.11", "2.10.26"):
            _ = [message async for message in stream.get_messages()]
        for feature, call in (
            ("allow_message_counter", lambda: stream.update(allow_message_counter=True)),
            ("allow_message_schedules", lambda: stream.update(allow_message_schedules=True)),
        ):
            with _refused(feature, "2.12", "2.10.26"):
                await call()
        with _refused("consumer.reset", "2.14", "2.10.26"):
            await consumer.reset()


@on_both_drivers
async def test_what_2_11_has_is_not_refused_there(driver: Driver, v2_11: NatsServer) -> None:
    async with driver.connect(v2_11.url) as nc:
        js = nc.jetstream()
        stream = await _stream(js, driver, "NEW", allow_message_ttl=True, allow_direct=True)
        await js.publish(f"{stream.name}.a", b"1", ttl=60)
        assert [message.data async for message in stream.get_messages()] == [b"1"]
        assert [message.data for message in await stream.get_last_messages([f"{stream.name}.>"])] == [b"1"]
        consumer = await stream.create_consumer(ConsumerConfig(durable_name="c"))
        await consumer.pause(NEXT_YEAR)
        await consumer.resume()
        kv = await js.create_kv(KVConfig(bucket=f"new-{driver.name}", limit_marker_ttl_s=5))
        await kv.create("a", b"", ttl=60)


# ---- JetStream of another server than the connected one ------------------------------------------------------------


@pytest.fixture(scope="module")
def new_leaf_of_old_hub(downloads: Path) -> Iterator[NatsServer]:
    """A server of today, connected to one of 2.12 whose JetStream is the domain ``hub``."""
    path = old_binary("2.12.8", downloads)
    with (
        running(path, jetstream=False, extra_config=domain_config("hub", downloads / "hub")) as hub,
        NatsServer(jetstream=False, extra_config=domain_config("edge", downloads / "edge", hub)) as leaf,
    ):
        yield leaf


async def _hub(nc: jetspark.Client) -> Any:
    """Its API, as soon as the two servers have found each other."""
    js = nc.jetstream(domain="hub")
    async with asyncio.timeout(30):
        while True:
            try:
                await js.account_info()
                return js
            except jetspark.JetSparkError:
                await asyncio.sleep(0.05)


@on_both_drivers
async def test_the_level_is_that_of_the_domain_not_of_the_connected_server(
    driver: Driver, new_leaf_of_old_hub: NatsServer
) -> None:
    async with driver.connect(new_leaf_of_old_hub.url) as nc:
        assert nc.server_info.fields["api_lvl"] > 3
        js = await _hub(nc)
        with _refused("allow_batched", "2.14", "of API level 3"):
            await _stream(js, driver, "HUB", allow_batched=True)
        stream = await _stream(js, driver, "HUB", allow_atomic=True)
        for options in ({}, {"ack_every": 1}):
            async with js.atomic_batch(**options) as batch:
                await batch.add(f"{stream.name}.a", b"1")
                await batch.add(f"{stream.name}.a", b"2")
            assert batch.ack.batch_size == 2
        consumer = await stream.create_consumer(ConsumerConfig(durable_name="c"))
        with _refused("consumer.reset", "2.14", "of API level 3"):
            await consumer.reset()
        kv = await js.create_kv(KVConfig(bucket=f"hub-{driver.name}"))
        async with kv.transaction() as tx:
            await tx.put("a", b"1")
            await tx.put("b", b"1")
        assert tx.revisions == {"a": 1, "b": 2}


@on_both_drivers
async def test_fast_ingest_stops_at_the_first_message_an_old_server_took_for_a_plain_one(
    driver: Driver, new_leaf_of_old_hub: NatsServer
) -> None:
    async with driver.connect(new_leaf_of_old_hub.url) as nc:
        # The context is that of the leaf, which is new; the subject is stored at the hub, which is not.
        stream = await _stream(await _hub(nc), driver, "PLAIN")
        js = nc.jetstream()
        subject = f"{stream.name}.a"
        with _refused("fast ingest", "2.14", "older: stream .* stored the first message as a plain one"):
            async with js.fast_batch() as batch:
                await batch.add_many((subject, b"1") for _ in range(10))
        assert (batch.stored, await _holds(stream)) == (1, 1)
        with _refused("fast ingest", "2.14", "older"):
            async with js.fast_publisher(message_ids=True) as publisher:
                for _ in range(10):
                    await publisher.publish(subject, b"2")
        assert await _holds(stream) == 2


@on_both_drivers
async def test_fast_ingest_of_another_domain_is_refused_before_anything_is_sent(
    driver: Driver, new_leaf_of_old_hub: NatsServer
) -> None:
    async with driver.connect(new_leaf_of_old_hub.url) as nc:
        stream = await _stream(await _hub(nc), driver, "DOMAIN")
        js = nc.jetstream(domain="hub")  # has asked nothing yet
        with _refused("fast ingest", "2.14", "of API level 3"):
            async with js.fast_batch() as batch:
                await batch.add(f"{stream.name}.a", b"1")
        with _refused("fast ingest", "2.14", "of API level 3"):
            async with js.fast_publisher() as publisher:
                await publisher.publish(f"{stream.name}.a", b"1")
        assert await _holds(stream) == 0
