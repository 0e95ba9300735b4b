"""``jetspark what-if``: a new version of a workflow compared with this one, on recorded history."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jetspark.cli.apps import EXIT_DIFFERENCE, AppName, connection_options, with_server
from jetspark.cli.engine_options import EngineOptions, SparkTarget
from jetspark.cli.option_groups import OlderEvents, Output, WorkflowRange

if TYPE_CHECKING:
    from jetspark.app.replay import NewCode, ReplayRequest, WhatIf
    from jetspark.lake.reading import ArchiveRoot

__all__ = ["what_if"]


def what_if(
    app: AppName,
    workflow: Annotated[str, typer.Argument(metavar="WORKFLOW", help="The workflow's name in the application.")],
    code: Annotated[Path, typer.Option("--code", metavar="FILE", help="A module with the new version.")],
    events: WorkflowRange,
    engine: EngineOptions,
    older: OlderEvents,
    output: Output,
) -> None:
    """Compare the decisions of a new version of a workflow with the recorded ones.

    FILE has an App with a workflow of the same name, or one class with `react`. Both versions get the recorded events
    of each run, and their decisions are compared step by step. With a range the new version takes over where the range
    begins, in the states to which the old version led. A timer that only the new version sets is not in history: a run
    that depends on it is reported as diverged. Nothing is written. Exit code 3 if there are differences.
    """
    from jetspark.app.replay import NewCode

    new = NewCode.read(code, app.partition(":")[0].rpartition(".")[0])
    found = _compare(app, workflow, new, events.request(), engine.target, older.root, output.servers)
    output.print(found)
    if not found.is_equal:
        raise typer.Exit(EXIT_DIFFERENCE)


def _compare(
    app: str,
    workflow: str,
    code: NewCode,
    request: ReplayRequest,
    target: SparkTarget | None,
    archive: ArchiveRoot | None,
    servers: str | None,
) -> WhatIf:
    if target is None:
        from jetspark.app import replay

        return with_server(
            app, servers, lambda js, it: replay.what_if(js, it, workflow, code, request, archive=archive)
        )
    from jetspark.cli.apps import load_app
    from jetspark.cli.run_spark import spark_options
    from jetspark.spark.engine.what_if import summarise_what_if  # says which extra is missing, if it is
    from jetspark.spark.session import short_session

    load_app(app)
    given = spark_options(connection_options(servers)) | ({} if archive is None else {"archive": archive})
    with short_session(f"jetspark-{workflow}", master=target.master, py_files=target.py_files) as spark:
        return summarise_what_if(app, spark, workflow=workflow, code=code, request=request, **given)
