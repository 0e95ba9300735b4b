"""The procedures that tests prove are those that workers run."""

from __future__ import annotations

import ast
from pathlib import Path

import jetspark.app.handlers.procedures as module

SOURCE = Path(module.__file__).parents[2]
TESTS = Path(__file__).parents[1]
NAME = module.__name__


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> set[str]:
    """The names that a module imports from the module of procedures."""
    return {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == NAME
        for alias in node.names
    }


def imported_below(folder: Path) -> set[str]:
    texts = [path for path in folder.rglob("*.py") if NAME in path.read_text(encoding="utf-8")]
    return set().union(*(imported(parsed(path)) for path in texts))


def functions() -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    body = parsed(Path(module.__file__)).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def called(node: ast.AST) -> set[str]:
    return {each.func.id for each in ast.walk(node) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)}


def reachable(roots: set[str]) -> set[str]:
    """Functions of the module that run when those named are called."""
    known, found, left = functions(), set[str](), list(roots)
    while left:
        name = left.pop()
        if name in known and name not in found:
            found.add(name)
            left += called(known[name])
    return found


def test_every_procedure_is_run_by_product_code() -> None:
    assert reachable(imported_below(SOURCE)) == set(functions())


def test_tests_prove_only_procedures_that_product_code_runs() -> None:
    proven = imported_below(TESTS) & set(functions())
    assert {"handle", "handle_batch"} <= proven
    assert proven <= reachable(imported_below(SOURCE))


def test_the_worker_handles_events_by_the_whole_procedures_and_by_no_part_of_them() -> None:
    worker = parsed(SOURCE / "app" / "handlers" / "handler_worker.py")
    assert imported(worker) == {"handle", "handle_batch"}
    calls = [
        node.func.id for node in ast.walk(worker) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert (calls.count("handle"), calls.count("handle_batch")) == (1, 1)
    simulator = parsed(TESTS / "simulation" / "app_world.py")
    assert imported(simulator) >= {"handle", "handle_batch"}
    assert {"prepare", "conclude", "is_plain", "needs_preparing"} & imported(simulator) == set()
