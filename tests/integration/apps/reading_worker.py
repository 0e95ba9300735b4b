"""A worker process for tests: reading one event ends it, in the code of the application that is named."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from jetspark.app import App, Event, Retry, upcast

ATTEMPTS = 4
POISON = ("b", 2)


def read(place: str, key: str, number: int) -> None:
    """What the code of the application does while it reads an event; once it is mended, no ending is named."""
    if len(sys.argv) < 5 or sys.argv[3] != place or not sys.argv[4] or (key, number) != POISON:
        return
    os.write(LOG, (json.dumps({"what": "died"}) + "\n").encode())
    if sys.argv[4] == "os._exit":
        os._exit(7)
    if sys.argv[4] == "GeneratorExit":
        raise GeneratorExit
    sys.exit("the code of the application ends the process")


LOG: Any = None


class Read(Event, type="read", version=2, key="name", subject="read.{name}"):
    name: str
    number: int

    def __post_init__(self) -> None:
        read("post_init", self.name, self.number)


@upcast(Read, from_version=1)
def _(old: dict[str, Any]) -> dict[str, Any]:
    read("upcast", old["name"], old["number"])
    return old


def key_of(event: Any) -> str:
    read("key", event.name, event.number)
    return str(event.name)


async def handle(event: Read) -> None:
    os.write(LOG, (json.dumps({"what": "done", "key": event.name, "number": event.number}) + "\n").encode())


def make_app(place: str, partitions: int | None, attempts: int = ATTEMPTS) -> App:
    app = App("reading", stream="READING", subjects=["read.>"])
    key = key_of if place == "key" else None
    retry = Retry(attempts=attempts)
    app.handler(Read, durable="reader", key=key, ack_wait_s=1.0, retry=retry, partitions=partitions)(handle)
    return app


if __name__ == "__main__":
    LOG = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND)
    APP = make_app(sys.argv[3], int(sys.argv[5]) or None, int(sys.argv[6]))
    asyncio.run(APP.run(sys.argv[1], stop_timeout=5.0))
