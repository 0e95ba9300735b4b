"""Every command, by name."""

from __future__ import annotations

import typer

from jetspark.cli.bench import bench
from jetspark.cli.demo import demo
from jetspark.cli.server import server

__all__ = ["app"]

app = typer.Typer(
    name="jetspark",
    help="Event streams in, Spark through, state out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (bench, demo, server):
    app.command()(command)
