"""A bucket that live engines write: its position, atomic writes to it, and pausing the engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from jetspark.aio import clock
from jetspark.aio.steps import ProcedureRunner
from jetspark.app.contracts.tokens import unescape
from jetspark.app.projections.leases import Lease, all_partitions
from jetspark.app.projections.positions import StoredPosition, read_position
from jetspark.errors import ConfigError
from jetspark.state.changes import Change, header_fields
from jetspark.state.store import StateBucket, open_bucket

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.aio.kv import KeyValue

__all__ = ["await_position", "paused_engines", "store_atomically", "stored_position"]

_logger = logging.getLogger("jetspark.app")

PAUSE_S = 0.02


async def stored_position(js: JetStream, bucket: str) -> StoredPosition:
    """The position in a bucket: the bucket has all events up to that sequence."""
    runner = ProcedureRunner(js)
    return await runner.run(read_position(await runner.run(open_bucket(bucket))))


async def await_position(js: JetStream, bucket: str, sequence: int, timeout: float) -> int | None:
    """Wait until a bucket has all events up to a sequence, for ``timeout`` seconds at most.

    Stops after half of that time without progress, since no engine seems to run. Returns the position in the bucket;
    None if it has no position.
    """
    runner = ProcedureRunner(js)
    opened = await runner.run(open_bucket(bucket))
    give_up_at = clock.now() + timeout
    seen, seen_at = -1, clock.now()
    while True:
        position = (await runner.run(read_position(opened))).sequence
        now = clock.now()
        if position is None or position >= sequence or now >= give_up_at:
            return position
        if position > seen:
            seen, seen_at = position, now
        elif now - seen_at > timeout / 2:
            return position
        await asyncio.sleep(PAUSE_S)


async def store_atomically(js: JetStream, bucket: StateBucket, changes: Sequence[Change]) -> None:
    """Write changes to a bucket, all or none: each one expects the revision it was made from.

    Raises:
        WrongLastSequence: A key has another revision; nothing was written.
        BatchInDoubt: The server did not answer in time; either all changes were written, or none.
    """
    async with js.atomic_batch() as batch:
        for change in changes:
            await batch.add(bucket.write_subject(change.key), change.value, headers=header_fields(change, ""))
    assert batch.ack is not None
    bucket.advance_seen(changes[-1].key, batch.ack.sequence)


@asynccontextmanager
async def paused_engines(records: KeyValue, projection: str, owner: str) -> AsyncIterator[None]:
    """Pause all live engines of a projection while the block runs.

    An engine that does not confirm within the duration of a lease counts as dead.
    """
    held = [key async for key in records.keys("lease.*") if _may_be_of(key.removeprefix("lease."), projection)]
    # Also partitions without an owner: a worker could acquire one during the block.
    keys = sorted({each for key in held for each in all_partitions(key)})
    seized: list[Lease] = []
    keeping: list[asyncio.Task[None]] = []
    try:
        for key in keys:
            lease = Lease(records, key, owner)
            had = await lease.seize()
            seized.append(lease)
            keeping.append(asyncio.create_task(lease.keep()))
            if had is not None and not await lease.until_left(had):
                _logger.warning("lease %s: worker %s did not confirm its pause in time; it counts as dead", key, had)
        yield
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        for lease in seized:
            await lease.release()


def _may_be_of(token: str, projection: str) -> bool:
    """False when a lease is certainly not of this projection. Leases are named by their projections; long names are
    hashed, and match every projection.
    """
    try:
        return projection in unescape(token).split("+")
    except ConfigError:
        return True
