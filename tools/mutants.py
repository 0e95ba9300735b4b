"""Plant small mistakes in pure modules, one at a time, and list those that no test notices.

``make mutants`` plants every mistake it knows in every module below and runs the tests that are answerable for the
module; ``python tools/mutants.py state/scan core/`` does it for one module and for those of one folder. A mistake that
the tests let pass (a survivor) is a missing test, or a change that changes nothing: the latter are argued in
``tools/mutants.argued``, a line each, and are not listed again. Survivors that nobody has judged yet are in
``tools/mutants.open``, which may only get shorter. A line of either file is stale when the mistake is no longer there,
or when a test notices it after all. Survivors in neither file and stale lines fail the run.

The mistakes are the classic ones: a comparison turned or moved by one, ``and`` for ``or``, a condition negated, a
number off by one, ``+`` for ``-``, a statement left out, ``None`` returned instead of a value.

A mistake inside a function is planted by ``tools/mutants_forking.py``, which collects the tests once and runs only
those that reach the changed line: a tenth of a second each. A mistake that survives this and could have been noticed
at import, and one outside functions, is planted in a process of its own, which imports the module with the mistake in
it and runs all of the module's tests.

What was found, and which test reaches which line, is kept in ``.pytest_cache/mutants`` until the module or its tests
change, so an interrupted run goes on where it was; after a change, the test that noticed a mistake is asked first. Each
module has a file of its own there: start the tool several times, with other modules, to use several cores. With
``--survivors``, a mistake that was noticed counts as noticed also after its tests have changed: for those who add tests
one by one.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "src" / "jetspark"
ARGUED = REPOSITORY / "tools" / "mutants.argued"
OPEN = REPOSITORY / "tools" / "mutants.open"
PLUGIN_FOLDER = REPOSITORY / "tools"
CACHE = REPOSITORY / ".pytest_cache" / "mutants"

# Module -> the tests that are answerable for it. They know no server, so that a mistake costs seconds.
MODULES = {
    "app/commands/boundaries.py": ["tests/unit/test_app_commands.py", "tests/unit/test_app_command_timers.py"],
    "app/commands/decision_messages.py": ["tests/unit/test_app_commands.py"],
    "app/contracts/catalogue.py": ["tests/unit/test_app_events.py", "tests/unit/test_app_envelope.py"],
    "app/contracts/compatibility.py": ["tests/unit/test_app_compatibility.py"],
    "app/contracts/envelope.py": ["tests/unit/test_app_envelope.py"],
    "app/contracts/field_rules.py": ["tests/unit/test_app_events.py"],
    "app/contracts/foreign_envelopes.py": ["tests/unit/test_app_envelope.py"],
    "app/contracts/contract_records.py": ["tests/unit/test_app_records.py"],
    "app/contracts/schemas.py": ["tests/unit/test_app_compatibility.py", "tests/unit/test_app_records.py"],
    "app/contracts/tokens.py": ["tests/unit/test_app_tokens.py"],
    "app/entities/changes.py": ["tests/unit/test_app_entities.py"],
    "app/handlers/lanes.py": ["tests/unit/test_app_handlers.py"],
    "app/handlers/machine.py": ["tests/unit/test_app_handlers.py", "tests/unit/test_app_procedures.py"],
    "app/handlers/retry.py": ["tests/unit/test_app_retry.py", "tests/unit/test_app_handlers.py"],
    "app/handlers/procedures.py": ["tests/unit/test_app_procedures.py", "tests/unit/test_app_handlers.py"],
    "app/projections/router.py": [
        "tests/unit/test_app_projections.py",
        "tests/unit/test_app_projection_windows.py",
        "tests/unit/test_app_unique_ids.py",
    ],
    "app/projections/key_state.py": [
        "tests/unit/test_app_projections.py",
        "tests/unit/test_app_projection_lookups.py",
        "tests/unit/test_app_projection_windows.py",
        "tests/unit/test_app_live_states.py",
    ],
    "app/projections/live_states.py": ["tests/unit/test_app_live_states.py"],
    "app/projections/windows.py": ["tests/unit/test_app_projection_windows.py"],
    "app/extents.py": ["tests/unit/test_app_replay.py"],
    "app/jobs.py": ["tests/unit/test_app_jobs.py"],
    "app/topology/declared.py": ["tests/unit/test_app_topology.py"],
    "app/turns.py": ["tests/unit/test_app_turns.py"],
    "app/workflows/workflow_spec.py": [
        "tests/unit/test_app_workflows.py",
        "tests/unit/test_app_workflow_commands.py",
    ],
    "batcher/circuit.py": ["tests/unit/test_batcher_sinks.py"],
    "batcher/dead_letters.py": ["tests/unit/test_batcher_sinks.py"],
    "batcher/fences.py": ["tests/unit/test_batcher_fences.py"],
    "batcher/jetstream_sinks.py": [
        "tests/unit/test_batcher_jetstream_sinks.py",
        "tests/unit/test_batcher_sinks.py",
    ],
    "batcher/machine.py": ["tests/unit/test_batcher_machine.py"],
    "batcher/metered.py": ["tests/unit/test_batcher_sinks.py"],
    "batcher/rate_limit.py": ["tests/unit/test_batcher_sinks.py"],
    "batcher/retry.py": ["tests/unit/test_batcher_sinks.py"],
    "batcher/sink_base.py": ["tests/unit/test_batcher_sinks.py", "tests/unit/test_batcher_jetstream_sinks.py"],
    "batcher/waiting_items.py": ["tests/unit/test_batcher_waiting_items.py"],
    "core/auth.py": ["tests/unit/test_auth.py"],
    "core/backoff.py": ["tests/unit/test_backoff.py"],
    "core/confirmations.py": [
        "tests/unit/test_confirmations.py",
        "tests/unit/test_lame_duck.py",
        "tests/unit/test_connection.py",
    ],
    "core/connection.py": [
        "tests/unit/test_connection.py",
        "tests/unit/test_lifecycle.py",
        "tests/unit/test_subscription.py",
    ],
    "core/dispatcher.py": ["tests/unit/test_dispatcher.py"],
    "core/frames.py": ["tests/unit/test_frames.py", "tests/unit/test_connection.py"],
    "core/handshake.py": ["tests/unit/test_handshake.py", "tests/unit/test_info.py", "tests/unit/test_connection.py"],
    "core/headers.py": ["tests/unit/test_headers.py"],
    "core/lifecycle.py": ["tests/unit/test_lifecycle.py", "tests/unit/test_closing.py"],
    "core/numbers.py": ["tests/unit/test_numbers.py"],
    "core/outbox.py": ["tests/unit/test_outbox.py", "tests/unit/test_connection.py"],
    "core/parser.py": ["tests/unit/test_parser.py"],
    "core/reconnect.py": ["tests/unit/test_reconnect.py", "tests/unit/test_lifecycle.py"],
    "core/requests.py": ["tests/unit/test_requests.py", "tests/unit/test_names.py", "tests/unit/test_connection.py"],
    "core/subjects.py": ["tests/unit/test_subjects.py"],
    "core/subscription.py": [
        "tests/unit/test_subscription.py",
        "tests/unit/test_subscriptions.py",
        "tests/unit/test_connection.py",
    ],
    "jetstream/acks.py": ["tests/unit/test_acks.py"],
    "jetstream/checks.py": ["tests/unit/test_js_checks.py", "tests/unit/test_js_config.py"],
    "jetstream/config.py": [
        "tests/unit/test_js_config.py",
        "tests/unit/test_js_checks.py",
        "tests/unit/test_js_wire.py",
    ],
    "jetstream/direct_get.py": ["tests/unit/test_js_batchget.py"],
    "jetstream/errors.py": ["tests/unit/test_js_errors.py"],
    "jetstream/features.py": ["tests/unit/test_js_features.py", "tests/unit/test_js_operations.py"],
    "jetstream/info.py": ["tests/unit/test_js_info.py"],
    "jetstream/kv.py": ["tests/unit/test_js_kv.py"],
    "jetstream/objects.py": ["tests/unit/test_objects.py", "tests/unit/test_js_checks.py"],
    "jetstream/operations.py": ["tests/unit/test_js_operations.py"],
    "jetstream/ordered.py": ["tests/unit/test_js_ordered.py"],
    "jetstream/publishing.py": ["tests/unit/test_js_publishing.py"],
    "jetstream/pull.py": ["tests/unit/test_pull.py", "tests/unit/test_js_ordered.py"],
    "jetstream/wire.py": ["tests/unit/test_js_wire.py"],
    "publish/atomic.py": ["tests/unit/test_atomic.py"],
    "publish/atomic_resolve.py": ["tests/unit/test_atomic.py"],
    "publish/fast_backlog.py": ["tests/unit/test_fast_backlog.py", "tests/unit/test_fast_publisher.py"],
    "publish/fast_batch.py": ["tests/unit/test_fast_batch.py", "tests/unit/test_fast_publisher.py"],
    "publish/fast_options.py": ["tests/unit/test_fast_batch.py", "tests/unit/test_fast_publisher.py"],
    "publish/fast_publisher.py": ["tests/unit/test_fast_publisher.py"],
    "publish/fast_replies.py": ["tests/unit/test_fast_replies.py", "tests/unit/test_fast_batch.py"],
    "publish/fast_sending.py": [
        "tests/unit/test_fast_sending.py",
        "tests/unit/test_fast_batch.py",
        "tests/unit/test_fast_publisher.py",
    ],
    "publish/outgoing.py": ["tests/unit/test_outgoing.py"],
    "publish/window.py": ["tests/unit/test_window.py"],
    "spark/offsets.py": ["tests/unit/test_spark_offsets.py"],
    "spark/options.py": ["tests/unit/test_spark_options.py"],
    "lake/reply_subjects.py": ["tests/unit/test_lake_reply_subjects.py"],
    "state/changes.py": ["tests/unit/test_state_changes.py", "tests/unit/test_state_store.py"],
    "state/deliveries.py": ["tests/unit/test_state_deliveries.py"],
    "state/lookup.py": ["tests/unit/test_state_lookup.py"],
    "state/losses.py": ["tests/unit/test_state_losses.py"],
    "state/patience.py": ["tests/unit/test_state_patience.py"],
    "state/scan.py": ["tests/unit/test_state_scan.py"],
    "state/store.py": ["tests/unit/test_state_store.py"],
    "state/tables.py": ["tests/unit/test_state_tables.py"],
}

# From here on a number that a module names is a matter of measure, and one more or less makes no difference.
LARGE_NUMBER = 10

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
    unit: str
    """The function or class it is in, such as ``Window.publish``; empty for the module itself."""
    is_in_function: bool
    """Whether it changes what a function does when it is called, and nothing else."""
    lines: range
    """Those of the source that run when the mistake does."""
    before: str
    after: str
    text: str
    """The module as it was."""
    place: int
    """Of the node that is changed, among all of the module's."""
    variant: int

    def __str__(self) -> str:
        return f"{self.module}{self.unit and ' '}{self.unit}: {self.before}  =>  {self.after}"

    def tree(self) -> ast.Module:
        """The module with the mistake in it."""
        tree = ast.parse(self.text)
        _change(list(ast.walk(tree))[self.place], self.variant)
        return ast.fix_missing_locations(tree)

    def source(self) -> str:
        return ast.unparse(self.tree())


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Every single mistake that this tool knows to make in a module."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    skipped = {id(node) for unit in nodes for node in _unasked(unit)}
    places = {id(node): place for place, node in enumerate(nodes)}
    statement_of = {node: nodes[places[id(statement)]] for node, statement in _statements(tree, tree)}
    units = {id(node): unit for node, unit in _units(tree, _Unit("", is_body=False))}
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
                unit, lines = units[id(node)], _lines(node, statement)
                yield Mutant(
                    module, unit.name, unit.is_body, lines, before[which], after[which], source, place, variant
                )


