"""``jetspark plan``, ``apply`` and ``check``: the declarations of an application, and the state of a server."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jetspark.cli.apps import EXIT_DIFFERENCE, AppName, AsJson, Servers, connection_options, load_app
from jetspark.errors import TopologyRefused

if TYPE_CHECKING:
    from jetspark.app.topology.declared import TopologyPlan

__all__ = ["apply", "check", "plan"]


def plan(app: AppName, servers: Servers = None, as_json: AsJson = False) -> None:
    """Show the differences between an application's declarations and the server. Nothing is changed.

    Exit code: 0 without differences, 3 with differences, 1 for an error.
    """
    found = asyncio.run(load_app(app).plan(**connection_options(servers)))
    _show(found, as_json)
    if not found.is_empty:
        raise typer.Exit(EXIT_DIFFERENCE)


def apply(
    app: AppName,
    servers: Servers = None,
    allow: Annotated[
        bool, typer.Option("--allow", help="Also make changes that can lose data: see the plan first.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create or update the streams, buckets, consumers and contracts that an application declares.

    A second run changes nothing. Exit code: 0 if the server has all of them, 3 if a change was refused because it can
    lose data (--allow makes it) or because the server cannot make it; then nothing is changed. 1 for an error.
    """
    try:
        done = asyncio.run(load_app(app).apply(allow=allow, **connection_options(servers)))
    except TopologyRefused as refused:
        typer.echo(str(refused), err=True)
        raise typer.Exit(EXIT_DIFFERENCE) from None
    _show(done, as_json)


def check(
    apps: Annotated[list[str], typer.Argument(metavar="MODULE:APP...", help="One application, or several.")],
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find mistakes in names, subjects and ownership, without a server.

    Exit code: 0 without errors, 3 with errors (with --strict also with warnings), 1 if an application cannot be loaded.
    """
    from jetspark.app.checks.lints import lint_apps

    found = lint_apps([load_app(app) for app in apps])
    if as_json:
        typer.echo(json.dumps([_fields(lint) for lint in found], indent=2))
    else:
        for lint in found:
            typer.echo(str(lint))
        errors = sum(lint.level == "error" for lint in found)
        typer.echo(f"{_count(errors, 'error')}, {_count(len(found) - errors, 'warning')}")
    if any(lint.level == "error" or strict for lint in found):
        raise typer.Exit(EXIT_DIFFERENCE)


def _fields(lint: Any) -> dict[str, str]:
    return {"level": lint.level, "rule": lint.rule, "where": lint.where, "reason": lint.reason}


def _show(found: TopologyPlan, as_json: bool) -> None:
    if not as_json:
        typer.echo(str(found))
        return
    steps = [
        {
            "kind": step.kind,
            "name": step.name,
            "action": step.action,
            "safety": step.safety,
            "reason": step.reason,
            "changes": [
                {
                    "field": change.name,
                    "found": change.found,
                    "declared": change.declared,
                    "safety": change.safety,
                    "reason": change.reason,
                }
                for change in step.changes
            ],
        }
        for step in found.steps
    ]
    typer.echo(json.dumps({"app": found.app, "steps": steps}, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    return dict(value) if hasattr(value, "keys") else str(value)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
