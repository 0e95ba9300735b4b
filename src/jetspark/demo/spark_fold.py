"""Stage: fold the events on Spark, into buckets beside those of the live workers.

Spark starts during publishing and ends during the live fold, because both use only one of two cores for seconds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import time
from collections.abc import Callable
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

__all__ = ["SparkBeside", "fold_on_spark", "start_spark"]

BATCHES = 2
"""Number of micro-batches; the first one is cold."""
ATTEMPTS = 3
END_S = 20.0


class SparkBeside:
    """A local Spark that starts and ends during other stages; its output goes to a file."""

    def __init__(self, log: Path) -> None:
        self._made: list[SparkSession] = []
        self.start_s = 0.0
        """Seconds it took to start."""
        self._starting = asyncio.create_task(self._start(log))
        self._ending: asyncio.Task[None] | None = None

    async def _start(self, log: Path) -> None:
        began = time.perf_counter()
        await finish_in_thread(lambda: self._made.append(_saying_to(log, _make)))
        self.start_s = time.perf_counter() - began

    async def session(self) -> SparkSession:
        """Wait until Spark has started.

        Raises:
            ConfigError: Java is missing, or too old.
        """
        await asyncio.shield(self._starting)
        return self._made[0]

    def begin_to_end(self) -> None:
        """Start to end Spark in the background."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())

    async def ended(self) -> None:
        """Wait until Spark has ended completely, in whatever state it is now."""
        self.begin_to_end()
        assert self._ending is not None
        await self._ending

    async def _end(self) -> None:
        await asyncio.wait([self._starting])
        if not self._starting.cancelled():
            self._starting.exception()  # session() raises it
        if self._made:
            await finish_in_thread(lambda: _end(self._made.pop()))


def start_spark(demo: Demo) -> SparkBeside:
    """Start Spark in the background; it ends with the demo at the latest."""
    spark = SparkBeside(demo.folder / "spark.log")
    demo.stack.push_async_callback(spark.ended)
    return spark


async def fold_on_spark(demo: Demo) -> None:
    """Fold all published events; measures start-up, the first batch, and the others."""
    assert demo.spark is not None
    await _make_buckets(demo)
    with demo.screen.stage("start Spark") as stage:
        spark = await demo.spark.session()
        started = f"start-up {demo.spark.start_s:.1f} s, begun beside publishing"
        stage.say(f"Spark {spark.version}; {started}")
    with demo.screen.stage("fold on Spark", demo.last) as stage:
        text = await _fold(demo, stage, spark)
        stage.say(text)
    demo.spark.begin_to_end()
    demo.screen.found("fold on Spark", f"{started}, then {text}")


async def _fold(demo: Demo, stage: DemoStage, spark: SparkSession) -> str:
    """Run the query to its end. A failed query, for instance by a slow start of Python, is resumed up to twice."""
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
    """Create buckets for Spark, configured like those of the live workers, so that both can be compared."""
    app = demo.shop.release1
    demo.spark_buckets = {name: f"{spec.bucket.bucket}_spark" for name, spec in app.projections.items()}
    for name, bucket in demo.spark_buckets.items():
        config = app.projections[name].bucket_config
        await demo.environment.js.create_kv(dataclasses.replace(config, bucket=bucket, metadata={OWNER: app.name}))


def _start(demo: Demo, spark: SparkSession) -> StreamingQuery:
    from jetspark.spark import run

    return run(
        RELEASE_1,
        spark,
        demo.environment.url,
        checkpoint=str(demo.folder / "checkpoint"),
        buckets=demo.spark_buckets,
        until_now=True,
        maxOffsetsPerTrigger=-(-demo.last // BATCHES),
    )


def _check(query: StreamingQuery) -> None:
    """Raise the error of a failed query.

    Raises:
        UsageError: The query has failed. The message is one line; the log has Java's full message.
    """
    # isActive is a round trip to Java, some milliseconds; this runs a few times a second.
    if not query.isActive and (failure := query.exception()) is not None:
        ours = re.findall(r"jetspark\.errors\.\w+: (.+)", str(failure))
        raise UsageError(f"the query on Spark failed: {ours[-1] if ours else str(failure).splitlines()[0]}")


def _rates(moments: list[Moment], began: float) -> str:
    """The rates of the first batch and of the others. The first is cold: Java compiles, Python's workers start."""
    first, last = moments[0], moments[-1]
    text = f"cold {rate(first.sequence, first.at_s - began)}"
    if last.sequence > first.sequence:
        text += f", warm {rate(last.sequence - first.sequence, last.at_s - first.at_s)}"
    return text


# ---- a quiet session, and its complete end ---------------------------------------------------------------------------


def _make() -> SparkSession:
    from jetspark.spark import session

    return session("jetspark-demo", is_short=True)


def _saying_to(log: Path, work: Callable[[], Any]) -> Any:
    """Call ``work`` with stderr redirected to a file, also for processes that it starts."""
    own = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        return work()
    finally:
        os.dup2(own, 2)
        os.close(own)


def _end(spark: SparkSession) -> None:
    """Stop Spark, and wait until Java has ended, because only then are its temporary folders removed."""
    from py4j.protocol import Py4JError

    gateway: Any = spark.sparkContext._gateway  # the process has no public accessor
    try:
        for query in spark.streams.active:
            query.stop()
        spark.stop()
        gateway.shutdown()
    except (Py4JError, OSError):
        pass  # Java is ending already: Ctrl-C or a closed terminal reaches every process of the demo
    finally:
        gateway.proc.stdin.close()  # Java ends with it
        try:
            gateway.proc.wait(END_S)
        except subprocess.TimeoutExpired:
            gateway.proc.kill()
            gateway.proc.wait()
