"""``jetspark dlq``: list, show, redrive, discard and export dead letters."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jetspark.cli.apps import AppName, Servers, conditions, with_app_client
from jetspark.cli.option_groups import Output, with_groups
from jetspark.cli.tables import TerminalTable, print_json_list, printable
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.app import AppClient, AppDeadLetter, DiscardResults, RedriveProgress

__all__ = ["dlq"]

dlq = typer.Typer(name="dlq", no_args_is_help=True, help="Dead letters: events that a handler could not handle.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterChoice:
    """The dead letters that a command is about."""

    handler: Annotated[str | None, typer.Option("--handler", help="Only dead letters of this handler.")] = None
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="FIELD=VALUE",
            help="Only dead letters with this error, key, fingerprint, number (such as 3,7-12), sequence, subject or "
            "status; may be repeated.",
        ),
    ] = None

    def conditions(self) -> dict[str, Any]:
        return conditions(self.handler, self.where)


Number = Annotated[int, typer.Argument(metavar="NUMBER", help="The number in the first column of `dlq ls`.")]


@dlq.command()
@with_groups
def ls(
    app: AppName,
    *,
    by: Annotated[
        Literal["error", "handler", "key"] | None,
        typer.Option("--by", help="Count dead letters instead of listing them."),
    ] = None,
    choice: DeadLetterChoice,
    output: Output,
) -> None:
    """List the dead letters of an application, or count them by error, handler or key."""
    chosen = choice.conditions()
    if by is not None:
        _count(app, output, chosen, by)
        return

    async def print_json(client: AppClient) -> None:
        # Written one by one: the whole list may not fit in memory.
        await print_json_list(_fields(letter) async for letter in client.dead_letters.list(**chosen))

    async def print_table(client: AppClient) -> None:
        table = TerminalTable("NUMBER", "STATUS", "HANDLER", "KEY", "EVENT", "REASON")
        async for letter in client.dead_letters.list(**chosen):
            place = f"{letter.stream}:{letter.sequence}"
            table.add(str(letter.number), letter.status, letter.handler, letter.key or "-", place, _reason(letter))
        table.end()
        typer.echo(_dead_letters(table.count) if table.count else await client.dead_letters.explain(**chosen))

    with_app_client(app, output.servers, print_json if output.as_json else print_table)


def _count(app: str, output: Output, chosen: dict[str, Any], by: str) -> None:
    async def count(client: AppClient) -> Counter[str]:
        counts = Counter[str]()
        async for letter in client.dead_letters.list(**chosen):
            counts[_group(letter, by)] += 1
        return counts

    counts = with_app_client(app, output.servers, count)
    if output.as_json:
        typer.echo(json.dumps(dict(counts.most_common()), indent=2))
        return
    table = TerminalTable("COUNT", by.upper())
    for name, number in counts.most_common():
        table.add(f"{number:5}", name)
    table.end()
    typer.echo(_dead_letters(counts.total()))


@dlq.command()
@with_groups
def show(app: AppName, number: Number, output: Output) -> None:
    """Show one dead letter with its event, its cause and its origin."""
    found = with_app_client(app, output.servers, lambda client: client.dead_letters.get(number))
    fields = _fields(found) | _body(found)
    if output.as_json:
        typer.echo(json.dumps(fields, indent=2))
        return
    for name, value in fields.items():
        typer.echo(printable(f"{name}: {value}", keep="\n"))


@dlq.command()
@with_groups
def redrive(
    app: AppName,
    *,
    choice: DeadLetterChoice,
    rate: Annotated[float | None, typer.Option("--rate", help="Dead letters each second, at most.", min=0.001)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    resume: Annotated[str | None, typer.Option("--resume", help="Continue a redrive that was interrupted.")] = None,
    wait: Annotated[float, typer.Option("--wait", help="Seconds to wait, at most, for the results.", min=0)] = 30.0,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Only request them; the same as --wait 0.")] = False,
    output: Output,
) -> None:
    """Have the failed handlers handle dead letters again, and no other handler.

    Later dead letters are not part of the redrive. The dead letters of a key are handled in order: after the first one,
    those behind it follow by themselves. One redrive runs at a time. After an interruption, --resume continues it.

    The command waits for the handlers, which run in other processes, and prints how many dead letters were handled,
    failed again, or still wait. Interrupting the wait does not stop the handlers. If nothing is redriven, the command
    prints the reason, and what waits instead.
    """
    chosen, wait_s = choice.conditions(), 0.0 if no_wait else wait

    def report(progress: RedriveProgress) -> None:
        if output.as_json or not (progress.is_done or progress.looked_at):
            return
        if progress.results is not None:
            typer.echo(f"redrive {progress.id}: {progress.results}")
        else:
            typer.echo(str(progress))

    done = with_app_client(
        app,
        output.servers,
        lambda client: client.dead_letters.redrive(
            rate=rate, dry_run=dry_run, resume=resume, wait_s=wait_s, on_progress=report, **chosen
        ),
    )
    results = done.results
    if results is not None and results.waiting and not results.handled and not results.failed and not output.as_json:
        typer.echo(f"nothing was handled in {wait:g} s: `jetspark run {app}` runs the handlers")
    if output.as_json:
        typer.echo(json.dumps(done.to_dict(), indent=2))


@dlq.command()
@with_groups
def discard(
    app: AppName,
    *,
    choice: DeadLetterChoice,
    yes: Annotated[bool, typer.Option("--yes", help="Discard them; without --yes they are only counted.")] = False,
    output: Output,
) -> None:
    """Give dead letters up permanently. Their keys continue with the dead letters behind them."""
    chosen = choice.conditions()
    if yes and not chosen:
        raise ConfigError("discard: expected --handler or --where, so that not everything is discarded by mistake")

    def work(client: AppClient) -> Coroutine[Any, Any, DiscardResults]:
        return client.dead_letters.discard(dry_run=not yes, **chosen)

    done = with_app_client(app, output.servers, work)
    if output.as_json:
        fields: dict[str, Any] = {"discarded" if yes else "would_discard": done.discarded, "behind": done.behind}
        typer.echo(json.dumps(fields | ({"reason": done.reason} if done.reason else {})))
    elif not done.discarded:
        typer.echo(f"nothing to discard: {done.reason}")
    else:
        behind = f"; kept, because they are behind another: {done.behind}" if done.behind else ""
        what = f"{_dead_letters(done.discarded)} {'discarded' if yes else 'would be discarded'}{behind}"
        typer.echo(what if yes else f"{what}; --yes discards")


@dlq.command()
@with_groups
def export(app: AppName, *, choice: DeadLetterChoice, servers: Servers = None) -> None:
    """Print dead letters with their events, one JSON object on each line."""
    chosen = choice.conditions()

    async def run(client: AppClient) -> None:
        async for letter in client.dead_letters.export(**chosen):
            typer.echo(json.dumps(_fields(letter) | _body(letter)))

    with_app_client(app, servers, run)


def _dead_letters(count: int) -> str:
    return f"{count} dead letter" if count == 1 else f"{count} dead letters"


def _reason(letter: AppDeadLetter) -> str:
    if letter.cause is None:
        return f"behind {letter.behind}"
    return f"{letter.cause.error}: {letter.cause.message}"


def _group(letter: AppDeadLetter, by: str) -> str:
    if by == "handler":
        return letter.handler
    if by == "key":
        return letter.key if letter.key is not None else "-"
    return f"{letter.cause.error} ({letter.cause.fingerprint})" if letter.cause else "waiting behind another"


def _fields(letter: AppDeadLetter) -> dict[str, Any]:
    cause = letter.cause
    return {
        "number": letter.number,
        "status": letter.status,
        "handler": letter.handler,
        "key": letter.key,
        "stream": letter.stream,
        "sequence": letter.sequence,
        "subject": letter.subject,
        "attempts": letter.attempts,
        "redrives": letter.redrives,
        "behind": letter.behind,
        "failed": letter.failed,
        "error": cause.error if cause else None,
        "reason": cause.message if cause else None,
        "retryable": cause.is_transient if cause else None,
        "fingerprint": cause.fingerprint if cause else None,
    }


def _body(letter: AppDeadLetter) -> dict[str, Any]:
    headers = letter.headers
    values = {} if headers is None else {name: headers.get_all(name) for name in headers}
    fields: dict[str, Any] = {"headers": {name: each[0] if len(each) == 1 else each for name, each in values.items()}}
    if letter.data is None:
        fields["data"] = None
    else:
        try:
            fields["data"] = letter.data.decode()
        except UnicodeDecodeError:
            fields["data_base64"] = base64.b64encode(letter.data).decode()
    if letter.cause is not None:
        fields["trace"] = letter.cause.trace
    return fields
