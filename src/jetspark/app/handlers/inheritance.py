"""Unacknowledged events of earlier workers, which hold back their keys, and removal of messages that are done."""

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

__all__ = ["await_inherited", "expect_inherited", "filters_of", "tidy_copies", "tidy_retries", "watch_filters"]

_logger = logging.getLogger("jetspark.app")

# Polling interval for the acknowledgements of events that were delivered to earlier workers.
INHERITED_POLL_S = 0.5
# An acknowledged message of the retry stream is kept for a while: a redelivery of its event finds it and is not run.
TIDY_EVERY_S = 60.0
# Interval of checks that a consumer's filter was not narrowed. With n partitions each consumer is checked n times less.
FILTERS_EVERY_S = 5.0
KEEP_DONE_S = 3600.0


async def expect_inherited(
    machine: HandlerMachine,
    consumer: Consumer,
    stream: Stream,
    reading: Callable[[ConsumerInfo], AbstractAsyncContextManager[ReadKey]],
) -> dict[int, int]:
    """Hold back keys until their unacknowledged events of earlier deliveries arrive or are acknowledged.

    Such an event is with another worker, or was with one that died, or was on its way to this worker when the
    connection was lost. The server redelivers it after its ``ack_wait``, and delivers later events before that.

    ``reading`` yields a function that returns the sequence and the key of a message's event, both as it was published;
    None if the handler does not take it, or this worker has it.

    Returns:
        The sequences of the events: as published, and in the stream of the consumer.
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
    # All at once, after the last one is read. If the look-up failed or was cancelled half-way, no list would contain
    # the events that were expected until then, and their keys would be held back until this process ends.
    now = asyncio.get_running_loop().time()
    for sequence, key in keys.items():
        machine.expect(key, sequence, now)
    return found


async def await_inherited(
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
    """Release keys whose ``expected`` events other workers have acknowledged; returns when no event is expected.

    ``held`` are unanswered messages of the consumer in this worker: the sequence, and True for a first delivery.
    ``lapsed`` are expected events that this worker had and let go of. With ``gives_up`` an event that another worker
    keeps for longer than two ``ack_wait`` is not waited for: without partitions, order is not promised between
    processes.
    """
    loop, lanes = asyncio.get_running_loop(), machine.lanes
    all_held_since = math.inf
    """Since when this worker has held everything that is pending, redeliveries included."""
    since: dict[int, float] = {}
    """Since when each event is expected. On a bad network some event always is, so one common time would not do."""
    while expected and not machine.is_stopping:
        since = {each: since.get(each, loop.time()) for each in expected}
        await asyncio.sleep(INHERITED_POLL_S)
        before = held()
        try:
            info = await consumer.info()
            last = info.delivered.stream_sequence
            # Held before the request and after it: none of these was acknowledged when the server answered.
            pending = [is_first for own, is_first in before & held() if own <= last]
            coming = sum(1 for each, own in expected.items() if each in lapsed and own <= last)
            floor, is_all_here = _acknowledged_floor(info, pending, coming)
            all_held_since = min(all_held_since, loop.time()) if is_all_here else math.inf
            is_over = loop.time() - all_held_since > machine.limits.ack_wait_s
            arrived = expected.keys() - set(lanes.expected)
            given_up_before = loop.time() - 2 * machine.limits.ack_wait_s if gives_up else -math.inf
            gone = [
                each
                for each, own in expected.items()
                if each not in arrived
                and (
                    own <= floor
                    or (is_over and own <= last and each not in lapsed)
                    or since.get(each, math.inf) < given_up_before
                )
            ]
            if gone:
                await before_gone()
        except JetSparkError as error:
            _logger.warning("%s: cannot check events of other workers (%s); checked again", consumer, error)
            all_held_since = math.inf
            continue
        for sequence in arrived:
            expected.pop(sequence, None)
        for sequence in gone:
            lanes.gone(sequence)
            expected.pop(sequence, None)
        wake()


def _acknowledged_floor(info: ConsumerInfo, pending: Sequence[bool], coming: int) -> tuple[int, bool]:
    """The sequence up to which everything is acknowledged; and True if every pending message is or was here.

    Messages up to the consumer's ack floor are acknowledged. If all pending messages are held here, all other delivered
    ones are. The server reports only the number of pending messages, so a message is counted here only if it is
    certainly pending on the server:

    * a restarted server may have forgotten its last deliveries: ``delivered`` is then below them;
    * an event without a confirmed ``in_progress`` for one ``ack_wait`` is not counted: another worker may have
      acknowledged it;
    * a redelivered event may have been acknowledged by the worker that had it before. Redelivered events count only if
      they and first deliveries are all that is pending for a whole ``ack_wait``, within which an expected event would
      have been redelivered. The same holds for expected events that this worker had and let go of.

    The floor alone is not enough: a floor that a server has read from disk may lag until no message is pending.

    Args:
        pending: For each delivered message held here, True if it is a first delivery.
        coming: The number of expected events that this worker had and let go of.
    """
    is_all_here = info.ack_pending <= len(pending) + coming
    if info.ack_pending <= sum(pending):
        return info.delivered.stream_sequence, is_all_here
    return info.ack_floor.stream_sequence, is_all_here


async def watch_filters(app: str, consumers: Mapping[Consumer, Sequence[str]], *, every_s: float) -> None:
    """Raise if the filter of a consumer no longer covers these subjects: the worker would silently miss events.

    Raises:
        TopologyDrift: The filter of a consumer was narrowed.
    """
    # By the server's clock, like the times of the events.
    since = {consumer.name: consumer.cached_info.timestamp or utc_now() for consumer in consumers}
    while True:
        await asyncio.sleep(idle_s(every_s))
        for consumer, wanted in consumers.items():
            try:
                info = await consumer.info()
            except JetSparkError:
                continue  # the task that pulls from it raises
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
    """The subjects that a consumer delivers."""
    one = (config.filter_subject,) if config.filter_subject else ()
    return tuple(config.filter_subjects or one or (">",))


async def tidy_retries(
    retries: Stream,
    consumer: Consumer,
    prefix: str,
    *,
    partition: int | None = None,
    every_s: float = TIDY_EVERY_S,
    keep_s: float = KEEP_DONE_S,
) -> None:
    """Remove messages of a handler's retry subjects ``keep_s`` after they were acknowledged; runs until cancelled.

    ``prefix`` is ``retry.<app>.<handler>``. Its schedules are not touched: they remove themselves.
    """
    loop = asyncio.get_running_loop()
    floors: list[tuple[float, int]] = []
    """Times at which everything up to a sequence was acknowledged."""
    while True:
        await asyncio.sleep(idle_s(every_s))
        try:
            floor = (await consumer.info()).ack_floor.stream_sequence
            if not floors or floors[-1][1] < floor:
                floors.append((loop.time(), floor))
            while floors and floors[0][0] + keep_s <= loop.time():
                _, done = floors.pop(0)
                for what in ("due", "redrive"):
                    subject = f"{prefix}.{what}.>" if partition is None else f"{prefix}.{what}-{partition}.>"
                    await retries.purge(subject=subject, up_to_sequence=done)
        except JetSparkError as error:
            _logger.warning("messages on %s: cannot remove those that are done (%s); retried", prefix, error)


async def tidy_copies(
    copies: Stream, consumers: Sequence[Consumer], *, every_s: float = TIDY_EVERY_S, keep_s: float = KEEP_DONE_S
) -> None:
    """Remove copies ``keep_s`` after every partition acknowledged them, except the last one; runs until cancelled.

    A restarted server continues copying after the last copy it finds, and from the beginning if it finds none.
    """
    loop = asyncio.get_running_loop()
    floors: list[tuple[float, int]] = []
    while True:
        await asyncio.sleep(every_s)
        try:
            last = (await copies.info()).state.last_sequence
            done = last - 1
            for consumer in consumers:
                info = await consumer.info()
                if info.ack_pending or info.pending:
                    done = min(done, info.ack_floor.stream_sequence)
            if done > (floors[-1][1] if floors else 0):
                floors.append((loop.time(), done))
            while floors and floors[0][0] + keep_s <= loop.time():
                await copies.purge(up_to_sequence=floors.pop(0)[1])
        except JetSparkError as error:
            _logger.warning("copies in %s: cannot remove those that are done (%s); retried", copies.name, error)
