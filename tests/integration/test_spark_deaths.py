"""Streaming queries whose tasks fail and whose drivers are killed: every row once in a stream, the newest of each key
in a bucket."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jetspark import KVConfig
from jetspark.blocking import JetStream, KeyValue, Stream, connect
from jetspark.server import NatsServer

pytest.importorskip("pyspark")

from support.names import new_name, new_stream

if TYPE_CHECKING:
    from support.sparks import Driver

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

MODES = ["fast", "atomic", "async"]
KEYS = 40


def new_bucket(js: JetStream) -> KeyValue:
    return js.create_kv(KVConfig(bucket=new_name("state"), allow_batched=True))


def stored(stream: Stream) -> list[bytes]:
    return [message.data for message in stream.get_messages()]


# ---- what is written ---------------------------------------------------------------------------------------------


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    return folder


def lines(folder: Path, file: int, count: int) -> list[bytes]:
    """A file of the input, with so many lines that no other has; returns them.

    Spark hands rows on in pieces of 64 KB: the lines are long, so that a task sends some before it sees the others.
    """
    made = [f"{file}-{number}".rjust(400, ".") for number in range(count)]
    (folder / f"{file:04}.txt").write_text("\n".join(made) + "\n")
    return [line.encode() for line in made]


def events(js: JetStream, stream: Stream, count: int) -> tuple[list[bytes], dict[str, Any]]:
    """Publishes so many; returns them, and the newest of each key."""
    published = []
    state: dict[str, Any] = {}
    for number in range(count):
        key = f"k{number * 7 % KEYS}"
        state[key] = {"key": key, "number": number}
        published.append(json.dumps(state[key]).encode())
    with js.fast_batch() as batch:
        batch.add_many((f"{stream.name}.x", data) for data in published)
    return published, state


def state_of(bucket: KeyValue) -> dict[str, Any]:
    return {key: json.loads(entry.value) for key, entry in bucket.snapshot([">"]).items()}


# ---- who writes it -----------------------------------------------------------------------------------------------


def copy_job(server: NatsServer, target: Stream, folder: Path, **job: Any) -> dict[str, Any]:
    options = {"servers": server.url, "subject": f"{target.name}.x", **job.pop("options", {})}
    return {"checkpoint": str(folder / f"checkpoint-{target.name}"), "options": options, **job}


def table_job(server: NatsServer, bucket: KeyValue, folder: Path, **job: Any) -> dict[str, Any]:
    table = {"servers": server.url, "bucket": bucket.bucket, "guard": "sequence"}
    return {"checkpoint": str(folder / f"checkpoint-{bucket.bucket}"), "table": table, **job}


def reading(server: NatsServer, source: Stream, per_batch: int) -> dict[str, str]:
    return {
        "servers": server.url,
        "stream": source.name,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(per_batch),
    }


def test_tasks_that_fail_and_then_die_store_every_row_once_and_the_newest_of_each_key(
    server: NatsServer, js: JetStream, inputs: Path, drivers: Callable[..., Driver]
) -> None:
    expected = lines(inputs, 0, 900)
    streams = {mode: new_stream(js) for mode in MODES}
    source, bucket = new_stream(js), new_bucket(js)
    _, state = events(js, source, 2_000)
    driver = drivers(
        *(
            copy_job(server, stream, inputs.parent, input=str(inputs), options={"publishMode": mode})
            for mode, stream in streams.items()
        ),
        table_job(server, bucket, inputs.parent, reads=reading(server, source, 1_000)),
        failures=True,
    )
    driver.go()
    driver.finish()
    log = driver.log()
    # One task for each mode, and of the table two for each of two batches.
    failed = log.count("RuntimeError: this attempt fails"), log.count("Python worker exited unexpectedly")
    assert (failed[0] >= 7, failed[1] >= 7) == (True, True), failed
    assert {mode: Counter(stored(stream)) == Counter(expected) for mode, stream in streams.items()} == dict.fromkeys(
        MODES, True
    )
    assert state_of(bucket) == state


# Which queries hang in each of the first lives, and at which moment. There is a second and a half between two lives,
# which is longer than the duplicate window of the stream that lines are written to.
HANGS = [
    {"lines": "while writing"},
    {"lines": "before the commit"},
    {"lines": "after the commit", "each": "after the write"},
]
# After these come deaths at any moment, which are others in every run.
DEATHS = int(os.environ.get("JETSPARK_DEATHS", "6"))


@dataclass
class Lives:
    """Four queries, in one driver after the other: two in every life, and two in those in which they hang."""

    server: NatsServer
    folder: Path
    source: Stream
    copy: Stream
    bucket: KeyValue
    lines: Stream
    each: Stream
    inputs: Path
    drivers: Callable[..., Driver]

    def start(self, number: int, per_batch: int) -> Driver:
        hangs = {"lines": "", "each": ""} if number == DEATHS else HANGS[number] if number < len(HANGS) else {}
        jobs = []
        if "lines" in hangs:
            jobs.append(copy_job(self.server, self.lines, self.folder, input=str(self.inputs), hangs=hangs["lines"]))
        if "each" in hangs:
            jobs.append(
                {
                    "checkpoint": str(self.folder / "checkpoint-each"),
                    "reads": reading(self.server, self.source, 1_000_000),
                    "each": {"servers": self.server.url, "subject": f"{self.each.name}.x"},
                    "hangs": hangs["each"],
                }
            )
        reads = reading(self.server, self.source, per_batch)
        jobs.append(copy_job(self.server, self.copy, self.folder, reads=reads))
        jobs.append(table_job(self.server, self.bucket, self.folder, reads=reads))
        return self.drivers(*jobs, at_once=True)

    def wait_until_they_hang(self, number: int, driver: Driver, least: dict[str, int]) -> None:
        """When one does, the stream that it writes to has this many messages, or soon will have."""
        for name, moment in HANGS[number].items():
            driver.wait_for(f"hangs {moment}")
            while getattr(self, name).info().state.messages < least[moment]:
                assert driver.is_running, driver.log()[-6000:]
                time.sleep(0.05)


def test_deaths_of_the_driver_leave_every_row_once_in_the_streams_and_the_newest_of_each_key_in_the_bucket(
    server: NatsServer, js: JetStream, tmp_path: Path, inputs: Path, drivers: Callable[..., Driver]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    source, copy, bucket = new_stream(js), new_stream(js), new_bucket(js)
    written_lines = [line for file in range(2) for line in lines(inputs, file, 900)]
    expected, state = events(js, source, 20_000)
    least = {"while writing": 100, "before the commit": 900, "after the commit": 900, "after the write": len(expected)}
    lives = Lives(
        server,
        tmp_path,
        source,
        copy,
        bucket,
        lines=new_stream(js, duplicate_window_s=1.0),
        each=new_stream(js),
        inputs=inputs,
        drivers=drivers,
    )
    targets = [copy, js.stream(f"KV_{bucket.bucket}")]

    def written() -> tuple[int, ...]:
        return tuple(target.info().state.last_sequence for target in targets)

    def start(number: int) -> Driver:
        """Batches are small, so that no query comes to its end; the last one may take everything at once."""
        return lives.start(number, 40 if number < len(HANGS) else 200 if number < DEATHS else len(expected))

    deaths = [written()]
    # Starting Spark takes longest: two do so while one is at work.
    waiting = deque([start(0), start(1)])
    for number, awaited in enumerate(chance.sample([0, 1] * ((DEATHS + 1) // 2), DEATHS)):
        driver = waiting.popleft()
        if number < DEATHS - 1:
            waiting.append(start(number + 2))
        driver.go()
        if number < len(HANGS):
            lives.wait_until_they_hang(number, driver, least)
        while written()[awaited] == deaths[-1][awaited]:
            assert driver.is_running, driver.log()[-6000:]
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 0.8))
        driver.kill()
        deaths.append(written())
        if number < len(HANGS):
            time.sleep(1.5)
    # Both queries have come some way in some of their lives, and neither to its end.
    print(f"killed when this was written: {deaths[1:]}")
    assert deaths[-1][0] < len(expected)
    assert state_of(bucket) != state
    for which in range(2):
        assert sum(one[which] < other[which] for one, other in itertools.pairwise(deaths)) >= 3
    [last] = waiting
    last.go()
    last.finish()
    assert Counter(stored(copy)) == Counter(expected)
    assert Counter(stored(lives.each)) == Counter(expected)
    assert Counter(stored(lives.lines)) == Counter(written_lines)
    assert state_of(bucket) == state


def test_a_server_that_dies_during_queries_gets_every_row_once_and_the_newest_of_each_key(
    tmp_path: Path, drivers: Callable[..., Driver]
) -> None:
    with NatsServer() as own, connect(own.url) as nc:
        js = nc.jetstream()
        source, copy, bucket = new_stream(js), new_stream(js), new_bucket(js)
        expected, state = events(js, source, 30_000)
        targets = [copy, js.stream(f"KV_{bucket.bucket}")]

        driver = drivers(
            copy_job(own, copy, tmp_path, reads=reading(own, source, 2_000)),
            table_job(own, bucket, tmp_path, reads=reading(own, source, 2_000)),
            at_once=True,
            retries=False,  # a second attempt of Spark's would hide what a task cannot bear
        )
        driver.go()
        for target in targets:
            before = target.info().state.last_sequence
            while target.info().state.last_sequence < before + 100:
                assert driver.is_running, driver.log()[-6000:]
                time.sleep(0.02)
            own.kill()
            time.sleep(0.5)
            own.restart()
        driver.finish()
        assert Counter(stored(copy)) == Counter(expected)
        assert state_of(bucket) == state
