"""Single items in, batches out: the front door of ingestion, on asyncio.

:mod:`jetspark.batcher.blocking` has the same names for threads. Nothing here needs NATS.
"""

from jetspark.batcher import public as _public
from jetspark.batcher.aio.batcher import Batcher
from jetspark.batcher.aio.jetstream import AtomicSink, FastIngestSink
from jetspark.batcher.aio.sinks import (
    CircuitBreakerSink,
    DeadLetterSink,
    FileSink,
    MeteredSink,
    RateLimitSink,
    RetrySink,
    Sink,
)
from jetspark.batcher.public import *

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
