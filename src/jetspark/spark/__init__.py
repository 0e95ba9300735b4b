"""JetStream and key-value buckets as PySpark sources and sinks: ``register(spark)``, then ``format("jetstream")``."""

from jetspark.spark import _extra as _extra
from jetspark.spark.folding import fold
from jetspark.spark.registration import register
from jetspark.spark.session import session

__all__ = ["fold", "register", "session"]
