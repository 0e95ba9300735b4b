"""A stream as a range of sequences: its extent, its losses, and its messages in order, at a bounded rate.

With an archive, the history is one of both (:mod:`jetspark.lake.hybrid`). It may outlive the stream: of a stream that
was deleted the archive has all that is left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from jetspark.aio import clock
from jetspark.aio.context import context_of
from jetspark.aio.jetstream import JetStream
from jetspark.aio.stream import Stream
from jetspark.app.archive_reading import archives_of, first_at, hybrid_pieces, scanned, whole_head
from jetspark.app.extents import Extent, ReplayRequest, check_is_whole, extent_of
from jetspark.app.projections.router import Recorded, recorded
from jetspark.core import numbers
from jetspark.core.subjects import matches, on_one_of, reading_filters
from jetspark.errors import MessageNotFound, StreamNotFound
from jetspark.jetstream.info import StoredMessage, StreamInfo
from jetspark.jetstream.wire import parse_time
from jetspark.state.deliveries import sequence_of, sequences_of
from jetspark.state.losses import first_ever, front_of
from jetspark.state.scan import Head, Range

if TYPE_CHECKING:
    from jetspark.lake.hybrid import HybridHead
    from jetspark.lake.reading import ArchiveReader, ArchiveRoot

__all__ = ["ArchivedPart", "Portion", "ReadingRate", "StreamFacts", "StreamHistory"]


class Portion(NamedTuple):
    """Some of the requested messages of a range, in order."""

    received: Sequence[Any]
    """Delivered by a consumer, or fetched one by one."""
    read: int
    """How many messages were read, requested or not."""
    last: int
    """The sequence of the last message that was read."""

    @property
    def messages(self) -> list[Recorded]:
        return [recorded(each) for each in self.received]

    @property
    def sequences(self) -> Sequence[int]:
        if self.received and isinstance(self.received[0], StoredMessage):
            return [each.sequence for each in self.received]
        return sequences_of(self.received)


class ReadingRate:
    """Limits reading to ``rate`` events each second, in small portions; None for no limit."""

    def __init__(self, rate: float | None) -> None:
        self._rate = None if rate is None else numbers.rate("rate", rate, instead="or None for no limit")
        self._began: float | None = None
        self._passed = 0

    @property
    def portion(self) -> int | None:
        """Events to read at once: a tenth of a second's worth; None for no limit."""
        return None if self._rate is None else max(1, int(self._rate / 10))

    async def let(self, events: int) -> None:
        """Wait until the rate allows this many more events."""
        if self._rate is None:
            return
        if self._began is None:
            self._began = clock.now()
        self._passed += events
        await asyncio.sleep(max(0.0, self._began + self._passed / self._rate - clock.now()))


class StreamFacts(NamedTuple):
    """A stream at one moment, or its archive if the stream does not exist any more."""

    created: datetime.datetime | None
    first: int
    """The sequence of the first message that the stream ever had."""
    last: int


class ArchivedPart(NamedTuple):
    """The part of a range that is in an archive."""

    following: int
    """The first sequence of the range that is not."""
    times: tuple[datetime.datetime, ...]
    """When its first and its last message were stored; empty without a message."""
    gaps: list[tuple[int, int]]
    """First and last of deleted sequences."""


