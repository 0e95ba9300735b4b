"""The tool that plants mistakes: it plants what it says, one at a time, where somebody promises something."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("mutants", Path(__file__).parents[2] / "tools" / "mutants.py")
assert _spec is not None
assert _spec.loader is not None
tool = sys.modules["mutants"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)


def changes(source: str) -> list[tuple[str, str]]:
    return [(mutant.before, mutant.after) for mutant in tool.mutants("m.py", source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", [("a < b", "a <= b"), ("a < b", "a >= b")]),
        ("a and b", [("a and b", "a or b")]),
        ("x += y", [("x += y", "x -= y")]),
        ("f(x)", [("f(x)", "pass")]),
        ("x = True", [("x = True", "pass"), ("x = True", "x = False")]),
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
