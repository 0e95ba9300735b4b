"""The tool that plants mistakes: it plants what it says, one at a time, where somebody promises something."""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load("mutants")
forking = load("mutants_forking")


def changes(source: str) -> list[tuple[str, str]]:
    return [(mutant.before, mutant.after) for mutant in tool.mutants("m.py", source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", [("a < b", "a <= b"), ("a < b", "a >= b")]),
        ("a and b", [("a and b", "a or b")]),
        ("x += y", [("x += y", "x -= y")]),
        ("f(x)", [("f(x)", "pass")]),
        ("def f(): x = True", [("x = True", "pass"), ("x = True", "x = False")]),
        ("x = True", [("x = True", "x = False")]),  # that there is no x, mypy sees
        ("def f(): return x", [("return x", "return None")]),
        ("if a:\n    f(1, b)", [("if a:", "if not a:"), ("f(1, b)", "pass"), ("f(1, b)", "f(2, b)")]),
        (
            "match a:\n    case 1 if b > c:\n        pass",
            [("case 1 if b > c:", f"case {after}:") for after in ("1 if b >= c", "1 if b <= c", "2 if b > c")],
        ),
        ("raise ValueError(1)", []),
        ("__all__ = ['f', 1]", []),
        ("T = TypeVar('T', bound=f(1))", []),
        ("Mode = Literal['a', 1]", []),
        ("__slots__ = ('a',)", []),
        ("MAX = 1000", []),
        ("MAX = 1 << 20", []),
        ("MAX = 2", [("MAX = 2", "MAX = 3")]),
        ("class A:\n    size: int = 1 << 20\n    most: int = 500", []),
        ("class A:\n    count: int = 2", [("count: int = 2", "count: int = 3")]),
        ("_logger.debug('%d', 1)", []),
        ("for x in zip(a, b, strict=True): pass", []),
        ("def f(): return False", [("return False", "return True")]),
        ("def f(a=1): pass", [("def f(a=1):", "def f(a=2):")]),
        ("@d(1)\ndef f(x: List[1]): pass", []),
    ],
)
def test_a_mistake_is_what_it_says(source: str, expected: list[tuple[str, str]]) -> None:
    assert changes(source) == expected


def test_each_mutant_has_one_mistake_and_is_still_python() -> None:
    source = "def f(a):\n    if a > 1:\n        g(a)\n    return a + 1\n"
    sources = [mutant.source() for mutant in tool.mutants("m.py", source)]
    assert len(sources) == len(set(sources)) == len(changes(source)) > 5
    for each in sources:
        assert ast.unparse(ast.parse(each)) != ast.unparse(ast.parse(source))


def test_the_tests_it_runs_exist() -> None:
    for module, tests in tool.MODULES.items():
        assert (tool.PACKAGE / module).exists(), module
        for test in tests:
            assert (tool.REPOSITORY / test).exists(), test


# A package of one module, and tests that leave something to find.
SMALL = """
import functools

LIMIT = 2

def kept(function):
    @functools.wraps(function)
    def call(*arguments):
        return function(*arguments)
    return call

@kept
def is_over(number, by=0):
    return number > LIMIT + by

class Counter:
    def __init__(self):
        self.count = 0

    @property
    def next(self):
        return self.count + 1

    def numbers(self):
        for number in range(LIMIT):
            self.count += 1
            yield number + 1
        self.unseen = 5

"""
SMALL_TESTS = """
from jetspark.small import Counter, is_over

def test_over():
    assert is_over(5)
    assert is_over(3)
    assert not is_over(1)
    assert not is_over(3, 2)

def test_numbers():
    counter = Counter()
    assert list(counter.numbers()) == [1, 2]
    assert counter.next == 3
"""