def _statements(node: ast.AST, statement: ast.AST) -> Iterator[tuple[int, ast.AST]]:
    """The id of each node, with the statement or case it is in."""
    if isinstance(node, ast.stmt | ast.match_case):
        statement = node
    yield id(node), statement
    for child in ast.iter_child_nodes(node):
        yield from _statements(child, statement)


@dataclass(frozen=True)
class _Unit:
    name: str
    is_body: bool
    """Whether it is code that runs when the function of this name is called."""


def _units(node: ast.AST, unit: _Unit) -> Iterator[tuple[ast.AST, _Unit]]:
    """Each node, with the function or class it is in. Defaults and decorators belong to what is around a function."""
    yield node, unit
    for name, value in ast.iter_fields(node):
        inner = unit
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            full = f"{unit.name}.{node.name}" if unit.name else node.name
            is_body = unit.is_body or (name == "body" and not isinstance(node, ast.ClassDef))
            inner = _Unit(full, is_body)
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _units(child, inner)


def _lines(node: ast.AST, statement: ast.AST) -> range:
    """The lines a tracer would name for the part of a statement that a mistake is in."""
    part = node.test if isinstance(node, ast.If | ast.While) else node
    first, last = getattr(statement, "lineno", 0), getattr(part, "end_lineno", 0)
    return range(min(first or part.lineno, part.lineno), last + 1)  # type: ignore[attr-defined]


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).strip().splitlines()[0]


