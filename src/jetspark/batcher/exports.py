"""The public names that both drivers share; ``jetspark.batcher`` and ``jetspark.batcher.blocking`` export them all."""

from jetspark.batcher.config import BatcherConfig, Clock, Flushed, Metrics, Stats
from jetspark.batcher.dead_letters import DeadLetter
from jetspark.batcher.metered import Observer, SinkStats, Written
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
    "BatcherBroken",
    "BatcherConfig",
    "BatcherTimeout",
    "CircuitOpen",
    "Clock",
    "Closed",
    "ConfigError",
    "DeadLetter",
    "DroppedOnShutdown",
    "FlushTimeout",
    "Flushed",
    "Metrics",
    "Observer",
    "PrometheusMetrics",
    "SinkStats",
    "Stats",
    "Written",
]
