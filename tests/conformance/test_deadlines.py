"""A time-out is one deadline for all an operation waits for; closing twice is closing once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from support.drivers import Driver, Recorder, entered, inside, on_both_drivers

import jetspark
from jetspark import (
    Closed,
    ConnectionClosed,
    ConnectionLost,
    ConsumerConfig,
    Disconnected,
    KVConfig,
    Message,
    PermissionDenied,
    RequestTimeout,
    StreamConfig,
    UserPassword,
)
from jetspark.core import lifecycle
from jetspark.core.subjects import ApiSubject
from jetspark.server import NatsServer, Permissions, User

# Far above what an operation with a time-out of TIMEOUT_S may take, far below an outage that does not end.
TIMEOUT_S, PATIENCE_S = 0.3, 30.0


@dataclass
class NoRoom:
    """A client whose server is gone and whose send buffer is full, with what it opened before."""

    nc: jetspark.Client
    js: jetspark.JetStream
    consumer: jetspark.Consumer
    impatient_bucket: jetspark.KeyValue
    impatient_stream: jetspark.Stream


@asynccontextmanager
async def without_room(driver: Driver, server: NatsServer) -> AsyncIterator[NoRoom]:
    recorder = Recorder()
    nc = await driver.connect(server.url, send_buffer_bytes=64, on_event=recorder)
    js = nc.jetstream()
    await js.create_stream(StreamConfig(name="S", subjects=["s"]))
    stream = await js.stream("S")
    consumer = await stream.create_consumer(ConsumerConfig(durable_name="c"))
    await js.create_kv(KVConfig(bucket="b"))
    impatient = nc.jetstream(timeout=TIMEOUT_S)
    opened = NoRoom(nc, js, consumer, await impatient.kv("b"), await impatient.stream("S"))
    server.kill()
    await recorder.wait_for(Disconnected)
    await nc.publish("fill", bytes(100))
    try:
        yield opened
    finally:
        with pytest.raises(ConnectionLost):
            await nc.close(timeout=0.01)


async def timed_out(call: Callable[[], Awaitable[Any]]) -> RequestTimeout:
    began = time.monotonic()
    with pytest.raises(RequestTimeout) as caught:
        await call()
    assert time.monotonic() - began < PATIENCE_S
    return caught.value


@on_both_drivers
async def test_a_timeout_includes_the_wait_for_room_and_says_that_nothing_was_sent(
    driver: Driver, own: NatsServer
) -> None:
    async with without_room(driver, own) as opened:
        nc, js = opened.nc, opened.js

        async def ask_many() -> None:
            async for _ in nc.request_many("a", timeout=TIMEOUT_S):
                pass

        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: nc.request("a", timeout=TIMEOUT_S),
            ask_many,
            lambda: js.publish("s", b"", timeout=TIMEOUT_S),
            lambda: opened.impatient_bucket.get("key"),
            lambda: _first(opened.impatient_stream.get_messages()),
            lambda: opened.impatient_stream.get_last_messages(["s"]),
            lambda: nc.publish("a", timeout=TIMEOUT_S),
            lambda: js.publish_async("s", b"", timeout=TIMEOUT_S),
        ]
        for call in calls:
            error = await timed_out(call)
            assert not error.was_sent
            assert "nothing was sent" in str(error)
        assert (await timed_out(lambda: nc.flush(TIMEOUT_S))).was_sent  # a flush needs no room
        began = time.monotonic()
        assert await opened.consumer.fetch(1, timeout=TIMEOUT_S) == []
        assert time.monotonic() - began < PATIENCE_S


@on_both_drivers
async def test_a_publish_without_a_timeout_waits_for_room_until_the_connection_is_closed(
    driver: Driver, own: NatsServer
) -> None:
    recorder = Recorder()
    nc = await driver.connect(own.url, send_buffer_bytes=64, on_event=recorder)
    own.kill()
    await recorder.wait_for(Disconnected)
    await nc.publish("fill", bytes(100))
    waiting = [asyncio.ensure_future(nc.publish("a")), asyncio.ensure_future(nc.jetstream().publish_async("a"))]
    await asyncio.sleep(0.1)
    assert not any(each.done() for each in waiting)
    with pytest.raises(ConnectionLost):
        await nc.close(timeout=0.01)
    for each in waiting:
        with pytest.raises(ConnectionClosed):
            await each


@on_both_drivers
async def test_a_network_that_takes_no_more_ends_a_publish_with_a_timeout(driver: Driver, own: NatsServer) -> None:
    nc = await driver.connect(own.url, send_buffer_bytes=64)
    own.pause()
    try:

        async def publish_much() -> None:
            for _ in range(2000):  # the system's own buffers are some MB
                await nc.publish("a", bytes(64 << 10), timeout=TIMEOUT_S)

        with pytest.raises(RequestTimeout) as caught:
            await publish_much()
        assert not caught.value.was_sent
        with pytest.raises(ConnectionLost):
            await nc.close(timeout=0)
    finally:
        own.resume()


# ---- drain and close -----------------------------------------------------------------------------------------------


@on_both_drivers
async def test_a_drain_takes_no_longer_than_its_timeout_whoever_does_not_answer(
    driver: Driver, own: NatsServer
) -> None:
    nc = await driver.connect(own.url)
    await nc.subscribe("unread")
    await nc.publish("unread", b"")
    await nc.flush()
    own.pause()
    try:
        await nc.publish("a", b"never confirmed")
        error = await timed_out(lambda: nc.drain(timeout=TIMEOUT_S))
        assert error.timeout_s == TIMEOUT_S
        assert nc.is_closed
    finally:
        own.resume()


@on_both_drivers
async def test_a_drain_that_gets_no_confirmation_of_what_was_published_says_how_much_is_in_doubt(
    driver: Driver, own: NatsServer
) -> None:
    nc = await driver.connect(own.url)
    own.pause()
    try:
        for _ in range(3):
            await nc.publish("a", b"never confirmed")
        error = await timed_out(lambda: nc.drain(timeout=TIMEOUT_S))
        assert "3 messages in doubt" in str(error)
    finally:
        own.resume()


@on_both_drivers
async def test_a_subscription_drains_within_its_timeout(driver: Driver, own: NatsServer) -> None:
    async with driver.connect(own.url) as nc:
        subscription = await nc.subscribe("a")
        await nc.flush()
        own.pause()
        try:
            await timed_out(lambda: subscription.drain(timeout=TIMEOUT_S))
        finally:
            own.resume()


@on_both_drivers
async def test_closing_in_several_places_at_once_closes_once(driver: Driver, url: str) -> None:
    for ends in (["close", "close", "close"], ["drain", "drain"], ["drain", "close"], ["close", "drain"]):
        recorder = Recorder()
        nc = await driver.connect(url, on_event=recorder)
        received: list[object] = []
        await nc.subscribe("a", callback=received.append)
        for _ in range(100):
            await nc.publish("a", b"")
        await asyncio.gather(*(getattr(nc, end)() for end in ends))
        assert nc.is_closed
        if ends[0] == "drain":
            assert len(received) == 100
        await nc.close()
        await nc.drain()
        assert [type(event).__name__ for event in recorder.events].count("Closed") == 1


@on_both_drivers
async def test_an_impatient_close_ends_a_patient_one(driver: Driver, own: NatsServer) -> None:
    nc = await driver.connect(own.url)
    own.pause()
    try:
        await nc.publish("a", b"never confirmed")
        patient = asyncio.ensure_future(nc.close(timeout=4 * PATIENCE_S))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        with pytest.raises(ConnectionLost):
            await nc.close(timeout=0)
        with pytest.raises(ConnectionLost):
            await patient
        assert time.monotonic() - began < PATIENCE_S
    finally:
        own.resume()


@on_both_drivers
async def test_closing_while_the_server_is_away_returns(driver: Driver, own: NatsServer) -> None:
    recorder = Recorder()
    nc = await driver.connect(own.url, on_event=recorder)
    own.kill()
    await recorder.wait_for(Disconnected)
    await asyncio.gather(nc.close(), nc.drain(), nc.close())
    assert nc.is_closed


@pytest.mark.parametrize("how", ["close", "drain", "leave"])
@on_both_drivers
async def test_what_was_never_sent_is_told_once_by_closing_a_connection_that_ended_by_itself(
    driver: Driver, own: NatsServer, how: str
) -> None:
    recorder = Recorder()
    nc = await driver.connect(own.url, on_event=recorder, max_reconnect_attempts=2, reconnect_wait_s=0.2)
    own.kill()
    await recorder.wait_for(Disconnected)
    for _ in range(3):
        await nc.publish("a", b"never sent")
    assert (await recorder.wait_for(Closed)).unsent_messages == 3
    ends: dict[str, Callable[[], Awaitable[object]]] = {
        "close": nc.close,
        "drain": nc.drain,
        "leave": lambda: nc.__aexit__(None, None, None),
    }
    with pytest.raises(ConnectionLost) as caught:
        await ends[how]()
    assert caught.value.unconfirmed_messages == 3
    assert "no NATS server could be reached" in str(caught.value)
    await nc.close()  # all is said
    await nc.drain()


@on_both_drivers
async def test_a_connection_that_ends_while_it_is_closed_tells_what_was_never_sent(
    driver: Driver, own: NatsServer
) -> None:
    recorder = Recorder()
    nc = await driver.connect(own.url, on_event=recorder, max_reconnect_attempts=3, reconnect_wait_s=0.5)
    own.kill()
    await recorder.wait_for(Disconnected)
    for _ in range(3):
        await nc.publish("a", b"never sent")
    with pytest.raises(ConnectionLost) as caught:
        await nc.close(timeout=2 * PATIENCE_S)
    assert caught.value.unconfirmed_messages == 3
    assert "no NATS server could be reached" in str(caught.value)


@on_both_drivers
async def test_closing_a_connection_that_ended_by_itself_with_nothing_unsent_returns(
    driver: Driver, own: NatsServer
) -> None:
    recorder = Recorder()
    nc = await driver.connect(own.url, on_event=recorder, reconnect=False)
    await nc.publish("a", b"")
    await nc.flush()
    own.kill()
    await recorder.wait_for(Closed)
    await nc.close()
    await nc.drain()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
@on_both_drivers
async def test_an_interrupted_block_does_not_wait_for_a_server_that_does_not_answer(
    driver: Driver,
    own: NatsServer,
    kind: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(lifecycle, "INTERRUPTED_S", TIMEOUT_S)
    nc = await driver.connect(own.url, drain_timeout_s=4 * PATIENCE_S)
    own.pause()
    try:
        await nc.publish("a", b"never confirmed")
        began = time.monotonic()
        # Raised inside of the loop, two of them would end the loop.
        await nc.__aexit__(kind, kind(), None)
        assert time.monotonic() - began < PATIENCE_S
        assert nc.is_closed
        assert "1 published messages are unconfirmed" in caplog.text
    finally:
        own.resume()


@pytest.mark.parametrize("how", ["close", "drain"])
@on_both_drivers
async def test_what_the_server_refused_is_told_by_closing(driver: Driver, how: str) -> None:
    user = User(user="ada", password="secret", permissions=Permissions(publish_allow=["allowed"]))
    with NatsServer(jetstream=False, users=[user]) as server:
        nc = await driver.connect(server.url, auth=UserPassword("ada", "secret"))
        await nc.publish("allowed", b"")
        await nc.publish("denied", b"")
        with pytest.raises(PermissionDenied) as caught:
            await getattr(nc, how)()
        assert caught.value.subject == "denied"
        assert nc.is_closed


async def test_draining_inside_a_callback_does_not_wait_for_it(url: str) -> None:
    nc = await Driver("asyncio").connect(url)
    received: list[bytes] = []
    ended = asyncio.Event()

    async def callback(message: Message) -> None:
        received.append(message.data)
        await nc.drain(timeout=PATIENCE_S)
        if len(received) == 3:
            ended.set()

    await nc.subscribe("draining", callback=callback)
    for number in range(3):
        await nc.publish("draining", b"%d" % number)
    async with asyncio.timeout(PATIENCE_S / 2):
        await ended.wait()
    assert nc.is_closed
    assert received == [b"0", b"1", b"2"]


# ---- operations of several requests --------------------------------------------------------------------------------

# One request is answered in time, two in a row are not.
LATE_S, ONE_ANSWER_S = 1.7, 3.3


@asynccontextmanager
async def late_api(server: NatsServer) -> AsyncIterator[str]:
    """A prefix below which every request to JetStream reaches the server late; the answers are the server's own."""
    forwarding: set[asyncio.Task[None]] = set()

    async def forward(message: Message) -> None:
        await asyncio.sleep(LATE_S)
        # The name of a filter may end the subject, wildcards included.
        subject = ApiSubject("$JS.API." + message.subject.removeprefix("late."))
        await nc.publish(subject, message.data, reply=message.reply or "", headers=message.headers)

    async with jetspark.connect(server.url) as nc:
        await nc.subscribe("late.>", callback=lambda message: forwarding.add(asyncio.create_task(forward(message))))
        await nc.flush()
        yield "late"
        await asyncio.gather(*forwarding)


