"""Reading the events of a projection from its stream, range by range, and folding them in memory."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

from jetspark.aio import clock
from jetspark.aio.context import context_of
from jetspark.aio.jetstream import JetStream
from jetspark.aio.steps import ProcedureRunner
from jetspark.aio.stream import Stream
from jetspark.app.projections.declaring import ProjectionSpec
from jetspark.app.projections.folding import Failure, KeyRows, KeyState, Recorded, Router, recorded_delivery
from jetspark.app.projections.positions import FoldPosition, start_of
from jetspark.app.replay.contents import KeyContent
from jetspark.app.replay.places import noted_position
from jetspark.app.replay.ranges import Extent, ReplayRequest, check_is_whole, extent_of
from jetspark.core import numbers
from jetspark.core.subjects import matches, on_one_of, reading_filters
from jetspark.errors import ConfigError, MessageNotFound
from jetspark.jetstream.info import StoredMessage, StreamInfo
from jetspark.state.changes import NOTHING, Current
from jetspark.state.deliveries import delivery, sequences_of
from jetspark.state.losses import first_ever, front_of
from jetspark.state.scan import Head, Range, RangeScan, sequence_at

if TYPE_CHECKING:
    from jetspark.app.application import App

__all__ = [
    "Events",
    "History",
    "MemoryFold",
    "OnEvents",
    "Portion",
    "ReadingRate",
    "StreamHistory",
    "spec_of",
    "told_nobody",
]

# How long reading goes on while nothing comes: it covers a restart and the election of a leader.
PATIENCE_S = 60.0


class Events(NamedTuple):
    """Some of the events of a range, in order."""

    rows: KeyRows
    failures: list[Failure]
    messages: int
    last: int
    """Of the last message; everything up to it was read."""


class Portion(NamedTuple):
    """Some of the messages of a range, in order: those that were asked for."""

    received: Sequence[Any]
    """As they came: delivered by a consumer, or got one by one."""
    read: int
    """How many were read, the others among them."""
    last: int
    """The sequence of the last that was read."""

    @property
    def messages(self) -> list[Recorded]:
        return [_recorded(each) for each in self.received]

    @property
    def sequences(self) -> Sequence[int]:
        if self.received and isinstance(self.received[0], StoredMessage):
            return [each.sequence for each in self.received]
        return sequences_of(self.received)


OnEvents: TypeAlias = Callable[[Events], Awaitable[None]]
"""Is told what was read."""


async def told_nobody(events: Events) -> None:
    """Nobody wants to know."""


class ReadingRate:
    """Lets ``rate`` events pass each second, in small portions; without a rate, all of them at once."""

    def __init__(self, rate: float | None) -> None:
        self._rate = None if rate is None else numbers.rate("rate", rate, instead="or None for no limit")
        self._began: float | None = None
        self._passed = 0

    @property
    def portion(self) -> int | None:
        """How many events may pass together: a tenth of a second of them."""
        return None if self._rate is None else max(1, int(self._rate / 10))

    async def let(self, events: int) -> None:
        """Wait until as many more events may have passed."""
        if self._rate is None:
            return
        if self._began is None:
            self._began = clock.now()
        self._passed += events
        await asyncio.sleep(max(0.0, self._began + self._passed / self._rate - clock.now()))


class StreamHistory:
    """A stream, from its beginning."""

    def __init__(
        self, js: JetStream, stream: str, filters: Sequence[str], reading: Sequence[str] | None = None
    ) -> None:
        """``reading`` is what to ask the server for, where that is decided already."""
        self._js, self._stream = js, stream
        self.filters = tuple(filters)
        # It may be more than was asked for; the rest is left out here.
        self._server_filters = tuple(reading_filters(filters) if reading is None else reading)
        self._is_wanted = None if {*self._server_filters} == {*filters} else on_one_of(filters)
        self.first_event = 0
        """The first event that the stream ever had on these filters; 0 if it is not known."""

    async def stream(self) -> Stream:
        return await self._js.stream(self._stream)

    async def info(self) -> StreamInfo:
        """The stream as it is now."""
        return await (await self.stream()).info()

    async def head(self, witness: int | None = None) -> Head:
        """Where it begins and ends, and what of its front may be lost; ``witness`` is an event that was read."""
        context, info = context_of(self._js), await self.info()
        return await context.run(front_of(context.api, info, self.first_event if witness is None else witness))

    async def last(self) -> int:
        """The last sequence of the stream."""
        return (await self.info()).state.last_sequence

    async def last_event(self) -> int:
        """The sequence of the last message on one of the filters; 0 if there is none."""
        stream = await self.stream()
        found = [0]
        for subject in self.filters:
            with suppress(MessageNotFound):
                found.append((await stream.get_message(last_for=subject, direct=False)).sequence)
        return max(found)

    async def extent(self, request: ReplayRequest) -> Extent:
        """The sequences that a request means.

        Raises:
            DataLoss: Some of them are gone.
        """
        head, first = await self.head(), first_ever((await self.info()).config)
        since = None if request.since is None else await self._sequence_at(head, request.since)
        until = None if request.until is None else await self._sequence_at(head, request.until)
        return extent_of(request, head, first, since_seq=since, until_seq=until)

    async def whole(self, last: int | None = None) -> Extent:
        """Everything there ever was, up to a sequence or to the end.

        Raises:
            DataLoss: The beginning is gone.
        """
        return await self.extent(ReplayRequest(to_seq=last or None))

    async def since(self, first: int) -> Extent:
        """The sequences from one on, up to the end.

        Raises:
            DataLoss: Some of them are gone.
        """
        head = await self.head()
        found = Extent(stream=head.stream, created=head.created, first=first, last=head.next - 1)
        check_is_whole(found, head)
        return found

    async def between(self, extent: Extent, first: int, last: int) -> Extent:
        """Other sequences of the same stream, from the first that it ever had.

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
        """The messages of a range that are on the filters, in portions.

        Args:
            subject: Only those on this subject, or filter.
            may_lack: The states of entities are wanted, too, which go away when they are replaced.

        Raises:
            DataLoss: Some of it went away while it was read.
            StreamRecreated: The stream is another one by now.
        """
        if extent.is_empty:
            return
        # What a scan takes for lost may be states and timers. An event that was read tells, when all was read.
        is_kept = not may_lack and (await self.head()).kept_from is not None
        is_early = may_lack or is_kept
        part = Range(extent.stream, extent.created, extent.first, extent.last + 1, self._server_filters, is_early)
        scan = RangeScan(part, timeout_s=PATIENCE_S, loss_remedy="it was removed while it was read")
        size, is_wanted = None if pace is None else pace.portion, self._is_wanted
        first_read = 0
        async with aclosing(ProcedureRunner(self._js).pieces(scan)) as pieces:
            async for piece in pieces:
                for begin in range(0, len(piece), size or len(piece)):
                    portion = piece[begin : begin + (size or len(piece))]
                    if pace is not None:
                        await pace.let(len(portion))
                    # Before anything else is looked at: of many messages nothing but the subject is ever needed.
                    mine = portion if is_wanted is None else [each for each in portion if is_wanted(each.subject)]
                    if is_kept and not first_read and mine:
                        first_read = _sequence(mine[0])
                    if subject is not None:
                        mine = [each for each in mine if matches(subject, each.subject)]
                    yield Portion(mine, len(portion), _sequence(portion[-1]))
                    await asyncio.sleep(0)  # decoding takes a while, and others have work to do
        if first_read:
            check_is_whole(extent, await self.head(first_read))

    async def _sequence_at(self, head: Head, moment: datetime.datetime) -> int:
        """Of the first message stored at or after a moment; the next sequence where there is none."""
        context = context_of(self._js)
        return await context.run(sequence_at(context.api, head, moment))


