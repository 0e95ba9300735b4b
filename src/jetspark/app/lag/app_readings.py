"""What an application has on the server: the consumers of its handlers, retries, dead letters, parked keys, positions.

The sources of a handler are read in the order in which an event moves through them: copies, consumers, retries, dead
letters. So an event that moves meanwhile is counted twice rather than not at all. The exception is an event that goes
from a scheduled retry to its next attempt, or back, between two answers.
"""

from __future__ import annotations

import asyncio
import datetime
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from jetspark.aio.context import context_of
from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.dead_letters.listing import DeadLetterFilter, each_dead_letter
from jetspark.app.handlers.consumers import advisory_consumer, consumers_of
from jetspark.app.handlers.partitions import copied_from
from jetspark.app.lag.measures import HandlerSources, LagSource, Part, PositionReader, Probe, ask, measure_handler
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
from jetspark.errors import JetSparkError, MessageNotFound
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


@dataclass(slots=True)
class LetterCounts:
    """The dead letters of one handler."""

    stuck: Part = field(default_factory=Part)
    """Open ones, and those behind an open one: they wait for an operator."""
    moving: Part = field(default_factory=Part)
    """Those behind a retry, or behind a dead letter that is redriven: they follow by themselves."""


def own_consumers(app: AppSpec) -> set[tuple[str, str]]:
    """Stream and name of each consumer of the application's handlers."""
    specs = app.handlers.values()
    return {
        (each.stream, each.name) for spec in specs for each in [*consumers_of(app, spec), advisory_consumer(app, spec)]
    }


class AppReadings:
    """What is read for one report."""

    def __init__(self, server: ServerReadings, app: AppSpec) -> None:
        self._server, self._app = server, app
        self._api = context_of(server.js).api
        self._scheduled: dict[str, Part] = {}
        self._letters: dict[str, LetterCounts] = {}
        self._parked: Mapping[str, int] | None = None
        self._notes: list[str] = []

    async def read(self) -> list[LagSource]:
        """The handlers, workflows and projections of the application.

        Raises:
            StreamNotFound: The stream of the application does not exist.
        """
        app, server = self._app, self._server
        await server.read_streams([app.stream], must_exist=True)
        sources = await self._projections()
        specs = list(app.handlers.values())
        copies = {spec.name: partition_stream(app.name, spec.name) for spec in specs if spec.partitions}
        copied: dict[str, int | JetSparkError] = {}
        if specs:
            await server.read_streams([*copies.values(), retry_stream(app.name)])
            found = await asyncio.gather(*(server.attempt(self._read_copied(each)) for each in copies.values()))
            copied = dict(zip(copies, found, strict=True))
            await server.read_consumers([app.stream, *copies.values()])
            self._scheduled = await self._known("scheduled retries", self._read_scheduled()) or {}
            await server.read_consumers([retry_stream(app.name), app.advisories])
            self._parked = await self._known("parked keys", self._read_parked())
        if sources or specs:
            await server.read_streams([dead_letter_stream(app.name)])
            self._letters = await self._known("dead letters", self._read_letters()) or {}
        for spec in specs:
            kind = "workflow" if spec.name in app.workflows else "handler"
            reading = self._handler(spec, copied.get(spec.name))
            measurement = reading if isinstance(reading, str) else measure_handler(reading)
            sources.append(LagSource(kind, spec.name, copies.get(spec.name, app.stream), measurement))
        return sources

    def dead_letters(self, at: datetime.datetime) -> list[DeadLetterLag]:
        """The dead letters and parked keys, by handler, at the moment when they were read."""
        found = []
        for name in {*self._letters, *(self._parked or ())}:
            stuck = self._letters.get(name, LetterCounts()).stuck
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
            others={
                "scheduled": self._scheduled.get(spec.name, Part()),
                "behind_retry": self._letters.get(spec.name, LetterCounts()).moving,
            },
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

    async def _read_scheduled(self) -> dict[str, Part]:
        """The scheduled retries of each handler, with the ages of their events."""
        stream, wait = retry_stream(self._app.name), f"retry.{self._app.name}.{{}}.wait.>"
        info = self._server.streams[stream]
        if isinstance(info, JetSparkError):
            raise info
        found: dict[str, Part] = {}
        if not info.state.messages:
            return found
        if info.state.subject_count > MAX_LISTED:
            self._notes.append("the age of scheduled retries is that of the first schedule")
            for name in self._app.handlers:
                counted = await self._server.run(ask(self._api, Probe(stream, 1, wait.format(name)), is_direct=True))
                found[name] = Part(counted.messages or 0, counted.stored)
            return found
        listed = await self._server.run(self._api.stream_info(stream, wait.format("*")))
        for subject in listed.state.subjects:
            handler = subject.split(".")[2]
            found[handler] = found.get(handler, Part()).joined(Part(1, _stored(subject)))
        return found

    async def _read_letters(self) -> dict[str, LetterCounts]:
        """The dead letters of each handler."""
        keys = defaultdict[tuple[str, str], Part](Part)
        stuck = set[tuple[str, str]]()
        info = self._server.streams[dead_letter_stream(self._app.name)]
        if isinstance(info, JetSparkError):
            raise info
        if info.state.messages:
            reading = each_dead_letter(self._server.js, self._app, DeadLetterFilter(), with_events=False)
            async with aclosing(cast("AsyncGenerator[Any, None]", reading)) as letters:
                number = 0
                async for stored in letters:
                    handler, key = stored.subject.split(".")[2:4]
                    keys[handler, key] = keys[handler, key].joined(Part(1, _stored(stored.subject)))
                    if stored.ref.status == "open":
                        stuck.add((handler, key))
                    if (number := number + 1) == MAX_LISTED:
                        self._notes.append(f"only the first {MAX_LISTED} dead letters were read")
                        break
        counts = defaultdict[str, LetterCounts](LetterCounts)
        for (handler, key), part in keys.items():
            each = counts[handler]
            if (handler, key) in stuck:
                each.stuck = each.stuck.joined(part)
            else:
                each.moving = each.moving.joined(part)
        return dict(counts)

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


def _stored(subject: str) -> datetime.datetime | None:
    """When the event of a retry or dead letter was stored: the subject ends with its origin."""
    last = subject.rsplit(".", 1)[-1]
    return datetime.datetime.fromtimestamp(int(last) / 1e6, datetime.UTC) if last.isdecimal() else None
