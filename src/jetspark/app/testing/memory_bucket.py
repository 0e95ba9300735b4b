"""A bucket in memory: as much of a ``KeyValue`` as recorded effects and transactions of handlers use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from jetspark.aio.kv import KeyValue
from jetspark.errors import Conflict, KeyExists, KeyNotFound

__all__ = ["MemoryBucket"]


@dataclass(frozen=True, slots=True)
class _MemoryEntry:
    value: bytes
    revision: int


class MemoryBucket:
    """Values by key, each with its revision. It has one user at a time, so that writes happen at once."""

    def __init__(self, values: Mapping[str, bytes] | None = None, name: str = "memory") -> None:
        self.name = name
        self._entries: dict[str, _MemoryEntry] = {}
        self._revision = 0
        for key, value in (values or {}).items():
            self._write(key, value)

    @property
    def values(self) -> dict[str, bytes]:
        return {key: entry.value for key, entry in self._entries.items()}

    def as_kv(self) -> KeyValue:
        """This bucket, typed as the real one."""
        return cast(KeyValue, self)

    async def get(self, key: str) -> _MemoryEntry:
        if key not in self._entries:
            raise KeyNotFound(self.name, key)
        return self._entries[key]

    async def put(self, key: str, value: bytes) -> int:
        return self._write(key, value)

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        if key in self._entries:
            raise KeyExists(self.name, (key,))
        return self._write(key, value)

    async def update(self, key: str, value: bytes, *, revision: int, ttl: float | None = None) -> int:
        await self.expect(key, revision=revision)
        return self._write(key, value)

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        if revision is not None:
            await self.expect(key, revision=revision)
        self._entries.pop(key, None)

    async def expect(self, key: str, *, revision: int) -> None:
        known = self._entries.get(key)
        if (known.revision if known is not None else 0) != revision:
            raise Conflict(self.name, (key,))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[MemoryBucket]:
        """All writes of the block, or none."""
        before = dict(self._entries)
        try:
            yield self
        except BaseException:
            self._entries = before
            raise

    def _write(self, key: str, value: bytes) -> int:
        self._revision += 1
        self._entries[key] = _MemoryEntry(value, self._revision)
        return self._revision
