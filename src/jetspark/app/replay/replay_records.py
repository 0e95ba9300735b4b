"""Records of replays, rebuilds, repairs and handler replays: the request, the progress, and the end of each.

Records of projections are keys ``<projection>.replay.<id>`` of the bucket ``<app>_projections``, records of handlers
keys ``replay.<handler>.<id>`` of ``<app>_handlers``. They stay when the work is done. How they are stored and taken
over says :mod:`jetspark.app.jobs`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec

from jetspark.app.clock import utc_now
from jetspark.app.extents import Extent, ReplayRequest
from jetspark.app.jobs import Job, JobRecord, new_job_id
from jetspark.errors import ConfigError, JetSparkError, KeyNotFound, ProtocolError

if TYPE_CHECKING:
    from jetspark.aio.kv import KeyValue
    from jetspark.app.projections.projection_spec import ProjectionSpec

__all__ = [
    "HandlerReplayRecord",
    "OnUnreadable",
    "ReplayJob",
    "ReplayKind",
    "ReplayRecord",
    "begin_replay",
    "find_replay",
    "log_unreadable",
    "new_record",
    "read_all",
    "read_records",
    "resume_replay",
    "run_job",
]

_logger = logging.getLogger("jetspark.app")

ReplayKind: TypeAlias = Literal["replay", "rebuild", "repair"]


MAX_RECORD_BYTES = 768 << 10
"""Size of a new record, at most. A server takes a megabyte, and failures and counts are added later."""


class RangeRecord(JobRecord, kw_only=True, rename={"saved": "noted"}):
    """The fields that records of projections and of handlers share."""

    hint: ClassVar[str] = "`jetspark replays` lists the ids"
    request: ReplayRequest
    began: str = ""
    """When it began, as ISO 8601."""
    stream: str
    created: str
    """When the stream was created: a later stream of the same name has another time."""
    first: int
    last: int
    """The end of the stream when the work began."""
    outline: dict[str, Any] = msgspec.field(default_factory=dict)
    """Subjects, times and gaps of the range: a :class:`~jetspark.app.replay.outlines.RangeOutline` as JSON."""
    at: int = 0
    """Events up to this sequence were read, or handled."""
    events: int = 0
    status: str = "running"
    """``running``, also after the process was killed; ``done``; ``failed: <reason>``. A rebuild is ``built``, then
    ``swapped`` or ``dropped``, in place of ``done``.
    """
    saved: str = ""
    """When the record was saved, as ISO 8601."""

    @property
    def extent(self) -> Extent:
        return Extent(stream=self.stream, created=self.created, first=self.first, last=self.last)

    @property
    def is_done(self) -> bool:
        return self.status in ("done", "swapped", "dropped")

    @property
    def reached(self) -> str:
        return f"at {self.at} of {self.first} to {self.last}"

    def on_resume(self) -> None:
        self.status = "running"

    def on_save(self) -> None:
        self.saved = utc_now().isoformat()


class ReplayRecord(RangeRecord, kw_only=True):
    """One replay, rebuild of a whole projection, or repair of single keys."""

    kind: ReplayKind
    projection: str
    version: int
    bucket: str
    """The bucket that is written."""
    keys: int = 0
    """Keys that have an event in the range."""
    changed: int = 0
    """Keys that were written."""
    parked: int = 0
    """Keys that are parked, and stay parked."""
    unreadable: int = 0
    """Events that cannot be decoded; every engine leaves them out."""
    base: str = ""
    """A rebuild that did not begin with the first event: the bucket whose states it copied. Its ``first`` is the first
    event that it folded onto them.
    """
    replaced: str = ""
    """A rebuild that was swapped: the bucket that was in use before, until that is dropped."""

    @property
    def key(self) -> str:
        return record_key(self.projection, self.id)

    @property
    def title(self) -> str:
        return f"{self.kind} {self.id}"

    def __str__(self) -> str:
        read = f"{self.events} events of {self.keys} keys, {self.reached}"
        if self.is_done and not self.changed and self.kind == "replay":
            changed = "nothing changed: the state has all of it"
        else:
            changed = f"{self.changed} keys written"
        parked = f", {self.parked} keys are parked" if self.parked else ""
        bucket = f", bucket {self.bucket}" if self.kind == "rebuild" else ""
        if self.base:
            bucket += f" with the states of {self.base} before {self.first}"
        return f"{self.title} of {self.projection}: {read}: {changed}{parked}{bucket}, {self.status}"


class HandlerReplayRecord(RangeRecord, kw_only=True):
    """One replay of a handler."""

    handler: str
    effects: bool
    """True when the replay carries out the handler's effects."""
    kind: Literal["handler"] = "handler"
    done: int = 0
    skipped: int = 0
    stopped: int = 0
    """Calls that ended at an effect which was held back and has no recorded result."""
    failed: int = 0
    published: dict[str, int] = msgspec.field(default_factory=dict)
    """Without effects: events that would have been published, by type."""
    held_back: dict[str, int] = msgspec.field(default_factory=dict)
    """Without effects: effects of ``ctx.once`` that were not carried out, by name."""
    recorded: dict[str, int] = msgspec.field(default_factory=dict)
    """Without effects: effects of ``ctx.once`` whose recorded result was returned, by name."""
    writes: int = 0
    """Without effects: keys that transactions would have written."""
    failures: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """The first hundred: sequence, key and error."""

    @property
    def key(self) -> str:
        return handler_record_key(self.handler, self.id)

    @property
    def title(self) -> str:
        return f"replay {self.id}"

    @property
    def consumer(self) -> str:
        """The name of the durable consumer that reads the range."""
        return f"{self.handler}--replay-{self.id}"

    def __str__(self) -> str:
        how = "with effects" if self.effects else "without effects"
        lines = [
            f"{self.title} of handler {self.handler} {how}: {self.events} events, {self.reached}: {self.done} done, "
            f"{self.skipped} skipped, {self.failed} failed, {self.status}"
        ]
        if self.stopped:
            lines.append(f"{self.stopped} ended at an effect whose result is not recorded: {counted(self.held_back)}")
        if self.recorded:
            lines.append(f"recorded effects that were not repeated: {counted(self.recorded)}")
        if self.published:
            lines.append(f"would have published: {counted(self.published)}")
        if self.writes:
            lines.append(f"would have written {self.writes} keys")
        lines += [f"failed: sequence {each['sequence']}, key {each['key']}: {each['error']}" for each in self.failures]
        return "\n".join(lines)


