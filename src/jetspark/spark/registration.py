"""Making the formats known to a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jetspark.spark.folding import FoldFormat
from jetspark.spark.formats import JetStreamFormat, KVFormat

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Make the formats ``jetstream``, ``jetstream_kv`` and ``jetstream_fold`` known to a session, Connect's included.

    Doing it twice is fine. Where the package is installed for Spark's Python, Spark also finds them by itself.
    """
    for kind in (JetStreamFormat, KVFormat, FoldFormat):
        # Spark warns of every format that takes the place of one it has registered, or has found by itself.
        if not _is_known(spark, kind.name()):
            spark.dataSource.register(kind)


def _is_known(spark: SparkSession, name: str) -> bool:
    java = getattr(spark, "_jsparkSession", None)
    if java is None:  # a session of Connect, whose JVM is out of reach
        return False
    return bool(java.sessionState().dataSourceManager().dataSourceExists(name))
