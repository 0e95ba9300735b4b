"""One projection of a live engine: its cached states, and its position in the bucket.

Without partitions the position is written after the states, in the same batch. With partitions each partition has a
position of its own, and the position of the bucket is the lowest of them.
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
    """Loads and stores the states of one projection; with ``held`` only the keys of those partitions."""

    def __init__(
        self,
        spec: ProjectionSpec,
        ref: BucketRef,
        js: JetStream,
        options: LiveOptions,
        held: frozenset[int] | None = None,
    ) -> None:
        self.spec, self.ref = spec.within(context_of(js).client.max_payload_bytes), ref
        self._partitions, self._held = options.partitions, held
        self._part_revisions: list[int] = []
        self.states = LiveStates(self.spec, CacheLimits(options.cache_keys, options.cache_bytes))
        self.bucket: StateBucket
        self.written: FoldPosition
        """The position in the bucket."""
        self.revision = 0
        self.start = 0
        self._missed: tuple[int, int] | None = None
        """Range of events that the stream dropped before they were read, until it is in the stored position."""
        self._first_event = self._last_event = 0
        self._is_from_first = False
        """The engine reads from the first event of the stream."""
        self._taken_event = self.reached_event = 0
        """Sequences of the last event that is being stored, and of the last event stored."""
        # A runner runs one procedure at a time: with two of them storing does not wait for loading.
        self.loading, self.storing = ProcedureRunner(js), ProcedureRunner(js)

    async def open(self, beginning: FoldPosition) -> None:
        self.bucket = await self.storing.run(open_bucket(self.ref.bucket))
        found = await self._read_position()
        name, bucket = self.spec.name, self.ref.bucket
        self.written = start_of(found, beginning, projection=name, bucket=bucket, version=self.spec.version)
        if found is None:
            # Before the first fold: a bucket that is re-created later under this name has no position with the revision
            # that this engine expects, so the server refuses the position of states that the new bucket lacks.
            await self.storing.run(self.bucket.store_all([position_change(self.written, self.revision)]))
            found = await self._read_position()  # ours, or that of another engine
            self.written = start_of(found, beginning, projection=name, bucket=bucket, version=self.spec.version)
        self.start = self.written.sequence
        if self._held is not None:
            parts = await self._create_part_positions()
            self.start = min(part_start(parts[part].position, self.written) for part in self._held)
        self.reached_event = self.written.last_event

    def check_stream_start(self, first: int, whole_from: int) -> None:
        """Report events that the stream lost before they were read.

        Args:
            first: Sequence of the first message that the stream ever had.
            whole_from: The stream has lost no event from this sequence on.
        """
        self.report_missed(max(self.start + 1, first), whole_from - 1)
        self._is_from_first = self.start == 0 and self._missed is None

    def count_events(self, rows: KeyRows) -> None:
        """Remember the first and the last event that were read."""
        self._first_event = self._first_event or rows.sequences[0]
        self._last_event = rows.sequences[-1]

    def begin_storing(self) -> None:
        """All events read so far are about to be stored."""
        self._taken_event = self._last_event

    def end_storing(self) -> None:
        """The events of the last :meth:`begin_storing` are stored."""
        self.reached_event = max(self.reached_event, self._taken_event)

    def _reaching(self, sequence: int) -> FoldPosition:
        """The stored position advanced to ``sequence``."""
        last = self.reached_event if self.reached_event <= sequence else 0
        return self.written.reaching(sequence, self._first_event if self._is_from_first else 0, last)

    def is_mine(self, key: str) -> bool:
        return self._held is None or part_of(key, self._partitions) in self._held

    async def _read_parts(self) -> list[StoredPosition]:
        parts = await self.storing.run(read_part_positions(self.bucket, self._partitions))
        self._part_revisions = [part.revision for part in parts]
        return parts

    async def _create_part_positions(self) -> list[StoredPosition]:
        """The position of each partition. Missing positions of our partitions are created before the first fold."""
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
        """The stream dropped events between two sequences before they were read: log it, and keep the range."""
        if max(first, self.start + 1) <= last:
            _logger.error(
                "projection %s: the stream dropped events up to %d, but only those up to %d were read; the range is "
                "kept in its position",
                self.spec.name,
                last,
                first - 1,
            )
            self._missed = self.written._replace(missed=self._missed).missing(max(first, self.start + 1), last).missed

    async def _read_position(self) -> FoldPosition | None:
        stored = await self.storing.run(read_position(self.bucket))
        self.revision = stored.revision
        return stored.position

    async def load(self, rows: KeyRows) -> None:
        """Load the states of these rows into the cache, where they are missing."""
        missing = self.states.missing(rows)
        if missing:
            self.states.add(missing, await self.loading.run(self.bucket.load_all(missing)))

    async def store(self, through: int, counts: LiveCounts, *, with_position: bool) -> bool:
        """Store the changed states; False if keys are in conflict and must be stored again.

        Args:
            through: Every event up to this sequence is stored already.
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
        """Write the positions of our partitions, then the position of the bucket: the lowest of all partitions."""
        assert self._held is not None
        wanted = self.written._replace(sequence=through, missed=None)
        mine = [
            position_change(wanted, self._part_revisions[part], part_name(part, self._partitions))
            for part in sorted(self._held)
        ]
        if through > self.start:
            await self.storing.run(self.bucket.store_all(mine))  # refused if another process folds the same partition
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
        # Refused, or stored under an unknown revision.
        known, found = self.written, await self._read_position()
        if found is None or found.repairs != known.repairs or found.created != known.created:
            raise self._changed(found, known)
        self.written = found
        if found == wanted:
            self._missed = None

    def _changed(self, found: FoldPosition | None, known: FoldPosition) -> RestartPass:
        return RestartPass(
            f"the position of projection {self.spec.name!r} has changed from {known} to {found}; it is read again"
        )

    async def handle_gone(self, gone: StateGone) -> None:
        """States were removed from the bucket: some of them, or all of them with the position.

        Raises:
            RestartPass: Always. Without a position the engine folds from the first event; otherwise the keys are stuck.
        """
        before, known = self.bucket.created, self.written
        self.bucket = await self.storing.run(open_bucket(self.ref.bucket))
        found = await self._read_position()
        if self.bucket.created != before or (known.sequence and (found is None or found.sequence < known.sequence)):
            raise RestartPass(
                f"bucket {self.ref.bucket} was re-created or emptied; folding continues from its position"
            )
        if found is not None and found.repairs != known.repairs:
            # A repaired state may have fewer events than before; its repair also moved the position back.
            raise RestartPass(
                f"keys of projection {self.spec.name!r} were repaired; folding continues from event {found.sequence}"
            )
        await self.storing.run(self.bucket.store_all(gone.changes))
        keys = ", ".join(repr(self.spec.key_text(change.key)) for change in gone.changes[:5])
        raise RestartPass(f"states were removed from bucket {self.ref.bucket}; {keys} and perhaps others are stuck")
