"""Stage: fold the same events live, and kill the server and the worker in the course of it."""

from __future__ import annotations

import asyncio
import time

from jetspark.demo.screen import DemoStage
from jetspark.demo.shop import RELEASE_1
from jetspark.demo.stages import Demo, Moment, buckets_of, rate, until_folded
from jetspark.server.process import finish_in_thread

__all__ = ["fold_live"]

KILL_SERVER_AT, KILL_WORKER_AT = 0.1, 0.4
"""Shares of the events. With this backlog a worker stores its progress every two seconds, so both kills come later."""
ARRIVAL_S = 0.2
START_S = 120.0


async def fold_live(demo: Demo) -> None:
    with demo.screen.stage("fold live", demo.last) as stage:
        began = time.perf_counter()
        await demo.start_worker(RELEASE_1).started(START_S)
        started_at = time.perf_counter()
        reached = (await _until(demo, stage, int(demo.last * KILL_SERVER_AT)))[-1]
        speed = f"start-up {started_at - began:.1f} s, then {rate(reached.sequence, reached.at_s - started_at)}"
        server_crash = await _kill_server(demo, stage)
        await _until(demo, stage, int(demo.last * KILL_WORKER_AT))
        worker_crash = await _kill_worker(demo, stage)
        await _until(demo, stage, demo.last)
        stage.say(speed)
    demo.screen.found("fold live", speed)
    if server_crash is None:
        demo.screen.found("kill the server", "not tried: the server is yours", is_good=None)
    else:
        demo.screen.found("kill the server", server_crash)
    demo.screen.found("kill a worker", worker_crash)


async def _kill_server(demo: Demo, stage: DemoStage) -> str | None:
    """Kill the server and start it again; returns the row's text, None if the server is not the demo's."""
    server = demo.environment.server
    if server is None:
        return None
    stage.say("server killed; it starts again")
    killed_at = time.perf_counter()
    await finish_in_thread(server.kill)
    await finish_in_thread(server.start)
    ready_s = time.perf_counter() - killed_at
    at = (await _until(demo, stage, 1))[-1].sequence
    if at >= demo.last:
        return f"kill -9 after the last event, {at:,}: back after {ready_s:.1f} s, and nothing is lost"
    went_on_s = (await _until(demo, stage, at + 1))[-1].at_s - killed_at
    return (
        f"kill -9 at event {at:,}: back after {ready_s:.1f} s, and the fold continued by itself after {went_on_s:.1f} s"
    )


async def _kill_worker(demo: Demo, stage: DemoStage) -> str:
    """Kill the worker and start another one; returns the row's text."""
    assert demo.worker is not None
    stage.say("worker killed; another one starts")
    demo.worker.kill()
    killed_at = time.perf_counter()
    demo.start_worker(RELEASE_1)
    # Messages of the dead worker arrive within this time. The next worker waits for its lease, which takes longer.
    await asyncio.sleep(ARRIVAL_S)
    at = (await _until(demo, stage, 1))[-1].sequence
    if at >= demo.last:
        return f"kill -9 after the last event, {at:,}: the next worker had nothing to do"
    took_over_s = (await _until(demo, stage, at + 1))[-1].at_s - killed_at
    return f"kill -9 at event {at:,}: the next worker continued there {took_over_s:.1f} s later"


async def _until(demo: Demo, stage: DemoStage, sequence: int) -> list[Moment]:
    assert demo.worker is not None
    return await until_folded(demo, stage, buckets_of(demo.shop.release1), sequence, demo.worker.check)
