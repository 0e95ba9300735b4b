"""One of several processes at a time: a key with a TTL, which its owner writes again before it goes away.

A lease saves work, and nothing else: two engines that fold the same projection at a time are wasteful and never wrong.
So nobody stops at once when the server is away, and no clock has to be right.

Who has to know that an engine stands still, to swap a bucket for instance, *seizes* its lease: the owner notices, stops
reading, and says under ``<key>.left`` that it has left. Once the lease is released an engine has it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import cast

from jetspark.aio.kv import KeyValue
from jetspark.app.patience import FOR_EVER_S, patiently
from jetspark.core.backoff import Backoff
from jetspark.errors import Conflict, JetSparkError, KeyExists, KeyNotFound
from jetspark.jetstream.kv import KVEntry

__all__ = ["Lease", "LeaseLost"]

_logger = logging.getLogger("jetspark.app")

LEASE_S = 10.0
PAUSE = Backoff(first_s=1.0, max_s=1.0)


class LeaseLost(Exception):
    """Somebody else has it."""

    def __init__(self, key: str, owner: str) -> None:
        super().__init__(f"lease {key}: {owner} has it")
        self.owner = owner


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
        await patiently(self._acquire, patience_s=FOR_EVER_S, pause=PAUSE, on_wait=self._tell)

    async def _acquire(self) -> None:
        while not await self.try_acquire():
            await self._until_free()

    def _tell(self, error: JetSparkError) -> None:
        _logger.warning("lease %s: %s", self._key, error)

    async def try_acquire(self) -> bool:
        """Take it if nobody has it; False if somebody has."""
        try:
            self._revision = await self._records.create(self._key, self._owner, ttl=self._lease_s)
        except KeyExists:
            return False
        return True

    async def keep(self) -> None:
        """Hold it for ever.

        Raises:
            LeaseLost: Another process has it: it was seized, or this one was silent for too long.
        """
        tasks = [asyncio.create_task(self._renew()), asyncio.create_task(self._notice())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def seize(self) -> str | None:
        """Take it from the process that has it, which stops; returns the owner it had, None if there was none."""
        while True:
            try:
                entry = await self._records.get(self._key, direct=False)
            except KeyNotFound:
                with suppress(KeyExists):
                    self._revision = await self._records.create(self._key, self._owner, ttl=self._lease_s)
                    return None
                continue
            with suppress(Conflict):
                self._revision = await self._records.update(
                    self._key, self._owner, revision=entry.revision, ttl=self._lease_s
                )
                return entry.value.decode(errors="replace")

    async def leave(self, owner: str) -> None:
        """Tell the process that has seized it that this one has stopped."""
        with suppress(JetSparkError):  # who waits for it waits for as long as a lease lasts
            await self._records.put(f"{self._key}.left", _farewell(self._owner, owner.encode()))

    async def until_left(self, owner: str) -> bool:
        """Wait until the process it was seized from has stopped; False if it does not say so while a lease lasts."""
        wanted = _farewell(owner.encode(), self._owner)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._lease_s), aclosing(self._watch(f"{self._key}.left")) as entries:
                async for entry in entries:
                    if entry.value == wanted:
                        return True
        return False

    async def release(self) -> None:
        """Let the next process have it at once."""
        if self._revision:
            revision, self._revision = self._revision, 0
            with suppress(JetSparkError):  # it goes away by itself
                await self._records.purge(self._key, revision=revision, ttl=self._lease_s)

    async def _renew(self) -> None:
        while True:  # not patiently: a lease is written at its pace, whether the last time failed or not
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
                self._tell(error)

    async def _notice(self) -> None:
        """See at once when another process takes it; :meth:`_renew` would see it as well, only later."""
        while True:
            try:
                async with aclosing(self._watch(self._key)) as entries:
                    async for entry in entries:
                        if entry.operation == "put" and entry.value != self._owner:
                            raise self._lost(entry.value)
            except JetSparkError as error:
                _logger.debug("lease %s: %s", self._key, error)
            await asyncio.sleep(self._lease_s)

    async def _look(self) -> None:
        """Something was written since: by another process, or by this one, whose answer was lost."""
        try:
            entry = await self._records.get(self._key, direct=False)
        except KeyNotFound:
            with suppress(KeyExists):  # another process was quicker: the next renewal finds it
                self._revision = await self._records.create(self._key, self._owner, ttl=self._lease_s)
            return
        except JetSparkError as error:
            if not error.may_pass:
                raise
            return
        if entry.value != self._owner:
            raise self._lost(entry.value)
        self._revision = entry.revision

    def _watch(self, key: str) -> AsyncGenerator[KVEntry, None]:
        return cast("AsyncGenerator[KVEntry, None]", self._records.watch(key))

    def _lost(self, owner: bytes) -> LeaseLost:
        self._revision = 0
        return LeaseLost(self._key, owner.decode(errors="replace"))

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


def _farewell(owner: bytes, seizer: bytes) -> bytes:
    return owner + b" for " + seizer
