"""Tables and JSON lists on a terminal, printed while they are read."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import AsyncIterator, Sequence
from typing import Any

import typer

__all__ = ["TerminalTable", "print_json_list", "printable"]

# The first rows determine the widths, so that a list of millions is never in memory.
SAMPLE_ROWS = 100
# A wider value shifts the rest of its own row.
MAX_WIDTH = 40
MIN_LAST_WIDTH = 20
# Width of the last column in a pipe, where the reader may need the whole line.
PIPED_WIDTH = 200


class TerminalTable:
    """Rows below a header, printed as they are added: ``table.add(...)``, and ``table.end()`` after the last."""

    def __init__(self, *header: str) -> None:
        self._header, self._widths = header, [len(name) for name in header]
        self._sample: list[Sequence[str]] | None = [header]
        self.count = 0

    def add(self, *cells: str) -> None:
        """Add a row. Line breaks and control characters are escaped; the last cell is cut with ``…``."""
        self.count += 1
        row = [printable(cell) for cell in cells]
        if self._sample is None:
            self._print(row)
            return
        self._sample.append(row)
        if len(self._sample) > SAMPLE_ROWS:
            self._print_sample()

    def end(self) -> None:
        """Print the remaining rows; a table without rows has no output."""
        if self._sample is not None and self.count:
            self._print_sample()

    def _print_sample(self) -> None:
        rows, self._sample = self._sample or [], None
        for row in rows:
            self._widths = [
                max(width, min(len(cell), MAX_WIDTH)) for width, cell in zip(self._widths, row, strict=True)
            ]
        for row in rows:
            self._print(row)

    def _print(self, row: Sequence[str]) -> None:
        first = "  ".join(cell.ljust(width) for cell, width in zip(row[:-1], self._widths[:-1], strict=True)) + "  "
        room = PIPED_WIDTH
        if sys.stdout.isatty():
            room = max(MIN_LAST_WIDTH, shutil.get_terminal_size().columns - len(first))
        last = row[-1] if len(row[-1]) <= room else row[-1][: room - 1] + "…"
        typer.echo(f"{first}{last}".rstrip())


def printable(text: str, keep: str = "") -> str:
    """Text for a terminal, with control characters and lone surrogates escaped."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )


async def print_json_list(items: AsyncIterator[dict[str, Any]]) -> None:
    """Print an array of objects, each as soon as it is read."""
    count = 0
    async for each in items:
        typer.echo(",\n" if count else "[\n", nl=False)
        typer.echo(textwrap.indent(json.dumps(each, indent=2), "  "), nl=False)
        count += 1
    typer.echo("\n]" if count else "[]")
