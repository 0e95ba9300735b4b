"""Stage: fold the same events live, kill the worker and the server on the way, and go on."""

from __future__ import annotations

import time

from jetspark.demo.screen import DemoStage
from jetspark.demo.shop import RELEASE_1
from jetspark.demo.stages import Demo, Moment, buckets_of, rate, until_folded
from jetspark.server.process import finish_in_thread

__all__ = ["fold_live"]

KILL_WORKER_AT, KILL_SERVER_AT = 0.35, 0.7
"""Parts of the events."""


async def fold_live(demo: Demo) -> None:
    with demo.screen.stage("fold live", demo.last) as stage:
        began = time.perf_counter()
        worker = demo.start_worker(RELEASE_1)
        moments = await _until(demo, stage, int(demo.last * KILL_WORKER_AT))
        first, last = moments[0], moments[-1]
        text = f"start-up {first.at_s - began:.1f} s, then {_rate_of(first, last, began)}"

        stage.say("worker killed; another one starts")
        worker.kill()
        killed_at = time.perf_counter()
        demo.start_worker(RELEASE_1)
        next_one = (await _until(demo, stage, min(last.sequence + 1, demo.last)))[-1]
        took_over_s = next_one.at_s - killed_at

        crash = await _kill_server(demo, stage)
        await _until(demo, stage, demo.last)
        stage.say(text)
    demo.screen.found("fold live", text)
    demo.screen.found(
        "kill a worker",
        f"kill -9 at event {last.sequence:,}: the next one went on from there {took_over_s:.1f} s later",
    )
    if crash is None:
        demo.screen.found("kill the server", "not tried: the server is yours", is_good=None)
    else:
        demo.screen.found("kill the server", crash)


async def _kill_server(demo: Demo, stage: DemoStage) -> str | None:
    """End the server the hard way, and start it; returns what happened, None if it is not ours to kill."""
    server = demo.place.server
    if server is None:
        return None
    at = (await _until(demo, stage, int(demo.last * KILL_SERVER_AT)))[-1].sequence
    stage.say("server killed; it starts again")
    killed_at = time.perf_counter()
    await finish_in_thread(server.kill)
    await finish_in_thread(server.start)
    ready_s = time.perf_counter() - killed_at
    went_on = (await _until(demo, stage, min(at + 1, demo.last)))[-1]
    return (
        f"kill -9 at event {at:,}: back after {ready_s:.1f} s, and the fold went on by itself after "
        f"{went_on.at_s - killed_at:.1f} s"
    )


async def _until(demo: Demo, stage: DemoStage, sequence: int) -> list[Moment]:
    assert demo.worker is not None
    return await until_folded(demo, stage, buckets_of(demo.shop.release1), sequence, demo.worker.check)


def _rate_of(first: Moment, last: Moment, began: float) -> str:
    """Of the events after those that were there at the first look."""
    if last.sequence > first.sequence:
        return rate(last.sequence - first.sequence, last.at_s - first.at_s)
    return f"{rate(last.sequence, last.at_s - began)} with it"
