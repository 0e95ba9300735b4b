"""Plant small mistakes in pure modules, one at a time, and list those that no unit test notices.

``make mutants`` plants ``--count`` mistakes in each module (chosen by ``--seed``) and runs the module's tests against
the package with the mistake. A mistake that the tests let pass (a survivor) is a missing test, or a change that changes
nothing: the latter are argued in ``tools/mutants.argued``, a line each, and are not listed again.

The mistakes are the classic ones: a comparison turned or moved by one, ``and`` for ``or``, a condition negated, a
number off by one, ``+`` for ``-``, a statement left out, ``None`` returned instead of a value.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "src" / "jetspark"
ARGUED = REPOSITORY / "tools" / "mutants.argued"

# Module -> the tests that are answerable for it. They know no server, so that a mistake costs seconds.
MODULES = {
    "app/contracts/compatibility.py": ["tests/unit/test_app_compatibility.py"],
    "app/contracts/catalogue.py": ["tests/unit/test_app_events.py", "tests/unit/test_app_envelope.py"],
    "app/contracts/envelope.py": ["tests/unit/test_app_envelope.py"],
    "app/contracts/field_rules.py": ["tests/unit/test_app_events.py"],
    "app/contracts/other_forms.py": ["tests/unit/test_app_envelope.py"],
    "app/contracts/records.py": ["tests/unit/test_app_records.py"],
    "app/contracts/schemas.py": ["tests/unit/test_app_compatibility.py", "tests/unit/test_app_records.py"],
    "app/contracts/tokens.py": ["tests/unit/test_app_tokens.py"],
    "app/topology/declared.py": ["tests/unit/test_app_topology.py"],
    "core/reconnect.py": ["tests/unit/test_reconnect.py", "tests/unit/test_lifecycle.py"],
    "core/subscription.py": ["tests/unit/test_subscription.py", "tests/unit/test_connection.py"],
    "jetstream/kv.py": ["tests/unit/test_js_kv.py"],
    "jetstream/objects.py": ["tests/unit/test_objects.py"],
    "jetstream/ordered.py": ["tests/unit/test_js_ordered.py"],
    "jetstream/pull.py": ["tests/unit/test_pull.py"],
    "publish/atomic.py": ["tests/unit/test_atomic.py"],
    "publish/atomic_resolve.py": ["tests/unit/test_atomic.py"],
    "publish/fast_publisher.py": ["tests/unit/test_fast_publisher.py"],
    "publish/fast.py": ["tests/unit/test_fast.py", "tests/unit/test_fast_publisher.py"],
    "publish/fast_losses.py": ["tests/unit/test_fast_losses.py", "tests/unit/test_fast.py"],
    "publish/fast_opening.py": ["tests/unit/test_fast_opening.py", "tests/unit/test_fast.py"],
    "publish/fast_sending.py": ["tests/unit/test_fast_sending.py", "tests/unit/test_fast.py"],
    "publish/fast_wire.py": ["tests/unit/test_fast_wire.py", "tests/unit/test_fast.py"],
    "publish/window.py": ["tests/unit/test_window.py"],
    "spark/offsets.py": ["tests/unit/test_spark_offsets.py"],
    "state/apply.py": ["tests/unit/test_state_store.py"],
    "state/changes.py": ["tests/unit/test_state_changes.py", "tests/unit/test_state_store.py"],
    "state/fold.py": ["tests/unit/test_state_fold.py"],
    "state/lookup.py": ["tests/unit/test_state_lookup.py"],
    "state/scan.py": ["tests/unit/test_state_scan.py"],
    "state/store.py": ["tests/unit/test_state_store.py"],
}

# A mistake may make a test wait for ever.
TIMEOUT_S = 120.0

# Characters of a statement that are shown of a mistake in it.
MAX_SHOWN = 160

_TURNED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    before: str
    after: str
    text: str
    """The module as it was."""
    place: int
    """Of the node that is changed, among all of the module's."""
    variant: int

    def __str__(self) -> str:
        return f"{self.module}: {self.before}  =>  {self.after}"

    def source(self) -> str:
        """The module with the mistake in it."""
        tree = ast.parse(self.text)
        _change(list(ast.walk(tree))[self.place], self.variant)
        return ast.unparse(tree)


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Every single mistake that this tool knows to make in a module."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    skipped = {id(node) for unit in nodes for node in _unasked(unit)}
    places = {id(node): place for place, node in enumerate(nodes)}
    statement_of = {node: nodes[places[id(statement)]] for node, statement in _statements(tree, tree)}
    for place, node in enumerate(nodes):
        if id(node) in skipped:
            continue
        for variant in range(_variants(node)):
            statement = statement_of[id(node)]
            before = [_first_line(each) for each in (statement, node)]
            kind, fields = type(node), dict(vars(node))
            _change(node, variant)
            after = [_first_line(each) for each in (statement, node)]
            node.__class__ = kind
            vars(node).clear()
            vars(node).update(fields)
            # A number by itself is in many places. It must do where the first line of a statement shows nothing of it,
            # or more than anybody would read.
            which = 0 if before[0] != after[0] and len(before[0]) <= MAX_SHOWN else 1
            if before[which] != after[which]:
                yield Mutant(module, getattr(node, "lineno", 0), before[which], after[which], source, place, variant)


