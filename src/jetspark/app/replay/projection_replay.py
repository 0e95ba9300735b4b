"""Replay of a range of events into a live projection, and repair of single keys.

**A replay** reads a range, and finds the keys that lack some of its events. An event that a state already has is not
applied again, even if ``apply`` has changed. So on a state that is up to date nothing is written. A key that lacks
events is folded from its *own* next event, which may come before the range, up to a sequence that the live engine has
reached: a state must not advance past an event that it does not have.

**A repair** folds the whole history of a key in memory, and stores the result by one compare-and-set, also where the
key is parked or was written by another program. It reads every event of the stream: another program may publish an
event of the key on any subject of the projection, and the live engine folds it.

How folded keys get into a bucket that a live engine also writes, see :mod:`jetspark.app.replay.key_repair`.
"""

from __future__ import annotations

import dataclasses
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
from jetspark.app.replay.comparison import change_to
from jetspark.app.replay.history import (
    Events,
    FoldEngine,
    FoldOptions,
    History,
    MemoryFold,
    OnEvents,
    ignore_events,
    spec_of,
)
from jetspark.app.replay.key_repair import KeyRepair
from jetspark.app.replay.outlines import RangeOutline, outline_of
from jetspark.app.replay.replay_records import (
    ReplayJob,
    ReplayRecord,
    begin_replay,
    new_record,
    resume_replay,
    run_job,
)
from jetspark.errors import ConfigError
from jetspark.state.changes import NOTHING, Current, some_keys
from jetspark.state.store import open_bucket

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app.projections.projection_spec import ProjectionSpec
    from jetspark.app.spec import HasSpec
    from jetspark.lake.reading import ArchiveRoot

__all__ = ["MAX_KEYS", "ReplayOptions", "ReplayPlan", "plan_replay", "repair_keys", "run_replay"]

