"""All output of the demo: a progress bar for each running stage, and a table of the results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

__all__ = ["DemoStage", "Screen", "ShownRow"]

WIDTH = 18
"""Width of the stage names."""
NARROW, VERY_NARROW = 100, 70
"""Terminal widths in columns, below which the bars are simplified."""


@dataclass(frozen=True, slots=True)
class ShownRow:
    """One row of the table: a measurement or check of this run."""

    what: str
    result: str
    is_good: bool | None = True
    """None if the check was not tried; ``result`` has the reason."""


class _Seconds(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.elapsed or 0:5.1f} s")


class DemoStage:
    """The progress and text of a running stage."""

    def __init__(self, name: str, total: int, progress: Progress | None, task: TaskID | None) -> None:
        self.name = name
        self.said = ""
        self._total = total
        self._progress, self._task = progress, task
        self._began = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    def reached(self, completed: int) -> None:
        """Move the bar; it is full only at the end."""
        self._show(completed=min(completed, self._total - 1))

    def say(self, text: str) -> None:
        """Show ``text`` beside the bar, until the next call."""
        self.said = text
        self._show(said=text)

    def end(self, *, is_done: bool) -> None:
        if is_done:
            self._show(completed=self._total)
        if self._progress is not None and self._task is not None:
            self._progress.stop_task(self._task)

    def _show(self, **fields: Any) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, **fields)


class Screen:
    """Bars in a terminal, plain lines elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.findings: list[ShownRow] = []
        self.stage_name = ""
        """The running stage, or the last one."""
        self._progress = self._bars() if self.console.is_terminal else None

    def _bars(self) -> Progress:
        """Columns that fit on one line: the text is cut, numbers are not; a narrow terminal has no bar."""
        narrow = self.console.width < NARROW
        name = TextColumn(f"{{task.description:{WIDTH}}}", table_column=Column(no_wrap=True, min_width=WIDTH))
        bar = BarColumn(bar_width=8 if narrow else 16, table_column=Column(min_width=8))
        count = MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=len("500000/500000")))
        seconds = _Seconds(table_column=Column(no_wrap=True, min_width=len("100.0 s")))
        said = TextColumn("{task.fields[said]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
        columns = (
            (name, count, seconds, said) if self.console.width < VERY_NARROW else (name, bar, count, seconds, said)
        )
        return Progress(*columns, console=self.console, expand=True)

    @contextmanager
    def bars(self) -> Iterator[None]:
        """Show the bars; lines printed inside the block appear above them."""
        if self._progress is None:
            yield
            return
        with self._progress:
            yield

    @contextmanager
    def stage(self, name: str, total: int = 1) -> Iterator[DemoStage]:
        """Show a stage; its bar becomes full when the block ends, and stops if the block fails."""
        self.stage_name = name
        task = None if self._progress is None else self._progress.add_task(name, total=total, said="")
        stage = DemoStage(name, total, self._progress, task)
        try:
            yield stage
        except BaseException:
            stage.end(is_done=False)
            raise
        stage.end(is_done=True)
        if self._progress is None:
            self.line(f"{name:{WIDTH}} {stage.elapsed_s:6.1f} s  {stage.said}")

    def found(self, what: str, result: str, *, is_good: bool | None = True) -> None:
        self.findings.append(ShownRow(what, result, is_good))

    @property
    def is_good(self) -> bool:
        return all(finding.is_good is not False for finding in self.findings)

    def table(self) -> None:
        table = Table(show_edge=False, pad_edge=False, header_style="bold")
        table.add_column("shown", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("measured and checked in this run")
        for finding in self.findings:
            mark = {True: "[green]ok[/]", False: "[red]wrong[/]", None: "[yellow]-[/]"}[finding.is_good]
            table.add_row(finding.what, mark, finding.result)
        self.console.print()
        self.console.print(table)

    def commands(self, heading: str, commands: Sequence[tuple[str, str]]) -> None:
        """Print (command, description) pairs; a command is never wrapped, so that it can be pasted."""
        self.console.print(f"\n{heading}")
        for command, what in commands:
            self.console.print(f"  [dim]# {what}[/]")
            self.console.print(f"  {command}", soft_wrap=True, markup=False)

    def line(self, text: str = "", *, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, soft_wrap=True)
