"""Subjects as long as the server takes them, and longer: for those it would end the connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from support.drivers import Driver, Recorder, on_both_drivers

import jetspark
from jetspark import ConsumerConfig, KVConfig, ObjectMeta, StreamConfig
from jetspark.core.headers import encode
from jetspark.core.subjects import MAX_LINE_BYTES, MAX_SUBJECT_BYTES

LARGE = b"x" * 100_000


async def _fast(js: jetspark.JetStream, subject: str) -> None:
    async with js.fast_publisher() as publisher:
        await publisher.publish(subject, LARGE)
        await publisher.publish(subject, LARGE, headers={"a": "b"})


async def _encoded(js: jetspark.JetStream, subject: str) -> None:
    async with js.fast_publisher() as publisher:
        await publisher.publish_many([(subject, LARGE, encode({"a": "b"}))])


async def _atomic(js: jetspark.JetStream, subject: str) -> None:
    async with js.atomic_batch() as batch:
        await batch.add(subject, LARGE)
        await batch.add(subject, LARGE)


async def _transaction(kv: jetspark.KeyValue, key: str) -> None:
    async with kv.transaction() as tx:
        await tx.put(key, LARGE)


async def _rename(files: jetspark.ObjectStore, name: str) -> None:
    await files.put("here", b"x")
    await files.update_meta("here", ObjectMeta(name=name))


async def _async(js: jetspark.JetStream, subject: str) -> None:
    await js.publish_async(subject, LARGE, headers={"a": "b"})
    await js.publish_async_complete()


async def _first(items: AsyncIterator[Any]) -> Any:
    async for item in items:
        return item


class Stores:
    """What there is on the server."""

    def __init__(self, nc: jetspark.Client, js: jetspark.JetStream) -> None:
        self.nc, self.js = nc, js
        self.stream: jetspark.Stream
        self.kv: jetspark.KeyValue
        self.files: jetspark.ObjectStore

    async def make(self) -> None:
        self.stream = await self.js.create_stream(
            StreamConfig(name="S", subjects=["s.>"], allow_atomic=True, allow_batched=True)
        )
        self.kv = await self.js.create_kv(KVConfig(bucket="b"))
        self.files = await self.js.create_object_store("o")


# By what the caller gives: how much is in front of it in the subject that is sent, at most, and how it is used.
USES: dict[str, tuple[int, Callable[[Stores, str], Awaitable[Any]]]] = {
    "publish": (0, lambda s, given: s.nc.publish("s" + given[1:], LARGE, headers={"a": "b"})),
    "js.publish": (0, lambda s, given: s.js.publish("s." + given[2:], LARGE, headers={"a": "b"})),
    "publish_async": (0, lambda s, given: _async(s.js, "s." + given[2:])),
    "fast_publisher": (0, lambda s, given: _fast(s.js, "s." + given[2:])),
    "fast_publisher, encoded": (0, lambda s, given: _encoded(s.js, "s." + given[2:])),
    "atomic_batch": (0, lambda s, given: _atomic(s.js, "s." + given[2:])),
    "kv.put": (6, lambda s, given: s.kv.put(given, LARGE)),
    "kv.transaction": (6, lambda s, given: _transaction(s.kv, given)),
    "kv.history": (80, lambda s, given: s.kv.history(given)),
    "kv.watch": (80, lambda s, given: _first(s.kv.watch(given, initial_marker=True))),
    "create_consumer": (
        29,
        lambda s, given: s.stream.create_consumer(ConsumerConfig(name="c", filter_subject="s." + given[2:])),
    ),
    "objects.put": (1000, lambda s, given: s.files.put(given, LARGE)),
    "objects.update_meta": (1000, lambda s, given: _rename(s.files, given)),
    "subscribe": (0, lambda s, given: s.nc.subscribe(given)),
}


@on_both_drivers
@pytest.mark.parametrize("use", USES)
async def test_a_subject_that_is_too_long_is_refused_and_the_connection_stays(
    driver: Driver, url: str, use: str
) -> None:
    events = Recorder()
    async with driver.connect(url, on_event=events) as nc:
        stores = Stores(nc, nc.jetstream())
        await stores.make()
        before, act = USES[use]
        await act(stores, "k" * (MAX_SUBJECT_BYTES - before))
        await nc.flush()
        for size in (MAX_LINE_BYTES + 1, 5000, 70_000):
            with pytest.raises(jetspark.InvalidSubject, match=r"\d+ bytes, and \d+ are the most; shorten it"):
                await act(stores, "k" * size)
        with pytest.raises(jetspark.InvalidSubject, match="are the most"):
            await nc.publish("ü" * 2500, b"")
        await nc.flush()
        assert not events.of(jetspark.Disconnected)


@on_both_drivers
async def test_a_reply_and_a_queue_group_count_too(driver: Driver, url: str) -> None:
    events = Recorder()
    half = MAX_LINE_BYTES // 2
    async with driver.connect(url, on_event=events) as nc:
        await nc.publish("a" * half, LARGE, reply="b" * (half - 1), headers={"a": "b"})
        await nc.subscribe("a" * half, queue="b" * (half - 1))
        await nc.flush()
        with pytest.raises(jetspark.InvalidSubject, match="shorten it"):
            await nc.publish("a" * half, b"", reply="b" * (half + 1))
        with pytest.raises(jetspark.InvalidSubject, match="shorten it"):
            await nc.subscribe("a" * half, queue="b" * (half + 1))
        await nc.flush()
        assert not events.of(jetspark.Disconnected)
