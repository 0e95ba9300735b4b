"""JetStream and key-value buckets as PySpark sources and sinks: ``register(spark)``, then ``format("jetstream")``.

Each of the Python processes that Spark starts imports this package, and most of them read or write one format: what
registers them all is loaded when it is used.
"""

from typing import TYPE_CHECKING

from jetspark.spark import _extra as _extra
from jetspark.spark.session import session

if TYPE_CHECKING:
    from jetspark.spark.dead_letter_frames import dead_letters, redrive, unreadable_events
    from jetspark.spark.engine.projections import BackfillReport, backfill, fold_states, run
    from jetspark.spark.engine.replay_engine import ReplayEngine
    from jetspark.spark.engine.what_if import what_if
    from jetspark.spark.formats import register
    from jetspark.spark.lake.archiving import SparkArchiver
    from jetspark.spark.queries import Lag, lag
    from jetspark.spark.query_metrics import QueryMetrics
    from jetspark.spark.typed.event_frames import events, stream_events
    from jetspark.spark.typed.event_writes import write_events
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        homes = {"register": "formats", "Lag": "queries", "lag": "queries"}
        homes |= {"events": "typed.event_frames", "stream_events": "typed.event_frames"}
        homes |= {"write_events": "typed.event_writes"}
        homes |= {"ReplayEngine": "engine.replay_engine", "what_if": "engine.what_if"}
        homes |= {"SparkArchiver": "lake.archiving"}
        homes |= {
            "dead_letters": "dead_letter_frames",
            "redrive": "dead_letter_frames",
            "unreadable_events": "dead_letter_frames",
            "QueryMetrics": "query_metrics",
        }
        home = homes.get(name, "engine.projections")
        globals()[name] = found = getattr(import_module(f"jetspark.spark.{home}"), name)
        return found

    def __dir__():
        return sorted({*globals(), *__all__})


__all__ = [
    "BackfillReport",
    "Lag",
    "QueryMetrics",
    "ReplayEngine",
    "SparkArchiver",
    "backfill",
    "dead_letters",
    "events",
    "fold_states",
    "lag",
    "redrive",
    "register",
    "run",
    "session",
    "stream_events",
    "unreadable_events",
    "what_if",
    "write_events",
]
