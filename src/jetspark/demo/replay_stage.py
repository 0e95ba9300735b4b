"""Stage: replay a part of history into a state that includes it already."""

from __future__ import annotations

from jetspark.app.replay import ReplayRecord, ReplayRequest, run_replay
from jetspark.demo.stages import Demo

__all__ = ["replay_range"]

MAX_EVENTS = 20_000


async def replay_range(demo: Demo) -> None:
    first = demo.last // 4 + 1
    last = min(first + MAX_EVENTS - 1, demo.last // 2)
    with demo.screen.stage("replay a range", last - first + 1) as stage:

        def show(record: ReplayRecord) -> None:
            stage.reached(max(0, record.at - first + 1))

        request = ReplayRequest(from_seq=first, to_seq=last)
        done = await run_replay(demo.environment.js, demo.shop.release1, "order_status", request, on_progress=show)
        stage.say(f"{done.changed} keys changed")
    demo.screen.found(
        "replay a range",
        f"events {first:,} to {last:,}, of {done.keys:,} orders: "
        + ("nothing changed, the state includes them all" if not done.changed else f"{done.changed} keys CHANGED"),
        is_good=done.is_done and not done.changed,
    )
