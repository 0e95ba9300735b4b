"""A pytest plugin that runs the tests of one module with many mistakes in it, one mistake at a time.

pytest collects the tests once. One process runs them all without a mistake and notes which test reaches which line of
the module, and how long it takes, unless that is known from an earlier run. Then each mistake gets a process of its
own, forked from the one that has collected: it exchanges the code of the changed function, wherever that is referred
to, and runs the tests that reach the changed line, those that noticed this mistake or the one before it first, and
quick ones before slow ones. It ends with the first test that fails.

What a function does while modules are being imported cannot be changed this way. A mistake in a line that runs then,
and survives, is not certain to be unnoticed: ``mutants`` plants it once more, from the beginning.
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

import hypothesis
import mutants
import pytest

# A mistake may make a test fill the memory.
MAX_NEW_MEMORY_BYTES = 1 << 30


class Lines:
    """Notes which lines of one module run, from ``begin`` to ``end``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.seen: set[int] = set()

    def begin(self) -> None:
        self.seen = set()
        sys.settrace(self._on_call)

    def end(self) -> frozenset[int]:
        sys.settrace(None)
        return frozenset(self.seen)

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Any:
        # A module's own code runs once, and exchanging functions does not change it.
        is_function = frame.f_code.co_name != "<module>"
        return self._on_line if is_function and frame.f_code.co_filename == self._path else None

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.seen.add(frame.f_lineno)
        return self._on_line


@dataclass(frozen=True)
class Reach:
    """What one test does without any mistake."""

    duration_s: float
    lines: frozenset[int]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    if session.testsfailed:
        pytest.exit("the tests cannot be collected", 2)
    at_import = lines_run.end()
    path = work["path"]
    text = Path(path).read_text(encoding="utf-8")
    found = {(each.place, each.variant): each for each in mutants.mutants(work["module"], text)}
    with os.fdopen(int(os.environ["MUTANTS_OUTPUT"]), "w", encoding="utf-8") as output:
        os.set_inheritable(output.fileno(), False)
        stop_at_first_example(session.items)
        reaches = kept_reaches(session.items) or measure(session)
        gc.unfreeze()  # or the collector would not list what has been collected so far
        live = live_functions(path)
        gc.collect()
        gc.freeze()  # children share its memory as long as the collector does not write to it
        old = codes(compile(text, path, "exec"))
        first = ""
        for place, variant, hint in work["mutants"]:
            mutant = found[place, variant]
            tests = answerable(session.items, reaches, mutant.lines, (hint, first))
            changed = exchanges(old, codes(compile(mutant.tree(), path, "exec")), live)
            noticed_by = try_mutant(session, changed, [(test, limit_of(reaches[test.nodeid])) for test in tests])
            first = noticed_by or first
            is_certain = noticed_by is not None or (bool(changed) and at_import.isdisjoint(mutant.lines))
            print(json.dumps([place, variant, noticed_by, is_certain]), file=output, flush=True)
    return True


def stop_at_first_example(items: Sequence[pytest.Item]) -> None:
    """Let Hypothesis not look for the shortest example that fails: that takes seconds, and nobody reads it."""
    for item in items:
        function = getattr(item, "function", None)
        usual = getattr(function, "_hypothesis_internal_use_settings", None)
        if usual is not None:
            phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
            function._hypothesis_internal_use_settings = hypothesis.settings(usual, phases=phases)  # type: ignore[union-attr]


def kept_reaches(items: Sequence[pytest.Item]) -> dict[str, Reach]:
    """What an earlier run has measured of these tests; nothing where one of them, or the module, has changed."""
    path = Path(work["reaches_path"])
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if kept.get("digests") != work["digests"] or kept["reaches"].keys() != {item.nodeid for item in items}:
        return {}
    return {name: Reach(duration_s, frozenset(lines)) for name, (duration_s, lines) in kept["reaches"].items()}


def keep(reaches: dict[str, Reach]) -> None:
    path = Path(work["reaches_path"])
    rows = {name: (reach.duration_s, sorted(reach.lines)) for name, reach in reaches.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new-reaches")
    new.write_text(json.dumps({"digests": work["digests"], "reaches": rows}), encoding="utf-8")
    new.replace(path)


def measure(session: pytest.Session) -> dict[str, Reach]:
    """Run every test without a mistake, in a process of its own, and return what it reaches."""

    def run(write: Callable[[Any], None]) -> None:
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            begun = time.monotonic()
            lines_run.begin()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            write([item.nodeid, time.monotonic() - begun, sorted(lines_run.end()), session.testsfailed])

    reaches: dict[str, Reach] = {}
    for name, duration_s, lines, failures in in_child(run):
        if failures:
            pytest.exit(f"{name} fails without any mistake", 2)
        reaches[name] = Reach(duration_s, frozenset(lines))
    if len(reaches) != len(session.items):
        pytest.exit("not every test gave a result without any mistake", 2)
    keep(reaches)
    return reaches


def answerable(
    items: Sequence[pytest.Item], reaches: dict[str, Reach], lines: range, first: tuple[str | None, ...]
) -> list[pytest.Item]:
    """The tests that reach one of the lines, the most promising first."""
    reaching = [item for item in items if not reaches[item.nodeid].lines.isdisjoint(lines)]
    return sorted(reaching, key=lambda item: (item.nodeid not in first, reaches[item.nodeid].duration_s))


def limit_of(reach: Reach) -> float:
    """Seconds after which a test that takes this long without a mistake is ended."""
    return float(max(work["min_limit_s"], work["max_slowness"] * reach.duration_s))


def try_mutant(
    session: pytest.Session, changed: list[tuple[FunctionType, CodeType]], tests: list[tuple[pytest.Item, float]]
) -> str | None:
    """The test that fails with the changed functions, if one does. Each comes with the seconds it may take."""
    if not tests or not changed:
        return None

    def run(write: Callable[[Any], None]) -> None:
        limit_memory()
        for function, code in changed:
            function.__code__ = code
        for (item, limit_s), following in zip(tests, [*(item for item, _ in tests[1:]), None], strict=True):
            signal.setitimer(signal.ITIMER_REAL, limit_s)  # the signal ends the process
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                write(item.nodeid)
                return
        write(None)

    try:
        results = list(in_child(run))
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
    old: dict[str, list[CodeType]], new: dict[str, list[CodeType]], live: dict[str, list[FunctionType]]
) -> list[tuple[FunctionType, CodeType]]:
    """The functions that a mistake changes, each with its new code; none where that cannot be said."""
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


def in_child(run: Callable[[Callable[[Any], None]], None]) -> Iterator[Any]:
    """What ``run`` writes, in a copy of this process that ends with it.

    Raises:
        TimeoutError: The alarm it has set went off.
    """
    output, into = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            with os.fdopen(into, "w", encoding="utf-8") as lines:
                run(lambda value: print(json.dumps(value), file=lines, flush=True))
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(output, encoding="utf-8") as lines:
        yield from map(json.loads, lines)
    if os.waitpid(pid, 0)[1] == signal.SIGALRM:
        raise TimeoutError


def limit_memory() -> None:
    """Let this process fail when a mistake makes it fill the memory."""
    sizes = Path("/proc/self/statm")  # on Linux
    if sizes.exists():
        used = int(sizes.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_NEW_MEMORY_BYTES,) * 2)


if "MUTANTS_WORK" in os.environ:  # then pytest is loading this, before anything of the package
    work = json.loads(Path(os.environ["MUTANTS_WORK"]).read_text(encoding="utf-8"))
    lines_run = Lines(work["path"])
    lines_run.begin()
