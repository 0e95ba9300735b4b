"""``jetspark run``: the workers of an application."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

import typer

from jetspark.cli.apps import AppName, Servers, connection_options, load_app
from jetspark.errors import ConfigError

__all__ = ["run_workers"]


def run_workers(
    app: AppName,
    only: Annotated[list[str] | None, typer.Option("--only", help="Run this handler; may be repeated.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Make what the application declares first.")] = False,
    stop_timeout: Annotated[
        float, typer.Option("--stop-timeout", help="Seconds that running handlers have to finish at the end.", min=0)
    ] = 30.0,
    engine: Annotated[str, typer.Option("--engine", help="live, or spark: projections as a Spark stream.")] = "live",
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="With --engine spark: folder for Spark's own position.")
    ] = None,
    servers: Servers = None,
) -> None:
    """Run the handlers of an application until SIGTERM or Ctrl-C; then finish what runs, and exit with code 0.

    Refuses to start where the server is not as the application declares: see `jetspark plan`.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    declared = load_app(app)
    options = connection_options(servers)
    if engine == "spark":
        from jetspark.cli.run_spark import run_on_spark

        run_on_spark(app, declared, only=only or (), apply=apply, checkpoint=checkpoint, options=options)
        return
    if engine != "live":
        raise ConfigError(f"--engine {engine}: expected live or spark")
    asyncio.run(declared.run(only=only or (), stop_timeout=stop_timeout, apply=apply, **options))
