"""The state that the stages of the demo share, and waiting for the position of a bucket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspark.app.replay.live_bucket import stored_position
from jetspark.demo.environment import DemoEnvironment
from jetspark.demo.screen import DemoStage, Screen
from jetspark.demo.shop import Shop
from jetspark.demo.workers import WorkerProcess
from jetspark.errors import JetSparkError, RequestTimeout

if TYPE_CHECKING:
    from jetspark.app import App
    from jetspark.demo.spark_fold import SparkBeside

__all__ = ["Demo", "Moment", "buckets_of", "rate", "until_folded"]

POLL_S = 0.1
"""Each poll reads every bucket; polling more often would slow the measured work down."""
ANSWER_S = 2.0
"""Time limit for reading a position; short, because the server may be killed at the time."""
STUCK_S = 180.0
"""A fold without progress for this long is considered stuck."""


@dataclass(slots=True)
class Demo:
    """The state of one run of the demo."""

    screen: Screen
    shop: Shop
    environment: DemoEnvironment
    folder: Path
    """For logs and checkpoints; removed at the end."""
    stack: AsyncExitStack
    """Clean-up calls for the end of the demo."""
    count: int
    """Events to publish."""
    tally: Any
    """The expected sums, counted by the publisher."""
    last: int = 0
    """The sequence of the last published event."""
    worker: WorkerProcess | None = None
    spark: SparkBeside | None = None
    spark_buckets: dict[str, str] = field(default_factory=dict)
    """The buckets into which Spark folds, by projection."""

    def start_worker(self, app: str) -> WorkerProcess:
        """Start a worker that ends with the demo, at the latest."""
        self.worker = WorkerProcess(app, self.environment.url, self.shop.folder, self.folder / "workers.log")
        self.stack.push_async_callback(asyncio.to_thread, self.worker.stop)
        return self.worker


@dataclass(frozen=True, slots=True)
class Moment:
    """The position of a fold at a time."""

    at_s: float
    sequence: int


def buckets_of(app: App) -> list[str]:
    return [spec.bucket.bucket for spec in app.projections.values()]


def rate(count: float, seconds: float) -> str:
    return f"{count / max(seconds, 1e-9):,.0f}/s"


async def until_folded(
    demo: Demo, stage: DemoStage, buckets: Sequence[str], sequence: int, is_alive: Callable[[], None]
) -> list[Moment]:
    """Wait until all buckets have folded every event up to a sequence; returns their progress over time.

    Args:
        is_alive: Raises if the worker or query has ended.

    Raises:
        RequestTimeout: No progress for ``STUCK_S`` seconds.
    """
    js = demo.environment.client.jetstream(timeout=ANSWER_S)
    moments: list[Moment] = []
    seen_at, seen = time.perf_counter(), -1
    while seen < sequence:
        is_alive()
        try:
            reached = min([(await stored_position(js, bucket)).sequence or 0 for bucket in buckets])
        except JetSparkError as error:
            if not error.may_pass:
                raise
            reached = seen
        now = time.perf_counter()
        if reached > seen:
            seen_at, seen = now, reached
            if reached:
                moments.append(Moment(now, reached))
            stage.reached(min(reached, demo.last))
        elif now - seen_at > STUCK_S:
            what = f"progress of {', '.join(buckets)} beyond sequence {seen}"
            raise RequestTimeout(what, STUCK_S)
        await asyncio.sleep(POLL_S)
    return moments
