"""Ordered consumers: nothing skipped, repeated or out of order, whatever happens underneath."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.drivers import Driver, on_both_drivers
from support.patience import PATIENCE_S
from support.peers import Proxy

import jetspark
from jetspark import ConsumerConfig, KVConfig, StreamConfig
from jetspark.server import NatsServer, Permissions, User


async def _take(messages: AsyncIterator[jetspark.JetStreamMessage], count: int) -> list[int]:
    """The numbers in the next ``count`` messages."""
    numbers: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        async for message in messages:
            numbers.append(int(message.data))
            if len(numbers) == count:
                break
    return numbers


async def _fill(js: jetspark.JetStream, first: int, count: int, subject: str = "ordered.n") -> None:
    for number in range(first, first + count):
        await js.publish(subject, b"%d" % number)


@on_both_drivers
async def test_everything_comes_in_order_and_then_what_is_new(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        await _fill(js, 0, 200)
        reading = asyncio.ensure_future(_take(stream.ordered_consumer().messages(), 250))
        await _fill(js, 200, 50)
        assert await reading == list(range(250))


@on_both_drivers
async def test_what_is_stored_is_read_and_no_more(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))

        async def numbers(*subjects: str, **options: Any) -> list[tuple[int, bytes]]:
            messages = stream.ordered_consumer(*subjects, **options).messages(stored_only=True)
            async with asyncio.timeout(PATIENCE_S):
                return [(each.metadata.stream_sequence, each.data) async for each in messages]

        assert await numbers() == []
        await _fill(js, 0, 600, "ordered.a")
        await _fill(js, 600, 2, "ordered.b")
        assert await numbers() == [(number + 1, b"%d" % number) for number in range(602)]
        assert await numbers("ordered.a", start_sequence=599) == [(599, b"598"), (600, b"599")]
        assert await numbers("ordered.b", headers_only=True) == [(601, b""), (602, b"")]
        assert await numbers("ordered.c") == []
        assert await numbers(deliver_policy="last_per_subject") == [(600, b"599"), (602, b"601")]
        assert not [name async for name in stream.consumer_names()]


@on_both_drivers
async def test_it_begins_where_it_is_told_to(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        await _fill(js, 0, 10, "ordered.a")
        middle = datetime.datetime.now(datetime.UTC)
        await asyncio.sleep(0.01)
        await _fill(js, 10, 10, "ordered.b")
        for consumer, expected in (
            (stream.ordered_consumer(start_sequence=6), list(range(5, 20))),
            (stream.ordered_consumer(start_time=middle), list(range(10, 20))),
            (stream.ordered_consumer("ordered.b"), list(range(10, 20))),
            (stream.ordered_consumer("ordered.a", "ordered.b", start_sequence=9), list(range(8, 20))),
            (stream.ordered_consumer(deliver_policy="last"), [19]),
            (stream.ordered_consumer(deliver_policy="last_per_subject"), [9, 19]),
        ):
            assert await _take(consumer.messages(), len(expected)) == expected
        with pytest.raises(jetspark.ConfigError, match="start_sequence with deliver_policy: expected one of them"):
            stream.ordered_consumer(start_sequence=1, deliver_policy="new")
        await stream.delete()
        with pytest.raises(jetspark.StreamNotFound):
            await _take(stream.ordered_consumer().messages(), 1)


@on_both_drivers
async def test_what_is_left_behind_is_cleaned_up(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        await _fill(js, 0, 5)
        messages = stream.ordered_consumer().messages()
        await _take(messages, 3)
        await messages.aclose()  # type: ignore[attr-defined]
        assert (await stream.info()).state.consumers == 0


@on_both_drivers
async def test_cuts_and_restarts_are_not_seen(driver: Driver, own: NatsServer) -> None:
    async with Proxy(own.port) as proxy, driver.connect(own.url) as publisher:
        js = publisher.jetstream(timeout=10)
        await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        async with driver.connect(proxy.url, ignore_discovered_servers=True, reconnect_wait_s=0.01) as nc:
            stream = await nc.jetstream().stream("O")
            received: list[int] = []

            async def read() -> None:
                async for message in stream.ordered_consumer().messages():
                    received.append(int(message.data))
                    if len(received) == 600:
                        return

            reading = asyncio.ensure_future(read())
            for cut in range(4):
                await _fill(js, 100 * cut, 100)
                proxy.cut()
            await asyncio.to_thread(own.restart)
            await publisher.flush(timeout=20)
            await _fill(js, 400, 200)
            async with asyncio.timeout(PATIENCE_S):
                await reading
            assert received == list(range(600))


async def _count_consumers(nc: jetspark.Client, created: list[str]) -> None:
    """Note every consumer that is created from now on."""
    await nc.subscribe(
        "$JS.EVENT.ADVISORY.CONSUMER.CREATED.>", callback=lambda message: created.append(message.subject)
    )
    await nc.flush()


@on_both_drivers
@pytest.mark.parametrize("bound", [{"max_pending_messages": 20}, {"max_pending_bytes": 2000}])
async def test_one_consumer_is_enough_however_slow_the_reader(driver: Driver, url: str, bound: dict[str, Any]) -> None:
    """It asks for what it has room for, so nothing is dropped, and there is nothing to go back for."""
    reported: list[object] = []
    created: list[str] = []
    async with (
        driver.connect(url, on_event=reported.append, **bound) as nc,
        driver.connect(url) as other,
    ):
        js = other.jetstream()
        await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        await _fill(js, 0, 300)
        await _count_consumers(other, created)
        stream = await nc.jetstream().stream("O")
        assert await _take(stream.ordered_consumer().messages(), 300) == list(range(300))
        await other.flush()
    assert len(created) == 1
    assert not [each for each in reported if isinstance(each, jetspark.SlowConsumer)]


@on_both_drivers
async def test_a_message_larger_than_the_bound_comes_all_the_same(driver: Driver, url: str) -> None:
    async with driver.connect(url, max_pending_bytes=1000) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        sizes = [10, 5000, 10, 10, 900, 5000, 5000, 400, 400, 10]
        for size in sizes:
            await js.publish("ordered.n", b"%0*d" % (size, 1))
        received = []
        async with asyncio.timeout(PATIENCE_S):
            async for message in stream.ordered_consumer().messages():
                received.append(len(message.data))
                if len(received) == len(sizes):
                    break
        assert received == sizes


class _Losing(Proxy):
    """Loses one message on its way to the client: the frame with this payload, once."""

    payload: bytes | None = None

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_to_client: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                end = -1 if self.payload is None or not is_to_client else data.find(b"\r\n%b\r\n" % self.payload)
                if end >= 0 and self.payload is not None:
                    data = data[: data.rindex(b"MSG ", 0, end)] + data[end + len(self.payload) + 4 :]
                    self.payload = None
                writer.write(data)
                await writer.drain()


@on_both_drivers
@pytest.mark.parametrize("lost", [4, pytest.param(9, marks=pytest.mark.slow)])  # the last is missed by its heartbeat
async def test_a_message_lost_on_the_way_is_fetched_again(driver: Driver, own: NatsServer, lost: int) -> None:
    async with _Losing(own.port) as proxy, driver.connect(own.url) as other:
        js = other.jetstream()
        await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        async with driver.connect(proxy.url, ignore_discovered_servers=True) as nc:
            stream = await nc.jetstream().stream("O")
            reading = asyncio.ensure_future(_take(stream.ordered_consumer().messages(), 10))
            proxy.payload = b"%d" % lost
            await _fill(js, 0, 10)
            assert await reading == list(range(10))
            assert proxy.payload is None


@on_both_drivers
async def test_a_deleted_consumer_is_replaced_at_once(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        messages = stream.ordered_consumer().messages()
        for first in range(0, 30, 10):
            await _fill(js, first, 10)
            assert [int((await anext(messages)).data) for _ in range(10)] == list(range(first, first + 10))
            names = [name async for name in stream.consumer_names()]
            assert len(names) == 1
            await stream.delete_consumer(names[0])
        await messages.aclose()  # type: ignore[attr-defined]


@on_both_drivers
async def test_a_request_waits_at_the_server_whenever_the_reader_does(driver: Driver, url: str) -> None:
    """So that a single change is delivered when it is made. With time-outs shorter than the silence between them."""
    async with driver.connect(url) as nc:
        js = nc.jetstream(timeout=0.5)
        stream = await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        messages = stream.ordered_consumer().messages()
        for number in range(3):
            coming = asyncio.ensure_future(_take(messages, 1))
            await asyncio.sleep(0.7 if not number else 0.05)
            async with asyncio.timeout(PATIENCE_S):
                while not [info async for info in stream.consumers() if info.waiting_pulls]:
                    pass
            await _fill(js, number, 1)
            assert await coming == [number]
        await messages.aclose()  # type: ignore[attr-defined]


# What a user needs who reads a stream in order, and one subject of it at that. docs/consumers.md says the same.
RIGHTS = (
    "$JS.API.STREAM.INFO.O",
    "$JS.API.CONSUMER.CREATE.O.*.ordered.mine",
    "$JS.API.CONSUMER.MSG.NEXT.O.*",
    "$JS.API.CONSUMER.DELETE.O.*",
)


@on_both_drivers
async def test_rights_can_be_limited_to_a_filter(driver: Driver) -> None:
    reader = Permissions(publish_allow=RIGHTS, subscribe_allow=["_INBOX.>"])
    mute = Permissions(publish_allow=[*RIGHTS[:2], RIGHTS[3]], subscribe_allow=["_INBOX.>"])
    users = [
        User(user="admin", password="secret"),
        User(user="reader", password="secret", permissions=reader),
        User(user="mute", password="secret", permissions=mute),
    ]
    with NatsServer(users=users) as server:
        async with driver.connect(server.url, auth=jetspark.UserPassword("admin", "secret")) as nc:
            js = nc.jetstream()
            stream = await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
            await _fill(js, 0, 5, "ordered.theirs")
            await _fill(js, 5, 5, "ordered.mine")
            async with driver.connect(server.url, auth=jetspark.UserPassword("reader", "secret")) as limited:
                mine = await limited.jetstream().stream("O")
                messages = mine.ordered_consumer("ordered.mine").messages()
                assert await _take(messages, 5) == list(range(5, 10))
                await messages.aclose()  # type: ignore[attr-defined]
                with pytest.raises(jetspark.PermissionDenied, match=r"CONSUMER\.CREATE\.O"):
                    await _take(mine.ordered_consumer().messages(), 1)
            async with driver.connect(server.url, auth=jetspark.UserPassword("mute", "secret")) as limited:
                mine = await limited.jetstream().stream("O")
                with pytest.raises(jetspark.PermissionDenied, match=r"CONSUMER\.MSG\.NEXT\.O"):
                    await _take(mine.ordered_consumer("ordered.mine").messages(), 1)
            assert (await stream.info()).state.consumers == 0


@on_both_drivers
async def test_closing_the_connection_ends_the_iteration(driver: Driver, url: str) -> None:
    nc = await driver.connect(url)
    js = nc.jetstream()
    stream = await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
    await _fill(js, 0, 3)
    received: list[int] = []

    async def read() -> None:
        async for message in stream.ordered_consumer().messages():
            received.append(int(message.data))  # noqa: PERF401 - seen from outside while it grows

    reading = asyncio.ensure_future(read())
    async with asyncio.timeout(PATIENCE_S):
        while len(received) < 3:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    await nc.close()
    async with asyncio.timeout(PATIENCE_S):
        await reading


# ---- a stream that is another, or none -----------------------------------------------------------------------------


async def _delete(js: jetspark.JetStream, stream: str) -> None:
    """And give the server a moment: what is created at once may get the old one's messages."""
    await js.delete_stream(stream)
    await asyncio.sleep(0.2)


