"""Rebuilding a projection beside the live one, and swapping.

The whole history is folded into a *shadow* bucket, ``<bucket>_v<version>`` (or ``<bucket>_v<version>_r<n>``, if that is
taken), which nobody reads. The live bucket is not touched, and its engine goes on. The shadow notes its position, so
a rebuild that was killed goes on where it was. Then, if asked for, the shadow is verified against a fresh fold, brought
to the end of the stream, and swapped in: one compare-and-set on the record that says where the projection is
(:mod:`jetspark.app.projections.bucket_refs`). Live engines of this version and readers follow; engines of another
version leave the projection to those. The old bucket is kept until it is dropped.

Where the stream no longer has the first events, the shadow begins with the states of another bucket instead
(:mod:`jetspark.app.replay.bases`). Its record says of which, and where the history that was folded onto them begins.
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
from jetspark.app.replay.bases import StateBase
from jetspark.app.replay.engines import FoldEngine, check_no_rate
from jetspark.app.replay.history import Events, History, spec_of
from jetspark.app.replay.places import noted_position, standstill
from jetspark.app.replay.replay_records import RecordKeeper, ReplayRecord, begin_record, noting
from jetspark.app.replay.verifying import Verification, verify_bucket
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

__all__ = ["RebuildOutcome", "drop_rebuild", "rebuild"]

# The shadow is close to the end of the stream when a round took no longer than this.
CLOSE_S = 0.5
# Rounds until it is as close as it gets.
MAX_ROUNDS = 1000
# The record and the position are written this often.
NOTE_EVERY_S = 1.0
MAX_NAMES = 100
# In the metadata of a bucket: the id of the rebuild that has made it.
MAKER = "jetspark-rebuild"
# A note that a rebuild writes before it folds; it stays.
BEGUN = position_key("begun")
# Views notice a swap within milliseconds; a slow reader may be at the old bucket still.
DROP_AFTER_S = 2.0
MAX_NAMED = 5
# Sequences that another engine folds at a time: a rebuild that is killed goes on after the last that were folded.
ENGINE_RANGE = 1_000_000


@dataclass(slots=True, kw_only=True)
class RebuildOutcome:
    """What a rebuild has made."""

    record: ReplayRecord
    old: BucketRef
    new: BucketRef
    verification: Verification | None = None
    is_swapped: bool = False
    swap_s: float | None = None
    """How long live engines stood still for the swap."""
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
    *,
    check: bool = False,
    swap_in: bool = False,
    drop_old: bool = False,
    drop_after_s: float = DROP_AFTER_S,
    rate: float | None = None,
    resume: str | None = None,
    from_bucket: str | None = None,
    on_progress: Callable[[ReplayRecord], Any] = lambda record: None,
    engine: FoldEngine | None = None,
) -> RebuildOutcome:
    """Fold the whole history of a projection into a bucket beside the live one; and verify and swap it, if asked to.

    Args:
        check: Verify the new bucket against a second, fresh fold before anything is swapped.
        swap_in: Make it the bucket of the projection.
        drop_old: Remove the old bucket after the swap; one that the application declares is emptied instead. With
            ``resume`` of a rebuild that is swapped already, this is all that is done.
        drop_after_s: How long readers have, after the swap, to finish what they read in the old bucket.
        rate: Events folded each second, at most, until it is close to the end.
        resume: The id of a rebuild that was interrupted, or not swapped yet.
        from_bucket: Begin with the states of this bucket, and fold the events after its position onto them: for streams
            that no longer have their first events. It is one that the same version of the projection has made of the
            same stream, such as the one in use; what it has is taken as it is, so there is nothing to ``check``.
        on_progress: Is told how far it is, when it begins, now and then, and at the end.
        engine: Folds the history, and the check's second fold, in place of this process; it has no ``rate``.

    Raises:
        DataLoss: The beginning of the stream is gone; with ``from_bucket``, events after its position are.
        ProjectionDiffers: The new bucket is not what its history makes of it; it was not swapped.
        Conflict: Somebody else has swapped meanwhile.
        UsageError: Another process has resumed this rebuild; or the states of ``from_bucket`` may not be right.
    """
    _check_options(swap_in, drop_old, from_bucket, resume)
    check_no_rate(rate, engine)
    seconds("drop_after_s", drop_after_s)
    app, pace = app.spec, ReadingRate(rate)
    spec, records = spec_of(app, projection, js), await open_records(js, app.name)
    alias = await find_bucket(records, spec)
    if resume is not None:
        keeper = await RecordKeeper.find(records, spec, resume, "rebuild")
        if (ended := await _resume_swapped(js, spec, alias.ref, keeper, swap_in, drop_old)) is not None:
            return ended
    history = await History.open(js, app, spec, alias.ref.bucket, is_anew=True)
    base = await _base_of(js, history, spec, from_bucket, None if resume is None else keeper.record, check)
    keeper, extent = await _record_of(js, app, spec, records, history, resume, base)
    new = BucketRef(keeper.record.bucket, spec.version)
    outcome = RebuildOutcome(record=keeper.record, old=alias.ref, new=new)
    work = _Rebuilding(js, history, spec, extent, keeper, outcome, on_progress, base)
    on_progress(keeper.record)
    await noting(keeper, work.run(pace, check=check, engine=engine))
    if swap_in:
        await work.swap(records, alias)
    if drop_old:  # which needs swap_in
        await work.drop_replaced(alias.ref.bucket, drop_after_s)
    on_progress(keeper.record)
    return outcome


def _check_options(swap_in: bool, drop_old: bool, from_bucket: str | None, resume: str | None) -> None:
    if drop_old and not swap_in:
        raise ConfigError("drop_old: expected together with swap, which makes the old bucket an old one")
    if from_bucket is None:
        return
    text("from_bucket", from_bucket, "the name of a bucket")
    if resume is not None:
        raise ConfigError("resume: expected without from_bucket: it goes on with the bucket that it was begun with")


async def _base_of(
    js: JetStream,
    history: History,
    spec: ProjectionSpec,
    from_bucket: str | None,
    record: ReplayRecord | None,
    check: bool,
) -> StateBase | None:
    """The states that a rebuild begins with; None for one that has the first event, or has copied them."""
    bucket, begin = from_bucket, 0
    if record is not None:
        bucket, begin = record.base or None, record.first
    if check and bucket is not None:
        raise ConfigError(
            f"check: expected without from_bucket={bucket!r}: the stream no longer has the events that its "
            "states could be compared with"
        )
    if record is not None:
        copied = None if not record.base or not record.bucket else (await noted_position(js, record.bucket)).position
        if copied is not None and copied.sequence >= max(1, begin - 1):
            bucket, history.first_event = None, copied.last_event
    if bucket is None:
        return None
    base = await StateBase.find(js, history, spec, bucket)
    begin = begin or base.begin
    # As a witness only if every event that is read comes behind it.
    history.first_event = base.position.last_event if base.position.last_event < begin else 0
    return base


async def _resume_swapped(
    js: JetStream, spec: ProjectionSpec, place: BucketRef, keeper: RecordKeeper, swap_in: bool, drop_old: bool
) -> RebuildOutcome | None:
    """Do what is left of a rebuild that is swapped; None if there is more left than that."""
    if keeper.record.bucket == place.bucket and not keeper.record.is_done:
        # A process before has swapped it, and ended before it noted that.
        await keeper.note(status="swapped")
        if swap_in and not drop_old:
            return _swapped_before(keeper.record)
    if keeper.record.status == "swapped" and drop_old:
        return await _drop_replaced(js, spec, place, keeper)
    return None


async def _record_of(
    js: JetStream,
    app: AppSpec,
    spec: ProjectionSpec,
    records: KeyValue,
    history: History,
    resume: str | None,
    base: StateBase | None,
) -> tuple[RecordKeeper, Extent]:
    """The record of a rebuild, old or new, which has its bucket; and what there is to fold."""
    if resume is not None:
        keeper = await RecordKeeper.resume(records, spec, resume, "rebuild")
        if keeper.record.base:
            extent = await history.between(keeper.record.extent, keeper.record.first, await history.last())
        else:
            extent = await history.whole()
            await history.between(keeper.record.extent, extent.first, extent.last)
        bucket = keeper.record.bucket or await _find_shadow(js, spec, keeper.record)
    else:
        extent = await history.whole() if base is None else await history.since(base.begin)
        named = "" if base is None else base.bucket
        keeper = await begin_record(records, spec, "rebuild", "", ReplayRequest(), extent, named)
        bucket = ""
    if not keeper.record.bucket:  # also if a process before ended before it noted one
        await keeper.note(bucket=bucket or await _make_shadow(js, app, spec, keeper.record.id))
    return keeper, extent


async def _make_shadow(js: JetStream, app: AppSpec, spec: ProjectionSpec, id: str) -> str:
    """A new bucket, like the one that the projection declares, and as safe as the stream."""
    like: KVConfig = as_safe(app, spec.bucket_config)
    if like.replicas is None:
        like = dataclasses.replace(like, replicas=(await js.stream(app.stream)).cached_info.config.replicas)
    names = _shadow_names(spec, spec.version)
    for name in names:
        try:
            await js.kv(name)
        except StreamNotFound:
            pass
        else:
            continue
        # The metadata makes it another bucket than that of somebody who does the same at the same time.
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
    """The bucket of a rebuild that ended before it noted one; empty if it had made none."""
    for name in _shadow_names(spec, record.version):
        with suppress(StreamNotFound):
            if await _maker_of(js, name) == record.id:
                return name
    return ""


async def _maker_of(js: JetStream, bucket: str) -> str:
    """The id of the rebuild that has made a bucket; empty if none has.

    Raises:
        StreamNotFound: There is no such bucket.
    """
    return ((await (await js.kv(bucket)).stream_info()).config.metadata or {}).get(MAKER, "")


async def _drop(js: JetStream, spec: ProjectionSpec, bucket: str) -> None:
    if bucket == spec.bucket.bucket:
        await (await js.stream(f"KV_{bucket}")).purge()  # the application declares it, so it has to be there
    else:
        await js.delete_kv(bucket)


async def _drop_replaced(js: JetStream, spec: ProjectionSpec, place: BucketRef, keeper: RecordKeeper) -> RebuildOutcome:
    """Remove what a swap of the past has replaced."""
    record = keeper.record
    if not record.replaced:
        raise ConfigError(f"rebuild {record.id!r}: the bucket that it replaced was dropped already, or is not known")
    if record.replaced == place.bucket:
        raise ConfigError(f"rebuild {record.id!r}: bucket {record.replaced}, which it replaced, is in use again")
    outcome = _swapped_before(record)
    with suppress(StreamNotFound):  # a process before has dropped it, and ended before it noted that
        maker = await _maker_of(js, record.replaced)
        if maker and (await RecordKeeper.find(keeper.records, spec, maker, "rebuild")).record.status != "swapped":
            raise ConfigError(
                f"rebuild {record.id!r}: bucket {record.replaced}, which it replaced, was dropped, and rebuild "
                f"{maker!r} has made it anew: drop that one (--drop)"
            )
        await _drop(js, spec, record.replaced)
    await keeper.note(replaced="")
    outcome.is_old_dropped = True
    return outcome


def _swapped_before(record: ReplayRecord) -> RebuildOutcome:
    old, new = BucketRef(record.replaced, record.version), BucketRef(record.bucket, record.version)
    return RebuildOutcome(record=record, old=old, new=new, is_swapped=True)


async def drop_rebuild(js: JetStream, app: HasSpec, projection: str, id: str) -> ReplayRecord:
    """Remove the bucket of a rebuild that is not in use: one that was never swapped, or was replaced since.

    Raises:
        ConfigError: There is no such rebuild, its bucket is in use, or was dropped before.
    """
    app = app.spec
    spec = spec_of(app, projection, js)
    records = await open_records(js, app.name)
    keeper = await RecordKeeper.find(records, spec, id, "rebuild")
    record = keeper.record
    if record.bucket == (await find_bucket(records, spec)).ref.bucket:
        raise ConfigError(f"rebuild {id!r}: bucket {record.bucket} is in use: swap another one in before it is dropped")
    if record.status == "dropped":
        raise ConfigError(f"rebuild {id!r}: bucket {record.bucket} was dropped already")
    if not record.bucket:  # it ended before it noted its bucket
        record.bucket = await _find_shadow(js, spec, record)
    with suppress(StreamNotFound):
        # A later rebuild may have made a bucket of this name again.
        if record.bucket and await _maker_of(js, record.bucket) == id:
            await js.delete_kv(record.bucket)
    await keeper.note(status="dropped")
    return record


class _Rebuilding:
    """One shadow bucket, and how far it is."""

    def __init__(
        self,
        js: JetStream,
        history: History,
        spec: ProjectionSpec,
        extent: Extent,
        keeper: RecordKeeper,
        outcome: RebuildOutcome,
        on_progress: Callable[[ReplayRecord], Any],
        base: StateBase | None = None,
    ) -> None:
        """``base`` is what has to be copied before anything is folded."""
        self._js, self._history, self._spec, self._extent, self._base = js, history, spec, extent, base
        self._keeper, self._outcome, self._on_progress = keeper, outcome, on_progress
        self._bucket = keeper.record.bucket
        self._runner = ProcedureRunner(js)
        self._states = LiveStates(spec, CACHE)
        self._target: StateBucket
        self._position: FoldPosition
        self._revision = 0
        self._noted_at = 0.0
        self._parked_before = keeper.record.parked
        """Keys that are parked at events up to where this process began to fold."""
        self._began_at = self._first_event = 0

    async def run(self, pace: ReadingRate, *, check: bool, engine: FoldEngine | None = None) -> None:
        """Fold everything, up to close to the end of the stream."""
        await self._open()
        if engine is not None:
            await self._have_folded(engine)
        await self._catch_up(pace)
        if check:
            # What the check folds takes as much memory.
            self._states = LiveStates(self._spec, CACHE)
            found = await verify_bucket(
                self._js,
                self._history,
                self._spec,
                self._bucket,
                self._position.sequence,
                engine=engine,
            )
            self._outcome.verification = found
            if not found.is_equal:
                named = tuple(map(str, found.differences[:MAX_NAMED]))
                raise ProjectionDiffers(self._spec.name, self._bucket, found.difference_count, named)
            await self._catch_up(ReadingRate(None))
        await self._read_position()
        # One subject for each key, one for the position, and one for the note of the beginning.
        await self._keeper.note(status="built", keys=max(0, await self._subjects() - 2))

    async def _subjects(self) -> int:
        return (await (await self._js.kv(self._bucket)).stream_info()).state.subject_count

    async def _open(self) -> None:
        self._target = await self._runner.run(open_bucket(self._bucket))
        noted = await self._runner.run(read_position(self._target))
        beginning = FoldPosition.beginning(self._extent.stream, (await self._history.info()).created)
        name, version = self._spec.name, self._spec.version
        self._position = start_of(noted.position, beginning, projection=name, bucket=self._bucket, version=version)
        if noted.position is None:
            # Before anything is folded: these go with whatever a purge removes.
            if await self._subjects() > len(await self._runner.run(self._target.load_from_leader([BEGUN]))):
                raise self._went_away("its position")
            begun = Change(BEGUN, self._position.encode(), sequence=0)
            await self._runner.run(self._target.store_all([begun, position_change(self._position, noted.revision)]))
        self._revision = (await self._read_position()).revision
        self._first_event = self._history.first_event
        if self._base is not None:
            await self._copy(self._base)
        self._began_at = self._position.sequence

    async def _copy(self, base: StateBase) -> None:
        """Begin with the states of another bucket, and note it: from then on they are those of this one."""
        record, begin = self._keeper.record, self._extent.first
        copied = await base.copy(self._target, begin, self._keeper.records)
        record.changed += copied.written
        record.parked = self._parked_before = self._parked_before + copied.parked
        self._first_event = base.position.first_event
        position = base.position.repaired(begin - 1)
        self._position = position._replace(sequence=begin - 1, repairs=0, version=self._spec.version)
        await self._note(begin - 1)

    async def _have_folded(self, engine: FoldEngine) -> None:
        """Let another engine fold what is there now."""
        record, last = self._keeper.record, await self._history.last()
        while (begin := max(self._position.sequence + 1, self._extent.first)) <= last:
            part = await self._history.between(self._extent, begin, min(last, begin + ENGINE_RANGE - 1))
            folded = await engine.fold_into(self._bucket, part)
            record.events += folded.events
            record.unreadable += folded.unreadable
            record.changed += folded.changed
            record.parked += folded.parked
            self._parked_before, self._began_at = record.parked, part.last
            self._revision = (await self._read_position()).revision  # the engine has noted its own
            await self._note(part.last)

    async def _catch_up(self, pace: ReadingRate) -> None:
        for _ in range(MAX_ROUNDS):
            began = clock.now()
            await self.fold_to(await self._history.last(), pace)
            if clock.now() - began < CLOSE_S:
                return

    async def fold_to(self, last: int, pace: ReadingRate) -> None:
        """Bring the shadow to a sequence."""
        begin = max(self._position.sequence + 1, self._extent.first)
        if begin > last:
            return
        part = await self._history.between(self._extent, begin, last)
        async with aclosing(self._history.read(part, pace=pace)) as portions:
            async for events in portions:
                await self._store(events)
        await self._note(last)

    async def _store(self, events: Events) -> None:
        record, states = self._keeper.record, self._states
        if events.rows and not self._first_event and not self._began_at:
            self._first_event = events.rows.sequences[0]
        if missing := states.missing(events.rows):
            states.add(missing, await self._runner.run(self._target.load_all(missing)))
        states.apply(events.rows)
        try:
            while states.is_dirty:
                record.changed += (await self._runner.run(store_round(self._target, states))).written
        except StateGone as gone:
            raise self._went_away(some_keys([change.key for change in gone.changes])) from gone
        states.shrink()
        record.events += len(events.rows)
        record.unreadable += len(events.failures)
        new = sum(parked.sequence > self._began_at for parked in states.parked.values())
        record.parked = self._parked_before + new
        if clock.now() - self._noted_at >= NOTE_EVERY_S:
            await self._note(events.last)

    def _went_away(self, what: str) -> UsageError:
        return UsageError(
            f"bucket {self._bucket}: {what} went away while it was built: delete the bucket, and rebuild anew"
        )

    async def _read_position(self) -> StoredPosition:
        """The position of the bucket, which has everything that was folded into it.

        The server compares revisions, and stores, in two steps, and a purge may come between them: then a position is
        there, and nothing that it is about. The note of the beginning is never written again, so that a purge at any
        time removes it.

        Raises:
            UsageError: The bucket was purged, or made anew.
        """
        noted = await self._runner.run(read_position(self._target))
        if noted.position is None or not await self._runner.run(self._target.load_from_leader([BEGUN])):
            raise self._went_away("its position, and what else it had,")
        return noted

    async def _note(self, sequence: int) -> None:
        """The position, then the record: what is said to be done is stored."""
        wanted = self._position.reaching(sequence, self._first_event, self._first_event)
        outcome = await self._runner.run(self._target.store_all([position_change(wanted, self._revision)]))
        revision = outcome.revisions.get(position_key())
        if revision is None:
            noted = await self._read_position()
            assert noted.position is not None
            if noted.position != wanted:
                wanted = noted.position  # a live engine has taken over
            revision = noted.revision
        self._position, self._revision, self._noted_at = wanted, revision, clock.now()
        await self._keeper.note(at=sequence)
        self._on_progress(self._keeper.record)

    async def swap(self, records: KeyValue, alias: Alias) -> None:
        """Bring the shadow to the end, and have readers find it.

        Live engines stand still meanwhile: what they have read is in the shadow before anybody reads that, so no reader
        sees an older value than before.
        """
        unlimited = ReadingRate(None)
        await self.fold_to(await self._history.last(), unlimited)  # so that little is left
        # Before the swap: a process that resumes this has to know what was replaced, also if this ends right behind it.
        await self._keeper.note(replaced=alias.ref.bucket)
        began = clock.now()
        async with standstill(records, self._spec.name, f"{self._keeper.record.id}-{secrets.token_hex(4)}"):
            await self.fold_to(await self._history.last(), unlimited)
            await self._read_position()  # the bucket has what was folded, if it was not purged since
            await swap(records, self._spec, self._outcome.new, revision=alias.revision)
        self._outcome.swap_s = clock.now() - began
        self._outcome.is_swapped = True
        # What came meanwhile, if no engine of this version runs yet.
        await self.fold_to(await self._history.last(), unlimited)
        await self._keeper.note(status="swapped")

    async def drop_replaced(self, bucket: str, after_s: float) -> None:
        """Remove the bucket that was in use before the swap, when readers have had time to leave it."""
        await asyncio.sleep(after_s)
        await _drop(self._js, self._spec, bucket)
        await self._keeper.note(replaced="")
        self._outcome.is_old_dropped = True
