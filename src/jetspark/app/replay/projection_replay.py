"""Replaying a range of events into a projection that is live, and repairing single keys of it.

**What a range replay does.** It reads the range, looks which keys its events are of, and which of those have not all of
them. On state that is up to date that is none, nothing is written, and it says so: an event that a state has is not
applied again, whatever ``apply`` says today. A key that lacks events is folded on from the state it has, from its *own*
next event on and not from the beginning of the range, to a sequence that the live engine has reached: a state that goes
beyond an event without it would never get it.

**Repair** of a key is the same with nothing as its state: its whole history is folded in memory, and stored by one
compare-and-set, also where the key is parked, or foreign. The subjects of a key do not tell its events: another program
may publish one on any subject of the projection, and the live engine folds it. So every event is read.

How what was folded gets into a bucket that a live engine writes, too, is in :mod:`jetspark.app.replay.repairing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jetspark.aio import clock
from jetspark.aio.steps import ProcedureRunner
from jetspark.app.extents import Extent, ReplayRequest, check_keys
from jetspark.app.projections.bucket_refs import check_version, find_bucket, open_records
from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.positions import read_position
from jetspark.app.replay.contents import change_to
from jetspark.app.replay.engines import FoldEngine, check_no_rate
from jetspark.app.replay.history import Events, History, MemoryFold, OnEvents, spec_of, told_nobody
from jetspark.app.replay.outlines import RangeOutline, outline_of
from jetspark.app.replay.repairing import KeyRepair
from jetspark.app.replay.replay_records import RecordKeeper, ReplayRecord, begin_record, noting
from jetspark.app.stream_history import ReadingRate
from jetspark.errors import ConfigError
from jetspark.state.changes import NOTHING, Current, some_keys
from jetspark.state.store import StateBucket, open_bucket

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app.projections.projection_spec import ProjectionSpec
    from jetspark.app.spec import HasSpec

__all__ = ["MAX_KEYS", "ReplayPlan", "plan_replay", "repair_keys", "run_replay"]

MAX_KEYS = 1_000_000
"""Keys that one replay may concern: their names are held, and the states of those that lack events."""
# A plan names this many keys, and counts the others.
MAX_NAMED = 20
# The record is written this often.
NOTE_EVERY_S = 1.0


@dataclass(slots=True, kw_only=True)
class ReplayPlan:
    """What a replay will read, which keys it is about, and which of them lack events."""

    projection: str
    bucket: str
    version: int
    extent: Extent
    events: int = 0
    unreadable: int = 0
    outline: RangeOutline = field(default_factory=RangeOutline)
    """Subjects, times and gaps of the range."""
    last_of: dict[str, int] = field(default_factory=dict)
    """The keys, each with its last event in the range."""
    behind: dict[str, Current] = field(default_factory=dict)
    """Keys that lack events of the range, with what they have."""
    parked: list[str] = field(default_factory=list)
    """Keys that lack events and are parked, or foreign: a replay leaves them; repair or rebuild them."""
    key_text: Callable[[str], str] = field(default=str, repr=False)
    """Makes what users write of a key of the bucket."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "projection": self.projection,
            "bucket": self.bucket,
            "version": self.version,
            "stream": self.extent.stream,
            "first": self.extent.first,
            "last": self.extent.last,
            "events": self.events,
            "unreadable": self.unreadable,
            **self.outline.to_dict(),
            "keys": len(self.last_of),
            "some_keys": self._texts(self.last_of),
            "behind": len(self.behind),
            "some_behind": self._texts(self.behind),
            "parked": self._texts(self.parked),
        }

    def __str__(self) -> str:
        lines = [
            f"replay of projection {self.projection} version {self.version}, bucket {self.bucket}",
            f"reads {self.extent}: all of it is there",
            *self.outline.lines(),
            f"{self.events} events of {self._named(self.last_of)}",
        ]
        if self.unreadable:
            lines.append(f"{self.unreadable} events cannot be read, and are left out")
        if self.parked:
            lines.append(f"{self._named(self.parked)} are parked or foreign, and stay so: jetspark rebuild --key")
        if self.behind:
            lines.append(f"would write {self._named(self.behind)}, which lack events")
        else:
            lines.append(
                "would change nothing: the state has all of it. A changed fold needs another version, and a rebuild"
            )
        return "\n".join(lines)

    def _texts(self, keys: Iterable[str]) -> list[str]:
        return list(map(self.key_text, sorted(keys)[:MAX_NAMED]))

    def _named(self, keys: Collection[str]) -> str:
        more = f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else ""
        return f"{len(keys)} keys ({', '.join(self._texts(keys))}{more})" if keys else "no keys"


