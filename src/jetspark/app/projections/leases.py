"""Leases: keys with a TTL that one process owns at a time, and renews before they expire.

A lease only avoids duplicate work. Two engines that fold the same projection at the same time are wasteful and never
wrong. So an owner continues while the server is away, and correctness does not depend on clocks.

To make an engine stand still, for instance to swap a bucket, a process *seizes* its lease. The owner notices, stops
reading, and writes ``<key>.left``. Once the lease is released, an engine can acquire it again.

With ``LiveOptions(partitions=8)`` the keys of projections are divided into eight partitions by a hash, with a lease for
each. Every process announces itself in a record with a TTL, and acquires free partitions up to its share: the number of
partitions divided by the number of processes, rounded up. A process with more than its share releases the rest when
another process joins. Each process decides alone; two that fold the same partition for a moment are wasteful and never
wrong.
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
from jetspark.app.patience import UNLIMITED_S, patiently
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
    """Another process owns the lease."""

    def __init__(self, key: str, owner: str) -> None:
        super().__init__(f"lease {key} is owned by {owner}")
        self.owner = owner


class Lease:
    """A key that at most one process owns at a time, unless the server was away for longer than its TTL.

    Args:
        records: A bucket with ``limit_marker_ttl_s``.
        key: The key of the lease.
        owner: A name that no other process has.
    """

    def __init__(self, records: KeyValue, key: str, owner: str, *, lease_s: float = LEASE_S) -> None:
        self._records, self._key, self._owner = records, key, owner.encode()
        self._lease_s = lease_s
        self._revision = 0

    async def acquire(self) -> None:
        """Wait until this process owns the lease."""
        await patiently(self._acquire, patience_s=UNLIMITED_S, pause=PAUSE, on_wait=self._log_failure)

    async def _acquire(self) -> None:
        while not await self.try_acquire():
            await self._until_free()

    def _log_failure(self, error: JetSparkError) -> None:
        _logger.warning("lease %s: %s; trying again", self._key, error)

    async def try_acquire(self) -> bool:
        """Acquire the lease if it is free; False if another process owns it."""
        try:
            self._revision = await self._records.create(self._key, self._owner, ttl=self._lease_s)
        except KeyExists:
            return False
        return True

    async def keep(self) -> None:
        """Renew the lease until cancelled.

        Raises:
            LeaseLost: Another process owns it: the lease was seized, or it expired before it was renewed.
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
        """Take the lease from its owner, which then stops; returns that owner, or None if the lease was free."""
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
        """Report to the process that seized the lease that this one has stopped."""
        with suppress(JetSparkError):  # the other process waits for at most one lease period
            await self._records.put(f"{self._key}.left", _farewell(self._owner, owner.encode()))

    async def until_left(self, owner: str) -> bool:
        """Wait until the previous owner has stopped; False if it does not report that within one lease period."""
        wanted = _farewell(owner.encode(), self._owner)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._lease_s), aclosing(self._watch(f"{self._key}.left")) as entries:
                async for entry in entries:
                    if entry.value == wanted:
                        return True
        return False

    async def release(self) -> None:
        """Free the lease, so that the next process need not wait until it expires."""
        if self._revision:
            revision, self._revision = self._revision, 0
            with suppress(JetSparkError):  # the key expires anyway
                await self._records.purge(self._key, revision=revision, ttl=self._lease_s)

    async def _renew(self) -> None:
        while True:  # no backoff: the lease is renewed at a fixed interval, whether the last renewal failed or not
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
        """Notice at once when another process takes the lease; :meth:`_renew` would notice later."""
        while True:
            try:
                async with aclosing(self._watch(self._key)) as entries:
                    async for entry in entries:
                        if entry.operation == "put" and entry.value != self._owner:
                            raise self._lost(entry.value)
            except JetSparkError as error:
                _logger.debug("lease %s: watch ended (%s); it is started again", self._key, error)
            await asyncio.sleep(self._lease_s)

    async def _check_owner(self) -> None:
        """A renewal conflicted: another process wrote the key, or the answer to our own last write was lost."""
        try:
            entry = await self._records.get(self._key, direct=False)
        except KeyNotFound:
            with suppress(KeyExists):  # another process acquired it first: the next renewal raises
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
    """The partition of a key in its bucket spelling."""
    return zlib.crc32(key.encode()) % partitions


class PartitionShares:
    """The partitions that one process owns, and their leases."""

    def __init__(self, records: KeyValue, name: str, owner: str, *, partitions: int, lease_s: float) -> None:
        self._records, self._name, self._owner = records, name, owner
        self._partitions, self._lease_s = partitions, lease_s
        self._leases: dict[int, Lease] = {}
        self._keeping: dict[int, asyncio.Task[None]] = {}
        self._surplus: set[int] = set()
        self.lost: dict[int, str] = {}
        """Partitions that were seized, by the process that did it; it waits until this one reports that it has stopped.
        """
        self.changed = asyncio.Event()
        """Set when the partitions to fold have changed."""

    @property
    def wanted(self) -> frozenset[int]:
        """The partitions to fold."""
        return frozenset(self._leases.keys() - self._surplus)

    async def release_unwanted(self) -> None:
        """Release seized and surplus partitions; call it only while no engine folds them."""
        self.changed.clear()
        # Copies: more partitions may be lost during the awaits below, and those are still being folded.
        lost, surplus = dict(self.lost), set(self._surplus)
        for part, owner in lost.items():
            await self._lease(part).leave(owner)
            del self.lost[part]
        for part in surplus:
            await self._give_up(part)
        self._surplus -= surplus

    async def run(self) -> None:
        """Acquire and release partitions according to the share, until cancelled.

        Raises:
            JetSparkError: The server refuses a request permanently.
        """
        name = f"member.{escape_token(self._name)}"
        member = Lease(self._records, f"{name}.{self._owner}", self._owner, lease_s=self._lease_s)
        await member.acquire()
        living = asyncio.create_task(member.keep())
        try:
            # No backoff: shares are computed at a fixed interval, whether the last attempt failed or not.
            while not living.done():
                try:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._lease_s):
                            await self._balance(name)
                except JetSparkError as error:
                    if not error.may_pass:
                        raise
                    _logger.warning("partitions of %s: %s; trying again", self._name, error)
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
        # Each process starts at another partition, so two that join at once seldom compete for the same one.
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
            _logger.warning(
                "partition %d of %s: lease cannot be renewed (%s); partition given up", part, self._name, error
            )
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
    """The key of a partition's lease. The last plus sign separates the name from the partition and their number."""
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
