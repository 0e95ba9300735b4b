"""``--engine spark`` of the commands that replay: the fold is done by Spark on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jetspark.cli.apps import connection_options
from jetspark.cli.run_spark import spark_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from jetspark.spark import ReplayEngine

__all__ = ["on_spark", "short_session"]


@contextmanager
def on_spark(app: str, servers: str | None, projection: str) -> Iterator[ReplayEngine]:
    """A Spark that folds one projection, for as long as the block lasts."""
    given = spark_options(connection_options(servers))
    with short_session(projection) as spark:
        from jetspark.spark import ReplayEngine

        yield ReplayEngine(app, spark, projection=projection, **given)


@contextmanager
def short_session(what: str) -> Iterator[SparkSession]:
    """A session for one job; one that the program has already is used, and stays."""
    from pyspark.sql import SparkSession

    from jetspark.spark import session  # says which extra is missing, if it is

    is_ours = SparkSession.getActiveSession() is None
    spark = session(f"jetspark-{what}", is_short=True)
    try:
        yield spark
    finally:
        if is_ours:
            spark.stop()
