"""A query that is asked to end: behind its micro-batch, or in the middle where that takes too long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from jetspark.errors import UsageError
from jetspark.spark.queries import stop_between_batches

pytest_plugins = ["support.sparks"]

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def start(spark: SparkSession, tmp_path: Path) -> Iterator[Callable[[str], StreamingQuery]]:
    """Starts a query whose first micro-batch evaluates an expression, and waits until it does."""
    started = []

    def begin(expression: str) -> StreamingQuery:
        rows = spark.readStream.format("rate").option("rowsPerSecond", 1).load().selectExpr(expression)
        query = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
        started.append(query)
        while not query.status["isTriggerActive"]:
            time.sleep(0.01)
        return query

    yield begin
    for query in started:
        query.stop()


def wait_for_rows(spark: SparkSession, query: StreamingQuery) -> None:
    """Until the job of the second micro-batch runs: the first has no rows."""
    jobs = spark.sparkContext.statusTracker()
    while query.lastProgress is None or not jobs.getActiveJobsIds():
        time.sleep(0.01)


def test_a_micro_batch_that_ends_in_time_is_waited_for(start: Callable[[str], StreamingQuery]) -> None:
    query = start("value")
    stop_between_batches(query, 100.0)
    assert not query.isActive
    assert query.lastProgress is not None


def test_one_that_takes_longer_is_cut_off(spark: SparkSession, start: Callable[[str], StreamingQuery]) -> None:
    query = start("java_method('java.lang.Thread', 'sleep', 100000L)")
    wait_for_rows(spark, query)
    stop_between_batches(query, 0.5)
    assert not query.isActive
    assert query.lastProgress is not None
    assert query.lastProgress["numInputRows"] == 0


def test_one_that_fails_meanwhile_says_so(spark: SparkSession, start: Callable[[str], StreamingQuery]) -> None:
    query = start("assert_true(java_method('java.lang.Thread', 'sleep', 2000L) = 'slept', 'on purpose')")
    wait_for_rows(spark, query)
    with pytest.raises(UsageError, match="on purpose"):
        stop_between_batches(query, 100.0)
    assert not query.isActive
