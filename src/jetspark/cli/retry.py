"""``jetspark retry``: list scheduled retries, try them now, and cancel them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jetspark.cli.apps import AppName, conditions, with_app_client
from jetspark.cli.option_groups import Output, with_groups
from jetspark.cli.tables import TerminalTable, print_json_list
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.app import AppClient, RetryChanges, ScheduledRetry

__all__ = ["retry"]

retry = typer.Typer(
    name="retry", no_args_is_help=True, help="Scheduled retries: events that wait for their next attempt."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryChoice:
    """The retries that a command is about."""

    handler: Annotated[str | None, typer.Option("--handler", help="Only retries of this handler.")] = None
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="FIELD=VALUE",
            help="Only retries with this error, key, fingerprint, sequence or subject; may be repeated.",
        ),
    ] = None

    def conditions(self) -> dict[str, Any]:
        from jetspark.app.dead_letters.retries import RETRY_FIELDS

        return conditions(self.handler, self.where, RETRY_FIELDS)


@retry.command()
@with_groups
def ls(app: AppName, choice: RetryChoice, output: Output) -> None:
    """List scheduled retries, and when each is due. Short waits happen in the worker, and are not listed."""
    chosen = choice.conditions()

    async def print_json(client: AppClient) -> None:
        await print_json_list(_fields(each) async for each in client.retries.list(**chosen))

    async def print_table(client: AppClient) -> None:
        table = TerminalTable("DUE", "HANDLER", "KEY", "EVENT", "ATTEMPTS", "REASON")
        async for each in client.retries.list(**chosen):
            place = f"{each.stream}:{each.sequence}"
            table.add(_time(each.due), each.handler, each.key or "-", place, f"{each.attempts:8}", _reason(each))
        table.end()
        typer.echo(_retries(table.count) if table.count else await _nothing(client, chosen))

    with_app_client(app, output.servers, print_json if output.as_json else print_table)


@retry.command()
@with_groups
def now(app: AppName, choice: RetryChoice, output: Output) -> None:
    """Try scheduled retries now, with the attempts they have left."""
    chosen = choice.conditions()

    async def work(client: AppClient) -> None:
        done = await client.retries.now(**chosen)
        await _report(client, chosen, done, "due now", as_json=output.as_json)

    with_app_client(app, output.servers, work)


@retry.command()
@with_groups
def cancel(
    app: AppName,
    *,
    choice: RetryChoice,
    yes: Annotated[bool, typer.Option("--yes", help="Cancel them; without --yes they are only counted.")] = False,
    output: Output,
) -> None:
    """Give scheduled retries up. A worker of the handler writes their dead letters, and their keys stay parked.

    `jetspark dlq discard` lets the keys continue without these events, and `jetspark dlq redrive` tries them again. If
    the handler has dead_letter=False, the event is dropped.
    """
    chosen = choice.conditions()
    if yes and not chosen:
        raise ConfigError("cancel: expected --handler or --where, so that not everything is cancelled by mistake")

    async def count(client: AppClient) -> None:
        number = sum([1 async for _ in client.retries.list(**chosen)])
        if output.as_json:
            typer.echo(json.dumps({"would_cancel": number}))
        elif number:
            typer.echo(f"{_retries(number)} would be cancelled and become dead letters; --yes cancels")
        else:
            typer.echo(await _nothing(client, chosen))

    async def work(client: AppClient) -> None:
        done = await client.retries.cancel(**chosen)
        what = f"cancelled; a worker writes the dead letters (`jetspark run {app}`)"
        await _report(client, chosen, done, what, as_json=output.as_json)

    with_app_client(app, output.servers, work if yes else count)


async def _report(client: AppClient, chosen: dict[str, Any], done: RetryChanges, what: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"changed": done.changed, "missed": done.missed}))
    elif not done.changed and not done.missed:
        typer.echo(await _nothing(client, chosen))
    else:
        missed = f"; {_retries(done.missed)} fired or changed in the meantime" if done.missed else ""
        typer.echo(f"{_retries(done.changed)} {what}{missed}")


def _nothing(client: AppClient, chosen: dict[str, Any]) -> Coroutine[Any, Any, str]:
    return client.retries.explain(**chosen)


def _retries(count: int) -> str:
    return f"{count} retry" if count == 1 else f"{count} retries"


def _time(due: datetime.datetime | None) -> str:
    return "?" if due is None else due.isoformat(timespec="seconds").replace("+00:00", "Z")


def _reason(each: ScheduledRetry) -> str:
    cause = "" if each.cause is None else f"{each.cause.error}: {each.cause.message}"
    return f"cancelled; {cause}" if each.is_cancelled else cause


def _fields(each: ScheduledRetry) -> dict[str, Any]:
    cause = each.cause
    return {
        "due": None if each.due is None else _time(each.due),
        "handler": each.handler,
        "key": each.key,
        "stream": each.stream,
        "sequence": each.sequence,
        "subject": each.subject,
        "attempts": each.attempts,
        "redrives": each.redrives,
        "cancelled": each.is_cancelled,
        "error": cause.error if cause else None,
        "reason": cause.message if cause else None,
        "fingerprint": cause.fingerprint if cause else None,
    }
