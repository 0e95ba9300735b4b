"""Measures the lag of an application, of the consumers of an account, and of readers with positions of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jetspark.app.clock import utc_now
from jetspark.app.lag.app_readings import AppReadings, own_consumers
from jetspark.app.lag.measures import (
    Measured,
    Probing,
    StreamReader,
    measure_consumer,
    measure_handler,
    measure_reader,
)
from jetspark.app.lag.outlook import LagOutlook, LagSeries, StreamLimits
from jetspark.app.lag.report import DeadLetterLag, LagReport, LagRow, age_s, row_of, sample_of
from jetspark.app.lag.server_readings import ServerReadings
from jetspark.app.topology.names import partition_stream
from jetspark.core.arguments import texts
from jetspark.errors import JetSparkError, StreamNotFound
from jetspark.jetstream.checks import check_name
from jetspark.jetstream.info import StreamInfo

if TYPE_CHECKING:
    import datetime

    from jetspark.aio.jetstream import JetStream
    from jetspark.app.spec import AppSpec, HasSpec

__all__ = ["LagMonitor", "lag"]


@dataclass(slots=True)
class _Draft:
    """A row to be measured."""

    kind: str
    name: str
    procedure: Probing[Measured]
    streams: Mapping[str, str]
    """By part the stream whose limits count; ``waiting`` for all others."""
    notes: tuple[str, ...] = ()


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
        readers: Sequence[StreamReader] = (),
    ) -> None:
        self._js, self._app = js, None if app is None else app.spec
        self._streams = [check_name("streams", name) for name in texts("streams", streams, "a list of streams' names")]
        self._readers = list(readers)
        self._series: dict[tuple[str, str, str], LagSeries] = {}

    async def sample(self) -> LagReport:
        """Measure once. A source that cannot be read is a row with the reason; the others are measured.

        Raises:
            StreamNotFound: The stream of the application, or one of ``streams``, does not exist.
            JetSparkError: The streams of the account cannot be listed.
        """
        sample = _Sample(self._js, self._app)
        readings = None if self._app is None else await sample.read_app(self._app)
        if self._streams or (self._app is None and not self._readers):
            await sample.read_consumers(self._streams)
        await sample.read_readers(self._readers)
        report, self._series = await sample.report(self._series, readings)
        return report


async def lag(
    js: JetStream,
    app: HasSpec | None = None,
    *,
    streams: Sequence[str] = (),
    readers: Sequence[StreamReader] = (),
) -> LagReport:
    """Measure lag once, as :class:`LagMonitor` does, which also measures where it is going."""
    return await LagMonitor(js, app, streams=streams, readers=readers).sample()


class _Sample:
    """The rows of one report."""

    def __init__(self, js: JetStream, app: AppSpec | None) -> None:
        self._server = ServerReadings(js)
        self._app = app
        self._drafts: list[_Draft] = []
        self._rows: list[LagRow] = []

    async def read_app(self, app: AppSpec) -> AppReadings:
        readings = AppReadings(self._server, app)
        folds = await readings.projections()
        await readings.read()
        for spec in app.handlers.values():
            kind = "workflow" if spec.name in app.workflows else "handler"
            stream = partition_stream(app.name, spec.name) if spec.partitions else app.stream
            reading = readings.handler(spec)
            if isinstance(reading, str):
                self._unknown(kind, spec.name, stream, reading)
            else:
                streams = {"waiting": stream, "uncopied": app.stream}
                self._drafts.append(_Draft(kind, spec.name, measure_handler(reading), streams))
        for name, fold in folds.items():
            if isinstance(fold, JetSparkError):
                self._unknown("projection", name, app.stream, fold)
            else:
                self._draft_reader(fold.reader, fold.notes)
        return readings

    async def read_consumers(self, streams: Sequence[str]) -> None:
        server, own = self._server, set() if self._app is None else own_consumers(self._app)
        if streams:
            await server.read_streams(streams)
            for name in streams:
                if isinstance(error := server.streams[name], StreamNotFound):
                    raise error
        else:
            if missing := await server.read_all_streams():
                self._unknown("consumer", "*", "*", f"{missing} streams did not answer")
            # In a cluster, the leader of a stream may count only the consumers that it has itself.
            known = server.known_streams().items()
            streams = [name for name, info in known if info.state.consumers or (info.config.replicas or 1) > 1]
        await server.read_consumers(streams)
        for stream in streams:
            found = server.consumers[stream]
            if isinstance(found, JetSparkError):
                self._unknown("consumer", "*", stream, found)
                continue
            if found.missing:
                self._unknown("consumer", "*", stream, f"{found.missing} consumers did not answer")
            for info in found.values():
                if (stream, info.name) not in own:
                    handler = (info.config.metadata or {}).get("jetspark-handler")
                    notes = (f"of handler {handler}; name its application for its lag",) if handler else ()
                    draft = _Draft("consumer", info.name, measure_consumer(info), {"waiting": stream}, notes)
                    self._drafts.append(draft)

    async def read_readers(self, readers: Sequence[StreamReader]) -> None:
        await self._server.read_streams(reader.stream for reader in readers)
        for reader in readers:
            self._draft_reader(reader)

    def _draft_reader(self, reader: StreamReader, notes: tuple[str, ...] = ()) -> None:
        info = self._server.streams[reader.stream]
        if isinstance(info, JetSparkError):
            self._unknown(reader.kind, reader.name, reader.stream, info)
            return
        procedure = measure_reader(reader, info)
        self._drafts.append(_Draft(reader.kind, reader.name, procedure, {"waiting": reader.stream}, notes))

    def _unknown(self, kind: str, name: str, stream: str, reason: object) -> None:
        self._rows.append(LagRow(kind=kind, name=name, stream=stream, unknown=str(reason)))

    async def report(
        self, series: Mapping[tuple[str, str, str], LagSeries], readings: AppReadings | None
    ) -> tuple[LagReport, dict[tuple[str, str, str], LagSeries]]:
        """The report, and the series with its samples, without those of readers that are gone."""
        measured = await self._server.measure([draft.procedure for draft in self._drafts])
        streams = self._server.known_streams()
        at = max((info.timestamp for info in streams.values() if info.timestamp is not None), default=utc_now())
        kept: dict[tuple[str, str, str], LagSeries] = {}
        for draft, each in zip(self._drafts, measured, strict=True):
            stream = draft.streams["waiting"]
            for note in draft.notes:
                each.note(note)
            if error := next(
                (self._server.denied[name] for name in draft.streams.values() if name in self._server.denied), None
            ):
                each.note(f"not all could be counted: {error}")
            place = (draft.kind, draft.name, stream)
            known = {part: streams[name] for part, name in draft.streams.items() if name in streams}
            outlook = LagOutlook()
            if "waiting" in known:
                kept[place] = series.get(place) or LagSeries()
                outlook = _outlook(kept[place], each, at, known)
            self._rows.append(row_of(*place, each, at, outlook))
        letters = [] if readings is None else _letters(readings, at)
        return LagReport.of(at, None if self._app is None else self._app.name, self._rows, letters), kept


def _outlook(
    series: LagSeries, measured: Measured, at: datetime.datetime, streams: Mapping[str, StreamInfo]
) -> LagOutlook:
    sample = sample_of(measured, at, streams)
    series.add(sample)
    limits = next((info for info in streams.values() if info.config.name == sample.stream), streams["waiting"])
    return series.outlook(StreamLimits.of(limits))


def _letters(readings: AppReadings, at: datetime.datetime) -> list[DeadLetterLag]:
    parked = readings.parked
    names = {*readings.letters, *(parked or ())}
    stuck = {name: readings.letters[name].stuck for name in readings.letters}
    return [
        DeadLetterLag(
            name=name,
            messages=stuck[name].messages if name in stuck else 0,
            seconds=age_s(stuck[name], at) if name in stuck else 0.0,
            parked_keys=None if parked is None else parked.get(name, 0),
        )
        for name in names
    ]
