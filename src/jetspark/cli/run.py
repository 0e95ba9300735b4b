"""``jetspark run``: the workers of an application."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from jetspark.cli.apps import AppName, Servers, connection_options, load_app
from jetspark.cli.engine_options import Master, PyFiles, spark_target
from jetspark.cli.option_groups import check_combination
from jetspark.cli.signals import end_at_once
from jetspark.cli.supervising import Supervisor, end_with_parent, watched_folder
from jetspark.core.gc_tuning import seldom_collecting
from jetspark.errors import ConfigError, HandlerStalled

__all__ = ["RunOptions", "run"]

STOP_TIMEOUT_S = 30.0
LEASE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of ``jetspark run``."""

    only: Annotated[
        list[str] | None, typer.Option("--only", help="Run only this handler, projection or command; may be repeated.")
    ] = None
    apply: Annotated[
        bool, typer.Option("--apply", help="Create or update streams, buckets and consumers before starting.")
    ] = False
    workers: Annotated[int, typer.Option("--workers", help="Processes that share the work.", min=1)] = 1
    partitions: Annotated[
        int, typer.Option("--partitions", help="Parts of the keys of projections that processes share.", min=1)
    ] = 1
    reload: Annotated[bool, typer.Option("--reload", help="Restart the workers when a source file changes.")] = False
    stop_timeout: Annotated[
        float, typer.Option("--stop-timeout", help="Seconds that running handlers have to finish at the end.", min=0)
    ] = STOP_TIMEOUT_S
    engine: Annotated[str, typer.Option("--engine", help="live, or spark: projections as a Spark stream.")] = "live"
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="With --engine spark: folder for Spark's own position.")
    ] = None
    master: Master = None
    py_files: PyFiles = None
    lease: Annotated[
        float,
        typer.Option("--lease", help="Seconds until the projections of a dead process move to another one.", min=1),
    ] = LEASE_S
    servers: Servers = None

    def check_for_spark(self) -> None:
        """
        Raises:
            ConfigError: Options for live workers were given.
        """
        given = {
            "--workers": self.workers != 1,
            "--partitions": self.partitions != 1,
            "--reload": self.reload,
            "--stop-timeout": self.stop_timeout != STOP_TIMEOUT_S,
            "--lease": self.lease != LEASE_S,
        }
        check_combination("--engine spark", given, "Spark divides the work itself")

    def worker_command(self, app: str) -> list[str]:
        """The command line of one worker process."""
        command = [sys.executable, "-m", "jetspark", "run", app]
        for name in self.only or ():
            command += ["--only", name]
        if self.partitions > 1:
            command += ["--partitions", str(self.partitions)]
        if self.servers:
            command += ["--servers", self.servers]
        return [*command, "--stop-timeout", str(self.stop_timeout), "--lease", str(self.lease)]


def run(app: AppName, options: RunOptions) -> None:
    """Run handlers, projections and commands until SIGTERM or Ctrl-C; then finish running calls, and exit with code 0.

    Refuses to start if the server differs from what the application declares: see `jetspark plan`. With `--workers`, a
    process that dies is restarted; for handlers with partitions, the events of a key keep their order across processes.
    One process folds the projections and the others stand by, unless `--partitions` divides their keys. With
    `--engine spark` a Spark stream folds the projections, and no handler runs.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    connection = connection_options(options.servers)
    only = options.only or ()
    if (target := spark_target(options.engine, options.master, options.py_files)) is not None:
        from jetspark.cli.run_spark import run_on_spark

        options.check_for_spark()
        run_on_spark(app, load_app(app), target, options, connection)
        return
    if options.engine != "live":
        raise ConfigError(f"--engine {options.engine}: expected live or spark")
    if options.checkpoint is not None:
        raise ConfigError("--checkpoint needs --engine spark; live workers keep their position in the bucket")
    if options.workers == 1 and not options.reload:
        from jetspark.app import LiveOptions

        end_with_parent()
        declared, live = load_app(app), LiveOptions(partitions=options.partitions, lease_s=options.lease)
        running = declared.run(
            only=only, stop_timeout=options.stop_timeout, apply=options.apply, live=live, **connection
        )
        end_at_once.check()
        asyncio.run(_exiting(running))
        return
    if options.apply:
        asyncio.run(load_app(app).apply(**connection))
    folder = watched_folder(app) if options.reload else None
    raise typer.Exit(Supervisor(options.worker_command(app), options.workers, options.stop_timeout, folder).run())


async def _exiting(running: Coroutine[Any, Any, None]) -> None:
    """Run, and exit even if a handler does not end: ``asyncio.run`` would wait for it."""
    try:
        with seldom_collecting():
            await running
    except HandlerStalled as error:
        if error.still_runs:
            print(f"jetspark: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        raise
