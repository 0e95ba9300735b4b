"""How far a bucket of a projection is, and which of its keys are no keys of the projection."""

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

__all__ = ["await_position", "noted_position", "standstill", "store_together"]

_logger = logging.getLogger("jetspark.app")

PAUSE_S = 0.02


async def noted_position(js: JetStream, bucket: str) -> StoredPosition:
    """Up to which sequence a bucket has all events."""
    runner = ProcedureRunner(js)
    return await runner.run(read_position(await runner.run(open_bucket(bucket))))


async def await_position(js: JetStream, bucket: str, sequence: int, timeout: float) -> int | None:
    """Wait until a bucket has all events up to a sequence; not for longer than ``timeout``, nor when nobody folds.

    Returns how far it is; None if nobody has noted it.
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


async def store_together(js: JetStream, bucket: StateBucket, changes: Sequence[Change]) -> None:
    """Write changes of a bucket, each on the revision it expects: all of them, or none.

    Raises:
        WrongLastSequence: A key has another revision; nothing was written.
        BatchInDoubt: No answer in time; all was written, or nothing.
    """
    async with js.atomic_batch() as batch:
        for change in changes:
            await batch.add(bucket.write_subject(change.key), change.value, headers=header_fields(change, ""))
    assert batch.ack is not None
    bucket.advance_seen(changes[-1].key, batch.ack.sequence)


@asynccontextmanager
async def standstill(records: KeyValue, projection: str, owner: str) -> AsyncIterator[None]:
    """Have live engines of a projection read nothing for as long as the block lasts.

    One that does not answer for as long as a lease lasts is taken for dead.
    """
    held = [key async for key in records.keys("lease.*") if _may_be_of(key.removeprefix("lease."), projection)]
    # Partitions that nobody has now, too: somebody could take them meanwhile.
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
                _logger.warning("lease %s: %s did not say that it has stopped; it is taken for dead", key, had)
        yield
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        for lease in seized:
            await lease.release()


def _may_be_of(token: str, projection: str) -> bool:
    """Whether a worker's lease, which is named by its projections, is of this one; long names are not to be told."""
    try:
        return projection in unescape(token).split("+")
    except ConfigError:
        return True