@dataclass
class Late:
    """One context and what was opened with it."""

    js: jetspark.JetStream
    stream: Any
    kv: jetspark.KeyValue
    store: Any

    @classmethod
    async def open(cls, js: jetspark.JetStream) -> Late:
        return cls(js, *await asyncio.gather(js.stream("S"), js.kv("b"), js.object_store("o")))


async def _first(messages: AsyncIterator[Any]) -> Any:
    async for message in messages:
        return message
    return None


SEVERAL_REQUESTS: dict[str, Callable[[Late], Awaitable[Any]]] = {
    "update_stream": lambda t: t.js.update_stream(StreamConfig(name="S", description="new")),
    "create_or_update_stream": lambda t: t.js.create_or_update_stream(StreamConfig(name="N", subjects=["n"])),
    "stream.update": lambda t: t.stream.update(description="new"),
    "create_kv": lambda t: t.js.create_kv(KVConfig(bucket="n")),
    "create_or_update_kv": lambda t: t.js.create_or_update_kv(KVConfig(bucket="n")),
    "create_object_store": lambda t: t.js.create_object_store("n"),
    "update_consumer": lambda t: t.stream.update_consumer(ConsumerConfig(durable_name="c", description="new")),
    "create_or_update_consumer": lambda t: t.stream.create_or_update_consumer(ConsumerConfig(durable_name="n")),
    "get_messages": lambda t: _first(t.stream.get_messages()),
    "get_last_messages": lambda t: t.stream.get_last_messages(["s"]),
    "ordered.messages": lambda t: _first(t.stream.ordered_consumer().messages()),
    "kv.keys": lambda t: _first(t.kv.keys()),
    "kv.snapshot": lambda t: t.kv.snapshot(["k"], at=1),
    "store.get_bytes": lambda t: t.store.get_bytes("transport"),
    "store.update_meta": lambda t: t.store.update_meta("a", jetspark.ObjectMeta(name="b")),
}


