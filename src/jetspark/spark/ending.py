"""The end of a streaming query, on request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["stop_between_batches"]

POLL_S = 0.1


def stop_between_batches(query: StreamingQuery, within_s: float) -> None:
    """End a query behind its present micro-batch, or in the middle of it if that takes longer.

    Nothing is lost by the latter, but Spark prints a page of errors, and the micro-batch is run again.
    """
    last, deadline = _last_batch(query), time.monotonic() + within_s
    while query.status["isTriggerActive"] and _last_batch(query) == last and time.monotonic() < deadline:
        time.sleep(POLL_S)
    query.stop()


def _last_batch(query: StreamingQuery) -> int | None:
    """Of those that are done."""
    progress = query.lastProgress
    return None if progress is None else progress["batchId"]
