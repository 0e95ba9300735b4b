"""``python -m orders``: the whole pipeline on one machine, step by step, and a check of what came out."""

import argparse
import contextlib
import logging
import sys
import tempfile
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import jetspark.blocking as jetspark
from jetspark import KVConfig, StreamConfig
from jetspark.server import NatsServer
from jetspark.spark import session
from orders import check, pipeline
from orders.events import events

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
    with contextlib.ExitStack() as stack:
        servers = options.servers or stack.enter_context(NatsServer()).url
        nc = stack.enter_context(jetspark.connect(servers))
        js = nc.jetstream(timeout=30)
        set_up(js)
        with progress() as bars:
            published = publish(js, options.events, bars)
            spark, folded = process(servers, options.events, bars)
        stack.callback(spark.stop)
        is_right = report(js, options.events, published, folded)
        is_stable = nothing_changes(js, spark, servers, options.events, folded.checkpoint)
        if options.keep:
            keep(servers)
    return 0 if is_right and is_stable else 1


def set_up(js: jetspark.JetStream) -> None:
    """Streams and buckets; doing it again changes nothing."""
    orders = StreamConfig(name=pipeline.STREAM, subjects=["orders.>"], allow_batched=True, allow_direct=True)
    dead = StreamConfig(
        name=pipeline.DEAD_LETTERS,
        subjects=["dead.>"],
        allow_batched=True,
        allow_direct=True,
        duplicate_window_s=86_400,  # as long as somebody may want to process the same part of history again
    )
    js.create_or_update_stream(orders)
    js.create_or_update_stream(dead)
    for bucket in (pipeline.ORDER_STATE, pipeline.DAILY_REVENUE):
        js.create_or_update_kv(KVConfig(bucket=bucket, allow_batched=True))


def publish(js: jetspark.JetStream, count: int, bars: Progress) -> float:
    """All events, by fast ingest; returns how many a second. Their ids make it safe to run this twice."""
    bar = bars.add_task("publish", total=count)

    def shown() -> Iterator[tuple[str, bytes]]:
        for number, event in enumerate(events(count), 1):
            yield event
            if number % 1000 == 0:
                bars.update(bar, completed=number)

    started = time.perf_counter()
    with js.fast_publisher(message_ids=True, id_prefix="orders") as publisher:
        publisher.publish_many(shown())
    bars.update(bar, completed=count)
    return count / (time.perf_counter() - started)


class Folded:
    """How the query went."""

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        self.rows = 0
        self.rate = 0.0
        self.lag = 0


def process(servers: str, count: int, bars: Progress):
    """Run the query over everything there is."""
    starting = bars.add_task("start Spark", total=1)
    spark = session("orders")
    bars.update(starting, completed=1)
    folded = Folded(tempfile.mkdtemp(prefix="jetspark-orders-"))
    bar = bars.add_task("fold", total=count)
    started = time.perf_counter()
    run(spark, servers, folded, count, lambda: bars.update(bar, completed=folded.rows))
    folded.rate = folded.rows / (time.perf_counter() - started)
    return spark, folded


def run(spark, servers: str, folded: Folded, count: int, show) -> None:
    query = pipeline.stream(spark, servers, folded.checkpoint, per_batch=max(1, count // 4))
    while not query.awaitTermination(0.3):
        folded.rows = sum(progress.numInputRows for progress in query.recentProgress)
        show()
    folded.rows = sum(progress.numInputRows for progress in query.recentProgress)
    show()


def report(js: jetspark.JetStream, count: int, published: float, folded: Folded) -> bool:
    """Print what came out, next to what should have."""
    wanted, found = check.expected(count), check.stored(js)
    folded.lag = js.stream(pipeline.STREAM).info().state.last_sequence - folded.rows
    paid = sum(orders for orders, _ in found.revenue.values())
    console.print(f"published {count:,} events, {published:,.0f}/s")
    console.print(f"folded {folded.rows:,} events, {folded.rate:,.0f}/s; lag {folded.lag:,}")
    console.print(
        f"{len(found.orders):,} orders, {paid:,} paid on {len(found.revenue)} days, "
        f"{found.revenue_cents / 100:,.2f} in all; {len(found.dead):,} dead letters"
    )
    is_right = wanted == found
    console.print("the same as computed in plain Python" if is_right else "[red]not what it should be[/red]")
    return is_right


def nothing_changes(js: jetspark.JetStream, spark, servers: str, count: int, checkpoint: str) -> bool:
    """A second run finds nothing to do, and a replay of a part of history nothing to change."""
    before = check.writes(js)
    run(spark, servers, Folded(checkpoint), count, lambda: None)
    first, end = count // 4 + 1, count // 2 + 1
    pipeline.replay(spark, servers, first, end)
    is_same = check.writes(js) == before
    verdict = "changed nothing" if is_same else "[red]changed something[/red]"
    console.print(f"a second run, and a replay of events {first:,} to {end - 1:,}, {verdict}")
    return is_same


def keep(servers: str) -> None:
    console.print(f"\nNATS is at {servers}. To look at it, for example:")
    console.print(
        f"  python -c \"import jetspark.blocking as j; nc = j.connect('{servers}'); "
        f"print(nc.jetstream().kv('{pipeline.DAILY_REVENUE}').get('2026-03-20').value)\""
    )
    console.print("Press Enter to end it.")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        input()


def progress() -> Progress:
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


if __name__ == "__main__":
    sys.exit(main())
