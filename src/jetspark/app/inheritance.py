"""What a worker has to know of others: events they had before it, events they gave up, messages nobody needs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from jetspark.app.clock import idle_s
from jetspark.app.envelope import Decoded
from jetspark.errors import JetSparkError

if TYPE_CHECKING:
    from jetspark.aio.client import Client
    from jetspark.aio.consumer import Consumer
    from jetspark.aio.stream import Stream
    from jetspark.app.handlers import HandlerMachine

__all__ = ["expect_inherited", "follow_advisories", "settle_inherited", "tidy_retries"]

_logger = logging.getLogger("jetspark.app")

# How often a worker looks whether events somebody had before it are settled.
INHERITED_POLL_S = 0.5
# A settled message of the retry stream is kept for a while: a redelivery of its event finds it, and is not run again.
TIDY_EVERY_S = 60.0
KEEP_SETTLED_S = 3600.0


async def expect_inherited(
    machine: HandlerMachine,
    consumer: Consumer,
    stream: Stream,
    read: Callable[[str, bytes, Any], tuple[Any, str | None]],
    kinds: frozenset[type],
    here: Collection[int] = (),
) -> None:
    """Have later events of a key wait for those that were delivered to somebody before, and may come again.

    Those are all that are not acknowledged and not ``here``: another worker has them, or had them when it died, or they
    were on their way to this one when its connection was lost. The server delivers them again after their ``ack_wait``,
    and meanwhile what comes behind them.
    """
    info = await consumer.info()
    if not info.ack_pending:
        return
    now, last = asyncio.get_running_loop().time(), info.delivered.stream_sequence
    async with aclosing(stream.get_messages(info.ack_floor.stream_sequence + 1)) as messages:  # type: ignore[type-var]
        async for message in messages:
            if message.sequence > last:
                break
            if message.sequence in here:
                continue
            event, key = read(message.subject, message.data, message.headers)
            if key is not None and isinstance(event, Decoded) and event.contract.kind in kinds:
                machine.expect(key, message.sequence, now)


async def settle_inherited(
    machine: HandlerMachine, consumer: Consumer, held: Callable[[], int], wake: Callable[[], None]
) -> None:
    """Forget what is settled, or is with another worker that keeps it: between processes order is not promised.

    ``held`` says how many messages of the stream this worker has.
    """
    loop, lanes = asyncio.get_running_loop(), machine.lanes
    give_up_at = loop.time() + 2 * machine.limits.ack_wait_s
    while lanes.expected and not machine.is_stopping:
        await asyncio.sleep(INHERITED_POLL_S)
        try:
            info = await consumer.info()
        except JetSparkError:
            continue
        is_over = info.ack_pending <= held() or loop.time() > give_up_at
        for sequence in lanes.expected:
            if is_over or sequence <= info.ack_floor.stream_sequence:
                lanes.gone(sequence)
        wake()


async def follow_advisories(client: Client, consumer: Consumer, bury: Callable[[int, str], Awaitable[None]]) -> None:
    """Tell of every event that the server or another client gives up, from now on."""
    place = f"{consumer.stream_name}.{consumer.name}"
    async with asyncio.TaskGroup() as tasks:
        for kind in ("MAX_DELIVERIES", "MSG_TERMINATED"):
            tasks.create_task(_bury_each(client, f"$JS.EVENT.ADVISORY.CONSUMER.{kind}.{place}", bury))


async def _bury_each(client: Client, subject: str, bury: Callable[[int, str], Awaitable[None]]) -> None:
    async with await client.subscribe(subject) as advisories:
        async for message in advisories:
            try:
                fields = json.loads(message.data)
                sequence, reason = int(fields["stream_seq"]), str(fields.get("reason") or fields.get("type", ""))
            except (ValueError, KeyError, TypeError):
                _logger.warning("not an advisory: %r", message.data[:200])
                continue
            await bury(sequence, reason)


async def tidy_retries(
    retries: Stream,
    consumer: Consumer,
    prefix: str,
    *,
    every_s: float = TIDY_EVERY_S,
    keep_s: float = KEEP_SETTLED_S,
) -> None:
    """Remove messages of a handler's retry subjects that were settled a while ago, for ever.

    ``prefix`` is ``retry.<app>.<handler>``. Its schedules are not touched: they remove themselves.
    """
    loop = asyncio.get_running_loop()
    floors: list[tuple[float, int]] = []
    """When everything up to a sequence was found to be settled."""
    while True:
        await asyncio.sleep(idle_s(every_s))
        try:
            floor = (await consumer.info()).ack_floor.stream_sequence
            if not floors or floors[-1][1] < floor:
                floors.append((loop.time(), floor))
            while floors and floors[0][0] + keep_s <= loop.time():
                _, settled = floors.pop(0)
                for what in ("due", "redrive"):
                    await retries.purge(subject=f"{prefix}.{what}.>", up_to_sequence=settled)
        except JetSparkError as error:
            _logger.warning("tidying %s: %s", prefix, error)
