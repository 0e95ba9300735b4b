"""``python -m orders``: the whole pipeline on one machine, step by step, and a check of what came out.

Every run has streams and buckets of its own, named after it, so that it can run on a server that others use. They are
removed at the end, unless ``--keep`` is given.
"""

import argparse
import contextlib
import logging
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
from jetspark import JetSparkError, KVConfig, StreamConfig
from jetspark.server import NatsServer
from jetspark.spark import session
from orders import check, pipeline
from orders.events import events
from orders.pipeline import Place

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
        place = Place(servers or stack.enter_context(NatsServer()).url, secrets.token_hex(4))
        nc = stack.enter_context(jetspark.connect(place.servers))
        js = nc.jetstream(timeout=30)
        if servers and not is_kept:
            stack.callback(clean_up, js, place)
        set_up(js, place)
        checkpoint = stack.enter_context(tempfile.TemporaryDirectory(prefix="jetspark-demo-"))
        with progress() as bars:
            published = publish(js, place, count, bars)
            spark = start_spark(bars)
            stack.callback(spark.stop)
            folded = process(spark, place, checkpoint, count, bars)
        is_right = report(js, place, count, published, folded)
        is_stable = nothing_changes(js, spark, place, count, checkpoint)
        if is_kept:
            keep(place)
    return 0 if is_right and is_stable else 1


def set_up(js: jetspark.JetStream, place: Place) -> None:
    """The streams and buckets of this run."""
    orders = StreamConfig(name=place.stream, subjects=[f"{place.subjects}.>"], allow_batched=True, allow_direct=True)
    dead = StreamConfig(
        name=place.dead_letters,
        subjects=[f"{place.dead_subjects}.>"],
        allow_batched=True,
        allow_direct=True,
        duplicate_window_s=86_400,  # as long as somebody may want to process the same part of history again
    )
    js.create_stream(orders)
    js.create_stream(dead)
    for bucket in (place.order_state, place.daily_revenue):
        js.create_kv(KVConfig(bucket=bucket))


def clean_up(js: jetspark.JetStream, place: Place) -> None:
    """Remove what this run made, as far as it got."""
    for name in (place.stream, place.dead_letters, f"KV_{place.order_state}", f"KV_{place.daily_revenue}"):
        with contextlib.suppress(JetSparkError):
            js.delete_stream(name)


def publish(js: jetspark.JetStream, place: Place, count: int, bars: Progress) -> float:
    """All events, by fast ingest; returns how many a second."""
    bar = bars.add_task("publish", total=count)

    def shown() -> Iterator[tuple[str, bytes]]:
        for number, event in enumerate(events(count, place.subjects), 1):
            yield event
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
    spark = session("orders")
    bars.update(starting, completed=1)
    return spark


def process(spark: SparkSession, place: Place, checkpoint: str, count: int, bars: Progress) -> Folded:
    """Run the query over everything there is."""
    folded = Folded()
    bar = bars.add_task("fold", total=count)
    started = time.perf_counter()
    query(spark, place, checkpoint, folded, count, lambda: bars.update(bar, completed=folded.rows))
    folded.rate = folded.rows / (time.perf_counter() - started)
    return folded


def query(
    spark: SparkSession, place: Place, checkpoint: str, folded: Folded, count: int, show: Callable[[], None]
) -> None:
    running = pipeline.stream(spark, place, checkpoint, per_batch=max(1, count // 4))
    is_over = False
    while not is_over:
        is_over = bool(running.awaitTermination(0.3))  # type: ignore[arg-type]  # Spark takes fractions
        folded.rows = sum(progress.numInputRows for progress in running.recentProgress)
        show()


def report(js: jetspark.JetStream, place: Place, count: int, published: float, folded: Folded) -> bool:
    """Print what came out, next to what should have."""
    wanted, found = check.expected(count), check.stored(js, place)
    lag = js.stream(place.stream).info().state.last_sequence - folded.rows
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


def nothing_changes(js: jetspark.JetStream, spark: SparkSession, place: Place, count: int, checkpoint: str) -> bool:
    """A second run finds nothing to do, and a replay of a part of history nothing to change."""
    before = check.writes(js, place)
    query(spark, place, checkpoint, Folded(), count, lambda: None)
    first, end = count // 4 + 1, count // 2 + 1
    pipeline.replay(spark, place, first, end)
    is_same = check.writes(js, place) == before
    verdict = "changed nothing" if is_same else "[red]changed something[/red]"
    console.print(f"a second run, and a replay of events {first:,} to {end - 1:,}, {verdict}")
    return is_same


def keep(place: Place) -> None:
    console.print(f"\nNATS is at {place.servers}, the events in the stream {place.stream}. To look at the result:")
    console.print(
        f"  python -c \"import jetspark.blocking as j; nc = j.connect('{place.servers}'); "
        f"print(nc.jetstream().kv('{place.daily_revenue}').get('2026-03-20').value)\"",
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
