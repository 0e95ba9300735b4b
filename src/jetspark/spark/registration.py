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
    spark.dataSource.register(JetStreamFormat)
    spark.dataSource.register(KVFormat)
    spark.dataSource.register(FoldFormat)
