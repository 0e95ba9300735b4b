"""A process that ends inside a callback of the application: nothing is lost, and the rest is processed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from integration.apps.dying_worker import ATTEMPTS, CALLBACKS, ONCE, ONLY_ONCE, POISON, Count, Noted, make_app
from support.apps import is_settled, publish, set_up, until

import jetspark
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, AppClient
from jetspark.app.dead_letters.redriving import DeadLetterFilter, read_dead_letters
from jetspark.app.projections.fold_crashes import FATAL_DEATHS
from jetspark.errors import CommandInDoubt, NoWorkers

WORKER = Path(__file__).parent / "dying_worker.py"
WORDS, NUMBERS = ("a", POISON, ONCE), range(2)
DEAD_LETTERS = {
    "handler": {("one", "open"), ("one", "behind")},
    "event_id": {("one", "open"), ("one", "behind")},
    "batch": {("many", "open")},
    "react": {("flow", "open"), ("flow", "behind")},
    "projection_key": {("projections", "open")},
}
"""What is left of the event that always ends the process, and of the later one of its key."""


def told(log: Path) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(json.loads(line)) for line in log.read_text().splitlines())


@asynccontextmanager
async def served(url: str, log: Path, place: str) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(WORKER),
        url,
        str(log),
        place,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(WORKER.parents[2]), os.environ.get("PYTHONPATH", "")])},
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def dead_letters_of(js: JetStream, app: App) -> set[tuple[str, str, str]]:
    dead_letters = [each.dead_letter for each in await read_dead_letters(js, app, DeadLetterFilter())]
    assert {each.cause.error for each in dead_letters if each.cause is not None} <= {"WorkerDied"}, dead_letters
    return {(each.handler, each.status, json.loads(each.data)["data"].get("word", each.key)) for each in dead_letters}


async def states_of(js: JetStream) -> dict[str, Any]:
    return {key: json.loads(entry.value) for key, entry in (await (await js.kv("totals")).snapshot(WORDS)).items()}


@pytest.mark.slow
@pytest.mark.parametrize("place", [*CALLBACKS, *ONLY_ONCE])
async def test_a_process_that_ends_in_a_callback_loses_nothing_and_gives_up_an_event_that_always_ends_it(
    url: str, tmp_path: Path, place: str
) -> None:
    app, log, part = make_app(), tmp_path / "log", CALLBACKS.get(place)
    log.touch()
    dead_letters = {(*each, POISON) for each in DEAD_LETTERS.get(place, set())}
    events = {(word, number) for word in WORDS for number in NUMBERS}
    kept = events - {(POISON, number) for number in NUMBERS[: len(dead_letters)]}
    handlers = [name for name in app.handlers if part in (name, None)]
    done = {(name, *event) for name in handlers if name != "flow-commands" for event in kept}
    states = {}
    if part in ("totals", None):
        states = {word: {"count": count} for word, count in Counter(word for word, _ in kept).items()}
    if place == "projection_apply":
        del states[POISON]  # parked before its first event
    async with jetspark.connect(url) as client, served(url, log, place):
        js = client.jetstream()
        await set_up(js, app)
        await publish(js, app, *(Noted(word=word, number=number) for number in NUMBERS for word in WORDS))

        async def is_over() -> bool:
            settled = [await is_settled(js, app, each) for each in handlers]
            found = await dead_letters_of(js, app), await states_of(js)
            return all(settled) and done <= {*told(log)} and found == (dead_letters, states)

        await until(is_over)
        if part == "count":
            await call_all(AppClient.on(app, js))
        if place == "projection_apply":
            assert await parked_at(js, app) == (1 + WORDS.index(POISON), f"FoldDied: {FATAL_DEATHS} processes ended")
    count = told(log)
    assert count["died", ONCE] == 1
    assert (count["died", POISON] > 0) is (part is not None)
    # Nothing sends a command again once its caller has given up.
    assert count["died", POISON] <= {"totals": FATAL_DEATHS, "count": 2}.get(part or "", ATTEMPTS + 1)
    assert count["ended", 1] == count["died", ONCE] + count["died", POISON]


async def call_all(client: AppClient) -> None:
    async def is_called(word: str) -> bool:
        with suppress(NoWorkers):
            return (await client.call(Count(word=word), command_id=word, timeout=4.0)).sequence > 0
        return False

    for word in ("a", ONCE):
        await until(partial(is_called, word))
    with pytest.raises((CommandInDoubt, NoWorkers)):
        await client.call(Count(word=POISON), timeout=1.0)


async def parked_at(js: JetStream, app: App) -> tuple[int, str]:
    entry = await AppClient.on(app, js).view("totals").entry(POISON)
    assert entry.parked is not None
    return entry.parked.sequence, " ".join(entry.parked.reason.split(" ")[:4])
