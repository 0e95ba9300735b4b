"""``jetspark what-if``: what another version of a workflow would have decided for recorded history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jetspark.cli.apps import EXIT_DIFFERENCE, AppName, AsJson, Servers, connection_options, with_server
from jetspark.cli.replay import Engine, moment_of
from jetspark.cli.spark_place import Master, PyFiles, SparkPlace

if TYPE_CHECKING:
    from jetspark.app.replay import NewCode, ReplayRequest, WhatIf

__all__ = ["compare_workflow"]


def compare_workflow(
    app: AppName,
    workflow: Annotated[str, typer.Argument(metavar="WORKFLOW", help="Its name, as the application declares it.")],
    code: Annotated[Path, typer.Option("--code", metavar="FILE", help="A module with the new version.")],
    from_seq: Annotated[int | None, typer.Option("--from-seq", help="The first sequence that it takes.")] = None,
    to_seq: Annotated[int | None, typer.Option("--to-seq", help="The last sequence that it takes.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="It takes over at this time.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="Only events stored before this time.")] = None,
    key: Annotated[list[str] | None, typer.Option("--key", help="Only this run; may be repeated.")] = None,
    engine: Engine = "live",
    master: Master = None,
    py_files: PyFiles = None,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Say what a new version of a workflow would have decided for recorded history, where that differs.

    FILE has an App with a workflow of the same name, or one class with `react`. Both versions take the recorded events
    of each run, and what they decide is compared step by step. With a range the new version takes over where it begins,
    in the states to which the old one led. A timer that only the new version sets is not in history: a run that depends
    on it is told as diverged. Nothing is written. Exit code 3 if there are differences.
    """
    from jetspark.app.replay import NewCode, ReplayRequest

    request = ReplayRequest(
        from_seq=from_seq,
        to_seq=to_seq,
        since=moment_of("--since", since),
        until=moment_of("--until", until),
        keys=tuple(key or ()),
    )
    new = NewCode.read(code, app.partition(":")[0].rpartition(".")[0])
    found = _compared(app, workflow, new, request, SparkPlace.of(engine, master, py_files), servers)
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    if not found.is_equal:
        raise typer.Exit(EXIT_DIFFERENCE)


def _compared(
    app: str, workflow: str, code: NewCode, request: ReplayRequest, place: SparkPlace | None, servers: str | None
) -> WhatIf:
    if place is None:
        from jetspark.app.replay import what_if

        return with_server(app, servers, lambda js, it: what_if(js, it, workflow, code, request))
    from jetspark.cli.apps import load_app
    from jetspark.cli.run_spark import spark_options
    from jetspark.spark.engine.what_if import summarise_what_if  # says which extra is missing, if it is
    from jetspark.spark.session import short_session

    load_app(app)
    given = spark_options(connection_options(servers))
    with short_session(f"jetspark-{workflow}", master=place.master, py_files=place.py_files) as spark:
        return summarise_what_if(app, spark, workflow=workflow, code=code, request=request, **given)
