"""Which tests go first, and what every Spark they start has in common."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support import bytecode, class_archive, packing, scratch, seeds, spark_python

# pytest has it by its entry point, too, save in an environment that is older than that.
# Its asserts are explained, whoever imports it first.
pytest.register_assert_rewrite("support.sparks")

pytest_plugins = ["pytest_jetspark", "support.fixtures"]

# The suite starts hundreds of Python processes. Where bytecode is not to be written, each of them would compile the
# package again, and each of pytest's the tests: half a second a time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts what runs in its background with SIGINT ignored, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Spark starts with a quarter of the processor time, and no test is about its own speed.
os.environ.setdefault("JDK_JAVA_OPTIONS", class_archive.java_options())
# `test_spark_setup` has sessions that find their Python by themselves.
os.environ["JETSPARK_TESTS_PYTHON"] = sys.executable
for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
    os.environ.setdefault(variable, str(Path(__file__).parent / "support" / "worker_python.sh"))


# Fixtures with which a test is slow, whatever it does: a Spark takes seconds to start.
NEEDS_SPARK = {"spark", "drivers"}

_archiving: list[subprocess.Popen[bytes]] = []
_scratch: list[Path] = []
_until_the_end = contextlib.ExitStack()
_schedulers: list[packing.Packing] = []
_internal_errors: list[str] = []
_handled: list[BaseException] = []


def pytest_sessionstart(session: pytest.Session) -> None:
    """The process that hands out tests prepares what all others need: Spark's classes, parsed, and the tests, compiled.

    This comes before xdist starts the others. The classes are parsed while they run their first tests.
    """
    if hasattr(session.config, "workerinput"):
        return
    _scratch.append(scratch.begin(session.config._tmp_path_factory.getbasetemp()))  # type: ignore[attr-defined]
    _until_the_end.enter_context(spark_python.forks(_scratch[0]))
    if not session.config.getoption("numprocesses", None):
        return
    if process := class_archive.begin():
        _archiving.append(process)
    bytecode.write()


def pytest_internalerror(excrepr: object) -> None:
    _internal_errors.append(str(excrepr))


@pytest.hookimpl(tryfirst=True)  # before pytest writes down what has failed
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that ends with an internal error leaves its tests undone: they count as failed, to be run again."""
    failures = session.config.pluginmanager.get_plugin("lfplugin")
    if failures is not None and _internal_errors:
        failures.lastfailed |= dict.fromkeys(chain.from_iterable(each.unfinished() for each in _schedulers), True)
    for process in _archiving:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test that leaves an exception as handled fails; later ones would find it as the context of their own.

    Only an interrupt at a bytecode can do that: see ``support.interrupts.apart``.
    """
    error = sys.exc_info()[1]
    if error is not None and error not in _handled:
        _handled.append(error)
        raise AssertionError(f"{item.nodeid} leaves {error!r} as handled")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _internal_errors and not hasattr(config, "workerinput"):
        # Last: pytest has no summary after such an error, and of a long run only the end may be kept.
        for nodeid in chain.from_iterable(each.unfinished() for each in _schedulers):
            print(f"Not run to its end: {nodeid}", file=sys.stderr)
        print(f"The first internal error ends with:\n{_internal_errors[0][-1500:]}", file=sys.stderr)
    _until_the_end.close()
    for folder in _scratch:
        scratch.end(folder)


def pytest_report_header() -> str:
    return seeds.header()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.verbosity < 0:  # then there was no header
        terminalreporter.write_line(seeds.header())


def pytest_configure() -> None:
    seeds.draw()  # before processes are started, which have to draw the same


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if NEEDS_SPARK.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: packing.rank(item.nodeid))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collected tests are a quarter of a million objects that live to the end: the collector need not look at them.

    With them, a `gc.collect()` takes 150 ms, and some tests call it a thousand times in all.
    """
    gc.collect()
    gc.freeze()


def pytest_xdist_auto_num_workers() -> int:
    return packing.processes()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> packing.Packing:
    _schedulers.append(packing.Packing(config, log))
    return _schedulers[-1]
