"""Progress bars of commands that read a stream, and the message after Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from jetspark.app.replay import HandlerReplayRecord, ReplayRecord

__all__ = ["interrupt_message", "job_bar", "sequence_bar"]


@contextmanager
def sequence_bar(as_json: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar over sequences, called with title, position and last sequence; a no-op outside a terminal."""
    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        yield lambda what, at, last: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("sequence", total=None)

        def show(what: str, at: int, last: int) -> None:
            progress.update(task, description=what, total=max(last, at), completed=at)

        yield show


@contextmanager
def job_bar(as_json: bool, command: str = "") -> Iterator[Callable[[ReplayRecord | HandlerReplayRecord], None]]:
    """A progress bar for a job, called with its record. After Ctrl-C it prints how to continue.

    Args:
        command: The command that continues the job, without the id; empty for a job that cannot be resumed.
    """
    latest: list[ReplayRecord | HandlerReplayRecord] = []

    def message() -> str:
        if not latest:
            return "nothing was begun"
        [record] = latest
        done = f"{record.title} is {record.reached}"
        return (
            f"{done}; to continue: {command} --resume {record.id}" if command else f"{done}; it is safe to begin again"
        )

    with interrupt_message(message), sequence_bar(as_json) as show_sequence:

        def show(record: ReplayRecord | HandlerReplayRecord) -> None:
            latest[:] = [record]
            show_sequence(record.title, record.at, record.last)

        yield show


@contextmanager
def interrupt_message(message: Callable[[], str] = lambda: "nothing was written") -> Iterator[None]:
    """Print one line instead of a traceback after Ctrl-C, and exit with the code that shells expect."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"jetspark: interrupted: {message()}", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