MAX_KEYS = 1_000_000
"""Keys of one replay, at most: their names are in memory, and the states of keys that lack events."""
# A plan names this many keys, and counts the others.
MAX_NAMED = 20
# The record is written this often.
SAVE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Options of :func:`run_replay`."""

    rate: float | None = None
    """Events read each second, at most."""
    resume: str | None = None
    """The id of an interrupted replay: it continues with the range that it began with."""


@dataclass(slots=True, kw_only=True)
class ReplayPlan:
    """The range that a replay reads, the keys in it, and the keys that lack events."""

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
    """Keys that lack events of the range, with their states."""
    parked: list[str] = field(default_factory=list)
    """Keys that lack events, and are parked or were written by another program. A replay leaves them: repair them."""
    key_text: Callable[[str], str] = field(default=str, repr=False)
    """Converts a key of the bucket to the text that users write."""

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
    on_events: OnEvents = ignore_events,
    engine: FoldEngine | None = None,
    archive: ArchiveRoot | str | None = None,
) -> ReplayPlan:
    """Find the keys that a replay would write; nothing is written.

    Args:
        engine: Reads and folds in place of this process; it does not support ``rate``.
        archive: The root of an archive with the stream: older events come from there.

    Raises:
        DataLoss: Some of the range is gone.
        UsageError: The state was made by another version of the projection.
    """
    app, fold = app.spec, FoldOptions.of(rate, engine, on_events, archive)
    spec = spec_of(app, projection, js)
    place = check_version(spec, (await find_bucket(await open_records(js, app.name), spec)).ref)
    history = await History.open(js, app, spec, place.bucket, archive=fold.archive)
    request = request.of(spec)
    extent = await history.extent(request)
    plan = await _new_plan(history, place.bucket, extent, request)
    await _survey(history, request, plan, fold)
    return plan


async def run_replay(
    js: JetStream,
    app: HasSpec,
    projection: str,
    request: ReplayRequest | None = None,
    options: ReplayOptions | None = None,
    *,
    on_plan: Callable[[ReplayPlan], object] = lambda plan: None,
    on_progress: Callable[[ReplayRecord], object] = lambda record: None,
    engine: FoldEngine | None = None,
    archive: ArchiveRoot | str | None = None,
) -> ReplayRecord:
    """Apply the events of a range to the keys that lack them. Live engines may run.

    Args:
        on_plan: Called with the plan before anything is written.
        on_progress: Called with the record at the beginning, about every second, and at the end.
        engine: Reads and folds in place of this process, which stores; it does not support ``rate``.
        archive: The root of an archive with the stream: older events come from there.

    Raises:
        DataLoss: Events of the range are gone, or events before it that a key lacks.
        UsageError: The state was made by another version of the projection, or another process has resumed this replay.
        ConfigError: No replay has the id to resume.
    """
    app, options = app.spec, options or ReplayOptions()
    fold = FoldOptions.of(options.rate, engine, archive=archive)
    spec = spec_of(app, projection, js)
    records = await open_records(js, app.name)
    place = check_version(spec, (await find_bucket(records, spec)).ref)
    history = await History.open(js, app, spec, place.bucket, archive=fold.archive)
    if options.resume is not None:
        job = await resume_replay(records, spec, options.resume, "replay")
        extent = await history.between(job.record.extent, job.record.first, job.record.last)
    else:
        request = (request or ReplayRequest()).of(spec)
        extent = await history.extent(request)
        job = await begin_replay(records, new_record(spec, "replay", place.bucket, request, extent))
    on_progress(job.record)
    return await run_job(job, _replay(history, job, extent, fold, on_plan, on_progress))


async def repair_keys(
    js: JetStream,
    app: HasSpec,
    projection: str,
    keys: Iterable[object],
    *,
    rate: float | None = None,
    on_progress: Callable[[ReplayRecord], object] = lambda record: None,
    archive: ArchiveRoot | str | None = None,
) -> ReplayRecord:
    """Fold keys again from their first event, and store the result, also for parked keys and keys of other programs.

    ``changed`` of the result is 0 when every key already had the right content.

    Args:
        keys: As ``key`` of the projection returns them; with windows ``"<key>.<window>"``, or tuples of the two.
        archive: The root of an archive with the stream: older events come from there.

    Raises:
        DataLoss: The stream no longer has its first events, so the right content of the keys is unknown.
        UsageError: The state was made by another version of the projection.
        Conflict: Another writer changed the keys in every attempt to store them.
    """
    app = app.spec
    check_keys(keys)
    fold = FoldOptions.of(rate, archive=archive)
    spec = spec_of(app, projection, js)
    records = await open_records(js, app.name)
    place = check_version(spec, (await find_bucket(records, spec)).ref)
    history = await History.open(js, app, spec, place.bucket, archive=fold.archive)
    request = ReplayRequest(keys=tuple(keys)).of(spec)
    if not request.keys:
        raise ConfigError("keys=(): expected at least one key to repair")
    extent = await history.extent(request)
    job = await begin_replay(records, new_record(spec, "repair", place.bucket, request, extent))
    on_progress(job.record)
    return await run_job(job, _repair(history, job, extent, fold, on_progress))


async def _new_plan(history: History, bucket: str, extent: Extent, request: ReplayRequest) -> ReplayPlan:
    return ReplayPlan(
        projection=history.spec.name,
        bucket=bucket,
        version=history.spec.version,
        extent=extent,
        outline=await outline_of(history, extent, request.subject),
        key_text=history.spec.key_text,
    )


async def _survey(history: History, request: ReplayRequest, plan: ReplayPlan, fold: FoldOptions) -> MemoryFold:
    """Read the range, find the keys that lack some of it, and fold those to the end of the range."""
    spec, runner = history.spec, ProcedureRunner(history.js)
    bucket = await runner.run(open_bucket(plan.bucket))
    only = request.bucket_keys(spec)
    if fold.engine is None:
        await _read_keys(history, request.subject, only, plan, fold)
    elif not plan.extent.is_empty:
        await _read_keys_on(fold.engine, request.subject, only, plan)
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
    states = MemoryFold(spec, wants=suspects.__contains__)
    if suspects:
        for key, state in suspects.items():
            states.begin(key, state)
        states.reached = min(state.sequence for state in suspects.values())
        if fold.engine is not None:
            part = await history.between(plan.extent, states.reached + 1, plan.extent.last)
            states.begin_all(await fold.engine.fold_on(part, suspects), part.last)
        await states.advance(history, plan.extent, plan.extent.last, options=fold)
    for key, state in suspects.items():
        # A key without a state may have ignored its last events: then there is nothing to write.
        if change_to(spec, key, states.content(key), state, position=position) is not None:
            plan.behind[key] = state
        else:
            states.forget(key)
    return states


async def _read_keys(
    history: History, subject: str | None, only: Collection[str], plan: ReplayPlan, fold: FoldOptions
) -> None:
    async with aclosing(history.read(plan.extent, subject=subject, pace=fold.pace)) as portions:
        async for events in portions:
            for key, sequence, _ in events.rows:
                if not only or key in only:
                    plan.events += 1
                    plan.last_of[key] = sequence
            plan.unreadable += len(events.failures)
            _check_count(plan)
            await fold.on_events(events)


async def _read_keys_on(engine: FoldEngine, subject: str | None, only: Collection[str], plan: ReplayPlan) -> None:
    found = await engine.survey(plan.extent, subject)
    plan.last_of = {key: last for key, last in found.last_of.items() if not only or key in only}
    plan.events = sum(found.events[key] for key in plan.last_of)
    plan.unreadable = found.unreadable
    _check_count(plan)


def check_known(spec: ProjectionSpec, unknown: Collection[str], extent: Extent) -> None:
    """
    Raises:
        ConfigError: The request names keys that have neither a state nor an event.
    """
    if unknown:
        keys = some_keys(sorted(map(spec.key_text, unknown)))
        where = f": stream {extent.stream} is empty" if extent.is_empty else f" in {extent}"
        raise ConfigError(f"{keys} of projection {spec.name!r}: neither a state nor an event{where}")


def _check_count(plan: ReplayPlan) -> None:
    if len(plan.last_of) > MAX_KEYS:
        raise ConfigError(
            f"{plan.extent} have events of over {MAX_KEYS} keys: replay a smaller range, or rebuild the projection"
        )


async def _replay(
    history: History,
    job: ReplayJob,
    extent: Extent,
    fold: FoldOptions,
    on_plan: Callable[[ReplayPlan], object],
    on_progress: Callable[[ReplayRecord], object],
) -> None:
    record = job.record
    plan = await _new_plan(history, record.bucket, extent, record.request)
    record.outline = plan.outline.to_dict()
    saves = _PeriodicSaves(job, on_progress)
    states = await _survey(history, record.request, plan, dataclasses.replace(fold, on_events=saves.add))
    on_plan(plan)
    record.keys, record.parked = len(plan.last_of), len(plan.parked)
    record.events, record.unreadable = plan.events, plan.unreadable
    if plan.behind:
        await KeyRepair(history, job, extent, states).store()
    await job.save(status="done", at=extent.last)
    on_progress(record)


async def _repair(
    history: History,
    job: ReplayJob,
    extent: Extent,
    fold: FoldOptions,
    on_progress: Callable[[ReplayRecord], object],
) -> None:
    record, spec = job.record, history.spec
    keys = record.request.bucket_keys(spec)
    states = MemoryFold(spec, wants=keys.__contains__)
    for key in keys:
        states.begin(key)
    saves = _PeriodicSaves(job, on_progress)
    await states.advance(history, extent, extent.last, options=dataclasses.replace(fold, on_events=saves.add))
    runner = ProcedureRunner(history.js)
    bucket = await runner.run(open_bucket(record.bucket))
    present = await runner.run(bucket.load_all(sorted(keys)))
    check_known(spec, {key for key in keys - present.keys() if not states.has_event(key)}, extent)
    await KeyRepair(history, job, extent, states).store()
    record.keys, record.events, record.unreadable = len(keys), states.events, states.failures
    record.parked = sum(states.content(key).parked is not None for key in keys)
    await job.save(status="done", at=extent.last)
    on_progress(record)


class _PeriodicSaves:
    """Saves the sequence that was read, once a second."""

    def __init__(self, job: ReplayJob, on_progress: Callable[[ReplayRecord], object]) -> None:
        self._job, self._on_progress = job, on_progress
        self._saved_at = clock.now()

    async def add(self, events: Events) -> None:
        record = self._job.record
        record.at = events.last
        if clock.now() - self._saved_at >= SAVE_EVERY_S:
            await self._job.save()
            self._on_progress(record)
            self._saved_at = clock.now()
