"""A live engine: one task reads and folds the stream, another stores the changed states.

Storing a key takes longer than folding an event into its state. So an engine that is far behind stores only when a
batch is nearly full: a key that changes often is then stored once for many events. No reader waits longer for that,
because the events that readers ask for are still in the stream. An engine that is up to date stores at once, and each
batch has the events that arrived while the batch before was stored (:class:`Backlog`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jetspark.aio import clock
from jetspark.aio.context import context_of
from jetspark.aio.jetstream import JetStream
from jetspark.aio.ordered import Reading
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.patience import UNLIMITED_S, patiently
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

__all__ = ["FAR_BEHIND_WAIT_S", "Backlog", "FoldedAmount", "LiveEngine", "LiveSetup", "end_tasks", "open_projections"]

_logger = logging.getLogger("jetspark.app")

# The event loop runs other tasks between two pieces of this size, about 5 ms. A piece is usually larger than what
# arrives at a time, so few messages wait to be folded, and they stay in the processor's cache.
PIECE = 1000
# Waits before a failed request is sent again, without limit while the worker runs.
PAUSE = Backoff(first_s=0.1, max_s=5.0)

# Shortest interval between two writes of the position when there is nothing to store; without it the writer would use a
# whole core.
IDLE_S = 0.01


@dataclass(frozen=True, slots=True)
class LiveSetup:
    """Connection, declarations, options and counters that the engines of a worker share."""

    app: AppSpec
    js: JetStream
    catalogue: Catalogue
    options: LiveOptions
    counts: LiveCounts
    crashes: FoldCrashes | None = None
    """Records events that may end the process."""


class LiveEngine:
    """Reads, folds and stores from the last position until :meth:`end`, an error, or a change that needs a restart."""

    def __init__(
        self,
        setup: LiveSetup,
        projections: Sequence[LiveProjection],
        *,
        beside: Sequence[LiveProjection] = (),
        counts_position: bool = True,
    ) -> None:
        """
        Args:
            projections: The projections to fold, opened by :func:`open_projections`.
            beside: The projections of the other engine of this pass.
            counts_position: True for the engine whose position the counters show.
        """
        app, options = setup.app, setup.options
        self._app, self._js, self._options, self.counts = app, setup.js, options, setup.counts
        self._projections = {projection.spec.name: projection for projection in projections}
        others = [projection.spec for projection in beside]
        self._router = Router(
            [projection.spec for projection in projections],
            setup.catalogue,
            owns_stream=app.owns_stream,
            beside=others,
        )
        self._counts_position, self._crashes = counts_position, setup.crashes
        self._label = "+".join(self._projections)
        self._is_partitioned = options.partitions > 1
        self._read = 0
        """Every event up to this sequence is folded or has a dead letter."""
        self._backlog = Backlog(options)
        self._through = min(projection.start for projection in projections)
        """Every event up to this sequence is stored."""
        self._gap_from: int | None = None
        """Sequence before the first gap in the deliveries: messages of other subjects, or dropped by the stream."""
        self._last_event = self._gap_anchor = 0
        """Sequences of the last event read, and of the last event before the gap."""
        self._work, self._room = asyncio.Event(), asyncio.Event()
        self._is_ending, self._ending = False, asyncio.Event()
        self._position_at = clock.now()
        self._reader: asyncio.Task[None] | None = None

    @property
    def through(self) -> int:
        """Every event up to this sequence is stored."""
        return self._through

    async def run(self, beginning: FoldPosition) -> None:
        """
        Args:
            beginning: The beginning of the stream when the projections were opened.

        Raises:
            RestartPass: The bucket, its position or the stream has changed: reopen and continue.
            JetSparkError: A request failed.
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
        """Stop reading, and store the events that were read."""
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
        for projection in self._projections.values():
            projection.check_stream_start(first, await self._whole_from(projection.reached_event))
        self._last_event = min(projection.reached_event for projection in self._projections.values())

    async def _whole_from(self, anchor_sequence: int) -> int:
        """The sequence from which the stream has lost no event, given an event that was read."""
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
                raise RestartPass(f"stream {self._app.stream} was re-created; projections are opened again")
            while messages := await reading.some():
                while messages:
                    await self._fold_some(messages[:PIECE])
                    # Released before more messages arrive, so that those reuse this memory, which is in the cache.
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

    def _recorded(
        self, projection: str, sequences: Sequence[int]
    ) -> AbstractAsyncContextManager[FoldDied | None, bool | None]:
        if self._crashes is None or not self._crashes.is_careful(sequences[0]):
            return nullcontext()
        return self._crashes.recorded(self._label, projection, sequences)

    async def _route(
        self, messages: Sequence[JetStreamMessage], rows: dict[str, KeyRows]
    ) -> list[tuple[Recorded, list[Failure]]]:
        sequences = sequences_of(messages)
        async with self._recorded(READING, sequences) as died:
            if died is None:
                return self._router.add_rows(messages, sequences, recorded_delivery, rows)
        return [(recorded_delivery(messages[0]), [Failure(tuple(self._projections), sequences[0], died)])]

    async def _fold(self, messages: Sequence[JetStreamMessage]) -> None:
        projections = self._projections
        rows = {name: KeyRows() for name in projections}
        failed = await self._route(messages, rows)
        last = delivery(messages[-1])
        sequence = last.sequence
        if sequence - self._read != len(messages) and self._gap_from is None:
            self._gap_from, self._gap_anchor = self._read, self._last_event
        for name, projection in projections.items():
            mine = rows[name]
            if mine:
                projection.count_events(mine)
                self._last_event = max(self._last_event, mine.sequences[-1])
            if self._read < projection.start:  # its position is beyond that of the others
                mine = KeyRows(row for row in mine if row[1] > projection.start)
            if self._is_partitioned:
                mine = KeyRows(row for row in mine if projection.is_mine(row[0]))
            if mine:
                await projection.load(mine)
                async with self._recorded(name, sequences_of(messages)) as died:
                    projection.states.apply(mine if died is None else mine.refused(died))
                projection.states.shrink()
        for unreadable, failures in failed:
            [message] = [each for each in messages if delivery(each).sequence == unreadable.sequence]
            await self._write_dead_letter(message, failures)
        self._read = sequence
        self._backlog.fold(len(messages), sum([len(message.data) for message in messages]), last.pending)
        self.counts.events += len(messages)
        self._work.set()

    async def _give_way(self) -> None:
        """Let other tasks run, and wait until the backlog has room."""
        while not self._backlog.has_room:
            self._room.clear()
            await self._room.wait()
        await asyncio.sleep(0)

    async def _write_dead_letter(self, message: JetStreamMessage, failures: list[Failure]) -> None:
        failure = failures[0]
        _logger.error(
            "app %s: event %d on %s cannot be read (%s); writing a dead letter",
            self._app.name,
            failure.sequence,
            message.subject,
            failure.error,
        )
        await patiently(
            lambda: write_unreadable(self._js, self._app.name, message, failures), patience_s=UNLIMITED_S, pause=PAUSE
        )
        self.counts.dead_letters += 1

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
            for projection in self._projections.values():
                projection.begin_storing()
            now = clock.now()
            with_position = self._is_ending or now - self._position_at >= self._options.position_every_s
            if with_position:
                self._position_at = now
                await self._check_losses()
            done = await _all([self._store_in(projection, with_position) for projection in self._projections.values()])
            self._report_stuck()
            if all(done):
                for projection in self._projections.values():
                    projection.end_storing()
                self._through = through
                self._backlog.store(folded)
                if self._counts_position:
                    self.counts.position = through
                self.counts.batches += 1
                self._room.set()
                return

    async def _check_losses(self) -> None:
        """Before the position passes a gap: find out whether the stream dropped the events there."""
        gap_from, self._gap_from = self._gap_from, None
        if gap_from is None:
            return
        whole_from = await self._whole_from(self._gap_anchor)
        if whole_from > gap_from + 1:
            for projection in self._projections.values():
                projection.report_missed(gap_from + 1, whole_from - 1)

    async def _store_in(self, projection: LiveProjection, with_position: bool) -> bool:
        try:
            return await projection.store(self._through, self.counts, with_position=with_position)
        except StateGone as gone:
            await projection.handle_gone(gone)
            raise AssertionError from None

    def _report_stuck(self) -> None:
        """Update the counters, and log each key that has become stuck."""
        for name, projection in self._projections.items():
            reported = self.counts.parked.setdefault(name, {})
            if len(reported) == len(projection.states.parked) == 0:
                continue
            parked = {projection.spec.key_text(key): why for key, why in projection.states.parked.items()}
            if reported != parked:
                for key, why in parked.items():
                    if reported.get(key) != why:
                        _logger.error(
                            "projection %s: key %s is stuck at event %d (%s); its later events wait for a repair",
                            name,
                            key,
                            *why,
                        )
                self.counts.parked[name] = parked


