"""Reads streams and consumers in few requests: listings, and direct gets for the rest, many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

from jetspark.aio.context import context_of
from jetspark.aio.jetstream import JetStream
from jetspark.app.lag.measures import Counted, LagSource, PositionReader, Probe, Probing, ask, measure_reader
from jetspark.errors import ConnectionClosed, JetSparkError, NetworkError, StreamNotFound
from jetspark.jetstream.info import ConsumerInfo, StreamInfo
from jetspark.jetstream.operations import Operation

__all__ = ["Consumers", "ServerReadings"]

T = TypeVar("T")

# Requests that wait for an answer at a time. The server answers them one after the other for each stream.
AT_ONCE = 32


class Consumers(dict[str, ConsumerInfo]):
    """The consumers of a stream by name. ``missing`` more did not answer."""

    missing = 0


class ServerReadings:
    """The server's answers for one report. Each request is sent once; its error is kept in place of the answer."""

    def __init__(self, js: JetStream) -> None:
        self.js = js
        self._context = context_of(js)
        self._room = asyncio.Semaphore(AT_ONCE)
        self.streams: dict[str, StreamInfo | JetSparkError] = {}
        self.consumers: dict[str, Consumers | JetSparkError] = {}
        self.denied: dict[str, JetSparkError] = {}
        """By stream the error of the first probe that was not answered."""

    async def run(self, operation: Operation[T]) -> T:
        async with self._room:
            return await self._context.run(operation)

    async def attempt(self, reading: Awaitable[T]) -> T | JetSparkError:
        """The result, or the error: one source that cannot be read does not hide the others."""
        try:
            return await reading
        except ConnectionClosed:
            raise
        except JetSparkError as error:
            return error

    async def read_streams(self, names: Iterable[str], *, must_exist: bool = False) -> None:
        """Read the infos of some streams.

        Raises:
            StreamNotFound: With ``must_exist``, one of them does not exist.
            NetworkError: With ``must_exist``, one of them cannot be reached.
        """
        new = [name for name in dict.fromkeys(names) if name not in self.streams]
        api = self._context.api
        found = await asyncio.gather(*(self.attempt(self.run(api.stream_info(name))) for name in new))
        self.streams |= dict(zip(new, found, strict=True))
        if must_exist:
            for each in found:
                if isinstance(each, StreamNotFound | NetworkError):
                    raise each

    async def read_all_streams(self) -> int:
        """Read the infos of all streams of the account; returns the number of streams that did not answer.

        Raises:
            JetSparkError: They cannot be listed.
        """
        seen = 0
        while True:
            page, total = await self.run(self._context.api.stream_page(seen, None))
            self.streams |= {info.config.name: info for info in page}
            seen += len(page)
            if not page or seen >= total:
                return max(0, total - len(self.streams))

    async def read_consumers(self, streams: Iterable[str]) -> None:
        """Read the infos of all consumers of some streams."""
        new = [name for name in dict.fromkeys(streams) if name not in self.consumers]
        found = await asyncio.gather(*(self.attempt(self._consumers(name)) for name in new))
        self.consumers |= dict(zip(new, found, strict=True))

    async def _consumers(self, stream: str) -> Consumers:
        found, seen = Consumers(), 0
        while True:
            page, total = await self.run(self._context.api.consumer_page(stream, seen))
            found.update({info.name: info for info in page})
            seen += len(page)
            if not page or seen >= total:
                # In a cluster a consumer whose leader is away counts, and is not in the list.
                found.missing = max(0, total - len(found))
                return found

    async def measure(self, procedures: Sequence[Probing[T]]) -> list[T]:
        """Run measurements side by side. What several of them ask is asked once."""
        answers: dict[Probe, Counted | None] = {}
        results: dict[int, T] = {}
        waiting: dict[int, Probe] = {}

        def advance(number: int, answer: Counted | None, *, is_first: bool = False) -> None:
            try:
                waiting[number] = next(procedures[number]) if is_first else procedures[number].send(answer)
            except StopIteration as done:
                waiting.pop(number, None)
                results[number] = done.value

        for number in range(len(procedures)):
            advance(number, None, is_first=True)
        while waiting:
            new = [probe for probe in dict.fromkeys(waiting.values()) if probe not in answers]
            answers |= dict(zip(new, await asyncio.gather(*map(self._answer, new)), strict=True))
            for number, probe in list(waiting.items()):
                advance(number, answers[probe])
        return [results[number] for number in range(len(procedures))]

    async def _answer(self, probe: Probe) -> Counted | None:
        info = self.streams.get(probe.stream)
        is_direct = not isinstance(info, StreamInfo) or bool(info.config.allow_direct)
        found = await self.attempt(self.run(ask(self._context.api, probe, is_direct=is_direct)))
        if isinstance(found, JetSparkError):
            self.denied.setdefault(probe.stream, found)
            return None
        return found

    def known_streams(self) -> list[StreamInfo]:
        return [info for info in self.streams.values() if isinstance(info, StreamInfo)]

    def source_of(self, reader: PositionReader) -> LagSource:
        """The reader of a stream whose info was read."""
        info = self.streams[reader.stream]
        measurement = str(info) if isinstance(info, JetSparkError) else measure_reader(reader, info)
        return LagSource(reader.kind, reader.name, reader.stream, measurement)
