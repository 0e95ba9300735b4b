"""The table of layers, as data, and the proof that the imports keep to it.

Everything is read with ``ast``, so nothing is imported, and imports inside functions and under
``if TYPE_CHECKING`` count: a type that points down the table is a dependency too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "jetspark"

_CORE = {"core"}
_JETSTREAM = _CORE | {"jetstream"}
_PUBLISH = _JETSTREAM | {"publish"}
_DRIVERS = _PUBLISH | {"aio", "blocking"}
_APP = _PUBLISH | {"aio", "blocking", "state", "batcher"}
_EVERYTHING = _APP | {"server", "lake", "app", "spark", "testing", "bench", "dashboard", "demo", "cli"}

ROOT = "jetspark"
"""The row of ``jetspark/__init__.py``."""

# Row -> rows it may import. Its own row, `errors` and `codes` (save for those two themselves) are always allowed.
LAYERS: dict[str, set[str]] = {
    "codes": set(),
    "errors": {"codes"},
    "core": set(),
    "jetstream": _CORE,
    "publish": _JETSTREAM,
    "aio": _PUBLISH,
    "blocking": _PUBLISH,
    "state": _PUBLISH,
    "batcher": _DRIVERS,
    # Arguments are checked by the same functions everywhere.
    "server": _CORE,
    # Below `app`, because an archive needs no application, and replay reads archives.
    "lake": _PUBLISH | {"blocking", "state"},
    # `app.testing` is the test kit of applications.
    "app": _APP | {"testing", "server", "lake"},
    "spark": _APP | {"app", "lake"},
    "testing": _DRIVERS | {"server"},
    "bench": _DRIVERS,
    "dashboard": _APP | {"app", "lake"},
    "demo": _APP | {"app", "spark", "server"},
    "cli": (_EVERYTHING - {"cli"}) | {ROOT},
    # `python -m jetspark` is the command line.
    "__main__": {"cli"},
    # What `import jetspark` re-exports. Rows that need an extra at import time stay out.
    ROOT: _DRIVERS | {"batcher", "server"},
}

# The rooms of `app`, from the bottom to the top: a room imports only rooms above it in this list, types included. The
# two exceptions are of `spec`, which names the specification classes of the rooms as the types of its fields.
APP_ROOMS = (
    "_extra",
    "clock",
    "causes",
    "finite_json",
    "patience",
    "turns",
    "signals",
    "denial_watch",
    "contracts",
    "topology",
    "server_clock",
    "stored_events",
    "timers",
    "settings",
    "telemetry",
    "spec",
    "archive_reading",
    "projections",
    "columns",
    "extents",
    "stream_history",
    "entities",
    "commands",
    "handlers",
    "layout",
    "jobs",
    "dead_letters",
    "workflows",
    "provisioning",
    "replay",
    "lag",
    "archive",
    "client",
    "checks",
    "workers",
    "application",
    "testing",
)

# Modules, with everything below them, that use no socket, file, clock, thread, process or random number.
PURE = (
    "core",
    "jetstream",
    "publish",
    "state",
    "batcher.sink_base",
    "batcher.machine",
    "batcher.circuit",
    "batcher.dead_letters",
    "batcher.effects",
    "batcher.metered",
    "batcher.rate_limit",
    "batcher.retry",
    "batcher.jetstream_sinks",
    "app.checks.asyncapi",
    "app.causes",
    "app.lag.measures",
    "app.lag.outlook",
    "app.lag.report",
    "app.commands.boundaries",
    "app.commands.decider",
    "app.commands.command_spec",
    "app.commands.decision_messages",
    "app.commands.service",
    "app.commands.wire",
    "app.contracts.compatibility",
    "app.contracts.catalogue",
    "app.contracts.envelope",
    "app.contracts.events",
    "app.contracts.faults",
    "app.contracts.field_rules",
    "app.entities.changes",
    "app.entities.event_comparison",
    "app.workflows.version_comparison",
    "app.workflows.workflow_spec",
    "app.entities.entity_spec",
    "app.handlers.machine",
    "app.contracts.event_ids",
    "app.handlers.lanes",
    "app.stored_events",
    "app.topology.names",
    "app.contracts.foreign_envelopes",
    "app.projections.projection_spec",
    "app.projections.router",
    "app.projections.key_state",
    "app.projections.state_header",
    "app.contracts.contract_records",
    "app.replay.comparison",
    "app.extents",
    "app.handlers.retry",
    "app.contracts.samples",
    "app.contracts.schemas",
    "app.handlers.handler_steps",
    "app.handlers.procedures",
    "app.contracts.tokens",
    "app.topology.declared",
    "lake.position",
    "lake.log",
    "spark.options",
    "spark.schema",
    "spark.offsets",
    "lake.reply_subjects",
)
IMPURE_MODULES = {
    "_thread",
    "asyncio",
    "concurrent",
    "gc",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "select",
    "selectors",
    "signal",
    "socket",
    "socketserver",
    "ssl",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
OPEN = "open"
"""The built-in function, which needs no import; pure modules may not call it either."""
PURE_EXCEPTIONS = {
    "core.tls": {"ssl"},  # builds the TLS context that both drivers use; opens no connection
    "core.arguments": {"pathlib"},  # checks that an argument is a Path
    "core.options": {"pathlib"},  # Path is the type of fields
    "core.auth": {"pathlib"},  # a credentials file is read again for each login, since it may have been replaced
    "core.gc_tuning": {"gc", "os"},  # sets the garbage collector of the current process, and does nothing else
    "jetstream.objects": {"os", OPEN},  # a source given as a path is opened by the generator that reads it
    "jetstream.part_file": {"os", OPEN},  # the drivers call it in a thread; its subject is a file
    "spark.options": {"os", "pathlib"},  # secrets that options name come from the executor's environment and files
    "spark.schema": {"sys"},  # looks whether Sail is loaded, which takes other types
    "app.contracts.event_ids": {"os"},  # getpid() detects a fork: the counter must not repeat the parent's ids
    "app.contracts.field_rules": {"uuid"},  # UUID is a type of fields
    "app.contracts.tokens": {"uuid"},  # UUID is a type of values in subjects
    "app.contracts.faults": {"sys"},  # exc_info() is the exception that an except clause is about to match
}

# Third-party packages a row may import at the top of a module; anywhere else they belong inside functions.
THIRD_PARTY: dict[str, set[str]] = {
    "app": {"msgspec"},
    "cli": {"click", "rich", "typer"},
    "demo": {"rich"},
    "dashboard": {"jinja2", "starlette", "uvicorn"},
    "lake": {"pyarrow"},
    "spark": {"pandas", "pyarrow", "pyspark"},
    "testing": {"pytest"},
    "__main__": {"jetspark_command"},
}
ARROW_ROOMS = ("app.columns", "app.archive")
"""Packages of `app` that work on Arrow columns. Applications without Spark or a lake do not import them."""


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    runs_on_import: bool
    """False inside functions and under ``if TYPE_CHECKING``."""


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _imports(tree: ast.AST, package: str, runs: bool = True) -> Iterator[Import]:
    """Every import below ``tree``; relative ones are resolved against ``package``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, runs)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                kept = parents[: len(parents) - node.level + 1]
                base = ".".join([*kept, base] if base else kept)
            for alias in node.names:
                # `from jetspark import core` names a row, `from jetspark import connect` the root.
                is_row = base == ROOT and alias.name in LAYERS
                yield Import(f"{base}.{alias.name}" if is_row else base, node.lineno, runs)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(node, package, False)
        elif isinstance(node, ast.If) and _is_type_checking(node.test):
            yield from _imports(ast.Module(node.body, []), package, False)
            yield from _imports(ast.Module(node.orelse, []), package, runs)
        else:
            yield from _imports(node, package, runs)


