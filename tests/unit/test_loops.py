"""The list of tests that run on uvloop names tests that there are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.loops import DRIVERS, FILES, TESTS, drivers_of

CONFORMANCE = Path(__file__).parents[1] / "conformance"


@pytest.mark.parametrize("file", [*FILES, *TESTS])
def test_every_named_file_has_tests_with_a_driver_and_every_named_test_is_one_of_them(file: str) -> None:
    tree = ast.parse((CONFORMANCE / f"{file}.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    tests = {node.name for node in functions if "driver" in {argument.arg for argument in node.args.args}}
    assert tests
    assert set(TESTS.get(file, {})) <= tests


def test_other_tests_run_without_uvloop() -> None:
    assert drivers_of("test_login", "test_any") == DRIVERS
    assert drivers_of("test_fast", "test_a_server_that_dies_under_a_batch") == DRIVERS
    assert drivers_of("test_fast", "test_an_id_may_be_given") == ["asyncio", "blocking"]
    assert drivers_of("test_kv", "test_any") == ["asyncio", "blocking"]
