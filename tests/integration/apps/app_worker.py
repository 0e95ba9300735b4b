"""A worker process for tests: it writes what it does to a file, and kills itself at a named step."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from jetspark.app import App, Context, Event, Reject, Retry, RetryIn
from jetspark.app.handlers.handler_worker import HandlerWorker

APP = App("crashing", stream="CRASHING", subjects=["placed.>"])
LOG: Any = None


class Placed(Event, type="order.placed", key="order_id", subject="placed.{order_id}"):
    order_id: str
    number: int


def note(what: str, **fields: Any) -> None:
    # One write: two processes never mix their lines, and what is written survives a SIGKILL.
    os.write(LOG, (json.dumps({"what": what, **fields}) + "\n").encode())


def is_mended() -> bool:
    return Path(f"{sys.argv[2]}.mended").exists()


async def effect(name: str) -> str:
    note("effect", effect=name)
    return f"done {name}"


RETRY = Retry(attempts=5, first_s=0.02, in_lane_s=0.5)


@APP.handler(Placed, durable="shipping", timeout=2.0, ack_wait_s=2.0, concurrency=4, retry=RETRY)
async def ship(event: Placed, ctx: Context) -> None:
    key, number = event.order_id, event.number
    note("begun", key=key, number=number)
    if key == "slow":
        await asyncio.sleep(1.0)
    if key == "a" and number == 1 and ctx.attempt == 1:
        raise OSError("a short wait")
    if key == "b" and number == 1 and ctx.attempt == 1:
        raise RetryIn(1.0)
    if key == "c" and number == 1 and not is_mended():
        raise Reject("a letter")
    await ctx.once("ship", effect, f"{key}{number}")
    note("done", key=key, number=number)


def crash_at(place: str) -> None:
    """Die before or after a step has had its effect, once."""
    when, name = place.split()
    perform, call = HandlerWorker._perform, HandlerWorker.run_handler

    def die() -> None:
        note("died", place=place)
        os.kill(os.getpid(), signal.SIGKILL)

    async def mortal_perform(self: HandlerWorker, step: Any) -> Any:
        is_it = type(step).__name__ == name
        if is_it and when == "before":
            die()
        answer = await perform(self, step)
        if is_it and when == "after":
            await self.client.flush()
            die()
        return answer

    async def mortal_call(self: HandlerWorker, item: Any) -> Any:
        answer = await call(self, item)
        if name == "RunHandler" and item.sequence == 7:
            die()
        return answer

    HandlerWorker._perform = mortal_perform  # type: ignore[method-assign]
    HandlerWorker.run_handler = mortal_call  # type: ignore[method-assign]


if __name__ == "__main__":
    LOG = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND)
    if sys.argv[3]:
        crash_at(sys.argv[3])
    asyncio.run(APP.run(sys.argv[1], stop_timeout=5.0))
