"""A Spark task: the name of its micro-batch, and errors that Spark should not retry.

Spark tries a failed task four times and shows a traceback of Python and two of Java for each try. Python cannot mark an
error as final. So a task that writes returns the error as its message instead of raising it, and ``commit`` raises it
on the driver: the write fails once, with three lines. A task that reads has no such message. Its errors are at least
short, and what can be checked is checked when the read is planned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, TypeVar

from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from jetspark.errors import Conflict, JetSparkError
from jetspark.spark.connections import will_pass

__all__ = [
    "BATCH_ID",
    "QUERY_ID",
    "RUN_ID",
    "TaskFailed",
    "TaskId",
    "batch_name",
    "is_final",
    "raise_failure",
    "shortly",
]

# Local properties that Spark does not document; tests of streaming queries check that they exist.
QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
# The run of a query, which changes at each start; a program may have replaced it by its own job group.
RUN_ID = "spark.jobGroup.id"


class TaskId(NamedTuple):
    """Which rows a task writes: the same in every attempt."""

    query: str
    """The query's id, or that of a batch write; within ``foreachBatch`` both."""
    batch: int
    partition: int

    def id_prefix(self) -> str:
        return f"{self.query}:{self.batch}:{self.partition}:"


def batch_name() -> str | None:
    """The name of the task's micro-batch, the same in each run of it; None outside of a streaming query."""
    context = TaskContext.get()
    if context is None:
        return None
    query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
    return f"{query}:{batch}" if query and batch else None


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class TaskFailed(WriterCommitMessage):
    """Message of a task that failed permanently; it wrote nothing, or a part of its rows."""

    error: JetSparkError


def is_final(error: JetSparkError) -> bool:
    """True if another attempt would fail for the same reason. A lost race (:class:`Conflict`) is worth a retry."""
    return not will_pass(error) and not isinstance(error, Conflict)


def raise_failure(messages: Iterable[WriterCommitMessage | None]) -> None:
    """
    Raises:
        JetSparkError: The error of a task that failed permanently.
    """
    for message in messages:
        if isinstance(message, TaskFailed):
            raise message.error


def shortly(read: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Decorator for a task's generator: final errors are raised without a traceback, so that Spark shows one line."""

    @functools.wraps(read)
    def reading(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        try:
            yield from read(*args, **kwargs)
        except JetSparkError as error:
            if not is_final(error):
                raise
            raise error.with_traceback(None) from None

    return reading
