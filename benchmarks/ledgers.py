"""An application with one command, for the benchmark of commands.

``python -m benchmarks.ledgers URL REPLICAS`` is a worker, which prints a line when it serves and ends when its
standard input does.
"""

from __future__ import annotations

import asyncio
import sys

from jetspark.aio import connect
from jetspark.app import App, Command, Event, Past
from jetspark.errors import NoResponders
from jetspark.jetstream.config import StreamConfig

__all__ = ["Enter", "Entered", "ledgers"]


class Entered(Event, type="ledger.entered", key="ledger", subject="bench-ledgers.{ledger}"):
    ledger: str
    number: int
    note: str


class Enter(Command):
    """The next entry: its number depends on those before it."""

    ledger: str
    note: str

    def reads(self) -> list[str]:
        return [f"bench-ledgers.{self.ledger}"]

    def decide(self, past: Past) -> list[Event]:
        return [Entered(ledger=self.ledger, number=len(past) + 1, note=self.note)]


def ledgers(replicas: int = 1) -> App:
    """The application; its stream has ``replicas`` replicas."""
    config = StreamConfig(name="BENCH_LEDGERS", subjects=["bench-ledgers.>"], replicas=replicas)
    app = App("bench-ledgers", stream=config, events=[Entered])
    app.command("enter")(Enter)
    return app


async def _serve(url: str, app: App) -> None:
    running = asyncio.create_task(app.run(url))
    async with connect(url) as client:
        while not running.done():
            try:
                await client.request(f"$SRV.PING.{app.name}", timeout=10.0)
                break
            except NoResponders:
                await asyncio.sleep(0.02)
    print("ready", flush=True)
    ending = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([running, ending], return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    await asyncio.wait([running])


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], ledgers(int(sys.argv[2]))))
