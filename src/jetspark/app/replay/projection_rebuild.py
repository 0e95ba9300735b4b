"""Rebuilding a projection beside the live one, and swapping buckets.

The whole history is folded into a *shadow* bucket, ``<bucket>_v<version>`` (or ``<bucket>_v<version>_r<n>``, if that
name is taken), which has no readers. The live bucket is not touched, and its engine runs. The shadow has a position, so
a rebuild that was killed continues there. On request the shadow is verified against a fresh fold, brought to the end of
the stream, and swapped in: one compare-and-set on the record that names the projection's bucket
(:mod:`jetspark.app.projections.bucket_refs`). Live engines of this version and readers follow; engines of another
version stop folding the projection. The old bucket is kept until it is dropped.

If the stream no longer has its first events, the shadow begins with the states of another bucket
(:mod:`jetspark.app.replay.state_base`). The record has the name of that bucket, and the first event that was folded
onto its states.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetspark.aio import clock
from jetspark.aio.steps import ProcedureRunner
from jetspark.app.extents import Extent, ReplayRequest
from jetspark.app.layout import as_safe
from jetspark.app.projections.bucket_refs import Alias, BucketRef, find_bucket, open_records, swap
from jetspark.app.projections.live_states import CACHE, LiveStates, StateGone
from jetspark.app.projections.positions import (
    FoldPosition,
    StoredPosition,
    position_change,
    read_position,
    start_of,
)
from jetspark.app.projections.state_header import position_key
from jetspark.app.replay.history import Events, FoldEngine, FoldOptions, History, spec_of
from jetspark.app.replay.live_bucket import paused_engines, stored_position
from jetspark.app.replay.replay_records import (
    ReplayJob,
    ReplayRecord,
    begin_replay,
    find_replay,
    new_record,
    resume_replay,
    run_job,
)
from jetspark.app.replay.state_base import StateBase
from jetspark.app.replay.verification import Verification, verify_bucket
from jetspark.app.stream_history import ReadingRate
from jetspark.app.topology.declared import OWNER
from jetspark.core.arguments import text
from jetspark.core.numbers import seconds
from jetspark.errors import ConfigError, ProjectionDiffers, StreamNameInUse, StreamNotFound, UsageError
from jetspark.jetstream.kv import KVConfig
from jetspark.state.changes import Change, some_keys
from jetspark.state.rounds import store_round
from jetspark.state.store import StateBucket, open_bucket

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.aio.kv import KeyValue
    from jetspark.app.projections.projection_spec import ProjectionSpec
    from jetspark.app.spec import AppSpec, HasSpec
    from jetspark.lake.reading import ArchiveRoot

__all__ = ["RebuildOptions", "RebuildOutcome", "drop_rebuild", "rebuild"]

# The shadow is close to the end of the stream when a round took no longer than this.
CLOSE_S = 0.5
# Rounds until the shadow is as close as it gets.
MAX_ROUNDS = 1000
# The record and the position are written this often.
SAVE_EVERY_S = 1.0
MAX_NAMES = 100
# The key of a bucket's metadata with the id of the rebuild that created the bucket.
MAKER = "jetspark-rebuild"
# A key that a rebuild writes before it folds. It is never written again.
BEGUN = position_key("begun")
MAX_NAMED = 5
# Sequences that another engine folds at a time: a killed rebuild continues after the last range that was folded.
ENGINE_RANGE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildOptions:
    """Options of :func:`rebuild`."""

    check: bool = False
    """Verify the new bucket against a second, fresh fold before it is swapped in."""
    swap: bool = False
    """Switch the projection to the new bucket."""
    drop_old: bool = False
    """Remove the old bucket after the swap; a bucket that the application declares is emptied instead. With ``resume``
    of a rebuild that is swapped already, nothing else is done.
    """
    drop_after_s: float = 2.0
    """How long readers have, after the swap, to finish reading the old bucket. Views follow within milliseconds."""
    rate: float | None = None
    """Events folded each second, at most, until the new bucket is close to the end of the stream."""
    resume: str | None = None
    """The id of a rebuild that was interrupted, or is not swapped yet."""
    from_bucket: str | None = None
    """Copy the states of this bucket, and fold the events after its position onto them: for streams that no longer have
    their first events. The same version of the projection has to have made the bucket of the same stream; it may be the
    one in use. The states are taken as they are, so ``check`` is not possible.
    """

    def __post_init__(self) -> None:
        seconds("drop_after_s", self.drop_after_s)
        if self.drop_old and not self.swap:
            raise ConfigError("drop_old=True needs swap=True, since only a swap makes the bucket in use an old one")
        if self.from_bucket is not None:
            text("from_bucket", self.from_bucket, "the name of a bucket")
            if self.resume is not None:
                raise ConfigError(
                    "resume and from_bucket exclude each other: a resumed rebuild continues with its own bucket"
                )


@dataclass(slots=True, kw_only=True)
class RebuildOutcome:
    """The result of a rebuild."""

    record: ReplayRecord
    old: BucketRef
    new: BucketRef
    verification: Verification | None = None
    is_swapped: bool = False
    swap_s: float | None = None
    """How long live engines were paused for the swap, in seconds."""
    is_old_dropped: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "record": self.record.to_dict(),
            "old": self.old._asdict(),
            "new": self.new._asdict(),
            "verification": None if self.verification is None else self.verification.to_dict(),
            "swapped": self.is_swapped,
            "swap_s": self.swap_s,
            "old_dropped": self.is_old_dropped,
        }

    def __str__(self) -> str:
        lines = [str(self.record)]
        if self.verification is not None:
            lines.append(str(self.verification))
        if self.is_swapped:
            kept = "dropped" if self.is_old_dropped else f"kept: --resume {self.record.id} --swap --drop-old"
            when = "before" if self.swap_s is None else f"in {self.swap_s:.3f} s"
            lines.append(f"swapped {when}: {self.old.bucket} -> {self.new.bucket}; the old is {kept}")
        else:
            lines.append(f"bucket {self.new.bucket} is not in use: jetspark rebuild --resume {self.record.id} --swap")
        return "\n".join(lines)


async def rebuild(
    js: JetStream,
    app: HasSpec,
    projection: str,
    options: RebuildOptions | None = None,
    *,
    on_progress: Callable[[ReplayRecord], object] = lambda record: None,
    engine: FoldEngine | None = None,
    archive: ArchiveRoot | str | None = None,
) -> RebuildOutcome:
    """Fold the whole history of a projection into a bucket beside the live one, and optionally verify and swap it.

    Args:
        archive: The root of an archive with the stream: older events come from there. The stream need not exist any
            more.
        on_progress: Called with the record at the beginning, about every second, and at the end.
        engine: Folds the history, and the second fold of ``check``, in place of this process; it does not support
            ``rate``.

    Raises:
        DataLoss: The stream no longer has its first events; with ``from_bucket``, events after its position are gone.
        ProjectionDiffers: The new bucket differs from its history; it was not swapped.
        Conflict: Another process has swapped the projection's bucket in the meantime.
        UsageError: Another process has resumed this rebuild; or the states of ``from_bucket`` may be wrong.
    """
    app, options = app.spec, options or RebuildOptions()
    fold = FoldOptions.of(options.rate, engine, archive=archive)
    spec, records = spec_of(app, projection, js), await open_records(js, app.name)
    alias = await find_bucket(records, spec)
    known = None
    if options.resume is not None:
        known = await find_replay(records, spec, options.resume, "rebuild")
        if (ended := await _resume_swapped(js, spec, alias.ref, known, options)) is not None:
            return ended
    history = await History.open(js, app, spec, alias.ref.bucket, archive=fold.archive, may_be_other_stream=True)
    base = await _base_of(history, options, None if known is None else known.record)
    job, extent = await _job_of(app, records, history, options.resume, base)
    new = BucketRef(job.record.bucket, spec.version)
    outcome = RebuildOutcome(record=job.record, old=alias.ref, new=new)
    work = _Rebuild(history, extent, job, outcome, on_progress, base)
    on_progress(job.record)
    await run_job(job, work.run(fold, check=options.check))
    if options.swap:
        await work.swap(records, alias)
    if options.drop_old:  # which needs swap
        await work.drop_replaced(alias.ref.bucket, options.drop_after_s)
    on_progress(job.record)
    return outcome


async def _base_of(history: History, options: RebuildOptions, record: ReplayRecord | None) -> StateBase | None:
    """The states to copy; None for a rebuild from the first event, and after the copy."""
    bucket, begin = options.from_bucket, 0
    if record is not None:
        bucket, begin = record.base or None, record.first
    if options.check and bucket is not None:
        raise ConfigError(
            f"check is not possible with from_bucket={bucket!r}: the stream no longer has the events that its states "
            "could be compared with"
        )
    if record is not None and record.base and record.bucket:
        copied = (await stored_position(history.js, record.bucket)).position
        if copied is not None and copied.sequence >= max(1, begin - 1):
            bucket, history.first_event = None, copied.last_event
    if bucket is None:
        return None
    base = await StateBase.find(history, bucket)
    begin = begin or base.begin
    # The last event of the base proves that the stream is whole only if all events to read come after it.
    history.first_event = base.position.last_event if base.position.last_event < begin else 0
    return base


async def _resume_swapped(
    js: JetStream, spec: ProjectionSpec, place: BucketRef, job: ReplayJob, options: RebuildOptions
) -> RebuildOutcome | None:
    """Finish a rebuild that is swapped already; None for a rebuild with more work left."""
    if job.record.bucket == place.bucket and not job.record.is_done:
        # An earlier process has swapped it, and ended before it could save that.
        await job.save(status="swapped")
        if options.swap and not options.drop_old:
            return _swapped_before(job.record)
    if job.record.status == "swapped" and options.drop_old:
        return await _drop_replaced(js, spec, place, job)
    return None


async def _job_of(
    app: AppSpec, records: KeyValue, history: History, resume: str | None, base: StateBase | None
) -> tuple[ReplayJob, Extent]:
    """A rebuild, resumed or new, with its bucket in the record; and the range to fold."""
    js, spec, bucket = history.js, history.spec, ""
    if resume is not None:
        job = await resume_replay(records, spec, resume, "rebuild")
        if job.record.base:
            extent = await history.between(job.record.extent, job.record.first, await history.last())
        else:
            extent = await history.whole()
            await history.between(job.record.extent, extent.first, extent.last)
        bucket = job.record.bucket or await _find_shadow(js, spec, job.record)
    else:
        extent = await history.whole() if base is None else await history.since(base.begin)
        named = "" if base is None else base.bucket
        job = await begin_replay(records, new_record(spec, "rebuild", "", ReplayRequest(), extent, named))
    if not job.record.bucket:  # also if an earlier process ended before it could save one
        await job.save(bucket=bucket or await _make_shadow(js, app, spec, job.record.id))
    return job, extent


async def _make_shadow(js: JetStream, app: AppSpec, spec: ProjectionSpec, id: str) -> str:
    """Create a bucket with the declared settings and the stream's replicas."""
    like: KVConfig = as_safe(app, spec.bucket_config)
    if like.replicas is None:
        with suppress(StreamNotFound):  # it was deleted, and is read from its archive
            like = dataclasses.replace(like, replicas=(await js.stream(app.stream)).cached_info.config.replicas)
    names = _shadow_names(spec, spec.version)
    for name in names:
        try:
            await js.kv(name)
        except StreamNotFound:
            pass
        else:
            continue
        # The metadata differs from a bucket that another process creates at the same time, so one of them is refused.
        metadata = {**(spec.bucket.metadata or {}), OWNER: app.name, MAKER: id}
        try:
            await js.create_kv(dataclasses.replace(like, bucket=name, metadata=metadata))
        except StreamNameInUse:
            continue
        return name
    raise ConfigError(f"{MAX_NAMES} buckets {names[0]}, {names[1]}, ... are there: delete those that are not in use")


