"""The end of a streaming query, on request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from jetspark.spark.failures import failure_of

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["stop_between_batches"]

POLL_S = 0.1


def stop_between_batches(query: StreamingQuery, within_s: float) -> None:
    """End a query behind its present micro-batch, or in the middle of it if that takes longer.

    Nothing is lost by the latter, but Spark prints a page of errors, and the micro-batch is run again.

    Raises:
        UsageError: It had ended by itself, or did so meanwhile, because something failed.
    """
    last, deadline = _last_batch(query), time.monotonic() + within_s
    while query.status["isTriggerActive"] and _last_batch(query) == last and time.monotonic() < deadline:
        time.sleep(POLL_S)
    time.sleep(POLL_S)  # a query that fails is over a moment after its micro-batch
    failure = None if query.isActive else query.exception()
    query.stop()
    if failure is not None:
        raise failure_of(str(failure)) from failure


def _last_batch(query: StreamingQuery) -> int | None:
    """Of those that are done."""
    progress = query.lastProgress
    return None if progress is None else progress["batchId"]
