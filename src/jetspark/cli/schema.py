"""``jetspark schema``: the contracts of an application, compared with recorded versions."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jetspark.cli.apps import EXIT_DIFFERENCE, AppName, AsJson, Servers, connection_options, load_app
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.app import App
    from jetspark.app.contracts.contract_records import Finding, Record

__all__ = ["schema"]

schema = typer.Typer(
    name="schema",
    no_args_is_help=True,
    help="Contracts of events: compatibility, differences, golden files, AsyncAPI.",
)

Golden = Annotated[
    Path | None,
    typer.Option("--golden", metavar="DIR", help="Compare with the golden files in a folder, not with a server."),
]
Mode = Annotated[
    str | None,
    typer.Option(
        "--mode",
        help="BACKWARD, FORWARD or FULL, also with _TRANSITIVE, or NONE; else the mode of the application.",
        metavar="MODE",
    ),
]


@schema.command()
def check(
    app: AppName, golden: Golden = None, servers: Servers = None, mode: Mode = None, as_json: AsJson = False
) -> None:
    """Check that recorded contracts are unchanged, and that every recorded version can still be read.

    Versions that are not recorded yet are listed and break nothing: `jetspark apply` or `jetspark schema fixtures`
    records them. Exit code: 0 if nothing is broken, 3 if something is, 1 for an error.
    """
    from jetspark.app.contracts.compatibility import check_mode
    from jetspark.app.contracts.contract_records import check_records

    loaded = load_app(app)
    chosen = loaded.spec.compatibility if mode is None else check_mode(mode)
    found = check_records(loaded.catalogue, _records(loaded, golden, servers), chosen)
    _show(found, as_json, f"{len(loaded.catalogue)} contract{'' if len(loaded.catalogue) == 1 else 's'}, {chosen}")
    if any(finding.is_breaking for finding in found):
        raise typer.Exit(EXIT_DIFFERENCE)


@schema.command()
def diff(app: AppName, golden: Golden = None, servers: Servers = None, as_json: AsJson = False) -> None:
    """Show how the contracts in the code differ from the recorded ones, field by field.

    Exit code: 0 if nothing differs, 3 if something does, 1 for an error.
    """
    from jetspark.app.contracts.schemas import differences, document

    loaded = load_app(app)
    records = _records(loaded, golden, servers)
    found: list[dict[str, Any]] = []
    for contract in loaded.catalogue:
        record = records.get((contract.type, contract.version))
        changes = [] if record is None else differences(record.schema, document(contract))
        if record is None or changes:
            lines = ["+ not recorded yet"] if record is None else [str(change) for change in changes]
            found.append({"type": contract.type, "version": contract.version, "changes": lines})
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        for each in found:
            typer.echo(f"{each['type']} version {each['version']}")
            for line in each["changes"]:
                typer.echo(f"  {line}")
        if not found:
            typer.echo("no difference")
    if found:
        raise typer.Exit(EXIT_DIFFERENCE)


@schema.command()
def fixtures(
    app: AppName,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the golden files, such as tests/golden.")],
    as_json: AsJson = False,
) -> None:
    """Write a golden file for each type and version without one: schema and examples of whole messages.

    Existing files are never changed. Exit code: 0 if the code is compatible with all files, 3 if not, 1 for an error.
    """
    from jetspark.app.checks.golden import golden_findings, write_golden

    loaded = load_app(app)
    written = write_golden(loaded, folder)
    broken = [finding for finding in golden_findings(loaded, folder) if finding.is_breaking]
    if as_json:
        found = {"written": [str(path) for path in written], "findings": [asdict(finding) for finding in broken]}
        typer.echo(json.dumps(found, indent=2))
    else:
        for path in written:
            typer.echo(f"wrote {path}")
        for finding in broken:
            typer.echo(str(finding))
        typer.echo(f"{len(written)} written, {len(broken)} not kept")
    if broken:
        raise typer.Exit(EXIT_DIFFERENCE)


@schema.command()
def asyncapi(
    app: AppName,
    version: Annotated[
        str | None, typer.Option(help="Version of the document; by default that of the application.")
    ] = None,
) -> None:
    """Print the application as an AsyncAPI 3 document: channels, messages, operations, schemas."""
    from jetspark.app.checks.asyncapi import asyncapi as describe

    typer.echo(json.dumps(describe(load_app(app), version=version), indent=2))


def _records(app: App, golden: Path | None, servers: str | None) -> dict[tuple[str, int], Record]:
    from jetspark.app.checks.golden import read_golden
    from jetspark.app.contracts.registry import read_registry

    if golden is not None:
        if not golden.is_dir():
            raise ConfigError(f"--golden {golden}: the folder does not exist; `jetspark schema fixtures` creates it")
        return read_golden(golden)

    async def read() -> dict[tuple[str, int], Record]:
        import jetspark

        async with jetspark.connect(**connection_options(servers)) as nc:
            return await read_registry(nc.jetstream(), app.spec.schema_bucket)

    return asyncio.run(read())


def _show(found: list[Finding], as_json: bool, summary: str) -> None:
    if as_json:
        typer.echo(json.dumps([{**asdict(finding), "is_breaking": finding.is_breaking} for finding in found], indent=2))
        return
    for finding in found:
        typer.echo(str(finding))
    broken = sum(finding.is_breaking for finding in found)
    typer.echo(f"{summary}: {broken} broken, {len(found) - broken} not recorded yet")