def _calls_of_open(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == OPEN:
            yield node.lineno


def _is_within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def _check_init(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Allowed: imports, a docstring, ``__all__``, ``__version__``, ``__getattr__`` and ``__dir__`` for lazy exports.

    Both may be hidden from type checkers, which would otherwise accept any name.
    """
    for position, node in enumerate(tree.body):
        match node:
            case ast.Import() | ast.ImportFrom():
                continue
            case ast.Expr(value=ast.Constant(value=str())) if position == 0:
                continue
            case ast.Assign(targets=[ast.Name(id="__all__" | "__version__")]):
                continue
            case ast.AnnAssign(target=ast.Name(id="__all__" | "__version__")):
                continue
            case ast.AugAssign(target=ast.Name(id="__all__")):
                continue
            case ast.FunctionDef(name="__getattr__" | "__dir__"):
                continue
            case ast.If(test=test) if (
                _is_type_checking(test)
                and all(isinstance(inner, ast.Import | ast.ImportFrom) for inner in node.body)
                and all(
                    isinstance(inner, ast.FunctionDef) and inner.name in ("__getattr__", "__dir__")
                    for inner in node.orelse
                )
            ):
                continue
        yield node.lineno, f"an __init__ only re-exports, but has {type(node).__name__}"


def _check_rooms(path: str, imports: Iterable[Import]) -> Iterator[tuple[int, str]]:
    room = path.removeprefix("app/").removesuffix(".py").split("/")[0]
    if room == "__init__":
        return
    if room not in APP_ROOMS:
        yield 0, f"{room!r} is not in the list of rooms of app"
        return
    for each in imports:
        other = each.module.removeprefix("jetspark.app.").split(".")
        if not each.module.startswith("jetspark.app") or other[0] == room:
            continue
        if room == "spec" and other[-1].endswith("_spec") and not each.runs_on_import:
            continue
        if other[0] not in APP_ROOMS or APP_ROOMS.index(other[0]) > APP_ROOMS.index(room):
            yield each.line, f"room {room} may not import {each.module}"


def violations(source: str, path: str) -> list[str]:
    """The violations in a module; ``path`` is relative to the package, such as ``core/parser.py``."""
    parts = path.removesuffix(".py").split("/")
    is_init = parts[-1] == "__init__"
    package = ".".join([ROOT, *parts[:-1]])
    if is_init:
        parts = parts[:-1]
    row = parts[0] if parts else ROOT
    if row not in LAYERS:
        return [f"{path}: {row!r} is not in the layer table"]
    tree = ast.parse(source, path)
    found = list(_check_init(tree)) if is_init else []
    allowed = LAYERS[row] | {row} | (set() if row in ("codes", "errors") else {"codes", "errors"})
    is_pure = _is_within(".".join(parts), PURE)
    if row == "app":
        found += _check_rooms(path, _imports(tree, package))
    impure = IMPURE_MODULES - PURE_EXCEPTIONS.get(".".join(parts), set())
    if is_pure and OPEN not in PURE_EXCEPTIONS.get(".".join(parts), set()):
        found += [(line, f"{row} is pure and may not call open()") for line in _calls_of_open(tree)]
    for each in _imports(tree, package):
        top, _, rest = each.module.partition(".")
        if top == ROOT:
            target = rest.split(".")[0] if rest else ROOT
            if target not in allowed:
                found.append((each.line, f"{row} may not import {each.module}"))
        elif top == "benchmarks":
            found.append((each.line, "benchmarks are not in the wheel"))
        elif is_pure and top in impure:
            found.append((each.line, f"{row} is pure and may not import {each.module}"))
        elif top == "pyarrow" and _is_within(".".join(parts), ARROW_ROOMS):
            continue
        elif top not in sys.stdlib_module_names and each.runs_on_import and top not in THIRD_PARTY.get(row, set()):
            found.append((each.line, f"{row} may import {top} inside functions only"))
    return [f"{path}:{line}: {message}" for line, message in sorted(found)]


MODULES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def test_the_package_is_where_this_test_looks() -> None:
    assert "errors.py" in MODULES


def test_every_module_keeps_to_the_layer_table() -> None:
    assert MODULES
    found = {path: violations((SOURCE / path).read_text(encoding="utf-8"), path) for path in MODULES}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


# Spark looks for formats in top-level modules of these names.
NAMED_BY_SPARK = [
    "pyspark_jetstream",
    "pyspark_jetstream_events",
    "pyspark_jetstream_kv",
    "pyspark_jetstream_projection",
]


@pytest.mark.parametrize(
    ("library", "users"),
    [
        ("pyspark", ("jetspark/spark/",)),
        ("pyarrow", ("jetspark/spark/", "jetspark/lake/", "jetspark/app/columns/", "jetspark/app/archive/")),
    ],
)
def test_a_library_is_named_only_by_the_packages_that_need_it(library: str, users: tuple[str, ...]) -> None:
    """A name in a text counts, too: what only ``spark`` knows about can be exchanged in one place."""
    naming = [
        path.relative_to(SOURCE.parent).as_posix()
        for path in SOURCE.parent.rglob("*.py")
        if library in path.read_text(encoding="utf-8")
    ]
    others = [each for each in naming if not each.startswith(users)]
    assert [each for each in others if not any(each.startswith(name) for name in NAMED_BY_SPARK)] == []


def test_the_table_itself_has_no_cycles() -> None:
    def reachable(row: str, seen: frozenset[str]) -> set[str]:
        assert row not in seen, f"{row} imports itself by way of {sorted(seen)}"
        return {row}.union(*(reachable(below, seen | {row}) for below in LAYERS[row] - {row}))

    for row in LAYERS:
        assert reachable(row, frozenset()) <= set(LAYERS)


def test_exceptions_to_purity_are_of_modules_that_are_pure_and_use_them() -> None:
    for module, allowed in PURE_EXCEPTIONS.items():
        assert _is_within(module, PURE), module
        path = SOURCE.joinpath(*module.split(".")).with_suffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used = {each.module.partition(".")[0] for each in _imports(tree, ROOT)}
        if any(_calls_of_open(tree)):
            used.add(OPEN)
        assert allowed <= used, f"{module}: {sorted(allowed - used)}"


def test_no_module_uses_the_random_generator_of_the_process() -> None:
    """``random.random()`` and its like share one state in the whole process, so a program's seed would not hold."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
                assert node.attr in {"Random", "SystemRandom"}, f"{path}:{node.lineno}: random.{node.attr}"


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("core/x.py", "import jetspark.aio", "core may not import jetspark.aio"),
        ("core/x.py", "from jetspark.aio.client import Client", "core may not import jetspark.aio.client"),
        ("core/x.py", "from jetspark import aio", "core may not import jetspark.aio"),
        ("core/x.py", "from jetspark import connect", "core may not import jetspark"),
        ("core/x.py", "from .. import jetstream", "core may not import jetspark.jetstream"),
        ("core/x.py", "from ..jetstream import wire", "core may not import jetspark.jetstream"),
        ("core/deep/x.py", "from ...aio import y", "core may not import jetspark.aio"),
        ("core/__init__.py", "from ..aio import y", "core may not import jetspark.aio"),
        ("blocking/x.py", "def f():\n    from jetspark.aio import y", "blocking may not import jetspark.aio"),
        ("errors.py", "from jetspark.core import x", "errors may not import jetspark.core"),
        (
            "jetstream/x.py",
            "if TYPE_CHECKING:\n    from jetspark.publish import y",
            "jetstream may not import jetspark.publish",
        ),
        ("server/x.py", "from jetspark.jetstream import y", "server may not import jetspark.jetstream"),
        ("__init__.py", "from .cli import main", "jetspark may not import jetspark.cli"),
        ("core/x.py", "import ssl", "core is pure and may not import ssl"),
        (
            "publish/x.py",
            "def f():\n    from time import monotonic",
            "publish is pure and may not import time",
        ),
        ("core/x.py", "import sys", "core is pure and may not import sys"),
        ("state/x.py", "from os import environ", "state is pure and may not import os"),
        ("jetstream/x.py", "import pathlib", "jetstream is pure and may not import pathlib"),
        ("core/auth.py", "import os", "core is pure and may not import os"),
        ("core/x.py", "def f():\n    return open('x')", "core is pure and may not call open()"),
        ("batcher/machine.py", "import asyncio", "batcher is pure and may not import asyncio"),
        ("core/x.py", "import cryptography", "core may import cryptography inside functions only"),
        ("aio/x.py", "try:\n    import uvloop\nexcept ImportError: pass", "uvloop inside functions only"),
        ("aio/x.py", "import typer", "typer inside functions only"),
        ("core/__init__.py", "x = 1", "only re-exports, but has Assign"),
        ("core/__init__.py", "def helper(): ...", "only re-exports, but has FunctionDef"),
        ("core/__init__.py", "if TYPE_CHECKING:\n    x = 1", "only re-exports, but has If"),
        ("core/__init__.py", "if TYPE_CHECKING:\n    import x\nelse:\n    def f(): ...", "only re-exports, but has If"),
        ("bench/x.py", "def f():\n    from benchmarks import runner", "benchmarks are not in the wheel"),
        ("utils/x.py", "", "'utils' is not in the layer table"),
        ("app/attic/x.py", "", "'attic' is not in the list of rooms"),
        (
            "app/entities/x.py",
            "from jetspark.app.client import AppClient",
            "entities may not import jetspark.app.client",
        ),
        ("app/entities/x.py", "from jetspark.app import App", "room entities may not import jetspark.app"),
        (
            "app/handlers/x.py",
            "if TYPE_CHECKING:\n    from jetspark.app.application import App",
            "room handlers may not import jetspark.app.application",
        ),
        (
            "app/spec.py",
            "from jetspark.app.handlers.handler_spec import HandlerSpec",
            "room spec may not import jetspark.app.handlers.handler_spec",
        ),
    ],
)
def test_the_checker_catches_a_violation(path: str, source: str, message: str) -> None:
    assert any(message in found for found in violations(source, path))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "core/x.py",
            "import re\nfrom jetspark.errors import ConfigError\nfrom . import y\nfrom .y import z",
        ),
        ("core/x.py", "def f():\n    import cryptography"),
        ("core/auth.py", "from pathlib import Path"),
        ("jetstream/part_file.py", "import os\nopen('x')"),
        ("aio/x.py", "import os\nopen('x')"),
        ("core/x.py", "if TYPE_CHECKING:\n    import cryptography"),
        ("aio/x.py", "import asyncio, ssl, time\nfrom jetspark import core, errors"),
        ("batcher/aio.py", "import asyncio\nfrom jetspark.aio import client"),
        ("spark/stream/source.py", "import pyspark\nfrom jetspark.blocking import connect"),
        ("app/spec.py", "if TYPE_CHECKING:\n    from jetspark.app.handlers.handler_spec import HandlerSpec"),
        ("app/handlers/x.py", "from jetspark.app.spec import AppSpec"),
        ("cli/x.py", "import jetspark, typer\nfrom jetspark.bench import run"),
        (
            "__init__.py",
            '"""Doc."""\nfrom .aio import connect\n__all__ = ["connect"]\n__version__ = "1"\n'
            "if TYPE_CHECKING:\n    from .core import x\ndef __getattr__(name): ...",
        ),
        ("__init__.py", "if TYPE_CHECKING:\n    from .aio import x\nelse:\n    def __dir__(): ..."),
    ],
)
def test_the_checker_lets_the_rest_pass(path: str, source: str) -> None:
    assert violations(source, path) == []
