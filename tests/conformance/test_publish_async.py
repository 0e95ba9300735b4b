"""Windowed publishing: what becomes of each message is known, on a real server that may die."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import threading
from typing import Any

import pytest
from support.drivers import Awaited, Driver, Recorder, inside, on_both_drivers, until
from support.patience import PATIENCE_S

import jetspark
import jetspark.aio.publisher
import jetspark.blocking.publisher
from jetspark.errors import JetStreamUnavailable, WindowFull, WrongLastSequence
from jetspark.jetstream.info import PubAck
from jetspark.publish.window import WindowOptions
from jetspark.server import NatsServer, Permissions, User


def publisher_of(driver: Driver, nc: jetspark.Client, **options: Any) -> Any:
    if driver.name == "blocking":
        return Awaited(jetspark.blocking.publisher.WindowedPublisher(inside(nc), WindowOptions(**options)))
    return jetspark.aio.publisher.WindowedPublisher(nc, WindowOptions(**options))


async def publish_all(publisher: Any, messages: list[tuple[Any, ...]]) -> list[Any]:
    """One after the other, as fast as the driver can: for the blocking one, all in one thread."""
    if isinstance(publisher, Awaited):
        target = publisher._target
        return [Awaited(future) for future in await asyncio.to_thread(lambda: [target.publish(*m) for m in messages])]
    return [await publisher.publish(*message) for message in messages]


async def outcome(future: Any, timeout: float = 30.0) -> PubAck | Exception:
    """What the future says, in the driver's own way to ask."""
    try:
        if isinstance(future, Awaited):
            target = future._target
            ack: PubAck = target.result() if target.done() else await future.result(timeout)
        else:
            async with asyncio.timeout(timeout):
                ack = await future
        return ack
    except jetspark.JetSparkError as error:
        return error


async def outcomes(futures: list[Any]) -> list[PubAck | Exception]:
    return [await outcome(future) for future in futures]


def is_done(future: Any) -> bool:
    return bool((future._target if isinstance(future, Awaited) else future).done())


async def api(nc: jetspark.Client, operation: str, name: str, **fields: Any) -> dict[str, Any]:
    data = json.dumps({"name": name, **fields}).encode() if fields else b""
    reply = json.loads((await nc.request(f"$JS.API.STREAM.{operation}.{name}", data, timeout=10)).data)
    assert "error" not in reply, reply
    return dict(reply)


async def create_stream(nc: jetspark.Client, name: str, **fields: Any) -> None:
    """A stream of that name on the subjects ``name.>``; what an earlier driver left is removed."""
    await nc.request(f"$JS.API.STREAM.DELETE.{name}", timeout=10)
    await api(nc, "CREATE", name, **{"subjects": [f"{name}.>"], "storage": "file", "retention": "limits", **fields})


async def stored(nc: jetspark.Client, name: str) -> int:
    return int((await api(nc, "INFO", name))["state"]["messages"])


async def until_stored(nc: jetspark.Client, name: str, count: int) -> None:
    """A stream that does not acknowledge does not say when it is done either."""
    async with asyncio.timeout(60):
        while (present := await stored(nc, name)) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert present == count


@on_both_drivers
async def test_ten_thousand_are_stored_once_each_and_in_order(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "many")
        publisher = publisher_of(driver, nc, max_outstanding=500)
        futures = await publish_all(publisher, [("many.x", b"%d" % number) for number in range(10_000)])
        assert publisher.outstanding <= 500
        await publisher.complete(30)
        assert publisher.outstanding == 0
        assert all(is_done(future) for future in futures)
        assert await outcomes(futures) == [PubAck(stream="many", sequence=number) for number in range(1, 10_001)]
        assert await stored(nc, "many") == 10_000


@on_both_drivers
async def test_the_context_publishes_through_a_window_of_its_own(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "context")
        js = nc.jetstream()
        first = await js.publish_async("context.a", b"1", msg_id="one")
        again = await js.publish_async("context.a", b"1", msg_id="one")
        await js.publish_async_complete(10)
        assert await outcomes([first, again]) == [
            PubAck(stream="context", sequence=1),
            PubAck(stream="context", sequence=1, duplicate=True),
        ]