async def _readers(js: jetspark.JetStream) -> dict[str, AsyncIterator[Any]]:
    """Everything that reads on without end, each of a stream of its own with some content."""
    stream = await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
    await _fill(js, 0, 20)
    kv = await js.create_kv(KVConfig(bucket="b"))
    await kv.put("k", b"1")
    store = await js.create_object_store("s")
    await store.put("o", b"1")
    return {
        "O": stream.ordered_consumer().messages(),
        "KV_b": kv.watch(),
        "OBJ_s": store.watch(),
    }


@on_both_drivers
@pytest.mark.parametrize("is_made_again", [True, False])
async def test_a_reader_whose_stream_was_deleted_says_so(driver: Driver, own: NatsServer, is_made_again: bool) -> None:
    """Asked to go on after its last sequence, the new stream would be silent until it has as many messages."""
    options: dict[str, Any] = {"ignore_discovered_servers": True, "reconnect_wait_s": 0.01}
    async with (
        Proxy(own.port) as proxy,
        driver.connect(own.url) as other,
        driver.connect(proxy.url, **options) as nc,
        asyncio.timeout(PATIENCE_S),
    ):
        readers = await _readers(nc.jetstream())
        for name, reader in readers.items():
            for _ in range(20 if name == "O" else 1):
                await anext(reader)
        js = other.jetstream()
        for name in readers:
            await _delete(js, name)
        if is_made_again:
            await _readers(js)
        proxy.cut()  # a heartbeat that does not come would have the same effect, later
        for name, reader in readers.items():
            with pytest.raises(jetspark.StreamRecreated if is_made_again else jetspark.StreamNotFound) as caught:
                await anext(reader)
            if is_made_again:
                assert f"stream {name!r} was deleted and re-created" in str(caught.value)
                assert name != "O" or "the last sequence read is 20" in str(caught.value)


