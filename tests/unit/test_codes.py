from __future__ import annotations

import ast
from pathlib import Path

from jetspark import codes
from jetspark.codes import Code

SOURCE = Path(codes.__file__).parent

# The server's numbers begin at 10001, and 2.15 has not used 300 of them.
NUMBERS = range(10_001, 10_300)


def literals(source: str) -> list[tuple[int, int]]:
    """The numbers of server errors that are written out, each with its line."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return [(node.lineno, node.value) for node in found if type(node.value) is int and node.value in NUMBERS]


def test_server_errors_are_named_and_not_numbered() -> None:
    paths = {*SOURCE.rglob("*.py")}
    assert Path(codes.__file__) in paths
    found = {path: literals(path.read_text(encoding="utf-8")) for path in paths - {Path(codes.__file__)}}
    assert {path: numbers for path, numbers in found.items() if numbers} == {}


def test_a_number_that_is_written_out_is_found() -> None:
    assert literals("a = 1\nif code == 10071 or code == 10_059: pass") == [(2, 10071), (2, 10059)]
    assert literals("'10071'") == []


def test_every_code_is_one_of_the_servers_numbers_and_has_one_name() -> None:
    assert all(code in NUMBERS for code in Code)
    assert len({*Code}) == len(Code.__members__)
    assert sorted(Code) == list(Code)