class StreamHistory:
    """A stream as a range of sequences, read from its beginning."""

    def __init__(
        self,
        js: JetStream,
        stream: str,
        filters: Sequence[str],
        reading: Sequence[str] | None = None,
        *,
        archive: ArchiveRoot | str | None = None,
    ) -> None:
        """``reading`` has the filters for the server, where the caller has chosen them."""
        self.js, self.name = js, stream
        self._archives = archives_of(archive)
        self.filters = tuple(filters)
        # The server may send more than these filters match; the rest is left out here.
        self._server_filters = tuple(reading_filters(filters) if reading is None else reading)
        self._is_wanted = None if {*self._server_filters} == {*filters} else on_one_of(filters)
        self.first_event = 0
        """The sequence of the first event that the stream ever had on these filters; 0 if unknown."""

    async def stream(self) -> Stream:
        return await self.js.stream(self.name)

    async def info(self) -> StreamInfo:
        """The stream's current state, from the server."""
        return await (await self.stream()).info()

    async def facts(self) -> StreamFacts:
        """The stream's creation time, and its first and last sequence ever.

        Raises:
            StreamNotFound: The stream does not exist and has no archive.
        """
        try:
            info = await self.info()
        except StreamNotFound:
            alone = await self._alone()
            if alone is None:
                raise
            # Streams begin at 1 unless they were configured otherwise, which is unknown by now.
            return StreamFacts(parse_time(alone.created), 1, alone.next - 1)
        return StreamFacts(info.created, first_ever(info.config), info.state.last_sequence)

    async def head(self, anchor: int | None = None) -> Head:
        """The first and last sequence of the history, and how much of its front may be lost.

        ``anchor`` is the sequence of an event that was read.
        """

        async def look(anchor: int) -> Head:
            context = context_of(self.js)
            return await context.run(front_of(context.api, await self.info(), anchor))

        return await whole_head(self._archives, self.name, look, self.first_event if anchor is None else anchor)

    async def last(self) -> int:
        """The last sequence of the stream."""
        return (await self.facts()).last

    async def last_event(self) -> int:
        """The sequence of the last message on one of the filters; 0 without a message."""
        found, archived = [0], await self._archived_head()
        if archived is None or not archived.is_deleted:
            stream = await self.stream()
            for subject in self.filters:
                with suppress(MessageNotFound):
                    found.append((await stream.get_message(last_for=subject, direct=False)).sequence)
        if archived is not None and max(found) < archived.archive.position.next:
            found.append(await asyncio.to_thread(archived.archive.last_on, self.filters))
        return max(found)

    async def archived(self, extent: Extent) -> ArchivedPart | None:
        """The part of a range that is in the archive; None without an archive."""
        head = await self._archived_head()
        if head is None:
            return None

        def describe(archive: ArchiveReader) -> ArchivedPart:
            start, end = extent.first, min(extent.last + 1, archive.position.next)
            gaps = [(each.start, each.stop - 1) for each in archive.deleted(start, end)]
            return ArchivedPart(max(start, archive.position.next), archive.times(start, end), gaps)

        return await asyncio.to_thread(describe, head.archive)

    async def extent(self, request: ReplayRequest) -> Extent:
        """The sequences of a request.

        Raises:
            DataLoss: Some of them are gone.
        """
        head, first = await self.head(), (await self.facts()).first
        since = None if request.since is None else await first_at(self.js, head, request.since)
        until = None if request.until is None else await first_at(self.js, head, request.until)
        return extent_of(request, head, first, since_seq=since, until_seq=until)

    async def whole(self, last: int | None = None) -> Extent:
        """All sequences that the stream ever had, up to ``last`` or to its end.

        Raises:
            DataLoss: The beginning is gone.
        """
        return await self.extent(ReplayRequest(to_seq=last or None))

    async def since(self, first: int) -> Extent:
        """The sequences from ``first`` to the end of the stream.

        Raises:
            DataLoss: Some of them are gone.
        """
        head = await self.head()
        found = Extent(stream=head.stream, created=head.created, first=first, last=head.next - 1)
        check_is_whole(found, head)
        return found

    async def between(self, extent: Extent, first: int, last: int) -> Extent:
        """Other sequences of the same stream, without sequences that the stream never had.

        Raises:
            DataLoss: Some of them are gone.
        """
        begin = max(first, (await self.facts()).first)
        found = Extent(stream=extent.stream, created=extent.created, first=begin, last=last)
        check_is_whole(found, await self.head())
        return found

    async def messages(
        self,
        extent: Extent,
        pace: ReadingRate | None = None,
        *,
        subject: str | None = None,
        may_lack: bool = False,
    ) -> AsyncGenerator[Portion, None]:
        """The messages of a range that match the filters, in portions.

        Args:
            subject: Only messages on this subject; wildcards are allowed.
            may_lack: The range may have gaps: states of entities are read, and the server removes a replaced state.

        Raises:
            DataLoss: Messages of the range were removed while it was read.
            StreamRecreated: The stream was deleted, and created again.
        """
        if extent.is_empty:
            return
        # A scan takes replaced states and fired timers for lost messages. So the check comes at the end: then the first
        # event that was read shows whether the front of the range was complete.
        is_kept = not may_lack and (await self.head()).kept_from is not None
        is_early = may_lack or is_kept
        part = Range(extent.stream, extent.created, extent.first, extent.last + 1, self._server_filters, is_early)
        size, is_wanted = None if pace is None else pace.portion, self._is_wanted
        first_read = 0
        async with aclosing(await self._pieces(part)) as pieces:
            async for piece in pieces:
                for begin in range(0, len(piece), size or len(piece)):
                    portion = piece[begin : begin + (size or len(piece))]
                    if pace is not None:
                        await pace.let(len(portion))
                    # First of all, because most work on a message is wasted if its subject is not wanted.
                    mine = portion if is_wanted is None else [each for each in portion if is_wanted(each.subject)]
                    if is_kept and not first_read and mine:
                        first_read = sequence_of(mine[0])
                    if subject is not None:
                        mine = [each for each in mine if matches(subject, each.subject)]
                    yield Portion(mine, len(portion), sequence_of(portion[-1]))
                    await asyncio.sleep(0)  # decoding takes a while; let other tasks run
        if first_read:
            check_is_whole(extent, await self.head(first_read))

    async def _pieces(self, part: Range) -> AsyncGenerator[list[Any], None]:
        head = await self._archived_head()
        if head is None:
            return scanned(self.js, part)
        return hybrid_pieces(self.js, dataclasses.replace(head.range_of(part), is_kept=part.is_earliest))

    async def _archived_head(self) -> HybridHead | None:
        if self._archives is None:
            return None
        head = await self.head()
        return cast("HybridHead", head)

    async def _alone(self) -> HybridHead | None:
        return None if self._archives is None else await asyncio.to_thread(self._archives.alone, self.name)
