"""Ordered consumers: nothing skipped, repeated or out of order, whatever happens underneath."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator, Iterator

import pytest
from support.drivers import Driver, on_both_drivers
from support.peers import Proxy

import jetspark
from jetspark import StreamConfig
from jetspark.server import NatsServer


@pytest.fixture
def js_server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


async def _take(messages: AsyncIterator[jetspark.JetStreamMessage], count: int) -> list[int]:
    """The numbers in the next ``count`` messages."""
    numbers: list[int] = []
    async with asyncio.timeout(40):
        async for message in messages:
            numbers.append(int(message.data))
            if len(numbers) == count:
                break
    return numbers


async def _fill(js: jetspark.JetStream, first: int, count: int, subject: str = "ordered.n") -> None:
    for number in range(first, first + count):
        await js.publish(subject, b"%d" % number)


@on_both_drivers
async def test_everything_comes_in_order_and_then_what_is_new(driver: Driver, js_server: NatsServer) -> None:
    async with driver.connect(js_server.url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        await _fill(js, 0, 200)
        reading = asyncio.ensure_future(_take(stream.ordered_consumer().messages(), 250))
        await _fill(js, 200, 50)
        assert await reading == list(range(250))


@on_both_drivers
async def test_it_begins_where_it_is_told_to(driver: Driver, js_server: NatsServer) -> None:
    async with driver.connect(js_server.url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        await _fill(js, 0, 10, "ordered.a")
        middle = datetime.datetime.now(datetime.UTC)
        await asyncio.sleep(0.01)
        await _fill(js, 10, 10, "ordered.b")
        for consumer, expected in (
            (stream.ordered_consumer(start_sequence=6), list(range(5, 20))),
            (stream.ordered_consumer(start_time=middle), list(range(10, 20))),
            (stream.ordered_consumer("ordered.b"), list(range(10, 20))),
            (stream.ordered_consumer("ordered.a", "ordered.b", start_sequence=9), list(range(8, 20))),
            (stream.ordered_consumer(deliver_policy="last"), [19]),
            (stream.ordered_consumer(deliver_policy="last_per_subject"), [9, 19]),
        ):
            assert await _take(consumer.messages(), len(expected)) == expected
        with pytest.raises(jetspark.ConfigError, match="start_sequence with deliver_policy: expected one of them"):
            stream.ordered_consumer(start_sequence=1, deliver_policy="new")
        await stream.delete()
        with pytest.raises(jetspark.StreamNotFound):
            await _take(stream.ordered_consumer().messages(), 1)


@on_both_drivers
async def test_what_is_left_behind_is_cleaned_up(driver: Driver, js_server: NatsServer) -> None:
    async with driver.connect(js_server.url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        await _fill(js, 0, 5)
        messages = stream.ordered_consumer().messages()
        await _take(messages, 3)
        await messages.aclose()  # type: ignore[attr-defined]
        assert (await stream.info()).state.consumers == 0


@on_both_drivers
async def test_cuts_and_restarts_are_not_seen(driver: Driver, js_server: NatsServer) -> None:
    async with Proxy(js_server.port) as proxy, driver.connect(js_server.url) as publisher:
        js = publisher.jetstream(timeout=10)
        await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        async with driver.connect(proxy.url, ignore_discovered_servers=True, reconnect_wait_s=0.01) as nc:
            stream = await nc.jetstream().stream("O")
            received: list[int] = []

            async def read() -> None:
                async for message in stream.ordered_consumer().messages():
                    received.append(int(message.data))
                    if len(received) == 600:
                        return

            reading = asyncio.ensure_future(read())
            for cut in range(4):
                await _fill(js, 100 * cut, 100)
                proxy.cut()
            await asyncio.to_thread(js_server.restart)
            await publisher.flush(timeout=20)
            await _fill(js, 400, 200)
            async with asyncio.timeout(40):
                await reading
            assert received == list(range(600))


@on_both_drivers
async def test_messages_lost_on_the_way_are_fetched_again(driver: Driver, js_server: NatsServer) -> None:
    """A reader too slow for its bounds loses messages; an ordered one notices and goes back for them."""
    async with driver.connect(js_server.url, max_pending_messages=20) as nc, driver.connect(js_server.url) as other:
        js = other.jetstream()
        await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        await _fill(js, 0, 500)
        stream = await nc.jetstream().stream("O")
        assert await _take(stream.ordered_consumer().messages(), 500) == list(range(500))


@on_both_drivers
async def test_closing_the_connection_ends_the_iteration(driver: Driver, js_server: NatsServer) -> None:
    nc = await driver.connect(js_server.url)
    js = nc.jetstream()
    stream = await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
    await _fill(js, 0, 3)
    received: list[int] = []

    async def read() -> None:
        async for message in stream.ordered_consumer().messages():
            received.append(int(message.data))  # noqa: PERF401 - seen from outside while it grows

    reading = asyncio.ensure_future(read())
    async with asyncio.timeout(20):
        while len(received) < 3:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    await nc.close()
    async with asyncio.timeout(20):
        await reading
