"""``jetspark dlq``: list, show, redrive, discard and export dead letters."""

from __future__ import annotations

import base64
import json
import textwrap
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jetspark.cli.apps import AppName, AsJson, Servers, with_server
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app import App
    from jetspark.app.dead_letters.redriving import LetterFilter, RedriveProgress
    from jetspark.app.dead_letters.store import StoredLetter

__all__ = ["dlq"]

dlq = typer.Typer(name="dlq", no_args_is_help=True, help="Dead letters: events that a handler could not handle.")

Handler = Annotated[str | None, typer.Option("--handler", help="Only letters of this handler.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="FIELD=VALUE",
        help="Only letters with this error, key, fingerprint, sequence, subject or status; may be repeated.",
    ),
]
Letter = Annotated[int, typer.Argument(metavar="LETTER", help="The number in the first column of `dlq ls`.")]


def _filter(handler: str | None, where: list[str] | None) -> LetterFilter:
    from jetspark.app.dead_letters.redriving import LetterFilter

    return LetterFilter.parse(handler, where or [])


@dlq.command()
def ls(
    app: AppName,
    by: Annotated[
        Literal["error", "handler", "key"] | None, typer.Option("--by", help="Count letters instead of listing them.")
    ] = None,
    handler: Handler = None,
    where: Where = None,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """List the dead letters of an application, or count them by error, handler or key."""
    if by is not None:
        counts = Counter[str]()
        _for_each(app, servers, _filter(handler, where), lambda each, _: counts.update([_group(each, by)]))
        if as_json:
            typer.echo(json.dumps(dict(counts.most_common()), indent=2))
        for name, count in [] if as_json else counts.most_common():
            typer.echo(_printable(f"{count:8}  {name}"))
        return
    if as_json:
        # As json.dumps would write the list of them, which may be too long to have it at once.
        count = _for_each(app, servers, _filter(handler, where), _print_item)
        typer.echo("\n]" if count else "[]")
        return
    typer.echo(f"{_for_each(app, servers, _filter(handler, where), _print_line)} letters")


def _print_line(each: StoredLetter, _: int) -> None:
    letter = each.letter
    reason = f"{letter.cause.error}: {letter.cause.message}" if letter.cause else f"behind {letter.behind}"
    line = (
        f"{each.revision:8}  {letter.status:6}  {letter.handler}  {letter.key or '-'}  "
        f"{letter.origin.stream}:{letter.origin.sequence}  {reason.splitlines()[0][:100]}"
    )
    typer.echo(_printable(line))


def _print_item(each: StoredLetter, number: int) -> None:
    typer.echo(",\n" if number else "[\n", nl=False)
    typer.echo(textwrap.indent(json.dumps(_fields(each), indent=2), "  "), nl=False)


def _for_each(
    app: str,
    servers: str | None,
    chosen: LetterFilter,
    do: Callable[[StoredLetter, int], None],
    *,
    with_events: bool = False,
) -> int:
    """Do something with each letter as it is read, from number 0 on; returns how many there were."""
    from jetspark.app.dead_letters.redriving import check_handler, each_letter, with_event

    async def run(js: JetStream, declared: App) -> int:
        await check_handler(js, declared, chosen.handler)
        count = 0
        async for stored in each_letter(js, declared, chosen):
            whole = stored.letter.is_body_omitted and with_events
            do(await with_event(js, declared, stored) if whole else stored, count)
            count += 1
        return count

    return with_server(app, servers, run)


@dlq.command()
def show(app: AppName, letter: Letter, servers: Servers = None, as_json: AsJson = False) -> None:
    """Show one letter with its event, its cause and its origin."""
    from jetspark.app.dead_letters.redriving import read_letter, with_event

    async def run(js: JetStream, declared: App) -> StoredLetter:
        stored = await read_letter(js, declared, letter)
        return await with_event(js, declared, stored) if stored.letter.is_body_omitted else stored

    found = with_server(app, servers, run)
    fields = _fields(found) | _body(found)
    if as_json:
        typer.echo(json.dumps(fields, indent=2))
        return
    for name, value in fields.items():
        typer.echo(_printable(f"{name}: {value}", keep="\n"))


@dlq.command()
def redrive(
    app: AppName,
    handler: Handler = None,
    where: Where = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Letters each second, at most.", min=0.001)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    resume: Annotated[str | None, typer.Option("--resume", help="Go on with a redrive that was interrupted.")] = None,
    wait: Annotated[
        float, typer.Option("--wait", help="Seconds to wait, at most, for what becomes of the letters.", min=0)
    ] = 30.0,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Only request them; the same as --wait 0.")] = False,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Have the failed handlers handle letters again, and nobody else.

    Letters that come later are not part of it. A key's letters are handled in order: those that wait behind another
    follow it by themselves. One redrive runs at a time. If this command is interrupted, --resume goes on.

    It waits for the handlers, which run elsewhere, and says how many letters were handled, failed again, or still wait.
    Interrupting it then stops nothing.
    """
    from jetspark.app.dead_letters.redriving import run_redrive

    def report(progress: RedriveProgress) -> None:
        if not as_json:
            typer.echo(str(progress))

    chosen = _filter(handler, where)
    done = with_server(
        app,
        servers,
        lambda js, declared: run_redrive(
            js,
            declared,
            chosen,
            rate=rate,
            is_dry_run=dry_run,
            resume=resume,
            wait_s=0.0 if no_wait else wait,
            on_progress=report,
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
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, the letters are only counted.")] = False,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Give letters up for good. The keys they held up go on."""
    from jetspark.app.dead_letters.redriving import discard_letters

    chosen = _filter(handler, where)
    if not yes:
        statuses = Counter[str]()
        _for_each(app, servers, chosen, lambda each, _: statuses.update([each.letter.status]))
        count = statuses["open"]
        typer.echo(json.dumps({"would_discard": count}) if as_json else f"{count} letters; --yes discards them")
        return
    if not handler and not where:
        raise ConfigError("discard: expected --handler or --where, so that not everything goes by mistake")
    count = with_server(app, servers, lambda js, declared: discard_letters(js, declared, chosen))
    typer.echo(json.dumps({"discarded": count}) if as_json else f"{count} letters discarded")


@dlq.command()
def export(app: AppName, handler: Handler = None, where: Where = None, servers: Servers = None) -> None:
    """Print letters with their events, one JSON object on each line."""
    _for_each(
        app,
        servers,
        _filter(handler, where),
        lambda each, _: typer.echo(json.dumps(_fields(each) | _body(each))),
        with_events=True,
    )


def _printable(text: str, keep: str = "") -> str:
    """Text for a terminal: what users and publishers wrote may have line breaks, colours, or half a character."""
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )


def _group(each: StoredLetter, by: str) -> str:
    letter = each.letter
    if by == "handler":
        return letter.handler
    if by == "key":
        return letter.key if letter.key is not None else "-"
    return f"{letter.cause.error} ({letter.cause.fingerprint})" if letter.cause else "waiting behind another"


def _fields(each: StoredLetter) -> dict[str, Any]:
    letter = each.letter
    cause = letter.cause
    return {
        "letter": each.revision,
        "status": letter.status,
        "handler": letter.handler,
        "key": letter.key,
        "stream": letter.origin.stream,
        "sequence": letter.origin.sequence,
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


def _body(each: StoredLetter) -> dict[str, Any]:
    letter = each.letter
    values = {name: letter.headers.get_all(name) for name in letter.headers}
    fields: dict[str, Any] = {"headers": {name: each[0] if len(each) == 1 else each for name, each in values.items()}}
    try:
        fields["data"] = letter.data.decode()
    except UnicodeDecodeError:
        fields["data_base64"] = base64.b64encode(letter.data).decode()
    if letter.cause is not None:
        fields["trace"] = letter.cause.trace
    return fields