def _shadow_names(spec: ProjectionSpec, version: int) -> list[str]:
    base = f"{spec.bucket.bucket}_v{version}"
    return [base, *(f"{base}_r{number}" for number in range(1, MAX_NAMES))]


async def _find_shadow(js: JetStream, spec: ProjectionSpec, record: ReplayRecord) -> str:
    """The bucket of a rebuild that ended before it could save the name; empty if it had not created one."""
    for name in _shadow_names(spec, record.version):
        with suppress(StreamNotFound):
            if await _maker_of(js, name) == record.id:
                return name
    return ""


async def _maker_of(js: JetStream, bucket: str) -> str:
    """The id of the rebuild that created a bucket; empty for other buckets.

    Raises:
        StreamNotFound: The bucket does not exist.
    """
    return ((await (await js.kv(bucket)).stream_info()).config.metadata or {}).get(MAKER, "")


async def _drop(js: JetStream, spec: ProjectionSpec, bucket: str) -> None:
    if bucket == spec.bucket.bucket:
        await (await js.stream(f"KV_{bucket}")).purge()  # the application declares this bucket, so it must exist
    else:
        await js.delete_kv(bucket)


async def _drop_replaced(js: JetStream, spec: ProjectionSpec, place: BucketRef, job: ReplayJob) -> RebuildOutcome:
    """Remove the bucket that an earlier swap has replaced."""
    record = job.record
    if not record.replaced:
        raise ConfigError(f"rebuild {record.id!r}: the bucket that it replaced was dropped already, or is unknown")
    if record.replaced == place.bucket:
        raise ConfigError(f"rebuild {record.id!r}: bucket {record.replaced}, which it replaced, is in use again")
    outcome = _swapped_before(record)
    with suppress(StreamNotFound):  # an earlier process has dropped it, and ended before it could save that
        maker = await _maker_of(js, record.replaced)
        if maker and (await find_replay(job.records, spec, maker, "rebuild")).record.status != "swapped":
            raise ConfigError(
                f"rebuild {record.id!r}: bucket {record.replaced}, which it replaced, was dropped, and rebuild "
                f"{maker!r} has re-created it: drop that rebuild (--drop)"
            )
        await _drop(js, spec, record.replaced)
    await job.save(replaced="")
    outcome.is_old_dropped = True
    return outcome


