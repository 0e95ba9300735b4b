"""A progress bar for commands that read a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["sequence_bar"]


@contextmanager
def sequence_bar(as_json: bool) -> Iterator[Callable[[str, int, int], None]]:
    """In a terminal a bar, which is told what is done, the sequence that is read, and the last; elsewhere nothing."""
    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        yield lambda what, at, last: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("sequence", total=None)

        def tell(what: str, at: int, last: int) -> None:
            progress.update(task, description=what, total=max(last, at), completed=at)

        yield tell
