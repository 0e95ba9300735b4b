"""``jetspark demo``: a million messages through a nats-server of our own, counted, checked and timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jetspark import Client, Subscription, connect
from jetspark.server import NatsServer

__all__ = ["demo"]

SUBJECT = "demo.messages"
PAYLOAD_BYTES = 128

# How far the publisher may be ahead of the subscriber. Core NATS drops what a subscriber is too slow for, and a
# subscription of ours holds 65,536 unread messages by default: staying below that, nothing is ever dropped.
WINDOW = 50_000
# Both sides look at each other, and at the progress bar, once per block.
BLOCK = 1_000
TIMEOUT_S = 60.0
"""Longest time without any progress."""

OnProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How long it took from the first publish on."""

    published_s: float
    """Until the server had confirmed the last message."""
    received_s: float
    """Until the last message was read and checked."""


class Mismatch(Exception):
    """A message is missing, doubled or out of order. Ends this command and is seen by nobody else."""


def demo(
    count: Annotated[int, typer.Option(help="How many messages.", min=1)] = 1_000_000,
) -> None:
    """Publish and receive a million messages through an embedded nats-server, and check that each one arrived."""
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"{count:,} messages of {PAYLOAD_BYTES} bytes, published and received by this one Python process")
    with NatsServer(jetstream=False) as server:
        out.print(f"embedded nats-server at {server.url}", markup=False)
        columns = (TextColumn("received"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
            task = progress.add_task("", total=count)
            try:
                outcome = asyncio.run(move(server.url, count, lambda done: progress.update(task, completed=done)))
            except Mismatch as error:
                out.print(f"failed     {error}", markup=False)
                raise typer.Exit(1) from None
    out.print(f"published  {_rate(count, outcome.published_s)}, the last one confirmed by the server")
    out.print(f"received   {_rate(count, outcome.received_s)}, while publishing")
    out.print("verified   every message arrived exactly once and in order")
    out.print(f"paced      the publisher never ran more than {WINDOW:,} messages ahead, so nothing was dropped")
    out.print("stopped    nats-server has ended")
    out.print("This shows core messaging (at most once, nothing stored). To compare with other clients: jetspark bench")


def _rate(count: int, seconds: float) -> str:
    return f"{count:,} in {seconds:.2f} s = {count / seconds:,.0f} messages/s"


async def move(url: str, count: int, on_progress: OnProgress = lambda received: None) -> Outcome:
    """Send ``count`` numbered messages from one connection to another.

    Raises:
        Mismatch: One did not arrive as it should have.
        ConnectionLost: The server went away; there is no second try, because what was under way would be lost.
    """
    async with (
        connect(url, name="demo-subscriber", reconnect=False) as reader,
        connect(url, name="demo-publisher", reconnect=False) as writer,
    ):
        subscription = await reader.subscribe(SUBJECT)
        await reader.flush()
        pace = _Pace()
        started = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                receiving = tasks.create_task(_receive(subscription, count, pace, on_progress))
                published = await _publish(writer, count, pace)
                # What the server has for us is here once it has answered: a missing or doubled message would show.
                await reader.flush(TIMEOUT_S)
                if subscription.received != count:
                    raise Mismatch(f"{count:,} messages were published, and {subscription.received:,} arrived")
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return Outcome(published - started, receiving.result() - started)


class _Pace:
    """Lets the publisher wait for the subscriber."""

    def __init__(self) -> None:
        self.received = 0
        self._moved = asyncio.Event()

    def advance(self, received: int) -> None:
        self.received = received
        self._moved.set()

    async def until(self, received: int) -> None:
        while self.received < received:
            self._moved.clear()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._moved.wait()
            except TimeoutError:
                raise Mismatch(f"nothing arrived for {TIMEOUT_S:.0f} s after message {self.received:,}") from None


async def _publish(client: Client, count: int, pace: _Pace) -> float:
    filling = b"." * (PAYLOAD_BYTES - 12)
    for start in range(0, count, BLOCK):
        end = min(start + BLOCK, count)
        await pace.until(end - WINDOW)
        for number in range(start, end):
            await client.publish(SUBJECT, b"%012d%b" % (number, filling))
    await client.flush(TIMEOUT_S)
    return time.perf_counter()


async def _receive(subscription: Subscription, count: int, pace: _Pace, on_progress: OnProgress) -> float:
    expected = 0
    async for message in subscription:
        if int(message.data[:12]) != expected or len(message.data) != PAYLOAD_BYTES:
            raise Mismatch(f"message {expected:,} was due, and {message.data[:12]!r} came")
        expected += 1
        if expected % BLOCK == 0:
            pace.advance(expected)
            on_progress(expected)
            if expected % (BLOCK * 10) == 0:
                await asyncio.sleep(0)  # reading never has to wait while messages are here; let the publisher in
        if expected == count:
            break
    finished = time.perf_counter()
    pace.advance(expected)
    on_progress(expected)
    return finished
