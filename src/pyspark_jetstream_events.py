"""Where Spark finds the format ``jetstream_events`` by itself: it looks into top-level modules named ``pyspark_*``."""

from jetspark.spark.formats import EventFormat as DefaultSource

__all__ = ["DefaultSource"]
