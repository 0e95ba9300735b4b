"""One projection of a live engine in its bucket: its states in hand, what of them is stored, and its position.

Without partitions the position goes with the states, behind them in the same batch. With partitions each has its own,
and that of the bucket is the lowest of all.
"""

from __future__ import annotations

import logging

from jetspark.aio.context import context_of
from jetspark.aio.jetstream import JetStream
from jetspark.aio.steps import ProcedureRunner
from jetspark.app.projections.bucket_refs import BucketRef
from jetspark.app.projections.leases import part_of
from jetspark.app.projections.live_options import LiveCounts, LiveOptions, RestartPass
from jetspark.app.projections.live_states import CacheLimits, LiveStates, StateGone
from jetspark.app.projections.positions import (
    FoldPosition,
    StoredPosition,
    part_name,
    part_start,
    position_change,
    read_part_positions,
    read_position,
    start_of,
)
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.router import KeyRows
from jetspark.app.projections.state_header import position_key
from jetspark.state.changes import Outcome
from jetspark.state.rounds import store_round
from jetspark.state.store import StateBucket, open_bucket

__all__ = ["LiveProjection"]

_logger = logging.getLogger("jetspark.app")


class LiveProjection:
    """One projection in its bucket; with ``held``, some partitions of it."""

    def __init__(
        self,
        spec: ProjectionSpec,
        place: BucketRef,
        js: JetStream,
        options: LiveOptions,
        held: frozenset[int] | None = None,
    ) -> None:
        self.spec, self.place = spec.within(context_of(js).client.max_payload_bytes), place
        self._partitions, self._held = options.partitions, held
        self._part_revisions: list[int] = []
        self.states = LiveStates(self.spec, CacheLimits(options.cache_keys, options.cache_bytes))
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
        if found is None:
            # Before anything is folded: a bucket of the same name that is made later has no position that a write of
            # this one could expect, so the position of states that are gone with their bucket is refused there.
            await self.storing.run(self.bucket.store_all([position_change(self.written, self.revision)]))
            found = await self._read_position()  # this one, or that of another engine
            self.written = start_of(found, beginning, projection=name, bucket=bucket, version=self.spec.version)
        self.start = self.written.sequence
        if self._held is not None:
            parts = await self._create_part_positions()
            self.start = min(part_start(parts[part].position, self.written) for part in self._held)
        self.reached_event = self.written.last_event

    def check_stream_start(self, first: int, whole_from: int) -> None:
        """Where the stream once began, and from where on nothing of it is lost."""
        self.report_missed(max(self.start + 1, first), whole_from - 1)
        self._is_from_first = self.start == 0 and self._missed is None

    def count_events(self, rows: KeyRows) -> None:
        """Some of the events that were read."""
        self._first_event = self._first_event or rows.sequences[0]
        self._last_event = rows.sequences[-1]

    def begin_storing(self) -> None:
        """What was read until now is going to be stored."""
        self._taken_event = self._last_event

    def end_storing(self) -> None:
        """It is stored."""
        self.reached_event = max(self.reached_event, self._taken_event)

    def _reaching(self, sequence: int) -> FoldPosition:
        """The position, further on."""
        last = self.reached_event if self.reached_event <= sequence else 0
        return self.written.reaching(sequence, self._first_event if self._is_from_first else 0, last)

    def is_mine(self, key: str) -> bool:
        return self._held is None or part_of(key, self._partitions) in self._held

    async def _read_parts(self) -> list[StoredPosition]:
        """The position of each partition."""
        parts = await self.storing.run(read_part_positions(self.bucket, self._partitions))
        self._part_revisions = [part.revision for part in parts]
        return parts

    async def _create_part_positions(self) -> list[StoredPosition]:
        """The position of each partition; ours are there before anything is folded, as that of the whole is."""
        assert self._held is not None
        parts = await self._read_parts()
        beginning = self.written._replace(missed=None)
        new = [
            position_change(beginning, parts[part].revision, part_name(part, self._partitions))
            for part in sorted(self._held)
            if parts[part].position is None
        ]
        if new:
            await self.storing.run(self.bucket.store_all(new))
            parts = await self._read_parts()
        return parts

    def report_missed(self, first: int, last: int) -> None:
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
        noted = await self.storing.run(read_position(self.bucket))
        self.revision = noted.revision
        return noted.position

    async def load(self, rows: KeyRows) -> None:
        """Have the states of these rows at hand."""
        missing = self.states.missing(rows)
        if missing:
            self.states.add(missing, await self.loading.run(self.bucket.load_all(missing)))

    async def store(self, through: int, counts: LiveCounts, *, with_position: bool) -> bool:
        """Store what has changed; False if something has to be stored again because others wrote it, too.

        Args:
            through: Everything up to this sequence is stored already.
        """
        if self._held is not None:
            outcome = await self._store_round(None, counts)
            if with_position:
                await self._store_parts(through)
            return not outcome.conflicts
        wanted: FoldPosition | None = None
        if with_position and (through > self.written.sequence or self._missed is not None):
            wanted = self._reaching(max(through, self.written.sequence))
            if self._missed is not None:
                wanted = wanted.missing(*self._missed)
        outcome = await self._store_round(wanted, counts)
        if wanted is not None:
            await self._confirm_position(wanted, outcome)
        return not set(outcome.conflicts) - {position_key()}

    async def _store_round(self, position: FoldPosition | None, counts: LiveCounts) -> Outcome:
        also = [] if position is None else [position_change(position, self.revision)]
        outcome = await self.storing.run(store_round(self.bucket, self.states, also))
        counts.stored += outcome.written
        counts.conflicts += len(outcome.conflicts) - (position_key() in outcome.conflicts)
        return outcome

    async def _store_parts(self, through: int) -> None:
        """The positions of our partitions, then that of the bucket, which is the lowest of all."""
        assert self._held is not None
        wanted = self.written._replace(sequence=through, missed=None)
        mine = [
            position_change(wanted, self._part_revisions[part], part_name(part, self._partitions))
            for part in sorted(self._held)
        ]
        if through > self.start:
            await self.storing.run(self.bucket.store_all(mine))  # refused where another process has it, too
        known, found = self.written, await self._read_position()
        if found is None or found.repairs != known.repairs or found.created != known.created:
            raise self._changed(found, known)
        self.written = found._replace(version=known.version)
        parts = await self._read_parts()
        whole = self._reaching(min(part_start(part.position, self.written) for part in parts))
        if self._missed is not None:
            whole = whole.missing(*self._missed)
        if whole != self.written:
            outcome = await self.storing.run(self.bucket.store_all([position_change(whole, self.revision)]))
            if not outcome.conflicts:
                self.written, self._missed = whole, None

    async def _confirm_position(self, wanted: FoldPosition, outcome: Outcome) -> None:
        revision = outcome.revisions.get(position_key())
        if revision is not None:
            self.written, self.revision, self._missed = wanted, revision, None
            return
        # Refused, or stored under a revision that nobody has said.
        known, found = self.written, await self._read_position()
        if found is None or found.repairs != known.repairs or found.created != known.created:
            raise self._changed(found, known)
        self.written = found
        if found == wanted:
            self._missed = None

    def _changed(self, found: FoldPosition | None, known: FoldPosition) -> RestartPass:
        return RestartPass(f"the position of projection {self.spec.name!r} was changed: {found}, and was {known}")

    async def handle_gone(self, gone: StateGone) -> None:
        """States are not there any more. All of them, and the position with them; or only some.

        Raises:
            RestartPass: Always: with the position gone everything is folded anew, and otherwise these keys are parked.
        """
        before, known = self.bucket.created, self.written
        self.bucket = await self.storing.run(open_bucket(self.place.bucket))
        found = await self._read_position()
        if self.bucket.created != before or (known.sequence and (found is None or found.sequence < known.sequence)):
            raise RestartPass(f"bucket {self.place.bucket} was made anew, or emptied: it is folded from its position")
        if found is not None and found.repairs != known.repairs:
            # What others have stored may have fewer events: a repaired fold ignores some. It goes with its position.
            raise RestartPass(f"keys of projection {self.spec.name!r} were repaired: it goes on from {found.sequence}")
        await self.storing.run(self.bucket.store_all(gone.changes))
        keys = ", ".join(repr(self.spec.key_text(change.key)) for change in gone.changes[:5])
        raise RestartPass(f"states were removed from bucket {self.place.bucket}: {keys} and perhaps others are parked")
