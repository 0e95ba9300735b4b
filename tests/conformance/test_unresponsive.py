"""Operations against a server that does not answer as it should.

It is stopped, the send buffer is full besides, its leader is cut off from the others, or a peer without a certificate
has taken its place. Each operation ends within its own timeout, though the connection's is a minute, with an error that
its docstring names; and what it reported is true once the server goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import support.unresponsive_writes  # noqa: F401  more rows
from support.certificates import Certificates
from support.drivers import Driver
from support.unresponsive import (
    PAYLOAD,
    ROWS,
    TIMEOUT_S,
    Condition,
    CutOff,
    Full,
    Impersonated,
    Stall,
    Stopped,
    Undisturbed,
    make_streams,
    row,
    run_rows,
)

import jetspark
import jetspark.batcher
import jetspark.batcher.blocking
from jetspark import BatchCutShort, BatchIncomplete, BatchInDoubt, ConsumerConfig, JetSparkError, UsageError
from jetspark.batcher import BatcherConfig
from jetspark.server import NatsCluster, NatsServer

LARGE = bytes(20_000)
"""Some hundred of these are more than the network takes and the buffer holds."""


@row("Client.publish")
async def publish(s: Stall) -> None:
    ended = await s.stalled(lambda: s.nc.publish(s.subject, PAYLOAD), waits=True)
    assert ended.error is None
    assert len(await s.stored()) == 1 or s.loses_messages


@row("Client.publish", when_full="raise")
async def publish_raises(s: Stall) -> None:
    ended = await s.stalled(lambda: s.nc.publish(s.subject, PAYLOAD))
    stored = len(await s.stored())
    assert stored == (ended.error is None) or (s.loses_messages and stored == 0)


@row("Client.flush")
async def flush(s: Stall) -> None:
    ended = await s.stalled(lambda: s.nc.flush(TIMEOUT_S))
    assert s.answers_pings or isinstance(ended.error, jetspark.RequestTimeout | jetspark.ConnectionLost)


@row("Client.request")
async def request(s: Stall) -> None:
    ended = await s.stalled(lambda: s.nc.request(s.subject, PAYLOAD, timeout=TIMEOUT_S))
    assert len(await s.stored()) <= 1
    assert s.answers_pings or isinstance(ended.error, jetspark.RequestTimeout)


@row("Client.request_many")
async def request_many(s: Stall) -> None:
    async def ask() -> list[Any]:
        return [answer async for answer in s.nc.request_many(s.subject, PAYLOAD, timeout=TIMEOUT_S)]

    ended = await s.stalled(ask)
    assert s.answers_pings or not ended.result


@row("Client.drain")
async def drain(s: Stall) -> None:
    await s.nc.subscribe(s.subject, callback=lambda message: None)
    await s.nc.publish(s.subject, PAYLOAD)
    ended = await s.stalled(lambda: s.nc.drain(TIMEOUT_S))
    was_told_before = s.nc._machine.lost_messages > 0  # by an event, if the connection was lost before the drain began
    assert s.answers_pings or ended.error is not None or was_told_before
    assert s.nc.is_closed


@row("Client.close")
async def close(s: Stall) -> None:
    async def publish_and_close() -> None:
        if s.nc.buffered_bytes == 0:
            await s.nc.publish(s.subject, PAYLOAD)
        await s.nc.close(TIMEOUT_S)

    ended = await s.stalled(publish_and_close)
    assert s.answers_pings or ended.error is not None
    assert s.nc.is_closed


@row("Subscription.next")
async def subscription_next(s: Stall) -> None:
    subscription = await s.nc.subscribe("quiet")
    ended = await s.stalled(lambda: subscription.next(TIMEOUT_S))
    assert isinstance(ended.error, jetspark.RequestTimeout)


@row("Subscription.drain")
async def subscription_drain(s: Stall) -> None:
    subscription = await s.nc.subscribe("quiet")
    ended = await s.stalled(lambda: subscription.drain(TIMEOUT_S))
    assert s.answers_pings or s.loses_messages or ended.error is not None
    assert subscription.received == 0


@row("JetStream.publish")
async def js_publish(s: Stall) -> None:
    ended = await s.stalled(lambda: s.js.publish(s.subject, PAYLOAD))
    stored = len(await s.stored())
    assert stored == 1 if ended.error is None else stored <= 1


@row("JetStream.publish_async_complete")
async def js_publish_async(s: Stall) -> None:
    js = s.nc.jetstream(ack_timeout=TIMEOUT_S, max_outstanding=3)
    futures: list[Any] = []

    async def send() -> None:
        for _ in range(3):
            futures.append(await js.publish_async(s.subject, PAYLOAD))  # noqa: PERF401
        await js.publish_async_complete(TIMEOUT_S)

    await s.stalled(send, waits=True)
    acked = 0
    for future in futures:
        future = getattr(future, "_target", future)
        with contextlib.suppress(JetSparkError):
            await (asyncio.to_thread(future.result, 10) if s.is_blocking else asyncio.wait_for(future, 10))
            acked += 1
    assert acked <= len(await s.stored()) <= len(futures)


async def _atomic(s: Stall, batch: Any) -> None:
    """What it says is so, at once or after looking."""
    outcome = batch.outcome
    stored = await s.stored()
    if outcome == "unknown":
        outcome = await s.tried(batch.resolve)
    assert len(stored) == (batch.sequence if outcome == "stored" else 0), (batch.outcome, outcome, len(stored))


@row("AtomicBatch.add")
async def atomic_add(s: Stall) -> None:
    async with s.js.atomic_batch() as batch:
        ended = await s.stalled(lambda: batch.add(s.subject, PAYLOAD))
        if ended.error is None:
            await batch.discard()
    await _atomic(s, batch)


async def _atomic_goes_on(s: Stall, send: Callable[[Any], Awaitable[None]]) -> None:
    """After the first message nothing waits for an answer: only for room."""
    lost = () if s.keeps_batches else (BatchIncomplete, BatchInDoubt)
    with contextlib.suppress(*lost):
        async with s.js.atomic_batch() as batch:
            await batch.add(s.subject, PAYLOAD)
            ended = await s.stalled(lambda: send(batch))
            assert batch.outcome == ("open" if ended.error is None else "not stored")
    await _atomic(s, batch)


@row("AtomicBatch.add")
async def atomic_add_more(s: Stall) -> None:
    await _atomic_goes_on(s, lambda batch: batch.add(s.subject, PAYLOAD))


@row("AtomicBatch.add")
async def atomic_add_many(s: Stall) -> None:
    await _atomic_goes_on(s, lambda batch: batch.add_many([(s.subject, LARGE)] * 600))


@row("AtomicBatch.commit")
async def atomic_commit(s: Stall) -> None:
    async with s.js.atomic_batch() as batch:
        await batch.add(s.subject, PAYLOAD)
        await s.stalled(lambda: batch.commit(s.subject, PAYLOAD))
    await _atomic(s, batch)


@row("AtomicBatch.add")
async def atomic_block(s: Stall) -> None:
    batch = s.js.atomic_batch()

    async def block() -> None:
        async with batch:
            await batch.add(s.subject, PAYLOAD)
            await batch.add_many([(s.subject, PAYLOAD)] * 3)

    await s.stalled(block)
    await _atomic(s, batch)


@row("AtomicBatch.discard")
async def atomic_discard(s: Stall) -> None:
    async with s.js.atomic_batch() as batch:
        await batch.add(s.subject, PAYLOAD)
        await s.stalled(batch.discard, waits=True)
    await _atomic(s, batch)


@contextlib.asynccontextmanager
async def _fast(s: Stall, **options: Any) -> AsyncIterator[Any]:
    with contextlib.suppress(BatchCutShort, BatchInDoubt):  # leaving the block says it once more
        async with s.js.fast_batch(timeout=TIMEOUT_S, ping_after_s=0.1, **options) as fast:
            yield fast
    assert fast.stored <= len(await s.stored()) <= fast.sequence


@row("FastBatch.add")
async def fast_add(s: Stall) -> None:
    async with _fast(s) as fast:
        await s.stalled(lambda: fast.add(s.subject, PAYLOAD))


@row("FastBatch.commit")
async def fast_commit(s: Stall) -> None:
    async with _fast(s) as fast:
        await fast.add(s.subject, PAYLOAD)
        await s.stalled(fast.commit)


@row("FastBatch.add")
async def fast_add_many(s: Stall) -> None:
    async with _fast(s, flow=5) as fast:
        await fast.add(s.subject, PAYLOAD)
        await s.stalled(lambda: fast.add_many([(s.subject, PAYLOAD)] * 100))


@row("FastBatch.add")
async def fast_add_large(s: Stall) -> None:
    async with _fast(s, flow=5000) as fast:
        await fast.add(s.subject, PAYLOAD)

        async def send() -> None:
            for _ in range(600):
                await fast.add(s.subject, LARGE)

        await s.stalled(send)


@row("FastBatch.ping", "FastBatch.add")
async def fast_ping(s: Stall) -> None:
    async with _fast(s) as fast:
        await fast.add(s.subject, PAYLOAD)
        await s.stalled(fast.ping, waits=True)


@contextlib.asynccontextmanager
async def _publisher(s: Stall, **options: Any) -> AsyncIterator[Any]:
    with contextlib.suppress(BatchInDoubt, UsageError):  # leaving the block says once more that it gave up
        async with s.js.fast_publisher(**options) as pub:
            yield pub
    facts = getattr(pub, "_target", pub)
    published, unpublished = facts.published(), facts.unpublished()
    stored = len(await s.stored())
    assert published <= stored <= facts.accepted + facts.possibly_doubled, (published, stored, facts.accepted)
    assert len(unpublished) == facts.accepted - published
    assert facts.published() == published, "it went on when it was left"


@row("FastPublisher.flush")
async def publisher_flush(s: Stall) -> None:
    async with _publisher(s, message_ids=True) as pub:
        await pub.publish_many([(s.subject, PAYLOAD)] * 20)
        await s.stalled(lambda: pub.flush(TIMEOUT_S))
        await pub.flush(100)  # nothing is lost, and it goes on
        assert len(await s.stored()) == 20


@row("FastPublisher.close")
async def publisher_close(s: Stall) -> None:
    async with _publisher(s) as pub:
        await pub.publish_many([(s.subject, PAYLOAD)] * 20)
        await s.stalled(lambda: pub.close(TIMEOUT_S))


@row("FastPublisher.publish")
async def publisher_gives_up(s: Stall) -> None:
    async with _publisher(s, patience_s=TIMEOUT_S, max_pending_messages=10) as pub:

        async def send() -> None:
            for _ in range(30):
                await pub.publish(s.subject, PAYLOAD)

        await s.stalled(send)


@row("FastPublisher.publish_many")
async def publisher_publish_many(s: Stall) -> None:
    async with _publisher(s, patience_s=TIMEOUT_S, max_pending_messages=10) as pub:
        await s.stalled(lambda: pub.publish_many([(s.subject, PAYLOAD)] * 30))


@row("FastPublisher.wait_published")
async def publisher_wait_published(s: Stall) -> None:
    async with _publisher(s, message_ids=True) as pub:
        await pub.publish_many([(s.subject, PAYLOAD)] * 20)
        ended = await s.stalled(lambda: pub.wait_published(20, TIMEOUT_S))
        if ended.error is None:
            assert len(await s.stored()) == 20
        await pub.flush(100)


async def _consumer(s: Stall, messages: int) -> jetspark.Consumer:
    for _ in range(messages):
        await s.patient.publish(s.subject, PAYLOAD)
    stream = await s.tried(lambda: s.patient.stream("STALL"))
    # Without a threshold the server deletes it after five seconds without a request, and a busy machine takes longer to
    # end a condition: then nobody can look at what was acknowledged.
    config = ConsumerConfig(name=s.name, filter_subjects=[s.subject], inactive_threshold_s=600.0)
    return await s.tried(lambda: stream.create_consumer(config))


@row("Consumer.fetch")
async def fetch(s: Stall) -> None:
    consumer = await _consumer(s, 0)
    ended = await s.stalled(lambda: consumer.fetch(1, timeout=TIMEOUT_S))
    assert ended.error is not None or ended.result == []


@row("Consumer.fetch")
async def consumer_next(s: Stall) -> None:
    consumer = await _consumer(s, 0)
    ended = await s.stalled(lambda: consumer.next(timeout=TIMEOUT_S))
    assert ended.error is not None or ended.result is None


@row("JetStreamMessage.ack_sync")
async def ack_sync(s: Stall) -> None:
    consumer = await _consumer(s, 1)
    [message] = await consumer.fetch(1, timeout=60)
    ended = await s.stalled(lambda: message.ack_sync(TIMEOUT_S))

    async def is_noted() -> bool:
        return (await consumer.info()).ack_pending == 0

    await s.holds(ended, is_noted)


@row("JetStreamMessage.ack")
async def ack(s: Stall) -> None:
    consumer = await _consumer(s, 1)
    [message] = await consumer.fetch(1, timeout=60)
    await s.stalled(message.ack, waits=True)


def _batcher(s: Stall, atomic: bool) -> Any:
    module: Any = jetspark.batcher.blocking if s.is_blocking else jetspark.batcher
    js = getattr(s.js, "_target", s.js)
    sink = module.AtomicSink(js, s.subject, doubt_s=30) if atomic else module.FastIngestSink(js, s.subject)
    return module.Batcher(BatcherConfig(name=s.name, max_batch_size=5, max_batch_delay=0.01, sink=sink))


async def _call(s: Stall, call: Callable[[], Any]) -> Any:
    return await (asyncio.to_thread(call) if s.is_blocking else call())


@row("Batcher.flush")
async def batcher_flush(s: Stall) -> None:
    batcher = _batcher(s, atomic=False)

    async def work() -> None:
        for _ in range(10):
            await _call(s, lambda: batcher.add(PAYLOAD, timeout=TIMEOUT_S))
        await _call(s, lambda: batcher.flush(timeout=TIMEOUT_S))

    await s.stalled(work)
    await _call(s, lambda: batcher.shutdown(timeout=60))
    assert batcher.stats().flushed_ok <= len(await s.stored())


@row("Batcher.shutdown")
async def batcher_shutdown(s: Stall) -> None:
    batcher = _batcher(s, atomic=True)

    async def work() -> None:
        for _ in range(10):
            await _call(s, lambda: batcher.add(PAYLOAD, timeout=TIMEOUT_S))
        await _call(s, lambda: batcher.shutdown(timeout=TIMEOUT_S))

    await s.stalled(work)
    with contextlib.suppress(JetSparkError):
        await _call(s, lambda: batcher.shutdown(timeout=60))
    assert batcher.stats().flushed_ok <= len(await s.stored())


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[NatsServer, NatsServer]]:
    """One to be trusted, and one that is not."""
    with NatsServer() as server, NatsServer() as accomplice:
        yield server, accomplice


@pytest.mark.parametrize("condition", [Undisturbed, Stopped, Full])
def test_everything_ends_in_time_and_tells_the_truth(
    condition: type[Condition], driver: Driver, servers: tuple[NatsServer, NatsServer]
) -> None:
    async def work() -> None:
        stopped = condition(servers[0])
        await make_streams(stopped)
        await run_rows(driver, list(ROWS), stopped)

    driver.run(work())


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine
def test_nothing_that_is_said_before_tls_is_believed(
    driver: Driver, servers: tuple[NatsServer, NatsServer], certificates: Certificates
) -> None:
    async def work() -> None:
        impersonated = Impersonated(*servers, certificates)
        for server in servers:
            await make_streams(impersonated, server.url)
        await run_rows(driver, list(ROWS), impersonated)

    driver.run(work())


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine
def test_everything_ends_in_time_when_the_leader_is_cut_off(driver: Driver, divisible: NatsCluster) -> None:
    async def work() -> None:
        await asyncio.to_thread(divisible.wait_until_ready, 150)
        assert divisible.leader is not None
        # It also decides what streams and consumers there are.
        cut_off = CutOff(divisible, divisible.nodes[divisible.leader])
        await make_streams(cut_off)
        await run_rows(driver, list(ROWS), cut_off)

    driver.run(work())