@pytest.mark.slow
def test_it_finds_what_the_tests_do_not_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    (tmp_path / "test_small.py").write_text(SMALL_TESTS)
    (tmp_path / "conftest.py").write_text(f"import jetspark\njetspark.__path__.append({str(tmp_path)!r})\n")
    for name, value in {"PACKAGE": tmp_path, "REPOSITORY": tmp_path, "CACHE": tmp_path / "kept"}.items():
        monkeypatch.setattr(tool, name, value)
    monkeypatch.setattr(tool, "MODULES", {"small.py": ["test_small.py"]})
    monkeypatch.setattr(tool, "PLUGIN_FOLDER", Path(tool.__file__).parent)

    survivors = [
        "small.py is_over: return number > LIMIT + by  =>  return number >= LIMIT + by",
        "small.py Counter.numbers: self.unseen = 5  =>  pass",
        "small.py Counter.numbers: self.unseen = 5  =>  self.unseen = 6",
    ]
    argued = [
        survivors[0],
        "small.py is_over: gone  =>  pass",
        "small.py Counter.next: return self.count + 1  =>  return None",
    ]
    assert not tool.examine("small.py", argued)
    printed = capsys.readouterr().out
    assert sorted(line[7:] for line in printed.splitlines() if line.startswith("lives")) == sorted(survivors[1:])
    assert "stale  small.py is_over: gone  =>  pass  (there is no such mistake)\n" in printed
    assert "return None  (test_small.py::test_numbers)\n" in printed

    assert tool.examine("small.py", survivors)
    assert "(0 planted now" in capsys.readouterr().out  # it remembers

    with (tmp_path / "test_small.py").open("a") as file:
        file.write("\ndef test_fails(): assert False\n")
    with pytest.raises(SystemExit, match="test_fails fails without any mistake"):
        tool.examine("small.py", survivors)


WAITING_TESTS = """
import os, time

def test_waits():
    with open("begun", "w") as file:
        file.write(str(os.getpid()))
    os.rename("begun", "running")
    time.sleep(600)
"""
RUN = """
import sys
from pathlib import Path

import mutants

mutants.PACKAGE = mutants.REPOSITORY = Path.cwd()
mutants.CACHE = Path.cwd() / "kept"
mutants.MODULES = {"small.py": ["test_small.py"], "other.py": ["test_small.py"]}
sys.argv = ["mutants.py"]
sys.exit(mutants.main())
"""


@pytest.mark.slow
def test_a_run_that_is_told_to_end_ends_with_its_children(tmp_path: Path) -> None:
    for name, text in {"small.py": SMALL, "other.py": SMALL, "test_small.py": WAITING_TESTS}.items():
        (tmp_path / name).write_text(text)
    environment = os.environ | {"PYTHONPATH": str(Path(tool.__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", RUN], cwd=tmp_path, env=environment) as run:
        while not (tmp_path / "running").exists():
            assert run.poll() is None
            time.sleep(0.05)
        run.terminate()
        assert run.wait(60) == 1
    child = Path("/proc") / (tmp_path / "running").read_text()
    while child.exists():  # until it is reaped
        time.sleep(0.05)
    assert not (tmp_path / "kept").exists()  # what was interrupted found nothing out


def test_a_mistake_that_waits_for_ever_is_ended() -> None:
    def run(write: Callable[[Any], None]) -> None:
        write("begun")
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        threading.Event().wait()

    results = forking.in_child(run)
    assert next(results) == "begun"
    with pytest.raises(TimeoutError):
        next(results)


def test_what_is_argued_is_not_open() -> None:
    argued, still_open = tool.listed(tool.ARGUED), tool.listed(tool.OPEN)
    assert argued.keys() & still_open.keys() == set()
    assert {*argued.values(), *still_open.values()} <= tool.MODULES.keys()


def test_modules_are_chosen_by_name_or_folder() -> None:
    assert tool.chosen(["state/scan", "src/jetspark/state/store.py", "state/scan.py"]) == [
        "state/scan.py",
        "state/store.py",
    ]
    assert set(tool.chosen(["publish/"])) == {each for each in tool.MODULES if each.startswith("publish/")}
    assert tool.chosen([]) == list(tool.MODULES)
    with pytest.raises(KeyError, match="state/sca"):
        tool.chosen(["state/sca"])