@on_both_drivers
async def test_a_future_can_be_waited_for_at_once_and_by_many(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "once")
        publisher = publisher_of(driver, nc)
        for number in range(1, 4):
            future = await publisher.publish("once.x")
            found = await asyncio.gather(*(outcome(future) for _ in range(4)))
            assert found == [PubAck(stream="once", sequence=number)] * 4


@on_both_drivers
async def test_an_error_in_the_middle_fails_its_own_future_only(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "errors")
        publisher = publisher_of(driver, nc)
        wrong = {"Nats-Expected-Last-Sequence": "77"}
        futures = [
            await publisher.publish("errors.x", b"%d" % number, wrong if number in (3, 7) else None)
            for number in range(10)
        ]
        await publisher.complete(10)
        found = await outcomes(futures)
        assert [number for number, entry in enumerate(found) if isinstance(entry, WrongLastSequence)] == [3, 7]
        assert [entry.sequence for entry in found if isinstance(entry, PubAck)] == list(range(1, 9))
        assert await stored(nc, "errors") == 8


@on_both_drivers
async def test_without_a_stream_the_future_says_that_nothing_was_stored(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "there")
        publisher = publisher_of(driver, nc)
        futures = [await publisher.publish(subject) for subject in ("there.a", "nowhere.a", "there.b")]
        first, lost, last = await outcomes(futures)
        assert isinstance(lost, JetStreamUnavailable)
        assert lost.subject == "nowhere.a"
        assert [first, last] == [PubAck(stream="there", sequence=number) for number in (1, 2)]


@on_both_drivers
async def test_a_publish_that_is_not_allowed_fails_at_once(driver: Driver) -> None:
    permissions = Permissions(publish_allow=["allowed.>", "$JS.API.>"], subscribe_allow=["_INBOX.>"])
    user = User(user="ada", password="secret", permissions=permissions)
    with NatsServer(users=[user]) as server:
        auth = jetspark.UserPassword("ada", "secret")
        async with driver.connect(server.url, auth=auth) as nc:
            await create_stream(nc, "allowed")
            publisher = publisher_of(driver, nc)
            futures = [await publisher.publish(subject) for subject in ("allowed.a", "forbidden", "allowed.b")]
            first, refused, last = await outcomes(futures)
            assert isinstance(refused, jetspark.PermissionDenied)
            assert [first, last] == [PubAck(stream="allowed", sequence=number) for number in (1, 2)]
            await nc.flush()  # the future has told


