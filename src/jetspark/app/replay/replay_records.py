"""The record of each replay and rebuild: what was asked for, how far it is, and how it ended.

It is a key of the bucket ``<app>_projections``, ``<projection>.replay.<id>``, and stays when the work is done. It is
written by compare-and-set: a replay that somebody else has resumed meanwhile ends at its next note. So it is read from
the leader: what a replica has that is a moment behind would look as if somebody else had written since.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeAlias, TypeVar

from jetspark.app.clock import seconds_now, utc_now
from jetspark.app.extents import Extent, ReplayRequest
from jetspark.app.patience import patiently
from jetspark.core.arguments import instance
from jetspark.errors import ConfigError, Conflict, JetSparkError, KeyNotFound, ProtocolError, UsageError

if TYPE_CHECKING:
    from jetspark.aio.kv import KeyValue
    from jetspark.app.projections.projection_spec import ProjectionSpec

__all__ = [
    "NoteKeeper",
    "OnUnreadable",
    "RecordKeeper",
    "ReplayKind",
    "ReplayRecord",
    "RequestRecord",
    "begin_record",
    "log_unreadable",
    "new_id",
    "noting",
    "read_all",
    "read_records",
]

_logger = logging.getLogger("jetspark.app")

ReplayKind: TypeAlias = Literal["replay", "rebuild", "repair"]


MAX_RECORD_BYTES = 768 << 10
"""Of a record that begins. A server takes a megabyte, and failures and counts are added later."""
# Of the fields of records: what others have written there may have any.
_KINDS: dict[str, type] = {"str": str, "int": int, "dict[str, Any]": dict, "dict[str, int]": dict}


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What was asked for, and where the work is, as JSON."""

    request: ReplayRequest
    id: str
    began: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "request": self.request.to_dict()}

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """
        Raises:
            ProtocolError: It is no such record.
        """
        try:
            fields = json.loads(value)
            record = cls(**{**fields, "request": ReplayRequest.from_dict(fields["request"])})
            for each in dataclasses.fields(cls):
                instance(each.name, getattr(record, each.name), _KINDS.get(str(each.type), object), str(each.type))
            return record
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"the record of a replay is not readable: {value[:200]!r}") from error


