"""Stage: rebuild a projection with another fold, during live traffic and reads, and swap it in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import Any

from jetspark.app import AppClient
from jetspark.app.replay import RebuildOptions, RebuildOutcome, ReplayRecord, rebuild, verify
from jetspark.app.replay.verification import read_states
from jetspark.demo.screen import DemoStage
from jetspark.demo.shop import RELEASE_2
from jetspark.demo.stages import Demo, buckets_of, until_folded

__all__ = ["rebuild_beside_traffic"]

PROJECTION = "daily_revenue"
EVENTS_EACH_SECOND, STEP_S = 2000, 0.05
READ_EVERY_S = 0.005
MANY = 1_000_000
"""An upper bound of the events published here."""


async def rebuild_beside_traffic(demo: Demo) -> None:
    """Rebuild revenue with release 2 while release 1 runs, and swap it in; then start workers of release 2."""
    environment, shop = demo.environment, demo.shop
    async with shop.release1.connect(environment.url) as orders:
        reader, traffic = _ViewReader(demo, orders), _Traffic(demo, orders)
        async with _beside(reader.run(), traffic.run()):
            with demo.screen.stage("rebuild and swap", demo.last) as stage:
                await _until_live(demo, stage)
                outcome = await rebuild(
                    environment.js,
                    shop.release2,
                    PROJECTION,
                    RebuildOptions(check=True, swap=True),
                    on_progress=lambda record: _show(stage, record),
                )
                stage.say(f"swapped in {(outcome.swap_s or 0) * 1000:.0f} ms")
            with demo.screen.stage("next release") as stage:
                await _release(demo, stage, outcome)
        published = traffic.published
    with demo.screen.stage("verify it") as stage:
        found = await verify(environment.js, shop.release2, PROJECTION)
        stage.say(f"{found.keys} keys: {'equal to history' if found.is_equal else 'NOT EQUAL to history'}")
    _report(demo, outcome, reader, published, is_equal=found.is_equal)


async def _until_live(demo: Demo, stage: DemoStage) -> None:
    """Wait until the worker folds new events. A worker that is still starting when its version is replaced refuses to
    run."""
    assert demo.worker is not None
    state = (await (await demo.environment.js.stream(demo.shop.release1.stream)).info()).state
    await until_folded(demo, stage, buckets_of(demo.shop.release1), state.last_sequence + 1, demo.worker.check)


def _show(stage: DemoStage, record: ReplayRecord) -> None:
    stage.reached(record.at)


async def _release(demo: Demo, stage: DemoStage, outcome: RebuildOutcome) -> None:
    """Run workers of both versions side by side: each folds only the projections of its own version."""
    old = demo.worker
    assert old is not None
    worker = demo.start_worker(RELEASE_2)
    state = (await (await demo.environment.js.stream(demo.shop.release2.stream)).info()).state
    await until_folded(demo, stage, [outcome.new.bucket], state.last_sequence, worker.check)
    old.check()
    await asyncio.to_thread(old.stop)
    code = old.process.returncode
    demo.screen.found(
        "both releases",
        f"release 1 left revenue to release 2, and ran on until it was stopped: exit code {code}",
        is_good=code == 0,
    )
    stage.say("release 2 runs")


def _report(demo: Demo, outcome: RebuildOutcome, reader: _ViewReader, published: int, *, is_equal: bool) -> None:
    found = demo.screen.found
    is_verified = outcome.verification is not None and outcome.verification.is_equal
    found(
        "rebuild, new fold",
        f"{outcome.record.events:,} of the events are revenue: folded beside live traffic, verified, swapped in "
        f"{(outcome.swap_s or 0) * 1000:.0f} ms",
        is_good=outcome.is_swapped and is_verified,
    )
    found(
        "reads meanwhile",
        f"{reader.reads:,} reads while {published:,} events came: {reader.gaps} gaps, {reader.older} older values",
        is_good=reader.reads > 0 and not reader.gaps and not reader.older,
    )
    found(
        "verify",
        "the new state equals a fresh fold of history" if is_equal else "it differs from a fresh fold of history",
        is_good=is_equal,
    )


class _Traffic:
    """Publishes customers' events during the stage."""

    def __init__(self, demo: Demo, orders: AppClient) -> None:
        self._demo, self._orders = demo, orders
        self.published = 0

    async def run(self) -> None:
        events = self._events()
        async with self._orders.bulk() as bulk:
            while True:
                began = time.perf_counter()
                count = int(EVENTS_EACH_SECOND * STEP_S)
                await bulk.publish_many(list(islice(events, count)))
                self.published += count
                await asyncio.sleep(max(0.0, began + STEP_S - time.perf_counter()))

    def _events(self) -> Iterator[Any]:
        traffic = self._demo.shop.traffic
        for event in traffic.history(MANY, traffic.Tally(), seed=7, prefix="t"):
            if event.event_type != "order.cancelled":  # so that the number of dead letters is known
                yield event


class _ViewReader:
    """Reads one key of the view repeatedly, and counts gaps and older values."""

    def __init__(self, demo: Demo, orders: AppClient) -> None:
        self._demo, self._view = demo, orders.view(PROJECTION)
        self.reads = self.gaps = self.older = 0

    async def run(self) -> None:
        bucket = self._demo.shop.release1.projections[PROJECTION].bucket.bucket
        key = min(await read_states(self._demo.environment.js, bucket))
        seen = 0
        while True:
            entry = await self._view.entry(tuple(key.split(".")))
            self.reads += 1
            self.gaps += entry.state is None
            self.older += entry.sequence < seen
            seen = max(seen, entry.sequence)
            await asyncio.sleep(READ_EVERY_S)


@asynccontextmanager
async def _beside(*works: Any) -> AsyncIterator[None]:
    """Run coroutines during the block; their errors fail the block."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
