"""The cost of an event for a projection, by the number of events and of keys: ``python -m benchmarks.projection_cost``.

A server of its own with streams on disk. For each size the events are folded three times, into an empty bucket each
time: live, by a worker in a process of its own; by a backfill and by a stream on Spark, which share one session on
``local[2]``. What the worker has stored is verified by another process, as ``jetspark verify`` does it. It prints
processor time for each event (of the worker, or of Java and all Python workers together), the rate, and the most memory
that a Python process has had. Processor time hardly depends on what else the machine does; rates do. The first line
of Spark is cold, and not to be compared.

    python -m benchmarks.projection_cost 100000x10000 1000000x10000 5000000x10000 1000000x1000 1000000x1000000

Keys come in turn. Where a batch has at most one event of each key, every event is a write, and costs more: compare
those sizes with each other. ``1000000x200000`` and ``5000000x1000000`` are the same work for a stream on Spark, whose
micro-batches have 200,000 events: each loads and stores as many keys. A size with a third number, such as
``200000x1000x100``, is folded live in batches of that many events, so that each is a write however few the keys are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.order_totals import app, messages
from benchmarks.processes import cpu_s, descendants, environment, peak_mib
from benchmarks.projection_spark import APP
from jetspark.blocking import JetStream, connect
from jetspark.core.gc_tuning import seldom_collecting
from jetspark.errors import StreamNotFound
from jetspark.server import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SIZES = (
    *("100000x10000", "100000x10000", "1000000x10000", "5000000x10000", "1000000x1000"),
    *("100000x100000", "1000000x1000000"),
    *("1000000x200000", "5000000x1000000"),
    *("200000x1000x100", "200000x10000x100", "200000x100000x100", "200000x1000000x100"),
)
ENGINES = ("live", "verify", "backfill", "stream")


class Cost(NamedTuple):
    elapsed_s: float
    cpu_s: float
    memory_mib: float


def empty(js: JetStream, url: str, *names: str) -> None:
    for name in names:
        with contextlib.suppress(StreamNotFound):
            js.delete_stream(name)
    asyncio.run(app.apply(url))


async def fold_live(url: str, events: int, batch: int | None = None) -> Cost:
    """Fold all of them with a worker in this process."""
    from jetspark.aio import connect
    from jetspark.app.projections.live_options import LiveOptions
    from jetspark.app.projections.projection_worker import ProjectionWorker

    options = LiveOptions() if batch is None else LiveOptions(batch=batch)
    async with connect(url) as client:
        worker = ProjectionWorker(
            app.spec, list(app.projections.values()), client.jetstream(), catalogue=app.catalogue, options=options
        )
        cpu, began = time.process_time(), time.perf_counter()
        task = asyncio.create_task(worker.run())
        while worker.counts.position < events and not task.done():
            await asyncio.wait([task], timeout=0.01)
        elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
        await worker.stop(task, 10.0)
        task.result()
    return Cost(elapsed, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


async def verify_live(url: str) -> Cost:
    """Compare what a worker has stored with a fresh fold, in this process."""
    from jetspark.aio import connect
    from jetspark.app.replay import verify

    async with connect(url) as client:
        cpu, began = time.process_time(), time.perf_counter()
        found = await verify(client.jetstream(), app, "totals")
        elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert found.is_equal, found
    return Cost(elapsed, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def fold(spark: SparkSession, url: str, engine: str, events: int, batch: Sequence[int]) -> Cost:
    if engine in ("live", "verify"):
        numbers = [str(events), *map(str, batch)] if engine == "live" else []
        command = [sys.executable, "-m", "benchmarks.projection_cost", f"--{engine}", url, *numbers]
        return Cost(*json.loads(subprocess.run(command, env=environment(), check=True, capture_output=True).stdout))
    from jetspark.spark import backfill, run

    cpu, began = cpu_s(server=False), time.perf_counter()
    if engine == "backfill":
        backfill(APP, spark, url, partitions=2)
    else:
        run(APP, spark, url, partitions=2, until_now=True).awaitTermination()
    elapsed, cpu = time.perf_counter() - began, cpu_s(server=False) - cpu
    return Cost(elapsed, cpu, peak_mib(iter(descendants(os.getpid()))))


def measure(spark: SparkSession, js: JetStream, url: str, size: str) -> None:
    events, keys, *batch = map(int, size.split("x"))
    empty(js, url, app.stream)
    with js.fast_batch() as fast:
        fast.add_many(messages(events, keys))
    for engine in ENGINES[:1] if batch else ENGINES:
        if engine != "verify":
            empty(js, url, "KV_bench_totals")
        elapsed, cpu, memory = fold(spark, url, engine, events, batch)
        state = js.stream("KV_bench_totals").info().state
        assert state.messages - 1 == min(keys, events), state
        load = Path("/proc/loadavg").read_text().split()[0]
        print(
            f"{events:>9} events {keys:>8} keys {engine:>8}: {cpu / events * 1e6:6.2f} µs of processor time an event, "
            f"{state.last_sequence / events:.2f} writes, "
            f"{events / elapsed / 1000:6.1f} thousand/s, largest Python process {memory:.0f} MiB so far, load {load}",
            flush=True,
        )


def main() -> None:
    from jetspark.spark import session

    with NatsServer() as server, connect(server.url) as client:
        js = client.jetstream(timeout=60.0)
        spark = session("jetspark-cost", cores=2)
        try:
            for size in sys.argv[1:] or SIZES:
                measure(spark, js, server.url, size)
        finally:
            spark.stop()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--live"]:
        with seldom_collecting():  # as in `jetspark run`
            print(json.dumps(asyncio.run(fold_live(sys.argv[2], *map(int, sys.argv[3:])))))
    elif sys.argv[1:2] == ["--verify"]:
        with seldom_collecting():
            print(json.dumps(asyncio.run(verify_live(sys.argv[2]))))
    else:
        main()
