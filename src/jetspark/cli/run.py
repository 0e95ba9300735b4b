"""``jetspark run``: the workers of an application."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

import typer

from jetspark.cli.apps import AppName, Servers, connection_options, load_app

__all__ = ["run_workers"]


def run_workers(
    app: AppName,
    only: Annotated[list[str] | None, typer.Option("--only", help="Run this handler; may be repeated.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Make what the application declares first.")] = False,
    stop_timeout: Annotated[
        float, typer.Option("--stop-timeout", help="Seconds that running handlers have to finish at the end.", min=0)
    ] = 30.0,
    servers: Servers = None,
) -> None:
    """Run the handlers of an application until SIGTERM or Ctrl-C; then finish what runs, and exit with code 0.

    Refuses to start where the server is not as the application declares: see `jetspark plan`.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    declared = load_app(app)
    options = connection_options(servers)
    asyncio.run(declared.run(only=only or (), stop_timeout=stop_timeout, apply=apply, **options))