@on_both_drivers
async def test_a_full_window_waits_for_room(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc, driver.connect(url) as other:
        asked = await other.subscribe("slow")
        await other.flush()
        publisher = publisher_of(driver, nc, max_outstanding=3)
        futures = [await publisher.publish("slow", b"%d" % number) for number in range(3)]
        waiting = asyncio.create_task(publisher.publish("slow", b"3"))
        messages = [await asked.next(30) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert asked.pending_messages == 0
        await messages[0].respond(b'{"stream":"slow","seq":1}')
        futures.append(await asyncio.wait_for(waiting, 30))
        messages.append(await asked.next(30))
        assert [message.data for message in messages] == [b"0", b"1", b"2", b"3"]
        for message in messages[1:]:
            await message.respond(b'{"stream":"slow","seq":1}')
        assert await outcomes(futures) == [PubAck(stream="slow", sequence=1)] * 4


@on_both_drivers
async def test_a_full_window_raises_where_that_is_wished(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "silent", no_ack=True)
        publisher = publisher_of(driver, nc, max_outstanding=3, when_full="raise", ack_timeout=0.3)
        futures = [await publisher.publish("silent.x") for _ in range(3)]
        with pytest.raises(WindowFull, match="3 messages wait"):
            await publisher.publish("silent.x")
        await until_stored(nc, "silent", 3)
        async with asyncio.timeout(60):
            while True:  # whoever does nothing but try again gets room in time
                try:
                    last = await publisher.publish("silent.x")
                    break
                except WindowFull:
                    await asyncio.sleep(0.01)
        assert publisher.outstanding <= 3
        assert all(isinstance(entry, jetspark.RequestTimeout) for entry in await outcomes([*futures, last]))


@on_both_drivers
async def test_a_message_nobody_acknowledges_is_given_up_in_time(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "mute", no_ack=True)
        publisher = publisher_of(driver, nc, ack_timeout=0.3, max_outstanding=2)
        futures = [await publisher.publish("mute.x") for _ in range(5)]  # the later ones wait for the first to go
        with pytest.raises(jetspark.RequestTimeout):
            await publisher.complete(0.01)
        await publisher.complete(10)
        found = await outcomes(futures)
        assert all(isinstance(entry, jetspark.RequestTimeout) and entry.timeout_s == 0.3 for entry in found)


@on_both_drivers
async def test_whoever_only_looks_sees_the_timeout_too(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "looked", no_ack=True)
        future = await publisher_of(driver, nc, ack_timeout=0.2).publish("looked.x")
        assert not is_done(future)
        await until(lambda: is_done(future))
        assert isinstance(await outcome(future), jetspark.RequestTimeout)


@on_both_drivers
async def test_closing_resolves_what_is_outstanding(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "closing", no_ack=True)
        publisher = publisher_of(driver, nc, max_outstanding=3)
        futures = [await publisher.publish("closing.x") for _ in range(3)]
        waiting = asyncio.create_task(publisher.publish("closing.x"))
        await asyncio.sleep(0.05)
        complete = asyncio.create_task(publisher.complete())
        await asyncio.sleep(0.05)
        await nc.close()
        assert all(isinstance(entry, jetspark.ConnectionClosed) for entry in await outcomes(futures))
        with pytest.raises(jetspark.ConnectionClosed):
            await asyncio.wait_for(waiting, 30)
        await asyncio.wait_for(complete, 30)
        with pytest.raises(jetspark.ConnectionClosed):
            await publisher.publish("closing.x")


@on_both_drivers
async def test_draining_the_connection_resolves_what_is_outstanding(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "draining")
        publisher = publisher_of(driver, nc)
        futures = await publish_all(publisher, [("draining.x",)] * 50)
        await nc.drain()
        found = await outcomes(futures)
        assert all(isinstance(entry, PubAck | jetspark.ConnectionClosed) for entry in found)


@on_both_drivers
async def test_many_publish_at_once_through_a_small_window(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "crowd")
        publisher = publisher_of(driver, nc, max_outstanding=10)

        async def publish(who: int) -> list[PubAck | Exception]:
            return await outcomes([await publisher.publish(f"crowd.{who}", b"%d" % number) for number in range(100)])

        found = await asyncio.gather(*(publish(who) for who in range(10)))
        sequences = [[entry.sequence for entry in entries if isinstance(entry, PubAck)] for entries in found]
        assert all(mine == sorted(mine) for mine in sequences)
        assert sorted(itertools.chain(*sequences)) == list(range(1, 1001))


@on_both_drivers
async def test_a_full_send_buffer_makes_it_wait_too(driver: Driver, url: str) -> None:
    async with driver.connect(url, send_buffer_bytes=2_000) as nc:
        await create_stream(nc, "buffer")
        publisher = publisher_of(driver, nc, max_outstanding=50)
        futures = [await publisher.publish("buffer.x", b"x" * 900) for _ in range(200)]
        assert await outcomes(futures) == [PubAck(stream="buffer", sequence=number) for number in range(1, 201)]


# ---- the options of a context ----------------------------------------------------------------------------------


@on_both_drivers
async def test_a_context_has_the_window_it_asks_for(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "options", no_ack=True)
        js = nc.jetstream(max_outstanding=3, when_full="raise", ack_timeout=0.3)
        futures = [await js.publish_async("options.x") for _ in range(3)]
        with pytest.raises(WindowFull, match="3 messages wait"):
            await js.publish_async("options.x")
        await js.publish_async_complete(10)
        found = await outcomes(futures)
        assert all(isinstance(entry, jetspark.RequestTimeout) and entry.timeout_s == 0.3 for entry in found)
        await until_stored(nc, "options", 3)


@on_both_drivers
async def test_contexts_share_a_window_only_if_they_ask_for_the_same(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "kept")
        await create_stream(nc, "unheard", no_ack=True)
        narrow: dict[str, Any] = {"max_outstanding": 2, "when_full": "raise", "ack_timeout": 0.5}
        futures = [await nc.jetstream(**narrow).publish_async("unheard.x") for _ in range(2)]
        with pytest.raises(WindowFull):
            await nc.jetstream(timeout=9, **narrow).publish_async("kept.x")
        for others in ({}, {"max_outstanding": 2}, narrow | {"ack_timeout": 9.0}, narrow | {"max_outstanding": 3}):
            js = nc.jetstream(**others)
            acked = await js.publish_async("kept.x")
            await js.publish_async_complete(10)  # of its own messages; the silent ones still wait
            assert is_done(acked)
        assert isinstance(await outcome(futures[0]), jetspark.RequestTimeout)
        assert isinstance(await outcome(futures[1]), jetspark.RequestTimeout)


@on_both_drivers
async def test_closing_waits_for_the_acknowledgements_of_every_window(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "windows")
        contexts = [nc.jetstream(), nc.jetstream(max_outstanding=7), nc.jetstream(when_full="raise")]
        futures = [await js.publish_async("windows.x") for _ in range(20) for js in contexts]
        await nc.close()
        assert len({entry.sequence for entry in await outcomes(futures) if isinstance(entry, PubAck)}) == 60


@on_both_drivers
async def test_options_that_make_no_sense_are_refused_at_once(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        for wrong in ({"max_outstanding": 0}, {"ack_timeout": 0}, {"when_full": "drop"}):
            with pytest.raises(jetspark.ConfigError, match=next(iter(wrong))):
                nc.jetstream(**wrong)


# ---- callbacks -------------------------------------------------------------------------------------------------


def add_callback(future: Any, callback: Any) -> Any:
    """Returns what the callback will be given."""
    target = future._target if isinstance(future, Awaited) else future
    target.add_done_callback(callback)
    return target


@on_both_drivers
async def test_callbacks_are_called_once_and_in_order(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc, driver.connect(url) as other:
        asked = await other.subscribe("calls")
        await other.flush()
        publisher = publisher_of(driver, nc)
        called: list[Any] = []
        future = await publisher.publish("calls")
        given = add_callback(future, lambda done: called.append(("first", done)))
        add_callback(future, lambda done: called.append(("second", done)))
        message = await asked.next(30)
        assert called == []
        await message.respond(b'{"stream":"calls","seq":1}')
        await until(lambda: len(called) == 2)
        add_callback(future, lambda done: called.append(("late", done)))
        await until(lambda: len(called) == 3)
        await message.respond(b'{"stream":"calls","seq":1}')
        await nc.flush()
        assert called == [("first", given), ("second", given), ("late", given)]
        assert await outcome(future) == PubAck(stream="calls", sequence=1)


@on_both_drivers
async def test_a_callback_hears_of_a_timeout_though_nobody_waits(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "unasked", no_ack=True)
        publisher = publisher_of(driver, nc, ack_timeout=0.2)
        found: list[Any] = []
        threads: set[str] = set()

        def on_done(done: Any) -> None:
            threads.add(threading.current_thread().name)
            found.append(done.exception())

        for count in (1, 2):  # and again, when the first is over
            add_callback(await publisher.publish("unasked.x"), on_done)
            async with asyncio.timeout(60):
                while len(found) < count:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert [type(error) for error in found] == [jetspark.RequestTimeout] * 2
        if driver.name == "blocking":
            assert threads == {"jetspark-connection"}


@on_both_drivers
async def test_a_callback_hears_that_the_connection_was_closed(driver: Driver, url: str) -> None:
    found: list[Any] = []
    async with driver.connect(url) as nc:
        await create_stream(nc, "unsaid", no_ack=True)
        add_callback(await publisher_of(driver, nc).publish("unsaid.x"), lambda done: found.append(done.exception()))
    await until(lambda: bool(found))
    assert isinstance(found[0], jetspark.ConnectionClosed)


@pytest.mark.parametrize("driver", ["blocking"], indirect=True)
@on_both_drivers
async def test_a_done_future_calls_back_at_once_and_what_it_raises_is_logged(
    driver: Driver, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(done: Any) -> None:
        raise RuntimeError("callback")

    async with driver.connect(url) as nc:
        await create_stream(nc, "raising")
        publisher = publisher_of(driver, nc)
        called: list[Any] = []
        future = await publisher.publish("raising.x")
        add_callback(future, fail)
        add_callback(future, called.append)
        assert isinstance(await outcome(future), PubAck)
        await until(lambda: len(called) == 1)
        add_callback(future, fail)
        add_callback(future, called.append)
        assert called == [future._target] * 2
        assert isinstance(await outcome(await publisher.publish("raising.x")), PubAck)  # the reader is alive
    logged = [record for record in caplog.records if record.exc_info and "callback" in str(record.exc_info[1])]
    assert [(record.name, record.levelno) for record in logged] == [("jetspark.blocking", logging.ERROR)] * 2


@pytest.mark.parametrize("driver", ["blocking"], indirect=True)
@on_both_drivers
async def test_a_callback_may_wait_for_a_thread_that_publishes(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "locks")
        publisher = publisher_of(driver, nc)
        ended: list[bool] = []

        def publish_elsewhere(_: Any) -> None:
            thread = threading.Thread(target=publisher._target.publish, args=("locks.x",))
            thread.start()
            thread.join(PATIENCE_S)
            ended.append(not thread.is_alive())

        add_callback(await publisher.publish("locks.x"), publish_elsewhere)
        await until(lambda: bool(ended))
        assert ended == [True]
        await publisher.complete(10)
        assert await stored(nc, "locks") == 2


# ---- failures nobody looks at ----------------------------------------------------------------------------------


@on_both_drivers
async def test_failures_nobody_looks_at_are_logged_and_not_one_by_one(
    driver: Driver, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with driver.connect(url) as nc:
        publisher = publisher_of(driver, nc)
        with caplog.at_level(logging.ERROR):
            for _ in range(100):
                await publisher.publish("nowhere.x")
            await publisher.complete(10)
            gc.collect()
    logged = [record for record in caplog.records if "'nowhere.x'" in record.getMessage()]
    assert {record.name for record in logged} == {"jetspark.blocking" if driver.name == "blocking" else "jetspark.aio"}
    assert len(logged) == 7  # at 1, 2, 4 ... 64
    assert "no answer on 'nowhere.x'" in logged[0].getMessage()


@on_both_drivers
async def test_failures_that_were_looked_at_are_not_logged(
    driver: Driver, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with driver.connect(url) as nc:
        publisher = publisher_of(driver, nc)
        with caplog.at_level(logging.ERROR):
            future = await publisher.publish("nowhere.x")
            assert isinstance(await outcome(future), JetStreamUnavailable)
            del future
            gc.collect()
    assert [record for record in caplog.records if "'nowhere.x'" in record.getMessage()] == []


# ---- cancelling ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["asyncio", "uvloop"], indirect=True)  # a thread that waits cannot be cancelled
@on_both_drivers
async def test_a_publish_cancelled_while_it_waits_for_room_is_not_sent(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await create_stream(nc, "cancel", no_ack=True)
        publisher = publisher_of(driver, nc, max_outstanding=2, ack_timeout=0.3)
        for _ in range(2):
            (await publisher.publish("cancel.x")).cancel()  # takes nothing back
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(publisher.publish("cancel.x"), 0.05)
        assert publisher.outstanding == 2
        await publisher.complete(10)  # a cancelled future's place is free when its message is given up
        last = await publisher.publish("cancel.x")
        await until_stored(nc, "cancel", 3)  # all that was sent before the last is there
        last.cancel()


# ---- sessions that end -----------------------------------------------------------------------------------------


@on_both_drivers
async def test_after_a_crash_every_message_is_acknowledged_or_in_doubt(driver: Driver, own: NatsServer) -> None:
    events = Recorder()
    async with driver.connect(own.url, on_event=events) as nc:
        await create_stream(nc, "crash")
        publisher = publisher_of(driver, nc)

        async def publish(numbers: range) -> list[Any]:
            return await publish_all(
                publisher, [("crash.x", b"%d" % number, {"Nats-Msg-Id": str(number)}) for number in numbers]
            )

        before = await publish(range(300))
        await publisher.complete(10)
        await nc.flush()  # an ack settles its future; what the connection has in doubt is settled by a PONG
        await asyncio.to_thread(own.pause)
        doubtful = await publish(range(300, 600))
        await until(lambda: nc.buffered_bytes == 0)
        await asyncio.to_thread(own.kill)
        await events.wait_for(jetspark.Disconnected)
        await until(lambda: all(is_done(future) for future in doubtful))
        while_down = await publish(range(600, 900))
        assert publisher.outstanding == 300
        await asyncio.to_thread(own.start)
        await publisher.complete(20)

        assert all(isinstance(entry, PubAck) for entry in await outcomes(before))
        lost = await outcomes(doubtful)
        assert all(isinstance(entry, jetspark.ConnectionLost) and entry.unconfirmed_messages == 300 for entry in lost)
        assert all(isinstance(entry, PubAck) for entry in await outcomes(while_down))
        assert 600 <= await stored(nc, "crash") <= 900

        again = await outcomes(await publish(range(300, 600)))
        assert all(isinstance(entry, PubAck) for entry in again)
        assert await stored(nc, "crash") == 900


@on_both_drivers
async def test_a_crash_under_load_leaves_no_future_open_and_stores_nothing_twice(
    driver: Driver, own: NatsServer
) -> None:
    total = 6_000
    events = Recorder()
    async with driver.connect(own.url, on_event=events) as nc:
        await create_stream(nc, "load")
        publisher = publisher_of(driver, nc, max_outstanding=1_000)

        async def crash() -> None:
            await asyncio.to_thread(own.kill)
            await events.wait_for(jetspark.Disconnected)
            await asyncio.to_thread(own.start)

        messages = [("load.x", b"x" * 200, {"Nats-Msg-Id": str(number)}) for number in range(total)]
        futures = await publish_all(publisher, messages[: total // 3])
        _, rest = await asyncio.gather(crash(), publish_all(publisher, messages[total // 3 :]))
        futures += rest
        await publisher.complete(20)
        found = await outcomes(futures)
        acked = [entry for entry in found if isinstance(entry, PubAck)]
        unknown = [number for number, entry in enumerate(found) if isinstance(entry, jetspark.ConnectionLost)]
        # After a start the server may take a moment until the stream listens; it says so, and stores nothing.
        refused = [number for number, entry in enumerate(found) if isinstance(entry, JetStreamUnavailable)]
        assert len(acked) + len(unknown) + len(refused) == total
        assert not any(entry.duplicate for entry in acked)
        assert len({entry.sequence for entry in acked}) == len(acked)
        assert len(acked) <= await stored(nc, "load") <= len(acked) + len(unknown)

        again = await publish_all(publisher, [messages[number] for number in (*unknown, *refused)])
        assert all(isinstance(entry, PubAck) for entry in await outcomes(again))
        assert await stored(nc, "load") == total
