"""The batcher: what an item costs on its way into a batch, and the whole way through one into a stream.

``batcher`` writes to a sink that does nothing, so only the batcher is measured. ``list`` is the code without it: a
coroutine that appends to a list. ``batcher-ingest`` takes the same messages as ``fast-ingest``, and its baseline is
that workload's ``add_many``: it shows the cost of batching items one by one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import TypeVar

from benchmarks.fast_ingest import bare
from benchmarks.fast_ingest import jetspark as add_many
from benchmarks.streams import stream_for
from benchmarks.workload import (
    CPU_PER_MILLION,
    Bar,
    Contender,
    Job,
    Metric,
    Rounds,
    Values,
    Workload,
    payload_of,
)
from jetspark.aio import connect
from jetspark.batcher import Batcher, BatcherConfig, FastIngestSink
from jetspark.batcher import blocking as threads
from jetspark.blocking import connect as connect_blocking
from jetspark.errors import ConnectionLost

__all__ = ["BATCHER", "BATCHER_INGEST"]

PRODUCERS = 8
MAX_BATCH_SIZE = 500
MAX_BATCH_DELAY_S = 0.05
# Into a stream: each batch spans several acknowledgements, and two are under way, so that the server is never idle.
INGEST_BATCH_SIZE = 2000
INGEST_FLUSHES = 2

S = TypeVar("S")


class _Nowhere:
    async def write(self, batch: Sequence[object]) -> None:
        pass


class _NowhereBlocking:
    def write(self, batch: Sequence[object]) -> None:
        pass


# ---- into a sink that does nothing -----------------------------------------------------------------------------------


async def plain_list(job: Job) -> Values:
    items: list[int] = []

    async def add(item: int) -> None:
        items.append(item)

    for count in (rounds := Rounds(job)):
        for number in range(count):
            await add(number)
    return _values(job, rounds)


async def one_producer(job: Job) -> Values:
    return await _produce(job, 1)


async def eight_producers(job: Job) -> Values:
    return await _produce(job, PRODUCERS)


async def _produce(job: Job, producers: int) -> Values:
    for count in (rounds := Rounds(job)):
        batcher = Batcher[int](
            BatcherConfig(sink=_Nowhere(), max_batch_size=MAX_BATCH_SIZE, max_batch_delay=MAX_BATCH_DELAY_S)
        )

        async def produce(numbers: range, batcher: Batcher[int] = batcher) -> None:
            for number in numbers:
                await batcher.add(number)

        rounds.begin()
        if producers == 1:
            await produce(range(count))
        else:
            await asyncio.gather(*(produce(range(first, count, producers)) for first in range(producers)))
        await batcher.shutdown()
        rounds.end()
        _check(count, batcher.stats().flushed_ok)
    return _values(job, rounds)


def one_thread(job: Job) -> Values:
    return _produce_blocking(job, 1)


def eight_threads(job: Job) -> Values:
    return _produce_blocking(job, PRODUCERS)


def _produce_blocking(job: Job, producers: int) -> Values:
    for count in (rounds := Rounds(job)):
        batcher = threads.Batcher[int](
            BatcherConfig(sink=_NowhereBlocking(), max_batch_size=MAX_BATCH_SIZE, max_batch_delay=MAX_BATCH_DELAY_S)
        )

        def produce(numbers: range, batcher: threads.Batcher[int] = batcher) -> None:
            for number in numbers:
                batcher.add(number)

        workers = [
            threading.Thread(target=produce, args=(range(first, count, producers),)) for first in range(producers)
        ]
        rounds.begin()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        batcher.shutdown()
        rounds.end()
        _check(count, batcher.stats().flushed_ok)
    return _values(job, rounds)


def _check(count: int, flushed: int) -> None:
    if flushed != count:
        raise ConnectionLost(f"{flushed} of {count} items reached the sink")


def _values(job: Job, rounds: Rounds) -> Values:
    values = rounds.values()
    return values | {"items_per_s": values["messages_per_s"], "ns_per_item": rounds.elapsed_s / job.count * 1e9}


BATCHER = Workload(
    name="batcher",
    what="Items through a batcher into a sink that does nothing, until it has them all.",
    count=1_000_000,
    quick_count=2_000,
    contenders=(
        Contender(name="list", what="appending to a list in a coroutine", run=plain_list),
        Contender(name="jetspark", what="asyncio, one producer", run=one_producer, has_uvloop_twin=True),
        Contender(name="jetspark-8", what="asyncio, eight producers", run=eight_producers, has_uvloop_twin=True),
        Contender(name="jetspark-blocking", what="threads, one producer", run=one_thread),
        Contender(name="jetspark-blocking-8", what="threads, eight producers", run=eight_threads),
    ),
    payload_bytes=8,
    metrics=(Metric("items_per_s", "items/s"), Metric("ns_per_item", "ns", "lower"), CPU_PER_MILLION),
    baselines=("list",),
    bars=(
        Bar(
            claim="one asyncio producer adds at least 300,000 items/s",
            metric="items_per_s",
            contender="jetspark",
            at_least=300_000,
        ),
        Bar(
            claim="an item costs at most 1,500 ns more than in a list",
            metric="ns_per_item",
            contender="jetspark",
            baseline="list",
            by="difference",
            at_most=1500,
        ),
    ),
)


# ---- into a stream ---------------------------------------------------------------------------------------------------


def _into_stream(sink: S) -> BatcherConfig[S]:
    return BatcherConfig(
        sink=sink,
        max_batch_size=INGEST_BATCH_SIZE,
        max_batch_delay=MAX_BATCH_DELAY_S,
        queue_depth=INGEST_BATCH_SIZE,
        max_concurrent_flushes=INGEST_FLUSHES,
    )


async def ingest(job: Job) -> Values:
    payload = payload_of(job.payload_bytes)
    with stream_for(job, allow_batched=True):
        async with connect(job.url) as client:
            for count in (rounds := Rounds(job)):
                async with (
                    FastIngestSink[bytes](client.jetstream(), job.subject) as sink,
                    Batcher(_into_stream(sink)) as batcher,
                ):
                    for _ in range(count):
                        await batcher.add(payload)
                rounds.end()
                _check(count, batcher.stats().flushed_ok)
    return rounds.values()


def ingest_blocking(job: Job) -> Values:
    payload = payload_of(job.payload_bytes)
    with stream_for(job, allow_batched=True), connect_blocking(job.url) as client:
        for count in (rounds := Rounds(job)):
            with (
                threads.FastIngestSink[bytes](client.jetstream(), job.subject) as sink,
                threads.Batcher(_into_stream(sink)) as batcher,
            ):
                for _ in range(count):
                    batcher.add(payload)
            rounds.end()
            _check(count, batcher.stats().flushed_ok)
    return rounds.values()


BATCHER_INGEST = Workload(
    name="batcher-ingest",
    what="Messages added one by one to a batcher, stored by fast ingest, until all are known to be stored.",
    count=400_000,
    quick_count=2_000,
    contenders=(
        Contender(name="bare", what="pre-framed, one thread", run=bare),
        Contender(name="add_many", what="the same messages given to fast.add_many", run=add_many),
        Contender(name="jetspark", what="asyncio: add, batcher, fast-ingest sink", run=ingest, has_uvloop_twin=True),
        Contender(name="jetspark-blocking", what="threads: add, batcher, fast-ingest sink", run=ingest_blocking),
    ),
    storage="file",
    replicas=1,
    baselines=("add_many", "bare"),
    bars=(
        Bar(
            claim="through a batcher, fast ingest is at least 0.8 x add_many",
            metric="messages_per_s",
            contender="jetspark",
            baseline="add_many",
            at_least=0.8,
        ),
    ),
)
