"""What an event costs a projection on Spark, by the number of events and of keys: ``python tools/spark_cost.py``.

One session, ``local[2]``, a server of its own with streams on disk. For each size the events are folded once by a
backfill and once by a stream, into an empty bucket. It prints processor time for each event, of Java and of all Python
workers together, the rate, and the most memory that a Python worker has had. Processor time hardly depends on what else
the machine does; rates do. The first line is cold, and not to be compared.

    python tools/spark_cost.py 100000x10000 300000x10000 1000000x10000 1000000x1000 1000000x1000000
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jetspark.bench.order_totals import app, messages
from jetspark.bench.projection_spark import APP, cpu_s
from jetspark.bench.spark import descendants, peak_mib
from jetspark.blocking import JetStream, connect
from jetspark.errors import StreamNotFound
from jetspark.server import NatsServer
from jetspark.spark import backfill, run, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SIZES = ("100000x10000", "100000x10000", "300000x10000", "1000000x10000", "1000000x1000", "1000000x1000000")


def empty(js: JetStream, url: str, *names: str) -> None:
    for name in names:
        with contextlib.suppress(StreamNotFound):
            js.delete_stream(name)
    asyncio.run(app.apply(url))


def fold(spark: SparkSession, url: str, engine: str) -> None:
    if engine == "backfill":
        backfill(APP, spark, url, partitions=2)
    else:
        run(APP, spark, url, partitions=2, until_now=True).awaitTermination()


def measure(spark: SparkSession, js: JetStream, url: str, size: str) -> None:
    events, keys = map(int, size.split("x"))
    empty(js, url, app.stream)
    with js.fast_batch() as fast:
        fast.add_many(messages(events, keys))
    for engine in ("backfill", "stream"):
        empty(js, url, "KV_bench_totals")
        cpu, began = cpu_s(server=False), time.perf_counter()
        fold(spark, url, engine)
        elapsed, cpu = time.perf_counter() - began, cpu_s(server=False) - cpu
        found = js.stream("KV_bench_totals").info().state.messages - 1
        assert found == min(keys, events), found
        memory = peak_mib(iter(descendants(os.getpid())))
        load = Path("/proc/loadavg").read_text().split()[0]
        print(
            f"{events:>9} events {keys:>8} keys {engine:>8}: {cpu / events * 1e6:6.2f} µs of processor time an event, "
            f"{events / elapsed / 1000:6.1f} thousand/s, largest worker {memory:.0f} MiB so far, load {load}",
            flush=True,
        )


def main() -> None:
    with NatsServer() as server, connect(server.url) as client:
        js = client.jetstream(timeout=60.0)
        spark = session("jetspark-cost", cores=2)
        try:
            for size in sys.argv[1:] or SIZES:
                measure(spark, js, server.url, size)
        finally:
            spark.stop()


if __name__ == "__main__":
    main()
