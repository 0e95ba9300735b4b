"""Many events, keys and failures, three workers that are killed again and again, and a server that restarts.

Of ordinary size in CI, with a few kills; the whole demonstration, with a kill every two seconds to the end, is::

    JETSPARK_MANY_EVENTS=100000 python -m pytest -s tests/integration/apps/test_app_demonstration.py
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from integration.apps import app_many
from integration.apps.app_many import Counted, Happened, app
from support.apps import set_up, until

import jetspark
from jetspark.aio.jetstream import JetStream
from jetspark.app import encode
from jetspark.app.handlers.consumers import consumers_of
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.errors import JetSparkError
from jetspark.server import NatsServer

EVENTS = int(os.environ.get("JETSPARK_MANY_EVENTS", "1000"))
KILL_EVERY_S = 2.0
COUNTED_EVERY = 5 if EVENTS <= 1000 else 50
MAX_KILLS = 5 if EVENTS <= 1000 else 1_000_000
PATIENCE_S = 120 + EVENTS / 20
CONCURRENCY = app.handlers["once"].concurrency
SOURCES = Path(__file__).parents[2]
# A look takes a while, and an event on its way between a consumer and a schedule is in neither list: so everything is
# done when several looks in a row find nothing.
LOOKS = 3


def is_counted(number: int) -> bool:
    return number % COUNTED_EVERY == 0


async def publish_all(url: str, rng: random.Random, events: int = EVENTS) -> dict[str, list[int]]:
    """Publish the events; returns the numbers of each key, in the order of the stream."""
    order: dict[str, list[int]] = defaultdict(list)
    async with jetspark.connect(url) as client, client.jetstream().fast_publisher() as publisher:
        for number in range(events):
            key = f"k{rng.randrange(events // 10)}"
            order[key].append(number)
            now = datetime.datetime.now(datetime.UTC)
            kind = Counted if is_counted(number) else Happened
            made = encode(kind(name=key, number=number), id=f"e{number}", source=app.source, time=now)
            await publisher.publish(made.subject, made.data, headers=made.headers)
    return order


async def open_places(js: JetStream, events: int = EVENTS) -> list[str]:
    """What is left to do."""
    found = []
    for spec in app.handlers.values():
        for place in consumers_of(app.spec, spec):
            info = await (await (await js.stream(place.stream)).consumer(place.name)).info()
            if info.pending or info.ack_pending:
                found.append(f"{place.stream}/{place.name}: {info.pending} and {info.ack_pending}")
        waits = await (await js.stream(app.spec.retry_stream)).info(
            subjects_filter=f"retry.{app.name}.{spec.name}.wait.>"
        )
        found += [f"{subject} is scheduled" for subject in waits.state.subjects or ()]
        copied = (await (await js.stream(f"MANY_{spec.name}_PARTITIONS")).info()).state.last_sequence
        published = events if spec.name == "once" else len(range(0, events, COUNTED_EVERY))
        if copied < published:
            found.append(f"{spec.name}: {copied} of {published} are copied")
    return found


def lines_in(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*.log"))


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(path.name))
    return found


class Run:
    """The workers, their killer, and the server's restart."""

    def __init__(self, server: NatsServer, rng: random.Random) -> None:
        self.server, self.rng = server, rng
        self.kills = 0
        self.restarted = False
        self.left: list[str] = []

    async def work(self, folder: Path) -> None:
        environment = {**os.environ, "JETSPARK_MANY": str(folder), "PYTHONPATH": str(SOURCES)}
        command = ["-m", "jetspark", "run", "integration.apps.app_many:app", "--servers", self.server.url]
        with (folder / "output").open("wb") as output:
            parent = await asyncio.create_subprocess_exec(
                *(sys.executable, *command, "--workers", "3", "--stop-timeout", "5"),
                env=environment,
                stderr=output,
            )
            try:
                async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
                    killer = tasks.create_task(self._kill(parent.pid))
                    await self._until_done(folder, parent)
                    killer.cancel()
                parent.terminate()
                async with asyncio.timeout(120):
                    assert await parent.wait() == 0
            finally:
                if parent.returncode is None:
                    parent.terminate()
                    await parent.wait()

    async def _kill(self, parent: int) -> None:
        while self.kills < MAX_KILLS:
            await asyncio.sleep(KILL_EVERY_S)
            children = children_of(parent)
            if children:
                self.kills += 1
                os.kill(self.rng.choice(children), signal.SIGKILL)

    async def _until_done(self, folder: Path, parent: asyncio.subprocess.Process) -> None:
        async with jetspark.connect(self.server.url) as client:
            js, clean = client.jetstream(), 0
            while clean < LOOKS:
                await asyncio.sleep(0.5 + EVENTS / 40_000)  # asking has a price, too
                assert parent.returncode is None, f"the workers ended with {parent.returncode}"
                if not self.restarted and lines_in(folder) > EVENTS:
                    self.restarted = True
                    await asyncio.to_thread(self.server.restart)
                try:
                    self.left = await open_places(js)
                except JetSparkError:
                    clean = 0
                    continue
                clean = clean + 1 if self.restarted and not self.left else 0
                if os.environ.get("JETSPARK_MANY_SHOW"):
                    print(f"{time.monotonic():.0f}: {lines_in(folder)} lines, {self.kills} kills", self.left[:4])


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S + 60)
async def test_every_event_ends_once_and_no_key_is_out_of_order(tmp_path: Path) -> None:
    seed = int(os.environ.get("JETSPARK_SEED") or 1)
    rng = random.Random(seed)
    with NatsServer() as server:
        async with jetspark.connect(server.url) as client:
            await set_up(client.jetstream(), app)
        began = time.monotonic()
        order = await publish_all(server.url, rng)
        published_s = time.monotonic() - began
        run = Run(server, rng)
        await run.work(tmp_path)
        took_s = time.monotonic() - began
        async with jetspark.connect(server.url) as client:
            dead_letters = {name: await dead_letters_of(client.jetstream(), name) for name in app.handlers}
            numbers = await sums_of(client.jetstream())
    report = check_once(order, tmp_path, dead_letters["once"], run.kills)
    counted = {key: [number for number in found if is_counted(number)] for key, found in order.items()}
    check_sums(counted, numbers, dead_letters["sums"])
    print(
        f"\n{EVENTS} events, {len(order)} keys, {run.kills} kills, seed {seed}: published in {published_s:.0f} s, "
        f"all in {took_s:.0f} s; {report}; transactions: {sum(map(len, numbers.values()))} done, "
        f"{sum(map(len, dead_letters['sums'].values()))} letters"
    )
    assert run.kills >= 2