def _unasked(unit: ast.AST) -> Iterator[ast.AST]:
    """Types, decorators, ``__all__``, ``__slots__``, what only raises, what is logged for debugging.

    Nobody promises their exact form, or other tests hold it. ``zip(strict=True)`` only raises, like an ``assert``. And
    the large numbers that a module or a class names: nobody counts to 10,001. That a name is there at all, mypy sees.
    """
    for decorator in getattr(unit, "decorator_list", ()):
        yield from ast.walk(decorator)
    match unit:
        case ast.ClassDef():
            yield from _large_numbers(unit)
        case ast.Module():
            yield from _large_numbers(unit)
            yield from (statement for statement in unit.body if isinstance(statement, ast.Assign))
        case ast.Raise() | ast.Assert():
            yield from ast.walk(unit)
        case ast.arg(annotation=ast.expr() as annotation) | ast.AnnAssign(annotation=annotation):
            yield from ast.walk(annotation)
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            yield from ast.walk(unit)
        case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar"))):
            yield from ast.walk(unit)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="_logger"), attr="debug"))):
            yield from ast.walk(unit)
        case ast.Call(func=ast.Name(id="zip"), keywords=[ast.keyword(arg="strict", value=value)]):
            yield value
        case ast.Assign(value=ast.Subscript(value=ast.Name(id="Literal"))):
            yield from ast.walk(unit)
        case ast.FunctionDef(returns=ast.expr() as returns, name=name):
            yield from ast.walk(unit if name in ("__repr__", "__str__") else returns)