class History(StreamHistory):
    """The stream of a projection, from its beginning."""

    @classmethod
    async def open(cls, js: JetStream, app: App, spec: ProjectionSpec, bucket: str, *, is_anew: bool = False) -> Self:
        """With the first event, as far as the bucket of the projection knows it.

        Args:
            is_anew: The states are made anew. Then the bucket may be of a stream that was deleted since.

        Raises:
            UsageError: The bucket was made of another stream of the same name.
        """
        history = cls(js, app, spec)
        position = (await noted_position(js, bucket)).position
        if position is None:
            return history
        beginning = FoldPosition.beginning(app.stream, (await history.info()).created)
        if not is_anew:
            start_of(position, beginning, projection=spec.name, bucket=bucket)
        if (position.stream, position.created) == (beginning.stream, beginning.created):
            history.first_event = position.first_event
        return history

    def __init__(self, js: JetStream, app: App, spec: ProjectionSpec) -> None:
        self.router = Router([spec], app.catalogue, owns_stream=app.owns_stream)
        super().__init__(js, app.stream, self.router.filters, self.router.reading)

    async def read(
        self, extent: Extent, *, subject: str | None = None, pace: ReadingRate | None = None
    ) -> AsyncGenerator[Events, None]:
        """The events of a range, in portions.

        Raises:
            DataLoss: Some of it went away while it was read.
            StreamRecreated: The stream is another one by now.
        """
        async with aclosing(self.messages(extent, pace, subject=subject)) as portions:
            async for portion in portions:
                yield self._route(portion)

    def _route(self, portion: Portion) -> Events:
        [name] = self.router.specs
        rows = KeyRows()
        failed = self.router.sort(portion.received, portion.sequences, _recorded, {name: rows})
        failures = [failure for _, found in failed for failure in found]
        return Events(rows, failures, portion.read, portion.last)


