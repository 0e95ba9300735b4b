"""Rows of operations that write: into buckets and object stores, and to streams and consumers themselves.

Where one reports that it is done, it is so afterwards, whoever leads then; where it does not, it may be or not.
"""

from __future__ import annotations

import datetime
from collections.abc import Awaitable, Callable
from typing import Any

import jetspark
from jetspark import (
    Consumer,
    ConsumerConfig,
    KeyValue,
    KVConfig,
    ObjectInfo,
    ObjectMeta,
    ObjectStore,
    ObjectStoreConfig,
    Stream,
    StreamConfig,
)
from support.unresponsive import BUCKET, PAYLOAD, Ended, Stall, row

CONTENT = bytes(range(256)) * 40
SOME_DAY = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


async def _gone(call: Callable[[], Awaitable[Any]], *errors: type[Exception]) -> bool:
    try:
        await call()
    except errors:
        return True
    return False


# ---- a bucket --------------------------------------------------------------------------------------------------------


async def _bucket(s: Stall) -> KeyValue:
    return await s.tried(lambda: s.js.kv(BUCKET))


async def _old_value(s: Stall) -> tuple[KeyValue, int]:
    """The bucket, with a value of this row; and its revision."""
    kv = await s.patient.kv(BUCKET)
    revision = await kv.put(s.name, b"old")
    return await _bucket(s), revision


async def _has_value(s: Stall, kv: KeyValue, ended: Ended) -> None:
    async def is_there() -> bool:
        entry = await kv.get(s.name)
        return (entry.value, entry.revision) == (PAYLOAD, ended.result)

    await s.holds(ended, is_there)


@row("KeyValue.put")
async def kv_put(s: Stall) -> None:
    kv = await _bucket(s)
    await _has_value(s, kv, await s.stalled(lambda: kv.put(s.name, PAYLOAD)))


@row("KeyValue.create")
async def kv_create(s: Stall) -> None:
    kv = await _bucket(s)
    await _has_value(s, kv, await s.stalled(lambda: kv.create(s.name, PAYLOAD)))


@row("KeyValue.update")
async def kv_update(s: Stall) -> None:
    kv, revision = await _old_value(s)
    await _has_value(s, kv, await s.stalled(lambda: kv.update(s.name, PAYLOAD, revision=revision)))


@row("KeyValue.delete")
async def kv_delete(s: Stall) -> None:
    kv, _ = await _old_value(s)
    ended = await s.stalled(lambda: kv.delete(s.name))
    await s.holds(ended, lambda: _gone(lambda: kv.get(s.name), jetspark.KeyNotFound))


@row("KeyValue.purge")
async def kv_purge(s: Stall) -> None:
    kv, _ = await _old_value(s)
    ended = await s.stalled(lambda: kv.purge(s.name))
    await s.holds(ended, lambda: _gone(lambda: kv.get(s.name), jetspark.KeyNotFound))


@row("KeyValue.purge_deletes")
async def kv_purge_deletes(s: Stall) -> None:
    kv, _ = await _old_value(s)
    await s.tried(lambda: kv.delete(s.name))
    ended = await s.stalled(lambda: kv.purge_deletes(older_than=0))

    async def is_purged() -> bool:
        return await kv.history(s.name) == []

    await s.holds(ended, is_purged)


@row("KeyValue.transaction")
async def kv_transaction(s: Stall) -> None:
    # One of its own: where others purge, it cannot always be known.
    await s.patient.create_kv(KVConfig(bucket=s.name, storage="memory", replicas=s.replicas, allow_atomic=True))
    await s.led(await s.patient.stream(f"KV_{s.name}"))
    kv = await s.tried(lambda: s.js.kv(s.name))
    transaction = kv.transaction()
    keys = [f"{s.name}.{number}" for number in range(3)]

    async def write() -> None:
        async with transaction as tx:
            for key in keys:
                await tx.put(key, PAYLOAD)

    ended = await s.stalled(write)
    outcome = transaction.outcome
    if outcome == "unknown":
        outcome = await s.tried(transaction.resolve)
    assert outcome == "stored" or ended.error is not None

    async def is_so() -> bool:
        return len(await kv.snapshot(keys)) == (len(keys) if outcome == "stored" else 0)

    await s.holds(Ended(outcome), is_so)


