"""Writes the generated pages of the documentation; a test checks that they are up to date."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from jetspark.cli.commands import app

DOCS = Path(__file__).parent


def cli_reference() -> str:
    """Every command's ``--help``, as a page."""
    names = sorted(command.name or command.callback.__name__ for command in app.registered_commands if command.callback)
    parts = ["# Command line", "", "Generated from `--help` by `make docs`. The command needs the extra `cli`."]
    parts += ["", "```", _help(), "```"]
    for name in names:
        parts += ["", f"## jetspark {name}", "", "```", _help(name), "```"]
    return "\n".join(parts) + "\n"


def _help(*command: str) -> str:
    styled, app.rich_markup_mode = app.rich_markup_mode, None  # boxes are for terminals
    try:
        result = CliRunner().invoke(app, [*command, "--help"], prog_name="jetspark", terminal_width=100)
    finally:
        app.rich_markup_mode = styled
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.output.strip().splitlines())


if __name__ == "__main__":
    (DOCS / "cli.md").write_text(cli_reference(), encoding="utf-8")
