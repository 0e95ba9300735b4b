"""Every command, by name."""

from __future__ import annotations

from typing import Annotated

import typer

from jetspark.cli.archive import archive
from jetspark.cli.bench import bench
from jetspark.cli.demo import demo
from jetspark.cli.dlq import dlq
from jetspark.cli.lag import lag
from jetspark.cli.option_groups import with_groups
from jetspark.cli.rebuild import rebuild, verify
from jetspark.cli.reconcile import reconcile
from jetspark.cli.replay import replay, replays
from jetspark.cli.retry import retry
from jetspark.cli.run import run
from jetspark.cli.schema import schema
from jetspark.cli.server import server
from jetspark.cli.topology import apply, check, plan
from jetspark.cli.what_if import what_if
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


for command in (
    apply,
    bench,
    check,
    demo,
    lag,
    plan,
    server,
    rebuild,
    reconcile,
    replay,
    replays,
    run,
    verify,
    what_if,
):
    app.command(command.__name__.replace("_", "-"))(with_groups(command))
app.add_typer(archive)
app.add_typer(dlq)
app.add_typer(retry)
app.add_typer(workflow)
app.add_typer(schema)
