"""How the whole suite is packed into a few processes: in which order its parts begin, and what stays together.

Most tests wait (for a server to restart, an election, a time-out) and some keep a processor busy (Spark, the
simulations). There are three processes to a core: one that takes the busy parts first and two that take the others, so
that those run while these wait. A process is given one part after the other: a file, or of the long files each function
or each case. The long parts begin first, so that none is begun when there is nothing left to do beside it. A process
that finds no more parts of its kind takes those of the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from support.loops import DRIVERS

PROCESSES_PER_CORE = 3
# More would spend their time on collecting 7,000 tests each, and there are not that many long parts.
MOST_PROCESSES = 16

TESTS = Path(__file__).resolve().parents[1]


def _sharing_spark() -> list[str]:
    """The files whose tests have the fixture ``spark``, the longest first."""
    texts = {file: file.read_text(encoding="utf-8") for file in sorted((TESTS / "integration").glob("test_*.py"))}
    sharing = [file for file, text in texts.items() if "spark: SparkSession" in text]
    return [f"integration/{file.name}" for file in sorted(sharing, key=lambda file: -len(texts[file]))]


# A session of Spark is started once in each process that has tests for it: they go to two.
_sharing = _sharing_spark()
SESSION = "session of Spark"
SESSIONS = [_sharing[0::4] + _sharing[3::4], _sharing[1::4] + _sharing[2::4]]

# Nothing that takes long to make is shared by the functions of these files, or, below, by the cases of a function.
BY_FUNCTION = {
    "conformance/test_atomic.py",
    "conformance/test_batcher_sinks.py",
    "conformance/test_fast.py",
    "conformance/test_fast_replicated.py",
    "conformance/test_kv.py",
    "conformance/test_objects.py",
    "conformance/test_ordered.py",
    "conformance/test_pull.py",
    "conformance/test_reconnect.py",
    "conformance/test_replicated.py",
    "integration/test_bench.py",
    "integration/test_cluster.py",
    "integration/test_docs.py",
    "integration/test_embedded_server.py",
    "integration/test_spark_deaths.py",
}
BY_CASE = {
    "conformance/test_js_stopped_server.py",
    "conformance/test_unresponsive.py",
    "integration/apps/test_app_guarantees.py",
    "integration/test_spark_setup.py",
    "simulation/test_batcher.py",
    "simulation/test_batches.py",
    "simulation/test_projections.py",
}
# One function with a case for each operation, which share a server and its witness.
BY_DRIVER = {"conformance/test_interrupts.py"}

# Parts with long tests, by the beginning of their names.
BUSY = [
    *(files[0] for files in SESSIONS),
    "integration/test_spark_deaths.py::test_deaths",
    "integration/test_spark_deaths.py",
    "integration/test_spark_setup.py",
    "integration/test_demo.py",
    "integration/test_docs.py",
    "integration/test_bench.py",
    "integration/test_spark_reading.py",
    "integration/test_batcher_ingest.py",
    "simulation/",
]
WAITING = [
    "conformance/test_batch_server.py",
    "conformance/test_replicated.py",
    "conformance/test_fast_replicated.py",
    "conformance/test_unresponsive.py",
    "conformance/test_interrupts.py",
    "integration/apps/test_app_demonstration.py",
    "integration/apps/test_app_guarantees.py",
    "conformance/test_atomic.py",
    "conformance/test_fast.py",
    "conformance/test_kv.py",
    "conformance/test_pull.py",
    "conformance/test_batcher_sinks.py",
    "integration/test_cluster.py",
    "conformance/",
]
ORDER = [part for part in chain.from_iterable(zip_longest(BUSY, WAITING)) if part]


def _within_tests(nodeid: str) -> str:
    return nodeid.removeprefix("tests/")


def part_of(nodeid: str) -> str:
    """What a test is handed out with."""
    name = _within_tests(nodeid)
    file = name.partition("::")[0]
    for number, files in enumerate(SESSIONS):
        if file in files:
            return f"{SESSION} {number}"
    if file in BY_CASE:
        return name
    if file in BY_DRIVER:
        return f"{file} {next((driver for driver in DRIVERS if driver in name), '')}"
    return name.partition("[")[0] if file in BY_FUNCTION else file


def rank(nodeid: str) -> int:
    """Where in the order its part has its place: by the longest name in ``ORDER`` that it begins with."""
    name = _within_tests(nodeid)
    found = [part for part in ORDER if name.startswith(part)]
    if not found:
        found = [files[0] for files in SESSIONS if name.partition("::")[0] in files]
    return ORDER.index(max(found, key=len)) if found else len(ORDER)


def is_busy(part: str) -> bool:
    return part.startswith((SESSION, *BUSY))


class Packing(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out parts in the order of the collection, busy ones and others to different processes while it can."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return part_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        takes_busy = int(node.gateway.id.removeprefix("gw")) % PROCESSES_PER_CORE == 0
        liked = next((part for part in self.workqueue if is_busy(part) == takes_busy), None)
        if liked is not None:
            self.workqueue.move_to_end(liked, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        # When two processes have died, the one that takes the place of the first has not yet collected its tests when
        # the second's are handed out anew. Its turn comes when it has; without this the whole run ends with a KeyError.
        if node in self.registered_collections:
            super()._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        # Parts that are done would be handed out anew. The process that takes the place of one that died gets one part
        # to begin with, has nothing to do if that is done, says so to nobody, and is never given another.
        parts = self.assigned_work[node].items()
        self.assigned_work[node] = {part: tests for part, tests in parts if not all(tests.values())}
        crashed: str | None = super().remove_node(node)
        return crashed

    def unfinished(self) -> list[str]:
        """The tests that were not run to their end."""
        units = chain(self.workqueue.values(), *(work.values() for work in self.assigned_work.values()))
        return [nodeid for unit in units for nodeid, is_complete in unit.items() if not is_complete]


def processes() -> int:
    return min(PROCESSES_PER_CORE * (os.cpu_count() or 1), MOST_PROCESSES)


def named_files() -> Iterator[str]:
    """Every file or folder that is named here."""
    yield from (part.partition("::")[0] for part in ORDER)
    yield from chain(BY_FUNCTION, BY_CASE, BY_DRIVER, *SESSIONS)
