"""Long work that another process can resume: replays, rebuilds, repairs, replays of handlers, and redrives.

A job is one record in a bucket: the request, the progress, and how the job ended. Each save is a compare-and-set on the
revision of the save before. So at most one process advances a job: when a second process resumes it, the first one
fails at its next save. Records are read from the leader, because a replica that is behind would look like a second
process.

A record is a JSON object with one member per field. It is written by ``json`` and not by msgspec: error texts may hold
a lone surrogate and ranges an integer of more than 64 bits, and msgspec encodes neither.
"""

from __future__ import annotations

import datetime
import json
import secrets
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec

from jetspark.aio.kv import KeyValue
from jetspark.app.clock import seconds_now
from jetspark.app.patience import patiently
from jetspark.errors import ConfigError, Conflict, KeyExists, KeyNotFound, ProtocolError, UsageError

__all__ = ["Job", "JobRecord", "new_job_id"]


class JobRecord(msgspec.Struct, kw_only=True):
    """The stored state of a job."""

    hint: ClassVar[str]
    """Added to the error about an unknown id: where to find known ones."""
    id: str

    @property
    def key(self) -> str:
        """The record's key in its bucket."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        """Kind and id, for messages: ``rebuild r19d0a1b2c3d``."""
        raise NotImplementedError

    @property
    def reached(self) -> str:
        """The progress, for messages: ``at 40 of 1 to 90``."""
        raise NotImplementedError

    def on_resume(self) -> None:
        """Change what a resumed job has to change, before it is saved."""

    def on_save(self) -> None:
        """Change what each save has to change."""

    def encode(self) -> bytes:
        fields = msgspec.to_builtins(self, builtin_types=(datetime.datetime,))
        return json.dumps(fields, default=datetime.datetime.isoformat).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """
        Raises:
            ProtocolError: The value is not a record of this class.
        """
        try:
            return msgspec.convert(json.loads(value), cls)
        except (ValueError, msgspec.MsgspecError) as error:
            raise ProtocolError(f"the record of a job is not readable: {value[:200]!r}") from error

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON has it."""
        fields: dict[str, object] = json.loads(self.encode())
        return fields


R = TypeVar("R", bound=JobRecord)


class Job(Generic[R]):
    """A job that this process advances; made by :meth:`begin` or :meth:`find`."""

    def __init__(self, records: KeyValue, record: R, revision: int) -> None:
        self.records, self.record = records, record
        self._revision = revision

    @classmethod
    async def begin(cls, records: KeyValue, record: R) -> Self:
        """Store the record of a new job.

        Raises:
            UsageError: A job with this key is under way.
        """
        try:
            return cls(records, record, await records.create(record.key, record.encode()))
        except KeyExists:
            entry = await records.get(record.key, direct=False)
        other = type(record).decode(entry.value)
        raise UsageError(
            f"{other.title} is under way ({other.reached}): wait for it, or if it was interrupted continue it with "
            f"--resume {other.id}"
        )

    @classmethod
    async def find(cls, records: KeyValue, kind: type[R], key: str, id: str) -> Self:
        """Read the record of a job.

        Raises:
            ConfigError: The id is unknown.
        """
        try:
            entry = await records.get(key, direct=False)
        except KeyNotFound:
            raise ConfigError(f"{id!r}: no job has this id; {kind.hint}") from None
        record = kind.decode(entry.value)
        if record.id != id:
            raise ConfigError(f"{id!r}: no job has this id; {record.title} is under way ({record.reached})")
        return cls(records, record, entry.revision)

    async def resume(self) -> None:
        """Take the job over: a process that still advances it fails at its next save."""
        self.record.on_resume()
        await self.save()

    async def save(self, **changes: object) -> None:
        """Set these fields of the record, and store it.

        Raises:
            UsageError: Another process has resumed the job.
        """
        record = self.record
        for name, value in changes.items():
            setattr(record, name, value)
        record.on_save()
        value = record.encode()
        try:
            self._revision = await patiently(lambda: self._store(value))
        except Conflict:
            raise self._taken_over() from None

    async def end(self) -> None:
        """Remove the record.

        Raises:
            UsageError: Another process has resumed the job.
        """
        try:
            await self.records.purge(self.record.key, revision=self._revision)
        except Conflict:
            raise self._taken_over() from None

    def _taken_over(self) -> UsageError:
        return UsageError(f"{self.record.title} was taken over by another process")

    async def _store(self, value: bytes) -> int:
        key = self.record.key
        try:
            return await self.records.update(key, value, revision=self._revision)
        except Conflict:
            # An earlier attempt may have been stored, and its answer lost.
            entry = await self.records.get(key, direct=False)
            if entry.value != value:
                raise
            return entry.revision


def new_job_id() -> str:
    """A new id: later ids sort behind earlier ones, and ids of the same millisecond differ."""
    return f"r{int(seconds_now() * 1000):x}{secrets.token_hex(3)}"