@dataclass(slots=True, kw_only=True)
class ReplayRecord(RequestRecord):
    """One replay, rebuild of a whole projection, or repair of single keys."""

    kind: ReplayKind
    projection: str
    version: int
    bucket: str
    """What it writes to."""
    stream: str
    created: str
    """Tells the stream from a later one of the same name."""
    first: int
    last: int
    """The end that was frozen when it began."""
    outline: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of a replay: subjects, times and gaps of what it reads."""
    at: int = 0
    """Events up to this sequence were read."""
    events: int = 0
    keys: int = 0
    """Keys that the events are of."""
    changed: int = 0
    """Keys that were written."""
    parked: int = 0
    """Keys that are parked, and stay so."""
    unreadable: int = 0
    """Events that no engine can read, and every engine leaves out."""
    status: str = "running"
    """``running``, also where nobody is at it any more; ``done``; of a rebuild ``built``, then ``swapped``, or
    ``dropped``; or ``failed: <why>``.
    """
    base: str = ""
    """Of a rebuild that did not begin with the first event: the bucket whose states it began with. ``first`` is where
    its history begins.
    """
    replaced: str = ""
    """Of a rebuild that was swapped: the bucket that was in use before, until it is dropped."""
    noted: str = ""

    @property
    def key(self) -> str:
        """Under which the bucket has it."""
        return record_key(self.projection, self.id)

    @property
    def extent(self) -> Extent:
        return Extent(stream=self.stream, created=self.created, first=self.first, last=self.last)

    @property
    def is_done(self) -> bool:
        return self.status in ("done", "swapped", "dropped")

    def __str__(self) -> str:
        what = f"{self.kind} {self.id} of {self.projection}"
        read = f"{self.events} events of {self.keys} keys, at {self.at} of {self.first} to {self.last}"
        if self.is_done and not self.changed and self.kind == "replay":
            changed = "nothing changed: the state has all of it"
        else:
            changed = f"{self.changed} keys written"
        parked = f", {self.parked} keys are parked" if self.parked else ""
        bucket = f", bucket {self.bucket}" if self.kind == "rebuild" else ""
        if self.base:
            bucket += f" with the states of {self.base} before {self.first}"
        return f"{what}: {read}: {changed}{parked}{bucket}, {self.status}"


class KeptRecord(Protocol):
    """What a keeper has to know of a record."""

    id: str
    kind: Any
    noted: str
    request: ReplayRequest

    @property
    def key(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=KeptRecord)
D = TypeVar("D", bound=RequestRecord)


class NoteKeeper(Generic[R]):
    """Keeps one record up to date, for as long as no other process has resumed it."""

    def __init__(self, records: KeyValue, record: R, revision: int) -> None:
        self.records, self.record, self._revision = records, record, revision

    @classmethod
    async def begin(cls, records: KeyValue, record: R) -> Self:
        """Write a new record.

        Raises:
            ConfigError: It has more keys than fit.
        """
        value = json.dumps(record.to_dict()).encode()
        if len(value) > MAX_RECORD_BYTES:
            raise ConfigError(
                f"keys: {len(record.request.keys)} of them make a record of {len(value)} bytes, and {MAX_RECORD_BYTES} "
                "are allowed: give fewer at a time, or none, which is all"
            )
        return cls(records, record, await records.create(record.key, value))

    async def note(self, **changes: Any) -> None:
        """Write what is known now.

        Raises:
            UsageError: Another process has resumed it.
        """
        record = self.record
        for name, value in changes.items():
            setattr(record, name, value)
        record.noted = utc_now().isoformat()
        value = json.dumps(record.to_dict()).encode()
        try:
            self._revision = await patiently(lambda: self._write(value))
        except Conflict:
            raise UsageError(f"{record.kind} {record.id} was taken over by another process") from None

    async def _write(self, value: bytes) -> int:
        key = self.record.key
        try:
            return await self.records.update(key, value, revision=self._revision)
        except Conflict:
            # The answer to an earlier attempt may have been lost.
            entry = await self.records.get(key, direct=False)
            if entry.value != value:
                raise
            return entry.revision


class RecordKeeper(NoteKeeper[ReplayRecord]):
    """Keeps the record of one replay of a projection."""

    @classmethod
    async def resume(cls, records: KeyValue, spec: ProjectionSpec, id: str, kind: ReplayKind) -> RecordKeeper:
        """Go on with a replay that was interrupted, also with one that another process began.

        Raises:
            ConfigError: There is none, it is done, or another version of the projection has begun it.
        """
        keeper = await cls.find(records, spec, id, kind)
        record = keeper.record
        if record.version != spec.version:
            raise ConfigError(
                f"resume {id!r}: version {record.version} of the projection has begun it, and this is version "
                f"{spec.version}: begin a new one, or run the version that began it"
            )
        if record.is_done:
            raise ConfigError(f"resume {id!r}: it is {record.status} already")
        await keeper.note(status="running")
        return keeper

    @classmethod
    async def find(cls, records: KeyValue, spec: ProjectionSpec, id: str, kind: ReplayKind) -> RecordKeeper:
        """The record of a replay, as it is.

        Raises:
            ConfigError: There is none.
        """
        try:
            entry = await records.get(record_key(spec.name, id), direct=False)
        except KeyNotFound:
            raise ConfigError(f"{kind} {id!r}: there is no record of it; `jetspark replays` lists them") from None
        record = ReplayRecord.decode(entry.value)
        if record.kind != kind:
            raise ConfigError(f"{id!r}: it is a {record.kind}, expected a {kind}")
        return cls(records, record, entry.revision)


async def begin_record(
    records: KeyValue,
    spec: ProjectionSpec,
    kind: ReplayKind,
    bucket: str,
    request: ReplayRequest,
    extent: Extent,
    base: str = "",
) -> RecordKeeper:
    """Write the record of something that begins now."""
    record = ReplayRecord(
        id=new_id(),
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
    return await RecordKeeper.begin(records, record)


async def noting(keeper: NoteKeeper[R], work: Awaitable[None]) -> R:
    """Do the work; if it fails for good, the record says why."""
    try:
        await work
    except JetSparkError as error:
        if not error.may_pass:
            await keeper.note(status=f"failed: {error}")
        raise
    return keeper.record


def new_id() -> str:
    """Of a replay: later ones sort behind earlier ones, and several may begin in the same millisecond."""
    return f"r{int(seconds_now() * 1000):x}{secrets.token_hex(3)}"


def record_key(projection: str, id: str) -> str:
    return f"{projection}.replay.{id}"


OnUnreadable: TypeAlias = Callable[[str, ProtocolError], Any]
"""Is told the key of a record that nobody can read, and why."""


def log_unreadable(key: str, error: ProtocolError) -> None:
    _logger.warning("%s is left out: %s", key, error)


async def read_records(
    records: KeyValue, projection: str = "*", *, on_unreadable: OnUnreadable = log_unreadable
) -> list[ReplayRecord]:
    """Every record, oldest first; one that nobody can read is left out, and told of."""
    return await read_all(records, record_key(projection, "*"), ReplayRecord, on_unreadable)


async def read_all(records: KeyValue, keys: str, kind: type[D], on_unreadable: OnUnreadable) -> list[D]:
    """The records under some keys, oldest first."""
    found: list[D] = []
    for key in [key async for key in records.keys(keys)]:
        try:
            found.append(kind.decode((await records.get(key, direct=False)).value))
        except ProtocolError as error:
            on_unreadable(key, error)
        except KeyNotFound:
            pass  # it was deleted meanwhile
    return sorted(found, key=lambda record: (record.began, record.id))
