"""The names of :mod:`jetspark.batcher`, without ``await``: the same contract on threads."""

from jetspark.batcher import exports as _public
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
from jetspark.batcher.exports import *

__all__ = [
    "AtomicSink",
    "Batcher",
    "CircuitBreakerSink",
    "DeadLetterSink",
    "FastIngestSink",
    "FileSink",
    "MeteredSink",
    "RateLimitSink",
    "RetrySink",
    "Sink",
]
__all__ += _public.__all__
