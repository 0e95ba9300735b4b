"""What an application has on the server: the consumers of its handlers, retries, dead letters, parked keys, positions.

The sources of a handler are read in the order in which an event moves through them: copies, consumers, retries, dead
letters. So an event that moves meanwhile is counted twice rather than not at all. The exception is an event that goes
from a scheduled retry to its next attempt, or back, between two answers.
"""

from __future__ import annotations

import asyncio
import datetime
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from jetspark.aio.context import context_of
from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.dead_letters.listing import DeadLetterFilter, each_dead_letter
from jetspark.app.handlers.consumers import advisory_consumer, consumers_of
from jetspark.app.handlers.partitions import copied_from
from jetspark.app.lag.measures import HandlerReading, Part, Probe, StreamReader, ask
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
from jetspark.errors import JetSparkError, MessageNotFound, StreamNotFound
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.kv import key_of, subject_of

if TYPE_CHECKING:
    from jetspark.app.handlers.handler_spec import HandlerSpec
    from jetspark.app.lag.server_readings import ServerReadings
    from jetspark.app.projections.projection_spec import ProjectionSpec
    from jetspark.app.spec import AppSpec

__all__ = ["AppReadings", "FoldReader", "LetterCounts", "own_consumers"]

MAX_LISTED = 50_000
"""Dead letters that are read, and subjects of scheduled retries that are listed, for one report."""


@dataclass(slots=True)
class LetterCounts:
    """The dead letters of one handler."""

    stuck: Part = field(default_factory=Part)
    """Open ones, and those behind an open one: they wait for an operator."""
    moving: Part = field(default_factory=Part)
    """Those behind a retry, or behind a dead letter that is redriven: they follow by themselves."""


class FoldReader(NamedTuple):
    """A projection as a reader of the application's stream."""

    reader: StreamReader
    notes: tuple[str, ...]


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
        self._copied: dict[str, int | JetSparkError] = {}
        self._scheduled: dict[str, Part] = {}
        self._notes: list[str] = []
        self.letters: dict[str, LetterCounts] = {}
        self.parked: Mapping[str, int] | None = None
        """Parked keys of each handler; None if they cannot be read."""

    async def read(self) -> None:
        """Read everything but the positions of projections.

        Raises:
            StreamNotFound: The stream of the application does not exist.
        """
        app, server = self._app, self._server
        copies = [partition_stream(app.name, spec.name) for spec in app.handlers.values() if spec.partitions]
        names = [app.stream, *copies]
        names += [retry_stream(app.name), app.advisories] if app.handlers else []
        names += [dead_letter_stream(app.name)] if app.handlers or app.projections else []
        await server.read_streams(names)
        if isinstance(error := server.streams[app.stream], StreamNotFound):
            raise error
        if app.handlers:
            partitioned = [spec for spec in app.handlers.values() if spec.partitions]
            found = await asyncio.gather(*(server.attempt(self._read_copied(spec)) for spec in partitioned))
            self._copied = {spec.name: each for spec, each in zip(partitioned, found, strict=True)}
            await server.read_consumers([app.stream, *copies])
            self._scheduled = await self._known("scheduled retries", self._read_scheduled(), {})
            await server.read_consumers([retry_stream(app.name), app.advisories])
            self.parked = await self._known("parked keys", self._read_parked(), None)
        if app.handlers or app.projections:
            self.letters = await self._known("dead letters", self._read_letters(), {})

    async def _known(self, what: str, reading: Any, default: Any) -> Any:
        found = await self._server.attempt(reading)
        if isinstance(found, JetSparkError):
            self._notes.append(f"{what} are unknown: {found}")
            return default
        return found

    def handler(self, spec: HandlerSpec) -> HandlerReading | str:
        """The sources of a handler's lag; or the reason why they are unknown."""
        app, events, retries, notes = self._app, [], [], list(self._notes)
        for place in consumers_of(app, spec):
            info = self._find(place.stream, place.name)
            if place.stream != retry_stream(app.name):
                if isinstance(info, str):
                    return info
                events.append(info)
            elif isinstance(info, str):
                notes.append(f"retries that are due are unknown: {info}")
            else:
                # The second filter is that of redrives: these events are dead letters until they are handled.
                retries.append((info, (place.config.filter_subjects or [])[0]))
        copied = self._copied.get(spec.name, 0)
        if isinstance(copied, JetSparkError):
            return str(copied)
        advisories = self._find(app.advisories, advisory_consumer(app, spec).name)
        if isinstance(advisories, str):
            notes.append(f"events that the server gave up are unknown: {advisories}")
        moving = self.letters.get(spec.name, LetterCounts()).moving
        return HandlerReading(
            events=events,
            filters=_filters_of(spec.events),
            retries=retries,
            advisories=None if isinstance(advisories, str) else advisories,
            copied=(app.stream, copied) if spec.partitions else None,
            others={"scheduled": self._scheduled.get(spec.name, Part()), "behind_retry": moving},
            notes=notes,
        )

    def _find(self, stream: str, name: str) -> ConsumerInfo | str:
        consumers = self._server.consumers[stream]
        if isinstance(consumers, JetSparkError):
            return str(consumers)
        missing = "does not exist; see `jetspark plan`" if not consumers.missing else "did not answer"
        return consumers.get(name) or f"consumer {name} of {stream} {missing}"

    async def _read_copied(self, spec: HandlerSpec) -> int:
        """The last sequence of the application's stream that was copied into the partitions of a handler."""
        copies = partition_stream(self._app.name, spec.name)
        try:
            last = await self._server.run(self._api.get_message(copies, {"last_by_subj": ">"}, direct=False))
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

    async def projections(self) -> dict[str, FoldReader | JetSparkError]:
        """The position of each projection, from the bucket it is in, where every engine stores it."""
        specs = list(self._app.projections.values())
        if not specs:
            return {}
        aliases = await self._server.attempt(self._read_aliases())
        if isinstance(aliases, JetSparkError):
            return {spec.name: aliases for spec in specs}
        places = [bucket_ref_of(spec, aliases.get(alias_key(spec.name))) for spec in specs]
        readings = (self._server.attempt(self._read_fold(*each)) for each in zip(specs, places, strict=True))
        return {spec.name: each for spec, each in zip(specs, await asyncio.gather(*readings), strict=True)}

    async def _read_aliases(self) -> dict[str, bytes | None]:
        records = projection_bucket(self._app.name)
        stream = await self._server.js.stream(f"KV_{records}", verify=False)
        subjects = [subject_of(records, alias_key(name)) for name in self._app.projections]
        stored = await stream.get_last_messages(subjects)
        return {key_of(records, message.subject): message.data or None for message in stored}

    async def _read_fold(self, spec: ProjectionSpec, place: BucketRef) -> FoldReader:
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
        reader = StreamReader(
            kind="projection",
            name=spec.name,
            stream=self._app.stream,
            next=1 if position is None else position.sequence + 1,
            created=None if position is None else position.created,
            filters=tuple(_filters_of(spec.events)),
        )
        return FoldReader(reader, tuple(notes))


def _filters_of(events: Sequence[type[object]]) -> list[str]:
    """The subjects of some types of events."""
    return list(dict.fromkeys(contract_of(kind).subject.filter for kind in events))


def _stored(subject: str) -> datetime.datetime | None:
    """When the event of a retry or dead letter was stored: the subject ends with its origin."""
    last = subject.rsplit(".", 1)[-1]
    return datetime.datetime.fromtimestamp(int(last) / 1e6, datetime.UTC) if last.isdecimal() else None
