"""What a worker has to know of others: events they had before it, messages nobody needs."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from jetspark.app.clock import idle_s
from jetspark.errors import JetSparkError

if TYPE_CHECKING:
    from jetspark.aio.consumer import Consumer
    from jetspark.aio.stream import Stream
    from jetspark.app.handlers.machine import HandlerMachine
    from jetspark.jetstream.info import StoredMessage

__all__ = ["expect_inherited", "settle_inherited", "tidy_copies", "tidy_retries"]

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
    read: Callable[[StoredMessage], tuple[int, str] | None],
    here: Collection[int] = (),
) -> dict[int, int]:
    """Have later events of a key wait for those that were delivered to somebody before, and may come again.

    Those are all that are not acknowledged and not ``here``: another worker has them, or had them when it died, or they
    were on their way to this one when its connection was lost. The server delivers them again after their ``ack_wait``,
    and meanwhile what comes behind them.

    Returns their sequences: where they were published, and in the stream of the consumer. ``read`` finds the former,
    and the key; None for what the handler does not take.
    """
    info = await consumer.info()
    found: dict[int, int] = {}
    if not info.ack_pending:
        return found
    now, last = asyncio.get_running_loop().time(), info.delivered.stream_sequence
    filters = info.config.filter_subject
    stored = stream.get_messages(info.ack_floor.stream_sequence + 1, subject=filters or None)
    async with aclosing(stored) as messages:  # type: ignore[type-var]
        async for message in messages:
            if message.sequence > last:
                break
            event = read(message)
            if event is not None and event[0] not in here:
                machine.expect(event[1], event[0], now)
                found[event[0]] = message.sequence
    return found


async def settle_inherited(
    machine: HandlerMachine,
    consumer: Consumer,
    expected: dict[int, int],
    held: Callable[[], set[Any]],
    before_gone: Callable[[], Awaitable[None]],
    wake: Callable[[], None],
    *,
    gives_up: bool,
) -> None:
    """Forget what somebody else has settled, until nothing is ``expected`` any more.

    ``held`` are the messages of the consumer that this worker has and has not answered. With ``gives_up`` what another
    worker keeps for long is not waited for: without partitions order is not promised between processes.
    """
    loop, lanes = asyncio.get_running_loop(), machine.lanes
    since: dict[int, float] = {}
    """Each is waited for by itself: with a bad network there is always one that is expected, and another one later."""
    while expected and not machine.is_stopping:
        since = {each: since.get(each, loop.time()) for each in expected}
        await asyncio.sleep(INHERITED_POLL_S)
        before = held()
        try:
            info = await consumer.info()
            # Had before the question and after it: none of these was settled when the server answered.
            is_over = info.ack_pending <= len(before & held())
            floor = info.ack_floor.stream_sequence
            arrived = expected.keys() - set(lanes.expected)
            given_up_before = loop.time() - 2 * machine.limits.ack_wait_s if gives_up else -math.inf
            settled = [
                each
                for each, own in expected.items()
                if each not in arrived and (is_over or own <= floor or since.get(each, math.inf) < given_up_before)
            ]
            if settled:
                await before_gone()
        except JetSparkError:
            continue
        for sequence in arrived:
            expected.pop(sequence, None)
        for sequence in settled:
            lanes.gone(sequence)
            expected.pop(sequence, None)
        wake()


async def tidy_retries(
    retries: Stream,
    consumer: Consumer,
    prefix: str,
    *,
    partition: int | None = None,
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
                    subject = f"{prefix}.{what}.>" if partition is None else f"{prefix}.{what}-{partition}.>"
                    await retries.purge(subject=subject, up_to_sequence=settled)
        except JetSparkError as error:
            _logger.warning("tidying %s: %s", prefix, error)


async def tidy_copies(
    copies: Stream, consumers: Sequence[Consumer], *, every_s: float = TIDY_EVERY_S, keep_s: float = KEEP_SETTLED_S
) -> None:
    """Remove copies that every partition settled a while ago, for ever; the last one stays.

    A restarted server goes on copying after the last copy it finds, and from the beginning if it finds none.
    """
    loop = asyncio.get_running_loop()
    floors: list[tuple[float, int]] = []
    while True:
        await asyncio.sleep(every_s)
        try:
            last = (await copies.info()).state.last_sequence
            settled = last - 1
            for consumer in consumers:
                info = await consumer.info()
                if info.ack_pending or info.pending:
                    settled = min(settled, info.ack_floor.stream_sequence)
            if settled > (floors[-1][1] if floors else 0):
                floors.append((loop.time(), settled))
            while floors and floors[0][0] + keep_s <= loop.time():
                await copies.purge(up_to_sequence=floors.pop(0)[1])
        except JetSparkError as error:
            _logger.warning("tidying %s: %s", copies.name, error)
