"""Measures the lag of an application, of the consumers of an account, and of readers with positions of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jetspark.app.clock import utc_now
from jetspark.app.lag.app_readings import AppReadings, own_consumers
from jetspark.app.lag.measures import LagSource, MeasuredLag, PositionReader, Probing, measure_consumer
from jetspark.app.lag.outlook import LagOutlook, LagSeries, StreamLimits
from jetspark.app.lag.report import LagReport, LagRow, row_of, sample_of
from jetspark.app.lag.server_readings import ServerReadings
from jetspark.core.arguments import texts
from jetspark.errors import JetSparkError
from jetspark.jetstream.checks import check_name
from jetspark.jetstream.info import ConsumerInfo

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app.spec import HasSpec

__all__ = ["LagMonitor", "lag"]


class LagMonitor:
    """Measures lag again and again. From the third sample on, reports have slopes.

    Args:
        app: Measure its handlers and projections, and count its dead letters. Without an application, streams and
            readers, measure every consumer of the account.
        streams: Measure every consumer of these streams; with an application, every other than its own.
        readers: Measure readers that keep their own position, such as archives and Spark queries.

    Raises:
        ConfigError: The name of a stream is not valid.
    """

    def __init__(
        self,
        js: JetStream,
        app: HasSpec | None = None,
        *,
        streams: Sequence[str] = (),
        readers: Sequence[PositionReader] = (),
    ) -> None:
        self._js, self._app = js, None if app is None else app.spec
        self._streams = [check_name("streams", name) for name in texts("streams", streams, "a list of streams' names")]
        self._readers = list(readers)
        self._series: dict[tuple[str, str, str], LagSeries] = {}

    async def sample(self) -> LagReport:
        """Measure once. A source that cannot be read is a row with the reason; the others are measured.

        Raises:
            StreamNotFound, NetworkError: The stream of the application, or one of ``streams``, does not exist, or
                cannot be reached.
            JetSparkError: The streams of the account cannot be listed.
        """
        server, sources = ServerReadings(self._js), list[LagSource]()
        readings = None if self._app is None else AppReadings(server, self._app)
        if readings is not None:
            sources += await readings.read()
        if self._streams or (self._app is None and not self._readers):
            sources += await self._read_consumers(server)
        await server.read_streams(reader.stream for reader in self._readers)
        sources += [server.source_of(reader) for reader in self._readers]
        measurements = [each.measurement for each in sources if not isinstance(each.measurement, str)]
        measured = iter(await server.measure(measurements))
        at = max((info.timestamp for info in server.known_streams() if info.timestamp is not None), default=utc_now())
        rows, series = [], dict[tuple[str, str, str], LagSeries]()
        for source in sources:
            place = source[:3]
            if isinstance(reason := source.measurement, str):
                rows.append(LagRow(kind=source.kind, name=source.name, stream=source.stream, unknown=reason))
                continue
            found, info, outlook = next(measured), server.streams[source.stream], LagOutlook()
            if server.denied and not found.has_ages:
                found.note(f"the age is unknown: {next(iter(server.denied.values()))}")
            if isinstance(info, JetSparkError):
                found.note(f"the limits of stream {source.stream} are unknown: {info}")
            else:
                series[place] = self._series.get(place) or LagSeries()
                series[place].add(sample_of(found, at, info))
                outlook = series[place].outlook(StreamLimits.of(info))
            rows.append(row_of(source, found, at, outlook))
        self._series = series  # without those of readers that are gone
        letters = [] if readings is None else readings.dead_letters(at)
        return LagReport.of(at, None if self._app is None else self._app.name, rows, letters)

    async def _read_consumers(self, server: ServerReadings) -> list[LagSource]:
        own = set() if self._app is None else own_consumers(self._app)
        found: list[LagSource] = []
        if self._streams:
            await server.read_streams(self._streams, must_exist=True)
            streams = self._streams
        else:
            if missing := await server.read_all_streams():
                found.append(LagSource("consumer", "*", "*", f"{missing} streams did not answer"))
            # In a cluster, the leader of a stream may count only the consumers that it has itself.
            streams = [
                info.config.name
                for info in server.known_streams()
                if info.state.consumers or (info.config.replicas or 1) > 1
            ]
        await server.read_consumers(streams)
        for stream in streams:
            consumers = server.consumers[stream]
            if isinstance(consumers, JetSparkError):
                found.append(LagSource("consumer", "*", stream, str(consumers)))
                continue
            if consumers.missing:
                found.append(LagSource("consumer", "*", stream, f"{consumers.missing} consumers did not answer"))
            found += [
                LagSource("consumer", name, stream, _measure_other(info))
                for name, info in consumers.items()
                if (stream, name) not in own
            ]
        return found


async def lag(
    js: JetStream,
    app: HasSpec | None = None,
    *,
    streams: Sequence[str] = (),
    readers: Sequence[PositionReader] = (),
) -> LagReport:
    """Measure lag once, as :class:`LagMonitor` does, which also measures where it is going."""
    return await LagMonitor(js, app, streams=streams, readers=readers).sample()


def _measure_other(info: ConsumerInfo) -> Probing[MeasuredLag]:
    found = yield from measure_consumer(info)
    if handler := (info.config.metadata or {}).get("jetspark-handler"):
        found.note(f"of handler {handler}; name its application for its lag")
    return found
