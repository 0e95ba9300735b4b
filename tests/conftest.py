"""Which tests go first, and what every Spark they start has in common."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import chain, zip_longest
from pathlib import Path

import pytest
from support import class_archive

# Files are handed out one at a time to as many processes as there are cores. The long ones come first, so that none is
# begun when there is nothing left to do beside it. Those that keep the processors busy, as Spark does, take turns with
# those that mostly wait for servers.
BUSY = ["test_spark_deaths", "test_docs", "test_bench", "test_spark_setup", "test_batches", "test_demo"]
WAITING = ["test_pull", "test_fast_replicated", "test_replicated", "test_atomic", "test_cluster", "test_batcher_sinks"]
LONG_FIRST = [stem for stem in chain.from_iterable(zip_longest(BUSY, WAITING)) if stem]

# Spark starts with a quarter of the processor time, and no test is about its own speed.
os.environ.setdefault("JDK_JAVA_OPTIONS", class_archive.java_options())
# `test_spark_setup` has sessions that find their Python by themselves.
os.environ["JETSPARK_TESTS_PYTHON"] = sys.executable
for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
    os.environ.setdefault(variable, str(Path(__file__).parent / "support" / "worker_python.sh"))


_archiving: list[subprocess.Popen[bytes]] = []


def pytest_sessionstart(session: pytest.Session) -> None:
    """The whole suite starts many Sparks: the process that hands out its tests has their classes parsed meanwhile."""
    is_handing_out = session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput")
    if is_handing_out and (process := class_archive.begin()):
        _archiving.append(process)


def pytest_sessionfinish() -> None:
    for process in _archiving:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> tuple[int, bool]:
        stem = item.path.stem
        return LONG_FIRST.index(stem) if stem in LONG_FIRST else len(LONG_FIRST), "spark" not in stem

    items.sort(key=rank)
