"""One pass of a live engine over the stream: reading and folding, and storing beside it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from jetspark.aio import clock
from jetspark.aio.context import context_of
from jetspark.aio.jetstream import JetStream
from jetspark.aio.ordered import Reading
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.patience import FOR_EVER_S, patiently
from jetspark.app.projections.fold_crashes import READING, FoldCrashes, FoldDied
from jetspark.app.projections.live_options import LiveCounts, LiveOptions, RestartPass
from jetspark.app.projections.live_projection import LiveProjection
from jetspark.app.projections.live_states import StateGone
from jetspark.app.projections.positions import FoldPosition
from jetspark.app.projections.router import Failure, KeyRows, Recorded, Router, recorded_delivery
from jetspark.app.projections.unreadable_events import write_unreadable
from jetspark.core.backoff import Backoff
from jetspark.jetstream.ordered import OrderedOptions
from jetspark.state.deliveries import delivery, sequences_of
from jetspark.state.losses import first_ever, front_of

if TYPE_CHECKING:
    from jetspark.app.spec import AppSpec

__all__ = ["FAR_BEHIND_WAIT_S", "Backlog", "FoldedAmount", "LiveEngine", "end_tasks", "open_projections"]

_logger = logging.getLogger("jetspark.app")

# The loop gets other things done between two pieces of this many messages, some 5 ms. As a rule they are more than it
# receives at a time: so what waits to be folded stays little, and in the processor's cache.
PIECE = 1000
# What the server refuses or does not answer is tried again after these waits, as long as the worker lives.
PAUSE = Backoff(first_s=0.1, max_s=5.0)

# With nothing to store, the position is looked after no more often than this: without a wait that would take a core.
IDLE_S = 0.01


class LiveEngine:
    """One pass over the stream: from the last position, until something changes or it is to end."""

    def __init__(
        self,
        app: AppSpec,
        places: Sequence[LiveProjection],
        js: JetStream,
        catalogue: Catalogue,
        options: LiveOptions,
        counts: LiveCounts,
        *,
        beside: Sequence[LiveProjection] = (),
        tells_position: bool = True,
        crashes: FoldCrashes | None = None,
    ) -> None:
        """
        Args:
            places: Opened by :func:`open_projections`.
            beside: Those of other engines that go over the stream at the same time.
            tells_position: Whether the counts have the position of this engine.
            crashes: Notes events that may end the process.
        """
        self._app, self._js, self._options, self.counts = app, js, options, counts
        self._places = {place.spec.name: place for place in places}
        others = [place.spec for place in beside]
        self._router = Router([place.spec for place in places], catalogue, owns_stream=app.owns_stream, beside=others)
        self._tells_position, self._crashes = tells_position, crashes
        self._label = "+".join(self._places)
        self._is_partitioned = options.partitions > 1
        self._read = 0
        """Everything up to here is folded, or has a letter."""
        self._backlog = Backlog(options)
        self._through = min(place.start for place in places)
        """Everything up to here is stored."""
        self._gap_from: int | None = None
        """Behind this sequence some were not delivered: they are for others, or the stream has dropped them."""
        self._last_event = self._gap_anchor = 0
        """The last event that was read; and the last one before the gap."""
        self._work, self._room = asyncio.Event(), asyncio.Event()
        self._is_ending, self._ending = False, asyncio.Event()
        self._position_at = clock.now()
        self._reader: asyncio.Task[None] | None = None

    @property
    def through(self) -> int:
        """Everything up to here is stored."""
        return self._through

    async def run(self, beginning: FoldPosition) -> None:
        """
        Args:
            beginning: Of the stream, as it was when the places were opened.

        Raises:
            RestartPass: Begin anew.
            JetSparkError: It cannot go on.
        """
        await self._open()
        if not self._is_ending:
            await self._run(beginning)

    async def _run(self, beginning: FoldPosition) -> None:
        self._reader = asyncio.create_task(self._read_stream(beginning))
        self._reader.add_done_callback(lambda _: self._work.set())  # the writer ends when this one has
        writer = asyncio.create_task(self._write())
        try:
            await asyncio.wait([self._reader, writer], return_when=asyncio.FIRST_COMPLETED)
            if self._is_ending:
                await asyncio.wait([writer])
        finally:
            await end_tasks(self._reader, writer)
        for task in (writer, self._reader):
            if not task.cancelled():
                task.result()

    def end(self) -> None:
        """Read no more, and store what was read."""
        self._is_ending = True
        self._ending.set()
        if self._reader is not None:
            self._reader.cancel()
        self._work.set()

    async def _open(self) -> None:
        stream = await self._js.stream(self._app.stream)
        self._read = self._through
        if self._crashes is not None:
            info = stream.cached_info
            beginning = FoldPosition.beginning(self._app.stream, info.created)
            self._crashes.open(beginning, info.state.last_sequence, self._through)
        first = first_ever(stream.cached_info.config)
        for place in self._places.values():
            place.check_stream_start(first, await self._whole_from(place.reached_event))
        self._last_event = min(place.reached_event for place in self._places.values())

    async def _whole_from(self, anchor_sequence: int) -> int:
        """From where on the stream has lost no event, as an event that was read bears witness."""
        context = context_of(self._js)
        info = await (await self._js.stream(self._app.stream)).info()
        return (await context.run(front_of(context.api, info, anchor_sequence))).whole_from

    # ---- reading -----------------------------------------------------------------------------------------------

    async def _read_stream(self, beginning: FoldPosition) -> None:
        options = OrderedOptions(filter_subjects=self._router.reading, start_sequence=self._read + 1)
        reading = Reading(context_of(self._js), self._app.stream, options)
        try:
            await reading.start()
            info = await (await self._js.stream(self._app.stream)).info()
            if FoldPosition.beginning(self._app.stream, info.created) != beginning:
                raise RestartPass(f"stream {self._app.stream} was made anew")
            while messages := await reading.some():
                while messages:
                    await self._fold_some(messages[:PIECE])
                    # Let go before others are received, so that those get the memory of these, which is at hand.
                    del messages[:PIECE]
                    await self._give_way()
        finally:
            await reading.close()

    async def _fold_some(self, messages: Sequence[JetStreamMessage]) -> None:
        if self._crashes is not None and self._crashes.is_named(sequences_of(messages)):
            for message in messages:
                await self._fold([message])
        else:
            await self._fold(messages)

    def _noted(
        self, projection: str, sequences: Sequence[int]
    ) -> AbstractAsyncContextManager[FoldDied | None, bool | None]:
        if self._crashes is None or not self._crashes.is_careful(sequences[0]):
            return nullcontext()
        return self._crashes.noted(self._label, projection, sequences)

    async def _sort(
        self, messages: Sequence[JetStreamMessage], rows: dict[str, KeyRows]
    ) -> list[tuple[Recorded, list[Failure]]]:
        sequences = sequences_of(messages)
        async with self._noted(READING, sequences) as died:
            if died is None:
                return self._router.add_rows(messages, sequences, recorded_delivery, rows)
        return [(recorded_delivery(messages[0]), [Failure(tuple(self._places), sequences[0], died)])]

    async def _fold(self, messages: Sequence[JetStreamMessage]) -> None:
        places = self._places
        rows = {name: KeyRows() for name in places}
        failed = await self._sort(messages, rows)
        last = delivery(messages[-1])
        sequence = last.sequence
        if sequence - self._read != len(messages) and self._gap_from is None:
            self._gap_from, self._gap_anchor = self._read, self._last_event
        for name, place in places.items():
            mine = rows[name]
            if mine:
                place.count_events(mine)
                self._last_event = max(self._last_event, mine.sequences[-1])
            if self._read < place.start:  # this one is further than others
                mine = KeyRows(row for row in mine if row[1] > place.start)
            if self._is_partitioned:
                mine = KeyRows(row for row in mine if place.is_mine(row[0]))
            if mine:
                await place.load(mine)
                async with self._noted(name, sequences_of(messages)) as died:
                    place.states.apply(mine if died is None else mine.refused(died))
                place.states.shrink()
        for unreadable, failures in failed:
            [message] = [each for each in messages if delivery(each).sequence == unreadable.sequence]
            await self._write_letter(message, failures)
        self._read = sequence
        self._backlog.fold(len(messages), sum([len(message.data) for message in messages]), last.pending)
        self.counts.events += len(messages)
        self._work.set()

    async def _give_way(self) -> None:
        """Have others do their work, until there is room for more."""
        while not self._backlog.has_room:
            self._room.clear()
            await self._room.wait()
        await asyncio.sleep(0)

    async def _write_letter(self, message: JetStreamMessage, failures: list[Failure]) -> None:
        failure = failures[0]
        _logger.error(
            "app %s: event %d on %s: %s: it has a letter",
            self._app.name,
            failure.sequence,
            message.subject,
            failure.error,
        )
        await patiently(
            lambda: write_unreadable(self._js, self._app.name, message, failures), patience_s=FOR_EVER_S, pause=PAUSE
        )
        self.counts.letters += 1

    # ---- writing -----------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        options, backlog = self._options, self._backlog
        while True:
            await self._wait_for_work(max(options.position_every_s, IDLE_S))
            if not self._is_ending and not backlog.is_full:
                await _within(options.batch_wait_s, self._ending.wait())
                give_up_at = clock.now() + FAR_BEHIND_WAIT_S
                while not self._is_ending and not backlog.is_full and backlog.is_far_behind:
                    if (left_s := give_up_at - clock.now()) <= 0:
                        break
                    await self._wait_for_work(left_s)
            await self._store()
            if self._is_ending and self._reader is not None and self._reader.done():
                await self._store()
                return

    async def _wait_for_work(self, seconds: float) -> None:
        await _within(seconds, self._work.wait())
        self._work.clear()

    async def _store(self) -> None:
        while True:
            through, folded = self._read, self._backlog.folded
            for place in self._places.values():
                place.begin_storing()
            now = clock.now()
            with_position = self._is_ending or now - self._position_at >= self._options.position_every_s
            if with_position:
                self._position_at = now
                await self._check_losses()
            done = await _all([self._store_in(place, with_position) for place in self._places.values()])
            self._report_stuck()
            if all(done):
                for place in self._places.values():
                    place.end_storing()
                self._through = through
                self._backlog.store(folded)
                if self._tells_position:
                    self.counts.position = through
                self.counts.batches += 1
                self._room.set()
                return

    async def _check_losses(self) -> None:
        """Before a position passes by sequences that did not come: whether the stream still had them."""
        gap_from, self._gap_from = self._gap_from, None
        if gap_from is None:
            return
        whole_from = await self._whole_from(self._gap_anchor)
        if whole_from > gap_from + 1:
            for place in self._places.values():
                place.report_missed(gap_from + 1, whole_from - 1)

    async def _store_in(self, place: LiveProjection, with_position: bool) -> bool:
        try:
            return await place.store(self._through, self.counts, with_position=with_position)
        except StateGone as gone:
            await place.handle_gone(gone)
            raise AssertionError from None

    def _report_stuck(self) -> None:
        for name, place in self._places.items():
            told = self.counts.parked.setdefault(name, {})
            if len(told) == len(place.states.parked) == 0:
                continue
            parked = {place.spec.key_text(key): why for key, why in place.states.parked.items()}
            if told != parked:
                for key, why in parked.items():
                    if told.get(key) != why:
                        _logger.error("projection %s: key %s is parked at event %d: %s", name, key, *why)
                self.counts.parked[name] = parked


async def open_projections(js: JetStream, stream: str, places: Sequence[LiveProjection]) -> FoldPosition:
    """Find out how far projections are; returns the beginning of the stream that they are of."""
    beginning = FoldPosition.beginning(stream, (await js.stream(stream)).cached_info.created)
    await asyncio.gather(*(place.open(beginning) for place in places))
    return beginning


async def _all(work: Sequence[Coroutine[Any, Any, bool]]) -> list[bool]:
    """All at a time; raises when all have ended, so that none goes on behind our back."""
    if len(work) == 1:
        return [await work[0]]
    done = await asyncio.gather(*work, return_exceptions=True)
    for each in done:
        if isinstance(each, BaseException):
            raise each
    return [each is True for each in done]


async def _within(seconds: float, work: Coroutine[Any, Any, Any]) -> None:
    """Wait for something, for this long at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


