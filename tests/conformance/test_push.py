"""Push consumers: what both drivers promise, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable
from contextlib import suppress

import pytest
from support.cluster import create_on_new_cluster
from support.drivers import Driver, Recorder, on_both_drivers
from support.patience import PATIENCE_S

import jetspark
from jetspark import ConsumerConfig, StreamConfig
from jetspark.server import NatsCluster, NatsServer


async def _stream(nc: jetspark.Client, count: int) -> jetspark.Stream:
    js = nc.jetstream()
    stream = await js.create_stream(StreamConfig(name="P", subjects=["p.>"]))
    for number in range(count):
        await js.publish("p.n", b"%d" % number)
    return stream


async def _take(messages: AsyncIterable[jetspark.JetStreamMessage], count: int) -> list[int]:
    numbers: list[int] = []
    async with asyncio.timeout(30):
        async for message in messages:
            numbers.append(int(message.data))
            await message.ack()
            if len(numbers) == count:
                break
    return numbers


async def _error_of(call: Awaitable[object]) -> Exception | None:
    try:
        await call
    except jetspark.JetSparkError as error:
        return error
    return None


@on_both_drivers
async def test_messages_are_pushed_and_acknowledged(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        stream = await _stream(nc, 200)
        consumer = await stream.create_consumer(
            ConsumerConfig(durable_name="c", deliver_subject="to.us", flow_control=True, idle_heartbeat_s=1)
        )
        assert await _take(consumer.pushed_messages(), 200) == list(range(200))
        await nc.flush()
        async with asyncio.timeout(PATIENCE_S):
            while (await consumer.info()).ack_floor.stream_sequence < 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@on_both_drivers
async def test_what_was_pushed_and_not_read_is_given_back(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        stream = await _stream(nc, 10)
        consumer = await stream.create_consumer(
            ConsumerConfig(durable_name="c", deliver_subject="to.us", ack_wait_s=60, idle_heartbeat_s=1)
        )
        taken: list[bytes] = []
        async with asyncio.timeout(30):
            async for message in consumer.pushed_messages():
                taken.append(message.data)
                await message.ack()
                if len(taken) == 3:
                    # All have to be here: what is on its way when one leaves, nobody gives back before its ack_wait.
                    while (await consumer.info()).delivered.stream_sequence < 10:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    await nc.flush()
                    break
        assert taken == [b"0", b"1", b"2"]
        # Sooner than ack_wait: they were naked. Redelivery is in no particular order.
        again = await _take(consumer.pushed_messages(), 7)
        assert sorted(again) == [3, 4, 5, 6, 7, 8, 9]


@on_both_drivers
async def test_a_group_shares_the_messages(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc, driver.connect(url) as other:
        stream = await _stream(nc, 0)
        config = ConsumerConfig(durable_name="c", deliver_subject="to.us", deliver_group="workers")
        consumer = await stream.create_consumer(config)
        same = await (await other.jetstream().stream("P")).consumer("c")
        shares: list[list[int]] = [[], []]

        async def work(who: int, consumer: jetspark.Consumer) -> None:
            async for message in consumer.pushed_messages():
                shares[who].append(int(message.data))
                await message.ack()
                if len(shares[0]) + len(shares[1]) == 100:
                    done.set()

        done = asyncio.Event()
        working = [asyncio.ensure_future(work(0, consumer)), asyncio.ensure_future(work(1, same))]
        await asyncio.sleep(0.2)
        js = nc.jetstream()
        for number in range(100):
            await js.publish("p.n", b"%d" % number)
        async with asyncio.timeout(PATIENCE_S):
            await done.wait()
        assert sorted(shares[0] + shares[1]) == list(range(100))
        assert min(len(share) for share in shares) > 0
        await nc.close()
        await other.close()
        await asyncio.gather(*working)


@on_both_drivers
async def test_a_push_consumer_lives_through_a_restart(driver: Driver, own: NatsServer) -> None:
    events = Recorder()
    async with driver.connect(own.url, on_event=events) as nc:
        stream = await _stream(nc, 50)
        consumer = await stream.create_consumer(
            ConsumerConfig(durable_name="c", deliver_subject="to.us", ack_wait_s=1, idle_heartbeat_s=0.5)
        )
        received: set[int] = set()
        done = asyncio.Event()

        async def read() -> None:
            async for message in consumer.pushed_messages():
                received.add(int(message.data))
                await message.ack()
                if len(received) == 100:
                    done.set()

        reading = asyncio.ensure_future(read())
        await asyncio.to_thread(own.restart)
        await events.wait_for(jetspark.Reconnected)
        js = nc.jetstream(timeout=10)
        for number in range(50, 100):
            await js.publish("p.n", b"%d" % number)
        async with asyncio.timeout(30):
            await done.wait()
        assert received == set(range(100))
        await nc.close()
        await reading


@on_both_drivers
async def test_messages_do_not_wait_for_the_answer_to_whether_the_consumer_is_there(
    driver: Driver, own: NatsServer
) -> None:
    """The question is lost with the server that was asked."""
    async with driver.connect(own.url) as nc:
        stream = await _stream(nc, 0)
        js = nc.jetstream(timeout=4 * PATIENCE_S)
        config = ConsumerConfig(durable_name="c", deliver_subject="to.us", idle_heartbeat_s=0.2)
        await stream.create_consumer(config)
        consumer = await (await js.stream("P")).consumer("c")
        reading = asyncio.ensure_future(_take(consumer.pushed_messages(), 1))
        await asyncio.sleep(0.3)
        own.pause()
        await asyncio.sleep(1)
        await asyncio.to_thread(own.kill)
        await asyncio.to_thread(own.start)
        await js.publish("p.n", b"7")
        async with asyncio.timeout(PATIENCE_S):
            assert await reading == [7]


@on_both_drivers
async def test_closing_ends_the_iteration_while_the_server_is_silent(driver: Driver, own: NatsServer) -> None:
    async with driver.connect(own.url, drain_timeout_s=0.2) as nc:
        stream = await _stream(nc, 0)
        consumer = await stream.create_consumer(
            ConsumerConfig(durable_name="c", deliver_subject="to.us", idle_heartbeat_s=0.2)
        )
        reading = asyncio.ensure_future(_take(consumer.pushed_messages(), 1))
        await asyncio.sleep(0.3)
        own.pause()
        await asyncio.sleep(1)
        assert isinstance(await _error_of(nc.close()), jetspark.ConnectionLost)
        assert await reading == []


@pytest.mark.slow
async def test_a_push_consumer_lives_through_a_cluster_without_a_majority(cluster: NatsCluster) -> None:
    name = "majority"
    stays, *others = cluster.nodes
    async with jetspark.connect(stays.url) as nc:
        js = nc.jetstream(timeout=5)
        stream = await create_on_new_cluster(js, StreamConfig(name=name, subjects=[f"{name}.>"], replicas=3))
        consumer = await stream.create_consumer(
            ConsumerConfig(durable_name="c", deliver_subject=f"to.{name}", idle_heartbeat_s=0.5)
        )
        reading = asyncio.ensure_future(_take(consumer.pushed_messages(), 1))
        for node in others:
            await asyncio.to_thread(node.kill)
        async with asyncio.timeout(PATIENCE_S):
            while not isinstance(await _error_of(consumer.info()), jetspark.ServerError):
                pass
        await asyncio.sleep(2)
        assert not reading.done()
        for node in others:
            await asyncio.to_thread(node.start)
        await asyncio.to_thread(cluster.wait_until_ready)
        async with asyncio.timeout(PATIENCE_S):
            while not reading.done():
                with suppress(jetspark.RequestTimeout, jetspark.JetStreamUnavailable, jetspark.ServerError):
                    await js.publish(f"{name}.n", b"7", msg_id="7")
                await asyncio.sleep(0.2)
        assert await reading == [7]


@on_both_drivers
async def test_a_deleted_consumer_ends_the_iteration_with_an_error(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        stream = await _stream(nc, 0)
        consumer = await stream.create_consumer(
            ConsumerConfig(durable_name="c", deliver_subject="to.us", idle_heartbeat_s=0.2)
        )
        reading = asyncio.ensure_future(_take(consumer.pushed_messages(), 1))
        await asyncio.sleep(0.1)
        await consumer.delete()
        with pytest.raises(jetspark.ConsumerNotFound):
            await reading


@on_both_drivers
async def test_a_pull_consumer_does_not_push(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        stream = await _stream(nc, 0)
        consumer = await stream.create_consumer(ConsumerConfig(durable_name="c"))
        with pytest.raises(jetspark.UsageError, match="use messages"):
            consumer.pushed_messages()
