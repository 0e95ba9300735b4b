"""What matters most, again, on three nodes: leaders step down and die, and the counts stay exact."""

from __future__ import annotations

import asyncio

import pytest
from support.cluster import bring_back, create_on_new_cluster, kill_leader, leader, leading_node
from support.drivers import Driver, on_both_drivers

import jetspark
from jetspark import ConsumerConfig, StreamConfig
from jetspark.server import NatsCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def _until_stored(js: jetspark.JetStream, subject: str, data: bytes, msg_id: str) -> jetspark.PubAck:
    """Publish until acknowledged. The id makes that safe: a message that had been stored is not stored again."""
    async with asyncio.timeout(90):
        while True:
            try:
                return await js.publish(subject, data, msg_id=msg_id, timeout=2)
            except (jetspark.RequestTimeout, jetspark.JetStreamUnavailable, jetspark.ServerError):
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("driver", ["asyncio", "blocking"], indirect=True)
@pytest.mark.parametrize("storage", ["file", "memory"])
@on_both_drivers
async def test_a_publisher_with_ids_loses_and_doubles_nothing_when_leaders_go(
    driver: Driver, cluster: NatsCluster, storage: str
) -> None:
    name = f"R3_{driver.name}_{storage}"
    async with driver.connect(cluster.urls) as nc:
        js = nc.jetstream(timeout=5)
        stream = await js.create_stream(
            StreamConfig(name=name, subjects=[f"{name}.>"], replicas=3, storage=storage, allow_direct=True)  # type: ignore[arg-type]
        )
        published = 0

        async def publish(count: int) -> None:
            nonlocal published
            for _ in range(count):
                ack = await _until_stored(js, f"{name}.n", b"%d" % published, f"{name}-{published}")
                assert ack.stream == name
                published += 1

        await publish(50)
        publishing = asyncio.ensure_future(publish(300))
        await asyncio.sleep(0.05)
        await stream.step_down()
        await publishing
        node = await leading_node(cluster, stream)
        publishing = asyncio.ensure_future(publish(300))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(node.kill)
        await publishing
        await asyncio.to_thread(node.start)
        await asyncio.to_thread(cluster.wait_until_ready)
        await publish(50)
        await leader(stream)
        stored: list[int] = []
        async with asyncio.timeout(30):
            while len(stored) < 700:  # any replica may answer, and one may be a moment behind
                stored = [int(message.data) async for message in stream.get_messages()]
        assert stored == list(range(700))
        await stream.delete()


@pytest.mark.parametrize("driver", ["asyncio", "blocking"], indirect=True)
@on_both_drivers
async def test_ordered_reading_and_watching_miss_nothing_when_leaders_go(driver: Driver, cluster: NatsCluster) -> None:
    name = f"ordered_{driver.name}"
    async with driver.connect(cluster.urls) as writer, driver.connect(cluster.urls) as reader:
        js = writer.jetstream(timeout=5)
        kv = await js.create_kv(jetspark.KVConfig(bucket=name, history=64, replicas=3))
        stream = await js.stream(f"KV_{name}")
        ordered: list[int] = []
        watched: list[int] = []

        async def read() -> None:
            source = await reader.jetstream(timeout=10).stream(f"KV_{name}")
            async for message in source.ordered_consumer().messages():
                ordered.append(int(message.data))
                if len(ordered) == 300:
                    return

        async def watch() -> None:
            bucket = await reader.jetstream(timeout=10).kv(name)
            async for entry in bucket.watch(include_history=True):
                watched.append(int(entry.value))
                if len(watched) == 300:
                    return

        async def write(first: int, count: int) -> None:
            for number in range(first, first + count):
                await _until_stored(js, f"$KV.{name}.k.{number % 10}", b"%d" % number, f"{name}-{number}")

        reading = asyncio.gather(read(), watch())
        await write(0, 100)
        writing = asyncio.ensure_future(write(100, 100))
        await asyncio.sleep(0.05)
        await stream.step_down()
        await writing
        writing = asyncio.ensure_future(write(200, 100))
        await asyncio.sleep(0.02)
        await kill_leader(cluster, stream)
        await writing
        async with asyncio.timeout(90):
            await reading
        assert ordered == list(range(300))
        assert watched == list(range(300))
        assert (await kv.get("k.9")).value == b"299"
        await stream.delete()