def _statements(node: ast.AST, statement: ast.AST) -> Iterator[tuple[int, ast.AST]]:
    """The id of each node, with the statement or case it is in."""
    if isinstance(node, ast.stmt | ast.match_case):
        statement = node
    yield id(node), statement
    for child in ast.iter_child_nodes(node):
        yield from _statements(child, statement)


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).strip().splitlines()[0]


def _unasked(unit: ast.AST) -> Iterator[ast.AST]:
    """Types, decorators, ``__all__`` and what only raises: nobody promises their exact form, or other tests hold it."""
    for decorator in getattr(unit, "decorator_list", ()):
        yield from ast.walk(decorator)
    match unit:
        case ast.Raise() | ast.Assert():
            yield from ast.walk(unit)
        case ast.arg(annotation=ast.expr() as annotation) | ast.AnnAssign(annotation=annotation):
            yield from ast.walk(annotation)
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar"))):
            yield from ast.walk(unit)
        case ast.Assign(value=ast.Subscript(value=ast.Name(id="Literal"))):
            yield from ast.walk(unit)
        case ast.FunctionDef(returns=ast.expr() as returns, name=name):
            yield from ast.walk(unit if name in ("__repr__", "__str__") else returns)


def _variants(node: ast.AST) -> int:
    match node:
        case ast.Compare(ops=[operator]):
            return len(_TURNED.get(type(operator), ()))
        case ast.BoolOp() | ast.AugAssign(op=ast.Add() | ast.Sub()) | ast.BinOp(op=ast.Add() | ast.Sub()):
            return 1
        case ast.If() | ast.While() | ast.IfExp():
            return 1
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return 1
        case ast.Constant(value=bool()):
            return 1
        case ast.Expr(value=ast.Call()) | ast.Assign():
            return 1
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            return 1
    return 0


def _change(node: ast.AST, variant: int) -> None:
    match node:
        case ast.Compare(ops=[operator]):
            node.ops = [_TURNED[type(operator)][variant]()]
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.AugAssign() | ast.BinOp():
            node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        case ast.If() | ast.While() | ast.IfExp():
            node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant(value=int() as number):
            node.value = number + 1
        case ast.Return():
            node.value = ast.Constant(value=None)
        case ast.Expr() | ast.Assign():
            # In place: the node's parent keeps it.
            node.__class__ = ast.Pass  # type: ignore[assignment]
            node._fields = ()  # type: ignore[misc]


# Python runs this when it starts: the one module is imported from another file, and the rest of the package as always,
# compiled already.
REDIRECT = """
import importlib.util, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location({name!r}, {path!r}) if name == {name!r} else None

sys.meta_path.insert(0, Finder)
"""


def survives(mutant: Mutant) -> bool:
    """Whether the tests of the module pass with the mistake in it."""
    name = "jetspark." + mutant.module.removesuffix(".py").replace("/", ".")
    with tempfile.TemporaryDirectory(prefix="jetspark-mutant-") as folder:
        changed = Path(folder) / "changed.py"
        changed.write_text(mutant.source(), encoding="utf-8")
        redirect = REDIRECT.format(name=name, path=str(changed))
        (Path(folder) / "sitecustomize.py").write_text(redirect, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
        try:
            done = subprocess.run(
                [*command, *MODULES[mutant.module]],
                cwd=REPOSITORY,
                env=os.environ | {"PYTHONPATH": folder},
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help=f"some of: {', '.join(MODULES)}; all when none is named")
    parser.add_argument("--count", type=int, default=20, help="mistakes in each module; 0 is every one")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    options = parser.parse_args()
    if unknown := set(options.modules) - MODULES.keys():
        parser.error(f"unknown module {', '.join(sorted(unknown))}: expected some of {', '.join(MODULES)}")
    argued = {line for line in ARGUED.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"}
    rng = random.Random(options.seed)
    planted: list[Mutant] = []
    for module in options.modules or MODULES:
        source = (PACKAGE / module).read_text(encoding="utf-8")
        found = [each for each in mutants(module, source) if str(each) not in argued]
        planted += rng.sample(found, min(options.count or len(found), len(found)))
    lived = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, is_alive in zip(planted, pool.map(survives, planted), strict=True):
            if is_alive:
                lived += 1
                print(f"lives  {mutant}  (line {mutant.line})", flush=True)
    print(f"{len(planted)} mistakes planted, {lived} not noticed")
    return 1 if lived else 0


if __name__ == "__main__":
    sys.exit(main())