async def open_projections(js: JetStream, stream: str, projections: Sequence[LiveProjection]) -> FoldPosition:
    """Open the bucket of each projection and read its position; returns the beginning of the stream."""
    beginning = FoldPosition.beginning(stream, (await js.stream(stream)).cached_info.created)
    await asyncio.gather(*(projection.open(beginning) for projection in projections))
    return beginning


async def _all(work: Sequence[Awaitable[bool]]) -> list[bool]:
    """Run coroutines concurrently; an error is raised after all of them have ended."""
    if len(work) == 1:
        return [await work[0]]
    done = await asyncio.gather(*work, return_exceptions=True)
    for each in done:
        if isinstance(each, BaseException):
            raise each
    return [each is True for each in done]


async def _within(seconds: float, work: Awaitable[object]) -> None:
    """Await ``work`` for at most ``seconds``."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work


async def end_tasks(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


# A batch is stored before the backlog is full, so that reading continues in the meantime.
FULL = 3 / 4
# An engine is far behind if this fraction of a batch waits in the stream: at most half a second of folding.
FAR_BEHIND = 1 / 10
# An engine that is far behind stores at least this often, which bounds what its successor reads again.
FAR_BEHIND_WAIT_S = 2.0


class FoldedAmount(NamedTuple):
    """Events and bytes folded since the engine started."""

    events: int = 0
    bytes: int = 0


class Backlog:
    """Counts events that are folded and not stored yet, and decides when to store. Pure."""

    def __init__(self, options: LiveOptions) -> None:
        self._options = options
        self.folded = self.stored = FoldedAmount()
        self._pending = 0
        """Messages that wait in the stream, according to the last delivery."""

    def fold(self, events: int, size: int, pending: int) -> None:
        """Count folded events and their size in the stream; ``pending`` messages wait in the stream after them."""
        self.folded = FoldedAmount(self.folded.events + events, self.folded.bytes + size)
        self._pending = pending

    def store(self, folded: FoldedAmount) -> None:
        """Everything counted in ``folded`` is stored."""
        self.stored = folded

    @property
    def has_room(self) -> bool:
        """True if more may be folded before the next store."""
        return not self._has(1.0)

    @property
    def is_full(self) -> bool:
        """True if the batch should be stored without waiting for more events."""
        return self._has(FULL)

    @property
    def is_far_behind(self) -> bool:
        return self._pending >= FAR_BEHIND * self._options.batch

    def _has(self, part: float) -> bool:
        events, size = self.folded.events - self.stored.events, self.folded.bytes - self.stored.bytes
        return events >= part * self._options.batch or size >= part * self._options.batch_bytes
