"""Stage: fold the events on Spark, into buckets beside those of the live workers."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspark.app.topology.declared import OWNER
from jetspark.demo.screen import DemoStage
from jetspark.demo.shop import RELEASE_1
from jetspark.demo.stages import Demo, Moment, rate, until_folded
from jetspark.errors import UsageError
from jetspark.server.process import finish_in_thread

if TYPE_CHECKING:
    from jetspark.spark.types import SparkSession, StreamingQuery

__all__ = ["fold_on_spark"]

BATCHES = 5
"""Micro-batches that the events are folded in: the first one is cold."""
ATTEMPTS = 3
END_S = 20.0


async def fold_on_spark(demo: Demo) -> None:
    """Fold everything that was published; measures start-up, the first batch, and the others."""
    await _make_buckets(demo)
    log = demo.folder / "spark.log"
    async with AsyncExitStack() as stack:
        with demo.screen.stage("start Spark") as stage:
            spark = await stack.enter_async_context(_session(log))
            started_s = stage.elapsed_s
            stage.say(f"Spark {spark.version}")
        with demo.screen.stage("fold on Spark", demo.last) as stage:
            text = await _fold(demo, stage, spark)
            stage.say(text)
    demo.screen.found("fold on Spark", f"start-up {started_s:.1f} s, then {text}")


async def _fold(demo: Demo, stage: DemoStage, spark: SparkSession) -> str:
    """Run the query to its end; one that fails, because Python did not start in time perhaps, goes on where it was."""
    began = time.perf_counter()
    moments: list[Moment] = []
    for attempt in range(1, ATTEMPTS + 1):
        try:
            query = await asyncio.to_thread(_start, demo, spark)
            buckets = list(demo.spark_buckets.values())
            moments += await until_folded(demo, stage, buckets, demo.last, partial(_check, query))
            break
        except UsageError as failure:
            if attempt == ATTEMPTS:
                raise
            stage.say(f"started again: {failure}")
    return _rates(moments, began) + (f", started {attempt} times" if attempt > 1 else "")


async def _make_buckets(demo: Demo) -> None:
    """For Spark alone: like those of the live workers, so that both can be compared."""
    app = demo.shop.release1
    demo.spark_buckets = {name: f"{spec.bucket.bucket}_spark" for name, spec in app.projections.items()}
    for name, bucket in demo.spark_buckets.items():
        config = app.projections[name].bucket_config
        await demo.place.js.create_kv(dataclasses.replace(config, bucket=bucket, metadata={OWNER: app.name}))


def _start(demo: Demo, spark: SparkSession) -> StreamingQuery:
    from jetspark.spark import run

    return run(
        RELEASE_1,
        spark,
        demo.place.url,
        checkpoint=str(demo.folder / "checkpoint"),
        buckets=demo.spark_buckets,
        until_now=True,
        maxOffsetsPerTrigger=-(-demo.last // BATCHES),
    )


def _check(query: StreamingQuery) -> None:
    """
    Raises:
        UsageError: It has failed; the message is one line, and Java's words are in the log.
    """
    # Asked over a socket to Java, some milliseconds; this is asked a few times a second.
    if not query.isActive and (failure := query.exception()) is not None:
        ours = re.findall(r"jetspark\.errors\.\w+: (.+)", str(failure))
        raise UsageError(f"the query on Spark failed: {ours[-1] if ours else str(failure).splitlines()[0]}")


def _rates(moments: list[Moment], began: float) -> str:
    """The first batch is cold: Java compiles, Python's workers start and import."""
    first, last = moments[0], moments[-1]
    text = f"cold {rate(first.sequence, first.at_s - began)}"
    if last.sequence > first.sequence:
        text += f", warm {rate(last.sequence - first.sequence, last.at_s - first.at_s)}"
    return text


# ---- a session that says nothing, and is gone when it is over --------------------------------------------------------


@asynccontextmanager
async def _session(log: Path) -> AsyncIterator[SparkSession]:
    """Spark on this machine. What Java and its Python workers have to say goes to a file."""
    made: list[SparkSession] = []
    try:
        await finish_in_thread(lambda: made.append(_saying_to(log, _make)))
        yield made[0]
    finally:
        if made:
            await finish_in_thread(lambda: _end(made[0]))


def _make() -> SparkSession:
    from jetspark.spark import session

    return session("jetspark-demo", is_short=True)


def _saying_to(log: Path, work: Callable[[], Any]) -> Any:
    """Do something, and have processes that it starts write their errors to a file."""
    own = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        return work()
    finally:
        os.dup2(own, 2)
        os.close(own)


def _end(spark: SparkSession) -> None:
    """Stop Spark, and wait until Java has ended: it removes its temporary folders then."""
    gateway: Any = spark.sparkContext._gateway  # there is no public way to its process
    try:
        for query in spark.streams.active:
            query.stop()
        spark.stop()
        gateway.shutdown()
    finally:
        gateway.proc.stdin.close()  # Java ends with it
        try:
            gateway.proc.wait(END_S)
        except subprocess.TimeoutExpired:
            gateway.proc.kill()
            gateway.proc.wait()
