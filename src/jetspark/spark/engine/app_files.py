"""Makes an application available to Spark's Python workers: by name, because its classes cannot be pickled.

A worker imports the module and takes the application from it. It finds the module where the package is installed, in a
file of ``addPyFile`` or ``addArtifact``, in a folder of ``spark.executorEnv.PYTHONPATH``, or at last in the driver's
folder, which exists for workers on the same machine.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from jetspark.app import App, Window
from jetspark.errors import ConfigError

__all__ = ["AppLocation", "load_app", "load_same_app", "locate_app", "outline_of"]


class AppLocation(NamedTuple):
    """Where an application is."""

    name: str
    """``package.module:name``."""
    folder: str
    """Where the driver has imported it from."""


@functools.lru_cache(maxsize=8)
def load_app(name: str, folder: str = "") -> App:
    """Import an application; a worker does it once.

    Raises:
        ConfigError: The module or the application does not exist.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"app={name!r}: expected 'package.module:name'")
    try:
        module = _import(module_name, folder)
    except ImportError as error:
        raise ConfigError(
            f"app={name!r}: {error}; a worker of Spark has to be able to import it: install it where workers run, or "
            "ship it with spark.addArtifact(..., pyfile=True), sparkContext.addPyFile or spark.submit.pyFiles. "
            "Tasks of a stream through Spark Connect do not get what addArtifact ships: install it there"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"app={name!r}: importing {module_name} raised {type(error).__name__}: {error}; what it needs to be "
            "imported, such as variables of the environment and files, has to be where Spark's workers run, too"
        ) from error
    found = getattr(module, attribute, None)
    if not isinstance(found, App):
        raise ConfigError(f"app={name!r}: {module_name} has no application of the name {attribute!r}")
    return found


def outline_of(app: App, projections: Sequence[str]) -> str:
    """A short digest of the declarations that the driver and its workers must agree on."""
    specs = {each: app.projections[each] for each in projections if each in app.projections}
    # Not of all events: a program that publishes has made types known to its app that the others need not know.
    wanted = {kind for spec in specs.values() for kind in spec.events}
    readings = [
        (*name, reading.contract.version, len(reading.upcasts))
        for name, reading in app.catalogue.readings.items()
        if reading.contract.kind in wanted
    ]
    folds = [
        (
            each,
            spec.version,
            sorted(kind.__qualname__ for kind in spec.events),
            _window_outline(spec.window),
            spec.unique_ids,
        )
        for each, spec in specs.items()
    ]
    return hashlib.sha256(repr((app.stream, sorted(readings), folds)).encode()).hexdigest()[:16]


def _window_outline(window: Window | None) -> tuple[object, ...] | None:
    """A window without its function, whose text has its place in memory."""
    if window is None:
        return None
    return window.size_s, window.every_s, window.grace_s, window.late, window.time is not None


def load_same_app(name: str, folder: str, projections: Sequence[str], outline: str) -> App:
    """Import an application and check that its declarations are those of the driver.

    Raises:
        ConfigError: The application does not exist, or declares other events or projections.
    """
    app = load_app(name, folder)
    if outline and outline_of(app, projections) != outline:
        where = getattr(sys.modules.get(name.partition(":")[0]), "__file__", "nowhere")
        raise ConfigError(
            f"app={name!r}: the driver's code declares other events or projections than that of this worker, which is "
            f"from {where} and has {', '.join(app.projections) or 'no projections'}: ship the same code to all, and "
            "start a new session, since workers keep what they have imported"
        )
    return app


def _import(name: str, folder: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        is_this_missing = error.name is not None and (name == error.name or name.startswith(f"{error.name}."))
        if not is_this_missing or not folder or folder in sys.path or not Path(folder).is_dir():
            raise
    sys.path.append(folder)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def locate_app(app: App | str) -> AppLocation:
    """Module, name and folder of the driver's application.

    Raises:
        ConfigError: The application is not a global name of a module, so workers cannot import it.
    """
    if isinstance(app, str):
        load_app(app, os.getcwd())
        module_name, _, attribute = app.partition(":")
        return AppLocation(app, _folder(sys.modules[module_name], module_name))
    if not isinstance(app, App):
        raise ConfigError(f"app={app!r}: expected an App, or its name 'package.module:name'")
    likely = [spec.kind.__module__ for spec in app.projections.values()]
    likely += [contract.kind.__module__ for contract in app.catalogue]
    # The running program last: a module that it has the application from can be imported without running it again.
    others = sorted(sys.modules, key=lambda name: name == "__main__")
    for module_name in dict.fromkeys([*likely, *others]):
        module = sys.modules.get(module_name)
        for attribute, value in list(vars(module).items()) if module is not None else ():
            if value is app:
                name = _importable_name(module_name)
                return AppLocation(f"{name}:{attribute}", _folder(sys.modules[module_name], name))
    raise ConfigError(
        f"app={app!r}: expected an application that is a global name of a module, or its name 'package.module:name': "
        "workers of Spark import it, since its classes cannot be pickled"
    )


def _importable_name(module_name: str) -> str:
    """The name under which other processes import the running program."""
    if module_name != "__main__":
        return module_name
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return str(spec.name)
    file = getattr(main, "__file__", None)
    if not file or not file.endswith(".py"):
        raise ConfigError(
            "the application was declared in an interactive session, from which Spark's workers can import nothing: "
            "put it into a module of its own"
        )
    return Path(file).stem


def _folder(module: ModuleType, name: str) -> str:
    """The folder that must be on the path to import the module."""
    file = getattr(module, "__file__", None)
    if not file:
        return ""
    path = Path(file).resolve()
    depth = name.count(".") + (1 if path.name == "__init__.py" else 0)
    return str(path.parents[depth]) if depth < len(path.parents) else ""
