"""What a Spark task knows of itself."""

from __future__ import annotations

from pyspark import TaskContext

__all__ = ["BATCH_ID", "QUERY_ID", "RUN_ID", "batch_name"]

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