def _large_numbers(unit: ast.Module | ast.ClassDef) -> Iterator[ast.AST]:
    for statement in unit.body:
        match statement:
            case ast.Assign(value=value) | ast.AnnAssign(value=value):
                match value:
                    case ast.Constant(value=int() as number) if number >= LARGE_NUMBER:
                        yield value
                    case ast.BinOp(op=ast.LShift()):
                        yield from ast.walk(value)


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
        case ast.Return(value=ast.Constant(value=None | False)):
            return 0  # None is as false as False, which is turned by itself
        case ast.Return(value=ast.expr()):
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


# ---- which of them live ----------------------------------------------------------------------------------------------

# A mistake may make a test wait for ever. This is for all tests of a module, which take seconds without it.
TIMEOUT_S = 120.0

# The same for one test, which takes fractions of a second: this, or twenty times what it takes without a mistake.
MIN_LIMIT_S = 5.0
MAX_SLOWNESS = 20.0

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

# Hypothesis tries the same examples every time and remembers none where CI is set. The seeds of simulations are fixed
# for the same reason: whether a mistake is noticed must not depend on luck.
ENVIRONMENT = os.environ | {"CI": "1", "JETSPARK_FRESH_SEED": "1000000"}
PYTEST = [sys.executable, "-m", "pytest", "-q", "--tb=native", "-p", "no:cacheprovider", "-o", "timeout=0"]

# Instead of the name of the test that noticed a mistake: it ran into its time limit.
TIME_LIMIT = "the time limit"