@on_both_drivers
async def test_the_requests_of_one_operation_share_its_time_out(driver: Driver, own: NatsServer) -> None:
    async with late_api(own) as prefix, driver.connect(own.url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="S", subjects=["s"], allow_direct=True))
        await stream.create_consumer(ConsumerConfig(durable_name="c"))
        await js.publish("s", b"")
        await (await js.create_kv(KVConfig(bucket="b", history=2))).put("k", b"")
        store = await js.create_object_store("o")
        await store.add_link("transport", await store.put("a", b"content"))

        contexts = [nc.jetstream(prefix=prefix, timeout=ONE_ANSWER_S) for _ in SEVERAL_REQUESTS]
        things = await asyncio.gather(*(Late.open(each) for each in contexts))
        calls = [call(each) for call, each in zip(SEVERAL_REQUESTS.values(), things, strict=True)]
        ends = dict(zip(SEVERAL_REQUESTS, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        timeouts = {name: end.timeout_s if isinstance(end, RequestTimeout) else end for name, end in ends.items()}
        assert timeouts == dict.fromkeys(SEVERAL_REQUESTS, ONE_ANSWER_S)


@on_both_drivers
async def test_a_listing_whose_every_page_comes_in_time_may_have_many(driver: Driver, own: NatsServer) -> None:
    names = [f"S{number:03}" for number in range(257)]  # a page has 256
    async with late_api(own) as prefix, driver.connect(own.url) as nc:
        js = nc.jetstream(timeout=60)
        for start in range(0, len(names), 32):
            some = names[start : start + 32]
            await asyncio.gather(*(js.create_stream(StreamConfig(name=each, storage="memory")) for each in some))
        late = nc.jetstream(prefix=prefix, timeout=ONE_ANSWER_S)
        began = time.monotonic()
        assert sorted([each.config.name async for each in late.streams()]) == names
        assert time.monotonic() - began >= 2 * LATE_S > ONE_ANSWER_S


# ---- nothing is left of a wait that was given up -------------------------------------------------------------------


@on_both_drivers
async def test_waits_that_time_out_leave_nothing_behind(driver: Driver, own: NatsServer) -> None:
    async with without_room(driver, own) as opened:
        nc, js = opened.nc, opened.js
        subscription = await nc.subscribe("a")
        inner = inside(nc)
        for _ in range(20):
            with pytest.raises(RequestTimeout):
                await nc.publish("a", timeout=0.001)
            with pytest.raises(RequestTimeout):
                await nc.request("a", timeout=0.001)
            with pytest.raises(RequestTimeout):
                await nc.flush(timeout=0.001)
            with pytest.raises(RequestTimeout):
                await subscription.next(timeout=0.001)
            with pytest.raises(RequestTimeout):
                await js.publish_async("s", timeout=0.001)
        assert waits_of(inner, getattr(subscription, "_target", subscription)) == 0


@on_both_drivers
async def test_acknowledgements_nobody_waits_for_any_more_leave_nothing_behind(driver: Driver, own: NatsServer) -> None:
    nc = await driver.connect(own.url)
    js = nc.jetstream()
    await js.create_stream(StreamConfig(name="S", subjects=["s"]))
    own.pause()
    try:
        future = await js.publish_async("s", b"")
        for _ in range(20):
            with pytest.raises(RequestTimeout):
                await js.publish_async_complete(timeout=0.001)
            if driver.name == "blocking":
                with pytest.raises(RequestTimeout):
                    await asyncio.to_thread(inside(future).result, timeout=0.001)
        inner = inside(nc)
        assert waits_of(inner) == 0
        if driver.name == "blocking":
            assert not inside(future)._followers
    finally:
        own.resume()
    await nc.close()


async def test_a_thousand_cancelled_waits_leave_nothing_behind(own: NatsServer) -> None:
    async with without_room(Driver("asyncio"), own) as opened:
        nc, js = opened.nc, opened.js
        subscription = await nc.subscribe("a")
        publisher = await entered(js.fast_publisher())
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: nc.publish("a"),
            lambda: nc.request("a", timeout=60),
            lambda: nc.flush(60),
            lambda: js.publish_async("s"),
            lambda: subscription.next(),
            lambda: anext(aiter(subscription)),
            lambda: opened.consumer.fetch(1, timeout=60),
            lambda: publisher.flush(60),
        ]
        await publisher.publish("s", b"")
        before = waits_of(nc, subscription)  # the publisher's own, for room
        for call in calls:
            tasks = [asyncio.ensure_future(call()) for _ in range(1000)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert waits_of(nc, subscription) == before <= 1
        assert len(publisher._runner.changed) == len(inside(opened.consumer)._source._arrivals._changed) == 0


def waits_of(client: Any, subscription: Any = None) -> int:
    """How many waits a client knows of."""
    transport, machine = client._transport, client._machine
    count = len(machine.requests) + sum(ping.handle is not None for ping in machine._pings)
    count += len(transport.room._waiters)
    for publisher in client._publishers.values():
        count += len(publisher._room._waiters) + len(publisher._all_done._waiters)
    if subscription is not None:
        count += len(subscription._changed._waiters)
    return count
