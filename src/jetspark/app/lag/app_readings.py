"""Reads the consumers, retries, dead letters, parked keys and positions of an application.

The sources of a handler are read in the order in which an event moves through them: copies, consumers, retries, dead
letters. So an event that moves during the reading is counted twice rather than missed. The exception is an event that
goes from a scheduled retry to its next attempt, or back, between two answers.
"""

from __future__ import annotations

import asyncio
import datetime
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar, cast

from jetspark.aio.context import context_of
from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.dead_letters.listing import DeadLetterFilter, each_dead_letter
from jetspark.app.handlers.consumers import advisory_consumer, consumers_of
from jetspark.app.handlers.partitions import copied_from
from jetspark.app.lag.measures import (
    HandlerSources,
    HandlerWaits,
    LagSource,
    PositionReader,
    Probe,
    ask,
    measure_handler,
    waits_of,
)
from jetspark.app.lag.report import DeadLetterLag, age_s
from jetspark.app.projections.bucket_refs import BucketRef, alias_key, bucket_ref_of
from jetspark.app.projections.positions import FoldPosition
from jetspark.app.projections.state_header import position_key
from jetspark.app.topology.names import (
    dead_letter_stream,
    handler_bucket,
    partition_stream,
    projection_bucket,
    retry_stream,
)
from jetspark.errors import JetSparkError, MessageNotFound, UsageError
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.kv import key_of, subject_of

if TYPE_CHECKING:
    from jetspark.app.handlers.handler_spec import HandlerSpec
    from jetspark.app.lag.server_readings import ServerReadings
    from jetspark.app.projections.projection_spec import ProjectionSpec
    from jetspark.app.spec import AppSpec

__all__ = ["AppReadings", "own_consumers"]

T = TypeVar("T")

MAX_LISTED = 50_000
"""Dead letters that are read, and subjects of scheduled retries that are listed, for one report."""


def own_consumers(app: AppSpec) -> set[tuple[str, str]]:
    """Stream and name of each consumer of the application's handlers."""
    specs = app.handlers.values()
    return {
        (each.stream, each.name) for spec in specs for each in [*consumers_of(app, spec), advisory_consumer(app, spec)]
    }


