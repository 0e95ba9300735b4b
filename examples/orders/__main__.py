"""``python -m orders``: the whole pipeline on one machine, step by step, and a check of what came out.

Every run has streams and buckets of its own, named after it, so that it can run on a server that others use. They are
removed at the end, unless ``--keep`` is given.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from pyspark.sql import SparkSession
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import jetspark.blocking as jetspark
from jetspark import JetSparkError
from jetspark.server import NatsServer
from jetspark.spark import backfill, session
from jetspark.spark import run as run_on_spark

# Before the application is imported, here and by Spark's workers: it takes its names from it.
os.environ.setdefault("ORDERS_RUN", secrets.token_hex(4))
from orders import check
from orders.app import app
from orders.events import history

console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(prog="orders", description=__doc__)
    parser.add_argument("--events", type=int, default=200_000, help="how many events to publish")
    parser.add_argument("--servers", help="a NATS server with JetStream, instead of one that is started for this")
    parser.add_argument(
        "--keep", action="store_true", help="leave the server and the data, and say how to look at them"
    )
    options = parser.parse_args()
    if options.events < 1:
        parser.error(f"--events {options.events}: expected 1 or more")
    logging.getLogger("jetspark").setLevel(logging.ERROR)
    logging.getLogger().addHandler(logging.NullHandler())  # py4j logs tracebacks of its own for a Ctrl-C
    try:
        return run(options.events, options.servers, is_kept=options.keep)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 128 + signal.SIGINT
    except JetSparkError as error:
        console.print(f"{error}", style="red", markup=False)
        return 1


def run(count: int, servers: str | None, *, is_kept: bool) -> int:
    with contextlib.ExitStack() as stack:
        url = servers or stack.enter_context(NatsServer()).url
        nc = stack.enter_context(jetspark.connect(url))
        js = nc.jetstream(timeout=30)
        if servers and not is_kept:
            stack.callback(clean_up, js)
        asyncio.run(app.apply(url))
        checkpoint = stack.enter_context(tempfile.TemporaryDirectory(prefix="jetspark-demo-"))
        with progress() as bars:
            published = publish(js, count, bars)
            spark = start_spark(bars)
            stack.callback(spark.stop)
            folded = process(spark, url, checkpoint, count, bars)
        is_right = report(js, count, published, folded)
        is_stable = nothing_changes(js, spark, url, count, checkpoint)
        if is_kept:
            keep(url)
    return 0 if is_right and is_stable else 1


def clean_up(js: jetspark.JetStream) -> None:
    """Remove what this run made, as far as it got."""
    topology = app.topology()
    for name in [stream.name for stream in topology.streams] + [f"KV_{each.bucket}" for each in topology.buckets]:
        with contextlib.suppress(JetSparkError):
            js.delete_stream(name)


def publish(js: jetspark.JetStream, count: int, bars: Progress) -> float:
    """All events, by fast ingest; returns how many a second."""
    bar = bars.add_task("publish", total=count)

    def shown() -> Iterator[tuple[str, bytes]]:
        for number, message in enumerate(history(count), 1):
            yield message.subject, message.data
            if number % 1000 == 0:
                bars.update(bar, completed=number)

    started = time.perf_counter()
    with js.fast_publisher(message_ids=True) as publisher:
        publisher.publish_many(shown())
    bars.update(bar, completed=count)
    return count / (time.perf_counter() - started)


class Folded:
    """How the query went."""

    def __init__(self) -> None:
        self.rows = 0
        self.rate = 0.0


def start_spark(bars: Progress) -> SparkSession:
    starting = bars.add_task("start Spark", total=1)
    spark = session("orders", is_short=True)
    bars.update(starting, completed=1)
    return spark


def process(spark: SparkSession, url: str, checkpoint: str, count: int, bars: Progress) -> Folded:
    """Run the query over everything there is."""
    folded = Folded()
    bar = bars.add_task("fold", total=count)
    started = time.perf_counter()
    query(spark, url, checkpoint, folded, count, lambda: bars.update(bar, completed=folded.rows))
    folded.rate = folded.rows / (time.perf_counter() - started)
    return folded


def query(spark: SparkSession, url: str, checkpoint: str, folded: Folded, count: int, show: Callable[[], None]) -> None:
    per_batch = max(1, count // 4)
    running = run_on_spark(
        app, spark, url, checkpoint=checkpoint, until_now=True, query_name="orders", maxOffsetsPerTrigger=per_batch
    )
    is_over = False
    while not is_over:
        is_over = bool(running.awaitTermination(0.3))  # type: ignore[arg-type]  # Spark takes fractions
        folded.rows = min(count, per_batch * sum(progress.numInputRows > 0 for progress in running.recentProgress))
        show()


def report(js: jetspark.JetStream, count: int, published: float, folded: Folded) -> bool:
    """Print what came out, next to what should have."""
    wanted, found = check.expected(count), check.stored(js)
    lag = js.stream(app.stream).info().state.last_sequence - folded.rows
    paid = sum(orders for orders, _ in found.revenue.values())
    console.print(f"published {count:,} events, {published:,.0f}/s")
    console.print(f"folded {folded.rows:,} events, {folded.rate:,.0f}/s; lag {lag:,}")
    console.print(
        f"{len(found.orders):,} orders, {paid:,} paid on {len(found.revenue)} days, "
        f"{found.revenue_cents / 100:,.2f} in all; {len(found.dead):,} dead letters"
    )
    is_right = wanted == found
    console.print("the same as computed in plain Python" if is_right else "[red]not what it should be[/red]")
    return is_right


def nothing_changes(js: jetspark.JetStream, spark: SparkSession, url: str, count: int, checkpoint: str) -> bool:
    """A second run finds nothing to do, and a replay of a part of history nothing to change."""
    before = check.writes(js)
    query(spark, url, checkpoint, Folded(), count, lambda: None)
    first, last = count // 4 + 1, count // 2
    if first <= last:
        backfill(app, spark, url, from_sequence=first, to_sequence=last)
    is_same = check.writes(js) == before
    verdict = "changed nothing" if is_same else "[red]changed something[/red]"
    console.print(f"a second run, and a replay of events {first:,} to {last:,}, {verdict}")
    return is_same


def keep(url: str) -> None:
    console.print(f"\nNATS is at {url}, the events in the stream {app.stream}. To look at the result:")
    console.print(
        f"  python -c \"import jetspark.blocking as j; nc = j.connect('{url}'); "
        f"print(nc.jetstream().kv('{check.bucket_of('daily_revenue')}').get('2026-03-20').value)\"",
        soft_wrap=True,
    )
    console.print("Press Enter to end it.")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        input()


def progress() -> Progress:
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


if __name__ == "__main__":
    sys.exit(main())
