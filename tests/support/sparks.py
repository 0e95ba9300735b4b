"""A small, quiet Spark for tests that need one: ``pytest_plugins = ["support.sparks"]``, then the fixtures ``spark``,
and ``server`` and ``js`` for what it reads and writes.

Tests that kill Spark have the fixture ``drivers`` instead: each is a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.processes import descendants
from jetspark.blocking import JetStream, connect
from jetspark.errors import ConnectionLost
from jetspark.server import NatsServer
from jetspark.spark import connections
from jetspark.spark.session import session
from support import spark_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CORES = 2

CONF = {
    "spark.driver.memory": "1g",
    "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir()) / f"jetspark-tests-{uuid.uuid4().hex}"),
    # Checkpoints by rename instead of through processes that are forked for each file: 90 ms less a micro-batch.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    # Queries here see few rows: to compile Java for each takes a fifth of all that Java does, and saves nothing. The
    # documentation, the demo and `test_spark_setup` have it compiled, as users have.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # A batch without data is for watermarks, which no test here has.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # Where workers find the folds of `support.folds`, and the package of this tree rather than an installed one.
    "spark.executorEnv.PYTHONPATH": os.pathsep.join(
        str(Path(__file__).resolve().parents[2] / each) for each in ("tests", "src")
    ),
}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """With the formats registered. Shared: tests use names of their own, and stop the queries they start."""
    session_ = session("jetspark-tests", cores=CORES, conf=CONF)
    yield session_
    session_.stop()


@pytest.fixture
def js(server: NatsServer) -> Iterator[JetStream]:
    with connect(server.url) as client:
        yield client.jetstream()


@pytest.fixture(autouse=True)
def _no_connection_is_left() -> Iterator[None]:
    """Tests that do a task's work themselves are its process, which would keep the connection for the next one."""
    yield
    while connections._kept:
        # A test that has stopped its server leaves a request without an answer.
        with contextlib.suppress(ConnectionLost):
            connections._kept.popitem()[1].close()


class Driver:
    """A process with a Spark of its own, to be killed. The start takes longest, so it waits to be told to go."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self._folder = folder
        folder.mkdir()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if plan.pop("has_own_workers", False):
            environment.pop(spark_python.VARIABLE, None)
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.spark_driver", json.dumps(plan), str(folder)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )

    def go(self) -> None:
        self.wait_for("ready")
        (self._folder / "go").touch()

    def wait_for(self, name: str) -> None:
        """Until it has left such a note."""
        deadline = time.monotonic() + 300
        while not (self._folder / name).exists():
            assert self.is_running, self.log()[-6000:]
            assert time.monotonic() < deadline, self.log()[-6000:]
            time.sleep(0.02)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill_worker(self) -> bool:
        """One of the Python processes that do the work of tasks; False if there is none at the moment.

        They are found where the driver was started with ``has_own_workers=True``: a fork is no descendant of it.
        """
        workers = [pid for pid in descendants(self._process.pid) if _is_worker(pid)]
        if not workers:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(random.choice(workers), signal.SIGKILL)
        return True

    def terminate(self) -> None:
        """Ask it to end, as an operator does; Java and Python's workers are not asked."""
        self._process.terminate()

    def kill(self) -> None:
        if self.is_running:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def finish(self) -> None:
        try:
            code = self._process.wait(500)
        except subprocess.TimeoutExpired:
            code = None
        assert code == 0, self.log()[-6000:]

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")


def _is_worker(pid: int) -> bool:
    """Whether a daemon of Spark's has forked it, and it runs tasks."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        names = [Path(f"/proc/{each}/cmdline").read_text() for each in (pid, parent)]
    except OSError:
        return False
    return all("pyspark.daemon\0pyspark.worker" in name for name in names)


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Starts one with jobs to do, one after the other or ``at_once``; ends what the test leaves."""
    started: list[Driver] = []

    def start(*jobs: dict[str, Any], **plan: Any) -> Driver:
        started.append(Driver(tmp_path / f"driver-{len(started)}", {**plan, "jobs": jobs}))
        return started[-1]

    yield start
    for driver in started:
        driver.kill()
