"""The whole way, at length: producers, batcher, fast-ingest sink, and a server that is killed on the way."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import jetspark
import jetspark.blocking
from jetspark import ConsumerConfig, StreamConfig
from jetspark.batcher import Batcher, BatcherConfig, FastIngestSink, blocking
from jetspark.server import NatsServer

PRODUCERS = 8
SUBJECT = "items"
STREAM = StreamConfig(name="ITEMS", subjects=[SUBJECT], allow_batched=True)
# Kills come when so much of the work is done.
KILL_AT = (0.3, 0.6)
OUTAGE_S = 0.5


def item_of(producer: int, number: int) -> bytes:
    return b"%d %d" % (producer, number)


def check(url: str, per_producer: int, *, in_order: bool) -> None:
    """Every item is there once; and those of a producer in their order."""
    total = PRODUCERS * per_producer
    found: list[list[int]] = [[] for _ in range(PRODUCERS)]
    with jetspark.blocking.connect(url) as nc:
        stream = nc.jetstream().stream(STREAM.name)
        assert stream.info().state.messages == total
        consumer = stream.create_consumer(ConsumerConfig(ack_policy="none"))
        seen = 0
        while seen < total:
            messages = consumer.fetch(5000, timeout=10)
            assert messages, f"{seen} of {total} were read"
            for message in messages:
                producer, number = map(int, message.data.split())
                found[producer].append(number)
            seen += len(messages)
    for numbers in found:
        assert (numbers if in_order else sorted(numbers)) == list(range(per_producer))


def kill_on_the_way(server: NatsServer, enqueued: list[int], total: int) -> None:
    for share in KILL_AT:
        while enqueued[0] < share * total:
            time.sleep(0.002)
        server.kill()
        time.sleep(OUTAGE_S)
        server.start()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_items_of_eight_producers_are_stored_once_while_the_server_is_killed_twice(
    own: NatsServer,
) -> None:
    # A hundred batches and more. With 125_000, for a million in all, it takes half a minute.
    per_producer = 30_000
    progress = [0]
    async with jetspark.connect(own.url) as nc:
        js = nc.jetstream()
        await js.create_stream(STREAM)
        async with (
            FastIngestSink[bytes](js, SUBJECT, message_ids=True) as sink,
            Batcher(
                BatcherConfig(
                    sink=sink,
                    max_batch_size=2000,
                    max_batch_delay=0.05,
                    queue_depth=4000,
                    flush_timeout=100,
                    max_concurrent_flushes=4,
                )
            ) as batcher,
        ):

            async def produce(producer: int) -> None:
                for number in range(per_producer):
                    await batcher.add(item_of(producer, number))
                    progress[0] += 1

            killer = asyncio.create_task(asyncio.to_thread(kill_on_the_way, own, progress, PRODUCERS * per_producer))
            await asyncio.gather(*(produce(producer) for producer in range(PRODUCERS)))
            await killer
        stats = batcher.stats()
        assert (stats.enqueued, stats.flushed_ok) == (PRODUCERS * per_producer,) * 2
    await asyncio.to_thread(check, own.url, per_producer, in_order=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_on_threads(own: NatsServer) -> None:
    per_producer = 25_000
    progress = [0]
    with jetspark.blocking.connect(own.url) as nc:
        js = nc.jetstream()
        js.create_stream(STREAM)
        with (
            blocking.FastIngestSink[bytes](js, SUBJECT, message_ids=True) as sink,
            blocking.Batcher(
                BatcherConfig(
                    sink=sink,
                    max_batch_size=2000,
                    max_batch_delay=0.05,
                    queue_depth=4000,
                    flush_timeout=100,
                    max_concurrent_flushes=4,
                )
            ) as batcher,
        ):

            def produce(producer: int) -> None:
                for number in range(per_producer):
                    batcher.add(item_of(producer, number))
                    progress[0] = max(progress[0], PRODUCERS * number)

            threads = [threading.Thread(target=produce, args=(producer,)) for producer in range(PRODUCERS)]
            for thread in threads:
                thread.start()
            kill_on_the_way(own, progress, PRODUCERS * per_producer)
            for thread in threads:
                thread.join()
        stats = batcher.stats()
        assert (stats.enqueued, stats.flushed_ok) == (PRODUCERS * per_producer, PRODUCERS * per_producer)
    check(own.url, per_producer, in_order=False)  # threads that write side by side may overtake one another
