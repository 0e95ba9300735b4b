"""Single items in, batches out: the front door of ingestion, on asyncio.

:mod:`jetspark.batcher.blocking` has the same names for threads. Nothing here needs NATS.
"""

from jetspark.batcher.aio.batcher import Batcher
from jetspark.batcher.aio.sinks import Sink
from jetspark.batcher.config import BatcherConfig, Clock, Flushed, Metrics, Stats
from jetspark.batcher.metrics import PrometheusMetrics
from jetspark.errors import (
    BatcherBroken,
    BatcherTimeout,
    CircuitOpen,
    ConfigError,
    DroppedOnShutdown,
    FlushTimeout,
)
from jetspark.errors import BatcherClosed as Closed

__all__ = [
    "Batcher",
    "BatcherBroken",
    "BatcherConfig",
    "BatcherTimeout",
    "CircuitOpen",
    "Clock",
    "Closed",
    "ConfigError",
    "DroppedOnShutdown",
    "FlushTimeout",
    "Flushed",
    "Metrics",
    "PrometheusMetrics",
    "Sink",
    "Stats",
]
