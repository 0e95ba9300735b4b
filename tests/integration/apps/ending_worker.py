"""Applications in one process, for tests of how it ends: ``ending_worker.py <case> <url>``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

from jetspark.app import App, Command, Event

LONG_S = 600.0
"""Longer than a test waits."""


class Note(Event, type="note", key="name", subject="note.{name}"):
    name: str


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def make_app(name: str) -> App:
    app = App(name, stream="NOTES", subjects=["note.>"] if name == "one" else [])

    @app.handler(Note, durable=f"handler-{name}")
    async def handle(event: Note) -> None:
        say(f"handled {name}")

    @app.projection(f"names-{name}", events=[Note], bucket=f"names_{name}")
    class Names:
        def key(self, event: Note) -> str:
            return event.name

        def apply(self, state: Any, event: Note) -> Any:
            return {"name": event.name}

    if name == "one":

        @app.command("note.do")
        class Do(Command):
            name: str

            def reads(self) -> list[str]:
                return ["note.>"]

            def decide(self, past: Any) -> list[Any]:
                return []

    @app.lifespan
    async def told() -> AsyncIterator[App]:
        if "JETSPARK_TESTS_OPENING" in os.environ:
            say("opening")
            await asyncio.Event().wait()
        yield app
        say(f"ended {name}")

    return app


ONE, TWO = make_app("one"), make_app("two")


def host(number: int, frame: Any) -> None:
    say(f"host {signal.Signals(number).name}")


async def run(url: str, *apps: App, **options: Any) -> None:
    await asyncio.gather(*(app.run(url, stop_timeout=LONG_S, drain_timeout_s=LONG_S, **options) for app in apps))


async def run_in_host(url: str) -> None:
    """Two applications, in a program with handlers of its own: Python's, and the event loop's."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, say, "loop SIGINT")
    await run(url, ONE, TWO)
    say(f"restored {signal.getsignal(signal.SIGTERM) is host}")
    signal.raise_signal(signal.SIGINT)
    await asyncio.sleep(0.1)


async def run_without_signals(url: str) -> None:
    """The program ends the application by cancelling it."""
    task = asyncio.create_task(run(url, ONE, signals=False))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.wait([task])
    say(f"cancelled {task.cancelled()}")


if __name__ == "__main__":
    case, url = sys.argv[1:]
    if case == "host":
        signal.signal(signal.SIGTERM, host)
        asyncio.run(run_in_host(url))
    elif case == "own":
        asyncio.run(run_without_signals(url))
    else:
        asyncio.run(run(url, ONE, apply=case == "apply"))
