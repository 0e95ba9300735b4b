"""Where Spark finds the format ``jetstream_fold`` by itself: it looks into top-level modules named ``pyspark_*``."""

from jetspark.spark.engine.folding import FoldFormat as DefaultSource

__all__ = ["DefaultSource"]
