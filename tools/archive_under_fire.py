"""Archives a stream under fire: ``python tools/archive_under_fire.py [--messages 2000000] [--kills 100] [--seed N]``.

A server of its own with a stream on disk, to which messages are published all the time, and an S3 server (moto) that
answers 503 and cuts connections, before and after it has done what was asked. Live archivers and archivers on Spark
write the same table, alternating and two or three at once; archivers, Spark drivers and Python workers of Spark are
killed by SIGKILL at random moments; the server is killed and restarted; the table is compacted in between. In the end
one archiver completes the table. Then every row is verified, and compared with the stream, and DuckDB counts the rows
for itself. The last line has the numbers; the exit code is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.archives import counted
from support.object_stores import Fault, S3Server, s3_server

from benchmarks.processes import descendants
from jetspark import StreamConfig
from jetspark.blocking import JetStream, connect
from jetspark.errors import ArchiveMoved, JetSparkError, NetworkError
from jetspark.lake import (
    ArchiveOptions,
    ArchiveTable,
    ArchiveVerifyOptions,
    archive_streams,
    compact_archive,
    find_tables,
    verify_archive,
)
from jetspark.server import NatsServer

STREAM, TO = "FIRE", "s3://lake/fire"
FAULTS: tuple[Fault, ...] = ("503 before", "503 after", "cut before", "cut after")
FAULT_SHARE = 0.02
BATCH = 2_000
# Writers alternate: two of three rounds are without Spark, which takes long to start.
ROUNDS: tuple[tuple[str, ...], ...] = (("live",), ("live", "live"), ("spark",), ("live",), ("live", "spark"))
KILLS_PER_ROUND = {"live": 8, "spark": 5}
RESTART_EVERY = 15
COMPACT_EVERY = 20
PATIENCE_S = 300.0

WRITER = """
import json, logging, sys, time
from jetspark.blocking import connect
from jetspark.errors import NoServersAvailable
from jetspark.lake import ArchiveOptions, archive_streams

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
kind, url, stream, options = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
engine = None
if kind == "spark":
    from jetspark.spark import SparkArchiver, session
    from jetspark.spark.lake import archiving
    archiving.TASK_SEQUENCES = 5_000
    engine = SparkArchiver(session("fire", cores=2), tasks=4, servers=url)
for attempt in range(600):
    try:
        client = connect(url)
        break
    except NoServersAvailable:  # it is being restarted
        time.sleep(0.1)
with client:
    archive_streams(client.jetstream(timeout=5.0), [stream], ArchiveOptions(**options), engine=engine)