def is_noticed(mutant: Mutant) -> str | None:
    """The first of all tests of the module that fails when the mistake is in it from the beginning, if one does."""
    name = "jetspark." + mutant.module.removesuffix(".py").replace("/", ".")
    with tempfile.TemporaryDirectory(prefix="jetspark-mutant-") as folder:
        changed = Path(folder) / "changed.py"
        changed.write_text(mutant.source(), encoding="utf-8")
        redirect = REDIRECT.format(name=name, path=str(changed))
        (Path(folder) / "sitecustomize.py").write_text(redirect, encoding="utf-8")
        try:
            done = subprocess.run(
                [*PYTEST, "-x", *MODULES[mutant.module]],
                cwd=REPOSITORY,
                env=ENVIRONMENT | {"PYTHONPATH": folder},
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return TIME_LIMIT
    if done.returncode == 0:
        return None
    failed = [line.split()[1] for line in done.stdout.decode().splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else "the import"


Mode: TypeAlias = Literal["go on", "fresh", "survivors"]


class Findings:
    """Which test noticed each mistake of one module, kept from run to run."""

    def __init__(self, module: str, mode: Mode = "go on") -> None:
        self._path = CACHE / (module.replace("/", ".") + ".json")
        self.reaches_path = self._path.with_suffix(".reaches")
        """Which test reaches which line; ``mutants_forking`` writes it."""
        tests = b"".join((REPOSITORY / test).read_bytes() for test in MODULES[module])
        self.digests = [hashlib.sha256(text).hexdigest() for text in ((PACKAGE / module).read_bytes(), tests)]
        if mode == "fresh":
            self.reaches_path.unlink(missing_ok=True)
        self.hints: dict[str, str] = {}
        """Tests that noticed a mistake before the module or its tests changed."""
        self.noticed: dict[str, str | None] = {}
        if mode != "fresh" and self._path.exists():
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            self.hints = {name: test for name, test in kept["noticed"].items() if test}
            if kept["digests"] == self.digests:
                self.noticed = kept["noticed"]
            elif kept["digests"][0] == self.digests[0] and mode == "survivors":
                self.noticed = dict(self.hints)

    @staticmethod
    def name(mutant: Mutant) -> str:
        # The text of a mistake may be that of several.
        return f"{mutant.place}.{mutant.variant} {mutant}"

    def add(self, mutant: Mutant, noticed_by: str | None) -> None:
        self.noticed[self.name(mutant)] = noticed_by
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"digests": self.digests, "noticed": self.noticed}), encoding="utf-8")
        new.replace(self._path)


def plant(module: str, findings: Findings) -> Iterator[Mutant]:
    """Plant every mistake of a module whose outcome is not known; yields each once it is."""
    found = list(mutants(module, (PACKAGE / module).read_text(encoding="utf-8")))
    left = [each for each in found if findings.name(each) not in findings.noticed]
    alone = {(each.place, each.variant): each for each in left}
    for key, noticed_by, is_certain in _forked(module, [each for each in left if each.is_in_function], findings):
        if is_certain:
            findings.add(alone[key], noticed_by)
            yield alone.pop(key)
    for mutant in alone.values():
        findings.add(mutant, is_noticed(mutant))
        yield mutant


def _forked(
    module: str, inside: list[Mutant], findings: Findings
) -> Iterator[tuple[tuple[int, int], str | None, bool]]:
    """What ``mutants_forking`` finds out about mistakes inside functions."""
    if not inside:
        return
    with tempfile.TemporaryDirectory(prefix="jetspark-mutants-") as folder:
        work = Path(folder) / "work.json"
        rows = [[each.place, each.variant, findings.hints.get(findings.name(each))] for each in inside]
        path = str(PACKAGE / module)
        limit = {"min_limit_s": MIN_LIMIT_S, "max_slowness": MAX_SLOWNESS}
        kept = {"reaches_path": str(findings.reaches_path), "digests": findings.digests}
        work.write_text(json.dumps({"module": module, "path": path, "mutants": rows} | limit | kept), encoding="utf-8")
        output, into = os.pipe()
        log = (Path(folder) / "log").open("w+b")
        process = subprocess.Popen(
            [*PYTEST, "-p", "mutants_forking", "--basetemp", str(Path(folder) / "temp"), *MODULES[module]],
            cwd=REPOSITORY,
            env=ENVIRONMENT
            | {"PYTHONPATH": str(PLUGIN_FOLDER), "MUTANTS_WORK": str(work), "MUTANTS_OUTPUT": str(into)},
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[into],
            start_new_session=True,  # so that it ends with all its children
        )
        os.close(into)
        try:
            with os.fdopen(output, encoding="utf-8") as lines:
                for line in lines:
                    place, variant, noticed_by, is_certain = json.loads(line)
                    yield (place, variant), noticed_by, is_certain
            if process.wait():
                log.seek(0)
                raise SystemExit(f"{module}: its tests fail, or cannot be run:\n{log.read().decode()[-4000:]}")
        finally:
            log.close()
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