@row("JetStream.create_kv")
async def create_kv(s: Stall) -> None:
    config = KVConfig(bucket=s.name, storage="memory", replicas=s.replicas)
    ended = await s.stalled(lambda: s.js.create_kv(config))

    async def is_there() -> bool:
        return bool(await s.js.kv(s.name))

    await s.holds(ended, is_there)


@row("JetStream.delete_kv")
async def delete_kv(s: Stall) -> None:
    await s.patient.create_kv(KVConfig(bucket=s.name, storage="memory", replicas=s.replicas))
    ended = await s.stalled(lambda: s.js.delete_kv(s.name))
    await s.holds(ended, lambda: _gone(lambda: s.js.kv(s.name), jetspark.StreamNotFound))


# ---- an object store -------------------------------------------------------------------------------------------------


async def _store(s: Stall) -> ObjectStore:
    return await s.tried(lambda: s.js.object_store(BUCKET))


async def _old_object(s: Stall) -> tuple[ObjectStore, ObjectInfo]:
    """The store, with an object of this row; and what is known of that."""
    store = await s.patient.object_store(BUCKET)
    info = await store.put(s.name, b"old")
    return await _store(s), info


async def _has_object(s: Stall, store: ObjectStore, ended: Ended) -> None:
    async def is_there() -> bool:
        return await store.get_bytes(s.name) == CONTENT

    await s.holds(ended, is_there)
    if ended.error is not None:  # then it is there or not, but nothing in between
        content = await s.tried(lambda: _content(store, s.name))
        assert content in (None, CONTENT)


async def _content(store: ObjectStore, name: str) -> bytes | None:
    try:
        content: bytes = await store.get_bytes(name)
    except jetspark.ObjectNotFound:
        return None
    return content


@row("ObjectStore.put")
async def object_put(s: Stall) -> None:
    store = await _store(s)
    await _has_object(s, store, await s.stalled(lambda: store.put(s.name, CONTENT)))


@row("ObjectStore.put")
async def object_put_in_chunks(s: Stall) -> None:
    store = await _store(s)
    await _has_object(s, store, await s.stalled(lambda: store.put(s.name, CONTENT, chunk_bytes=1000)))


@row("ObjectStore.delete")
async def object_delete(s: Stall) -> None:
    store, _ = await _old_object(s)
    ended = await s.stalled(lambda: store.delete(s.name))
    await s.holds(ended, lambda: _gone(lambda: store.info(s.name), jetspark.ObjectNotFound))


@row("ObjectStore.update_meta")
async def object_update_meta(s: Stall) -> None:
    store, _ = await _old_object(s)
    ended = await s.stalled(lambda: store.update_meta(s.name, ObjectMeta(name=s.name, description="new")))

    async def is_new() -> bool:
        return (await store.info(s.name)).description == "new"

    await s.holds(ended, is_new)


@row("ObjectStore.add_link")
async def object_add_link(s: Stall) -> None:
    store, info = await _old_object(s)
    ended = await s.stalled(lambda: store.add_link(f"{s.name}.link", info))

    async def is_there() -> bool:
        return await store.get_bytes(f"{s.name}.link") == b"old"

    await s.holds(ended, is_there)


@row("ObjectStore.add_bucket_link")
async def object_add_bucket_link(s: Stall) -> None:
    store = await _store(s)
    ended = await s.stalled(lambda: store.add_bucket_link(s.name, BUCKET))

    async def is_there() -> bool:
        return (await store.info(s.name)).link is not None

    await s.holds(ended, is_there)


@row("ObjectStore.seal")
async def object_seal(s: Stall) -> None:
    await s.patient.create_object_store(ObjectStoreConfig(bucket=s.name, storage="memory", replicas=s.replicas))
    await s.led(await s.patient.stream(f"OBJ_{s.name}"))
    store = await s.tried(lambda: s.js.object_store(s.name))
    ended = await s.stalled(store.seal)

    async def is_sealed() -> bool:
        return bool((await store.status()).is_sealed)

    await s.holds(ended, is_sealed)


# ---- a stream --------------------------------------------------------------------------------------------------------


async def _stream(s: Stall, messages: int = 1) -> Stream:
    """One of this row's own, with messages."""
    config = StreamConfig(name=s.name, subjects=[f"own.{s.name}"], storage="memory", replicas=s.replicas)
    await s.led(await s.patient.create_stream(config))
    for _ in range(messages):
        await s.patient.publish(f"own.{s.name}", PAYLOAD)
    return await s.tried(lambda: s.js.stream(s.name))


