"""Which tests go first, and what every Spark they start has in common."""

from __future__ import annotations

import os
from itertools import chain, zip_longest

import pytest
from support import seeds

# Files are handed out one at a time to as many processes as there are cores. The long ones come first, so that none is
# begun when there is nothing left to do beside it. Those that keep the processors busy, as Spark does, take turns with
# those that mostly wait for servers.
BUSY = ["test_spark_deaths", "test_docs", "test_bench", "test_spark_setup", "test_batches", "test_demo"]
WAITING = ["test_pull", "test_fast_replicated", "test_replicated", "test_atomic", "test_cluster", "test_batcher_sinks"]
LONG_FIRST = [stem for stem in chain.from_iterable(zip_longest(BUSY, WAITING)) if stem]

# The first compiler only, the simplest collector, and classes that are not verified: Spark starts in half the time, and
# no test is about its own speed.
os.environ.setdefault(
    "JDK_JAVA_OPTIONS",
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote",
)


def pytest_report_header() -> str:
    return seeds.header()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.verbosity < 0:  # then there was no header
        terminalreporter.write_line(seeds.header())


def pytest_configure() -> None:
    seeds.draw()  # before processes are started, which have to draw the same


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> tuple[int, bool]:
        stem = item.path.stem
        return LONG_FIRST.index(stem) if stem in LONG_FIRST else len(LONG_FIRST), "spark" not in stem

    items.sort(key=rank)