"""


class Publisher(threading.Thread):
    """Publishes until the stream has enough messages, through every restart of the server."""

    def __init__(self, url: str, messages: int) -> None:
        super().__init__(daemon=True)
        self._url, self._messages = url, messages
        self.allowed = 0
        """As many as may be in the stream now."""
        self.reached = 0

    def run(self) -> None:
        with connect(self._url) as client:
            js = client.jetstream(timeout=5.0)
            while self.reached < self._messages:
                if self.reached >= self.allowed:
                    time.sleep(0.02)
                    continue
                try:
                    with js.fast_batch() as batch:
                        batch.add_many(self._some())
                    self.reached = js.stream(STREAM).info().state.last_sequence
                except JetSparkError:
                    time.sleep(0.2)  # the server is away; what was stored counts at the next success

    def _some(self) -> Iterator[tuple[str, bytes]]:
        for number in range(self.reached, min(self.allowed, self.reached + BATCH)):
            yield f"fire.{number % 100}", b'{"number": %d, "text": "%b"}' % (number, os.urandom(16).hex().encode())


class Fire:
    """The servers, the writers and what was done to them."""

    def __init__(self, server: NatsServer, s3: S3Server, folder: Path, random_: random.Random) -> None:
        self.server, self.s3, self.random = server, s3, random_
        self._log = (folder / "writers.log").open("ab")
        self.done: Counter[str] = Counter()
        self.writers: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._table: ArchiveTable | None = None

    def start(self, kind: str) -> None:
        options = {"to": TO, "storage_options": self.s3.options, "every_s": 0.0, "max_rows": 20_000, "lease_s": None}
        options["patience_s"] = PATIENCE_S
        command = [sys.executable, "-c", WRITER, kind, self.server.url, STREAM, json.dumps(options)]
        process = subprocess.Popen(command, stderr=self._log, stdout=self._log, start_new_session=True)
        self.writers.append((kind, process))

    def kill(self, number: int) -> None:
        """Kill a writer, with all of its processes; of Spark often only a Python worker, whose task Spark repeats."""
        kind, process = self.writers[number]
        assert process.poll() is None, f"a writer has ended by itself, with code {process.returncode}; see its log"
        workers = [each for each in descendants(process.pid) if _is_worker(each)] if kind == "spark" else []
        if workers and self.random.random() < 0.7:
            os.kill(self.random.choice(workers), signal.SIGKILL)
            self.done["spark workers killed"] += 1
            return
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.done[f"{kind} killed"] += 1
        del self.writers[number]
        self.start(kind)

    def end_all(self) -> None:
        for kind, process in self.writers:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.done[f"{kind} killed"] += 1
        self.writers.clear()

    @property
    def kills(self) -> int:
        return sum(count for name, count in self.done.items() if name.endswith("killed"))

    def restart_server(self) -> None:
        self.server.kill()
        time.sleep(self.random.uniform(0.0, 1.0))
        self.server.start()
        self.done["server killed and restarted"] += 1

    def fault(self, method: str, path: str) -> Fault:
        if self.random.random() >= FAULT_SHARE:
            return ""
        chosen = self.random.choice(FAULTS)
        self.done["store faults"] += 1
        return chosen

    def table(self) -> ArchiveTable | None:
        if self._table is None:
            found = [each for each in find_tables(TO, options=self.s3.options) if each.snapshot() is not None]
            self._table = found[0] if found else None
        return self._table

    def position(self) -> int:
        """The first sequence that is not archived; 0 if the store does not say."""
        try:
            table = self.table()
            snapshot = None if table is None else table.snapshot()
        except JetSparkError:
            return 0
        return 0 if snapshot is None else snapshot.position.next

    def compact(self) -> None:
        table = self.table()
        assert table is not None
        try:
            self.done["files merged"] += compact_archive(table).merged
        except (ArchiveMoved, NetworkError) as error:
            print(f"compaction: {error}")


def _is_worker(pid: int) -> bool:
    """True for a Python worker of Spark: a fork of the Python process that Java has started."""
    try:
        daemon = _parent(pid)
        return (
            _name(pid).startswith("python") and _name(daemon).startswith("python") and _name(_parent(daemon)) == "java"
        )
    except OSError:
        return False


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _burn(fire: Fire, messages: int, kills: int, *, has_spark: bool) -> int:
    began = time.monotonic()
    with connect(fire.server.url) as client:
        js = client.jetstream(timeout=5.0)
        js.create_stream(StreamConfig(name=STREAM, subjects=["fire.>"], storage="file", allow_batched=True))
        publisher = Publisher(fire.server.url, messages)
        publisher.start()
        fire.s3.fault = fire.fault
        rounds = [kinds for kinds in ROUNDS if has_spark or "spark" not in kinds]
        for number in itertools.count():
            if fire.kills >= kills:
                break
            _round(fire, rounds[number % len(rounds)], lambda: _allow(publisher, messages, kills))
            print(f"{time.monotonic() - began:6.0f} s  {dict(fire.done)}, {publisher.reached} published", flush=True)
        publisher.allowed = 1 << 62
        publisher.join()
        options = ArchiveOptions(to=TO, storage_options=fire.s3.options, lease_s=None, patience_s=PATIENCE_S)
        archive_streams(js, [STREAM], options, once=True)
        fire.s3.fault = lambda method, path: ""
        return _report(fire, js, time.monotonic() - began)


def _allow(publisher: Publisher, messages: int, kills: int) -> None:
    # The last round has more kills than were asked for, and a restart may have stored some messages twice.
    publisher.allowed = min(messages, publisher.allowed + max(1, messages // (kills + 20)))


def _round(fire: Fire, kinds: Sequence[str], allow: Callable[[], None]) -> None:
    for kind in kinds:
        fire.start(kind)
    for _ in range(KILLS_PER_ROUND[kinds[-1]]):
        before = fire.position()
        allow()
        _until(lambda before=before: fire.position() > before)  # type: ignore[misc]
        time.sleep(fire.random.uniform(0.0, 1.0))
        fire.kill(fire.random.randrange(len(fire.writers)))
        if fire.kills % RESTART_EVERY == 0:
            fire.restart_server()
        if fire.kills % COMPACT_EVERY == 0:
            fire.compact()
    fire.end_all()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.1)


def _report(fire: Fire, js: JetStream, elapsed_s: float) -> int:
    table = fire.table()
    assert table is not None
    state = js.stream(STREAM).info().state
    found = verify_archive(table, ArchiveVerifyOptions(full=True), against=js)
    rows, distinct, first, last = counted(table)
    is_right = (
        found.is_complete
        and found.compared == state.messages == rows == distinct == found.rows
        and (first, last) == (1, state.last_sequence)
    )
    done = ", ".join(f"{count} {name}" for name, count in sorted(fire.done.items()))
    snapshot = table.snapshot()
    assert snapshot is not None
    orphans = sum(each.path.endswith(".parquet") for each in table.store.files()) - len(snapshot.files)
    print(
        f"{'exact' if is_right else 'WRONG'}: {state.messages} messages, {rows} rows counted by DuckDB, {distinct} "
        f"different, {found.compared} compared with the stream, {sum(map(len, found.missing))} missing, "
        f"{sum(map(len, found.doubled))} doubled; {fire.kills} SIGKILL in all ({done}); {snapshot.version} commits, "
        f"{len(snapshot.files)} files, {orphans} outside of the table; {elapsed_s:.0f} s"
    )
    if not is_right:
        print(found)
    return 0 if is_right else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    parser.add_argument("--without-spark", action="store_true")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    logging.getLogger("jetspark").setLevel(logging.ERROR)  # the server is away now and then
    with tempfile.TemporaryDirectory(prefix="fire-") as folder, s3_server() as s3, NatsServer() as server:
        fire = Fire(server, s3, Path(folder), random.Random(given.seed))
        try:
            return _burn(fire, given.messages, given.kills, has_spark=not given.without_spark)
        except BaseException:
            print(Path(folder, "writers.log").read_text(errors="replace")[-8000:], file=sys.stderr)
            raise
        finally:
            fire.end_all()


if __name__ == "__main__":
    sys.exit(main())
