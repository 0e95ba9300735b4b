"""A small, quiet Spark for tests that need one: ``pytest_plugins = ["support.sparks"]``, then the fixture ``spark``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jetspark.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CORES = 2

CONF = {
    # The first compiler only and the simplest collector: starts a third sooner, and no test is about Spark's own speed.
    # `default`, so that the session's own options for logging stay.
    "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.memory": "1g",
    "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir()) / "jetspark-tests-warehouse"),
    # Checkpoints by rename instead of through processes that are forked for each file: 90 ms less a micro-batch.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    # A batch without data is for watermarks, which no test here has.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """With the formats registered. Shared: tests use names of their own, and stop the queries they start."""
    session_ = session("jetspark-tests", cores=CORES, conf=CONF)
    yield session_
    session_.stop()
