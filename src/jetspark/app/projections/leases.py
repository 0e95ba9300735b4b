"""One of several processes at a time: a key with a TTL, which its owner writes again before it goes away.

A lease saves work, and nothing else: two engines that fold the same projection at a time are wasteful and never wrong.
So nobody stops at once when the server is away, and no clock has to be right.

Who has to know that an engine stands still, to swap a bucket for instance, *seizes* its lease: the owner notices, stops
reading, and says under ``<key>.left`` that it has left. Once the lease is released an engine has it again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, cast

from jetspark.aio.kv import KeyValue
from jetspark.app.contracts.tokens import unescape
from jetspark.app.patience import FOR_EVER_S, patiently
from jetspark.app.topology.names import escape_token
from jetspark.core.backoff import Backoff
from jetspark.errors import ConfigError, Conflict, JetSparkError, KeyExists, KeyNotFound
from jetspark.jetstream.kv import KVEntry

if TYPE_CHECKING:
    from jetspark.aio.kv import KeyValue

__all__ = ["Lease", "LeaseLost", "PartitionShares", "all_partitions", "part_of", "partition_lease"]

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
        await patiently(self._acquire, patience_s=FOR_EVER_S, pause=PAUSE, on_wait=self._log_failure)

    async def _acquire(self) -> None:
        while not await self.try_acquire():
            await self._until_free()

    def _log_failure(self, error: JetSparkError) -> None:
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
                await self._check_owner()
            except JetSparkError as error:
                if not error.may_pass:
                    raise
                self._log_failure(error)

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

    async def _check_owner(self) -> None:
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


def part_of(key: str, partitions: int) -> int:
    """The partition of a key, as the bucket has it."""
    return zlib.crc32(key.encode()) % partitions


class PartitionShares:
    """The partitions of one process."""

    def __init__(self, records: KeyValue, name: str, owner: str, *, partitions: int, lease_s: float) -> None:
        self._records, self._name, self._owner = records, name, owner
        self._partitions, self._lease_s = partitions, lease_s
        self._leases: dict[int, Lease] = {}
        self._keeping: dict[int, asyncio.Task[None]] = {}
        self._surplus: set[int] = set()
        self.lost: dict[int, str] = {}
        """Partitions that another process has seized, and which; it waits to hear that this one has stopped."""
        self.changed = asyncio.Event()
        """What this process should have is not what it had."""

    @property
    def wanted(self) -> frozenset[int]:
        """What this process should fold."""
        return frozenset(self._leases.keys() - self._surplus)

    async def release_unwanted(self) -> None:
        """Let go of what is not to be had any more; nothing of it is folded here now."""
        self.changed.clear()
        # Only what was known when folding stopped: more may be lost while others are told.
        lost, surplus = dict(self.lost), set(self._surplus)
        for part, owner in lost.items():
            await self._lease(part).leave(owner)
            del self.lost[part]
        for part in surplus:
            await self._give_up(part)
        self._surplus -= surplus

    async def run(self) -> None:
        """Take and give back, until cancelled.

        Raises:
            JetSparkError: The server refuses it for good.
        """
        name = f"member.{escape_token(self._name)}"
        member = Lease(self._records, f"{name}.{self._owner}", self._owner, lease_s=self._lease_s)
        await member.acquire()
        living = asyncio.create_task(member.keep())
        try:
            # Not patiently: shares are looked at again and again, whatever came of the last look.
            while not living.done():
                try:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._lease_s):
                            await self._balance(name)
                except JetSparkError as error:
                    if not error.may_pass:
                        raise
                    _logger.warning("partitions of %s: %s", self._name, error)
                await asyncio.wait([living], timeout=self._lease_s / 4)
            living.result()
        finally:
            living.cancel()
            await asyncio.wait([living])
            for part in list(self._leases):
                await self._give_up(part)
            await member.release()

    async def _balance(self, name: str) -> None:
        members = [key async for key in self._records.keys(f"{name}.*")]
        share = math.ceil(self._partitions / max(1, len(members)))
        mine = sorted(self.wanted)
        if len(mine) > share:
            self._surplus |= set(mine[share:])
            self.changed.set()
        # Each begins at another place, so that two that come together seldom want the same one.
        begin = part_of(self._owner, self._partitions)
        for step in range(self._partitions):
            part = (begin + step) % self._partitions
            if len(self.wanted) >= share:
                return
            if part not in self._leases and part not in self.lost:
                await self._acquire_part(part)

    async def _acquire_part(self, part: int) -> None:
        lease = self._lease(part)
        if await lease.try_acquire():
            self._leases[part] = lease
            self._keeping[part] = asyncio.create_task(self._keep(part, lease))
            self.changed.set()

    async def _keep(self, part: int, lease: Lease) -> None:
        try:
            await lease.keep()
        except LeaseLost as error:
            self.lost[part] = error.owner
        except JetSparkError as error:
            _logger.warning("partition %d of %s: %s", part, self._name, error)
        self._leases.pop(part, None)
        self._keeping.pop(part, None)
        self._surplus.discard(part)
        self.changed.set()

    async def _give_up(self, part: int) -> None:
        task, lease = self._keeping.pop(part, None), self._leases.pop(part, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if lease is not None:
            await lease.release()

    def _lease(self, part: int) -> Lease:
        key = partition_lease(self._name, part, self._partitions)
        return Lease(self._records, key, self._owner, lease_s=self._lease_s)


def partition_lease(name: str, part: int, partitions: int) -> str:
    """The key of the lease of a partition; who wants those of a projection takes it apart at the plus signs."""
    return f"lease.{escape_token(f'{name}+{part}.{partitions}')}"


def all_partitions(lease: str) -> list[str]:
    """The keys of the leases of all partitions, if this is one of them; else this one alone."""
    try:
        name, _, share = unescape(lease.removeprefix("lease.")).rpartition("+")
    except ConfigError:
        return [lease]
    part, _, partitions = share.partition(".")
    if not name or not part.isdecimal() or not partitions.isdecimal():
        return [lease]
    return [partition_lease(name, each, int(partitions)) for each in range(int(partitions))]