async def plan_replay(
    js: JetStream,
    app: HasSpec,
    projection: str,
    request: ReplayRequest,
    *,
    rate: float | None = None,
    on_events: OnEvents = told_nobody,
    engine: FoldEngine | None = None,
) -> ReplayPlan:
    """What a replay would do; nothing is written.

    Args:
        engine: Reads and folds in place of this process; it has no ``rate``.

    Raises:
        DataLoss: Some of the range is gone.
        UsageError: The state was made by another version of the projection.
    """
    app = app.spec
    check_no_rate(rate, engine)
    spec = spec_of(app, projection, js)
    place = check_version(spec, (await find_bucket(await open_records(js, app.name), spec)).ref)
    history = await History.open(js, app, spec, place.bucket)
    request = request.of(spec)
    extent = await history.extent(request)
    plan = _plan_of(spec, place.bucket, extent, await outline_of(history, extent, request.subject))
    runner = ProcedureRunner(js)
    bucket = await runner.run(open_bucket(place.bucket))
    await _survey(runner, bucket, history, spec, request, plan, ReadingRate(rate), on_events, engine)
    return plan


async def run_replay(
    js: JetStream,
    app: HasSpec,
    projection: str,
    request: ReplayRequest | None = None,
    *,
    rate: float | None = None,
    resume: str | None = None,
    on_plan: Callable[[ReplayPlan], Any] = lambda plan: None,
    on_progress: Callable[[ReplayRecord], Any] = lambda record: None,
    engine: FoldEngine | None = None,
) -> ReplayRecord:
    """Have the keys that a range of events is of get those that they lack. The live engine may go on.

    Args:
        rate: Events read each second, at most.
        resume: The id of a replay that was interrupted: it goes on with the range it was frozen at.
        on_plan: Is told what will be done before anything is written.
        on_progress: Is told how far it is, when it begins, now and then, and at the end.
        engine: Reads and folds in place of this process, which stores; it has no ``rate``.

    Raises:
        DataLoss: Some of the range is gone, or of what a key lacks before it.
        UsageError: The state was made by another version of the projection, or another process has resumed this.
        ConfigError: There is no such replay to resume.
    """
    app = app.spec
    check_no_rate(rate, engine)
    pace = ReadingRate(rate)
    spec = spec_of(app, projection, js)
    records = await open_records(js, app.name)
    place = check_version(spec, (await find_bucket(records, spec)).ref)
    history = await History.open(js, app, spec, place.bucket)
    if resume is not None:
        keeper = await RecordKeeper.resume(records, spec, resume, "replay")
        extent = await history.between(keeper.record.extent, keeper.record.first, keeper.record.last)
    else:
        request = (request or ReplayRequest()).of(spec)
        extent = await history.extent(request)
        keeper = await begin_record(records, spec, "replay", place.bucket, request, extent)
    on_progress(keeper.record)
    work = _fill(js, history, spec, keeper, extent, pace, on_plan, on_progress, engine)
    return await noting(keeper, work)


