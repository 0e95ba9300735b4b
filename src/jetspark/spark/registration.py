"""Making the formats known to a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jetspark.spark.formats import JetStreamFormat, KVFormat, ProjectionFormat

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]

# Warns of every format that takes the place of one Spark has found by itself, or that was registered before.
_LOGGER = "org.apache.spark.sql.execution.datasources.DataSourceManager"


def register(spark: SparkSession) -> None:
    """Make the formats ``jetstream``, ``jetstream_kv`` and ``jetstream_projection`` known to a session, Connect's
    included.

    Doing it twice is fine, and needed in each thread that a program starts: Spark looks for formats in the session that
    is active in the thread. Where the package is installed for Spark's Python, Spark also finds them by itself; but
    only registered formats see what the session gives its workers, such as files of ``addPyFile`` and
    ``spark.executorEnv.PYTHONPATH``, where an application may be.
    """
    _activate(spark)
    with _without_warnings(spark):
        for kind in (JetStreamFormat, KVFormat, ProjectionFormat):
            spark.dataSource.register(kind)


def _activate(spark: SparkSession) -> None:
    """Have Java look for formats in this session.

    It looks in the session that is active in its thread, one for each thread of Python. In a thread that has used
    another session, which was stopped, that is the other one, and it has formats of its own.
    """
    jvm = getattr(spark, "_jvm", None)
    if jvm is not None:
        jvm.SparkSession.setActiveSession(getattr(spark, "_jsparkSession", None))


@contextmanager
def _without_warnings(spark: SparkSession) -> Iterator[None]:
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:  # a session of Connect, whose JVM is out of reach
        yield
        return
    log4j = jvm.org.apache.logging.log4j
    before = log4j.LogManager.getLogger(_LOGGER).getLevel()
    log4j.core.config.Configurator.setLevel(_LOGGER, log4j.Level.ERROR)
    try:
        yield
    finally:
        log4j.core.config.Configurator.setLevel(_LOGGER, before)
