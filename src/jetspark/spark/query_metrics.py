"""Prometheus metrics of streaming queries: rows, bytes, batches, and how far each query is behind its streams.

Spark reports a query when a micro-batch ends, so a query that hangs reports nothing. Its lag still grows. That is why
lag is read from the server at each scrape, from the positions of the last finished batch, and not with the report.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from pyspark.sql.streaming.listener import StreamingQueryListener

from jetspark.core.arguments import unfit
from jetspark.errors import ConfigError, JetSparkError, MissingExtra
from jetspark.spark.connections import jetstream_for
from jetspark.spark.engine.projection_options import ConnectingKeywords, option_text, servers_text
from jetspark.spark.options import Connecting, read_options
from jetspark.spark.queries import Lag, lag, streams_of
from jetspark.state.scan import head_of

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import CollectorRegistry
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

    from jetspark.blocking import JetStream

__all__ = ["QueryMetrics"]

_logger = logging.getLogger("jetspark.spark")

MAX_QUERIES = 100
"""Most queries with their own series. A driver runs a few; the bound protects Prometheus from a driver that gives each
query a new name."""
SCRAPE_S = 5.0
"""Time for reading lags in one scrape; Prometheus gives up after 10 seconds by default."""
REQUEST_TIMEOUT_MS = 2_000


@dataclass(slots=True)
class _Query:
    """One run of a query."""

    name: str
    rows: int = 0
    batches: int = 0
    batch_s: float = 0.0
    bytes: float = 0.0
    """Estimated: rows by the mean size of the stream's messages, at the scrape that counts them."""
    uncounted: dict[int, int] = field(default_factory=dict)
    """Rows of each source that are not in ``bytes`` yet."""
    progress: Mapping[str, Any] | None = None
    """The last report."""


class QueryMetrics(StreamingQueryListener):
    """Exposes the streaming queries of a session: ``spark.streams.addListener(QueryMetrics(servers))``.

    Queries are labelled with their names, or with their ids where they have none; lags also with the stream. A query
    that ends drops its series. At most a hundred queries are exposed at a time. A scrape sends up to three requests for
    each stream, and none after 5 seconds; lags that are not read by then are left out of it and counted.

    Args:
        registry: By default the registry of the process, which ``prometheus_client.start_http_server`` serves.
        options: Connection options of the formats, such as ``credentialsFile``.

    Raises:
        MissingExtra: ``prometheus-client`` is not installed.
        ConfigError: An option is unknown or invalid.
    """

    def __init__(
        self,
        servers: str | Sequence[str] = "nats://127.0.0.1:4222",
        *,
        registry: CollectorRegistry | None = None,
        **options: Unpack[ConnectingKeywords],
    ) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtra("metrics of Spark queries", "telemetry") from error
        given = {"requestTimeoutMs": REQUEST_TIMEOUT_MS, **options, "servers": servers_text(servers)}
        texts = {name: option_text(value) for name, value in given.items()}
        self._connecting = read_options(Connecting, "QueryMetrics", texts)
        self._queries: dict[str, _Query] = {}
        """By the id of the run."""
        self._failed = 0
        self._unread = 0
        self._lock = threading.Lock()
        registry = prometheus_client.REGISTRY if registry is None else registry
        if isinstance(registry, type) or not callable(getattr(registry, "register", None)):
            raise unfit("registry", registry, "a CollectorRegistry")
        registry.register(self)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        with self._lock:
            self._known(str(event.runId), event.name or str(event.id))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """An idle query stays where its last report says."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = json.loads(event.progress.json)
        with self._lock:
            query = self._known(progress["runId"], progress.get("name") or progress["id"])
            if query is None:
                return
            query.progress = progress
            query.batch_s = progress.get("batchDuration", 0) / 1000
            rows = [source.get("numInputRows", 0) for source in progress.get("sources", ())]
            query.batches += 1
            query.rows += sum(rows)
            for number, count in enumerate(rows):
                query.uncounted[number] = query.uncounted.get(number, 0) + count

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        with self._lock:
            self._queries.pop(str(event.runId), None)
            self._failed += event.exception is not None

    def _known(self, run: str, name: str) -> _Query | None:
        found = self._queries.get(run)
        if found is None:
            if len(self._queries) >= MAX_QUERIES:
                _logger.warning("query %s has no metrics: %d queries are exposed already", name, MAX_QUERIES)
                return None
            found = self._queries[run] = _Query(name)
        return found

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Called by the registry for each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            queries = list(self._queries.values())
        lags = self._read(queries)
        with self._lock:
            queries = list(self._queries.values())  # one that has ended in the meantime is gone
            values = [(each.name, each.rows, each.bytes, each.batches, each.batch_s) for each in queries]
            names = {each.name for each in queries}
            failed, unread = self._failed, self._unread
        for position, (name, what) in enumerate(_COUNTERS, 1):
            family = CounterMetricFamily(f"jetspark_spark_query_{name}", what, labels=["query"])
            for value in values:
                family.add_metric([value[0]], value[position])  # type: ignore[arg-type]
            yield family
        durations = GaugeMetricFamily(
            "jetspark_spark_query_batch_seconds", "Duration of the last micro-batch.", labels=["query"]
        )
        for value in values:
            durations.add_metric([value[0]], value[-1])
        yield durations
        for name, what in _LAGS:
            gauge = GaugeMetricFamily(f"jetspark_spark_query_lag_{name}", what, labels=["query", "stream"])
            for (query, stream), found in lags.items():
                if query in names:
                    gauge.add_metric([query, stream], getattr(found, name))
            yield gauge
        yield CounterMetricFamily("jetspark_spark_queries_failed", "Queries that ended by an error.", value=failed)
        yield CounterMetricFamily("jetspark_spark_query_lags_unread", "Lags left out of a scrape.", value=unread)

    def _read(self, queries: Sequence[_Query]) -> dict[tuple[str, str], Lag]:
        """The lags of queries that have finished a batch; and the bytes of the rows since the last scrape."""
        deadline, found = time.monotonic() + SCRAPE_S, dict[tuple[str, str], Lag]()
        for number, query in enumerate(queries):
            progress = query.progress
            if progress is None:
                continue
            try:
                js = jetstream_for(self._connecting)
                lags = lag(progress, js)
                self._count_bytes(query, progress, js)
            except ConfigError:  # none of its sources is one of ours
                continue
            except JetSparkError as error:
                _logger.info("lag of query %s not read: %s", query.name, error)
                self._unread += 1
            else:
                found |= {(query.name, stream): value for stream, value in lags.items()}
            if time.monotonic() > deadline:
                self._unread += len(queries) - number - 1
                break
        return found

    def _count_bytes(self, query: _Query, progress: Mapping[str, Any], js: JetStream) -> None:
        for number, source in enumerate(progress["sources"]):
            heads = [head_of(js.stream(name).cached_info) for name in streams_of(source)]
            mean = sum(each.bytes_per_message for each in heads) / len(heads) if heads else 0.0
            with self._lock:
                query.bytes += mean * query.uncounted.pop(number, 0)


_COUNTERS = (
    ("rows", "Rows read by finished micro-batches."),
    ("bytes", "Bytes of these rows, estimated by the mean size of the stream's messages."),
    ("batches", "Reports of finished micro-batches."),
)
_LAGS = (
    ("messages", "Messages after the position of the last finished micro-batch."),
    ("bytes", "Bytes of these messages, estimated by their mean size."),
    ("seconds", "Age of the first of these messages by the server's clock; 0 if there is none."),
)