async def repair_keys(
    js: JetStream,
    app: HasSpec,
    projection: str,
    keys: Iterable[Any],
    *,
    rate: float | None = None,
    on_progress: Callable[[ReplayRecord], Any] = lambda record: None,
) -> ReplayRecord:
    """Fold keys again from their first event, and store what comes out; parked and foreign ones too.

    ``changed`` of the result is 0 where every key already was what its events make of it.

    Args:
        keys: As ``key`` of the projection returns them; with windows ``"<key>.<window>"``, or tuples of the two.

    Raises:
        DataLoss: The beginning of the stream is gone, so nobody can tell what the keys should hold.
        UsageError: The state was made by another version of the projection.
        Conflict: Somebody else writes the keys again and again.
    """
    app = app.spec
    check_keys(keys)
    pace = ReadingRate(rate)
    spec = spec_of(app, projection, js)
    records = await open_records(js, app.name)
    place = check_version(spec, (await find_bucket(records, spec)).ref)
    history = await History.open(js, app, spec, place.bucket)
    request = ReplayRequest(keys=tuple(keys)).of(spec)
    if not request.keys:
        raise ConfigError("keys=(): expected at least one key to repair")
    extent = await history.extent(request)
    keeper = await begin_record(records, spec, "repair", place.bucket, request, extent)
    on_progress(keeper.record)
    return await noting(keeper, _repair(js, history, spec, keeper, extent, pace, on_progress))


# ---- small steps -----------------------------------------------------------------------------------------------------


def _plan_of(spec: ProjectionSpec, bucket: str, extent: Extent, outline: RangeOutline) -> ReplayPlan:
    return ReplayPlan(
        projection=spec.name,
        bucket=bucket,
        version=spec.version,
        extent=extent,
        outline=outline,
        key_text=spec.key_text,
    )


async def _survey(
    runner: ProcedureRunner,
    bucket: StateBucket,
    history: History,
    spec: ProjectionSpec,
    request: ReplayRequest,
    plan: ReplayPlan,
    pace: ReadingRate,
    on_events: OnEvents,
    engine: FoldEngine | None,
) -> MemoryFold:
    """Read the range, find the keys that lack some of it, and fold those to the end of the range."""
    only = request.bucket_keys(spec)
    if engine is None:
        await _read_keys(history, request.subject, only, plan, pace, on_events)
    elif not plan.extent.is_empty:
        await _ask_for_keys(engine, request.subject, only, plan)
    position = (await runner.run(read_position(bucket))).sequence or 0
    current = await runner.run(bucket.load_all([*plan.last_of, *(only - plan.last_of.keys())]))
    check_known(spec, only - plan.last_of.keys() - current.keys(), plan.extent)
    suspects: dict[str, Current] = {}
    for key, last in plan.last_of.items():
        state = current.get(key, NOTHING)
        if KeyState(spec, key, state).parked is not None:
            plan.parked.append(key)
        elif state.sequence < last:
            suspects[key] = state
    fold = MemoryFold(spec, wants=suspects.__contains__)
    if suspects:
        for key, state in suspects.items():
            fold.begin(key, state)
        fold.reached = min(state.sequence for state in suspects.values())
        if engine is not None:
            part = await history.between(plan.extent, fold.reached + 1, plan.extent.last)
            fold.begin_all(await engine.fold_on(part, suspects), part.last)
        await fold.advance(history, plan.extent, plan.extent.last, pace=pace, on_events=on_events)
    for key, state in suspects.items():
        # A key without a state may have ignored its last events: then there is nothing to write.
        if change_to(spec, key, fold.content(key), state, position=position) is not None:
            plan.behind[key] = state
        else:
            fold.forget(key)
    return fold


async def _read_keys(
    history: History,
    subject: str | None,
    only: Collection[str],
    plan: ReplayPlan,
    pace: ReadingRate,
    on_events: OnEvents,
) -> None:
    async with aclosing(history.read(plan.extent, subject=subject, pace=pace)) as portions:
        async for events in portions:
            for key, sequence, _ in events.rows:
                if not only or key in only:
                    plan.events += 1
                    plan.last_of[key] = sequence
            plan.unreadable += len(events.failures)
            _check_count(plan)
            await on_events(events)


