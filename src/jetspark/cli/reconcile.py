"""``jetspark reconcile``: compare the states of entities with their events, and repair what differs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from jetspark.cli.apps import EXIT_DIFFERENCE, AppName, AsJson, Servers, connection_options, load_app
from jetspark.cli.bars import sequence_bar
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.app import App, Reconciliation

__all__ = ["reconcile_entities"]


def reconcile_entities(
    app: AppName,
    name: Annotated[
        str | None, typer.Argument(metavar="[ENTITIES]", help="Only this kind; else all that have a fold.")
    ] = None,
    key: Annotated[list[str] | None, typer.Option("--key", help="Only this entity; may be repeated.")] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what differs, by the declared truth.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what a repair would store.")] = False,
    rate: Annotated[float | None, typer.Option("--rate", help="Messages read each second, at most.", min=0.001)] = None,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Compare the state of each entity with what its events make; exit code 3 if they differ.

    With --repair: where the events are the truth, the state that they make is stored; where the state is, the events
    that its fold returns as a correction are published, in one batch with the state. Changes may go on meanwhile. If it
    is interrupted, run it again: a repair is stored whole or not at all, and is not made twice.
    """
    if key and name is None:
        raise ConfigError("--key: expected with the name of a kind of entities")
    declared = load_app(app)
    with sequence_bar(as_json) as tell:
        done = asyncio.run(_reconcile(declared, name, key or [], servers, repair, dry_run, rate, tell))
    if as_json:
        typer.echo(json.dumps([each.to_dict() for each in done], indent=2))
    for each in [] if as_json else done:
        typer.echo(str(each))
        for found in each.differences:
            typer.echo(f"  {found}")
        for moving in each.moving:
            typer.echo(f"  {moving}: changed each time it was looked at; run this again")
    if not all(each.is_equal for each in done):
        raise typer.Exit(EXIT_DIFFERENCE)


async def _reconcile(
    app: App,
    name: str | None,
    keys: list[str],
    servers: str | None,
    repair: bool,
    dry_run: bool,
    rate: float | None,
    tell: Callable[[str, int, int], None],
) -> list[Reconciliation]:
    names = [name] if name is not None else [each for each, spec in app.spec.entities.items() if spec.fold is not None]
    if not names:
        raise ConfigError(
            f"app {app.name!r} has no entities with a fold of their events: declare events= and fold= with app.entities"
        )
    options, done = connection_options(servers), []
    async with app.connect(options.pop("servers"), **options) as client:
        for each in names:

            def told(at: int, last: int, each: str = each) -> None:
                tell(f"reconcile {each}", at, last)

            entities = client.entities(each)
            done.append(
                await entities.reconcile(keys=keys, repair=repair, dry_run=dry_run, rate=rate, on_progress=told)
            )
    return done
