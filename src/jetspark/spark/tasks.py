"""What a Spark task knows of itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from jetspark.errors import Conflict, JetSparkError
from jetspark.spark.connections import will_pass

__all__ = ["BATCH_ID", "QUERY_ID", "RUN_ID", "TaskFailed", "batch_name", "is_final", "raise_failure", "shortly"]

# Local properties that Spark does not document; the tests of streaming queries see to it that they are there.
QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
# The run of a query, another one after each start; unless somebody has put a job group of their own in its place.
RUN_ID = "spark.jobGroup.id"


def batch_name() -> str | None:
    """Of the micro-batch that the task belongs to, if it does: the same whenever, and wherever, it is run."""
    context = TaskContext.get()
    if context is None:
        return None
    query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
    return f"{query}:{batch}" if query and batch else None


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