async def _ask_for_keys(engine: FoldEngine, subject: str | None, only: Collection[str], plan: ReplayPlan) -> None:
    found = await engine.survey(plan.extent, subject)
    plan.last_of = {key: last for key, last in found.last_of.items() if not only or key in only}
    plan.events = sum(found.events[key] for key in plan.last_of)
    plan.unreadable = found.unreadable
    _check_count(plan)


def check_known(spec: ProjectionSpec, unknown: Collection[str], extent: Extent) -> None:
    """
    Raises:
        ConfigError: Keys were asked for that have neither a state nor an event.
    """
    if unknown:
        keys = some_keys(sorted(map(spec.key_text, unknown)))
        where = f": stream {extent.stream} is empty" if extent.is_empty else f" in {extent}"
        raise ConfigError(f"{keys} of projection {spec.name!r}: neither a state nor an event{where}")


def _check_count(plan: ReplayPlan) -> None:
    if len(plan.last_of) > MAX_KEYS:
        raise ConfigError(
            f"{plan.extent} concern over {MAX_KEYS} keys: replay a smaller range, or rebuild the projection"
        )


async def _fill(
    js: JetStream,
    history: History,
    spec: ProjectionSpec,
    keeper: RecordKeeper,
    extent: Extent,
    pace: ReadingRate,
    on_plan: Callable[[ReplayPlan], Any],
    on_progress: Callable[[ReplayRecord], Any],
    engine: FoldEngine | None,
) -> None:
    record = keeper.record
    notes = _ReadNotes(keeper, on_progress)
    plan = _plan_of(spec, record.bucket, extent, await outline_of(history, extent, record.request.subject))
    record.outline = plan.outline.to_dict()
    runner = ProcedureRunner(js)
    bucket = await runner.run(open_bucket(record.bucket))
    fold = await _survey(runner, bucket, history, spec, record.request, plan, pace, notes.add, engine)
    on_plan(plan)
    record.keys, record.parked = len(plan.last_of), len(plan.parked)
    record.events, record.unreadable = plan.events, plan.unreadable
    if plan.behind:
        await KeyRepair(js, bucket, history, extent, spec, keeper, fold).store()
    await keeper.note(status="done", at=extent.last)
    on_progress(record)


async def _repair(
    js: JetStream,
    history: History,
    spec: ProjectionSpec,
    keeper: RecordKeeper,
    extent: Extent,
    pace: ReadingRate,
    on_progress: Callable[[ReplayRecord], Any],
) -> None:
    record = keeper.record
    keys = record.request.bucket_keys(spec)
    fold = MemoryFold(spec, wants=keys.__contains__)
    for key in keys:
        fold.begin(key)
    notes = _ReadNotes(keeper, on_progress)
    await fold.advance(history, extent, extent.last, pace=pace, on_events=notes.add)
    runner = ProcedureRunner(js)
    bucket = await runner.run(open_bucket(record.bucket))
    present = await runner.run(bucket.load_all(sorted(keys)))
    check_known(spec, {key for key in keys - present.keys() if not fold.has_event(key)}, extent)
    await KeyRepair(js, bucket, history, extent, spec, keeper, fold).store()
    record.keys, record.events, record.unreadable = len(keys), fold.events, fold.failures
    record.parked = sum(fold.content(key).parked is not None for key in keys)
    await keeper.note(status="done", at=extent.last)
    on_progress(record)


class _ReadNotes:
    """Writes to the record how far reading is."""

    def __init__(self, keeper: RecordKeeper, on_progress: Callable[[ReplayRecord], Any]) -> None:
        self._keeper, self._on_progress = keeper, on_progress
        self._noted_at = clock.now()

    async def add(self, events: Events) -> None:
        record = self._keeper.record
        record.at = events.last
        if clock.now() - self._noted_at >= NOTE_EVERY_S:
            await self._keeper.note()
            self._on_progress(record)
            self._noted_at = clock.now()
