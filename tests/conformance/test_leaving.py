"""Leaving publishers before their work is done: by a time-out, an exception, a cancellation, at any moment.

What a publisher reported then is compared with what is in the stream once the server has read everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
from support.drivers import Driver, Recorder, on_both_drivers

import jetspark
import jetspark.blocking
from jetspark import StreamConfig
from jetspark.core.events import Disconnected
from jetspark.server import NatsServer

_names = iter(f"LEFT{number}" for number in range(1_000_000))

LOOP_STEPS = range(1, 61)
"""After so many steps of the loop a task is cancelled: from before the first message to after the last answer."""


class Leave(BaseException):
    """What no ``except Exception`` catches, as ``KeyboardInterrupt`` and ``SystemExit``."""


def config(**options: Any) -> StreamConfig:
    name = next(_names)
    return StreamConfig(
        name=name, subjects=[f"{name}.>"], storage="memory", allow_batched=True, allow_direct=True, **options
    )


def items(subject: str, first: int, last: int) -> list[tuple[str, bytes]]:
    return [(subject, b"%d" % number) for number in range(first, last + 1)]


async def stored(nc: jetspark.Client, stream: Any) -> list[int]:
    """What is in the stream when it has taken everything that was sent over this connection before."""
    await nc.jetstream(timeout=20).publish(f"{stream.name}.barrier", b"0")
    return [number async for message in stream.get_messages() if (number := int(message.data))]


def check_publisher(found: list[int], accepted: int, published: int, left: list[Any]) -> None:
    """Whatever is missing is in ``unpublished()``, in order; nothing is stored twice."""
    assert len(found) == len(set(found)), "stored twice"
    assert found == sorted(found)
    assert [int(item[1]) for item in left] == list(range(published + 1, accepted + 1))
    missing = set(range(1, accepted + 1)) - set(found)
    assert missing <= {int(item[1]) for item in left}
    assert set(found) <= set(range(1, accepted + 1))


# ---- publishers ------------------------------------------------------------------------------------------------------


@on_both_drivers
async def test_a_closed_publisher_sends_nothing_when_the_server_comes_back(driver: Driver, own: NatsServer) -> None:
    async with driver.connect(own.url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(config())
        publisher = js.fast_publisher()
        async with publisher:
            await publisher.publish(f"{stream.name}.a", b"1")
            await publisher.flush()
            own.pause()
            try:
                await publisher.publish_many(items(f"{stream.name}.a", 2, 5001))
                with pytest.raises(jetspark.RequestTimeout):
                    await publisher.close(timeout=0.3)
            finally:
                own.resume()
            left = await now(publisher.unpublished())
            batches = publisher.batches
            found = await stored(nc, stream)
            check_publisher(found, 5001, await now(publisher.published()), left)
            await asyncio.sleep(0.3)  # what the answers of the server could still set off
            assert await stored(nc, stream) == found
            assert publisher.batches == batches
            assert await now(publisher.unpublished()) == left
            with pytest.raises(jetspark.UsageError, match=r"unpublished\(\)"):
                await publisher.publish(f"{stream.name}.a", b"late")


async def now(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value


@pytest.mark.parametrize("message_ids", [False, True])
def test_a_publisher_that_is_cancelled_says_what_is_not_stored(url: str, message_ids: bool) -> None:
    async def publish(publisher: jetspark.FastPublisher, subject: str, rng: random.Random) -> None:
        async with publisher:
            last = 0
            while True:
                count = rng.choice([1, 3, 120])
                await publisher.publish_many(items(subject, last + 1, last + count))
                last += count
                if rng.random() < 0.3:
                    await publisher.flush()

    async def run() -> None:
        events = Recorder()
        async with jetspark.connect(url, on_event=events) as nc:
            js = nc.jetstream()
            for steps in LOOP_STEPS:
                stream = await js.create_stream(config())
                publisher = js.fast_publisher(message_ids=message_ids, flow=50)
                await cancel_after(publish(publisher, f"{stream.name}.a", random.Random(steps)), steps)
                left, published = publisher.unpublished(), publisher.published()
                found = await stored(nc, stream)
                check_publisher(found, publisher.accepted, published, left)
                assert publisher.unpublished() == left
                assert publisher.possibly_doubled == 0
                await stream.delete()
        assert not [event for event in events.events if isinstance(event, Disconnected)]

    asyncio.run(run())


async def cancel_after(work: Any, steps: int) -> None:
    task = asyncio.ensure_future(work)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("point", range(0, 2000, 67))
def test_a_publisher_left_by_an_interruption_says_what_is_not_stored(server: NatsServer, point: int) -> None:
    rng = random.Random(point)
    with jetspark.blocking.connect(server.url) as nc:
        stream = nc.jetstream().create_stream(config())
        subject = f"{stream.name}.a"
        publisher = nc.jetstream().fast_publisher(message_ids=rng.random() < 0.5)

        def some() -> Iterator[tuple[str, bytes]]:
            for number in range(1, 5001):
                if number == point and not is_flushing:
                    raise Leave
                yield subject, b"%d" % number

        is_flushing = rng.random() < 0.5
        with contextlib.suppress(Leave), publisher:
            if rng.random() < 0.5:
                publisher.publish_many(some())
            else:
                for item in some():
                    publisher.publish(*item)
                    if is_flushing and publisher.accepted == point:
                        publisher.flush()
                        raise Leave
            raise Leave
        left, published = publisher.unpublished(), publisher.published()
        nc.jetstream().publish(f"{stream.name}.barrier", b"0")
        found = [number for message in stream.get_messages() if (number := int(message.data))]
        check_publisher(found, publisher.accepted, published, left)
        assert publisher.unpublished() == left
        stream.delete()


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_a_fast_batch_that_is_cancelled_keeps_its_first_messages(url: str) -> None:
    async def fill(fast: jetspark.FastBatch, subject: str, rng: random.Random) -> None:
        async with fast:
            last, goal = 0, rng.choice([1, 700, 2000])
            while last < goal:
                count = rng.choice([1, 2, 600])
                if count == 1:
                    await fast.add(*items(subject, last + 1, last + 1)[0])
                else:
                    await fast.add_many(items(subject, last + 1, last + count))
                last += count
            if rng.random() < 0.5:
                await fast.commit(subject, b"%d" % (last + 1))

    async def run() -> None:
        events = Recorder()
        async with jetspark.connect(url, on_event=events) as nc:
            js = nc.jetstream()
            for steps in LOOP_STEPS:
                stream = await js.create_stream(config())
                fast = js.fast_batch()
                await cancel_after(fill(fast, f"{stream.name}.a", random.Random(steps)), steps)
                found = await stored(nc, stream)
                assert found == list(range(1, len(found) + 1)), steps
                assert fast.stored <= len(found) <= fast.sequence, steps
                await stream.delete()
        assert not [event for event in events.events if isinstance(event, Disconnected)]

    asyncio.run(run())


def test_an_atomic_batch_that_is_cancelled_is_stored_whole_or_not_at_all(url: str) -> None:
    async def fill(batch: jetspark.AtomicBatch, subject: str, rng: random.Random) -> None:
        async with batch:
            await batch.add_many(items(subject, 1, rng.choice([1, 20, 400])))
            await batch.add(subject, b"1000")

    async def run() -> None:
        events = Recorder()
        async with jetspark.connect(url, on_event=events) as nc:
            js = nc.jetstream()
            for steps in range(1, 31):
                stream = await js.create_stream(config(allow_atomic=True))
                batch = js.atomic_batch()
                await cancel_after(fill(batch, f"{stream.name}.a", random.Random(steps)), steps)
                outcome = batch.outcome
                if outcome == "unknown":
                    outcome = await batch.resolve()
                found = await stored(nc, stream)
                assert len(found) == (batch.sequence if outcome == "stored" else 0), (steps, outcome)
                await stream.delete()
        assert not [event for event in events.events if isinstance(event, Disconnected)]

    asyncio.run(run())


def test_what_publish_async_says_when_cancelled_is_true(url: str) -> None:
    async def fill(js: jetspark.JetStream, subject: str, sent: list[int], rng: random.Random) -> None:
        for number in range(1, 3000):
            await js.publish_async(subject, b"%d" % number)
            sent.append(number)

    async def run() -> None:
        events = Recorder()
        async with jetspark.connect(url, on_event=events) as nc:
            js = nc.jetstream()
            for steps in range(1, 61, 6):
                stream = await js.create_stream(config())
                sent: list[int] = []
                await cancel_after(fill(js, f"{stream.name}.a", sent, random.Random(steps)), steps)
                found = await stored(nc, stream)
                assert found == sent, steps  # a cancelled publish sent nothing
                await stream.delete()
        assert not [event for event in events.events if isinstance(event, Disconnected)]

    asyncio.run(run())


# ---- the block -------------------------------------------------------------------------------------------------------


USES: dict[str, Any] = {
    "fast_batch add": lambda fast, subject: fast.add(subject, b"1"),
    "fast_batch add_many": lambda fast, subject: fast.add_many([(subject, b"1")]),
    "fast_batch add_many and commit": lambda fast, subject: fast.add_many(
        [(subject, b"1"), (subject, b"2")], commit=True
    ),
    "fast_batch commit": lambda fast, subject: fast.commit(subject, b"1"),
    "fast_publisher publish": lambda publisher, subject: publisher.publish(subject, b"1"),
    "fast_publisher publish_many": lambda publisher, subject: publisher.publish_many([(subject, b"1")]),
    "atomic_batch add": lambda batch, subject: batch.add(subject, b"1"),
    "atomic_batch add_many": lambda batch, subject: batch.add_many([(subject, b"1")]),
    "atomic_batch commit": lambda batch, subject: batch.commit(subject, b"1"),
    "transaction put": lambda tx, _: tx.put("k", b"1"),
    "transaction create": lambda tx, _: tx.create("k", b"1"),
    "transaction update": lambda tx, _: tx.update("k", b"1", revision=1),
    "transaction delete": lambda tx, _: tx.delete("k"),
    "transaction purge": lambda tx, _: tx.purge("k"),
    "transaction expect": lambda tx, _: tx.expect("k", revision=1),
}


@pytest.mark.parametrize("use", USES)
@on_both_drivers
async def test_outside_of_its_block_nothing_is_accepted(driver: Driver, server: NatsServer, use: str) -> None:
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(config(allow_atomic=True))
        kv = await js.create_kv(jetspark.KVConfig(bucket=stream.name, storage="memory"))
        name = use.split()[0]
        keyword = "with" if driver.name == "blocking" else "async with"
        maker = kv if name == "transaction" else js

        def make() -> Any:
            return getattr(maker, name)()

        block = make()
        line = rf"{'' if keyword == 'async with' else '(?<!async )'}{keyword} (js|kv).{name}\(\) as \w+:"
        with pytest.raises(jetspark.UsageError, match=line):
            await USES[use](block, f"{stream.name}.a")
        async with make() as block:
            with pytest.raises(jetspark.UsageError, match=f"entered before.*{line}"):
                await block.__aenter__()
        with pytest.raises(jetspark.UsageError, match=r"over|closed"):
            await USES[use](block, f"{stream.name}.a")
        with pytest.raises(jetspark.UsageError, match="entered before"):
            await block.__aenter__()
        assert await stored(nc, stream) == []
        assert (await kv.status()).stream.state.messages == 0
        await js.delete_stream(stream.name)
        await js.delete_kv(stream.name)


# ---- one reader's mistake --------------------------------------------------------------------------------------------


class _Broken:
    """A reader with a mistake in it."""

    pending_messages = 0

    def wake(self) -> None:
        raise AssertionError("a mistake")

    def read_up(self, deadline: float) -> Any:
        raise AssertionError("a mistake")

    def on_event(self, event: Any) -> None:
        raise AssertionError("a mistake")

    def next_deadline(self) -> float | None:
        return None

    def on_time(self, now: float) -> None:
        raise AssertionError("a mistake")


@on_both_drivers
async def test_one_readers_mistake_does_not_end_the_connection_of_the_others(
    driver: Driver, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    events = Recorder()
    async with driver.connect(url, on_event=events) as nc:
        client = getattr(nc, "_target", nc)
        broken = _Broken()
        client._machine.subscribe("news", reader=broken)
        client._transport.dispatcher.attach(broken)
        good = await nc.subscribe("news")
        for number in range(3):
            await nc.publish("news", b"%d" % number)
        await nc.flush()
        for number in range(3):
            assert (await good.next(30)).data == b"%d" % number
        client._transport.dispatcher.report(jetspark.JetSparkError("something else"))
        assert not events.of(Disconnected)
        assert {str(event.error) for event in events.of(jetspark.ErrorReported)} == {"a mistake", "something else"}
        assert "a mistake" in caplog.text


@on_both_drivers
async def test_a_mistake_while_reading_ends_the_session_and_not_the_connection(
    driver: Driver, url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Recorder()
    async with driver.connect(url, on_event=events, reconnect_wait_s=0.01) as nc:
        machine = getattr(nc, "_target", nc)._machine
        receive, mistakes = machine.receive_data, iter([AssertionError("a mistake")])

        def fail_once(data: bytes) -> None:
            for mistake in mistakes:
                raise mistake
            receive(data)

        monkeypatch.setattr(machine, "receive_data", fail_once, raising=False)
        with contextlib.suppress(jetspark.JetSparkError):
            await nc.flush()
        await events.wait_for(jetspark.Reconnected)
        await nc.flush()
        assert [event.reason for event in events.of(Disconnected)] == ["a mistake"]
        assert "a mistake" in caplog.text


@on_both_drivers
async def test_a_mistake_in_a_publisher_is_told_to_whoever_waits(
    driver: Driver, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(config())
        async with js.fast_batch() as untouched:
            await untouched.add(f"{stream.name}.a", b"1")
            publisher = js.fast_publisher()
            endless = getattr(publisher, "_target", publisher)._publisher

            def fail(*_: Any) -> None:
                raise AssertionError("a mistake")

            async def publish_and_flush() -> None:
                await publisher.publish(f"{stream.name}.a", b"2")
                await publisher.flush(timeout=20)

            # Before the first message: its acknowledgement may be quicker than anything that follows.
            monkeypatch.setattr(endless, "_follow_batch", fail)
            async with publisher:
                with pytest.raises(AssertionError, match="a mistake"):
                    await publish_and_flush()
                with pytest.raises(AssertionError, match="a mistake"):
                    await publisher.close()
            await untouched.add(f"{stream.name}.a", b"3")
        assert untouched.ack.batch_size == 2
