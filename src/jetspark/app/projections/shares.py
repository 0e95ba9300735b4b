"""Which partitions of the keys a process has: a lease for each, and as many as its share.

With ``LiveOptions(partitions=8)`` the keys of projections are in eight parts, by a hash of the key. Processes say that
they live in records with a TTL; each takes free partitions until it has its share, the number of partitions divided by
that of processes, rounded up. One with more than its share gives the rest back when another process comes. What a
process does with its partitions is decided by nobody but itself: as with one lease for all, two that fold the same keys
at a time are wasteful and never wrong.
"""

from __future__ import annotations

import asyncio
import logging
import math
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING

from jetspark.app.contracts.tokens import unescape
from jetspark.app.projections.leases import Lease, LeaseLost
from jetspark.app.topology.names import escape_token
from jetspark.errors import ConfigError, JetSparkError

if TYPE_CHECKING:
    from jetspark.aio.kv import KeyValue

__all__ = ["PartitionShares", "all_partitions", "part_of", "partition_lease"]

_logger = logging.getLogger("jetspark.app")


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

    async def settle(self) -> None:
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
                await self._take(part)

    async def _take(self, part: int) -> None:
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
