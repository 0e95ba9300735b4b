"""Operations against a server that does not answer: stopped, with the send buffer full besides, or a leader cut off.

Each ends within its own timeout, though the connection's is a minute, with an error that its docstring names; and what
it reported is true once the server goes on. All run at once, each on a connection of its own: a stop lasts as long as
the longest of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.cluster import leading_node
from support.drivers import Driver

import jetspark
import jetspark.batcher
import jetspark.batcher.blocking
import jetspark.blocking
import jetspark.errors
from jetspark import BatchCutShort, BatchInDoubt, BufferFull, ConsumerConfig, JetSparkError, StreamConfig, UsageError
from jetspark.batcher import BatcherConfig
from jetspark.server import NatsCluster, NatsServer

TIMEOUT_S = 0.5
# Generous, and far below the connection's own timeouts: a minute means that the operation used those instead.
SLACK_S = 15.0
OPTIONS: dict[str, Any] = {"request_timeout_s": 60.0, "drain_timeout_s": 60.0, "send_buffer_bytes": 64 << 10}
PAYLOAD = bytes(100)
LARGE = bytes(20_000)
"""Some hundred of these are more than the network takes and the buffer holds."""


@dataclass
class Ended:
    result: Any = None
    error: BaseException | None = None
    took_s: float = 0.0


class Stall:
    """What one row works with."""

    def __init__(self, test: Test, name: str, nc: Any) -> None:
        self.test, self.name, self.nc = test, name, nc
        self.js = nc.jetstream(timeout=TIMEOUT_S)
        self.subject = f"stall.{name}"
        self.is_blocking = test.driver.name == "blocking"

    async def stalled(self, operation: str, call: Callable[[], Awaitable[Any]], *, waits: bool = False) -> Ended:
        """Run it while the server does not answer; returns when it does again.

        With ``waits`` it has no timeout, and may go on until then.
        """
        await self.test.begins(self)
        began = time.monotonic()
        task = asyncio.ensure_future(call())
        await asyncio.wait({task}, timeout=TIMEOUT_S if waits else TIMEOUT_S + SLACK_S)
        was_done, ended = task.done(), Ended(took_s=time.monotonic() - began)
        await self.test.ends()
        await asyncio.wait({task}, timeout=20)
        assert task.done(), f"{operation} goes on for ever"
        assert was_done or waits, f"{operation} took longer than {TIMEOUT_S} s: it ended when the server answered"
        if task.exception() is None:
            ended.result = task.result()
        else:
            ended.error = task.exception()
            assert isinstance(ended.error, JetSparkError), ended.error
            names = {cls.__name__ for cls in type(ended.error).__mro__}
            assert names & documented(operation), (
                f"{operation} raised {ended.error!r}, which its docstring does not name"
            )
        return ended

    async def stored(self) -> list[bytes]:
        """What the stream has when all is done that was sent on this connection."""
        async with asyncio.timeout(60):
            while True:
                try:
                    await self.js.publish("stall.fence", timeout=5)
                    stream = await self.js.stream("STALL")
                    return [each.data async for each in stream.get_messages(subject=self.subject)]
                except (jetspark.RequestTimeout, jetspark.JetStreamUnavailable, BufferFull):
                    await asyncio.sleep(0.1)  # no leader yet, or no room


def documented(operation: str) -> set[str]:
    """Errors that the docstring names, of the method or of its class; ``JetSparkError`` alone does not count."""
    cls, _, method = operation.partition(".")
    owner = getattr(jetspark.batcher if cls == "Batcher" else jetspark, cls)
    texts = [owner.__doc__ or ""] + ([getattr(owner, method).__doc__ or ""] if method else [])
    return {name for name in re.findall(r"\w+", " ".join(texts)) if name in jetspark.errors.__all__}


class Test:
    """All rows, which wait for one another before and after the stop."""

    __test__ = False

    def __init__(self, driver: Driver, rows: int, condition: Condition) -> None:
        self.driver, self._rows, self._condition = driver, rows, condition
        self._ready, self._over = 0, 0
        self._stopped, self._goes_on = asyncio.Event(), asyncio.Event()
        self._connections: list[Any] = []

    async def begins(self, stall: Stall) -> None:
        self._connections.append(stall.nc)
        self._ready += 1
        if self._ready == self._rows:
            await self._condition.begin(self._connections)
            self._stopped.set()
        await self._stopped.wait()

    async def ends(self) -> None:
        self._over += 1
        if self._over == self._rows:
            await self._condition.end()
            self._goes_on.set()
        await self._goes_on.wait()

    async def give_up(self, stall: Stall) -> None:
        """A row failed before its turn."""
        if stall.nc not in self._connections:
            await self.begins(stall)
            await self.ends()


class Condition:
    """What is wrong with the server."""

    async def begin(self, connections: list[Any]) -> None:
        raise NotImplementedError

    async def end(self) -> None:
        raise NotImplementedError


class Stopped(Condition):
    def __init__(self, server: NatsServer) -> None:
        self._server = server

    async def begin(self, connections: list[Any]) -> None:
        await asyncio.to_thread(self._server.pause)

    async def end(self) -> None:
        await asyncio.to_thread(self._server.resume)


class Full(Stopped):
    """The network takes no more of any connection either."""

    async def begin(self, connections: list[Any]) -> None:
        await super().begin(connections)
        await asyncio.gather(*map(_fill, connections))


async def _fill(nc: Any) -> None:
    client = getattr(nc, "_target", nc)
    if client.is_closed:
        return
    machine, link = client._machine, client._link
    rounds_in_vain = 0
    while rounds_in_vain < 3:
        rounds_in_vain += 1
        with getattr(link, "lock", contextlib.nullcontext()):
            link.flush()
            for size_bytes in (30_000, 1000, 1):
                with contextlib.suppress(BufferFull):
                    while True:
                        machine.publish("fill", bytes(size_bytes))
                        rounds_in_vain = 0
        await asyncio.sleep(0.02)


class CutOff(Condition):
    """The leader is cut off from the others, while clients still reach it."""

    def __init__(self, cluster: NatsCluster, leader: NatsServer) -> None:
        self._cluster, self._index = cluster, list(cluster.nodes).index(leader)

    async def begin(self, connections: list[Any]) -> None:
        await asyncio.to_thread(self._cluster.partition, self._index)

    async def end(self) -> None:
        await asyncio.to_thread(self._cluster.heal, self._index)
        await asyncio.to_thread(self._cluster.wait_until_ready)


# ---- the rows --------------------------------------------------------------------------------------------------------

ROWS: dict[str, Callable[[Stall], Awaitable[None]]] = {}
OWN_OPTIONS = {"publish_raises": {"when_full": "raise"}}


def row(run: Callable[[Stall], Awaitable[None]]) -> None:
    ROWS[run.__name__] = run


@row
async def publish(s: Stall) -> None:
    ended = await s.stalled("Client.publish", lambda: s.nc.publish(s.subject, PAYLOAD), waits=True)
    assert ended.error is None
    assert len(await s.stored()) == 1


@row
async def publish_raises(s: Stall) -> None:
    ended = await s.stalled("Client.publish", lambda: s.nc.publish(s.subject, PAYLOAD))
    assert len(await s.stored()) == (ended.error is None)


@row
async def flush(s: Stall) -> None:
    await s.stalled("Client.flush", lambda: s.nc.flush(TIMEOUT_S))


@row
async def request(s: Stall) -> None:
    ended = await s.stalled("Client.request", lambda: s.nc.request(s.subject, PAYLOAD, timeout=TIMEOUT_S))
    assert len(await s.stored()) <= 1
    assert ended.error is None or isinstance(ended.error, jetspark.RequestTimeout)


@row
async def request_many(s: Stall) -> None:
    async def ask() -> list[Any]:
        return [answer async for answer in s.nc.request_many(s.subject, PAYLOAD, timeout=TIMEOUT_S)]

    await s.stalled("Client.request_many", ask)


@row
async def drain(s: Stall) -> None:
    await s.nc.subscribe(s.subject, callback=lambda message: None)
    await s.nc.publish(s.subject, PAYLOAD)
    await s.stalled("Client.drain", lambda: s.nc.drain(TIMEOUT_S))
    assert s.nc.is_closed


@row
async def close(s: Stall) -> None:
    async def publish_and_close() -> None:
        if s.nc.buffered_bytes == 0:
            await s.nc.publish(s.subject, PAYLOAD)
        await s.nc.close(TIMEOUT_S)

    await s.stalled("Client.close", publish_and_close)
    assert s.nc.is_closed


@row
async def subscription_next(s: Stall) -> None:
    subscription = await s.nc.subscribe("quiet")
    ended = await s.stalled("Subscription.next", lambda: subscription.next(TIMEOUT_S))
    assert isinstance(ended.error, jetspark.RequestTimeout)


@row
async def subscription_drain(s: Stall) -> None:
    subscription = await s.nc.subscribe("quiet")
    await s.stalled("Subscription.drain", lambda: subscription.drain(TIMEOUT_S))


@row
async def js_publish(s: Stall) -> None:
    ended = await s.stalled("JetStream.publish", lambda: s.js.publish(s.subject, PAYLOAD))
    stored = len(await s.stored())
    assert stored == 1 if ended.error is None else stored <= 1


@row
async def js_publish_async(s: Stall) -> None:
    js = s.nc.jetstream(ack_timeout=TIMEOUT_S, max_outstanding=3)
    futures: list[Any] = []

    async def send() -> None:
        for _ in range(3):
            futures.append(await js.publish_async(s.subject, PAYLOAD))  # noqa: PERF401
        await js.publish_async_complete(TIMEOUT_S)

    await s.stalled("JetStream.publish_async_complete", send, waits=True)
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
        outcome = await batch.resolve()
    assert len(stored) == (batch.sequence if outcome == "stored" else 0), (batch.outcome, outcome, len(stored))


@row
async def atomic_add(s: Stall) -> None:
    async with s.js.atomic_batch() as batch:
        ended = await s.stalled("AtomicBatch.add", lambda: batch.add(s.subject, PAYLOAD))
        if ended.error is None:
            await batch.discard()
    await _atomic(s, batch)


async def _atomic_goes_on(s: Stall, send: Callable[[Any], Awaitable[None]]) -> None:
    """After the first message nothing waits for an answer: only for room."""
    async with s.js.atomic_batch() as batch:
        await batch.add(s.subject, PAYLOAD)
        ended = await s.stalled("AtomicBatch.add", lambda: send(batch))
        assert batch.outcome == ("open" if ended.error is None else "not stored")
    await _atomic(s, batch)


@row
async def atomic_add_more(s: Stall) -> None:
    await _atomic_goes_on(s, lambda batch: batch.add(s.subject, PAYLOAD))


@row
async def atomic_add_many(s: Stall) -> None:
    await _atomic_goes_on(s, lambda batch: batch.add_many([(s.subject, LARGE)] * 600))


@row
async def atomic_commit(s: Stall) -> None:
    async with s.js.atomic_batch() as batch:
        await batch.add(s.subject, PAYLOAD)
        await s.stalled("AtomicBatch.commit", lambda: batch.commit(s.subject, PAYLOAD))
    await _atomic(s, batch)


@row
async def atomic_block(s: Stall) -> None:
    batch = s.js.atomic_batch()

    async def block() -> None:
        async with batch:
            await batch.add(s.subject, PAYLOAD)
            await batch.add_many([(s.subject, PAYLOAD)] * 3)

    await s.stalled("AtomicBatch.add", block)
    await _atomic(s, batch)


@row
async def atomic_discard(s: Stall) -> None:
    async with s.js.atomic_batch() as batch:
        await batch.add(s.subject, PAYLOAD)
        await s.stalled("AtomicBatch.discard", batch.discard, waits=True)
    await _atomic(s, batch)


@contextlib.asynccontextmanager
async def _fast(s: Stall, **options: Any) -> AsyncIterator[Any]:
    with contextlib.suppress(BatchCutShort, BatchInDoubt):  # leaving the block says it once more
        async with s.js.fast_batch(timeout=TIMEOUT_S, ping_after_s=0.1, **options) as fast:
            yield fast
    assert fast.stored <= len(await s.stored()) <= fast.sequence


@row
async def fast_add(s: Stall) -> None:
    async with _fast(s) as fast:
        await s.stalled("FastBatch.add", lambda: fast.add(s.subject, PAYLOAD))


@row
async def fast_commit(s: Stall) -> None:
    async with _fast(s) as fast:
        await fast.add(s.subject, PAYLOAD)
        await s.stalled("FastBatch.commit", fast.commit)


@row
async def fast_add_many(s: Stall) -> None:
    async with _fast(s, flow=5) as fast:
        await fast.add(s.subject, PAYLOAD)
        await s.stalled("FastBatch.add", lambda: fast.add_many([(s.subject, PAYLOAD)] * 100))


@row
async def fast_add_large(s: Stall) -> None:
    async with _fast(s, flow=5000) as fast:
        await fast.add(s.subject, PAYLOAD)

        async def send() -> None:
            for _ in range(600):
                await fast.add(s.subject, LARGE)

        await s.stalled("FastBatch.add", send)


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


@row
async def publisher_flush(s: Stall) -> None:
    async with _publisher(s, message_ids=True) as pub:
        await pub.publish_many([(s.subject, PAYLOAD)] * 20)
        await s.stalled("FastPublisher.flush", lambda: pub.flush(TIMEOUT_S))
        await pub.flush(30)  # nothing is lost, and it goes on
        assert len(await s.stored()) == 20


@row
async def publisher_close(s: Stall) -> None:
    async with _publisher(s) as pub:
        await pub.publish_many([(s.subject, PAYLOAD)] * 20)
        await s.stalled("FastPublisher.close", lambda: pub.close(TIMEOUT_S))


@row
async def publisher_gives_up(s: Stall) -> None:
    async with _publisher(s, patience_s=TIMEOUT_S, max_pending_messages=10) as pub:

        async def send() -> None:
            for _ in range(30):
                await pub.publish(s.subject, PAYLOAD)

        await s.stalled("FastPublisher.publish", send)


async def _consumer(s: Stall, messages: int) -> Any:
    for _ in range(messages):
        await s.js.publish(s.subject, PAYLOAD, timeout=10)
    stream = await s.js.stream("STALL")
    return await stream.create_consumer(ConsumerConfig(name=s.name, filter_subjects=[s.subject]))


@row
async def fetch(s: Stall) -> None:
    consumer = await _consumer(s, 0)
    ended = await s.stalled("Consumer.fetch", lambda: consumer.fetch(1, timeout=TIMEOUT_S))
    assert ended.error is not None or ended.result == []


@row
async def consumer_next(s: Stall) -> None:
    consumer = await _consumer(s, 0)
    ended = await s.stalled("Consumer.fetch", lambda: consumer.next(timeout=TIMEOUT_S))
    assert ended.error is not None or ended.result is None


@row
async def ack_sync(s: Stall) -> None:
    consumer = await _consumer(s, 1)
    [message] = await consumer.fetch(1, timeout=10)
    await s.stalled("JetStreamMessage.ack_sync", lambda: message.ack_sync(TIMEOUT_S))


@row
async def ack(s: Stall) -> None:
    consumer = await _consumer(s, 1)
    [message] = await consumer.fetch(1, timeout=10)
    await s.stalled("JetStreamMessage.ack", message.ack, waits=True)


def _batcher(s: Stall, atomic: bool) -> Any:
    module: Any = jetspark.batcher.blocking if s.is_blocking else jetspark.batcher
    js = getattr(s.js, "_target", s.js)
    sink = module.AtomicSink(js, s.subject, doubt_s=30) if atomic else module.FastIngestSink(js, s.subject)
    return module.Batcher(BatcherConfig(name=s.name, max_batch_size=5, max_batch_delay=0.01, sink=sink))


async def _call(s: Stall, call: Callable[[], Any]) -> Any:
    return await (asyncio.to_thread(call) if s.is_blocking else call())


@row
async def batcher_flush(s: Stall) -> None:
    batcher = _batcher(s, atomic=False)

    async def work() -> None:
        for _ in range(10):
            await _call(s, lambda: batcher.add(PAYLOAD, timeout=TIMEOUT_S))
        await _call(s, lambda: batcher.flush(timeout=TIMEOUT_S))

    await s.stalled("Batcher.flush", work)
    await _call(s, lambda: batcher.shutdown(timeout=60))
    assert batcher.stats().flushed_ok <= len(await s.stored())


@row
async def batcher_shutdown(s: Stall) -> None:
    batcher = _batcher(s, atomic=True)

    async def work() -> None:
        for _ in range(10):
            await _call(s, lambda: batcher.add(PAYLOAD, timeout=TIMEOUT_S))
        await _call(s, lambda: batcher.shutdown(timeout=TIMEOUT_S))

    await s.stalled("Batcher.shutdown", work)
    with contextlib.suppress(JetSparkError):
        await _call(s, lambda: batcher.shutdown(timeout=60))
    assert batcher.stats().flushed_ok <= len(await s.stored())


# ---- the tests -------------------------------------------------------------------------------------------------------

NEEDS_A_STREAM = {"js_publish", "js_publish_async", "atomic_add", "atomic_commit", "atomic_block", "fast_add"}
NEEDS_A_STREAM |= {"fast_commit", "fast_add_many", "publisher_flush", "publisher_close", "publisher_gives_up"}
NEEDS_A_STREAM |= {"fetch", "ack_sync", "batcher_flush", "batcher_shutdown", "flush", "close"}


async def _run(driver: Driver, url: str, names: list[str], condition: Condition) -> None:
    test = Test(driver, len(names), condition)

    async def run(name: str) -> None:
        nc = await driver.connect(url, **OPTIONS | OWN_OPTIONS.get(name, {}))
        stall = Stall(test, name, nc)
        try:
            async with asyncio.timeout(120):
                await ROWS[name](stall)
        except BaseException as error:
            error.add_note(f"{name} on {driver.name}")
            raise
        finally:
            await test.give_up(stall)
            with contextlib.suppress(JetSparkError):
                await nc.close(10)

    try:
        results = await asyncio.gather(*map(run, names), return_exceptions=True)
    finally:
        await condition.end()
    errors = ["".join(traceback.format_exception(each)) for each in results if isinstance(each, BaseException)]
    if errors:
        pytest.fail("\n".join(errors), pytrace=False)


async def _make_stream(nc: jetspark.Client, replicas: int = 1) -> jetspark.Stream:
    config = StreamConfig(
        name="STALL",
        subjects=["stall.>"],
        storage="memory",
        replicas=replicas,
        allow_atomic=True,
        allow_batched=True,
        allow_direct=True,
    )
    return await nc.jetstream(timeout=20).create_stream(config)


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.mark.parametrize("condition", [Stopped, Full])
def test_everything_ends_in_time_and_tells_the_truth(
    condition: type[Stopped], driver: Driver, server: NatsServer
) -> None:
    async def work() -> None:
        async with jetspark.connect(server.url) as nc:
            await _make_stream(nc)
            await _run(driver, server.url, list(ROWS), condition(server))

    driver.run(work())


@pytest.mark.slow
def test_everything_ends_in_time_when_the_leader_is_cut_off(driver: Driver) -> None:
    async def work() -> None:
        async with NatsCluster(3, partitionable=True) as cluster, jetspark.connect(cluster.urls[0]) as nc:
            stream = await _make_stream(nc, replicas=3)
            leader = await leading_node(cluster, stream)
            await _run(driver, leader.url, sorted(NEEDS_A_STREAM), CutOff(cluster, leader))

    driver.run(work())
