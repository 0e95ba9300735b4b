"""Where Spark finds the format ``jetstream_projection`` by itself: it looks into top-level modules ``pyspark_*``."""

from jetspark.spark.formats import ProjectionFormat as DefaultSource

__all__ = ["DefaultSource"]
