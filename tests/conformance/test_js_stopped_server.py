"""Every public method of JetStream, key-value buckets and object stores, called while the server does not answer.

The server is frozen: connections stay open, nothing comes back. Or a peer without a certificate has taken its place,
and answers before TLS. Each method has a row that says how it ends. A method without a row fails the first test, so
that a new one cannot be forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import io
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Certificates
from support.drivers import Driver, entered, on_both_drivers
from support.impostor import Impostor
from support.unresponsive import documented

import jetspark
import jetspark.blocking
from jetspark import ConnectionLost, ConsumerConfig, KVConfig, ObjectStoreConfig, RequestTimeout, StreamConfig
from jetspark.aio.consumer import Consumer
from jetspark.aio.jetstream import JetStream
from jetspark.aio.kv import KeyValue, Transaction
from jetspark.aio.objects import ObjectStore
from jetspark.aio.ordered import OrderedConsumer
from jetspark.aio.pull import Messages
from jetspark.aio.push import PushMessages
from jetspark.aio.stream import Stream
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.blocking import consumer as blocking_consumer
from jetspark.blocking import jetstream as blocking_jetstream
from jetspark.blocking import kv as blocking_kv
from jetspark.blocking import objects as blocking_objects
from jetspark.blocking import ordered as blocking_ordered
from jetspark.blocking import pull as blocking_pull
from jetspark.blocking import push as blocking_push
from jetspark.blocking import stream as blocking_stream
from jetspark.blocking import stream_message as blocking_message
from jetspark.server import NatsServer

# Long, because all rows run at once, on a machine that may be busy.
TIMEOUT_S = 6.0

# Twice the time-out would be two time-outs in a row, which is what must not be.
LATEST_S = 2 * TIMEOUT_S

# When the connection is lost: the first returns, for all is decided, and the other raises ConnectionLost.
END_WITH_THE_CONNECTION = ("js.publish_async_complete", "store.put")

CLASSES: dict[str, tuple[type, type]] = {
    "js": (JetStream, blocking_jetstream.JetStream),
    "stream": (Stream, blocking_stream.Stream),
    "consumer": (Consumer, blocking_consumer.Consumer),
    "ordered": (OrderedConsumer, blocking_ordered.OrderedConsumer),
    "kv": (KeyValue, blocking_kv.KeyValue),
    "transaction": (Transaction, blocking_kv.Transaction),
    "store": (ObjectStore, blocking_objects.ObjectStore),
    "messages": (Messages, blocking_pull.Messages),
    "pushed": (PushMessages, blocking_push.PushMessages),
    "message": (JetStreamMessage, blocking_message.JetStreamMessage),
}


@dataclass
class Things:
    """What the calls are made on, made while the server still answered."""

    js: jetspark.JetStream
    stream: Any
    doomed: Any
    """One to delete: when the server is back it does everything it was asked."""
    consumer: jetspark.Consumer
    other_consumer: Any
    """The same one, to be closed."""
    push: Any
    kv: jetspark.KeyValue
    store: Any
    plain_store: Any
    crowded_stores: list[Any]
    """With and without fast ingest, on connections of their own: nothing else can be sent when their buffer is full."""
    message: Any
    object_info: Any
    folder: Path


Call = Callable[[Things], Awaitable[Any]]


@dataclass
class Row:
    call: Call
    error: type[Exception] | None = RequestTimeout
    """What it raises; None when it returns."""
    names: str = ""
    """What the error says was going on."""


async def _first(iterator: AsyncIterator[Any]) -> Any:
    try:
        async for each in iterator:
            return each
    finally:
        await iterator.aclose()  # type: ignore[attr-defined]


async def _now(value: Any) -> Any:
    return value


async def _complete(things: Things) -> None:
    await things.js.publish_async("s.x", b"")  # so that there is something to wait for, whichever row runs first
    await things.js.publish_async_complete(TIMEOUT_S)


async def _commit(things: Things) -> None:
    async with things.kv.transaction() as tx:
        await tx.put("k", b"1")


async def _write(things: Things, write: Callable[[Any], Awaitable[Any]]) -> None:
    await write(await entered(things.kv.transaction()))


async def _leave(messages: Any) -> None:
    async with messages:
        pass


STREAM = StreamConfig(name="S", subjects=["s.>"])
CONSUMER = ConsumerConfig(durable_name="c")
MANY_CHUNKS = bytes(1000)

ROWS: dict[str, Row | list[Row]] = {
    # ---- the context
    "js.account_info": Row(lambda t: t.js.account_info()),
    "js.create_stream": Row(lambda t: t.js.create_stream(STREAM)),
    "js.update_stream": Row(lambda t: t.js.update_stream(STREAM)),
    "js.create_or_update_stream": Row(lambda t: t.js.create_or_update_stream(STREAM)),
    "js.get_or_create_stream": Row(lambda t: t.js.get_or_create_stream(STREAM)),
    "js.stream": Row(lambda t: t.js.stream("S")),
    "js.delete_stream": Row(lambda t: t.js.delete_stream("other")),
    "js.streams": Row(lambda t: _first(t.js.streams())),
    "js.stream_names": Row(lambda t: _first(t.js.stream_names())),
    "js.create_kv": Row(lambda t: t.js.create_kv(KVConfig(bucket="b"))),
    "js.create_or_update_kv": Row(lambda t: t.js.create_or_update_kv(KVConfig(bucket="b"))),
    "js.kv": Row(lambda t: t.js.kv("b")),
    "js.delete_kv": Row(lambda t: t.js.delete_kv("other")),
    "js.kv_names": Row(lambda t: _first(t.js.kv_names())),
    "js.create_object_store": Row(lambda t: t.js.create_object_store(ObjectStoreConfig(bucket="o"))),
    "js.object_store": Row(lambda t: t.js.object_store("o")),
    "js.delete_object_store": Row(lambda t: t.js.delete_object_store("other")),
    "js.object_store_names": Row(lambda t: _first(t.js.object_store_names())),
    "js.publish": Row(lambda t: t.js.publish("s.x", b"")),
    "js.publish_async": Row(lambda t: t.js.publish_async("s.x", b""), None),
    "js.publish_async_complete": Row(lambda t: _complete(t)),
    # They make an object, and have tests of their own.
    "js.atomic_batch": Row(lambda t: _now(t.js.atomic_batch()), None),
    "js.fast_batch": Row(lambda t: _now(t.js.fast_batch()), None),
    "js.fast_publisher": Row(lambda t: _now(t.js.fast_publisher()), None),
    # It subscribes, and waits for what may never come.
    "js.batch_advisories": Row(lambda t: _now(t.js.batch_advisories()), None),
    # ---- a stream
    "stream.info": Row(lambda t: t.stream.info()),
    "stream.update": Row(lambda t: t.stream.update(description="x")),
    "stream.seal": Row(lambda t: t.stream.seal()),
    "stream.delete": Row(lambda t: t.doomed.delete()),
    "stream.purge": Row(lambda t: t.stream.purge()),
    "stream.step_down": Row(lambda t: t.stream.step_down()),
    "stream.get_message": [
        Row(lambda t: t.stream.get_message(1)),
        Row(lambda t: t.stream.get_message(1, direct=False)),
    ],
    "stream.get_messages": Row(lambda t: _first(t.stream.get_messages()), names="messages of stream 'S'"),
    "stream.get_last_messages": Row(lambda t: t.stream.get_last_messages(["s.>"]), names="last messages of stream 'S'"),
    "stream.delete_message": Row(lambda t: t.stream.delete_message(1)),
    "stream.create_consumer": Row(lambda t: t.stream.create_consumer(CONSUMER)),
    "stream.update_consumer": Row(lambda t: t.stream.update_consumer(CONSUMER)),
    "stream.create_or_update_consumer": Row(lambda t: t.stream.create_or_update_consumer(CONSUMER)),
    "stream.get_or_create_consumer": Row(lambda t: t.stream.get_or_create_consumer(CONSUMER)),
    "stream.consumer": Row(lambda t: t.stream.consumer("c")),
    "stream.delete_consumer": Row(lambda t: t.stream.delete_consumer("c")),
    "stream.ordered_consumer": Row(lambda t: _now(t.stream.ordered_consumer()), None),
    "stream.consumers": Row(lambda t: _first(t.stream.consumers())),
    "stream.consumer_names": Row(lambda t: _first(t.stream.consumer_names())),
    "ordered.messages": Row(
        lambda t: _first(t.stream.ordered_consumer().messages()), names="ordered consumer of stream 'S'"
    ),
    # ---- a consumer
    "consumer.info": Row(lambda t: t.consumer.info()),
    "consumer.delete": Row(lambda t: t.consumer.delete()),
    "consumer.pause": Row(lambda t: t.consumer.pause(datetime.datetime.now(datetime.UTC))),
    "consumer.resume": Row(lambda t: t.consumer.resume()),
    "consumer.reset": Row(lambda t: t.consumer.reset()),
    "consumer.unpin": Row(lambda t: t.consumer.unpin("g")),
    "consumer.step_down": Row(lambda t: t.consumer.step_down()),
    "consumer.fetch": Row(lambda t: t.consumer.fetch(1, timeout=TIMEOUT_S), None),
    "consumer.next": Row(lambda t: t.consumer.next(timeout=TIMEOUT_S), None),
    "consumer.close": Row(lambda t: t.other_consumer.close(), None),
    "consumer.batches": Row(lambda t: _now(t.consumer.batches()), None),
    # Without end by design: it waits for a server that is away, and its heartbeat shows one that does not answer.
    "consumer.messages": Row(lambda t: _now(t.consumer.messages()), None),
    "consumer.pushed_messages": Row(lambda t: _now(t.push.pushed_messages()), None),
    "messages.close": Row(lambda t: _leave(t.consumer.messages()), None),
    "pushed.close": Row(lambda t: _leave(t.push.pushed_messages()), None),
    "message.ack": Row(lambda t: t.message[0].ack(), None),
    "message.nak": Row(lambda t: t.message[1].nak(), None),
    "message.term": Row(lambda t: t.message[2].term(), None),
    "message.in_progress": Row(lambda t: t.message[3].in_progress(), None),
    "message.ack_sync": Row(lambda t: t.message[4].ack_sync(timeout=TIMEOUT_S)),
    "message.reply_subject": Row(lambda t: _now(None), None),
    # ---- a bucket
    "kv.put": Row(lambda t: t.kv.put("k", b"")),
    "kv.get": Row(lambda t: t.kv.get("k")),
    "kv.create": Row(lambda t: t.kv.create("k", b"")),
    "kv.update": Row(lambda t: t.kv.update("k", b"", revision=1)),
    "kv.delete": Row(lambda t: t.kv.delete("k")),
    "kv.purge": Row(lambda t: t.kv.purge("k")),
    "kv.history": Row(lambda t: t.kv.history("k"), names="history of 'k' of bucket 'b'"),
    "kv.get_at": Row(lambda t: t.kv.get_at("k", 1)),
    "kv.keys": Row(lambda t: _first(t.kv.keys()), names="keys of bucket 'b'"),
    "kv.snapshot": [Row(lambda t: t.kv.snapshot(["k"])), Row(lambda t: t.kv.snapshot(["k"], at=1))],
    "kv.watch": Row(lambda t: _first(t.kv.watch()), names="ordered consumer of stream 'KV_b'"),
    "kv.purge_deletes": Row(lambda t: t.kv.purge_deletes(), names="purge_deletes of bucket 'b'"),
    "kv.status": Row(lambda t: t.kv.status()),
    "kv.stream_info": Row(lambda t: t.kv.stream_info()),
    "kv.transaction": Row(_commit),
    # What a transaction is given is sent at its end.
    "transaction.put": Row(lambda t: _write(t, lambda tx: tx.put("k", b"")), None),
    "transaction.update": Row(lambda t: _write(t, lambda tx: tx.update("k", b"", revision=1)), None),
    "transaction.delete": Row(lambda t: _write(t, lambda tx: tx.delete("k")), None),
    "transaction.purge": Row(lambda t: _write(t, lambda tx: tx.purge("k")), None),
    "transaction.expect": Row(lambda t: _write(t, lambda tx: tx.expect("k", revision=1)), None),
    "transaction.create": Row(lambda t: _write(t, lambda tx: tx.create("k", b""))),
    # Nothing was sent, so there is nothing to find out.
    "transaction.resolve": Row(lambda t: _write(t, lambda tx: tx.resolve()), jetspark.UsageError),
    # ---- an object store
    "store.put": [
        Row(lambda t: t.store.put("one chunk", b"1"), names="put of object 'one chunk' into bucket 'o'"),
        Row(lambda t: t.store.put("many", MANY_CHUNKS, chunk_bytes=10), names="put of object 'many' into bucket 'o'"),
        Row(lambda t: t.plain_store.put("many", MANY_CHUNKS, chunk_bytes=10), names="put of object 'many'"),
        Row(lambda t: t.crowded_stores[0].put("large", io.BytesIO(bytes(24 << 20))), names="put of object 'large'"),
        Row(lambda t: t.crowded_stores[1].put("large", io.BytesIO(bytes(24 << 20))), names="put of object 'large'"),
        Row(lambda t: t.store.put("empty", b""), names="put of object 'empty' into bucket 'o'"),
        Row(lambda t: t.store.put("own", MANY_CHUNKS, chunk_bytes=10, timeout=0.5), names="within 0.5 s"),
    ],
    "store.update_meta": Row(lambda t: t.store.update_meta("a", jetspark.ObjectMeta(name="a"))),
    "store.delete": Row(lambda t: t.store.delete("a")),
    "store.add_link": Row(lambda t: t.store.add_link("l", t.object_info)),
    "store.add_bucket_link": Row(lambda t: t.store.add_bucket_link("l", "o")),
    "store.seal": Row(lambda t: t.store.seal()),
    "store.purge_orphans": Row(lambda t: t.store.purge_orphans()),
    "store.info": Row(lambda t: t.store.info("a")),
    "store.get_bytes": Row(lambda t: t.store.get_bytes("a")),
    "store.get_file": Row(lambda t: t.store.get_file("a", t.folder / "a")),
    "store.chunks": Row(lambda t: _first(t.store.chunks("a"))),
    "store.list": Row(lambda t: _first(t.store.list()), names="list of object store 'o'"),
    "store.watch": Row(lambda t: _first(t.store.watch()), names="ordered consumer of stream 'OBJ_o'"),
    "store.status": Row(lambda t: t.store.status()),
}


@pytest.mark.parametrize("which", [0, 1], ids=["asyncio", "blocking"])
def test_every_public_method_has_a_row(which: int) -> None:
    methods = {
        f"{name}.{method}"
        for name, classes in CLASSES.items()
        for method in dir(classes[which])
        if not method.startswith("_") and callable(getattr(classes[which], method))
    }
    assert methods == ROWS.keys()


async def _prepare(js: jetspark.JetStream, others: list[Any], folder: Path) -> Things:
    stream = await js.create_stream(
        StreamConfig(name="S", subjects=["s.>"], allow_direct=True, allow_atomic=True, allow_batched=True)
    )
    consumer = await stream.create_consumer(CONSUMER)
    for _ in range(5):
        await js.publish("s.x", b"x")
    messages = await consumer.fetch(5)
    push = await stream.create_consumer(ConsumerConfig(durable_name="p", deliver_subject="to.us"))
    kv = await js.create_kv(KVConfig(bucket="b", history=3))
    await kv.put("k", b"1")
    store = await js.create_object_store("o")
    info = await store.put("a", b"content")
    # As other clients make them: without fast ingest.
    await js.create_stream(ObjectStoreConfig(bucket="plain").to_stream())
    return Things(
        js=js,
        stream=stream,
        doomed=await js.create_stream(StreamConfig(name="D", subjects=["d"])),
        consumer=consumer,
        other_consumer=await stream.consumer(consumer.name),
        push=push,
        kv=kv,
        store=store,
        plain_store=await js.object_store("plain"),
        crowded_stores=[await others[0].object_store("o"), await others[1].object_store("plain")],
        message=messages,
        object_info=info,
        folder=folder,
    )


async def _end_of(row: Row, things: Things) -> tuple[BaseException | None, float]:
    """How the call ended, and after how many seconds."""
    began = time.monotonic()
    error: BaseException | None = None
    try:
        async with asyncio.timeout(LATEST_S + 60):
            await row.call(things)
    except (Exception, asyncio.CancelledError) as raised:
        error = raised
    return error, time.monotonic() - began


async def _lateness() -> float:
    """By how many seconds this process is late with what should take as long as a time-out: so busy is the machine."""
    began, steps = time.monotonic(), 20
    for _ in range(steps):
        await asyncio.to_thread(time.sleep, TIMEOUT_S / steps)
    return time.monotonic() - began - TIMEOUT_S


async def _ends_of(rows: list[tuple[str, Row]], things: Things) -> list[tuple[BaseException | None, float]]:
    """How the calls ended, all at once, and after how many seconds of a machine that has time for them."""
    lateness = asyncio.create_task(_lateness())
    ends = await asyncio.gather(*(_end_of(row, things) for _, row in rows))
    late_s = await lateness
    return [(error, took_s - late_s) for error, took_s in ends]


def _complaint(name: str, row: Row, error: BaseException | None, took_s: float, *, is_lost: bool = False) -> str | None:
    expected = row.error.__name__ if row.error else "nothing"
    if took_s >= LATEST_S:
        return f"{name}: {took_s:.1f} s"
    if is_lost and name.startswith(END_WITH_THE_CONNECTION) and isinstance(error, ConnectionLost | None):
        return None
    if not isinstance(error, row.error or type(None)):
        return f"{name}: {error!r} instead of {expected}"
    return None if row.names in str(error) else f"{name}: {error} does not name {row.names!r}"


@pytest.mark.parametrize("name", ROWS)
def test_every_error_is_documented(name: str) -> None:
    owner, _, method = name.partition(".")
    some = ROWS[name]
    for row in some if isinstance(some, list) else [some]:
        names = {cls.__name__ for cls in row.error.__mro__} if row.error else {"nothing"}
        assert names & (documented(f"{CLASSES[owner][0].__name__}.{method}") | {"nothing"})


def _all_rows() -> list[tuple[str, Row]]:
    return [
        (f"{name}[{index}]", row)
        for name, some in ROWS.items()
        for index, row in enumerate(some if isinstance(some, list) else [some])
    ]


@on_both_drivers
async def test_no_call_outlasts_its_time_out_on_a_server_that_does_not_answer(
    driver: Driver, own: NatsServer, tmp_path: Path
) -> None:
    rows = _all_rows()
    async with driver.connect(own.url) as nc, driver.connect(own.url) as one, driver.connect(own.url) as two:
        js, *others = [client.jetstream(timeout=TIMEOUT_S) for client in (nc, one, two)]
        things = await _prepare(js, others, tmp_path)
        own.pause()
        try:
            ends = await _ends_of(rows, things)
        finally:
            own.resume()
        complaints = [_complaint(name, row, *end) for (name, row), end in zip(rows, ends, strict=True)]
        assert "\n".join(complaint for complaint in complaints if complaint) == ""


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine
@on_both_drivers
async def test_no_call_believes_an_answer_before_tls(
    driver: Driver, own: NatsServer, certificates: Certificates, tmp_path: Path
) -> None:
    """Nothing is believed: it all ends as if the peer had said nothing."""
    rows = _all_rows()
    options: dict[str, Any] = {"tls": jetspark.TLSConfig(ca_file=certificates.ca_file), "reconnect_wait_s": 0.02}
    with NatsServer() as accomplice:
        async with contextlib.AsyncExitStack() as stack:
            impostors = [
                await stack.enter_async_context(Impostor(own.port, accomplice.port, certificates)) for _ in range(3)
            ]
            clients = [
                await stack.enter_async_context(driver.connect(impostor.url, **options)) for impostor in impostors
            ]
            js, *others = [client.jetstream(timeout=TIMEOUT_S) for client in clients]
            things = await _prepare(js, others, tmp_path)
            # Most are asked in time to be answered.
            most = len(rows) // 2 + 1
            for impostor in impostors:
                impostor.hold(most if impostor is impostors[0] else None)
            ends = await _ends_of(rows, things)
            for impostor in impostors:
                await impostor.until_all_was_tried()
                assert b"CONNECT" not in impostor.heard
            offered = impostors[0].answers
            for impostor in impostors:
                impostor.give_back()
        complaints = [_complaint(name, row, *end, is_lost=True) for (name, row), end in zip(rows, ends, strict=True)]
        assert "\n".join(complaint for complaint in complaints if complaint) == ""
        assert offered >= most