class AppReadings:
    """The readings for one report."""

    def __init__(self, server: ServerReadings, app: AppSpec) -> None:
        self._server, self._app = server, app
        self._api = context_of(server.js).api
        self._waits: dict[str, HandlerWaits] = {}
        self._parked: Mapping[str, int] | None = None
        self._notes: list[str] = []

    async def read(self) -> list[LagSource]:
        """The handlers, workflows and projections of the application.

        Raises:
            StreamNotFound, NetworkError: The stream of the application does not exist, or cannot be reached.
        """
        app, server = self._app, self._server
        await server.read_streams([app.stream], must_exist=True)
        sources = await self._projections()
        specs = list(app.handlers.values())
        copies = {spec.name: partition_stream(app.name, spec.name) for spec in specs if spec.partitions}
        copied: dict[str, int | JetSparkError] = {}
        scheduled: list[str] = []
        letters: list[tuple[str, bool]] = []
        if specs:
            await server.read_streams([*copies.values(), retry_stream(app.name)])
            found = await asyncio.gather(*(server.attempt(self._read_copied(each)) for each in copies.values()))
            copied = dict(zip(copies, found, strict=True))
            await server.read_consumers([app.stream, *copies.values()])
            scheduled = await self._known("scheduled retries", self._read_scheduled()) or []
            await server.read_consumers([retry_stream(app.name), app.advisories])
            self._parked = await self._known("parked keys", self._read_parked())
        if sources or specs:
            await server.read_streams([dead_letter_stream(app.name)])
            letters = await self._known("dead letters", self._read_letters()) or []
        self._waits = waits_of(scheduled, letters)
        for spec in specs:
            kind = "workflow" if spec.name in app.workflows else "handler"
            reading = self._handler(spec, copied.get(spec.name))
            measurement = reading if isinstance(reading, str) else measure_handler(reading)
            sources.append(LagSource(kind, spec.name, copies.get(spec.name, app.stream), measurement))
        return sources

    def dead_letters(self, at: datetime.datetime) -> list[DeadLetterLag]:
        """The dead letters and parked keys, by handler, at the moment when they were read."""
        found = []
        names = {name for name, waits in self._waits.items() if waits.dead_letters.messages}
        for name in names.union(self._parked or ()):
            stuck = self._waits.get(name, HandlerWaits()).dead_letters
            parked = None if self._parked is None else self._parked.get(name, 0)
            found.append(
                DeadLetterLag(name=name, messages=stuck.messages, seconds=age_s(stuck, at), parked_keys=parked)
            )
        return found

    async def _known(self, what: str, reading: Awaitable[T]) -> T | None:
        found = await self._server.attempt(reading)
        if isinstance(found, JetSparkError):
            self._notes.append(f"{what} are unknown: {found}")
            return None
        return found

    # ---- handlers ----------------------------------------------------------------------------------------------

    def _handler(self, spec: HandlerSpec, copied: int | JetSparkError | None) -> HandlerSources | str:
        """The sources of a handler's lag; or the reason why it is unknown."""
        app, events, retries, notes = self._app, [], [], list(self._notes)
        if isinstance(copied, JetSparkError):
            return str(copied)
        for place in consumers_of(app, spec):
            info = self._find(place.stream, place.name)
            if isinstance(info, ConsumerInfo) and place.stream == retry_stream(app.name):
                # The second filter is that of redrives: these events are dead letters until they are handled.
                retries.append((info, (place.config.filter_subjects or [])[0]))
            elif isinstance(info, ConsumerInfo):
                events.append(info)
            elif place.stream == retry_stream(app.name):
                notes.append(f"retries that are due are unknown: {info}")
            else:
                return info
        advisories = self._find(app.advisories, advisory_consumer(app, spec).name)
        if isinstance(advisories, str):
            notes.append(f"events that the server gave up are unknown: {advisories}")
        return HandlerSources(
            events=events,
            filters=_filters_of(spec.events),
            retries=retries,
            advisories=None if isinstance(advisories, str) else advisories,
            copied=None if copied is None else (app.stream, copied),
            waits=self._waits.get(spec.name, HandlerWaits()),
            notes=notes,
        )

    def _find(self, stream: str, name: str) -> ConsumerInfo | str:
        consumers = self._server.consumers[stream]
        if isinstance(consumers, JetSparkError):
            return str(consumers)
        missing = "does not exist; see `jetspark plan`" if not consumers.missing else "did not answer"
        return consumers.get(name) or f"consumer {name} of {stream} {missing}"

    async def _read_copied(self, copies: str) -> int:
        """The last sequence of the application's stream that was copied into a stream of partitions."""
        try:
            last = await self._server.run(self._api.get_message(copies, {"last_by_subj": ">"}, direct=True))
        except MessageNotFound:
            return 0
        return copied_from(last.headers, last.subject).sequence

    async def _read_scheduled(self) -> list[str]:
        """The subjects of scheduled retries."""
        stream = retry_stream(self._app.name)
        info = self._server.streams[stream]
        if isinstance(info, JetSparkError):
            raise info
        if not info.state.messages:
            return []
        if info.state.subject_count > MAX_LISTED:
            raise UsageError(f"{stream} has more than {MAX_LISTED:,} subjects; `jetspark retry ls` lists them")
        wait = f"retry.{self._app.name}.*.wait.>"
        return list((await self._server.run(self._api.stream_info(stream, wait))).state.subjects)

    async def _read_letters(self) -> list[tuple[str, bool]]:
        """The subjects of dead letters, each with True for an open one."""
        info, found = self._server.streams[dead_letter_stream(self._app.name)], list[tuple[str, bool]]()
        if isinstance(info, JetSparkError):
            raise info
        if info.state.messages:
            reading = each_dead_letter(self._server.js, self._app, DeadLetterFilter(), with_events=False)
            async with aclosing(cast("AsyncGenerator[Any, None]", reading)) as letters:
                async for stored in letters:
                    found.append((stored.subject, stored.ref.status == "open"))
                    if len(found) == MAX_LISTED:
                        self._notes.append(f"only the first {MAX_LISTED:,} dead letters were read")
                        break
        return found

    async def _read_parked(self) -> Counter[str]:
        """The number of parked keys of each handler."""
        bucket = handler_bucket(self._app.name)
        probe = Probe(f"KV_{bucket}", 1, subject_of(bucket, "parked.>"))
        if not (await self._server.run(ask(self._api, probe, is_direct=True))).messages:
            return Counter()
        keys = (await self._server.js.kv(bucket, verify=False)).keys("parked.>")
        return Counter([key.split(".")[1] async for key in keys])

    # ---- projections -------------------------------------------------------------------------------------------

    async def _projections(self) -> list[LagSource]:
        """The projections at the positions in their buckets, where every engine stores them."""
        specs = list(self._app.projections.values())
        if not specs:
            return []
        aliases = await self._server.attempt(self._read_aliases())
        if isinstance(aliases, JetSparkError):
            return [LagSource("projection", spec.name, self._app.stream, str(aliases)) for spec in specs]
        readers = await asyncio.gather(
            *(
                self._server.attempt(self._read_fold(spec, bucket_ref_of(spec, aliases.get(alias_key(spec.name)))))
                for spec in specs
            )
        )
        return [
            LagSource("projection", spec.name, self._app.stream, str(reader))
            if isinstance(reader, JetSparkError)
            else self._server.source_of(reader)
            for spec, reader in zip(specs, readers, strict=True)
        ]

    async def _read_aliases(self) -> dict[str, bytes | None]:
        records = projection_bucket(self._app.name)
        stream = await self._server.js.stream(f"KV_{records}", verify=False)
        subjects = [subject_of(records, alias_key(name)) for name in self._app.projections]
        stored = await stream.get_last_messages(subjects)
        return {key_of(records, message.subject): message.data or None for message in stored}

    async def _read_fold(self, spec: ProjectionSpec, place: BucketRef) -> PositionReader:
        query = {"last_by_subj": subject_of(place.bucket, position_key())}
        position, notes = None, []
        try:
            stored = await self._server.run(self._api.get_message(f"KV_{place.bucket}", query, direct=True))
            position = FoldPosition.decode(stored.data)
        except MessageNotFound:
            notes.append("it was not started yet")
        if position is not None and position.missed is not None:
            first, last = position.missed
            notes.append(f"the stream dropped events between {first} and {last} before they were read")
        if place.version != spec.version:
            notes.append(
                f"bucket {place.bucket} is of version {place.version}, and this code is version {spec.version}"
            )
        return PositionReader(
            kind="projection",
            name=spec.name,
            stream=self._app.stream,
            next=1 if position is None else position.sequence + 1,
            created=None if position is None else position.created,
            filters=tuple(_filters_of(spec.events)),
            notes=tuple(notes),
        )


def _filters_of(events: Sequence[type[object]]) -> list[str]:
    """The subjects of some types of events."""
    return list(dict.fromkeys(contract_of(kind).subject.filter for kind in events))
