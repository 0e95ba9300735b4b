"""A worker process for tests: one callback of the application ends it, once for one event, and always for another."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from jetspark.app import App, Command, CommandAnswered, Decision, Event, LiveOptions, Past, Retry
from jetspark.app.workflows import workflow_handlers

ATTEMPTS = 3
ONCE, POISON = "c", "b"
"""The keys of the events that end the process the first time, and each time."""
CALLBACKS = {
    "handler": "one",
    "event_id": "one",
    "batch": "many",
    "react": "flow",
    "projection_key": "totals",
    "projection_apply": "totals",
    "reads": "count",
    "decide": "count",
}
"""Where the process may end, and the part of the application that it runs then: others would begin each time, too."""
ONLY_ONCE = ("sent_decide", "lifespan")
"""Where it ends for one event alone, and runs everything."""


class Total(msgspec.Struct, frozen=True):
    count: int = 0


class Noted(Event, type="noted", key="word", subject="deaths.noted.{word}"):
    word: str
    number: int


class Copied(Event, type="copied", key="word", subject="deaths.copied.{word}"):
    word: str
    number: int

    def event_id(self) -> str:
        end_at("event_id", self.word, self.number)
        return f"copy of {self.word} {self.number}"


class Counted(Event, type="counted", key="word", subject="deaths.counted.{word}"):
    word: str


def end_at(place: str, word: str, number: int = 0) -> None:
    """End the process, if this is the place and the event."""
    if len(sys.argv) < 4 or sys.argv[3] != place or number or word not in (ONCE, POISON):
        return
    mark = Path(f"{sys.argv[2]}.died")
    if (word == ONCE and mark.exists()) or (word == POISON and place in ONLY_ONCE):
        return
    if word == ONCE:
        mark.touch()
    tell("died", word)
    os._exit(1)


def tell(what: str, *fields: Any) -> None:
    with Path(sys.argv[2]).open("a") as log:
        log.write(json.dumps([what, *fields]) + "\n")


class Count(Command):
    word: str
    prefix: str = ""

    def reads(self) -> list[str]:
        end_at(f"{self.prefix}reads", self.word)
        return [f"deaths.counted.{self.word}"]

    def decide(self, past: Past) -> Counted:
        end_at(f"{self.prefix}decide", self.word)
        return Counted(word=self.word)


def make_app() -> App:
    app = App("deaths", stream="DEATHS", subjects=["deaths.>"], events=[Copied, Counted])
    policy: Any = {"retry": Retry(attempts=ATTEMPTS, first_s=0.01), "ack_wait_s": 1.0}
    one_by_one: Any = policy | {"concurrency": 1}
    app.command("count")(Count)

    @app.lifespan
    async def resource() -> AsyncIterator[Total]:
        end_at("lifespan", ONCE)
        yield Total()

    @app.handler(Noted, durable="one", **one_by_one)
    async def handle(event: Noted, resource: Total) -> Copied:
        end_at("handler", event.word, event.number)
        tell("one", event.word, event.number)
        return Copied(word=event.word, number=event.number)

    @app.batch_handler(Noted, durable="many", batch=4, **policy)
    async def handle_many(events: list[Noted]) -> None:
        for event in events:
            end_at("batch", event.word, event.number)
        for event in events:
            tell("many", event.word, event.number)

    @app.workflow("flow", key="word", **one_by_one)
    class Flow:
        def react(self, state: Total | None, event: Noted | CommandAnswered) -> Decision | None:
            if isinstance(event, CommandAnswered):
                tell("answered", event.word)  # type: ignore[attr-defined]
                return None
            end_at("react", event.word, event.number)
            tell("flow", event.word, event.number)
            if state is None:
                return Decision(state=Total(1), commands={"count": Count(word=event.word, prefix="sent_")})
            return Decision(state=Total(state.count + 1))

    @app.projection("totals", events=[Noted], bucket="totals")
    class Totals:
        def key(self, event: Noted) -> str:
            end_at("projection_key", event.word, event.number)
            return event.word

        def apply(self, state: Total | None, event: Noted) -> Total:
            end_at("projection_apply", event.word, event.number)
            return Total((state.count if state else 0) + 1)

    return app


def serve() -> None:
    """Run the application, in one process after the other; all of them are forks, which need no imports."""
    # For as long the next worker waits for a command that another one has sent and not heard of.
    workflow_handlers.CALL_TIMEOUT_S, workflow_handlers.SENDING_TIMEOUT_S = 0.5, 1.0
    app, only = make_app(), [CALLBACKS[sys.argv[3]]] if sys.argv[3] in CALLBACKS else []
    while True:
        if (child := os.fork()) == 0:
            asyncio.run(app.run(sys.argv[1], only=only, stop_timeout=5.0, live=LiveOptions(lease_s=1.0)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        tell("ended", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    serve()