@row("JetStream.create_stream")
async def create_stream(s: Stall) -> None:
    config = StreamConfig(name=s.name, subjects=[f"own.{s.name}"], storage="memory", replicas=s.replicas)
    ended = await s.stalled(lambda: s.js.create_stream(config))

    async def is_there() -> bool:
        return bool(await s.js.stream(s.name))

    await s.holds(ended, is_there)


@row("Stream.update")
async def stream_update(s: Stall) -> None:
    stream = await _stream(s)
    ended = await s.stalled(lambda: stream.update(description="new"))

    async def is_new() -> bool:
        return (await stream.info()).config.description == "new"

    await s.holds(ended, is_new)


@row("Stream.purge")
async def stream_purge(s: Stall) -> None:
    stream = await _stream(s, 3)
    ended = await s.stalled(stream.purge)

    async def is_empty() -> bool:
        return (await stream.info()).state.messages == 0 and ended.result == 3

    await s.holds(ended, is_empty)


@row("Stream.delete_message")
async def stream_delete_message(s: Stall) -> None:
    stream = await _stream(s)
    ended = await s.stalled(lambda: stream.delete_message(1))
    await s.holds(ended, lambda: _gone(lambda: stream.get_message(1), jetspark.MessageNotFound))


@row("Stream.seal")
async def stream_seal(s: Stall) -> None:
    stream = await _stream(s)
    ended = await s.stalled(stream.seal)

    async def is_sealed() -> bool:
        return bool((await stream.info()).config.sealed)

    await s.holds(ended, is_sealed)


@row("Stream.delete")
async def stream_delete(s: Stall) -> None:
    stream = await _stream(s)
    ended = await s.stalled(stream.delete)
    await s.holds(ended, lambda: _gone(stream.info, jetspark.StreamNotFound))


# ---- a consumer ------------------------------------------------------------------------------------------------------


async def _consumer(s: Stall) -> Consumer:
    """One that has had its message, and not acknowledged it."""
    stream = await s.patient.stream("STALL")
    await s.patient.publish(s.subject, PAYLOAD)
    await stream.create_consumer(ConsumerConfig(durable_name=s.name, filter_subjects=[s.subject]))
    stream = await s.tried(lambda: s.js.stream("STALL"))
    return await s.tried(lambda: stream.consumer(s.name))


@row("Stream.create_consumer")
async def create_consumer(s: Stall) -> None:
    stream = await s.tried(lambda: s.js.stream("STALL"))
    ended = await s.stalled(lambda: stream.create_consumer(ConsumerConfig(durable_name=s.name)))

    async def is_there() -> bool:
        return bool(await stream.consumer(s.name))

    await s.holds(ended, is_there)


@row("Stream.update_consumer")
async def update_consumer(s: Stall) -> None:
    consumer = await _consumer(s)
    stream = await s.tried(lambda: s.js.stream("STALL"))
    config = ConsumerConfig(durable_name=s.name, description="new")
    ended = await s.stalled(lambda: stream.update_consumer(config))

    async def is_new() -> bool:
        return (await consumer.info()).config.description == "new"

    await s.holds(ended, is_new)


@row("Consumer.delete")
async def consumer_delete(s: Stall) -> None:
    consumer = await _consumer(s)
    ended = await s.stalled(consumer.delete)
    await s.holds(ended, lambda: _gone(consumer.info, jetspark.ConsumerNotFound))


@row("Consumer.pause")
async def consumer_pause(s: Stall) -> None:
    consumer = await _consumer(s)
    ended = await s.stalled(lambda: consumer.pause(SOME_DAY))

    async def is_paused() -> bool:
        return bool((await consumer.info()).is_paused)

    await s.holds(ended, is_paused)


@row("Consumer.reset")
async def consumer_reset(s: Stall) -> None:
    consumer = await _consumer(s)
    assert len(await consumer.fetch(1, timeout=20)) == 1  # not acknowledged: a reset goes back to what is
    ended = await s.stalled(consumer.reset)

    async def is_delivered_again() -> bool:  # long before `ack_wait_s` is over
        return len(await consumer.fetch(1, timeout=1)) == 1

    await s.holds(ended, is_delivered_again)
