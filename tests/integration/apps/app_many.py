"""The application of the demonstration: it notes what it does in files, one for each process.

A tenth of the attempts fail at random, some events for ever. Each event has an effect of ``once``. Some count in a
transaction of another handler, too: atomic batches are the slow part of a server with one replica.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from jetspark.app import App, Context, Event, Reject, Retry, RetryIn, Skip

app = App("many", stream="MANY", subjects=["many.>"])

FOLDER = Path(os.environ.get("JETSPARK_MANY", "."))
PARTITIONS = 12
_file: Any = None


class Happened(Event, type="happened", key="name", subject="many.{name}.happened"):
    name: str
    number: int


class Counted(Event, type="counted", key="name", subject="many.{name}.counted"):
    name: str
    number: int


@app.lifespan
async def notes() -> AsyncIterator[None]:
    """The file is there as soon as the process is ready, before it has anything to note."""
    global _file
    _file = os.open(FOLDER / f"{os.getpid()}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    yield None


def note(what: str, event: Happened | Counted, **fields: Any) -> None:
    # One write: what is written survives a SIGKILL.
    line = [what, event.name, event.number, time.monotonic_ns(), *fields.values()]
    os.write(_file, (json.dumps(line) + "\n").encode())


def luck_of(handler: str, event: Happened | Counted, attempt: int) -> float:
    """Between 0 and 1, the same in every process."""
    digest = hashlib.blake2b(f"{handler} {event.name} {event.number} {attempt}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) / 2**32


def is_skipped(handler: str, event: Happened | Counted) -> bool:
    return 0.001 <= luck_of(handler, event, 0) < 0.003


def fail_at_random(handler: str, event: Happened | Counted, ctx: Context) -> None:
    luck = luck_of(handler, event, ctx.attempt)
    if luck_of(handler, event, 0) < 0.001:
        raise Reject("never")
    if is_skipped(handler, event):
        raise Skip("not ours")
    if luck < 0.003:
        raise RetryIn(1.0)  # longer than it may wait in its lane: stored, and the key is parked
    if luck < 0.1:
        raise OSError("away for a moment")


async def effect(event: Happened | Counted, *, idempotency_key: str) -> int:
    note("effect", event, key=idempotency_key)
    return event.number


# Many: an event whose workers are killed each time uses them up, too.
RETRY = Retry(attempts=30, first_s=0.01, max_s=0.2, in_lane_s=0.5)
COMMON: dict[str, Any] = {
    "partitions": PARTITIONS,
    "takeover_s": 1.0,
    "ack_wait_s": 2.0,
    # Whatever a killed worker held waits for its ack_wait, and its keys with it: so hold few.
    "max_messages": 16 * PARTITIONS,
    "retry": RETRY,
    "timeout": 5.0,
}


@app.handler(Happened, Counted, durable="once", **COMMON)
async def run_once(event: Happened | Counted, ctx: Context) -> None:
    note("begun", event)
    try:
        fail_at_random("once", event, ctx)
    except Skip:
        note("skipped", event)
        raise
    await ctx.once("effect", effect, event)
    note("done", event)


@app.handler(Counted, durable="sums", idempotent="transaction", bucket="sums", **COMMON)
async def add(event: Counted, ctx: Context) -> None:
    fail_at_random("sums", event, ctx)
    numbers = json.loads(await ctx.tx.get(event.name) or b"[]")
    await ctx.tx.put(event.name, json.dumps([*numbers, event.number]).encode())
