"""The names of :mod:`jetspark.batcher`, without ``await``: the same contract on threads."""

from jetspark.batcher.blocking.batcher import Batcher
from jetspark.batcher.blocking.sinks import Sink
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
