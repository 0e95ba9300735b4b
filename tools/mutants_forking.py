"""A pytest plugin that runs the tests of one module with many mistakes in it, one mistake at a time.

pytest collects the tests once. One process runs them all without a mistake and notes which test reaches which line of
the module, and how long it takes. Then each mistake gets a process of its own, forked from the one that has collected:
it exchanges the code of the changed function, wherever that is referred to, and runs the tests that reach the changed
line, those that noticed this mistake or the one before it first, and quick ones before slow ones. It ends with the
first test that fails.

Whether a mistake in a function is noticed while the module is being imported cannot be seen this way; ``mutants``
plants each survivor once more, from the beginning.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import mutants
import pytest

# A mistake may make a test fill the memory.
MAX_NEW_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class Reach:
    """What one test does without any mistake."""

    duration_s: float
    lines: frozenset[int]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    if session.testsfailed:
        pytest.exit("the tests cannot be collected", 2)
    work = json.loads(Path(os.environ["MUTANTS_WORK"]).read_text(encoding="utf-8"))
    path = work["path"]
    text = Path(path).read_text(encoding="utf-8")
    found = {(each.place, each.variant): each for each in mutants.mutants(work["module"], text)}
    with os.fdopen(int(os.environ["MUTANTS_OUTPUT"]), "w", encoding="utf-8") as output:
        os.set_inheritable(output.fileno(), False)
        reaches = measure(session, path)
        gc.unfreeze()  # or the collector would not list what has been collected so far
        live = live_functions(path)
        first = ""
        for place, variant, hint in work["mutants"]:
            mutant = found[place, variant]
            tests = answerable(session.items, reaches, mutant.lines, (hint, first))
            usual_s = sum(reaches[item.nodeid].duration_s for item in tests)
            limit_s = max(work["min_limit_s"], work["max_slowness"] * usual_s)
            noticed_by = try_mutant(session, exchanges(mutant, path, live), tests, limit_s)
            first = noticed_by or first
            print(json.dumps([place, variant, noticed_by]), file=output, flush=True)
    return True


def measure(session: pytest.Session, path: str) -> dict[str, Reach]:
    """Run every test without a mistake, in a process of its own, and return what it reaches."""

    def run(write: Callable[[Any], None]) -> None:
        lines: set[int] = set()

        def trace_lines(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return trace_lines

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            return trace_lines if frame.f_code.co_filename == path else None

        for item, following in pairs(session.items):
            lines.clear()
            begun = time.monotonic()
            sys.settrace(trace)
            try:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            finally:
                sys.settrace(None)
            write([item.nodeid, time.monotonic() - begun, sorted(lines), session.testsfailed])

    reaches: dict[str, Reach] = {}
    for name, duration_s, lines, failures in in_child(run, limit_s=None):
        if failures:
            pytest.exit(f"{name} fails without any mistake", 2)
        reaches[name] = Reach(duration_s, frozenset(lines))
    if len(reaches) != len(session.items):
        pytest.exit("not every test gave a result without any mistake", 2)
    return reaches


def answerable(
    items: Sequence[pytest.Item], reaches: dict[str, Reach], lines: range, first: tuple[str | None, ...]
) -> list[pytest.Item]:
    """The tests that reach one of the lines, the most promising first."""
    reaching = [item for item in items if not reaches[item.nodeid].lines.isdisjoint(lines)]
    return sorted(reaching, key=lambda item: (item.nodeid not in first, reaches[item.nodeid].duration_s))


def try_mutant(
    session: pytest.Session,
    changed: list[tuple[FunctionType, CodeType]],
    tests: list[pytest.Item],
    limit_s: float,
) -> str | None:
    """The test that fails with the changed functions, if one does."""
    if not tests or not changed:
        return None

    def run(write: Callable[[Any], None]) -> None:
        limit_resources(limit_s)
        for function, code in changed:
            function.__code__ = code
        for item, following in pairs(tests):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                write(item.nodeid)
                return
        write(None)

    try:
        results = list(in_child(run, limit_s))
    except TimeoutError:
        return mutants.TIME_LIMIT
    return str(results[0]) if results and results[0] else None if results else "a crash"


# ---- exchanging code -------------------------------------------------------------------------------------------------


def live_functions(path: str) -> dict[str, list[FunctionType]]:
    """Every function of a module that anything refers to, by its name and line."""
    live: dict[str, list[FunctionType]] = {}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename == path:
            live.setdefault(name_of(each.__code__), []).append(each)
    return live


def exchanges(
    mutant: mutants.Mutant, path: str, live: dict[str, list[FunctionType]]
) -> list[tuple[FunctionType, CodeType]]:
    """The functions that a mistake changes, each with its new code; none where that cannot be said."""
    old = codes(compile(mutant.text, path, "exec"))
    new = codes(compile(mutant.tree(), path, "exec"))
    changed = []
    for name, before in old.items():
        after = new.get(name, [])
        if len(before) != 1 or len(after) != 1:
            if before != after:
                return []  # several of one name in one line
            continue
        if before[0] != after[0]:
            for function in live.get(name, ()):
                if len(function.__closure__ or ()) != len(after[0].co_freevars):
                    return []
                changed.append((function, after[0]))
    return changed


def codes(code: CodeType) -> dict[str, list[CodeType]]:
    """Every piece of code in a piece of code, by its name and line."""
    found: dict[str, list[CodeType]] = {}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found.setdefault(name_of(each), []).append(each)
            for name, inner in codes(each).items():
                found.setdefault(name, []).extend(inner)
    return found


def name_of(code: CodeType) -> str:
    return f"{code.co_qualname}:{code.co_firstlineno}"


# ---- processes -------------------------------------------------------------------------------------------------------


def pairs(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Each test with the one after it, which pytest wants to know."""
    return zip(items, [*items[1:], None], strict=True)


def in_child(run: Callable[[Callable[[Any], None]], None], limit_s: float | None) -> Iterator[Any]:
    """What ``run`` writes, in a copy of this process that ends with it.

    Raises:
        TimeoutError: It took longer than ``limit_s``.
    """
    output, into = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            with os.fdopen(into, "w", encoding="utf-8") as lines:
                run(lambda value: print(json.dumps(value), file=lines, flush=True))
        finally:
            os._exit(0)
    os.close(into)
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_REAL, limit_s or 0)
    try:
        with os.fdopen(output, encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.waitpid(pid, 0)


def limit_resources(seconds: float) -> None:
    """Let this process end by itself when a mistake makes it run for ever, or fill the memory."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1,) * 2)
    sizes = Path("/proc/self/statm")  # on Linux
    if sizes.exists():
        used = int(sizes.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_NEW_MEMORY_BYTES,) * 2)


def _out_of_time(number: int, frame: object) -> None:
    raise TimeoutError