def _swapped_before(record: ReplayRecord) -> RebuildOutcome:
    old, new = BucketRef(record.replaced, record.version), BucketRef(record.bucket, record.version)
    return RebuildOutcome(record=record, old=old, new=new, is_swapped=True)


async def drop_rebuild(js: JetStream, app: HasSpec, projection: str, id: str) -> ReplayRecord:
    """Remove the bucket of a rebuild that is not in use: it was never swapped in, or was replaced since.

    Raises:
        ConfigError: No rebuild has this id, or its bucket is in use or was dropped already.
    """
    app = app.spec
    spec = spec_of(app, projection, js)
    records = await open_records(js, app.name)
    job = await find_replay(records, spec, id, "rebuild")
    record = job.record
    if record.bucket == (await find_bucket(records, spec)).ref.bucket:
        raise ConfigError(f"rebuild {id!r}: bucket {record.bucket} is in use: swap another one in before it is dropped")
    if record.status == "dropped":
        raise ConfigError(f"rebuild {id!r}: bucket {record.bucket} was dropped already")
    if not record.bucket:  # the rebuild ended before it could save its bucket
        record.bucket = await _find_shadow(js, spec, record)
    with suppress(StreamNotFound):
        # A later rebuild may have made a bucket of this name again.
        if record.bucket and await _maker_of(js, record.bucket) == id:
            await js.delete_kv(record.bucket)
    await job.save(status="dropped")
    return record


