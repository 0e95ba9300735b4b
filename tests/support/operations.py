"""Every public operation of both drivers, as something that can be interrupted, and what must be true afterwards.

A row is a coroutine: it prepares, has :meth:`World.interrupt` run the operation, and checks that what was reported is
true. It is written for asyncio; with the blocking driver it runs in one thread, without a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import jetspark
import jetspark.batcher
import jetspark.batcher.blocking
import jetspark.blocking
from jetspark import ConsumerConfig, JetSparkError, KVConfig, ObjectMeta, StreamConfig
from jetspark.batcher import BatcherConfig
from support.in_place import InPlace, wrap
from support.interrupts import KINDS, Call, Ended, Interruption, counted, innermost

__all__ = ["CLASSES", "ROWS", "WAITS_FOR_NOTHING", "Row", "World", "interruption"]

A_WHILE_S = 10.0
ADVISORY = b'{"id":"1","timestamp":"2026-01-01T00:00:00Z","stream":"S","batch":"b","reason":"timeout"}'


@dataclass(frozen=True)
class Row:
    """One operation, or several that are used together."""

    covers: tuple[str, ...]
    run: Callable[[World], Awaitable[None]]
    starts_threads: bool = False
    """CPython may hand an exception set from outside to the thread that is being started instead."""
    may_leave: frozenset[str] = frozenset()
    """What an interruption of the blocking driver may leave behind: the call had made what it could not return any
    more, and no code of ours runs after its ``return``."""

    @property
    def name(self) -> str:
        return self.covers[0]


ROWS: dict[str, Row] = {}


def row(
    *covers: str, may_leave: str = "", starts_threads: bool = False
) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    def register(run: Callable[[World], Awaitable[None]]) -> None:
        assert covers[0] not in ROWS, covers
        ROWS[covers[0]] = Row(covers, run, starts_threads, frozenset(may_leave.split()))

    return register


def plain(cover: str, call: Callable[[World], Awaitable[Any]], *, may_leave: str = "") -> None:
    """An operation that promises nothing but its answer."""

    async def run(w: World) -> None:
        await w.interrupt(lambda: call(w))

    row(cover, may_leave=may_leave)(run)


@dataclass
class World:
    """What a row works with: a connection that everybody shares, and things of its own in every run."""

    driver: str
    url: str
    name: str
    nc: Any
    js: Any
    witness: jetspark.blocking.Client
    """A connection that is never interrupted, to see what the server has."""
    stream: Any = None
    number: int = 0
    """Of the run."""
    steps: int = 0
    took_s: float = 0.0
    interruption: Interruption | None = None
    seen: dict[str, list[bytes]] = field(default_factory=dict)
    """What was stored on a subject when its row was over."""
    kept: dict[str, Any] = field(default_factory=dict)

    interrupted_in: str = ""
    """The innermost function of ours that was interrupted."""
    sessions: int = 0
    """How many the connection had had when the run began."""

    @property
    def has_lost_session(self) -> bool:
        """A thread may be interrupted in the middle of a write: then only a new session is sound, and what was on its
        way is in doubt."""
        machine = self.nc._machine
        return self.is_blocking and (machine.sessions != self.sessions or not machine.is_connected)

    @property
    def is_blocking(self) -> bool:
        return self.driver == "blocking"

    @property
    def subject(self) -> str:
        return f"{self.name}.{self.number}"

    @property
    def slack(self) -> int:
        """How many messages of an interrupted call may be sent though it raised: a blocking call may be interrupted
        on its very last bytecode."""
        return 1 if self.is_blocking else 0

    async def interrupt(self, call: Call) -> Ended:
        """Run it: to the end the first times, to measure it, and then interrupted."""
        if self.interruption is None:
            ended, self.took_s = await counted(call, self.driver)
            self.steps = ended.steps
            return ended
        ended = await self.interruption.of(call, self.steps, self.took_s)
        self.interrupted_in = innermost(ended.error)
        return ended

    async def sleep(self, seconds: float) -> None:
        if self.is_blocking:
            time.sleep(seconds)  # noqa: ASYNC251
        else:
            await asyncio.sleep(seconds)

    async def connect(self, **options: Any) -> Any:
        if self.is_blocking:
            return InPlace(jetspark.blocking.connect(self.url, **options))
        return await jetspark.connect(self.url, **options)

    async def result(self, future: Any) -> Any:
        return future.result(A_WHILE_S) if self.is_blocking else await asyncio.wait_for(future, A_WHILE_S)

    # ---- things -------------------------------------------------------------------------------------------------

    async def thing(self, key: str, make: Callable[[], Awaitable[Any]]) -> Any:
        """Made once for all runs."""
        if key not in self.kept:
            self.kept[key] = await make()
        return self.kept[key]

    async def bucket(self) -> Any:
        config = KVConfig(bucket=self.name, history=5, storage="memory", allow_atomic=True)
        return await self.thing("bucket", lambda: self.js.create_kv(config))

    async def objects(self) -> Any:
        config = jetspark.ObjectStoreConfig(bucket=self.name, storage="memory")
        return await self.thing("objects", lambda: self.js.create_object_store(config))

    async def consumer(self, messages: int = 20, **config: Any) -> Any:
        """A consumer of this run, with messages."""
        for number in range(messages):
            await self.js.publish_async(self.subject, b"%d" % number)
        await self.js.publish_async_complete()
        return await self.stream.create_consumer(
            ConsumerConfig(name=f"c{self.number}", filter_subjects=[self.subject], **config)
        )

    async def spare_stream(self) -> Any:
        """One to change or to delete."""
        return await self.js.create_stream(StreamConfig(name=f"{self.name}_{self.number}", storage="memory"))

    def stream_of(self, subject: str) -> jetspark.blocking.Stream:
        [name] = self.witness.jetstream().stream_names(subject)
        return self.witness.jetstream().stream(name)

    async def stored(self, subject: str | None = None) -> list[bytes]:
        """What the stream has, when everything sent before is done; the runner looks again at the end of all runs."""
        subject = subject or self.subject
        await self.js.publish(f"{self.name}.fence")
        found = self.look(subject)
        self.seen[subject] = found
        return found

    def look(self, subject: str) -> list[bytes]:
        return [each.data for each in self.stream_of(subject).get_messages(subject=subject)]


def accepted_by(w: World, ended: Ended, sent: list[bytes], stored: list[bytes]) -> None:
    """What was accepted is stored, in order, and nothing else: but for the call that was interrupted, perhaps."""
    most = len(sent) + (w.slack if ended.was_interrupted else 0)
    if w.has_lost_session:
        assert len(stored) == len(set(stored)), stored
    else:
        assert stored[: len(sent)] == sent, (len(stored), len(sent))
    assert len(stored) <= most, (len(stored), len(sent))


# ---- the connection --------------------------------------------------------------------------------------------------


@row("connect", starts_threads=True)
async def _(w: World) -> None:
    async def act() -> None:
        async with await w.connect() as nc:
            await nc.flush()

    await w.interrupt(act)


@row("Client.publish")
async def _(w: World) -> None:
    sent: list[bytes] = []

    async def act() -> None:
        for number in range(30):
            await w.nc.publish(w.subject, b"%d" % number)
            sent.append(b"%d" % number)
        await w.nc.flush()

    ended = await w.interrupt(act)
    accepted_by(w, ended, sent, await w.stored())


plain("Client.request", lambda w: w.nc.request("$JS.API.INFO"))
plain("Client.flush", lambda w: w.nc.flush())


@row("Client.request_many")
async def _(w: World) -> None:
    async def act() -> None:
        async with contextlib.aclosing(w.nc.request_many("$JS.API.INFO", max_messages=1)) as answers:
            async for _ in answers:
                pass

    await w.interrupt(act)


@row("Client.subscribe", "Subscription.unsubscribe", may_leave="subscriptions threads", starts_threads=True)
async def _(w: World) -> None:
    async def act() -> None:
        callback = (lambda message: None) if w.number % 2 else None
        async with await w.nc.subscribe(w.subject, callback=callback, max_messages=3):
            await w.nc.flush()

    await w.interrupt(act)


async def _leaving(w: World, leave: str) -> None:
    """Closing that is interrupted can be done again, and what was published is sent or reported."""
    nc = await w.connect()
    js = nc.jetstream()
    read: list[bytes] = []
    await nc.subscribe(f"{w.subject}.in", callback=lambda message: read.append(message.data))
    for number in range(10):
        await nc.publish(f"{w.subject}.in", b"%d" % number)
    futures = [await js.publish_async(w.subject, b"%d" % number) for number in range(10)]
    await w.interrupt(lambda: getattr(nc, leave)())
    await nc.close()
    assert nc.is_closed
    acked = 0
    for future in futures:
        assert future.done()
        acked += future.exception() is None
    stored = await w.stored()
    assert acked <= len(stored), (acked, stored)


@row("Client.close", starts_threads=True)
async def _(w: World) -> None:
    await _leaving(w, "close")


@row("Client.drain", starts_threads=True)
async def _(w: World) -> None:
    await _leaving(w, "drain")


@row("Subscription.next")
async def _(w: World) -> None:
    subscription = await w.nc.subscribe(w.subject)
    read: list[bytes] = []

    async def act() -> None:
        for number in range(10):
            await w.nc.publish(w.subject, b"%d" % number)
            read.append((await subscription.next(A_WHILE_S)).data)

    ended = await w.interrupt(act)
    await w.nc.publish(w.subject, b"last")
    while (data := (await subscription.next(A_WHILE_S)).data) != b"last":
        read.append(data)
    stored = await w.stored()
    assert [each for each in stored if each in read] == read
    if not w.has_lost_session:
        assert len(stored) - 1 - len(read) <= (w.slack if ended.was_interrupted else 0), (stored, read)
    await subscription.unsubscribe()


@row("Subscription.drain")
async def _(w: World) -> None:
    for number in range(3):
        subscription = await w.nc.subscribe(f"{w.subject}.{number}")
        await w.nc.publish(f"{w.subject}.{number}", b"x")
        await w.nc.flush()
        await subscription.next(A_WHILE_S)
        await w.interrupt(lambda subscription=subscription: subscription.drain(A_WHILE_S))
        await subscription.unsubscribe()


@row("Message.respond")
async def _(w: World) -> None:
    async with await w.nc.subscribe(f"ask.{w.subject}") as questions:
        await w.nc.publish(f"ask.{w.subject}", b"?", reply=w.subject)
        question = await questions.next(A_WHILE_S)
        ended = await w.interrupt(lambda: question.respond(b"!"))
    accepted_by(w, ended, [b"!"] if ended.is_complete else [], await w.stored())


# ---- publishing ------------------------------------------------------------------------------------------------------


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
    pub = w.js.fast_publisher(message_ids=w.number % 2 == 0, flow=4)

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
    pub = w.js.fast_publisher(message_ids=w.number % 2 == 0, flow=4)

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


async def _check_publisher(w: World, pub: Any, ended: Ended) -> None:
    stored = await w.stored()
    assert stored == [b"%d" % number for number in range(len(stored))], stored
    assert pub.published() <= len(stored) <= pub.accepted, (pub.published(), len(stored), pub.accepted)
    assert pub.possibly_doubled == 0
    assert len(pub.unpublished()) == pub.accepted - pub.published()
    if ended.is_complete:
        assert pub.published() == pub.accepted


# ---- streams ---------------------------------------------------------------------------------------------------------

plain("JetStream.account_info", lambda w: w.js.account_info())
plain("JetStream.stream", lambda w: w.js.stream(w.name))
plain("Stream.info", lambda w: w.stream.info(subjects_filter=">"))
plain("Stream.update", lambda w: w.stream.update(description=f"{w.number}"))
plain(
    "JetStream.update_stream",
    lambda w: w.js.update_stream(StreamConfig(name=w.name, description=f"{w.number}")),
)


async def _end_spare(w: World) -> None:
    with contextlib.suppress(jetspark.StreamNotFound):
        await w.js.delete_stream(f"{w.name}_{w.number}")


@row("JetStream.create_stream")
async def _(w: World) -> None:
    config = StreamConfig(name=f"{w.name}_{w.number}", storage="memory")
    await w.interrupt(lambda: w.js.create_stream(config))
    await _end_spare(w)


@row("JetStream.create_or_update_stream")
async def _(w: World) -> None:
    config = StreamConfig(name=f"{w.name}_{w.number}", storage="memory")
    await w.interrupt(lambda: w.js.create_or_update_stream(config))
    await _end_spare(w)


@row("JetStream.delete_stream")
async def _(w: World) -> None:
    stream = await w.spare_stream()
    ended = await w.interrupt(lambda: w.js.delete_stream(stream.name))
    if ended.is_complete:
        assert stream.name not in list(w.witness.jetstream().stream_names())
    await _end_spare(w)


@row("Stream.delete")
async def _(w: World) -> None:
    stream = await w.spare_stream()
    await w.interrupt(stream.delete)
    await _end_spare(w)


@row("Stream.seal")
async def _(w: World) -> None:
    stream = await w.spare_stream()
    await w.interrupt(stream.seal)
    await _end_spare(w)


@row("Stream.purge", "Stream.delete_message")
async def _(w: World) -> None:
    for number in range(5):
        ack = await w.js.publish(w.subject, b"%d" % number)
    if w.number % 2:
        ended = await w.interrupt(lambda: w.stream.purge(subject=w.subject))
        assert len(await w.stored()) == (0 if ended.is_complete else 5) or not ended.is_complete
    else:
        ended = await w.interrupt(lambda: w.stream.delete_message(ack.sequence))
        assert len(await w.stored()) in ((4,) if ended.is_complete else (4, 5))


@row("Stream.step_down")
async def _(w: World) -> None:
    async def act() -> None:
        with contextlib.suppress(JetSparkError):  # a single server has nobody to hand over to
            await w.stream.step_down()

    await w.interrupt(act)


@row("Stream.get_message", "Stream.get_messages", "Stream.get_last_messages")
async def _(w: World) -> None:
    for number in range(5):
        await w.js.publish(w.subject, b"%d" % number)

    async def act() -> None:
        assert (await w.stream.get_message(last_for=w.subject)).data == b"4"
        some = w.stream.get_messages(subject=w.subject)
        async with contextlib.aclosing(some) as messages:
            assert [each.data async for each in messages] == [b"%d" % number for number in range(5)]
        [last] = await w.stream.get_last_messages([w.subject])
        assert last.data == b"4"

    await w.interrupt(act)


async def _drained(iterator: AsyncIterator[Any]) -> list[Any]:
    async with contextlib.aclosing(iterator) as entries:  # type: ignore[type-var]
        return [entry async for entry in entries]


def listing(cover: str, call: Callable[[World], Awaitable[AsyncIterator[Any]]]) -> None:
    async def run(w: World) -> None:
        entries = await call(w)
        await w.interrupt(lambda: _drained(entries))

    row(cover)(run)


async def _now(iterator: AsyncIterator[Any]) -> AsyncIterator[Any]:
    return iterator


listing("JetStream.streams", lambda w: _now(w.js.streams()))
listing("JetStream.stream_names", lambda w: _now(w.js.stream_names()))
listing("JetStream.kv_names", lambda w: _now(w.js.kv_names()))
listing("JetStream.object_store_names", lambda w: _now(w.js.object_store_names()))
listing("Stream.consumers", lambda w: _now(w.stream.consumers()))
listing("Stream.consumer_names", lambda w: _now(w.stream.consumer_names()))


@row("JetStream.batch_advisories", may_leave="subscriptions")
async def _(w: World) -> None:
    async def act() -> None:
        async with contextlib.aclosing(w.js.batch_advisories(w.name)) as advisories:
            await w.nc.publish(f"$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.{w.name}", ADVISORY)
            async for advisory in advisories:
                assert advisory.batch == "b"
                return

    await w.interrupt(act)


# ---- consumers -------------------------------------------------------------------------------------------------------


@row("Stream.create_consumer", "Stream.update_consumer", "Stream.create_or_update_consumer")
async def _(w: World) -> None:
    config = ConsumerConfig(name=f"c{w.number}", filter_subjects=[w.subject], inactive_threshold_s=60)

    async def act() -> None:
        await w.stream.create_consumer(config)
        await w.stream.update_consumer(config)
        await w.stream.create_or_update_consumer(config)

    await w.interrupt(act)
    with contextlib.suppress(jetspark.ConsumerNotFound):
        await w.stream.delete_consumer(f"c{w.number}")


@row("Stream.consumer", "Stream.delete_consumer")
async def _(w: World) -> None:
    consumer = await w.consumer(0)

    async def act() -> None:
        await w.stream.consumer(consumer.name)
        await w.stream.delete_consumer(consumer.name)

    await w.interrupt(act)
    with contextlib.suppress(jetspark.ConsumerNotFound):
        await w.stream.delete_consumer(f"c{w.number}")


@row("Consumer.info", "Consumer.pause", "Consumer.resume", "Consumer.reset", "Consumer.delete")
async def _(w: World) -> None:
    consumer = await w.consumer(3)

    async def act() -> None:
        await consumer.info()
        await consumer.pause(datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1))
        await consumer.resume()
        await consumer.reset()
        await consumer.delete()

    await w.interrupt(act)
    with contextlib.suppress(jetspark.ConsumerNotFound):
        await consumer.delete()


@row("Consumer.unpin", "Consumer.step_down")
async def _(w: World) -> None:
    consumer = await w.consumer(0)

    async def act() -> None:
        with contextlib.suppress(JetSparkError):  # there is no group, and nobody to hand over to
            await consumer.unpin("jobs")
        with contextlib.suppress(JetSparkError):
            await consumer.step_down()

    await w.interrupt(act)
    await consumer.delete()


async def _rest(w: World, consumer: Any, got: list[bytes]) -> list[bytes]:
    """Everything else there is, acknowledged; what was given back comes again."""
    while message := await consumer.next(timeout=0.15):
        got.append(message.data)
        await message.ack()
    await consumer.close()
    return got


@row("Consumer.fetch", "Consumer.next", "Consumer.close")
async def _(w: World) -> None:
    consumer = await w.consumer(20)
    got: list[bytes] = []

    async def act() -> None:
        for size in (1, 3, 6):
            for message in await consumer.fetch(size, timeout=A_WHILE_S):
                got.append(message.data)
                await message.ack()
        message = await consumer.next(timeout=A_WHILE_S)
        got.append(message.data)
        await message.ack()
        await consumer.close()

    ended = await w.interrupt(act)
    await w.js.publish(f"{w.name}.fence")
    got = await _rest(w, consumer, got)
    # A blocking fetch may be interrupted when it has taken its messages from the buffer: they come again later. An
    # asyncio one is interrupted only where it waits, and keeps what it has for the next.
    lost = {b"%d" % number for number in range(20)} - set(got)
    assert len(lost) <= (6 if ended.was_interrupted and w.is_blocking else 0), lost
    assert len(got) - len(set(got)) <= 6
    await consumer.delete()


@row("Consumer.messages", "Messages.close")
async def _(w: World) -> None:
    consumer = await w.consumer(20)
    got: list[bytes] = []

    async def act() -> None:
        async with consumer.messages(max_messages=8) as messages:
            async for message in messages:
                got.append(message.data)
                await message.ack()
                if len(got) == 20:
                    return

    ended = await w.interrupt(act)
    got = await _rest(w, consumer, got)
    lost = {b"%d" % number for number in range(20)} - set(got)
    assert len(lost) <= (8 if ended.was_interrupted else 0), lost
    await consumer.delete()


@row("Consumer.pushed_messages", "PushMessages.close")
async def _(w: World) -> None:
    consumer = await w.consumer(10, deliver_subject=f"to.{w.subject}", ack_policy="explicit")
    got: list[bytes] = []

    async def act() -> None:
        async with consumer.pushed_messages() as messages:
            async for message in messages:
                got.append(message.data)
                await message.ack()
                if len(got) == 10:
                    return

    await w.interrupt(act)
    await consumer.delete()


@row("OrderedConsumer.messages")
async def _(w: World) -> None:
    for number in range(10):
        await w.js.publish(w.subject, b"%d" % number)
    got: list[bytes] = []

    async def act() -> None:
        async with contextlib.aclosing(w.stream.ordered_consumer(w.subject).messages()) as messages:
            async for message in messages:
                got.append(message.data)
                if len(got) == 10:
                    return

    await w.interrupt(act)
    assert got == [b"%d" % number for number in range(len(got))]


@row(
    "JetStreamMessage.ack",
    "JetStreamMessage.ack_sync",
    "JetStreamMessage.nak",
    "JetStreamMessage.in_progress",
    "JetStreamMessage.term",
)
async def _(w: World) -> None:
    consumer = await w.consumer(5)
    messages = await consumer.fetch(4, timeout=A_WHILE_S)
    done: list[str] = []

    async def act() -> None:
        await messages[0].in_progress()
        await messages[0].ack()
        done.append("ack")
        await messages[1].ack_sync(A_WHILE_S)
        done.append("ack_sync")
        await messages[2].term("no")
        done.append("term")
        await messages[3].nak()

    await w.interrupt(act)
    await w.js.publish(f"{w.name}.fence")
    await consumer.info()
    await consumer.close()
    # 0 as long as nothing is acknowledged.
    floor = max((await consumer.info()).ack_floor.stream_sequence - messages[0].metadata.stream_sequence + 1, 0)
    assert floor >= len(done), (floor, done)
    await consumer.delete()


# ---- key-value -------------------------------------------------------------------------------------------------------


@row("JetStream.create_kv", "JetStream.kv", "JetStream.create_or_update_kv", "JetStream.delete_kv")
async def _(w: World) -> None:
    config = KVConfig(bucket=f"{w.name}_{w.number}", storage="memory")

    async def act() -> None:
        await w.js.create_kv(config)
        await w.js.create_or_update_kv(config)
        await w.js.kv(config.bucket)
        await w.js.delete_kv(config.bucket)

    await w.interrupt(act)
    with contextlib.suppress(jetspark.StreamNotFound):
        await w.js.delete_kv(config.bucket)


@row("KeyValue.put", "KeyValue.create", "KeyValue.update", "KeyValue.delete", "KeyValue.purge")
async def _(w: World) -> None:
    kv = await w.bucket()
    key, done = f"k{w.number}", 0

    async def act() -> None:
        nonlocal done
        revision = await kv.create(key, b"1")
        done = 1
        await kv.update(key, b"2", revision=revision)
        done = 2
        await kv.put(key, b"3")
        done = 3
        await kv.delete(key)
        done = 4
        await kv.purge(key)
        done = 5

    await w.interrupt(act)
    await w.js.publish(f"{w.name}.fence")
    await kv.put(f"{key}.fence", b"")
    written = w.look(f"$KV.{w.name}.{key}")
    expected = [[], [b"1"], [b"1", b"2"], [b"1", b"2", b"3"], [b"1", b"2", b"3", b""], [b""]]
    assert written in expected[done : done + 2], (written, done)
    w.seen[f"$KV.{w.name}.{key}"] = written


@row("KeyValue.get", "KeyValue.get_at", "KeyValue.history", "KeyValue.status", "KeyValue.stream_info")
async def _(w: World) -> None:
    kv = await w.bucket()
    key = f"k{w.number}"
    revision = await kv.put(key, b"1")

    async def act() -> None:
        assert (await kv.get(key)).value == b"1"
        assert (await kv.get_at(key, revision)).value == b"1"
        assert [entry.value for entry in await kv.history(key)] == [b"1"]
        await kv.status()
        await kv.stream_info()

    await w.interrupt(act)


@row("KeyValue.keys", "KeyValue.snapshot")
async def _(w: World) -> None:
    kv = await w.bucket()
    await kv.put("a", b"1")

    async def act() -> None:
        assert "a" in await _drained(kv.keys())
        assert (await kv.snapshot(["a"]))["a"].value == b"1"

    await w.interrupt(act)


@row("KeyValue.watch")
async def _(w: World) -> None:
    kv = await w.bucket()
    for number in range(5):
        await kv.put(f"w.{number}", b"1")
    got: list[str] = []

    async def act() -> None:
        async with contextlib.aclosing(kv.watch("w.*", initial_marker=True)) as changes:
            async for change in changes:
                if change is None:
                    return
                got.append(change.key)

    await w.interrupt(act)
    assert len(got) == len(set(got)) <= 5


@row("KeyValue.purge_deletes")
async def _(w: World) -> None:
    kv = await w.bucket()
    await kv.put("gone", b"1")
    await kv.delete("gone")
    await w.interrupt(lambda: kv.purge_deletes(older_than=0))


@row(
    "KeyValue.transaction",
    "Transaction.put",
    "Transaction.create",
    "Transaction.update",
    "Transaction.delete",
    "Transaction.purge",
    "Transaction.expect",
    "Transaction.resolve",
)
async def _(w: World) -> None:
    kv = await w.bucket()
    key = f"t{w.number}"
    revision = await kv.put(f"{key}.old", b"0")
    other = await kv.put(f"{key}.read", b"0")
    transaction = kv.transaction()

    async def act() -> None:
        async with transaction as tx:
            await tx.put(f"{key}.put", b"1")
            await tx.create(f"{key}.new", b"1")
            await tx.update(f"{key}.old", b"1", revision=revision)
            await tx.delete(f"{key}.deleted")
            await tx.purge(f"{key}.purged")
            await tx.expect(f"{key}.read", revision=other)

    ended = await w.interrupt(act)
    await kv.put(f"{key}.fence", b"")
    outcome = transaction.outcome
    if outcome == "unknown":
        outcome = await transaction.resolve()
    present = await kv.snapshot([f"{key}.put", f"{key}.new", f"{key}.old"])
    expected = {f"{key}.put", f"{key}.new", f"{key}.old"} if outcome == "stored" else {f"{key}.old"}
    assert set(present) == expected, (outcome, present)
    assert present[f"{key}.old"].value == (b"1" if outcome == "stored" else b"0")
    assert outcome == "stored" or ended.was_interrupted
    if outcome == "stored":
        assert transaction.revisions or ended.was_interrupted


# ---- objects ---------------------------------------------------------------------------------------------------------


@row("JetStream.create_object_store", "JetStream.object_store", "JetStream.delete_object_store", "ObjectStore.seal")
async def _(w: World) -> None:
    bucket = f"{w.name}_{w.number}"

    async def act() -> None:
        store = await w.js.create_object_store(jetspark.ObjectStoreConfig(bucket=bucket, storage="memory"))
        await w.js.object_store(bucket)
        await store.seal()
        await w.js.delete_object_store(bucket)

    await w.interrupt(act)
    with contextlib.suppress(jetspark.StreamNotFound):
        await w.js.delete_object_store(bucket)


async def _check_chunks(w: World, store: Any) -> None:
    """Every object is whole, and no chunk is left that belongs to none."""
    deadline = time.monotonic() + A_WHILE_S
    while True:
        infos = [info async for info in store.list()]
        state = w.stream_of(f"$O.{w.name}.C.x").info(subjects_filter=f"$O.{w.name}.C.>").state
        expected = sum(info.chunks for info in infos if info.link is None)
        if sum(state.subjects.values()) == expected:
            break
        # An interrupted thread cannot tidy up after a second interruption; nobody here interrupts twice.
        assert time.monotonic() < deadline, f"chunks without an object: {state.subjects} {infos}"
        await w.sleep(0.02)
    for info in infos:
        if info.link is None:
            assert len(await store.get_bytes(info.name)) == info.size_bytes


@row("ObjectStore.put")
async def _(w: World) -> None:
    store = await w.objects()
    kind = w.number % 3
    size = 0 if w.number % 7 == 6 else (1000, 300_000, 300_000)[kind]
    new = random.Random(w.number).randbytes(size)
    await store.put("it", b"old")

    async def act() -> None:
        source: Any = new if kind < 2 else (new[at : at + 70_000] for at in range(0, len(new), 70_000))
        await store.put("it", source, chunk_bytes=50_000)

    ended = await w.interrupt(act)
    await _check_chunks(w, store)
    content = await store.get_bytes("it")
    assert content == new or (content == b"old" and not ended.is_complete), (len(content), ended)


@row("ObjectStore.get_bytes", "ObjectStore.get_file", "ObjectStore.chunks", "ObjectStore.info")
async def _(w: World) -> None:
    store = await w.objects()
    await store.put("it", bytes(200_000), chunk_bytes=50_000)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "it"
        target.write_bytes(b"old")

        async def act() -> None:
            await store.info("it")
            assert await store.get_bytes("it") == bytes(200_000)
            await store.get_file("it", target)
            assert sum(map(len, await _drained(store.chunks("it")))) == 200_000

        await w.interrupt(act)
        assert os.listdir(folder) == ["it"]
        assert target.read_bytes() in (b"old", bytes(200_000))


@row("ObjectStore.delete", "ObjectStore.update_meta", "ObjectStore.add_link", "ObjectStore.add_bucket_link")
async def _(w: World) -> None:
    store = await w.objects()
    name = f"o{w.number}"
    info = await store.put(name, bytes(100_000), chunk_bytes=50_000)

    async def act() -> None:
        await store.add_link(f"{name}.link", info)
        await store.add_bucket_link(f"{name}.bucket", w.name)
        await store.update_meta(name, ObjectMeta(name=name, description="x"))
        await store.delete(name)

    ended = await w.interrupt(act)
    if ended.is_complete:
        await store.delete(f"{name}.link")
        await store.delete(f"{name}.bucket")
    await _check_chunks(w, store)


@row("ObjectStore.list", "ObjectStore.watch", "ObjectStore.status", "ObjectStore.purge_orphans")
async def _(w: World) -> None:
    store = await w.objects()
    await store.put("it", b"x")

    async def act() -> None:
        assert [info.name for info in await _drained(store.list())] == ["it"]
        async with contextlib.aclosing(store.watch(initial_marker=True)) as changes:
            async for change in changes:
                if change is None:
                    break
        await store.status()
        assert await store.purge_orphans(older_than=0) == 0

    await w.interrupt(act)


# ---- the batcher -----------------------------------------------------------------------------------------------------


class _Sink:
    def __init__(self) -> None:
        self.items: list[int] = []

    async def write(self, batch: Any) -> None:
        await asyncio.sleep(0)
        self.items.extend(batch)


class _BlockingSink(_Sink):
    def write(self, batch: Any) -> None:  # type: ignore[override]
        time.sleep(0.0005)
        self.items.extend(batch)


def _batcher(w: World) -> tuple[Any, _Sink]:
    sink = _BlockingSink() if w.is_blocking else _Sink()
    module: Any = jetspark.batcher.blocking if w.is_blocking else jetspark.batcher
    config: Any = BatcherConfig(name="fuzz", max_batch_size=3, max_batch_delay=0.002, queue_depth=6, sink=sink)
    return wrap(module.Batcher(config)), sink


async def _check_batcher(w: World, batcher: Any, sink: _Sink, added: list[int], ended: Ended, slack: int) -> None:
    await batcher.shutdown(timeout=A_WHILE_S)
    assert len(sink.items) == len(set(sink.items)), sink.items
    assert set(added) <= set(sink.items), (added, sink.items)
    assert len(sink.items) <= len(added) + (slack if ended.was_interrupted else 0), (added, sink.items)


@row(
    "Batcher.add", "Batcher.add_with_ack", "Batcher.add_batch", "Batcher.try_add", "Batcher.stats", starts_threads=True
)
async def _(w: World) -> None:
    batcher, sink = _batcher(w)
    added: list[int] = []

    async def act() -> None:
        for number in range(0, 40, 4):
            await batcher.add(number)
            added.append(number)
            await batcher.add_with_ack(number + 1)
            added.append(number + 1)
            await batcher.add_batch([number + 2, number + 3])
            added.extend((number + 2, number + 3))

    ended = await w.interrupt(act)
    await _check_batcher(w, batcher, sink, added, ended, 2 * w.slack)


@row("Batcher.flush", "Batcher.shutdown", starts_threads=True)
async def _(w: World) -> None:
    batcher, sink = _batcher(w)
    added: list[int] = []

    async def act() -> None:
        for number in range(6):
            await batcher.add(number)
            added.append(number)
        await batcher.flush()
        await batcher.add(6)
        added.append(6)
        await batcher.shutdown()

    ended = await w.interrupt(act)
    await _check_batcher(w, batcher, sink, added, ended, w.slack)


# ---- what the table is compared with ---------------------------------------------------------------------------------

CLASSES: list[Any] = [
    jetspark.Client,
    jetspark.Subscription,
    jetspark.Message,
    jetspark.JetStream,
    jetspark.Stream,
    jetspark.Consumer,
    jetspark.OrderedConsumer,
    jetspark.JetStreamMessage,
    jetspark.AtomicBatch,
    jetspark.FastBatch,
    jetspark.FastPublisher,
    jetspark.KeyValue,
    jetspark.ObjectStore,
    jetspark.batcher.Batcher,
]

WAITS_FOR_NOTHING = {
    "Client.jetstream",
    "JetStream.atomic_batch",
    "JetStream.fast_batch",
    "JetStream.fast_publisher",
    "Stream.ordered_consumer",
    "Message.reply_subject",
    "JetStreamMessage.reply_subject",
}


def interruption(row: Row, driver: str, rng: random.Random) -> Interruption:
    kinds = [kind for kind in KINDS[driver] if kind != "thread" or not row.starts_threads]
    return Interruption(rng.choice(kinds), rng.random())
