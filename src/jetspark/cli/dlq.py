"""``jetspark dlq``: list, show, redrive, discard and export dead letters."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jetspark.cli.apps import AppName, AsJson, Servers, conditions, with_app_client
from jetspark.cli.tables import TerminalTable, print_json_list, printable
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.app import AppClient, AppDeadLetter, DiscardResults, RedriveProgress

__all__ = ["dlq"]

dlq = typer.Typer(name="dlq", no_args_is_help=True, help="Dead letters: events that a handler could not handle.")

Handler = Annotated[str | None, typer.Option("--handler", help="Only dead letters of this handler.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="FIELD=VALUE",
        help="Only dead letters with this error, key, fingerprint, sequence, subject or status; may be repeated.",
    ),
]
Number = Annotated[int, typer.Argument(metavar="NUMBER", help="The number in the first column of `dlq ls`.")]


@dlq.command()
def ls(
    app: AppName,
    by: Annotated[
        Literal["error", "handler", "key"] | None,
        typer.Option("--by", help="Count dead letters instead of listing them."),
    ] = None,
    handler: Handler = None,
    where: Where = None,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """List the dead letters of an application, or count them by error, handler or key."""
    chosen = conditions(handler, where)
    if by is not None:
        _count(app, servers, chosen, by, as_json=as_json)
        return

    async def print_json(client: AppClient) -> None:
        # As json.dumps would write the list of them, which may be too long to have it at once.
        await print_json_list(_fields(letter) async for letter in client.dead_letters.list(**chosen))

    async def print_table(client: AppClient) -> None:
        table = TerminalTable("NUMBER", "STATUS", "HANDLER", "KEY", "EVENT", "REASON")
        async for letter in client.dead_letters.list(**chosen):
            place = f"{letter.stream}:{letter.sequence}"
            table.add(str(letter.number), letter.status, letter.handler, letter.key or "-", place, _reason(letter))
        table.end()
        typer.echo(_dead_letters(table.count) if table.count else await client.dead_letters.explain(**chosen))

    with_app_client(app, servers, print_json if as_json else print_table)


def _count(app: str, servers: str | None, chosen: dict[str, Any], by: str, *, as_json: bool) -> None:
    async def count(client: AppClient) -> Counter[str]:
        counts = Counter[str]()
        async for letter in client.dead_letters.list(**chosen):
            counts[_group(letter, by)] += 1
        return counts

    counts = with_app_client(app, servers, count)
    if as_json:
        typer.echo(json.dumps(dict(counts.most_common()), indent=2))
        return
    table = TerminalTable("COUNT", by.upper())
    for name, number in counts.most_common():
        table.add(f"{number:5}", name)
    table.end()
    typer.echo(_dead_letters(counts.total()))


@dlq.command()
def show(app: AppName, number: Number, servers: Servers = None, as_json: AsJson = False) -> None:
    """Show one dead letter with its event, its cause and its origin."""
    found = with_app_client(app, servers, lambda client: client.dead_letters.get(number))
    fields = _fields(found) | _body(found)
    if as_json:
        typer.echo(json.dumps(fields, indent=2))
        return
    for name, value in fields.items():
        typer.echo(printable(f"{name}: {value}", keep="\n"))


@dlq.command()
def redrive(
    app: AppName,
    handler: Handler = None,
    where: Where = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Dead letters each second, at most.", min=0.001)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    resume: Annotated[str | None, typer.Option("--resume", help="Continue a redrive that was interrupted.")] = None,
    wait: Annotated[
        float, typer.Option("--wait", help="Seconds to wait, at most, for what becomes of the dead letters.", min=0)
    ] = 30.0,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Only request them; the same as --wait 0.")] = False,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Have the failed handlers handle dead letters again, and no other handler.

    Dead letters that come later are not part of it. A key's are handled in order: those that wait behind another follow
    it by themselves. One redrive runs at a time. If this command is interrupted, --resume continues it.

    It waits for the handlers, which run elsewhere, and says how many dead letters were handled, failed again, or still
    wait. Interrupting it then stops nothing. Where nothing is redriven it says why, and what waits instead.
    """
    chosen, wait_s = conditions(handler, where), 0.0 if no_wait else wait

    def report(progress: RedriveProgress) -> None:
        if as_json or not (progress.is_done or progress.looked_at):
            return
        if progress.results is not None:
            typer.echo(f"redrive {progress.id}: {progress.results}")
        else:
            typer.echo(str(progress))

    done = with_app_client(
        app,
        servers,
        lambda client: client.dead_letters.redrive(
            rate=rate, dry_run=dry_run, resume=resume, wait_s=wait_s, on_progress=report, **chosen
        ),
    )
    results = done.results
    if results is not None and results.waiting and not results.handled and not results.failed and not as_json:
        typer.echo(f"nothing was handled in {wait:g} s: `jetspark run {app}` runs the handlers")
    if as_json:
        typer.echo(json.dumps(done.to_dict(), indent=2))


@dlq.command()
def discard(
    app: AppName,
    handler: Handler = None,
    where: Where = None,
    yes: Annotated[bool, typer.Option("--yes", help="Discard them; without --yes they are only counted.")] = False,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Give dead letters up permanently. Their keys continue with the dead letters behind them."""
    chosen = conditions(handler, where)
    if yes and not chosen:
        raise ConfigError("discard: expected --handler or --where, so that not everything is discarded by mistake")

    def work(client: AppClient) -> Coroutine[Any, Any, DiscardResults]:
        return client.dead_letters.discard(dry_run=not yes, **chosen)

    done = with_app_client(app, servers, work)
    if as_json:
        fields: dict[str, Any] = {"discarded" if yes else "would_discard": done.discarded, "behind": done.behind}
        typer.echo(json.dumps(fields | ({"reason": done.reason} if done.reason else {})))
    elif not done.discarded:
        typer.echo(f"nothing to discard: {done.reason}")
    else:
        behind = f"; kept, because they are behind another: {done.behind}" if done.behind else ""
        what = f"{_dead_letters(done.discarded)} {'discarded' if yes else 'would be discarded'}{behind}"
        typer.echo(what if yes else f"{what}; --yes discards")


@dlq.command()
def export(app: AppName, handler: Handler = None, where: Where = None, servers: Servers = None) -> None:
    """Print dead letters with their events, one JSON object on each line."""
    chosen = conditions(handler, where)

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
