"""What a worker has to know of others: events they had before it, messages nobody needs."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import TYPE_CHECKING, TypeAlias

from jetspark.app.clock import idle_s, utc_now
from jetspark.core.subjects import is_subset
from jetspark.errors import JetSparkError, TopologyDrift

if TYPE_CHECKING:
    from jetspark.aio.consumer import Consumer
    from jetspark.aio.stream import Stream
    from jetspark.app.handlers.machine import HandlerMachine
    from jetspark.jetstream.config import ConsumerConfig
    from jetspark.jetstream.info import ConsumerInfo, StoredMessage

    ReadKey: TypeAlias = Callable[[StoredMessage], Awaitable[tuple[int, str] | None]]

__all__ = ["expect_inherited", "filters_of", "settle_inherited", "tidy_copies", "tidy_retries", "watch_filters"]

_logger = logging.getLogger("jetspark.app")

# How often a worker looks whether events somebody had before it are settled.
INHERITED_POLL_S = 0.5
# A settled message of the retry stream is kept for a while: a redelivery of its event finds it, and is not run again.
TIDY_EVERY_S = 60.0
# How often it is looked whether a consumer still takes what it did; a worker asks as often with many partitions.
FILTERS_EVERY_S = 5.0
KEEP_SETTLED_S = 3600.0


async def expect_inherited(
    machine: HandlerMachine,
    consumer: Consumer,
    stream: Stream,
    reading: Callable[[ConsumerInfo], AbstractAsyncContextManager[ReadKey]],
) -> dict[int, int]:
    """Have later events of a key wait for those that were delivered to somebody before, and may come again.

    Those are all that are not acknowledged: another worker has them, or had them when it died, or they were on their
    way to this one when its connection was lost. The server delivers them again after their ``ack_wait``, and meanwhile
    what comes behind them.

    Returns their sequences: where they were published, and in the stream of the consumer. What ``reading`` gives finds
    the former, and the key; None for what the handler does not take, and for what this worker has.
    """
    info = await consumer.info()
    if not info.ack_pending:
        return {}
    keys: dict[int, str] = {}
    found: dict[int, int] = {}
    last = info.delivered.stream_sequence
    filters = info.config.filter_subject
    stored = stream.get_messages(info.ack_floor.stream_sequence + 1, subject=filters or None)
    async with reading(info) as read, aclosing(stored) as messages:  # type: ignore[type-var]
        async for message in messages:
            if message.sequence > last:
                break
            event = await read(message)
            if event is not None:
                sequence, keys[sequence] = event
                found[sequence] = message.sequence
    # Together, once all of them are read: an expectation of a look-up that failed or was cancelled half-way would be
    # in no list of those that are settled, and hold back its key for as long as this process lives.
    now = asyncio.get_running_loop().time()
    for sequence, key in keys.items():
        machine.expect(key, sequence, now)
    return found


async def settle_inherited(
    machine: HandlerMachine,
    consumer: Consumer,
    expected: dict[int, int],
    held: Callable[[], set[tuple[int, bool]]],
    lapsed: Collection[int],
    before_gone: Callable[[], Awaitable[None]],
    wake: Callable[[], None],
    *,
    gives_up: bool,
) -> None:
    """Forget what somebody else has settled, until nothing is ``expected`` any more.

    ``held`` are the messages of the consumer that this worker has and has not answered: their sequences, and whether
    they were delivered for the first time. :func:`_settled_floor` says what the server's answer means.

    With ``gives_up`` what another worker keeps for long is not waited for: without partitions order is not promised
    between processes.
    """
    loop, lanes = asyncio.get_running_loop(), machine.lanes
    all_held_since = math.inf
    """Since when everything that is pending is held, with what was delivered again."""
    since: dict[int, float] = {}
    """Each is waited for by itself: with a bad network there is always one that is expected, and another one later."""
    while expected and not machine.is_stopping:
        since = {each: since.get(each, loop.time()) for each in expected}
        await asyncio.sleep(INHERITED_POLL_S)
        before = held()
        try:
            info = await consumer.info()
            last = info.delivered.stream_sequence
            # Had before the question and after it: none of these was settled when the server answered.
            pending = [is_first for own, is_first in before & held() if own <= last]
            coming = sum(1 for each, own in expected.items() if each in lapsed and own <= last)
            floor, is_all_here = _settled_floor(info, pending, coming)
            all_held_since = min(all_held_since, loop.time()) if is_all_here else math.inf
            is_over = loop.time() - all_held_since > machine.limits.ack_wait_s
            arrived = expected.keys() - set(lanes.expected)
            given_up_before = loop.time() - 2 * machine.limits.ack_wait_s if gives_up else -math.inf
            settled = [
                each
                for each, own in expected.items()
                if each not in arrived
                and (
                    own <= floor
                    or (is_over and own <= last and each not in lapsed)
                    or since.get(each, math.inf) < given_up_before
                )
            ]
            if settled:
                await before_gone()
        except JetSparkError as error:
            _logger.warning("looking whether events of other workers are settled: %s", error)
            all_held_since = math.inf
            continue
        for sequence in arrived:
            expected.pop(sequence, None)
        for sequence in settled:
            lanes.gone(sequence)
            expected.pop(sequence, None)
        wake()


def _settled_floor(info: ConsumerInfo, pending: Sequence[bool], coming: int) -> tuple[int, bool]:
    """Up to which sequence everything is settled, and whether all that is pending is here or was here.

    Settled is what lies at or below the consumer's ack floor; and everything delivered, if all that is pending is held
    here. The server only counts what is pending, so each one that is counted here has to be pending there, too:

    * a server that was restarted may have forgotten its last deliveries: then ``delivered`` is below them;
    * an event without a confirmed ``in_progress`` for an ``ack_wait`` does not count: another worker may have
      acknowledged it;
    * another worker, which was taken for dead, may have acknowledged what is delivered again here. So these count only
      when that is all there is for a whole ``ack_wait``, in which an expected event would have come again. With them
      count those of the expected events that this worker had, and let go of.

    The floor alone would not do: one that a server read from its disk may stay behind until nothing is pending.

    Args:
        pending: Of the delivered messages held here, whether they were delivered for the first time.
        coming: How many of the expected events this worker had, and let go of.
    """
    is_all_here = info.ack_pending <= len(pending) + coming
    if info.ack_pending <= sum(pending):
        return info.delivered.stream_sequence, is_all_here
    return info.ack_floor.stream_sequence, is_all_here


async def watch_filters(app: str, consumers: Mapping[Consumer, Sequence[str]], *, every_s: float) -> None:
    """End a worker one of whose ``consumers`` takes less than these subjects: it would miss events without a word.

    Raises:
        TopologyDrift: The filter of a consumer was narrowed.
    """
    # By the server's clock, as the times of the events are.
    since = {consumer.name: consumer.cached_info.timestamp or utc_now() for consumer in consumers}
    while True:
        await asyncio.sleep(idle_s(every_s))
        for consumer, wanted in consumers.items():
            try:
                info = await consumer.info()
            except JetSparkError:
                continue  # who pulls from it is told
            now = filters_of(info.config)
            left_out = [each for each in wanted if not any(is_subset(each, other) for other in now)]
            if left_out:
                name, moment = consumer.name, since[consumer.name].isoformat(timespec="seconds")
                raise TopologyDrift(
                    app,
                    (
                        f"~ consumer {name} of {consumer.stream_name} no longer takes {', '.join(left_out)}: "
                        f"its filter was narrowed to {', '.join(now)} while a worker ran",
                        f"  events since {moment} may not have been delivered; once the filter is applied again, "
                        f"`jetspark replay ... --since {moment} --effects` has the handler handle them",
                    ),
                )
            since[consumer.name] = info.timestamp or since[consumer.name]


def filters_of(config: ConsumerConfig) -> tuple[str, ...]:
    """The subjects that a consumer takes."""
    one = (config.filter_subject,) if config.filter_subject else ()
    return tuple(config.filter_subjects or one or (">",))


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