# A batch is full before it has to be, so that reading goes on while it is stored.
FULL = 3 / 4
# As many events of a batch that wait in the stream are far behind: at most half a second of folding.
FAR_BEHIND = 1 / 10
# Who is far behind stores this often at least, and so does not begin too far back if it ends.
FAR_BEHIND_WAIT_S = 2.0


class FoldedAmount(NamedTuple):
    """How much was folded since the engine began."""

    events: int = 0
    bytes: int = 0


class Backlog:
    """See the module."""

    def __init__(self, options: LiveOptions) -> None:
        self._options = options
        self.folded = self.stored = FoldedAmount()
        self._pending = 0
        """Events that wait in the stream, as the last one has said."""

    def fold(self, events: int, size: int, pending: int) -> None:
        """Events were folded, which have this size in the stream; ``pending`` are waiting there behind them."""
        self.folded = FoldedAmount(self.folded.events + events, self.folded.bytes + size)
        self._pending = pending

    def store(self, folded: FoldedAmount) -> None:
        """What was folded by then is stored."""
        self.stored = folded

    @property
    def has_room(self) -> bool:
        """Whether more may be folded before something is stored."""
        return not self._has(1.0)

    @property
    def is_full(self) -> bool:
        """Whether it is to be stored without waiting for more."""
        return self._has(FULL)

    @property
    def is_far_behind(self) -> bool:
        return self._pending >= FAR_BEHIND * self._options.batch

    def _has(self, part: float) -> bool:
        events, size = self.folded.events - self.stored.events, self.folded.bytes - self.stored.bytes
        return events >= part * self._options.batch or size >= part * self._options.batch_bytes
