"""``jetspark lag``: how far every reader is behind, the furthest behind first."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jetspark.cli.apps import connection_options, load_app
from jetspark.cli.option_groups import Output
from jetspark.cli.tables import printable
from jetspark.errors import ConfigError, ConnectionClosed, NetworkError, StreamNotFound, TopologyDrift

if TYPE_CHECKING:
    from jetspark.app import App
    from jetspark.app.lag import LagMonitor, LagOutlook, LagReport, LagRow

__all__ = ["lag"]

EXIT_UNKNOWN = 4
"""Exit code if the lag of a reader could not be measured."""
EVERY_S = 2.0
# Width of the table in a pipe, where a line is not to be wrapped.
PIPED_WIDTH = 200
_PLACES = {
    "uncopied": "not copied yet",
    "waiting": "waiting",
    "in_flight": "in flight",
    "scheduled": "scheduled",
    "due": "due",
    "behind_retry": "behind a retry",
    "given_up": "given up",
}


def lag(
    app: Annotated[
        str | None, typer.Argument(metavar="MODULE:APP", help="The application; else every consumer of the account.")
    ] = None,
    *,
    stream: Annotated[
        list[str] | None,
        typer.Option(
            "--stream",
            metavar="NAME",
            help="Every consumer of this stream, beside those of the application; repeatable.",
        ),
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option("--checkpoint", metavar="FOLDER", help="The Spark query with this checkpoint; repeatable."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Measure again and again, until Ctrl-C.")] = False,
    every: Annotated[
        float | None,
        typer.Option("--every", metavar="SECONDS", help=f"With --watch: the pause, {EVERY_S:g} by default.", min=0.1),
    ] = None,
    output: Output,
) -> None:
    """Show how far handlers, projections and other readers are behind: in messages, and in seconds.

    With an application, its handlers, workflows, projections and dead letters; else every consumer of the account. The
    reader with the oldest unprocessed message comes first. With --watch, the third measurement adds the slope, when the
    reader has caught up, and whether the stream drops messages before that. With --json, --watch prints one object on
    each line.

    Exit codes: 0 if everything was measured, 4 if the lag of some reader is unknown, 1 after an error.

    Examples: `jetspark lag orders:app --watch`, `jetspark lag --stream ORDERS --json`
    """
    if every is not None and not watch:
        raise ConfigError(f"--every {every:g} needs --watch: it is the pause between measurements")
    declared = None if app is None else load_app(app)

    async def run() -> bool:
        from jetspark import connect
        from jetspark.app.lag import LagMonitor, checkpoint_readers

        readers = [reader for folder in checkpoint or [] for reader in checkpoint_readers(folder)]
        async with connect(**connection_options(output.servers)) as client:
            monitor = LagMonitor(client.jetstream(), declared, streams=stream or [], readers=readers)
            if watch:
                await _watch(monitor, declared, EVERY_S if every is None else every, as_json=output.as_json)
            report = await _sample(monitor, declared)
        if output.as_json:
            typer.echo(json.dumps(report.to_dict(), indent=2))
        else:
            _console().print(_table(report))
        return report.is_complete

    if not asyncio.run(run()):
        raise typer.Exit(EXIT_UNKNOWN)


async def _sample(monitor: LagMonitor, app: App | None) -> LagReport:
    try:
        return await monitor.sample()
    except StreamNotFound as error:
        if app is not None and error.stream == app.stream:
            raise TopologyDrift(app.name, (str(error),)) from error
        raise


async def _watch(monitor: LagMonitor, app: App | None, every_s: float, *, as_json: bool) -> None:
    """Print reports until interrupted. While the server is away, the last one is shown with the reason."""
    console, shown = _console(), Group(Text("measuring"))
    screen = (
        Live(shown, console=console, screen=True, auto_refresh=False) if console.is_terminal and not as_json else None
    )
    with screen or nullcontext():
        while True:
            try:
                report = await _sample(monitor, app)
            except ConnectionClosed:
                raise
            except NetworkError as error:
                if screen is None:
                    typer.echo(f"jetspark: {error}", err=True)
                else:
                    screen.update(Group(shown, Text(f"not measured: {error}", style="red")), refresh=True)
            else:
                shown = _table(report, with_outlook=True)
                if as_json:
                    typer.echo(json.dumps(report.to_dict()))
                elif screen is None:
                    console.print(shown)
                else:
                    screen.update(shown, refresh=True)
            await asyncio.sleep(every_s)


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPED_WIDTH)


def _table(report: LagReport, *, with_outlook: bool = False) -> Group:
    title = f"{report.app or 'all consumers'} at {report.at:%Y-%m-%d %H:%M:%S} UTC"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("READER", "KIND", "STREAM"):
        table.add_column(name, overflow="fold")
    for name in ("BEHIND", "OLDEST"):
        table.add_column(name, justify="right", no_wrap=True)
    if with_outlook:
        table.add_column("OUTLOOK")
    table.add_column("WHERE")
    for row in report.rows:
        cells = [printable(row.name), row.kind, printable(row.stream), _count(row.messages), duration(row.seconds)]
        if with_outlook:
            cells.append(_outlook(row.outlook))
        table.add_row(*map(Text, [*cells, printable(_where(row))]), style=_style(row))
    lines: list[Any] = [Text(title), table if report.rows else Text("no consumers")]
    for each in report.dead_letters:
        parked = "unknown" if each.parked_keys is None else str(each.parked_keys)
        oldest = f", the oldest {duration(each.seconds)}" if each.messages else ""
        lines.append(Text(f"dead letters of {each.name}: {_count(each.messages)}{oldest}; parked keys: {parked}"))
    return Group(*lines)


def _style(row: LagRow) -> str:
    if row.outlook.overtaken_in_s is not None:
        return "bold red"
    return "yellow" if row.unknown is not None else "" if row.messages else "dim"


def _where(row: LagRow) -> str:
    if row.unknown is not None:
        return f"unknown: {row.unknown}"
    places = [f"{part.messages:,} {_PLACES[name]}" for name, part in row.parts.items() if part.messages]
    return "; ".join([", ".join(places), *(["paused"] if row.is_paused else []), *row.notes]).removeprefix("; ")


def _outlook(outlook: LagOutlook) -> str:
    if outlook.messages_per_s is None:
        return "..."
    parts = [f"{outlook.messages_per_s:+,.1f}/s"]
    if outlook.caught_up_in_s:
        parts.append(f"caught up in {duration(outlook.caught_up_in_s)}")
    if outlook.overtaken_in_s is not None:
        parts.append(f"{outlook.overtaken_by} drops messages in {duration(outlook.overtaken_in_s)}")
    return ", ".join(parts)


def _count(messages: int | None) -> str:
    return "?" if messages is None else f"{messages:,}"


def duration(seconds: float | None) -> str:
    """A duration in its two largest units: ``0.4s``, ``12s``, ``3m20s``, ``2h05m``, ``3d04h``."""
    if seconds is None:
        return "?"
    if seconds < 10:
        return f"{seconds:.1f}s" if seconds else "-"
    whole = round(seconds)
    for size, unit, small, smaller in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // small:02}{smaller}"
    return f"{whole}s"
