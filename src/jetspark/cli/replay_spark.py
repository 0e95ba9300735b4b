"""``--engine spark`` of the commands that replay: the fold is done by Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jetspark.cli.apps import connection_options
from jetspark.cli.run_spark import spark_options
from jetspark.cli.spark_place import SparkPlace

if TYPE_CHECKING:
    from jetspark.spark import ReplayEngine

__all__ = ["on_spark"]


@contextmanager
def on_spark(place: SparkPlace, app: str, servers: str | None, projection: str) -> Iterator[ReplayEngine]:
    """A Spark that folds one projection, for as long as the block lasts."""
    from jetspark.spark import ReplayEngine  # says which extra is missing, if it is
    from jetspark.spark.session import short_session

    given = spark_options(connection_options(servers))
    with short_session(f"jetspark-{projection}", master=place.master, py_files=place.py_files) as spark:
        yield ReplayEngine(app, spark, projection=projection, **given)
