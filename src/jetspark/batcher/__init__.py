"""Collects single items into batches for a sink, on asyncio.

:mod:`jetspark.batcher.blocking` has the same names for threads. The batcher itself does not need NATS. The asyncio
modules are loaded on first use of one of their names, so blocking programs do not load them.
"""

from typing import TYPE_CHECKING

from jetspark.batcher import exports as _exports
from jetspark.batcher.exports import *

if TYPE_CHECKING:
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
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        homes = {"Batcher": "batcher", "AtomicSink": "jetstream", "FastIngestSink": "jetstream"}
        home = homes.get(name, "sinks")
        globals()[name] = found = getattr(import_module(f"jetspark.batcher.aio.{home}"), name)
        return found

    def __dir__():
        return sorted({*globals(), *__all__})


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
__all__ += _exports.__all__