@pytest.mark.slow
@on_both_drivers
async def test_silence_alone_shows_that_the_stream_is_another(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        readers = await _readers(js)
        for reader in readers.values():
            await anext(reader)
        for name in readers:
            await _delete(js, name)
        await _readers(js)

        async def read_on(reader: AsyncIterator[Any]) -> None:
            async for _ in reader:
                pass

        async with asyncio.timeout(60):
            ends = await asyncio.gather(*map(read_on, readers.values()), return_exceptions=True)
        assert [type(end) for end in ends] == [jetspark.StreamRecreated] * 3


@on_both_drivers
async def test_a_purged_stream_is_still_the_same(driver: Driver, own: NatsServer) -> None:
    """It keeps its sequences, so a reader goes on behind what was purged."""
    async with Proxy(own.port) as proxy, driver.connect(own.url) as other:
        js = other.jetstream()
        await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        await _fill(js, 0, 20)
        async with driver.connect(proxy.url, ignore_discovered_servers=True, reconnect_wait_s=0.01) as nc:
            messages = (await nc.jetstream().stream("O")).ordered_consumer().messages()
            async with asyncio.timeout(PATIENCE_S):
                assert int((await anext(messages)).data) == 0
                await (await js.stream("O")).purge()
                proxy.cut()
                await _fill(js, 20, 5)
                while (number := int((await anext(messages)).data)) < 20:
                    pass  # what was on its way when the stream was purged
                assert [number] + [int((await anext(messages)).data) for _ in range(4)] == list(range(20, 25))


@on_both_drivers
async def test_pull_and_push_readers_hear_that_their_stream_was_deleted(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="O", subjects=["ordered.>"]))
        pull = await stream.create_consumer(ConsumerConfig(durable_name="pull"))
        push = await stream.create_consumer(
            ConsumerConfig(durable_name="push", deliver_subject="to.us", idle_heartbeat_s=0.2)
        )
        await _fill(js, 0, 1)
        pulled, pushed = aiter(pull.messages()), aiter(push.pushed_messages())
        async with asyncio.timeout(PATIENCE_S):
            for reader in (pulled, pushed):
                await (await anext(reader)).ack()
            await _delete(js, "O")
            with pytest.raises(jetspark.ConsumerNotFound):
                await anext(pulled)
            with pytest.raises((jetspark.ConsumerNotFound, jetspark.StreamNotFound)):
                await anext(pushed)
