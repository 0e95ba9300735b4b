"""What dead letters cost an operator, by their number: ``python tools/dead_letter_cost.py [EVENTSxKEYS ...]``.

A server of its own with streams on disk. A worker in this process fails each event of an application, or only the first
of each key where there are fewer keys than events, so the dead letters and the parked keys are what workers write. Then
it times a list, a list of one key, a dry run, a redrive that requests all of them, and the worker that handles what was
requested. By default 30,000 dead letters, each of a key of its own and ten to a key.

Each line has the seconds, the processor time of this process, and the rate. Processor time hardly depends on what else
the machine does; seconds do.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from jetspark.app import App, AppClient, Event, Reject
from jetspark.app.topology.names import dead_letter_stream
from jetspark.server import NatsServer

SIZES = ("30000x30000", "30000x3000")
GIVE_UP_S = 1800.0


class Filed(Event, type="filed", key="name", subject="files.{name}"):
    name: str
    number: int


class Files:
    """An application whose handler fails until it is repaired."""

    def __init__(self) -> None:
        self.app = App("files", stream="FILES", subjects=["files.>"])
        self.is_repaired = False
        self.done = self.wanted = 0
        self.has_all = asyncio.Event()
        self.app.handler(Filed, durable="work")(self.work)

    async def work(self, event: Filed) -> None:
        if not self.is_repaired:
            raise Reject("not yet")
        self.done += 1
        if self.done == self.wanted:
            self.has_all.set()


async def timed(what: str, count: int, work: Coroutine[Any, Any, Any]) -> None:
    began, cpu = time.perf_counter(), time.process_time()
    found = await work
    elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(f"  {what:9} {elapsed:8.3f} s  {cpu:7.3f} s cpu  {count / elapsed:9,.0f}/s  {found}", flush=True)


@asynccontextmanager
async def running(files: Files, url: str) -> AsyncIterator[None]:
    worker = asyncio.create_task(files.app.run(url))
    try:
        yield
    finally:
        worker.cancel()
        await asyncio.wait([worker])


async def measure(events: int, keys: int) -> None:
    files = Files()
    with NatsServer() as server:
        await files.app.apply(server.url)
        async with files.app.connect(server.url) as client:
            async with client.bulk() as bulk:
                await bulk.publish_many(Filed(name=f"k{number % keys}", number=number) for number in range(events))
            async with running(files, server.url):
                await timed("written", events, written(client, events))
            await timed("list", events, count(client))
            await timed("one key", 1, count(client, key="k7"))
            await timed("dry run", events, client.dead_letters.redrive(dry_run=True))
            await timed("redrive", keys, client.dead_letters.redrive())
            files.is_repaired = True
            async with running(files, server.url):
                await timed("handled", events, handled(files, events))


async def count(client: AppClient, key: str | None = None) -> int:
    return sum([1 async for _ in client.dead_letters.list(key=key)])


async def written(client: AppClient, events: int) -> int:
    """Read the dead letters as they are written, until there is one of each event."""
    stream = await client.js.stream(dead_letter_stream(client.app.name))
    found = 0
    async with asyncio.timeout(GIVE_UP_S):
        async for _ in stream.ordered_consumer(headers_only=True).messages():
            found += 1
            if found == events:
                break
    return found


async def handled(files: Files, events: int) -> int:
    """Wait until the handler has handled all of them."""
    files.wanted = events
    async with asyncio.timeout(GIVE_UP_S):
        await files.has_all.wait()
    return files.done


def main() -> None:
    logging.getLogger("jetspark").setLevel(logging.CRITICAL)
    for size in sys.argv[1:] or SIZES:
        events, keys = map(int, size.split("x"))
        print(f"{events:,} dead letters of {keys:,} keys", flush=True)
        asyncio.run(measure(events, keys))


if __name__ == "__main__":
    main()
