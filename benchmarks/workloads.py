"""Every workload by name. One module holds a claim with all its contenders; a new one is a module and a line here."""

from __future__ import annotations

from benchmarks.app_publish import APP_PUBLISH
from benchmarks.archive import ARCHIVE
from benchmarks.atomic_batches import ATOMIC_10, ATOMIC_100, ATOMIC_1000
from benchmarks.batcher import BATCHER, BATCHER_INGEST
from benchmarks.commands import COMMAND, COMMAND_64, COMMAND_64_REPLICATED, COMMAND_REPLICATED
from benchmarks.core_publish import CORE_PUBLISH
from benchmarks.core_subscribe import CORE_SUBSCRIBE
from benchmarks.entities import ENTITY_64
from benchmarks.fast_ingest import FAST_INGEST
from benchmarks.handlers import HANDLER, HANDLER_ONCE
from benchmarks.hybrid import HYBRID_READ
from benchmarks.js_publish_async import JS_PUBLISH_ASYNC
from benchmarks.js_pull import JS_PULL, JS_PULL_ACK
from benchmarks.objects import OBJECT_GET, OBJECT_PUT
from benchmarks.projection_live import PROJECTION_LATENCY, PROJECTION_LIVE
from benchmarks.projection_spark import PROJECTION_SPARK, PROJECTION_SPARK_FIRST
from benchmarks.request_latency import REQUEST_LATENCY
from benchmarks.spark import SPARK_READ, SPARK_READ_LARGE, SPARK_WRITE
from benchmarks.typed_events import SPARK_EVENTS, SPARK_EVENTS_WRITE
from benchmarks.workload import Workload
from jetspark.errors import ConfigError

__all__ = ["WORKLOADS", "choose"]

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        CORE_PUBLISH,
        CORE_SUBSCRIBE,
        REQUEST_LATENCY,
        JS_PUBLISH_ASYNC,
        FAST_INGEST,
        ATOMIC_10,
        ATOMIC_100,
        ATOMIC_1000,
        BATCHER,
        BATCHER_INGEST,
        JS_PULL,
        JS_PULL_ACK,
        HANDLER,
        HANDLER_ONCE,
        APP_PUBLISH,
        COMMAND,
        COMMAND_64,
        COMMAND_REPLICATED,
        COMMAND_64_REPLICATED,
        ENTITY_64,
        SPARK_READ,
        SPARK_READ_LARGE,
        SPARK_EVENTS,
        SPARK_WRITE,
        SPARK_EVENTS_WRITE,
        HYBRID_READ,
        ARCHIVE,
        PROJECTION_LIVE,
        PROJECTION_LATENCY,
        PROJECTION_SPARK,
        PROJECTION_SPARK_FIRST,
        OBJECT_PUT,
        OBJECT_GET,
    )
}


def choose(names: tuple[str, ...]) -> list[Workload]:
    """The workloads of these names; all without names."""
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise ConfigError(f"unknown workload {', '.join(unknown)}: expected some of {', '.join(WORKLOADS)}")
    return [workload for name, workload in WORKLOADS.items() if not names or name in names]
