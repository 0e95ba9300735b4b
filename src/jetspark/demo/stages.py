"""What the stages of the demo share: where they are, what they made, and how far a bucket is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspark.app.replay.live_bucket import stored_position
from jetspark.demo.place import Place
from jetspark.demo.screen import DemoStage, Screen
from jetspark.demo.shop import Shop
from jetspark.demo.workers import WorkerProcess
from jetspark.errors import JetSparkError, RequestTimeout

if TYPE_CHECKING:
    from jetspark.app import App
    from jetspark.demo.spark_fold import SparkBeside

__all__ = ["Demo", "Moment", "buckets_of", "rate", "until_folded"]

POLL_S = 0.1
"""Each look asks every bucket, so that looking more often takes some of the time that is measured."""
ANSWER_S = 2.0
"""How long to wait for how far a bucket is: the server may be killed meanwhile."""
STUCK_S = 180.0
"""A fold that does not go on for this long does not go on at all."""


@dataclass(slots=True)
class Demo:
    """One run."""

    screen: Screen
    shop: Shop
    place: Place
    folder: Path
    """For logs and checkpoints; removed at the end."""
    stack: AsyncExitStack
    """What is to be ended at the end."""
    count: int
    """Events to publish."""
    tally: Any
    """What they come to, counted where they are made."""
    last: int = 0
    """The sequence of the last of them."""
    worker: WorkerProcess | None = None
    spark: SparkBeside | None = None
    spark_buckets: dict[str, str] = field(default_factory=dict)
    """By projection: where Spark has folded to."""

    def start_worker(self, app: str) -> WorkerProcess:
        """Start one that is ended with the demo."""
        self.worker = WorkerProcess(app, self.place.url, self.shop.folder, self.folder / "workers.log")
        self.stack.push_async_callback(asyncio.to_thread, self.worker.stop)
        return self.worker


@dataclass(frozen=True, slots=True)
class Moment:
    """How far a fold was, and when."""

    at_s: float
    sequence: int


def buckets_of(app: App) -> list[str]:
    return [spec.bucket.bucket for spec in app.projections.values()]


def rate(count: float, seconds: float) -> str:
    return f"{count / max(seconds, 1e-9):,.0f}/s"


async def until_folded(
    demo: Demo, stage: DemoStage, buckets: Sequence[str], sequence: int, is_alive: Callable[[], None]
) -> list[Moment]:
    """Wait until buckets have every event up to a sequence; returns when they were how far.

    Args:
        is_alive: Raises if nobody folds any more.

    Raises:
        RequestTimeout: Nothing was folded for three minutes.
    """
    js = demo.place.client.jetstream(timeout=ANSWER_S)
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
            raise RequestTimeout(f"{', '.join(buckets)} stand at sequence {seen} for {STUCK_S:.0f} s", STUCK_S)
        await asyncio.sleep(POLL_S)
    return moments
