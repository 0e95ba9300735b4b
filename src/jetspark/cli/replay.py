"""``jetspark replay`` and ``replays``: replay past events to a projection or a handler, and list the records of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from jetspark.cli.apps import EXIT_DIFFERENCE, AppName, load_app, with_server
from jetspark.cli.bars import job_bar
from jetspark.cli.engine_options import EngineOptions
from jetspark.cli.option_groups import EventRange, JobOptions, OlderEvents, Output, check_combination
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app import App
    from jetspark.app.replay import HandlerReplayPlan, HandlerReplayRecord, ReplayPlan, ReplayRecord, ReplayRequest
    from jetspark.errors import ProtocolError

__all__ = ["replay", "replays"]


def replay(
    app: AppName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A projection or a handler of the application.")],
    events: EventRange,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    effects: Annotated[
        bool, typer.Option("--effects", help="With a handler: carry out its effects. By default they are held back.")
    ] = False,
    engine: EngineOptions,
    older: OlderEvents,
    job: JobOptions,
    output: Output,
) -> None:
    """Apply a range of events to the keys of a projection that lack them, or call a handler with them.

    Live workers may run. A state that is up to date does not change: a changed fold needs `jetspark rebuild`. The
    command first prints the range and its keys, and fails if events of the range are gone. After an interruption,
    --resume continues.

    A handler is called with the events of the range. Its effects are held back and counted, unless --effects is given.
    Its live consumer is not touched, and no dead letters are written. Exit code 3 if an event failed.
    """
    from jetspark.app.replay import ReplayRequest

    request = events.request()
    if job.resume is not None:
        given = {"a range": request != ReplayRequest(), "--dry-run": dry_run}
        check_combination("--resume", given, "it continues with the range that the replay began with")
    if _is_handler(app, name):
        check_combination("--engine spark", {"a handler": engine.engine != "live"}, "this process calls handlers")
        _replay_to_handler(app, name, request, older, job, output, dry_run=dry_run, effects=effects)
        return
    if effects:
        raise ConfigError(f"--effects needs a handler, and {name!r} is a projection")
    _replay_to_projection(app, name, request, engine, older, job, output, dry_run=dry_run)


def _is_handler(app: str, name: str) -> bool:
    """True for the name of a handler, False for the name of a projection.

    Raises:
        ConfigError: The application has neither.
    """
    declared = load_app(app)
    known = sorted({*declared.handlers, *declared.projections})
    if name not in known:
        raise ConfigError(
            f"{name!r}: app {declared.name!r} has no projection or handler of this name; it has "
            f"{', '.join(known) or 'none'}"
        )
    return name in declared.handlers


def _replay_to_handler(
    app: str,
    name: str,
    request: ReplayRequest,
    older: OlderEvents,
    job: JobOptions,
    output: Output,
    *,
    dry_run: bool,
    effects: bool,
) -> None:
    from jetspark.app.replay import HandlerReplayOptions, plan_handler_replay, replay_handler

    if dry_run:
        output.print(
            with_server(
                app,
                output.servers,
                lambda js, it: plan_handler_replay(js, it, name, request, rate=job.rate, archive=older.root),
            )
        )
        return
    options = HandlerReplayOptions(effects=effects, rate=job.rate, resume=job.resume)
    on_plan = None if output.as_json else _print_plan
    again = f"jetspark replay {app} {name}{' --effects' if effects else ''}{older}"
    with job_bar(output.as_json, again) as show:
        done = with_server(
            app,
            output.servers,
            lambda js, it: replay_handler(
                js, it, name, request, options, on_plan=on_plan, on_progress=show, archive=older.root
            ),
        )
    output.print(done)
    if done.failed:
        raise typer.Exit(EXIT_DIFFERENCE)


def _replay_to_projection(
    app: str,
    name: str,
    request: ReplayRequest,
    engine: EngineOptions,
    older: OlderEvents,
    job: JobOptions,
    output: Output,
    *,
    dry_run: bool,
) -> None:
    from jetspark.app.replay import ReplayOptions, plan_replay, run_replay

    with engine.started(app, output.servers, name, older.root) as spark:
        if dry_run:
            output.print(
                with_server(
                    app,
                    output.servers,
                    lambda js, it: plan_replay(js, it, name, request, rate=job.rate, engine=spark, archive=older.root),
                )
            )
            return
        options = ReplayOptions(rate=job.rate, resume=job.resume)

        def on_plan(plan: ReplayPlan) -> None:
            if not output.as_json:
                _print_plan(plan)

        again = f"jetspark replay {app} {name}{' --engine spark' if spark else ''}{older}"
        with job_bar(output.as_json, again) as show:
            done = with_server(
                app,
                output.servers,
                lambda js, it: run_replay(
                    js,
                    it,
                    name,
                    request,
                    options,
                    on_plan=on_plan,
                    on_progress=show,
                    engine=spark,
                    archive=older.root,
                ),
            )
        output.print(done)


def _print_plan(plan: HandlerReplayPlan | ReplayPlan) -> None:
    typer.echo(f"{plan}\n")


def replays(
    app: AppName,
    *,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Only this projection or this handler.")] = "*",
    output: Output,
) -> None:
    """List the replays, rebuilds and repairs of an application, oldest first."""
    records = with_server(app, output.servers, lambda js, declared: _read_records(js, declared, name))
    if output.as_json:
        typer.echo(json.dumps([each.to_dict() for each in records], indent=2))
        return
    for each in records:
        typer.echo(f"{each.began[:19]}Z  {each}")
    typer.echo(f"{len(records)} replays")


async def _read_records(js: JetStream, app: App, name: str) -> list[ReplayRecord | HandlerReplayRecord]:
    """The records of projections and handlers, oldest first."""
    from jetspark.app.projections.bucket_refs import open_records
    from jetspark.app.replay import read_handler_records, read_records

    found: list[ReplayRecord | HandlerReplayRecord] = []
    if app.projections:
        found += await read_records(await open_records(js, app.name), name, on_unreadable=_print_unreadable)
    if app.handlers:
        found += await read_handler_records(await js.kv(app.spec.handler_bucket), name, on_unreadable=_print_unreadable)
    return sorted(found, key=lambda record: (record.began, record.id))


def _print_unreadable(key: str, error: ProtocolError) -> None:
    typer.echo(f"record {key} is left out: {error}", err=True)
