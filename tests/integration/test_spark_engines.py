"""Three engines fold the same events into the same buckets at the same time, while each of them, and the server, is
killed: the live engine, a stream on Spark, and backfills on Spark. The bytes are those of one process alone.

``JETSPARK_MANY_EVENTS=1000000`` runs it with a million events and ten thousand keys:

    JETSPARK_MANY_EVENTS=1000000 .venv/bin/python -m pytest -n 0 -s tests/integration/test_spark_engines.py
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import projected
from support.projected import app, folded, publish, stored

import jetspark
from jetspark.app.projections.positions import FoldPosition
from jetspark.app.projections.state_header import position_key
from jetspark.app.replay import verify
from jetspark.blocking import JetStream, connect
from jetspark.errors import JetSparkError, KeyNotFound
from jetspark.server import NatsServer

pytest.importorskip("pyspark")

if TYPE_CHECKING:
    from support.sparks import Driver

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EVENTS = int(os.environ.get("JETSPARK_MANY_EVENTS", "8000"))
ACCOUNTS = max(100, EVENTS // 100)
PORTIONS = 8
NAMES = ["accounts", "totals", "recent"]
UNREADABLE = 3
# Drivers of tests hand on a hundred rows at a time, which makes more interleavings, and a million events take for ever.
CONF = {} if EVENTS <= 20_000 else {"spark.sql.execution.arrow.maxRecordsPerBatch": "10000"}


class LiveEngine:
    """A process that folds live, to be killed."""

    def __init__(self, url: str, folder: Path) -> None:
        self._command = [sys.executable, "-m", "jetspark", "run", "support.projected:app", "--servers", url]
        self._log = folder / "live.log"
        self._log.touch()
        self.start()

    @property
    def is_connected(self) -> bool:
        """It has met the server. Before that it ends when there is none, which is not what this is about."""
        return ": running " in self._log.read_text()[self._said :]

    def start(self) -> None:
        self._said = len(self._log.read_text())
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=Path(__file__).parents[1], stdout=log, stderr=log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def check(self) -> None:
        assert self._process.poll() is None, self._log.read_text()[-3000:]


@contextmanager
def running(url: str, folder: Path) -> Iterator[LiveEngine]:
    engine = LiveEngine(url, folder)
    try:
        yield engine
    finally:
        engine.kill()


def positions(js: JetStream) -> list[int]:
    found = []
    for name in NAMES:
        try:
            found.append(FoldPosition.decode(js.kv(name).get(position_key()).value).sequence)
        except KeyNotFound:
            found.append(0)
    return found


def progress(js: JetStream) -> int:
    """How often something was written into the buckets."""
    return sum(js.stream(f"KV_{name}").info().state.last_sequence for name in NAMES)


def wait_for(js: JetStream, claim: Callable[[], bool], check: Callable[[], None]) -> None:
    while True:
        try:
            if claim():
                return
        except JetSparkError as error:
            if not error.may_pass:  # else the server is just starting
                raise
        check()
        time.sleep(0.02)


def test_three_engines_at_once_and_the_death_of_each_leave_the_bytes_of_one(
    tmp_path: Path, drivers: Callable[..., Driver]
) -> None:
    seed = int(os.environ.get("JETSPARK_SEED", random.randrange(1 << 32)))
    rng = random.Random(seed)
    print(f"seed {seed}, {EVENTS} events, {ACCOUNTS} accounts")
    began = time.monotonic()
    with NatsServer() as server, connect(server.url) as client:
        js = projected.fresh(server.url, client.jetstream(timeout=30.0))
        history = projected.messages(EVENTS, accounts=ACCOUNTS, unreadable=UNREADABLE)
        jobs: list[dict[str, Any]] = [
            {"projects": {"servers": server.url, "until_now": False, "maxOffsetsPerTrigger": EVENTS // 10}},
            {"backfills": {"servers": server.url, "step": EVENTS // 5}},
        ]
        # Starting takes longest.
        waiting = [drivers(*jobs, at_once=True, has_own_workers=True, conf=CONF) for _ in range(2)]
        driver = waiting.pop()

        def publish_some() -> None:
            publish(js, (message for _, message in zip(range(EVENTS // PORTIONS), history, strict=False)))

        def check() -> None:
            live.check()
            assert driver.is_running, driver.log()[-6000:]

        def kill_server() -> None:
            wait_for(js, lambda: live.is_connected, check)
            server.kill()
            time.sleep(rng.uniform(0, 0.5))
            server.restart()

        def kill_live() -> None:
            live.kill()
            live.start()

        def kill_driver() -> None:
            nonlocal driver
            driver.kill()
            driver = waiting.pop()
            driver.go()

        def kill_worker() -> None:
            wait_for(js, driver.kill_worker, check)

        publish_some()
        driver.go()
        with running(server.url, tmp_path) as live:
            faults = [kill_live, kill_server, kill_worker, kill_driver, kill_worker, kill_server, kill_live]
            for fault in rng.sample(faults, len(faults)):
                before = progress(js)
                publish_some()
                wait_for(js, lambda at=before: progress(js) > at, check)  # type: ignore[misc]
                time.sleep(rng.uniform(0, 1.0))
                fault()
                print(f"{time.monotonic() - began:6.1f} s: {fault.__name__}, positions {positions_or_none(js)}")
            publish(js, history)  # what is left
            last = js.stream(app.stream).info().state.last_sequence
            wait_for(js, lambda: min(positions(js)) >= last, check)
        driver.kill()
        digests = asyncio.run(verified(server.url))
        print(f"{time.monotonic() - began:6.1f} s: {last} events, {digests}")
        if EVENTS <= 100_000:
            for name in NAMES:
                assert stored(js, name) == folded(js, name)
        assert js.stream(app.spec.dead_letter_stream).info().state.messages == UNREADABLE


def positions_or_none(js: JetStream) -> list[int] | None:
    try:
        return positions(js)
    except JetSparkError:
        return None


async def verified(url: str) -> dict[str, str]:
    """The digest of each bucket, which is that of a fresh fold in this process."""
    found = {}
    async with jetspark.connect(url) as client:
        for name in NAMES:
            result = await verify(client.jetstream(timeout=30.0), app, name)
            assert result.is_equal, (name, [str(each) for each in result.differences[:5]], result.difference_count)
            assert result.digest == result.expected_digest
            found[name] = f"{result.keys} keys {result.digest[:23]}"
    return found
