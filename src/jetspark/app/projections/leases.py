"""One of several processes at a time: a key with a TTL, which its owner writes again before it goes away.

A lease saves work, and nothing else: two engines that fold the same projection at a time are wasteful and never wrong.
So nobody stops at once when the server is away, and no clock has to be right.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import cast

from jetspark.aio.kv import KeyValue
from jetspark.errors import Conflict, JetSparkError, KeyExists, KeyNotFound
from jetspark.jetstream.kv import KVEntry

__all__ = ["Lease", "LeaseLost"]

_logger = logging.getLogger("jetspark.app")

LEASE_S = 10.0
RETRY_S = 1.0


class LeaseLost(Exception):
    """Somebody else has it."""


class Lease:
    """A place that one process has at a time.

    Args:
        records: A bucket with ``limit_marker_ttl_s``.
        key: What it is for.
        owner: A name that no other process has.
    """

    def __init__(self, records: KeyValue, key: str, owner: str, *, lease_s: float = LEASE_S) -> None:
        self._records, self._key, self._owner = records, key, owner.encode()
        self._lease_s = lease_s
        self._revision = 0

    async def acquire(self) -> None:
        """Return when it is ours; for as long as another process has it, wait."""
        while True:
            try:
                self._revision = await self._records.create(self._key, self._owner, ttl=self._lease_s)
                return
            except KeyExists:
                pass
            except JetSparkError as error:
                if not error.may_pass:
                    raise
                _logger.warning("lease %s: %s", self._key, error)
                await asyncio.sleep(RETRY_S)
                continue
            await self._until_free()

    async def keep(self) -> None:
        """Hold it for ever.

        Raises:
            LeaseLost: Another process has it: this one was silent for too long.
        """
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                self._revision = await self._records.update(
                    self._key, self._owner, revision=self._revision, ttl=self._lease_s
                )
            except Conflict:
                await self._look()
            except JetSparkError as error:
                if not error.may_pass:
                    raise
                _logger.warning("lease %s: %s", self._key, error)

    async def release(self) -> None:
        """Let the next process have it at once."""
        if self._revision:
            revision, self._revision = self._revision, 0
            with suppress(JetSparkError):  # it goes away by itself
                await self._records.purge(self._key, revision=revision, ttl=self._lease_s)

    async def _look(self) -> None:
        """Something was written since: by another process, or by this one, whose answer was lost."""
        try:
            entry = await self._records.get(self._key)
        except KeyNotFound:
            self._revision = await self._records.create(self._key, self._owner, ttl=self._lease_s)
            return
        except JetSparkError as error:
            if not error.may_pass:
                raise
            return
        if entry.value != self._owner:
            self._revision = 0
            raise LeaseLost(f"lease {self._key}: {entry.value.decode(errors='replace')} has it")
        self._revision = entry.revision

    async def _until_free(self) -> None:
        watch = cast("AsyncGenerator[KVEntry | None, None]", self._records.watch(self._key, initial_marker=True))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._lease_s), aclosing(watch) as entries:
                is_taken = False
                async for entry in entries:
                    if entry is None:
                        if not is_taken:
                            return
                    elif entry.operation == "put":
                        is_taken = True
                    else:
                        return