class _Rebuild:
    """One shadow bucket, and its position."""

    def __init__(
        self,
        history: History,
        extent: Extent,
        job: ReplayJob,
        outcome: RebuildOutcome,
        on_progress: Callable[[ReplayRecord], object],
        base: StateBase | None = None,
    ) -> None:
        """``base`` has the states to copy before the first event is folded."""
        self._js, self._history, self._spec, self._extent, self._base = history.js, history, history.spec, extent, base
        self._job, self._outcome, self._on_progress = job, outcome, on_progress
        self._bucket = job.record.bucket
        self._runner = ProcedureRunner(history.js)
        self._states = LiveStates(history.spec, CACHE)
        self._target: StateBucket
        self._position: FoldPosition
        self._revision = 0
        self._saved_at = 0.0
        self._parked_before = job.record.parked
        """Keys that are parked at events before ``_began_at``."""
        self._began_at = self._first_event = 0

    async def run(self, fold: FoldOptions, *, check: bool) -> None:
        """Fold all events, up to close to the end of the stream."""
        await self._open()
        if fold.engine is not None:
            await self._fold_on(fold.engine)
        await self._catch_up(fold.pace)
        if check:
            # Free the cache: the check needs as much memory.
            self._states = LiveStates(self._spec, CACHE)
            found = await verify_bucket(
                self._history, self._bucket, self._position.sequence, FoldOptions(engine=fold.engine)
            )
            self._outcome.verification = found
            if not found.is_equal:
                named = tuple(map(str, found.differences[:MAX_NAMED]))
                raise ProjectionDiffers(self._spec.name, self._bucket, found.difference_count, named)
            await self._catch_up(ReadingRate(None))
        await self._read_position()
        # One subject for each key, one for the position, and one for BEGUN.
        await self._job.save(status="built", keys=max(0, await self._subjects() - 2))

    async def _subjects(self) -> int:
        return (await (await self._js.kv(self._bucket)).stream_info()).state.subject_count

    async def _open(self) -> None:
        self._target = await self._runner.run(open_bucket(self._bucket))
        stored = await self._runner.run(read_position(self._target))
        beginning = FoldPosition.beginning(self._extent.stream, (await self._history.facts()).created)
        name, version = self._spec.name, self._spec.version
        self._position = start_of(stored.position, beginning, projection=name, bucket=self._bucket, version=version)
        if stored.position is None:
            # Written before the first fold, so that a purge at any later time removes BEGUN.
            if await self._subjects() > len(await self._runner.run(self._target.load_from_leader([BEGUN]))):
                raise self._was_removed("its position")
            begun = Change(BEGUN, self._position.encode(), sequence=0)
            await self._runner.run(self._target.store_all([begun, position_change(self._position, stored.revision)]))
        self._revision = (await self._read_position()).revision
        self._first_event = self._history.first_event
        if self._base is not None:
            await self._copy(self._base)
        self._began_at = self._position.sequence

    async def _copy(self, base: StateBase) -> None:
        """Copy the states of another bucket, then save the position: from then on the base is not needed."""
        record, begin = self._job.record, self._extent.first
        copied = await base.copy(self._target, begin, self._job.records)
        record.changed += copied.written
        record.parked = self._parked_before = self._parked_before + copied.parked
        self._first_event = base.position.first_event
        position = base.position.repaired(begin - 1)
        self._position = position._replace(sequence=begin - 1, repairs=0, version=self._spec.version)
        await self._save(begin - 1)

    async def _fold_on(self, engine: FoldEngine) -> None:
        """Fold the events up to the current end of the stream on another engine."""
        record, last = self._job.record, await self._history.last()
        while (begin := max(self._position.sequence + 1, self._extent.first)) <= last:
            part = await self._history.between(self._extent, begin, min(last, begin + ENGINE_RANGE - 1))
            folded = await engine.fold_into(self._bucket, part)
            record.events += folded.events
            record.unreadable += folded.unreadable
            record.changed += folded.changed
            record.parked += folded.parked
            self._parked_before, self._began_at = record.parked, part.last
            self._revision = (await self._read_position()).revision  # the engine has stored its own position
            await self._save(part.last)

    async def _catch_up(self, pace: ReadingRate) -> None:
        for _ in range(MAX_ROUNDS):
            began = clock.now()
            await self.fold_to(await self._history.last(), pace)
            if clock.now() - began < CLOSE_S:
                return

    async def fold_to(self, last: int, pace: ReadingRate) -> None:
        """Fold the shadow up to a sequence."""
        begin = max(self._position.sequence + 1, self._extent.first)
        if begin > last:
            return
        part = await self._history.between(self._extent, begin, last)
        async with aclosing(self._history.read(part, pace=pace)) as portions:
            async for events in portions:
                await self._store(events)
        await self._save(last)

    async def _store(self, events: Events) -> None:
        record, states = self._job.record, self._states
        if events.rows and not self._first_event and not self._began_at:
            self._first_event = events.rows.sequences[0]
        if missing := states.missing(events.rows):
            states.add(missing, await self._runner.run(self._target.load_all(missing)))
        states.apply(events.rows)
        try:
            while states.is_dirty:
                record.changed += (await self._runner.run(store_round(self._target, states))).written
        except StateGone as gone:
            raise self._was_removed(some_keys([change.key for change in gone.changes])) from gone
        states.shrink()
        record.events += len(events.rows)
        record.unreadable += len(events.failures)
        new = sum(parked.sequence > self._began_at for parked in states.parked.values())
        record.parked = self._parked_before + new
        if clock.now() - self._saved_at >= SAVE_EVERY_S:
            await self._save(events.last)

    def _was_removed(self, what: str) -> UsageError:
        return UsageError(
            f"bucket {self._bucket}: {what} was removed while it was built: delete it, and begin another rebuild"
        )

    async def _read_position(self) -> StoredPosition:
        """The position of the bucket, after a check that the bucket was not purged.

        The server compares revisions and stores in two steps. A purge between them leaves a position without the keys
        that it is about. BEGUN is never written again, so a purge at any time removes it.

        Raises:
            UsageError: The bucket was purged, or re-created.
        """
        stored = await self._runner.run(read_position(self._target))
        if stored.position is None or not await self._runner.run(self._target.load_from_leader([BEGUN])):
            raise self._was_removed("its position, and other keys,")
        return stored

    async def _save(self, sequence: int) -> None:
        """Store the position, then the record, so that the record is never ahead."""
        wanted = self._position.reaching(sequence, self._first_event, self._first_event)
        outcome = await self._runner.run(self._target.store_all([position_change(wanted, self._revision)]))
        revision = outcome.revisions.get(position_key())
        if revision is None:
            stored = await self._read_position()
            assert stored.position is not None
            if stored.position != wanted:
                wanted = stored.position  # a live engine folds this bucket now
            revision = stored.revision
        self._position, self._revision, self._saved_at = wanted, revision, clock.now()
        await self._job.save(at=sequence)
        self._on_progress(self._job.record)

    async def swap(self, records: KeyValue, alias: Alias) -> None:
        """Fold the shadow to the end of the stream, and switch the projection to it.

        Live engines are paused: all events that they have folded are in the shadow before it has readers, so no reader
        sees an older value than before.
        """
        unlimited = ReadingRate(None)
        await self.fold_to(await self._history.last(), unlimited)  # so that the pause is short
        # Before the swap, so that a process that resumes this knows the old bucket if this process ends after the swap.
        await self._job.save(replaced=alias.ref.bucket)
        began = clock.now()
        async with paused_engines(records, self._spec.name, f"{self._job.record.id}-{secrets.token_hex(4)}"):
            await self.fold_to(await self._history.last(), unlimited)
            await self._read_position()  # raises if the bucket was purged
            await swap(records, self._spec, self._outcome.new, revision=alias.revision)
        self._outcome.swap_s = clock.now() - began
        self._outcome.is_swapped = True
        # Events since then, if no engine of this version runs yet.
        await self.fold_to(await self._history.last(), unlimited)
        await self._job.save(status="swapped")

    async def drop_replaced(self, bucket: str, after_s: float) -> None:
        """Remove the bucket that was in use before the swap, after readers have had time to leave it."""
        await asyncio.sleep(after_s)
        await _drop(self._js, self._spec, bucket)
        await self._job.save(replaced="")
        self._outcome.is_old_dropped = True