@pytest.mark.slow
async def test_a_process_that_was_stopped_comes_back_to_what_others_have_taken_over(tmp_path: Path) -> None:
    events = 150
    environment = {**os.environ, "JETSPARK_MANY": str(tmp_path), "PYTHONPATH": str(SOURCES)}
    with NatsServer() as server:
        command = [sys.executable, "-m", "jetspark", "run", "integration.apps.app_many:app", "--servers", server.url]
        async with jetspark.connect(server.url) as client:
            js = client.jetstream()
            await set_up(js, app)
            said = [tmp_path / f"worker {number}" for number in range(2)]
            workers = []
            for path in said:
                with path.open("wb") as file:
                    workers.append(await asyncio.create_subprocess_exec(*command, env=environment, stderr=file))
            try:
                # Both run before there is work: else one of them may do all of it, and the other is stopped too early.
                await until(lambda: all(": running " in path.read_text() for path in said))
                order = await publish_all(server.url, random.Random(1), events)
                workers[0].send_signal(signal.SIGSTOP)
                await asyncio.sleep(2.5 * app.handlers["once"].ack_wait_s)  # by then others have all it had
                workers[0].send_signal(signal.SIGCONT)
                for _ in range(LOOKS):
                    await until(lambda: is_all_done(js, events))
                for worker in workers:
                    worker.terminate()
                assert [await worker.wait() for worker in workers] == [0, 0]
            finally:
                for worker in workers:
                    if worker.returncode is None:
                        worker.kill()
                        await worker.wait()
            dead_letters = {name: await dead_letters_of(js, name) for name in app.handlers}
            numbers = await sums_of(js)
    check_once(order, tmp_path, dead_letters["once"], 1)
    counted = {key: [number for number in found if is_counted(number)] for key, found in order.items()}
    check_sums(counted, numbers, dead_letters["sums"])


async def is_all_done(js: JetStream, events: int) -> bool:
    return not await open_places(js, events)


