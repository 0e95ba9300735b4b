"""Every command, by name."""

from __future__ import annotations

from typing import Annotated

import typer

from jetspark.cli.bench import bench
from jetspark.cli.demo import demo
from jetspark.cli.dlq import dlq
from jetspark.cli.reconcile import reconcile_entities
from jetspark.cli.replay import list_replays, rebuild_projection, replay_projection, verify_projection
from jetspark.cli.retry import retry
from jetspark.cli.run import run_workers
from jetspark.cli.schema import schema
from jetspark.cli.server import server
from jetspark.cli.topology import apply, check, plan
from jetspark.cli.what_if import compare_workflow
from jetspark.cli.workflow import workflow
from jetspark.core.version import VERSION

__all__ = ["app"]

app = typer.Typer(
    name="jetspark",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"jetspark {VERSION}")
        raise typer.Exit


@app.callback()
def jetspark(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Event streams in, Spark through, state out."""


for command in (apply, bench, check, demo, plan, server):
    app.command()(command)
app.command("rebuild")(rebuild_projection)
app.command("reconcile")(reconcile_entities)
app.command("replay")(replay_projection)
app.command("replays")(list_replays)
app.command("run")(run_workers)
app.command("verify")(verify_projection)
app.command("what-if")(compare_workflow)
app.add_typer(dlq)
app.add_typer(retry)
app.add_typer(workflow)
app.add_typer(schema)
