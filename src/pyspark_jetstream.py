"""Where Spark finds the format ``jetstream`` by itself: it looks into top-level modules named ``pyspark_*``."""

from jetspark.spark.formats import JetStreamFormat as DefaultSource

__all__ = ["DefaultSource"]
