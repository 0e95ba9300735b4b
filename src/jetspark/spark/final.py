"""Errors in tasks that no further attempt does away with.

Spark tries a task four times, whatever it raises, and shows a traceback of Python and two of Java for each. Python has
no way to tell it that an error is final. But a task that writes may return instead of raise: it ends with the error as
its message, and ``commit``, on the driver, raises it. So a write fails once, with three lines. A task that reads has no
such message; what it raises is at least short, and what can be checked is checked when the read is planned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from pyspark.sql.datasource import WriterCommitMessage

from jetspark.errors import Conflict, JetSparkError
from jetspark.spark.retrying import will_pass

__all__ = ["TaskFailed", "is_final", "raise_failure", "shortly"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class TaskFailed(WriterCommitMessage):
    """A task has written nothing, or not everything, and never will."""

    error: JetSparkError


def is_final(error: JetSparkError) -> bool:
    """Whether another attempt at the task would fail for the same reason. One that lost a race may win the next."""
    return not will_pass(error) and not isinstance(error, Conflict)


def raise_failure(messages: Iterable[WriterCommitMessage | None]) -> None:
    """
    Raises:
        JetSparkError: A task has ended with it.
    """
    for message in messages:
        if isinstance(message, TaskFailed):
            raise message.error


def shortly(read: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Have what a task yields end with final errors alone: how reading works inside is not what is wrong."""

    @functools.wraps(read)
    def reading(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        try:
            yield from read(*args, **kwargs)
        except JetSparkError as error:
            if not is_final(error):
                raise
            raise error.with_traceback(None) from None

    return reading