@pytest.mark.parametrize("driver", ["asyncio", "blocking"], indirect=True)
@pytest.mark.parametrize("whose", ["consumer", "stream"])
@on_both_drivers
async def test_messages_hands_out_everything_when_the_leader_is_killed(
    driver: Driver, cluster: NatsCluster, whose: str
) -> None:
    """And comes to rest: all acknowledged, and no more delivered twice than was unacknowledged at that moment.

    That is ``max_ack_pending`` at most. A delivery is sent only when a majority knows of it, and the server had to have
    the acks that made room for it before; so with the leader die only acks of the last so many deliveries.
    """
    name = f"killed_{whose}_{driver.name}"
    count, unacknowledged = 1_500, 200
    seen: dict[int, list[int]] = {}
    is_flowing, is_killed = asyncio.Event(), asyncio.Event()
    async with driver.connect(cluster.urls) as writer, driver.connect(cluster.urls) as reader:
        js = writer.jetstream(timeout=5)
        stream = await js.create_stream(StreamConfig(name=name, subjects=[f"{name}.>"], replicas=3))
        for number in range(count - 100):
            await js.publish_async(f"{name}.n", b"%d" % number)
        await js.publish_async_complete(30)
        assert (await stream.info()).state.messages == count - 100
        consumer = await (await reader.jetstream(timeout=5).stream(name)).create_consumer(
            ConsumerConfig(durable_name="c", ack_policy="explicit", ack_wait_s=5.0, max_ack_pending=unacknowledged)
        )

        async def read() -> None:
            async for message in messages:
                seen.setdefault(int(message.data), []).append(message.metadata.delivered)
                await message.ack()
                if len(seen) == count // 10:
                    is_flowing.set()
                if is_flowing.is_set() and not is_killed.is_set():
                    await asyncio.sleep(0.005)  # else all may be read before the leader is killed

        async def write() -> None:
            for number in range(count - 100, count):
                await _until_stored(js, f"{name}.n", b"%d" % number, f"{name}-{number}")

        async def at_rest() -> jetspark.ConsumerInfo:
            while True:
                try:
                    info = await consumer.info()
                    if info.ack_floor.stream_sequence == count and not (info.ack_pending or info.pending):
                        return info
                except (jetspark.RequestTimeout, jetspark.JetStreamUnavailable, jetspark.ServerError):
                    pass
                await asyncio.sleep(0.1)

        node = await leading_node(cluster, consumer if whose == "consumer" else stream)
        async with consumer.messages(max_messages=100) as messages:
            reading = asyncio.ensure_future(read())
            async with asyncio.timeout(30):
                await is_flowing.wait()
            await asyncio.to_thread(node.kill)
            is_killed.set()
            assert len(seen) < count - 100, "it was over before the leader died"
            writing = asyncio.ensure_future(write())
            await bring_back(cluster, node)
            await writing
            async with asyncio.timeout(90):
                info = await at_rest()
        await reading
        assert sorted(seen) == list(range(count))
        assert (await stream.info()).state.messages == count
        assert all(times == sorted(set(times)) for times in seen.values()), "what comes again says so itself"
        assert sum(map(len, seen.values())) <= info.delivered.consumer_sequence <= count + unacknowledged
        assert info.redelivered == 0  # none is waiting to come again
        await stream.delete()


async def _published(js: jetspark.JetStream, subject: str, msg_id: str) -> jetspark.PubAck:
    """Publish, once more if there is no answer: the first message may have been on its way to a node that died."""
    try:
        return await js.publish(subject, b"", msg_id=msg_id, timeout=20)
    except jetspark.RequestTimeout:
        return await js.publish(subject, b"", msg_id=msg_id, timeout=40)


@pytest.mark.parametrize("driver", ["asyncio", "blocking"], indirect=True)
@on_both_drivers
async def test_a_publish_waits_for_the_election_of_its_streams_leader(driver: Driver, cluster: NatsCluster) -> None:
    name = f"ELECTING_{driver.name}"
    async with driver.connect(cluster.urls) as nc:
        js = nc.jetstream(timeout=60)
        stream = await create_on_new_cluster(js, StreamConfig(name=name, subjects=(f"{name}.>",), replicas=3))
        await js.create_or_update_kv(jetspark.KVConfig(bucket=name, replicas=3))
        for number in range(3):
            node = await leading_node(cluster, stream)
            await leader(await js.stream(f"KV_{name}"))
            # A publish on its way through the server that dies would be in doubt.
            others = [each.url for each in cluster.nodes if each is not node]
            async with driver.connect(others, ignore_discovered_servers=True) as other:
                publisher = other.jetstream(timeout=60)
                kv = await publisher.kv(name)
                await asyncio.to_thread(node.kill)
                try:
                    assert (await _published(publisher, f"{name}.n", f"{number}")).stream == name
                    await kv.put("key", b"%d" % number)
                finally:
                    await bring_back(cluster, node)
        await stream.delete()


@pytest.mark.parametrize("driver", ["asyncio", "blocking"], indirect=True)
@on_both_drivers
async def test_a_subject_that_no_stream_stores_is_told_soon_and_a_lost_leader_by_its_name(
    driver: Driver, cluster: NatsCluster
) -> None:
    name = f"LEADERLESS_{driver.name}"
    async with driver.connect(cluster.urls) as nc:
        js = nc.jetstream()
        # A cluster that has stored a stream has a leader, which can say that no stream stores a subject.
        stream = await create_on_new_cluster(js, StreamConfig(name=name, subjects=(f"{name}.>",), replicas=1))
        async with asyncio.timeout(60):
            with pytest.raises(jetspark.JetStreamUnavailable, match=r"make one with js\.create_stream"):
                await js.publish(f"nobody.{name}", b"", timeout=600)
        node = await leading_node(cluster, stream)
        others = [each.url for each in cluster.nodes if each is not node]
        async with driver.connect(others, ignore_discovered_servers=True) as other:
            publisher = other.jetstream()
            await asyncio.to_thread(node.kill)
            try:
                async with asyncio.timeout(90):
                    while True:  # until the cluster has elected who leads it
                        with pytest.raises(jetspark.JetStreamUnavailable, match="elected") as raised:
                            await publisher.publish(f"{name}.n", b"", timeout=3)
                        if f"stream '{name}'" in str(raised.value):
                            break
            finally:
                await bring_back(cluster, node)
        await leader(stream)
        await stream.delete()
