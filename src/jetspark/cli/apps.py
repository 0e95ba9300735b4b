"""Functions that commands about applications share: finding the application, and connecting to the server."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

import jetspark
from jetspark.cli.contexts import context_options
from jetspark.errors import ConfigError, StreamNotFound, TopologyDrift

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app import App, AppClient

__all__ = [
    "EXIT_DIFFERENCE",
    "AppName",
    "AsJson",
    "Servers",
    "conditions",
    "connection_options",
    "load_app",
    "with_app_client",
    "with_server",
]

T = TypeVar("T")

EXIT_DIFFERENCE = 3
"""Exit code of a command that found a difference, or a broken rule."""

DEFAULT_SERVER = "nats://127.0.0.1:4222"

AppName = Annotated[str, typer.Argument(metavar="MODULE:APP", help="The application, such as orders:app.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Servers = Annotated[
    str | None,
    typer.Option(
        "--servers",
        metavar="URL",
        envvar="JETSPARK_SERVERS",
        help=f"Servers, joined by commas; else those of the nats context (that of NATS_CONTEXT, or the selected one), "
        f"else {DEFAULT_SERVER}.",
        show_envvar=True,
    ),
]


def load_app(name: str) -> App:
    """Import an application; modules of the current folder come first.

    Raises:
        ConfigError: The module or the application was not found, or the import failed. The message has the applications
            that were found, or the traceback.
    """
    from jetspark.app import App

    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{name!r}: expected MODULE:APP, such as orders:app")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise ConfigError(
                f"{name!r}: module {error.name!r} was not found in {folder} or on Python's path"
            ) from error
        raise ConfigError(_failed_import(name, error)) from error
    except (Exception, SystemExit) as error:
        # A module that calls sys.exit would end the command, possibly with code 0.
        raise ConfigError(_failed_import(name, error)) from error
    found = getattr(module, attribute, None)
    if not isinstance(found, App):
        apps = sorted(known for known, value in vars(module).items() if isinstance(value, App))
        what = "is not an App" if found is not None else "was not found"
        raise ConfigError(f"{name!r}: {attribute!r} {what}; apps in {module_name}: {', '.join(apps) or 'none'}")
    return found


def _failed_import(name: str, error: BaseException) -> str:
    """The traceback without the frames of Python's import machinery and of JetSpark."""
    ours = str(Path(jetspark.__file__).parent)
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if not each.filename.startswith((ours, "<frozen importlib", importlib.__file__))
    ]
    trace = "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)]).rstrip()
    return f"{name!r}: importing it failed:\n{trace}"


def with_server(app: str, servers: str | None, work: Callable[[JetStream, App], Coroutine[Any, Any, T]]) -> T:
    """Run work with an application and a connection.

    Raises:
        TopologyDrift: A stream or bucket that the application declares does not exist.
    """
    from jetspark import connect

    declared = load_app(app)

    async def run() -> T:
        async with connect(**connection_options(servers)) as client:
            try:
                return await work(client.jetstream(), declared)
            except StreamNotFound as error:
                if error.stream in _declared_streams(declared):
                    raise TopologyDrift(declared.name, (str(error),)) from error
                raise

    return asyncio.run(run())


def with_app_client(app: str, servers: str | None, work: Callable[[AppClient], Coroutine[Any, Any, T]]) -> T:
    """Run work with an application's client; raises as :func:`with_server`."""
    from jetspark.app import AppClient

    return with_server(app, servers, lambda js, declared: work(AppClient.on(declared, js)))


def conditions(handler: str | None, where: list[str] | None, fields: Sequence[str] | None = None) -> dict[str, Any]:
    """The keywords of a choice of dead letters or retries, from ``--handler`` and ``--where``.

    Raises:
        ConfigError: A field is unknown or given twice, or no dead letter can have the value.
    """
    from jetspark.app.dead_letters.listing import FIELDS, DeadLetterFilter

    found: dict[str, Any] = {} if handler is None else {"handler": handler}
    for name, value in DeadLetterFilter.parse(handler, where or [], fields or FIELDS).where:
        if name in found:
            raise ConfigError(f"--where '{name}={value}': {name} is given twice; a dead letter has one")
        found[name] = int(value) if name == "sequence" else value
    return found


def _declared_streams(app: App) -> set[str]:
    """The names of the streams that `jetspark apply` creates, those of buckets included."""
    topology = app.topology()
    return {each.name for each in topology.streams} | {f"KV_{each.bucket}" for each in topology.buckets}


def connection_options(servers: str | None) -> dict[str, Any]:
    """The arguments for ``connect``: from the option, the environment, or the nats context.

    Raises:
        ConfigError: The context cannot be used.
    """
    if servers:
        return {"servers": [each.strip() for each in servers.split(",") if each.strip()]}
    return context_options() or {"servers": DEFAULT_SERVER}
