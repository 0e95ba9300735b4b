"""A stream as a range of sequences: its extent, its losses, and its messages in order, at a bounded rate."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

from jetspark.aio import clock
from jetspark.aio.context import context_of
from jetspark.aio.jetstream import JetStream
from jetspark.aio.steps import ProcedureRunner
from jetspark.aio.stream import Stream
from jetspark.app.extents import Extent, ReplayRequest, check_is_whole, extent_of
from jetspark.app.projections.router import Recorded, recorded_delivery
from jetspark.core import numbers
from jetspark.core.subjects import matches, on_one_of, reading_filters
from jetspark.errors import MessageNotFound
from jetspark.jetstream.info import StoredMessage, StreamInfo
from jetspark.state.deliveries import delivery, sequences_of
from jetspark.state.losses import first_ever, front_of
from jetspark.state.scan import Head, Range, RangeScan, sequence_at

__all__ = ["Portion", "ReadingRate", "StreamHistory", "recorded"]

# How long a read waits for the next message: it covers a restart and the election of a leader.
PATIENCE_S = 60.0


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


class StreamHistory:
    """A stream as a range of sequences, read from its beginning."""

    def __init__(
        self, js: JetStream, stream: str, filters: Sequence[str], reading: Sequence[str] | None = None
    ) -> None:
        """``reading`` has the filters for the server, where the caller has chosen them."""
        self.js, self._stream = js, stream
        self.filters = tuple(filters)
        # The server may send more than these filters match; the rest is left out here.
        self._server_filters = tuple(reading_filters(filters) if reading is None else reading)
        self._is_wanted = None if {*self._server_filters} == {*filters} else on_one_of(filters)
        self.first_event = 0
        """The sequence of the first event that the stream ever had on these filters; 0 if unknown."""

    async def stream(self) -> Stream:
        return await self.js.stream(self._stream)

    async def info(self) -> StreamInfo:
        """The stream's current state, from the server."""
        return await (await self.stream()).info()

    async def head(self, anchor: int | None = None) -> Head:
        """The stream's first and last sequence, and how much of its front may be lost.

        ``anchor`` is the sequence of an event that was read.
        """
        context, info = context_of(self.js), await self.info()
        return await context.run(front_of(context.api, info, self.first_event if anchor is None else anchor))

    async def last(self) -> int:
        """The last sequence of the stream."""
        return (await self.info()).state.last_sequence

    async def last_event(self) -> int:
        """The sequence of the last message on one of the filters; 0 without a message."""
        stream = await self.stream()
        found = [0]
        for subject in self.filters:
            with suppress(MessageNotFound):
                found.append((await stream.get_message(last_for=subject, direct=False)).sequence)
        return max(found)

    async def extent(self, request: ReplayRequest) -> Extent:
        """The sequences of a request.

        Raises:
            DataLoss: Some of them are gone.
        """
        head, first = await self.head(), first_ever((await self.info()).config)
        since = None if request.since is None else await self._sequence_at(head, request.since)
        until = None if request.until is None else await self._sequence_at(head, request.until)
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
        begin = max(first, first_ever((await self.info()).config))
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
        scan = RangeScan(part, timeout_s=PATIENCE_S, loss_remedy="it was removed while it was read")
        size, is_wanted = None if pace is None else pace.portion, self._is_wanted
        first_read = 0
        async with aclosing(ProcedureRunner(self.js).pieces(scan)) as pieces:
            async for piece in pieces:
                for begin in range(0, len(piece), size or len(piece)):
                    portion = piece[begin : begin + (size or len(piece))]
                    if pace is not None:
                        await pace.let(len(portion))
                    # First of all, because most work on a message is wasted if its subject is not wanted.
                    mine = portion if is_wanted is None else [each for each in portion if is_wanted(each.subject)]
                    if is_kept and not first_read and mine:
                        first_read = _sequence(mine[0])
                    if subject is not None:
                        mine = [each for each in mine if matches(subject, each.subject)]
                    yield Portion(mine, len(portion), _sequence(portion[-1]))
                    await asyncio.sleep(0)  # decoding takes a while; let other tasks run
        if first_read:
            check_is_whole(extent, await self.head(first_read))

    async def _sequence_at(self, head: Head, moment: datetime.datetime) -> int:
        """The sequence of the first message stored at or after a moment; without one, the next sequence."""
        context = context_of(self.js)
        return await context.run(sequence_at(context.api, head, moment))


def _sequence(message: Any) -> int:
    return message.sequence if isinstance(message, StoredMessage) else delivery(message).sequence


def recorded(message: Any) -> Recorded:
    if isinstance(message, StoredMessage):
        moment = message.timestamp - datetime.datetime.fromtimestamp(0, datetime.UTC)
        time_us = moment // datetime.timedelta(microseconds=1)
        return Recorded(message.sequence, message.subject, message.data, message.headers, time_us)
    return recorded_delivery(message)
