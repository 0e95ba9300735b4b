"""Stage: publish half a million events, some of an old version and some unreadable."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from jetspark.demo.screen import DemoStage
from jetspark.demo.spark_fold import start_spark
from jetspark.demo.stages import Demo, rate

__all__ = ["publish"]

OLD_ONE_IN = 50
SHOWN_EVERY = 1000

T = TypeVar("T")


async def publish(demo: Demo) -> None:
    """Store the events, and check that the stream has all of them."""
    app, traffic, js = demo.shop.release1, demo.shop.traffic, demo.environment.js
    old, unreadable = demo.count // OLD_ONE_IN, traffic.UNREADABLE
    await app.apply(demo.environment.url)
    demo.spark = start_spark(demo)
    with demo.screen.stage("publish", demo.count) as stage:
        stage.say("Spark starts at the same time")
        began = time.perf_counter()
        async with js.fast_publisher(message_ids=True) as publisher:
            await publisher.publish_many(_shown(stage, traffic.old_payments(old, demo.tally)))
            await publisher.publish_many(
                (f"demo.orders.paid.unknown-{number}", data) for number, data in enumerate(unreadable)
            )
        async with app.connect(demo.environment.url) as orders, orders.bulk() as bulk:
            rest = demo.count - old - len(unreadable)
            await bulk.publish_many(_shown(stage, traffic.history(rest, demo.tally), old))
        elapsed_s = time.perf_counter() - began
        state = (await (await js.stream(app.stream)).info()).state
        demo.last = state.last_sequence
        stage.say(f"{rate(demo.count, elapsed_s)}, beside the start of Spark")
    demo.screen.found(
        "publish",
        f"{state.messages:,} events of {demo.count:,} stored, {rate(demo.count, elapsed_s)} beside the start of Spark; "
        f"{old:,} of an older version, {len(unreadable)} unreadable",
        is_good=state.messages == demo.count,
    )


def _shown(stage: DemoStage, events: Iterable[T], done: int = 0) -> Iterator[T]:
    for number, event in enumerate(events, done + 1):
        yield event
        if number % SHOWN_EVERY == 0:
            stage.reached(number)
