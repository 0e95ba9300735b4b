"""``jetspark workflow``: list the runs of a workflow, show one with its events, cancel one, and retry one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from jetspark.cli.apps import AppName, AsJson, Servers, connection_options, load_app
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.app import WorkflowRun, WorkflowRuns

__all__ = ["workflow"]

T = TypeVar("T")

workflow = typer.Typer(name="workflow", no_args_is_help=True, help="Runs of workflows.")

Name = Annotated[str, typer.Argument(metavar="WORKFLOW", help="The workflow's name.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The key of the run.")]


def _with_runs(app: str, name: str, servers: str | None, work: Callable[[WorkflowRuns], Coroutine[Any, Any, T]]) -> T:
    declared = load_app(app)
    options = connection_options(servers)

    async def run() -> T:
        async with declared.connect(options.pop("servers"), **options) as client:
            return await work(client.workflow(name))

    return asyncio.run(run())


@workflow.command()
def ls(
    app: AppName,
    name: Name,
    status: Annotated[
        Literal["running", "done", "failed"] | None, typer.Option("--status", help="Only runs of this status.")
    ] = None,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """List the runs of a workflow. Runs with an unreadable state are listed for every status."""

    async def found(runs: WorkflowRuns) -> list[WorkflowRun]:
        return [run async for run in runs.list(status)]

    listed = _with_runs(app, name, servers, found)
    if as_json:
        typer.echo(json.dumps([_fields(run) for run in listed], indent=2))
        return
    for run in listed:
        updated = run.updated.isoformat(timespec="seconds") if run.updated else ""
        typer.echo(f"{run.status:8}  {run.key}  {updated}  {run.reason or ', '.join(run.timers)}")
    unreadable = sum(run.status == "unreadable" for run in listed)
    typer.echo(f"{len(listed)} runs" + (f", {unreadable} of them unreadable" if unreadable else ""))


@workflow.command()
def show(app: AppName, name: Name, key: Key, servers: Servers = None, as_json: AsJson = False) -> None:
    """Show a run: its state, its timers, and its steps in order, each with its event and its decisions.

    Decisions are events published, commands sent, timers set and cancelled, and the end of the run. Timers that fired
    and answers to commands are events.
    """

    async def found(runs: WorkflowRuns) -> tuple[WorkflowRun | None, list[dict[str, Any]]]:
        return await runs.get(key), [step async for step in runs.timeline(key)]

    run, timeline = _with_runs(app, name, servers, found)
    if run is None:
        raise ConfigError(f"workflow {name!r} has no run {key!r}; `jetspark workflow ls` lists them")
    fields = _fields(run) | {"timeline": timeline}
    if as_json:
        typer.echo(json.dumps(fields, indent=2))
        return
    for field, value in fields.items():
        if field != "timeline":
            typer.echo(f"{field}: {value}")
    for step in timeline:
        for line in _lines(step):
            typer.echo(line)


@workflow.command()
def cancel(
    app: AppName,
    name: Name,
    key: Key,
    reason: Annotated[str, typer.Option("--reason", help="The reason to record.")] = "cancelled",
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Make a run fail: its compensations are published, and its timers end."""

    async def ended(runs: WorkflowRuns) -> WorkflowRun | None:
        if not await runs.cancel(key, reason):
            raise ConfigError(f"workflow {name!r}: run {key!r} is not running")
        return await runs.get(key) if as_json else None

    run = _with_runs(app, name, servers, ended)
    typer.echo(f"{key}: cancelled" if run is None else json.dumps(_fields(run), indent=2))


@workflow.command()
def retry(
    app: AppName,
    name: Name,
    key: Key,
    wait: Annotated[float, typer.Option("--wait", help="Seconds to wait, at most, for the results.", min=0)] = 30.0,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Continue a stuck run: redrive its dead letters, or restart the run if it has failed.

    The dead letters of its events and commands are handled in their order, by workers in other processes. A failed run
    has undone its steps, and restarts with its first event.
    """
    import msgspec

    done = _with_runs(app, name, servers, lambda runs: runs.retry(key, wait_s=wait))
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(done), indent=2))
    elif done.is_restarted:
        typer.echo(f"{key}: begun anew")
    else:
        became = "" if done.results is None else f": {done.results}"
        typer.echo(f"{key}: {done.dead_letters} dead letters are handled again{became}")


def _lines(step: dict[str, Any]) -> Iterator[str]:
    """A step as text: its event, and its decisions below."""
    decided = step["decided"] or {}
    time = decided.get("time") if step["by_hand"] else step["time"] or decided.get("time")
    yield f"{step['sequence'] or '':8}  {time}  {_event(step)}"
    for event in decided.get("events", ()):
        yield f"{'':10}publishes {event['type']}  {event['data']}"
    for command in decided.get("commands", ()):
        yield f"{'':10}sends {command['name']}: {command['command']}  {command['fields']}"
    for name, due in decided.get("timers", {}).items():
        yield f"{'':10}sets timer {name}, due {due}"
    for name in decided.get("cancels", ()):
        yield f"{'':10}cancels timer {name}"
    if decided.get("status", "running") != "running":
        yield f"{'':10}{decided['status']}" + (f": {decided['reason']}" if decided["reason"] else "")


def _event(step: dict[str, Any]) -> str:
    kind, data = step["type"], step["data"]
    if step["by_hand"]:
        return str(step["by_hand"])
    if kind is None:
        return "an event that the stream no longer has"
    if kind.endswith(".command_answered"):
        became = "decided" if data["refused"] is None else f"refused: {data['refused']}"
        reply = "" if data["reply"] is None else f"  {data['reply']}"
        return f"command {data['name']} was {became}{reply}"
    fired = "" if step["fired"] is None else f"timer {step['fired']} fired: "
    return f"{fired}{kind}  {data}"


def _fields(run: WorkflowRun) -> dict[str, Any]:
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(run)
    return fields
