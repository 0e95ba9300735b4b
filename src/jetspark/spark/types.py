"""Spark's own types, for those outside of this package who annotate with them and must not name Spark themselves."""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["DataFrame", "SparkSession", "StreamingQuery"]