class MemoryFold:
    """States of keys in memory, each folded as far as it is asked for, and never stored by this."""

    def __init__(self, spec: ProjectionSpec, *, wants: Callable[[str], bool] = lambda key: True) -> None:
        """``wants`` says which keys are folded; by default every key that an event comes for."""
        self._spec, self._wants = spec, wants
        self._states: dict[str, KeyState] = {}
        self.reached = 0
        """Every key has its events up to this sequence."""
        self.failures = 0
        self.events = 0
        """Up to the sequences that were asked for, those of keys that are not wanted included."""

    def begin(self, key: str, base: Current = NOTHING) -> None:
        """Begin a key with a state that it had."""
        self._states[key] = KeyState(self._spec, key, base)

    def begin_all(self, states: Mapping[str, Current], reached: int) -> None:
        """Begin with the states that keys had after a sequence; others had none."""
        for key, state in states.items():
            self.begin(key, state)
        self.reached = reached

    def content(self, key: str) -> KeyContent:
        return KeyContent.of_state(self._states.get(key))

    def has_event(self, key: str) -> bool:
        """Whether an event of the key was taken."""
        state = self._states.get(key)
        return state is not None and bool(state.applied or state.known or state.waiting or state.parked)

    @property
    def keys(self) -> set[str]:
        return set(self._states)

    def forget(self, key: str) -> None:
        self._states.pop(key, None)

    def adopt(self, key: str, other: MemoryFold) -> None:
        """Take a key as another fold has it."""
        self._states.pop(key, None)
        if key in other._states:
            self._states[key] = other._states[key]

    def take(self, events: Events, last: int, further: Mapping[str, int] | None = None) -> None:
        """Apply events up to the sequence ``last``; of the keys in ``further`` up to a later one."""
        spec, states = self._spec, self._states
        is_all = events.last <= last
        self.failures += sum(is_all or each.sequence <= last for each in events.failures)
        self.events += len(events.rows) if is_all else sum(row[1] <= last for row in events.rows)
        for key, sequence, event in events.rows:
            if not self._wants(key):
                continue
            if sequence > last and (further is None or sequence > further.get(key, 0)):
                continue
            state = states.get(key)
            if state is None:
                state = states[key] = KeyState(spec, key, NOTHING)
            state.apply(spec, key, sequence, event)

    async def advance(
        self,
        history: History,
        extent: Extent,
        last: int,
        further: Mapping[str, int] | None = None,
        *,
        pace: ReadingRate | None = None,
        on_events: OnEvents = told_nobody,
    ) -> None:
        """Fold on from where this is, every key to ``last``, and those in ``further`` to their own sequence."""
        end = max([last, *(further or {}).values()])
        if end <= self.reached:
            return
        # Not from the beginning of the extent: a key may lack events before it, and would never get them.
        part = await history.between(extent, self.reached + 1, end)
        async with aclosing(history.read(part, pace=pace)) as portions:
            async for events in portions:
                self.take(events, last, further)
                await on_events(events)
        self.reached = max(self.reached, last)


def spec_of(app: App, projection: str, js: JetStream | None = None) -> ProjectionSpec:
    """A projection by its name; with ``js`` as it is folded on that server.

    Raises:
        ConfigError: There is no such projection.
    """
    found = app.projections.get(projection)
    if found is None:
        known = ", ".join(sorted(app.projections)) or "none"
        raise ConfigError(f"projection {projection!r}: app {app.name!r} has none of this name; it has {known}")
    return found if js is None else found.within(context_of(js).client.max_payload_bytes)


def _sequence(message: Any) -> int:
    return message.sequence if isinstance(message, StoredMessage) else delivery(message).sequence


def _recorded(message: Any) -> Recorded:
    if isinstance(message, StoredMessage):
        moment = message.timestamp - datetime.datetime.fromtimestamp(0, datetime.UTC)
        time_us = moment // datetime.timedelta(microseconds=1)
        return Recorded(message.sequence, message.subject, message.data, message.headers, time_us)
    return recorded_delivery(message)
