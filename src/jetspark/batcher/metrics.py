"""Prometheus metrics of batchers, with the names of the specification. Needs the extra ``telemetry``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jetspark.batcher.config import Result, Stats
from jetspark.core.arguments import unfit
from jetspark.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import CollectorRegistry

__all__ = ["PrometheusMetrics"]

BATCH_SIZE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)

_COUNTERS: Sequence[tuple[str, str, Callable[[Stats], int]]] = (
    ("batcher_enqueued", "Items accepted by add.", lambda stats: stats.enqueued),
    ("batcher_flushed_ok", "Items in successful flushes.", lambda stats: stats.flushed_ok),
    ("batcher_flushed_fail", "Items in failed flushes.", lambda stats: stats.flushed_fail),
    ("batcher_dropped_on_shutdown", "Items lost on shutdown timeout.", lambda stats: stats.dropped_on_shutdown),
)


class PrometheusMetrics:
    """Exposes any number of batchers, labelled with their names. Create one per registry and pass it to each batcher.

    Counters are read when Prometheus scrapes, all counters of a batcher at one moment, so they add up in every scrape.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtra("metrics for Prometheus", "telemetry") from error
        registry = prometheus_client.REGISTRY if registry is None else registry
        if isinstance(registry, type) or not callable(getattr(registry, "register", None)):
            raise unfit("registry", registry, "a CollectorRegistry")
        self._batchers: dict[str, Callable[[], Stats]] = {}
        self._lock = threading.Lock()
        self._sizes: Any = prometheus_client.Histogram(
            "batcher_batch_size_items", "Batch sizes.", ["name"], buckets=BATCH_SIZE_BUCKETS, registry=registry
        )
        self._durations: Any = prometheus_client.Histogram(
            "batcher_flush_duration_seconds", "Flush durations.", ["name", "result"], registry=registry
        )
        registry.register(self)

    def watch(self, name: str, stats: Callable[[], Stats]) -> None:
        with self._lock:
            former = self._batchers.get(name)
            if former is not None and not former().is_closed:
                raise ConfigError(f"name={name!r}: another batcher of that name is measured here; give each its own")
            self._batchers[name] = stats

    def flushed(self, name: str, *, items: int, seconds: float, result: Result) -> None:
        self._sizes.labels(name).observe(items)
        self._durations.labels(name, result).observe(seconds)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Called by the registry for each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            moments = [(name, stats()) for name, stats in self._batchers.items()]
        for metric, what, value in _COUNTERS:
            family = CounterMetricFamily(metric, what, labels=["name"])
            for name, stats in moments:
                family.add_metric([name], value(stats))
            yield family
        flushes = CounterMetricFamily("batcher_flush", "Flushes by reason.", labels=["name", "reason"])
        depth = GaugeMetricFamily("batcher_queue_depth", "Items that wait for the sink.", labels=["name"])
        for name, stats in moments:
            for reason, count in stats.flushes.items():
                flushes.add_metric([name, reason], count)
            depth.add_metric([name], stats.queue_depth)
        yield flushes
        yield depth
