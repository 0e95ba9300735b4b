"""``jetspark run``: the workers of an application."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jetspark.cli.apps import AppName, Servers, connection_options, load_app
from jetspark.cli.spark_place import Master, PyFiles, SparkPlace
from jetspark.cli.supervising import Supervisor, end_with_parent, watched_folder
from jetspark.core.gc_tuning import seldom_collecting
from jetspark.errors import ConfigError, HandlerStalled

if TYPE_CHECKING:
    from jetspark.app import LiveOptions

__all__ = ["run_workers"]

STOP_TIMEOUT_S = 30.0
LEASE_S = 10.0


def run_workers(
    app: AppName,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Run only this handler, projection or command; may be repeated.")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Make what the application declares first.")] = False,
    workers: Annotated[int, typer.Option("--workers", help="Processes that share the work.", min=1)] = 1,
    partitions: Annotated[
        int, typer.Option("--partitions", help="Parts of the keys of projections that processes share.", min=1)
    ] = 1,
    reload: Annotated[bool, typer.Option("--reload", help="Restart the workers when a source file changes.")] = False,
    stop_timeout: Annotated[
        float, typer.Option("--stop-timeout", help="Seconds that running handlers have to finish at the end.", min=0)
    ] = STOP_TIMEOUT_S,
    engine: Annotated[str, typer.Option("--engine", help="live, or spark: projections as a Spark stream.")] = "live",
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="With --engine spark: folder for Spark's own position.")
    ] = None,
    master: Master = None,
    py_files: PyFiles = None,
    lease: Annotated[
        float, typer.Option("--lease", help="Seconds that a dead process holds up the next one's projections.", min=1)
    ] = LEASE_S,
    servers: Servers = None,
) -> None:
    """Run handlers, projections and commands until SIGTERM or Ctrl-C; then finish what runs, and exit with code 0.

    Refuses to start where the server is not as the application declares: see `jetspark plan`. With `--workers` a
    process that dies is started again; the order of keys holds across processes for handlers with partitions.
    Projections are folded by one process and the others stand by, unless `--partitions` divides their keys. With
    `--engine spark` the projections are folded by a Spark stream, and no handler runs.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = connection_options(servers)
    if (place := SparkPlace.of(engine, master, py_files)) is not None:
        from jetspark.cli.run_spark import run_on_spark

        _check_for_spark(workers, partitions, stop_timeout, lease, reload=reload)
        run_on_spark(app, load_app(app), place, only=only or (), apply=apply, checkpoint=checkpoint, options=options)
        return
    if engine != "live":
        raise ConfigError(f"--engine {engine}: expected live or spark")
    if checkpoint is not None:
        raise ConfigError("--checkpoint: expected with --engine spark; live workers keep their position in the bucket")
    if workers == 1 and not reload:
        end_with_parent()
        declared, live = load_app(app), _live_options(partitions, lease)
        running = declared.run(only=only or (), stop_timeout=stop_timeout, apply=apply, live=live, **options)
        asyncio.run(_exiting(running))
        return
    if apply:
        asyncio.run(load_app(app).apply(**options))
    command = [
        *_command(app, only or (), partitions, servers),
        "--stop-timeout",
        str(stop_timeout),
        "--lease",
        str(lease),
    ]
    folder = watched_folder(app) if reload else None
    raise typer.Exit(Supervisor(command, workers, stop_timeout, folder).run())


async def _exiting(running: Coroutine[Any, Any, None]) -> None:
    """Run, and end the process although a handler does not end: ``asyncio.run`` would wait for it."""
    try:
        with seldom_collecting():
            await running
    except HandlerStalled as error:
        if error.still_runs:
            print(f"jetspark: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        raise


def _check_for_spark(workers: int, partitions: int, stop_timeout_s: float, lease_s: float, *, reload: bool) -> None:
    """
    Raises:
        ConfigError: Options for live workers were given.
    """
    given = {
        "--workers": workers != 1,
        "--partitions": partitions != 1,
        "--reload": reload,
        "--stop-timeout": stop_timeout_s != STOP_TIMEOUT_S,
        "--lease": lease_s != LEASE_S,
    }
    if refused := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(f"{', '.join(refused)}: expected without --engine spark; Spark divides the work itself")


def _command(app: str, only: Sequence[str], partitions: int, servers: str | None) -> list[str]:
    """What one of several processes is started with."""
    command = [sys.executable, "-m", "jetspark", "run", app]
    for name in only:
        command += ["--only", name]
    if partitions > 1:
        command += ["--partitions", str(partitions)]
    if servers:
        command += ["--servers", servers]
    return command


def _live_options(partitions: int, lease_s: float) -> LiveOptions:
    from jetspark.app import LiveOptions

    return LiveOptions(partitions=partitions, lease_s=lease_s)
