"""The live engine with asyncio: it reads the stream in order, folds, and stores, for as long as it has the lease.

Reading and storing go on side by side. The reader folds events into states in memory (``states``); the writer stores
what has changed, one compare-and-set for each key, all of a batch by fast ingest. While a batch is under way the next
one grows, so there is no size to choose: with few events a batch has few and is stored within milliseconds, and with
many it has as many as arrived meanwhile. ``LiveOptions.batch`` bounds how far the reader may be ahead.

Only what is stored counts: the position is written after the states, and says what was stored before. Whatever ends
an engine, the next one begins at the last position, and what it reads once more changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jetspark.aio import clock
from jetspark.aio.context import context_of
from jetspark.aio.jetstream import JetStream
from jetspark.aio.kv import KeyValue
from jetspark.aio.ordered import Reading
from jetspark.aio.steps import ProcedureRunner
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.dead_letters.store import microseconds
from jetspark.app.projections.buckets import ProjectionPlace, check_version, find_place, open_records, watch_place
from jetspark.app.projections.declaring import ProjectionSpec
from jetspark.app.projections.folding import Failure, KeyRow, Recorded, Router
from jetspark.app.projections.leases import Lease, LeaseLost
from jetspark.app.projections.marks import Parked, position_key
from jetspark.app.projections.positions import FoldPosition, part_start, position_change, start_of
from jetspark.app.projections.shares import PartitionShares, part_of
from jetspark.app.projections.states import CacheLimits, LiveStates, StateGone
from jetspark.app.projections.unreadable import write_unreadable
from jetspark.app.topology.names import escape_token
from jetspark.core.backoff import Backoff
from jetspark.core.numbers import seconds, whole
from jetspark.errors import JetSparkError
from jetspark.jetstream.ordered import OrderedOptions
from jetspark.state.changes import Change
from jetspark.state.losses import first_ever, front_of
from jetspark.state.store import StateBucket, open_bucket

if TYPE_CHECKING:
    from jetspark.app.application import App

__all__ = ["LiveCounts", "LiveOptions", "ProjectionWorker"]

_logger = logging.getLogger("jetspark.app")

# The loop gets other things done between two pieces of this many messages.
PIECE = 500
# What the server refuses or does not answer is tried again after these waits, as long as the worker lives.
PAUSE = Backoff(first_s=0.1, max_s=5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """How a live engine works."""

    batch: int = 100_000
    """Events that are folded and not stored yet, at most."""
    batch_wait_s: float = 0.002
    """How long a batch waits for more events before it is stored."""
    cache_keys: int = 200_000
    """States kept in memory for each projection."""
    cache_bytes: int = 128 << 20
    position_every_s: float = 0.1
    """How often the position is written: readers that wait for an event of another key wait for it."""
    lease_s: float = 10.0
    """How long a process that died holds the others up."""
    partitions: int = 1
    """Parts of the keys that several processes share; the same in all of them. With 1, one process folds everything."""

    def __post_init__(self) -> None:
        for name in ("batch", "cache_keys", "cache_bytes", "partitions"):
            whole(name, getattr(self, name))
        for name in ("batch_wait_s", "position_every_s", "lease_s"):
            seconds(name, getattr(self, name))


@dataclass(slots=True)
class LiveCounts:
    """What a worker has done since it began."""

    events: int = 0
    """Read from the stream."""
    batches: int = 0
    stored: int = 0
    """Values written."""
    conflicts: int = 0
    """Keys that somebody else had written meanwhile, and that were folded again."""
    letters: int = 0
    restarts: int = 0
    position: int = 0
    """Everything up to this sequence is stored."""
    parked: dict[str, dict[str, Parked]] = field(default_factory=dict)
    """Keys of each projection that do not go on, as far as this worker has met them."""


class _Again(Exception):
    """Something has changed: open everything anew, and go on from the last position."""


class _Place:
    """One projection in its bucket; with ``held``, some partitions of it."""

    def __init__(
        self,
        spec: ProjectionSpec,
        place: ProjectionPlace,
        js: JetStream,
        options: LiveOptions,
        held: frozenset[int] | None = None,
    ) -> None:
        self.spec, self.place = spec, place
        self._partitions, self._held = options.partitions, held
        self._part_revisions: dict[int, int] = {}
        self.states = LiveStates(spec, CacheLimits(options.cache_keys, options.cache_bytes))
        self.bucket: StateBucket
        self.written: FoldPosition
        """The position, as the bucket has it."""
        self.revision = 0
        self.start = 0
        self._missed: tuple[int, int] | None = None
        """What the stream has dropped before it was read, and the position does not say yet."""
        self._first_event = self._last_event = 0
        self._is_from_first = False
        """What is read here begins with the first event of the stream."""
        self._taken_event = self.reached_event = 0
        """The last event of what is being stored, and of what is stored."""
        # A procedure at a time: storing must not wait until something is loaded.
        self.loading, self.storing = ProcedureRunner(js), ProcedureRunner(js)

    async def open(self, beginning: FoldPosition) -> None:
        self.bucket = await self.storing.run(open_bucket(self.place.bucket))
        found = await self._read_position()
        name, bucket = self.spec.name, self.place.bucket
        self.written = start_of(found, beginning, projection=name, bucket=bucket, version=self.spec.version)
        self.start = self.written.sequence
        if self._held is not None:
            parts = await self._read_parts()
            self._part_revisions = {part: revision for part, (_, revision) in parts.items()}
            self.start = min(part_start(parts[part][0], self.written) for part in self._held)
        self.reached_event = self.written.last_event

    def note_beginning(self, first: int, whole_from: int) -> None:
        """Where the stream once began, and from where on nothing of it is lost."""
        self.note_missed(max(self.start + 1, first), whole_from - 1)
        self._is_from_first = self.start == 0 and self._missed is None

    def note_events(self, rows: Sequence[KeyRow]) -> None:
        """Some of the events that were read."""
        self._first_event = self._first_event or rows[0][1]
        self._last_event = rows[-1][1]

    def take_event(self) -> None:
        """What was read until now is going to be stored."""
        self._taken_event = self._last_event

    def settle_event(self) -> None:
        """It is stored."""
        self.reached_event = max(self.reached_event, self._taken_event)

    def _reaching(self, sequence: int) -> FoldPosition:
        """The position, further on."""
        last = self.reached_event if self.reached_event <= sequence else 0
        return self.written.reaching(sequence, self._first_event if self._is_from_first else 0, last)

    def is_mine(self, key: str) -> bool:
        return self._held is None or part_of(key, self._partitions) in self._held

    async def _read_parts(self) -> dict[int, tuple[FoldPosition | None, int]]:
        """The position of each partition, and its revision."""
        keys = [position_key(self._part_name(part)) for part in range(self._partitions)]
        found = await self.storing.run(self.bucket.load_from_leader(keys))
        parts: dict[int, tuple[FoldPosition | None, int]] = {}
        for part, key in enumerate(keys):
            current = found.get(key)
            if current is None or current.value is None:
                parts[part] = None, 0 if current is None else current.revision
            else:
                parts[part] = FoldPosition.decode(current.value), current.revision
        return parts

    def _part_name(self, part: int) -> str:
        return f"{part}-{self._partitions}"

    def note_missed(self, first: int, last: int) -> None:
        """Events between two sequences were dropped before they were read."""
        if max(first, self.start + 1) <= last:
            _logger.error(
                "projection %s: the stream has dropped events up to %d, and those up to %d were read: its position "
                "says that it is incomplete",
                self.spec.name,
                last,
                first - 1,
            )
            self._missed = self.written._replace(missed=self._missed).missing(max(first, self.start + 1), last).missed

    async def _read_position(self) -> FoldPosition | None:
        # Of the leader: what a replica that is behind says may have been moved back since.
        key = position_key()
        current = (await self.storing.run(self.bucket.load_from_leader([key]))).get(key)
        self.revision = current.revision if current is not None else 0
        return None if current is None or current.value is None else FoldPosition.decode(current.value)

    async def load(self, rows: Sequence[KeyRow]) -> None:
        """Have the states of these rows at hand."""
        missing = self.states.missing(rows)
        if missing:
            self.states.add(missing, await self.loading.run(self.bucket.load_all(missing)))

    async def store(self, through: int, counts: LiveCounts, *, with_position: bool) -> bool:
        """Store what has changed; False if something has to be stored again because others wrote it, too.

        Args:
            through: Everything up to this sequence is stored already.
        """
        changes = self.states.take(await self._make_sure())
        position: list[Change] = []
        if self._held is not None:
            is_done = await self._store_states(changes, counts)
            if with_position:
                await self._store_parts(through)
            return is_done
        if with_position and (through > self.written.sequence or self._missed is not None):
            wanted = self._reaching(max(through, self.written.sequence))
            if self._missed is not None:
                wanted = wanted.missing(*self._missed)
            position = [position_change(wanted, self.revision)]
        if not changes and not position:
            return True
        outcome = await self.storing.run(self.bucket.store_all([*changes, *position]))
        self.states.settle(changes, outcome)
        counts.stored += outcome.written
        conflicts = set(outcome.conflicts)
        if position:
            await self._settle_position(wanted, outcome.revisions.get(position_key()), position_key() in conflicts)
        conflicts.discard(position_key())
        counts.conflicts += len(conflicts)
        return not conflicts

    async def _store_states(self, changes: list[Change], counts: LiveCounts) -> bool:
        if not changes:
            return True
        outcome = await self.storing.run(self.bucket.store_all(changes))
        self.states.settle(changes, outcome)
        counts.stored += outcome.written
        counts.conflicts += len(outcome.conflicts)
        return not outcome.conflicts

    async def _store_parts(self, through: int) -> None:
        """The positions of our partitions, then that of the bucket, which is the lowest of all."""
        assert self._held is not None
        wanted = self.written._replace(sequence=through, missed=None)
        mine = [
            position_change(wanted, self._part_revisions[part], self._part_name(part)) for part in sorted(self._held)
        ]
        if through > self.start:
            await self.storing.run(self.bucket.store_all(mine))  # refused where another process has it, too
        known, found = self.written, await self._read_position()
        if (found is None and known.sequence) or (found is not None and found.repairs != known.repairs):
            raise _Again(f"the position of projection {self.spec.name!r} was changed: {found}, and was {known}")
        self.written = known if found is None else found._replace(version=known.version)
        parts = await self._read_parts()
        self._part_revisions = {part: revision for part, (_, revision) in parts.items()}
        whole = self._reaching(min(part_start(parts[part][0], self.written) for part in parts))
        if self._missed is not None:
            whole = whole.missing(*self._missed)
        if whole != self.written:
            outcome = await self.storing.run(self.bucket.store_all([position_change(whole, self.revision)]))
            if not outcome.conflicts:
                self.written, self._missed = whole, None

    async def _settle_position(self, wanted: FoldPosition, revision: int | None, is_conflict: bool) -> None:
        if not is_conflict and revision is not None:
            self.written, self.revision, self._missed = wanted, revision, None
            return
        known = self.written
        found = await self._read_position()
        if found is None or found.repairs != known.repairs or found.created != known.created:
            raise _Again(f"the position of projection {self.spec.name!r} was changed: {found}, and was {known}")
        self.written = found

    async def _make_sure(self) -> list[str] | None:
        """Look again at keys of which it is not known what the bucket has.

        Returns those that the leader was asked for because nothing is stored for them; None if that is not necessary.
        """
        states, bucket = self.states, self.bucket
        if unsure := states.unsure():
            loaded = await self.storing.run(bucket.load_all(unsure))
            if bucket.is_replicated and (behind := states.behind(unsure, loaded)):
                loaded |= await self.storing.run(bucket.load_from_leader(behind))
            states.look_again(unsure, loaded)
        if not bucket.is_replicated:
            return None
        if unchecked := states.unchecked():
            states.look_again(unchecked, await self.storing.run(bucket.load_from_leader(unchecked)))
        return unchecked

    async def consider_gone(self, gone: StateGone) -> None:
        """States are not there any more. All of them, and the position with them; or only some.

        Raises:
            _Again: Always: with the position gone everything is folded anew, and otherwise these keys are parked.
        """
        before, known = self.bucket.created, self.written
        self.bucket = await self.storing.run(open_bucket(self.place.bucket))
        found = await self._read_position()
        if self.bucket.created != before or (known.sequence and (found is None or found.sequence < known.sequence)):
            raise _Again(f"bucket {self.place.bucket} was made anew, or emptied: it is folded from its position")
        if found is not None and found.repairs != known.repairs:
            # What others have stored may have fewer events: a repaired fold ignores some. It goes with its position.
            raise _Again(f"keys of projection {self.spec.name!r} were repaired: it goes on from {found.sequence}")
        await self.storing.run(self.bucket.store_all(gone.changes))
        keys = ", ".join(repr(change.key) for change in gone.changes[:5])
        raise _Again(f"states were removed from bucket {self.place.bucket}: {keys} and perhaps others are parked")


class _Engine:
    """One pass over the stream: from the last position, until something changes or it is to end."""

    def __init__(
        self,
        app: App,
        places: Sequence[_Place],
        js: JetStream,
        catalogue: Catalogue,
        options: LiveOptions,
        counts: LiveCounts,
    ) -> None:
        self._app, self._js, self._options, self.counts = app, js, options, counts
        self._places = {place.spec.name: place for place in places}
        self._router = Router([place.spec for place in places], catalogue, owns_stream=app.owns_stream)
        self._is_partitioned = options.partitions > 1
        self._read = 0
        """Everything up to here is folded, or has a letter."""
        self._folded = self._stored_events = 0
        self._pending = 0
        """Events that wait in the stream, as the last one has said."""
        self._through = 0
        """Everything up to here is stored."""
        self._gap_from: int | None = None
        """Behind this sequence some were not delivered: they are for others, or the stream has dropped them."""
        self._last_event = self._gap_witness = 0
        """The last event that was read; and the last one before the gap."""
        self._work, self._room = asyncio.Event(), asyncio.Event()
        self._is_ending = False
        self._position_at = clock.now()
        self._reader: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """
        Raises:
            _Again: Begin anew.
            JetSparkError: It cannot go on.
        """
        beginning = await self._open()
        self._reader = asyncio.create_task(self._read_stream(beginning))
        writer = asyncio.create_task(self._write())
        try:
            await asyncio.wait([self._reader, writer], return_when=asyncio.FIRST_COMPLETED)
            if self._is_ending:
                await asyncio.wait([writer])
        finally:
            await _end(self._reader, writer)
        for task in (writer, self._reader):
            if not task.cancelled():
                task.result()

    def end(self) -> None:
        """Read no more, and store what was read."""
        self._is_ending = True
        if self._reader is not None:
            self._reader.cancel()
        self._work.set()

    async def _open(self) -> FoldPosition:
        stream = await self._js.stream(self._app.stream)
        beginning = FoldPosition.beginning(self._app.stream, stream.cached_info.created)
        await asyncio.gather(*(place.open(beginning) for place in self._places.values()))
        self._read = self._through = min(place.start for place in self._places.values())
        first = first_ever(stream.cached_info.config)
        for place in self._places.values():
            place.note_beginning(first, await self._whole_from(place.reached_event))
        self._last_event = min(place.reached_event for place in self._places.values())
        return beginning

    async def _whole_from(self, witness: int) -> int:
        """From where on the stream has lost no event, as an event that was read bears witness."""
        context = context_of(self._js)
        info = await (await self._js.stream(self._app.stream)).info()
        return (await context.run(front_of(context.api, info, witness))).whole_from

    # ---- reading -----------------------------------------------------------------------------------------------

    async def _read_stream(self, beginning: FoldPosition) -> None:
        options = OrderedOptions(filter_subjects=self._router.reading, start_sequence=self._read + 1)
        reading = Reading(context_of(self._js), self._app.stream, options)
        try:
            await reading.start()
            info = await (await self._js.stream(self._app.stream)).info()
            if FoldPosition.beginning(self._app.stream, info.created) != beginning:
                raise _Again(f"stream {self._app.stream} was made anew")
            while messages := await reading.some():
                for at in range(0, len(messages), PIECE):
                    await self._fold(messages[at : at + PIECE])
        finally:
            await reading.close()

    async def _fold(self, messages: Sequence[JetStreamMessage]) -> None:
        places = self._places
        rows: dict[str, list[KeyRow]] = {name: [] for name in places}
        failed = self._router.sort([recorded_of(message) for message in messages], rows)
        sequence = sequence_of(messages[-1])
        if sequence - self._read != len(messages) and self._gap_from is None:
            self._gap_from, self._gap_witness = self._read, self._last_event
        for name, place in places.items():
            mine = rows[name]
            if mine:
                place.note_events(mine)
                self._last_event = max(self._last_event, mine[-1][1])
            if self._read < place.start:  # this one is further than others
                mine = [row for row in mine if row[1] > place.start]
            if self._is_partitioned:
                mine = [row for row in mine if place.is_mine(row[0])]
            if mine:
                await place.load(mine)
                place.states.apply(mine)
                place.states.shrink()
        for recorded, failures in failed:
            [message] = [each for each in messages if sequence_of(each) == recorded.sequence]
            await self._write_letter(message, failures)
        self._read, self._pending = sequence, messages[-1].metadata.pending
        self._folded += len(messages)
        self.counts.events += len(messages)
        self._work.set()
        while self._folded - self._stored_events >= self._options.batch:
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
        attempt = 0
        while True:
            try:
                await write_unreadable(self._js, self._app.name, message, failures)
            except JetSparkError as error:
                if not error.may_pass:
                    raise
                attempt += 1
                await asyncio.sleep(PAUSE.wait_s(attempt))
            else:
                self.counts.letters += 1
                return

    # ---- writing -----------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        options = self._options
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(options.position_every_s):
                    await self._work.wait()
            self._work.clear()
            if not self._is_ending and not self._is_full():
                await asyncio.sleep(options.batch_wait_s)
                while not self._is_ending and not self._is_full() and self._is_far_behind():
                    await self._work.wait()
                    self._work.clear()
            await self._store()
            if self._is_ending and self._reader is not None and self._reader.done():
                await self._store()
                return

    def _is_full(self) -> bool:
        return 2 * (self._folded - self._stored_events) >= self._options.batch

    def _is_far_behind(self) -> bool:
        """Whether what waits in the stream fills a batch: then nobody waits for the first of it."""
        return 2 * (self._folded - self._stored_events + self._pending) >= self._options.batch

    async def _store(self) -> None:
        while True:
            through, folded = self._read, self._folded
            for place in self._places.values():
                place.take_event()
            now = clock.now()
            with_position = self._is_ending or now - self._position_at >= self._options.position_every_s
            if with_position:
                self._position_at = now
                await self._look_for_losses()
            done = await _all([self._store_in(place, with_position) for place in self._places.values()])
            self._tell_parked()
            if all(done):
                for place in self._places.values():
                    place.settle_event()
                self._through, self._stored_events = through, folded
                self.counts.position = through
                self.counts.batches += 1
                self._room.set()
                return

    async def _look_for_losses(self) -> None:
        """Before a position passes by sequences that did not come: whether the stream still had them."""
        gap_from, self._gap_from = self._gap_from, None
        if gap_from is None:
            return
        whole_from = await self._whole_from(self._gap_witness)
        if whole_from > gap_from + 1:
            for place in self._places.values():
                place.note_missed(gap_from + 1, whole_from - 1)

    async def _store_in(self, place: _Place, with_position: bool) -> bool:
        try:
            return await place.store(self._through, self.counts, with_position=with_position)
        except StateGone as gone:
            await place.consider_gone(gone)
            raise AssertionError from None

    def _tell_parked(self) -> None:
        for name, place in self._places.items():
            told = self.counts.parked.setdefault(name, {})
            parked = place.states.parked
            if told != parked:
                for key, why in parked.items():
                    if told.get(key) != why:
                        _logger.error("projection %s: key %s is parked at event %d: %s", name, key, *why)
                self.counts.parked[name] = dict(parked)


class ProjectionWorker:
    """The projections of an application in one process; others stand by.

    Args:
        specs: The projections to run.
        owner: A name that no other process has.
    """

    def __init__(
        self,
        app: App,
        specs: Sequence[ProjectionSpec],
        js: JetStream,
        *,
        catalogue: Catalogue,
        options: LiveOptions | None = None,
        owner: str | None = None,
    ) -> None:
        self.app, self._specs, self._js, self._catalogue = app, tuple(specs), js, catalogue
        self._options = options or LiveOptions()
        self._owner = owner or secrets.token_hex(8)
        self.counts = LiveCounts()
        self._engine: _Engine | None = None
        self._is_stopping = False
        self.is_active = False
        """Whether it has the lease, and does not stand by."""

    @property
    def name(self) -> str:
        return "+".join(sorted(spec.name for spec in self._specs))

    async def run(self) -> None:
        """Work until :meth:`stop` is called or the task is cancelled.

        Raises:
            UsageError: A projection is at another version, or of another stream.
            StreamRecreated, StreamWentBack, StreamNotFound: The stream is not what it was.
            JetSparkError: The server refuses something for good.
        """
        records = await self._open_records()
        if self._options.partitions > 1:
            await self._run_partitions(records)
            return
        key = f"lease.{escape_token(self.name)}"
        lease = Lease(records, key, self._owner, lease_s=self._options.lease_s)
        while not self._is_stopping:
            await lease.acquire()
            self.is_active = True
            try:
                await self._work(lease, records)
            except LeaseLost as error:
                _logger.warning("app %s: %s; it stands by", self.app.name, error)
                await lease.leave(error.owner)
            finally:
                self.is_active = False
                await lease.release()

    async def _run_partitions(self, records: KeyValue) -> None:
        options = self._options
        shares = PartitionShares(
            records, self.name, self._owner, partitions=options.partitions, lease_s=options.lease_s
        )
        taking = asyncio.create_task(shares.run())
        try:
            while not self._is_stopping:
                await shares.settle()
                if shares.wanted:
                    self.is_active = True
                    await self._work_on(shares, shares.wanted, records, taking)
                    self.is_active = False
                else:
                    await self._until_changed(shares, taking)
        finally:
            self.is_active = False
            await _end(taking)
        if not taking.cancelled():
            taking.result()

    async def _until_changed(self, shares: PartitionShares, taking: asyncio.Task[None]) -> None:
        changed = asyncio.create_task(shares.changed.wait())
        try:
            await asyncio.wait([changed, taking], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(changed)
        if taking.done():
            taking.result()

    async def _work_on(
        self, shares: PartitionShares, held: frozenset[int], records: KeyValue, taking: asyncio.Task[None]
    ) -> None:
        """Fold some partitions, until others are to be folded."""
        work = asyncio.create_task(self._work(None, records, held))
        changed = asyncio.create_task(self._until_others(shares, held, taking))
        try:
            await asyncio.wait([work, changed], return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not shares.lost and self._engine is not None:
                self._engine.end()  # store what was read, for the one that comes next
                await asyncio.wait([work], timeout=self._options.lease_s / 2)
        finally:
            await _end(work, changed)
        for task in (work, changed):
            if not task.cancelled():
                task.result()

    async def _until_others(self, shares: PartitionShares, held: frozenset[int], taking: asyncio.Task[None]) -> None:
        while shares.wanted == held:
            shares.changed.clear()
            await self._until_changed(shares, taking)

    async def _open_records(self) -> KeyValue:
        attempt = 0
        while True:
            try:
                return await open_records(self._js, self.app.name)
            except JetSparkError as error:
                if not error.may_pass:
                    raise
                attempt += 1
                _logger.warning("app %s: projections: %s", self.app.name, error)
                await asyncio.sleep(PAUSE.wait_s(attempt))

    async def stop(self, runners: asyncio.Task[None], timeout: float) -> None:
        """Read no more, and store what was read, for at most ``timeout`` seconds.

        ``runners`` is the task of :meth:`run`.
        """
        self._is_stopping = True
        if self._engine is None:
            runners.cancel()
        else:
            self._engine.end()
        done, _ = await asyncio.wait([runners], timeout=timeout)
        if not done:
            runners.cancel()
            await asyncio.wait([runners])

    async def _work(self, lease: Lease | None, records: KeyValue, held: frozenset[int] | None = None) -> None:
        failures = 0
        while not self._is_stopping:
            before = self.counts.position
            try:
                await self._run_once(lease, records, held)
                return
            except _Again as reason:
                _logger.warning("app %s: %s", self.app.name, reason)
            except JetSparkError as error:
                if not error.may_pass:
                    raise
                _logger.warning("app %s: projections: %s", self.app.name, error)
            self.counts.restarts += 1
            failures = 0 if self.counts.position > before else failures + 1
            if failures:
                await asyncio.sleep(PAUSE.wait_s(failures))

    async def _run_once(self, lease: Lease | None, records: KeyValue, held: frozenset[int] | None) -> None:
        found = {spec.name: (await find_place(records, spec)).place for spec in self._specs}
        places = [
            _Place(spec, check_version(spec, found[spec.name]), self._js, self._options, held) for spec in self._specs
        ]
        engine = _Engine(self.app, places, self._js, self._catalogue, self._options, self.counts)
        self._engine = engine
        watching = [self._follow(records, spec, found) for spec in self._specs]
        try:
            keeping = [] if lease is None else [lease.keep()]
            async with _beside([*keeping, *watching]) as others:
                main = asyncio.create_task(engine.run())
                try:
                    await asyncio.wait([main, *others], return_when=asyncio.FIRST_COMPLETED)
                    for task in (main, *others):
                        if task.done():
                            task.result()
                finally:
                    await _end(main)
        finally:
            self._engine = None

    async def _follow(self, records: KeyValue, spec: ProjectionSpec, found: Mapping[str, ProjectionPlace]) -> None:
        """Notice that a projection was swapped to another bucket."""
        async for alias in watch_place(records, spec):
            if alias.place != found[spec.name]:
                check_version(spec, alias.place)
                raise _Again(f"projection {spec.name!r} is in bucket {alias.place.bucket} now")
        await asyncio.Event().wait()  # the connection is closed: the reader says so


_new = tuple.__new__


def recorded_of(message: JetStreamMessage) -> Recorded:
    """What projections see of a message."""
    tokens = (message.raw_reply or b"").split(b".")
    if len(tokens) != 9:
        metadata = message.metadata
        sequence, time_us = metadata.stream_sequence, microseconds(metadata.timestamp)
    else:
        sequence, time_us = int(tokens[5]), int(tokens[7]) // 1000
    # What the constructor of a named tuple does, in half the time.
    return _new(Recorded, (sequence, message.subject, message.data, message.raw_headers, time_us))


def sequence_of(message: JetStreamMessage) -> int:
    return message.metadata.stream_sequence


@asynccontextmanager
async def _beside(work: Sequence[Coroutine[Any, Any, None]]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Tasks that end with the block."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        await _end(*tasks)


async def _all(work: Sequence[Coroutine[Any, Any, bool]]) -> list[bool]:
    """All at a time; raises when all have ended, so that none goes on behind our back."""
    if len(work) == 1:
        return [await work[0]]
    done = await asyncio.gather(*work, return_exceptions=True)
    for each in done:
        if isinstance(each, BaseException):
            raise each
    return [each is True for each in done]


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