async def dead_letters_of(js: JetStream, handler: str) -> dict[str, list[tuple[int, str]]]:
    """By key: the number of each event with a letter, and its status."""
    store = await HandlerStore.open(js, app.name, handler)
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    async for each in store.all_dead_letters():
        event = json.loads(each.dead_letter.data)["data"]
        found[event["name"]].append((event["number"], each.dead_letter.status))
    return found


async def sums_of(js: JetStream) -> dict[str, list[int]]:
    kv = await js.kv("sums")
    found = [key async for key in kv.keys(">") if not key.startswith("_done.")]
    return {key: json.loads((await kv.get(key)).value) for key in found}


def check_once(
    order: dict[str, list[int]], folder: Path, dead_letters: dict[str, list[tuple[int, str]]], kills: int
) -> str:
    """Each event is done, skipped, or a letter; effects happened once; keys ran in order."""
    times: dict[str, dict[tuple[str, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    keys = defaultdict(set)
    for path in folder.glob("*.log"):
        # The last line of a worker that was killed while it wrote has no end: what it says was not recorded.
        for line in path.read_text().rpartition("\n")[0].splitlines():
            what, name, number, moment, *more = json.loads(line)
            times[what][name, number].append(moment)
            keys[name, number].update(more)
    everything = {(key, number) for key, numbers in order.items() for number in numbers}
    dead = {(key, number) for key, found in dead_letters.items() for number, _ in found}
    done, skipped, effects = set(times["done"]), set(times["skipped"]), times["effect"]
    ended = Counter([*done, *skipped, *dead])
    assert set(ended) == everything, f"never ended: {sorted(everything - set(ended))[:10]}"
    assert [each for each, count in ended.items() if count > 1] == []
    assert skipped == {each for each in everything - dead if is_skipped("once", *each)}
    # A kill between an effect and its record repeats it with the same idempotency key, so that the world outside can
    # tell. Each kill can do that to as many as run at a time.
    repeated = [each for each, found in effects.items() if len(found) > 1]
    # One that has used up its attempts may have had its effect: its workers were killed, each once, some before they
    # noted that they had begun.
    used_up = {each for each in dead if len(times["begun"][each]) + kills >= app_many.RETRY.attempts}
    assert done <= set(effects) <= done | used_up
    assert {len(keys[each]) for each in done} == {1}
    assert len(repeated) <= kills * CONCURRENCY
    check_order(order, dead_letters, times["begun"], {**times["done"], **times["skipped"]})
    attempts = sum(map(len, times["begun"].values()))
    return (
        f"{len(done)} done, {len(skipped)} skipped, {len(dead)} letters; "
        f"{attempts - len(times['begun'])} further attempts, {len(repeated)} effects repeated"
    )


def check_order(
    order: dict[str, list[int]],
    dead_letters: dict[str, list[tuple[int, str]]],
    begun: dict[tuple[str, int], list[int]],
    ended: dict[tuple[str, int], list[int]],
) -> None:
    """No event began before the one before it in its key had ended; and whatever is behind a letter is a letter."""
    for key, numbers in order.items():
        dead = sorted(number for number, _ in dead_letters.get(key, []))
        assert dead == numbers[len(numbers) - len(dead) :], f"{key} went on past {dead[:1]}"
        for before, after in itertools.pairwise(numbers[: len(numbers) - len(dead)]):
            assert min(ended[key, before]) < min(begun[key, after]), f"{key}: {after} began before {before} had ended"


def check_sums(
    order: dict[str, list[int]], sums: dict[str, list[int]], dead_letters: dict[str, list[tuple[int, str]]]
) -> None:
    """Transactions happened exactly once, and in order: each key lists what it has counted."""
    for key, numbers in order.items():
        counted = sums.get(key, [])
        assert counted == sorted(set(counted)), f"{key} counted {counted}"
        dead = {number for number, _ in dead_letters.get(key, [])}
        left_out = [number for number in numbers if number not in counted and number not in dead]
        skipped = [each for each in numbers if each not in dead and is_skipped("sums", key, each)]
        assert left_out == skipped, f"{key}: {left_out} are neither counted nor letters"
        assert dead.isdisjoint(counted)


def is_skipped(handler: str, key: str, number: int) -> bool:
    return app_many.is_skipped(handler, Counted(name=key, number=number))
