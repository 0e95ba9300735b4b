"""Where Spark finds the format ``jetstream_kv`` by itself: it looks into top-level modules named ``pyspark_*``."""

from jetspark.spark.formats import KVFormat as DefaultSource

__all__ = ["DefaultSource"]
