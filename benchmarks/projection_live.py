"""Live projections of an application: how many events a process folds a second, and how soon a state can be read.

The stream, on disk, is filled before the clock starts. ``jetspark`` is a worker as ``app.run`` starts it: it reads,
decodes, validates, folds into 10,000 keys and stores them; the clock stops when the last event is stored. ``ordered``
only reads the same stream, and ``bare`` does so with a socket and no client at all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from time import perf_counter

from benchmarks.js_pull import CONSUMER, read_bare
from benchmarks.workload import (
    CPU_PER_MILLION,
    MESSAGES_PER_S,
    Bar,
    Contender,
    Job,
    Metric,
    Stopwatch,
    Values,
    Workload,
    percentile,
)
from jetspark.aio import connect
from jetspark.aio.jetstream import JetStream
from jetspark.errors import StreamNotFound
from jetspark.jetstream.config import ConsumerConfig

__all__ = ["PROJECTION_LATENCY", "PROJECTION_LIVE"]

RATE = 1000.0
"""Events a second, where latency is measured."""


@contextlib.asynccontextmanager
async def _prepared(job: Job, count: int) -> AsyncIterator[JetStream]:
    """The application's stream with ``count`` events, and its buckets."""
    from benchmarks.order_totals import app, messages

    async with connect(job.url) as client:
        js = client.jetstream(timeout=30.0)
        await _remove(js)
        await app.apply(job.url)
        if count:
            async with js.fast_batch() as fast:
                await fast.add_many(messages(count))
        try:
            yield js
        finally:
            await _remove(js)


async def _remove(js: JetStream) -> None:
    from benchmarks.order_totals import app

    topology = app.topology()
    for name in [each.name for each in topology.streams] + [f"KV_{each.bucket}" for each in topology.buckets]:
        with contextlib.suppress(StreamNotFound):
            await js.delete_stream(name)


async def live(job: Job) -> Values:
    from benchmarks.order_totals import app
    from jetspark.app.projections.projection_worker import ProjectionWorker

    async with _prepared(job, job.count) as js:
        worker = ProjectionWorker(app.spec, list(app.projections.values()), js, catalogue=app.catalogue)
        watch = Stopwatch()
        task = asyncio.create_task(worker.run())
        while worker.counts.position < job.count and not task.done():
            await asyncio.wait([task], timeout=0.01)
        watch.stop()
        await worker.stop(task, 10.0)
        task.result()
    return watch.values(job.count)


async def ordered(job: Job) -> Values:
    from benchmarks.order_totals import app

    async with _prepared(job, job.count) as js:
        reader = (await js.stream(app.stream)).ordered_consumer()
        received = 0
        watch = Stopwatch()
        async for _ in reader.messages():
            received += 1
            if received == job.count:
                break
        watch.stop()
    return watch.values(job.count)


async def bare(job: Job) -> Values:
    from benchmarks.order_totals import app

    async with _prepared(job, job.warmup + job.count) as js:
        stream = await js.stream(app.stream)
        await stream.create_consumer(ConsumerConfig(durable_name=CONSUMER, ack_policy="none"))
        return await asyncio.to_thread(read_bare, job, app.stream)


async def latency(job: Job) -> Values:
    """From the call of ``publish`` until a watch of the bucket shows a state with the event in it."""
    from benchmarks.order_totals import KEYS, Paid, app

    times: list[float] = []
    async with _prepared(job, 0), app.connect(job.url) as client:
        running = asyncio.create_task(app.run(job.url))
        view = client.view("totals")
        ready = await client.publish(Paid(order_id="ready", customer="c", amount_cents=0))
        await view.get("ready", at_least=ready.sequence, timeout=30.0)
        began: dict[str, float] = {}
        total = job.warmup + job.count

        async def follow() -> None:
            async for entry in view.watch():
                if (start := began.pop(entry.key, None)) is not None:
                    times.append(perf_counter() - start)
                    if len(times) == total:
                        return

        following = asyncio.create_task(follow())
        begin = perf_counter()
        for number in range(total):
            await asyncio.sleep(begin + number / RATE - perf_counter())
            key = f"o-{number % KEYS}"
            began[key] = perf_counter()
            await client.publish(Paid(order_id=key, customer="c", amount_cents=number))
        async with asyncio.timeout(60):
            await following
        running.cancel()
        await asyncio.wait([running])
    found = sorted(times[job.warmup :])
    return {"latency_ms_p50": percentile(found, 50) * 1e3, "latency_ms_p99": percentile(found, 99) * 1e3}


PROJECTION_LIVE = Workload(
    name="projection-live",
    what="an application's events decoded, validated, folded into 10,000 keys and stored by one live worker",
    count=1_000_000,
    quick_count=5_000,
    payload_bytes=280,
    storage="file",
    replicas=1,
    metrics=(MESSAGES_PER_S, CPU_PER_MILLION),
    baselines=("bare", "ordered"),
    contenders=(
        Contender(name="jetspark", what="a worker of the application", run=live, has_uvloop_twin=True),
        Contender(name="ordered", what="an ordered consumer that does nothing", run=ordered, has_uvloop_twin=True),
        Contender(name="bare", what="a bare socket that reads the same messages", run=bare),
    ),
    bars=(
        Bar(
            claim="a live projection folds at least 60 thousand events a second",
            metric="messages_per_s",
            contender="jetspark",
            at_least=60_000,
        ),
        Bar(
            claim="a live projection is at least 0.3 x a bare reader",
            metric="messages_per_s",
            contender="jetspark",
            baseline="bare",
            at_least=0.3,
        ),
    ),
)

PROJECTION_LATENCY = Workload(
    name="projection-latency",
    what="1,000 events/s published one by one: from the call until a watch shows the state, worker in the same process",
    count=5_000,
    quick_count=200,
    payload_bytes=280,
    storage="file",
    replicas=1,
    metrics=(Metric("latency_ms_p50", "ms", "lower"), Metric("latency_ms_p99", "ms", "lower")),
    baselines=(),
    contenders=(Contender(name="jetspark", what="a worker of the application", run=latency, has_uvloop_twin=True),),
    bars=(
        Bar(
            claim="an event is in the state of a live projection after at most 10 ms at p50",
            metric="latency_ms_p50",
            contender="jetspark",
            at_most=10.0,
        ),
        Bar(
            claim="an event is in the state of a live projection after at most 50 ms at p99",
            metric="latency_ms_p99",
            contender="jetspark",
            at_most=50.0,
        ),
    ),
)
