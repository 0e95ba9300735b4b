"""Rows of everything that publishes into a stream."""

from __future__ import annotations

from typing import Any

import pytest

import jetspark
from jetspark import JetSparkError
from support.interrupts import Ended
from support.operations.table import A_WHILE_S, World, accepted_by, row


@row("JetStream.publish")
async def _(w: World) -> None:
    acked: list[bytes] = []

    async def act() -> None:
        for number in range(4):
            ack = await w.js.publish(w.subject, b"%d" % number)
            assert ack.stream == w.name
            acked.append(b"%d" % number)

    await w.interrupt(act)
    stored = await w.stored()
    assert stored[: len(acked)] == acked
    assert len(stored) <= len(acked) + 1


@row("JetStream.publish_async", "JetStream.publish_async_complete")
async def _(w: World) -> None:
    futures: list[Any] = []
    js = w.nc.jetstream(max_outstanding=7)

    async def act() -> None:
        for number in range(30):
            futures.append(await js.publish_async(w.subject, b"%d" % number))  # noqa: PERF401
        await js.publish_async_complete()

    ended = await w.interrupt(act)
    await js.publish_async_complete(A_WHILE_S)
    for future in futures:
        try:
            await w.result(future)
        except jetspark.ConnectionLost:
            assert w.has_lost_session
    accepted_by(w, ended, [b"%d" % number for number in range(len(futures))], await w.stored())


async def _check_atomic(w: World, batch: Any, subject: str | None = None) -> None:
    """``outcome`` is what the stream says, also after finding out."""
    stored = await w.stored(subject)
    outcome = batch.outcome
    if outcome == "unknown":
        outcome = await batch.resolve()
    assert len(stored) == (batch.sequence if outcome == "stored" else 0), (batch.outcome, outcome, stored)
    if outcome == "stored":
        assert batch.ack.batch_size
    else:
        with pytest.raises(jetspark.UsageError, match="no acknowledgement"):
            batch.ack  # noqa: B018


@row("AtomicBatch.add", "AtomicBatch.add_many")
async def _(w: World) -> None:
    batch = w.js.atomic_batch(ack_every=3)

    async def act() -> None:
        async with batch:
            for number in range(4):
                await batch.add(w.subject, b"%d" % number)
            await batch.add_many((w.subject, b"%d" % number) for number in range(4, 8))

    await w.interrupt(act)
    await _check_atomic(w, batch)


@row("AtomicBatch.commit", "AtomicBatch.resolve")
async def _(w: World) -> None:
    batch = w.js.atomic_batch()

    async def act() -> None:
        async with batch:
            await batch.add(w.subject, b"0")
            await batch.commit(w.subject, b"1")
        await batch.resolve()

    await w.interrupt(act)
    if batch.outcome == "unknown":
        await w.interrupt(batch.resolve)
    await _check_atomic(w, batch)


@row("AtomicBatch.discard")
async def _(w: World) -> None:
    batch = w.js.atomic_batch()

    async def act() -> None:
        async with batch:
            await batch.add(w.subject, b"0")
            await batch.discard()

    await w.interrupt(act)
    await _check_atomic(w, batch)


@row("FastBatch.add", "FastBatch.ping")
async def _(w: World) -> None:
    fast = w.js.fast_batch(flow=4)
    added = 0

    async def act() -> None:
        nonlocal added
        async with fast:
            for number in range(30):
                await fast.add(w.subject, b"%d" % number)
                added += 1
            await fast.ping()

    ended = await w.interrupt(act)
    await _check_fast(w, fast, ended)
    assert added <= fast.sequence <= added + 1


@row("FastBatch.add_many", "FastBatch.commit")
async def _(w: World) -> None:
    fast = w.js.fast_batch(flow=8)

    async def act() -> None:
        async with fast:
            await fast.add_many((w.subject, b"%d" % number) for number in range(40))
            await fast.commit(w.subject, b"40")

    await _check_fast(w, fast, await w.interrupt(act))


async def _check_fast(w: World, fast: Any, ended: Ended) -> None:
    """On a connection that stays, what was added is stored; the rest is not, and never will be."""
    stored = await w.stored()
    assert stored == [b"%d" % number for number in range(len(stored))]
    assert fast.stored <= len(stored) <= fast.sequence, (fast.stored, len(stored), fast.sequence)
    assert len(stored) == fast.sequence or w.has_lost_session, (len(stored), fast.sequence)
    if ended.is_complete:
        assert fast.ack.batch_size


@row("FastPublisher.publish", "FastPublisher.flush", "FastPublisher.published", "FastPublisher.unpublished")
async def _(w: World) -> None:
    pub = w.js.fast_publisher(message_ids=_has_ids(w), flow=4)

    async def act() -> None:
        async with pub:
            for number in range(20):
                await pub.publish(w.subject, b"%d" % number)
            await pub.flush()
            for number in range(20, 30):
                await pub.publish(w.subject, b"%d" % number)

    await _check_publisher(w, pub, await w.interrupt(act))


@row("FastPublisher.publish_many", "FastPublisher.wait_published", "FastPublisher.close")
async def _(w: World) -> None:
    pub = w.js.fast_publisher(message_ids=_has_ids(w), flow=4)

    async def act() -> None:
        async with pub:
            position = await pub.publish_many([(w.subject, b"%d" % number) for number in range(20)])
            await pub.wait_published(position)
            await pub.publish_many((w.subject, b"%d" % number) for number in range(20, 40))
            await pub.close()

    ended = await w.interrupt(act)
    if not ended.is_complete:
        try:
            await pub.close(A_WHILE_S)
            assert pub.published() == pub.accepted
        except jetspark.RequestTimeout:
            raise  # nothing is in its way: it stores the rest, or knows that it gave up
        except JetSparkError:
            pass  # it was closing already, and gave up
    await _check_publisher(w, pub, ended)


def _has_ids(w: World) -> bool:
    """Every second run of the publishers."""
    return w.number % 2 == 0


async def _check_publisher(w: World, pub: Any, ended: Ended) -> None:
    stored = await w.stored()
    once = list(dict.fromkeys(stored))
    assert once == [b"%d" % number for number in range(len(once))], stored
    assert pub.published() <= len(once) <= pub.accepted, (pub.published(), len(once), pub.accepted)
    # An interrupt may cost the session, and without ids the last messages are then sent again, and counted.
    assert len(stored) - len(once) <= pub.possibly_doubled, stored
    assert pub.possibly_doubled == 0 or (w.has_lost_session and not _has_ids(w))
    assert len(pub.unpublished()) == pub.accepted - pub.published()
    if ended.is_complete:
        assert pub.published() == pub.accepted