ReplayJob: TypeAlias = Job[ReplayRecord]
R = TypeVar("R", bound=RangeRecord)


async def begin_replay(records: KeyValue, record: R) -> Job[R]:
    """Store the record of new work.

    Raises:
        ConfigError: The request has more keys than fit in a record.
    """
    size = len(record.encode())
    if size > MAX_RECORD_BYTES:
        raise ConfigError(
            f"keys: {len(record.request.keys)} of them make a record of {size} bytes, and {MAX_RECORD_BYTES} are "
            "allowed: give fewer at a time, or leave keys out to take all"
        )
    return await Job.begin(records, record)


def new_record(
    spec: ProjectionSpec, kind: ReplayKind, bucket: str, request: ReplayRequest, extent: Extent, base: str = ""
) -> ReplayRecord:
    """The record of a projection's work that begins now."""
    return ReplayRecord(
        id=new_job_id(),
        kind=kind,
        projection=spec.name,
        version=spec.version,
        bucket=bucket,
        request=request,
        stream=extent.stream,
        created=extent.created,
        first=extent.first,
        last=extent.last,
        base=base,
        began=utc_now().isoformat(),
    )


async def find_replay(records: KeyValue, spec: ProjectionSpec, id: str, kind: ReplayKind) -> ReplayJob:
    """Read the record of a projection's work, and change nothing.

    Raises:
        ConfigError: The id is unknown, or its record is of another kind.
    """
    job = await Job.find(records, ReplayRecord, record_key(spec.name, id), id)
    if job.record.kind != kind:
        raise ConfigError(f"{id!r} is a {job.record.kind}, not a {kind}")
    return job


async def resume_replay(records: KeyValue, spec: ProjectionSpec, id: str, kind: ReplayKind) -> ReplayJob:
    """Take over a projection's work that was interrupted, also if another process began it.

    Raises:
        ConfigError: The id is unknown, the work is done, or another version of the projection began it.
    """
    job = await find_replay(records, spec, id, kind)
    record = job.record
    if record.version != spec.version:
        raise ConfigError(
            f"resume {id!r}: version {record.version} of the projection has begun it, and this is version "
            f"{spec.version}: begin a new one, or run the version that began it"
        )
    if record.is_done:
        raise ConfigError(f"resume {id!r}: it is {record.status} already")
    await job.resume()
    return job


async def run_job(job: Job[R], work: Awaitable[None]) -> R:
    """Do the work of a job. An error that a retry cannot cure is saved in its record."""
    try:
        await work
    except JetSparkError as error:
        if not error.may_pass:
            await job.save(status=f"failed: {error}")
        raise
    return job.record


def record_key(projection: str, id: str) -> str:
    return f"{projection}.replay.{id}"


def handler_record_key(handler: str, id: str) -> str:
    return f"replay.{handler}.{id}"


OnUnreadable: TypeAlias = Callable[[str, ProtocolError], object]
"""Called with the key and the error of each record that cannot be decoded."""


def log_unreadable(key: str, error: ProtocolError) -> None:
    _logger.warning("record %s is left out: %s", key, error)


async def read_records(
    records: KeyValue, projection: str = "*", *, on_unreadable: OnUnreadable = log_unreadable
) -> list[ReplayRecord]:
    """The readable records of projections, oldest first."""
    return await read_all(records, record_key(projection, "*"), ReplayRecord, on_unreadable)


async def read_all(records: KeyValue, keys: str, kind: type[R], on_unreadable: OnUnreadable) -> list[R]:
    """The records under some keys, oldest first."""
    found: list[R] = []
    for key in [key async for key in records.keys(keys)]:
        try:
            found.append(kind.decode((await records.get(key, direct=False)).value))
        except ProtocolError as error:
            on_unreadable(key, error)
        except KeyNotFound:
            pass  # deleted since the keys were listed
    return sorted(found, key=lambda record: (record.began, record.id))


def counted(counts: Mapping[str, int]) -> str:
    """Counts with their names: ``2 order.paid, 1 order.shipped``."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
