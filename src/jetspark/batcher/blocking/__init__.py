"""The names of :mod:`jetspark.batcher`, without ``await``: the same contract on threads."""

from jetspark.batcher.blocking.batcher import Batcher
from jetspark.batcher.blocking.jetstream import AtomicSink, FastIngestSink
from jetspark.batcher.blocking.sinks import (
    CircuitBreakerSink,
    DeadLetterSink,
    FileSink,
    MeteredSink,
    RateLimitSink,
    RetrySink,
    Sink,
)
from jetspark.batcher.config import BatcherConfig, Clock, Flushed, Metrics, Stats
from jetspark.batcher.metrics import PrometheusMetrics
from jetspark.batcher.steps import DeadLetter, Observer, SinkStats, Written
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
    "AtomicSink",
    "Batcher",
    "BatcherBroken",
    "BatcherConfig",
    "BatcherTimeout",
    "CircuitBreakerSink",
    "CircuitOpen",
    "Clock",
    "Closed",
    "ConfigError",
    "DeadLetter",
    "DeadLetterSink",
    "DroppedOnShutdown",
    "FastIngestSink",
    "FileSink",
    "FlushTimeout",
    "Flushed",
    "MeteredSink",
    "Metrics",
    "Observer",
    "PrometheusMetrics",
    "RateLimitSink",
    "RetrySink",
    "Sink",
    "SinkStats",
    "Stats",
    "Written",
]