# ---- what is told about them -----------------------------------------------------------------------------------------


def listed(path: Path) -> dict[str, str]:
    """Each mistake in a file of them, with its module."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {line: line.split(":")[0].split()[0] for line in lines}


def judge(findings: dict[str, str | None], known: Iterable[str]) -> tuple[list[str], list[str]]:
    """The survivors of one module that are in no file, and the lines of the files that are stale."""
    known = set(known)
    lives = [name.split(" ", 1)[1] for name, noticed_by in findings.items() if noticed_by is None]
    noticed = {name.split(" ", 1)[1]: noticed_by for name, noticed_by in findings.items() if noticed_by is not None}
    stale = [f"{each}  ({noticed.get(each, 'there is no such mistake')})" for each in sorted(known - set(lives))]
    return [each for each in lives if each not in known], stale


def examine(module: str, known: Iterable[str], mode: Mode = "go on") -> bool:
    """Whether all mistakes of a module are noticed, or known not to be. Prints what is not."""
    begun, planted = time.monotonic(), 0
    findings = Findings(module, mode)
    for _ in plant(module, findings):
        planted += 1
        if sys.stderr.isatty():
            print(f"\r{module}: {planted}", end="\r", file=sys.stderr, flush=True)
    lives, stale = judge(findings.noticed, known)
    for each in lives:
        print(f"lives  {each}")
    for each in stale:
        print(f"stale  {each}")
    seconds = time.monotonic() - begun
    total, outcome = len(findings.noticed), f"{len(lives)} not noticed, {len(stale)} stale lines"
    print(f"{module}: {total} mistakes ({planted} planted now, {seconds:.0f} s), {outcome}", flush=True)
    return not lives and not stale


def chosen(names: Iterable[str]) -> list[str]:
    """Modules by name (``state/scan`` or ``state/scan.py``) or folder (``state/``); all when none is named.

    Raises:
        KeyError: There is none of this name.
    """
    found = []
    for name in names:
        path = name.removeprefix("src/jetspark/")
        of_name = [
            module for module in MODULES if module in (path, f"{path}.py") or module.startswith(f"{path.rstrip('/')}/")
        ]
        if not of_name:
            raise KeyError(name)
        found += of_name
    return list(dict.fromkeys(found)) or list(MODULES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "modules", nargs="*", help=f"modules or folders, of: {', '.join(MODULES)}; all when none is named"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--fresh",
        dest="mode",
        action="store_const",
        const="fresh",
        default="go on",
        help="forget what earlier runs found",
    )
    mode.add_argument(
        "--survivors",
        dest="mode",
        action="store_const",
        const="survivors",
        help="plant only what survived, though tests have changed",
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that processes are ended on the way out
    try:
        modules = chosen(options.modules)
    except KeyError as error:
        parser.error(f"unknown module {error}: expected some of {', '.join(MODULES)}")
    still_open = listed(OPEN)
    known = listed(ARGUED) | still_open
    unknown = [each for each, module in known.items() if module not in MODULES]
    for each in unknown:
        print(f"stale  {each}  (there is no such module)")

    def run(module: str) -> bool:
        return examine(module, [each for each, of in known.items() if of == module], options.mode)

    outcomes = [run(module) for module in modules]
    unjudged = sum(module in modules for module in still_open.values())
    print(
        f"{sum(outcomes)} of {len(modules)} modules are clean; {unjudged} survivors in {OPEN.name} are not judged yet"
    )
    return 0 if all(outcomes) and not unknown else 1


if __name__ == "__main__":
    sys.exit(main())
