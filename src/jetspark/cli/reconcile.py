"""``jetspark reconcile``: compare the states of entities with their events, and repair what differs."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from jetspark.cli.apps import EXIT_DIFFERENCE, AppName, connection_options, load_app
from jetspark.cli.bars import sequence_bar
from jetspark.cli.option_groups import Output
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.app import Reconciliation

__all__ = ["reconcile"]


def reconcile(
    app: AppName,
    *,
    name: Annotated[
        str | None, typer.Argument(metavar="[ENTITIES]", help="Only this kind; else all that have a fold.")
    ] = None,
    key: Annotated[list[str] | None, typer.Option("--key", help="Only this entity; may be repeated.")] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Repair differences, by the declared truth.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what a repair would store.")] = False,
    rate: Annotated[float | None, typer.Option("--rate", help="Messages read each second, at most.", min=0.001)] = None,
    output: Output,
) -> None:
    """Compare the state of each entity with a fold of its events; exit code 3 if they differ.

    With --repair: where the events are the truth, the folded state is stored. Where the state is the truth, the fold
    returns correction events, which are published in one batch with the state. Entities may change during the command.
    After an interruption, run the command again: a repair is stored whole or not at all, and never twice.
    """
    if key and name is None:
        raise ConfigError("--key needs the name of the entities")
    declared = load_app(app)
    names = [name] if name is not None else [each for each, spec in declared.spec.entities.items() if spec.fold]
    if not names:
        raise ConfigError(
            f"app {declared.name!r} has no entities with a fold of their events: declare events= and fold= with "
            "app.entities"
        )
    connection = connection_options(output.servers)

    async def reconcile_all() -> list[Reconciliation]:
        done = []
        async with declared.connect(connection.pop("servers"), **connection) as client:
            for each in names:

                def progress(at: int, last: int, each: str = each) -> None:
                    show(f"reconcile {each}", at, last)

                entities = client.entities(each)
                done.append(
                    await entities.reconcile(
                        keys=key or [], repair=repair, dry_run=dry_run, rate=rate, on_progress=progress
                    )
                )
        return done

    with sequence_bar(output.as_json) as show:
        done = asyncio.run(reconcile_all())
    if output.as_json:
        typer.echo(json.dumps([each.to_dict() for each in done], indent=2))
    for each in [] if output.as_json else done:
        typer.echo(str(each))
        for found in each.differences:
            typer.echo(f"  {found}")
        for moving in each.moving:
            typer.echo(f"  {moving}: changed during each comparison; run this again")
    if not all(each.is_equal for each in done):
        raise typer.Exit(EXIT_DIFFERENCE)
