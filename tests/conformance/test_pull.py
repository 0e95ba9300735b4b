"""Pulling from a real server: every message that should come does, in time, once unless it says otherwise."""

from __future__ import annotations

import asyncio
import datetime
import json
import random
import time
from typing import Any

import pytest
from support.distance import at_a_distance
from support.drivers import Driver, Recorder, on_both_drivers, until
from support.patience import PATIENCE_S

import jetspark
from jetspark import ConsumerConfig, StreamConfig
from jetspark.jetstream import pull
from jetspark.jetstream.acks import IN_PROGRESS
from jetspark.server import NatsCluster, NatsServer

_names = iter(range(1_000_000))
# How far away the server seems. More than the tenth of a fetch's time by which its request ends before it: so the last
# word on a request, and what it brings in its last moments, regularly come when its fetch is over.
FAR_S = 0.005


async def stream_of(nc: jetspark.Client, count: int = 0, data: bytes = b"%d", **config: Any) -> Any:
    """A stream of its own with ``count`` messages, numbered from 0."""
    name = f"S{next(_names)}"
    config.setdefault("storage", "memory")
    stream = await nc.jetstream().create_stream(StreamConfig(name=name, subjects=[f"{name}.>"], **config))
    for number in range(count):
        await nc.publish(f"{name}.x", data % number if b"%d" in data else data)
    await nc.flush(timeout=20)
    await until_stored(stream, count)
    return stream


async def until_stored(stream: Any, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await stream.info()).state.messages < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def consumer_of(stream: Any, **config: Any) -> Any:
    config.setdefault("ack_policy", "explicit")
    return await stream.create_consumer(ConsumerConfig(durable_name="c", **config))


async def all_acked(consumer: jetspark.Consumer) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await consumer.info()).ack_pending:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def read(messages: Any, found: list[int] | None = None) -> None:
    """Everything, until an error ends it."""
    async for message in messages:
        if found is not None:
            found.append(int(message.data))


def numbers(messages: list[Any]) -> list[int]:
    return [int(message.data) for message in messages]


# ---- fetch ---------------------------------------------------------------------------------------------------------


@on_both_drivers
async def test_fetch_returns_as_soon_as_it_has_enough(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 25))
        started = time.monotonic()
        assert numbers(await consumer.fetch(10, timeout=20)) == list(range(10))
        assert numbers(await consumer.fetch(timeout=20)) == [10]
        assert (await consumer.next(timeout=20)).data == b"11"
        assert time.monotonic() - started < 20


@on_both_drivers
async def test_fetch_returns_what_there_is_at_once(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 3))
        started = time.monotonic()
        assert numbers(await consumer.fetch(10, timeout=PATIENCE_S)) == [0, 1, 2]
        assert time.monotonic() - started < PATIENCE_S / 2
        assert await consumer.fetch(10, timeout=0.1) == []
        assert await consumer.next(timeout=0.1) is None
        assert (await consumer.info()).waiting_pulls == 0  # nothing was left at the server


@on_both_drivers
async def test_fetch_with_nothing_there_returns_with_the_first_that_comes(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc)
        consumer = await consumer_of(stream)
        started = time.monotonic()
        fetching = asyncio.ensure_future(consumer.fetch(10, timeout=PATIENCE_S))
        while not (await consumer.info()).waiting_pulls:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await nc.jetstream().publish(stream.cached_info.config.subjects[0].replace(">", "x"), b"7")
        assert numbers(await fetching) == [7]
        assert time.monotonic() - started < PATIENCE_S / 2
        assert (await consumer.info()).waiting_pulls == 0


@on_both_drivers
async def test_fetch_returns_when_the_server_may_send_no_more_without_an_ack(
    driver: Driver, server: NatsServer
) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 5), max_ack_pending=2)
        started = time.monotonic()
        assert numbers(await consumer.fetch(10, timeout=PATIENCE_S)) == [0, 1]
        assert time.monotonic() - started < PATIENCE_S / 2


@pytest.mark.parametrize("distance_s", [0, FAR_S])
@on_both_drivers
async def test_fetch_holds_back_no_message_where_others_are_not_acknowledged(
    driver: Driver, server: NatsServer, monkeypatch: pytest.MonkeyPatch, distance_s: float
) -> None:
    # The server ends a request that it has left open with the next heartbeat: not before the test is over.
    monkeypatch.setattr(pull, "HEARTBEAT_S", PATIENCE_S)
    async with at_a_distance(server, distance_s) as url, driver.connect(url) as nc:
        consumer = await consumer_of(await stream_of(nc, 10), max_ack_pending=5, ack_wait_s=2 * PATIENCE_S)
        unacknowledged = await consumer.fetch(3, timeout=PATIENCE_S)
        started = time.monotonic()
        more = await consumer.fetch(5, timeout=PATIENCE_S)
        assert time.monotonic() - started < PATIENCE_S / 10
        assert numbers(more) == [3, 4]
        assert (await consumer.info()).waiting_pulls == 0  # nothing was left at the server
        for message in (*unacknowledged, *more):
            await message.ack_sync()
        rest = await consumer.fetch(5, timeout=PATIENCE_S)
        assert [(int(message.data), message.metadata.delivered) for message in rest] == [(n, 1) for n in range(5, 10)]


@on_both_drivers
async def test_a_filling_fetch_returns_what_there_is_when_its_time_is_over(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 3))
        started = time.monotonic()
        assert numbers(await consumer.fetch(10, timeout=1, fill=True)) == [0, 1, 2]
        assert time.monotonic() - started > 0.9
        assert (await consumer.info()).waiting_pulls == 0  # nothing was left at the server
        assert await consumer.fetch(10, timeout=0.1) == []
        assert await consumer.next(timeout=0.1) is None
        assert (await consumer.info()).waiting_pulls == 0  # nothing was left at the server


@on_both_drivers
async def test_no_wait_takes_only_what_is_there(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 3))
        started = time.monotonic()
        assert numbers(await consumer.fetch(10, timeout=20, no_wait=True)) == [0, 1, 2]
        assert await consumer.fetch(10, timeout=20, no_wait=True) == []
        assert time.monotonic() - started < 20


@on_both_drivers
async def test_no_wait_ends_though_the_server_says_nothing(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 5), max_ack_pending=2)
        [first, second] = await consumer.fetch(2)
        assert await consumer.fetch(1, timeout=PATIENCE_S, no_wait=True) == []
        assert (await consumer.info()).waiting_pulls == 0  # nothing was left at the server
        await first.ack()
        await second.ack()
        # The server may handle a pull between the two acknowledgements.
        assert numbers(await consumer.fetch(2, timeout=30, fill=True)) == [2, 3]


@on_both_drivers
async def test_max_bytes_bounds_a_fetch(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 20, b"x" * 1000))
        started = time.monotonic()
        assert len(await consumer.fetch(20, timeout=20, max_bytes=5000)) == 4
        assert len(await consumer.fetch(2, timeout=20, max_bytes=5000)) == 2
        with pytest.raises(jetspark.ConfigError, match="max_bytes=100"):
            await consumer.fetch(20, timeout=20, max_bytes=100)
        assert len(await consumer.fetch(14, timeout=20)) == 14  # the failure left nothing behind
        assert time.monotonic() - started < 20


@on_both_drivers
async def test_fetches_at_the_same_time_share_the_messages(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 100))
        batches = await asyncio.gather(*(consumer.fetch(10, timeout=10) for _ in range(10)))
        assert [len(batch) for batch in batches] == [10] * 10
        assert sorted(number for batch in batches for number in numbers(batch)) == list(range(100))


@on_both_drivers
async def test_what_comes_too_late_for_a_fetch_is_there_for_the_next(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc)
        consumer = await consumer_of(stream)
        for number in range(30):
            # It is published just when the fetch ends.
            publishing = asyncio.ensure_future(_publish_later(nc, stream.name, number, 0.02 + number / 1000))
            found = await consumer.fetch(1, timeout=0.04)
            await publishing
            found = found or await consumer.fetch(1, timeout=30)
            assert numbers(found) == [number]
            assert found[0].metadata.delivered == 1
            await found[0].ack()


async def _publish_later(nc: jetspark.Client, name: str, number: int, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    await nc.publish(f"{name}.x", b"%d" % number)
    await nc.flush()


# A fetch that waits for nothing would do so until its request is given up, GRACE_S after its time: for some hundred
# trips near the server, ninety far from it. One that does its work needs two or three.
MAX_TRIPS = 40


async def poll_with_short_timeouts(
    driver: Driver, server: NatsServer, rounds: int, distance_s: float, at_a_time: int, seed: int = 2
) -> None:
    """Messages at random moments, fetched in a loop whose timeouts are of the same order.

    Nothing here depends on how fast the machine is. The publisher's acknowledgement is the witness that a message is
    there to be fetched; from then on, two things must be true of every single one. The next fetch to begin brings it,
    if the one under way does not: so that one has time enough, and none would be delivered again meanwhile. And while
    it is on its way, the server answers only a few questions on the fetch's own connection: a machine that holds up
    the one holds up the others too.
    """
    chance = random.Random(seed)
    stored = 0
    received: list[int] = []
    trips: list[int] = []
    async with (
        at_a_distance(server, distance_s) as url,
        driver.connect(url) as nc,
        driver.connect(server.url) as other,
    ):
        stream = await stream_of(nc)
        consumer = await consumer_of(stream, ack_wait_s=60.0)
        js = other.jetstream(timeout=20)

        async def publish_all() -> None:
            nonlocal stored
            for number in range(rounds):
                await asyncio.sleep(chance.uniform(0, 0.03))
                await js.publish(f"{stream.name}.x", b"%d" % number)
                stored += 1
                trips.append(0)
                while len(received) < stored:
                    trips[-1] += 1
                    assert trips[-1] <= MAX_TRIPS, f"message {number} is kept waiting"
                    await consumer.info()
                    await asyncio.sleep(FAR_S)

        publishing = asyncio.ensure_future(publish_all())
        try:
            while len(received) < rounds and not publishing.done():
                is_there = stored > len(received)
                found = await consumer.fetch(at_a_time, timeout=20 if is_there else chance.uniform(0.01, 0.04))
                assert found or not is_there, f"a fetch missed message {len(received)}"
                for message in found:
                    assert message.metadata.delivered == 1
                    received.append(int(message.data))
                    await message.ack()
                if chance.random() < 0.5:  # as if it had something else to do, while the rest of an answer comes in
                    await asyncio.sleep(chance.uniform(0, 2 * FAR_S))
            await publishing
        finally:
            publishing.cancel()
        assert received == list(range(rounds))


@pytest.mark.parametrize("at_a_time", [1, 5])
@pytest.mark.parametrize("distance_s", [0, FAR_S])
@on_both_drivers
async def test_a_message_is_never_kept_waiting_by_an_earlier_fetch(
    driver: Driver, server: NatsServer, distance_s: float, at_a_time: int
) -> None:
    await poll_with_short_timeouts(driver, server, 100, distance_s, at_a_time)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("driver", ["asyncio", "blocking"], indirect=True)
@pytest.mark.parametrize("distance_s", [0, FAR_S])
@on_both_drivers
async def test_not_one_of_hundreds_of_messages_is_kept_waiting_by_an_earlier_fetch(
    driver: Driver, server: NatsServer, distance_s: float
) -> None:
    # Eight at once, each with a connection and a stream of its own: almost all of the time is spent waiting.
    polls = (poll_with_short_timeouts(driver, server, 50, distance_s, (1, 5)[seed % 2], seed) for seed in range(8))
    await asyncio.gather(*polls)


@on_both_drivers
async def test_close_gives_back_what_came_too_late_for_any_fetch(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc, 5)
        consumer = await consumer_of(stream)
        late = await consumer.fetch(5)
        # As if they had arrived after the fetch was over, which cannot be timed.
        blocking = driver.name == "blocking"
        source = (consumer._target if blocking else consumer)._source
        source.puller.buffer.extend(each._target if blocking else each for each in late)
        await consumer.close()
        await consumer.close()
        other = await stream.consumer("c")
        again = await other.fetch(5, timeout=30)
        assert sorted(numbers(again)) == [0, 1, 2, 3, 4]
        assert [message.metadata.delivered for message in again] == [2] * 5
        await nc.publish(f"{stream.name}.x", b"5")
        assert numbers(await consumer.fetch(1, timeout=30)) == [5]  # a closed one may be used again


# ---- requests, as the server reads them ----------------------------------------------------------------------------


async def requested(nc: jetspark.Client, consumer: jetspark.Consumer, body: bytes = b"") -> Any:
    """The inbox of a request that was written by hand, when the server has got it."""
    inbox = f"box{next(_names)}"
    answers = await nc.subscribe(inbox)
    await nc.publish(f"$JS.API.CONSUMER.MSG.NEXT.{consumer.stream_name}.{consumer.name}", body, reply=inbox)
    await nc.flush()
    return answers


async def said(answers: Any, count: int) -> list[bytes | int]:
    """Data of messages, codes of statuses."""
    arrived = [await answers.next(PATIENCE_S) for _ in range(count)]
    return [message.data if message.status is None else message.status.code for message in arrived]


async def waits(consumer: jetspark.Consumer, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await consumer.info()).waiting_pulls != count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"batch":1}', b'{"expires":0}', b'{"batch":0}', b'{"batch":-3}'])
@on_both_drivers
async def test_a_request_that_says_nothing_is_one_for_one_message_without_an_end(
    driver: Driver, server: NatsServer, body: bytes
) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc)
        consumer = await consumer_of(stream)
        answers = await requested(nc, consumer, body)
        await waits(consumer, 1)
        for number in range(2):
            await nc.jetstream().publish(f"{stream.name}.x", b"%d" % number)
        assert await said(answers, 1) == [b"0"]
        async with asyncio.timeout(PATIENCE_S):
            # The server counts a message a moment after it is stored.
            while not (info := await consumer.info()).pending:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (info.delivered.stream_sequence, info.waiting_pulls, info.pending) == (1, 0, 1)


@on_both_drivers
async def test_a_request_may_be_for_any_number_of_messages(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc, 5)
        answers = await requested(nc, await consumer_of(stream), b'{"batch":1000000000,"no_wait":true}')
        assert await said(answers, 6) == [b"0", b"1", b"2", b"3", b"4", 404]
        consumer = await stream.create_consumer(ConsumerConfig(durable_name="all", ack_policy="none"))
        assert numbers(await consumer.fetch(1_000_000_000, timeout=PATIENCE_S)) == [0, 1, 2, 3, 4]


@on_both_drivers
async def test_a_request_ends_after_as_many_nanoseconds(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc))
        for expires_ns in (200_000_000, 5_000, -5):  # one that has passed is no end that is missing
            answers = await requested(nc, consumer, b'{"batch":10,"expires":%d}' % expires_ns)
            assert await said(answers, 1) == [408]
            assert (await consumer.info()).waiting_pulls == 0, "it is not counted any more"


@on_both_drivers
async def test_no_wait_with_an_end_waits_for_the_first_message(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc)
        consumer = await consumer_of(stream)
        answers = await requested(nc, consumer, b'{"batch":5,"no_wait":true,"expires":200000000}')
        assert await said(answers, 1) == [408], "not a 404 at once"
        answers = await requested(nc, consumer, b'{"batch":5,"no_wait":true,"expires":%d}' % (PATIENCE_S * 1e9))
        await waits(consumer, 1)
        await nc.jetstream().publish(f"{stream.name}.x", b"0")
        assert await said(answers, 2) == [b"0", 404]
        answers = await requested(nc, consumer, b'{"batch":5,"no_wait":true}')
        assert await said(answers, 1) == [404]


@on_both_drivers
async def test_requests_are_counted_while_their_reply_subject_has_a_subscriber(
    driver: Driver, server: NatsServer
) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc))
        assert (await consumer.info()).config.max_waiting == 512
        first, _ = await requested(nc, consumer), await requested(nc, consumer)
        async with driver.connect(server.url) as other:
            await requested(other, consumer)
            await waits(consumer, 3)
        await waits(consumer, 2)  # its client went away
        await first.unsubscribe()
        await waits(consumer, 1)


@on_both_drivers
async def test_a_consumer_has_max_waiting_requests_and_room_again_when_they_end(
    driver: Driver, server: NatsServer
) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc)
        consumer = await consumer_of(stream, max_waiting=2)
        first, second = await requested(nc, consumer), await requested(nc, consumer)
        await waits(consumer, 2)
        for body in (b"", b'{"batch":1,"no_wait":true,"expires":1000000000}'):
            refused = await requested(nc, consumer, body)
            [status] = [(await refused.next(PATIENCE_S)).status]
            assert (status.code, status.description) == (409, "Exceeded MaxWaiting")
        await nc.jetstream().publish(f"{stream.name}.x", b"0")
        assert await said(first, 1) == [b"0"]
        third = await requested(nc, consumer)
        for number in (1, 2):
            await nc.jetstream().publish(f"{stream.name}.x", b"%d" % number)
        assert await said(second, 1) + await said(third, 1) == [b"1", b"2"]


@on_both_drivers
async def test_a_consumer_that_is_not_there_is_a_503(
    driver: Driver, server: NatsServer, core_server: NatsServer
) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 1))
        await consumer.delete()
        for body in (b"", b'{"batch":1,"no_wait":true}'):
            assert await said(await requested(nc, consumer, body), 1) == [503]
        async with driver.connect(core_server.url) as without_jetstream:
            assert await said(await requested(without_jetstream, consumer), 1) == [503]
        with pytest.raises(jetspark.JetStreamUnavailable):
            await consumer.fetch(2, timeout=0.3)


@on_both_drivers
async def test_an_info_of_a_consumer_has_the_numbers_that_the_server_tells(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc, 5)
        consumer = await consumer_of(stream, max_ack_pending=2, filter_subject=f"{stream.name}.x")
        first, second = await consumer.fetch(2)
        await second.nak()
        assert numbers(await consumer.fetch(1, timeout=PATIENCE_S)) == [1], "there is room for nothing new"
        await first.ack_sync()
        assert numbers(await consumer.fetch(1, timeout=PATIENCE_S)) == [2]
        await requested(nc, consumer)
        await waits(consumer, 1)
        info = await consumer.info()
        told = json.loads((await nc.request(f"$JS.API.CONSUMER.INFO.{stream.name}.c")).data)
        assert told["type"] == "io.nats.jetstream.api.v1.consumer_info_response"
        assert (info.stream_name, info.name) == (told["stream_name"], told["name"]) == (stream.name, "c")
        assert info.created == datetime.datetime.fromisoformat(told["created"])
        config, wire = info.config, told["config"]
        assert config.durable_name == wire["durable_name"] == "c"
        assert (config.deliver_policy, config.ack_policy) == (wire["deliver_policy"], wire["ack_policy"])
        assert (config.replay_policy, config.filter_subject) == (wire["replay_policy"], wire["filter_subject"])
        assert (config.ack_wait_s, wire["ack_wait"]) == (30, 30_000_000_000)
        assert (config.max_deliver, config.max_waiting) == (wire["max_deliver"], wire["max_waiting"]) == (-1, 512)
        assert config.max_ack_pending == wire["max_ack_pending"] == 2
        for place, expected in (("delivered", (4, 3)), ("ack_floor", (1, 1))):
            ours = getattr(info, place)
            assert (ours.consumer_sequence, ours.stream_sequence) == expected
            assert (told[place]["consumer_seq"], told[place]["stream_seq"]) == expected
        assert (info.ack_pending, info.redelivered, info.waiting_pulls, info.pending) == (2, 1, 1, 2)
        names = ("num_ack_pending", "num_redelivered", "num_waiting", "num_pending")
        assert [told[name] for name in names] == [2, 1, 1, 2]
        assert info.cluster is None
        assert "cluster" not in told, "a server on its own has no leader"


# ---- errors --------------------------------------------------------------------------------------------------------


@on_both_drivers
async def test_a_consumer_deleted_during_a_fetch_is_not_found(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc))
        fetching = asyncio.ensure_future(consumer.fetch(1, timeout=20))
        await asyncio.sleep(0.1)
        await consumer.delete()
        with pytest.raises(jetspark.ConsumerNotFound) as caught:
            await fetching
        assert (caught.value.code, caught.value.err_code) == (404, 10014)
        with pytest.raises(jetspark.JetStreamUnavailable):
            await consumer.fetch(1, timeout=0.3)
        with pytest.raises(jetspark.JetStreamUnavailable):
            await consumer.fetch(1, timeout=0.3, no_wait=True)


@on_both_drivers
async def test_limits_of_the_consumer_are_named(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 5), max_batch=2, max_expires_s=20.0, max_batch_bytes=1000)
        started = time.monotonic()
        with pytest.raises(jetspark.ConfigError, match="MaxRequestBatch of 2"):
            await consumer.fetch(3, timeout=20)
        with pytest.raises(jetspark.ConfigError, match="MaxRequestExpires of 20s"):
            await consumer.fetch(2, timeout=30)
        with pytest.raises(jetspark.ConfigError, match="MaxRequestMaxBytes of 1000"):
            await consumer.fetch(2, timeout=20, max_bytes=2000)
        assert len(await consumer.fetch(2, timeout=20)) == 2
        assert time.monotonic() - started < 20  # none waited for its timeout


@on_both_drivers
async def test_values_that_make_no_sense_are_refused_at_once(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc))
        wrong: dict[str, Any]
        for wrong in ({"n": 0}, {"timeout": 0}, {"max_bytes": 0}, {"priority": 3}, {"group": "g", "priority": 10}):
            with pytest.raises(jetspark.ConfigError):
                await consumer.fetch(**wrong)
        for wrong in ({"max_messages": 0}, {"max_bytes": 0}, {"expires": 0}, {"expires": 1, "heartbeat": 0.6}):
            with pytest.raises(jetspark.ConfigError):
                consumer.messages(**wrong)


@on_both_drivers
async def test_a_closed_connection_ends_a_fetch_with_an_error(driver: Driver, server: NatsServer) -> None:
    nc = await driver.connect(server.url)
    consumer = await consumer_of(await stream_of(nc))
    fetching = asyncio.ensure_future(consumer.fetch(1, timeout=20))
    await asyncio.sleep(0.1)
    await nc.close()
    with pytest.raises(jetspark.ConnectionClosed):
        await fetching
    with pytest.raises(jetspark.ConnectionClosed):
        await consumer.fetch(1, timeout=20)


# ---- answers -------------------------------------------------------------------------------------------------------


@on_both_drivers
async def test_metadata(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc, 3)
        consumer = await consumer_of(stream, start_sequence=2, deliver_policy="by_start_sequence")
        message = await consumer.next()
        found = message.metadata
        assert (found.stream, found.consumer, found.domain) == (stream.name, "c", None)
        assert (found.delivered, found.stream_sequence, found.consumer_sequence, found.pending) == (1, 2, 1, 1)
        age = datetime.datetime.now(datetime.UTC) - found.timestamp
        assert abs(age) < datetime.timedelta(seconds=20)
        assert (message.subject, message.data, dict(message.headers)) == (f"{stream.name}.x", b"1", {})


@on_both_drivers
async def test_headers_arrive(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc)
        await nc.publish(f"{stream.name}.x", b"body", headers={"A": "1"})
        message = await (await consumer_of(stream)).next()
        assert (message.data, message.headers["A"], message.metadata.delivered) == (b"body", "1", 1)


@on_both_drivers
async def test_acked_messages_do_not_come_again(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 10), ack_wait_s=0.3)
        for message in await consumer.fetch(10):
            await message.ack()
        await all_acked(consumer)
        assert await consumer.fetch(10, timeout=0.6) == []


@on_both_drivers
async def test_an_ack_of_the_last_is_one_of_all_before_it_where_the_policy_says_so(
    driver: Driver, server: NatsServer
) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 5), ack_policy="all", ack_wait_s=1.0)
        messages = await consumer.fetch(5)
        await messages[2].ack_sync()
        info = await consumer.info()
        assert (info.ack_floor.stream_sequence, info.ack_pending) == (3, 2)
        await messages[0].nak()  # it is acknowledged: it does not come again
        again = await consumer.fetch(2, timeout=PATIENCE_S, fill=True)
        assert [(int(message.data), message.metadata.delivered) for message in again] == [(3, 2), (4, 2)]
        await again[-1].ack()
        await all_acked(consumer)
        assert (await consumer.info()).ack_floor.stream_sequence == 5
        assert await consumer.fetch(5, timeout=2.0) == []  # two ack_waits


@on_both_drivers
async def test_ack_sync_returns_when_the_server_knows(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 5))
        for message in await consumer.fetch(5):
            await message.ack_sync(timeout=30)
            assert message.is_answered
        assert (await consumer.info()).ack_pending == 0


@on_both_drivers
async def test_a_nak_delivers_again_now_or_later(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 2))
        first, second = await consumer.fetch(2)
        before = time.monotonic()
        await first.nak()
        await second.nak(delay=0.5)
        [again] = await consumer.fetch(1, timeout=30)
        assert (again.data, again.metadata.delivered) == (b"0", 2)
        [later] = await consumer.fetch(1, timeout=30)
        assert (later.data, later.metadata.delivered) == (b"1", 2)
        assert time.monotonic() - before >= 0.45


@on_both_drivers
async def test_next_acknowledges_one_message_and_requests_another_at_once(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc, 4)
        consumer = await consumer_of(stream)
        message = await consumer.next()
        found = [int(message.data)]
        for _ in range(3):
            following = await consumer.next(timeout=PATIENCE_S, ack=message)
            assert message.is_answered
            with pytest.raises(jetspark.UsageError, match="already answered"):
                await consumer.next(ack=message)
            message = following
            found.append(int(message.data))
        assert found == [0, 1, 2, 3]
        assert await consumer.next(timeout=0.2, ack=message) is None
        await all_acked(consumer)
        assert (await consumer.info()).ack_floor.stream_sequence == 4


@on_both_drivers
async def test_next_acknowledges_even_if_the_next_message_is_here_already(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 3))
        first = await consumer.next()
        cancelled = asyncio.ensure_future(consumer.fetch(2, timeout=PATIENCE_S, fill=True))
        async with asyncio.timeout(PATIENCE_S):
            while (await consumer.info()).ack_pending < 3 and not cancelled.done():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        for each in await cancelled:
            await each.nak()
        second = await consumer.next(ack=first)
        await second.ack()
        other = await consumer_of(await stream_of(nc, 1))
        with pytest.raises(jetspark.UsageError, match="a message of consumer 'c' of stream"):
            await consumer.next(ack=await other.next())


@on_both_drivers
async def test_batches_are_what_there_is_without_end(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc, 25)
        consumer = await consumer_of(stream)
        found: list[list[int]] = []
        async for messages in consumer.batches(10, expires=0.2):
            assert messages
            found.append(numbers(messages))
            for message in messages:
                await message.ack()
            if sum(map(len, found)) == 25:
                await nc.jetstream().publish(f"{stream.name}.x", b"25")
            if sum(map(len, found)) == 26:
                break
        assert found == [list(range(10)), list(range(10, 20)), list(range(20, 25)), [25]]
        await all_acked(consumer)
        await stream.delete_consumer("c")
        with pytest.raises(jetspark.JetStreamUnavailable):
            await read(consumer.batches(10, expires=0.2))


@on_both_drivers
async def test_a_terminated_message_never_comes_again(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc, 2)
        advisories = await nc.subscribe(f"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{stream.name}.c")
        consumer = await consumer_of(stream, ack_wait_s=0.3)
        first, second = await consumer.fetch(2)
        await first.term()
        await second.term(reason="no such order")
        assert b"no such order" not in (await advisories.next(30)).data
        assert b"no such order" in (await advisories.next(30)).data
        assert await consumer.fetch(2, timeout=0.6) == []


@pytest.mark.parametrize(("retention", "stored"), [("limits", 1), ("workqueue", 0), ("interest", 0)])
@on_both_drivers
async def test_a_terminated_message_is_removed_as_an_acknowledged_one_is(
    driver: Driver, server: NatsServer, retention: str, stored: int
) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc, retention=retention)
        consumer = await consumer_of(stream)
        await nc.jetstream().publish(f"{stream.name}.x", b"0")
        await (await consumer.next()).term()
        await all_acked(consumer)
        async with asyncio.timeout(PATIENCE_S):
            while (await stream.info()).state.messages != stored:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@on_both_drivers
async def test_in_progress_extends_the_time_to_ack(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 1), ack_wait_s=0.5)
        [message] = await consumer.fetch(1)
        for _ in range(5):
            await asyncio.sleep(0.2)
            await message.in_progress()
        assert await consumer.fetch(1, timeout=0.2) == []
        await nc.request(message.reply, IN_PROGRESS)  # the server confirms it, as an acknowledgement
        await message.ack()
        await nc.request(message.reply, IN_PROGRESS)
        await all_acked(consumer)
        assert await consumer.fetch(1, timeout=0.7) == []


@on_both_drivers
async def test_a_message_is_answered_once(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 4))
        messages = await consumer.fetch(4)
        for message, name in zip(messages, ("ack", "ack_sync", "nak", "term"), strict=True):
            await message.in_progress()
            await getattr(message, name)()
            for other in ("ack", "ack_sync", "nak", "term", "in_progress"):
                with pytest.raises(jetspark.UsageError, match="already answered"):
                    await getattr(message, other)()


# ---- messages() ----------------------------------------------------------------------------------------------------


@on_both_drivers
async def test_messages_gives_everything_once_and_in_order(driver: Driver, server: NatsServer) -> None:
    count = 3_000 if driver.name == "blocking" else 10_000  # there, each step of the test is a thread's
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, count))
        expected = 0
        async for message in consumer.messages():
            assert int(message.data) == expected
            await message.ack()
            expected += 1
            if expected == count:
                break
        await all_acked(consumer)
        info = await consumer.info()
        assert (info.delivered.consumer_sequence, info.redelivered) == (count, 0)


@on_both_drivers
async def test_a_reader_of_large_messages_asks_for_no_more_than_the_server_keeps_for_a_client(
    driver: Driver, server: NatsServer
) -> None:
    """128 MiB, twice what it keeps: it would end the connection, and what it had sent would be lost."""
    count, data = 2048, bytes(1 << 16)
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc, allow_batched=True)
        subject = stream.cached_info.config.subjects[0].replace(">", "x")
        async with nc.jetstream().fast_batch() as fast:
            await fast.add_many((subject, data) for _ in range(count))
        consumer = await consumer_of(stream, ack_policy="none")
        async with asyncio.timeout(PATIENCE_S), consumer.messages() as messages:
            received = 0
            async for message in messages:
                received += len(message.data) == len(data)
                if received == count:
                    break
        fetching = await stream.create_consumer(ConsumerConfig(durable_name="fetching", ack_policy="none"))
        assert len(await fetching.fetch(count - 100, timeout=PATIENCE_S)) == count - 100
        assert len(await fetching.fetch(200, no_wait=True)) == 100
        await nc.jetstream().delete_stream(stream.name)


@on_both_drivers
async def test_messages_waits_for_what_comes_later(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc)
        consumer = await consumer_of(stream)
        async with consumer.messages(expires=0.2) as messages:
            iterator = aiter(messages)
            for number in range(5):
                await asyncio.sleep(0.15)  # some requests expire meanwhile
                await nc.publish(f"{stream.name}.x", b"%d" % number)
                async with asyncio.timeout(30):
                    assert (await anext(iterator)).data == b"%d" % number
            await iterator.aclose()


@on_both_drivers
async def test_leaving_the_loop_gives_back_what_was_not_handed_out(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc, 300)
        consumer = await consumer_of(stream)
        async with consumer.messages(max_messages=100) as messages:
            taken = 0
            async for message in messages:
                await message.ack()
                taken += 1
                if taken == 10:
                    break
        other = await stream.consumer("c")
        rest = await other.fetch(290, timeout=20)  # not when ack_wait, 30 s, is over
        assert sorted(numbers(rest)) == list(range(10, 300))
        again = [message for message in rest if message.metadata.delivered > 1]
        assert 0 < len(again) <= 100
        assert (await consumer.info()).waiting_pulls == 0


@on_both_drivers
async def test_a_loop_left_without_a_with_gives_back_too(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc, 50)
        consumer = await consumer_of(stream)
        async for message in consumer.messages():
            await message.ack()
            break
        other = await stream.consumer("c")
        rest: list[Any] = []
        async with asyncio.timeout(60):
            while len(rest) < 49:
                rest += await other.fetch(49 - len(rest), timeout=0.5)
        assert sorted(numbers(rest)) == list(range(1, 50))


@on_both_drivers
async def test_a_managed_loop_may_be_taken_up_again(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 20))
        found = []
        async with consumer.messages() as messages:
            for _ in range(2):
                async for message in messages:
                    found.append(int(message.data))
                    if len(found) % 10 == 0:
                        break
        assert found == list(range(20))
        assert [message async for message in messages] == []  # after that it is over


@on_both_drivers
async def test_bytes_bound_what_is_received_ahead(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 60, b"x" * 1000))
        found = 0
        async with consumer.messages(max_bytes=5000) as messages:
            async for message in messages:
                if not found:
                    await asyncio.sleep(0.1)
                    assert (await consumer.info()).ack_pending <= 5
                await message.ack()
                found += 1
                if found == 60:
                    break
        await nc.publish(f"{consumer.stream_name}.x", b"x" * 1000)
        with pytest.raises(jetspark.ConfigError, match="max_bytes=500"):
            await read(consumer.messages(max_bytes=500))


@on_both_drivers
async def test_a_consumer_deleted_while_iterating_is_an_error(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 3))
        found: list[int] = []
        reading = asyncio.ensure_future(read(consumer.messages(), found))
        await until(lambda: len(found) == 3)
        await consumer.delete()
        with pytest.raises(jetspark.ConsumerNotFound):
            await reading
        assert found == [0, 1, 2]


@on_both_drivers
async def test_a_stream_deleted_while_iterating_is_an_error(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc, 1)
        found: list[int] = []
        reading = asyncio.ensure_future(read((await consumer_of(stream)).messages(), found))
        await until(lambda: len(found) == 1)
        await stream.delete()
        with pytest.raises(jetspark.ConsumerNotFound):
            await reading


@on_both_drivers
async def test_a_paused_consumer_goes_on_when_resumed(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        consumer = await consumer_of(await stream_of(nc, 3))
        await consumer.pause(datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=60))
        assert await consumer.fetch(1, timeout=0.3) == []
        fetching = asyncio.ensure_future(consumer.fetch(3, timeout=60))
        await asyncio.sleep(0.2)
        assert not fetching.done()
        await consumer.resume()
        async with asyncio.timeout(40):
            assert numbers(await fetching) == [0, 1, 2]


@on_both_drivers
async def test_a_killed_server_loses_nothing_and_repeats_little(driver: Driver, own: NatsServer) -> None:
    count = 2_000
    events = Recorder()
    async with driver.connect(own.url, on_event=events) as nc:
        stream = await stream_of(nc, count, storage="file")
        consumer = await consumer_of(stream, ack_wait_s=2.0)
        seen: dict[int, list[int]] = {}
        restarting: asyncio.Future[Any] | None = None
        async with asyncio.timeout(PATIENCE_S), consumer.messages(max_messages=100) as messages:
            async for message in messages:
                seen.setdefault(int(message.data), []).append(message.metadata.delivered)
                await message.ack()
                if len(seen) == count // 2 and restarting is None:
                    await asyncio.to_thread(own.kill)
                    restarting = asyncio.ensure_future(asyncio.to_thread(own.start))
                if len(seen) == count:
                    break
        assert restarting is not None
        await restarting
        assert sorted(seen) == list(range(count))
        assert len(events.of(jetspark.Reconnected)) == 1
        # Acks that died with the server make their messages come again; in the end none is left.
        async with asyncio.timeout(PATIENCE_S):
            while (info := await consumer.info()).ack_pending or info.pending:
                for message in await consumer.fetch(100, timeout=0.5):
                    seen[int(message.data)].append(message.metadata.delivered)
                    await message.ack()
        assert sum(map(len, seen.values())) <= count + count // 2 + 100


@on_both_drivers
async def test_a_fetch_goes_on_after_a_restart(driver: Driver, own: NatsServer) -> None:
    events = Recorder()
    async with driver.connect(own.url, on_event=events) as nc:
        stream = await stream_of(nc, 3, storage="file")
        consumer = await consumer_of(stream)
        assert len(await consumer.fetch(3)) == 3
        fetching = asyncio.ensure_future(consumer.fetch(1, timeout=30))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(own.kill)
        await asyncio.to_thread(own.start)
        await events.wait_for(jetspark.Reconnected)
        await nc.publish(f"{stream.name}.x", b"3")
        started = time.monotonic()
        received = numbers(await fetching)
        assert time.monotonic() - started < 20  # and not when its timeout was over
        # A server that is killed may forget what it delivered in the last moments: then that comes once more, in order.
        while received[-1] != 3:
            received += numbers(await consumer.fetch(1, timeout=10))
        assert received == list(range(received[0], 4))


# ---- priority groups -----------------------------------------------------------------------------------------------


@on_both_drivers
async def test_overflow_delivers_only_above_the_minimum(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc, 5)
        consumer = await consumer_of(stream, priority_policy="overflow", priority_groups=["g"])
        assert await consumer.fetch(1, timeout=0.3, group="g", min_pending=10) == []
        assert numbers(await consumer.fetch(1, timeout=30, group="g", min_pending=5)) == [0]
        with pytest.raises(jetspark.ServerError, match="Priority Group"):
            await consumer.fetch(1, timeout=30)


@on_both_drivers
async def test_a_pinned_client_keeps_its_pin_until_it_is_taken_away(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc, 30)
        consumer = await consumer_of(
            stream, priority_policy="pinned_client", priority_groups=["g"], priority_timeout_s=30.0
        )
        standby = await stream.consumer("c")
        [first] = await consumer.fetch(1, timeout=30, group="g")
        assert first.headers["Nats-Pin-Id"]
        assert await standby.fetch(1, timeout=0.3, group="g") == []
        assert numbers(await consumer.fetch(5, timeout=30, group="g")) == [1, 2, 3, 4, 5]
        await consumer.unpin("g")
        assert numbers(await standby.fetch(1, timeout=30, group="g")) == [6]
        assert await consumer.fetch(1, timeout=0.3, group="g") == []
        await standby.unpin("g")
        assert numbers(await consumer.fetch(1, timeout=30, group="g")) == [7]


# ---- a cluster -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_leaders_may_change_while_messages_flow() -> None:
    with NatsCluster(3) as cluster:
        for name in ("asyncio", "blocking"):
            driver = Driver(name)
            driver.run(_follow_leaders(driver, cluster))


async def _follow_leaders(driver: Driver, cluster: NatsCluster) -> None:
    async with driver.connect(cluster.urls) as nc, driver.connect(cluster.urls) as other:
        stream = await stream_of(nc, replicas=3, storage="file")
        consumer = await consumer_of(stream, ack_wait_s=5.0)
        js = other.jetstream()
        stepping = asyncio.Event()

        async def publish(number: int, data: bytes) -> None:
            while True:
                try:
                    await js.publish(f"{stream.name}.x", data, msg_id=str(number), timeout=2)
                    return
                except (jetspark.RequestTimeout, jetspark.JetStreamUnavailable):
                    continue  # the same id, so that it is stored once

        async def publish_all() -> int:
            """Before, while and after leaders change; the last one says so."""
            number = 0
            while not stepping.is_set() or number < 300:
                await publish(number, b"%d" % number)
                number += 1
                await asyncio.sleep(0.002)
            await publish(number, b"%d last" % number)
            return number + 1

        async def step_down() -> None:
            for _ in range(3):
                for step in (consumer.step_down, stream.step_down):
                    await asyncio.sleep(0.5)
                    try:
                        await step()
                    except (jetspark.ServerError, jetspark.RequestTimeout, jetspark.JetStreamUnavailable):
                        continue  # an election is under way already
            stepping.set()

        publishing, changing = asyncio.ensure_future(publish_all()), asyncio.ensure_future(step_down())
        seen: dict[int, list[int]] = {}
        last: int | None = None
        async with asyncio.timeout(80), consumer.messages(max_messages=100) as messages:
            async for message in messages:
                number, is_last, _ = message.data.partition(b" ")
                seen.setdefault(int(number), []).append(message.metadata.delivered)
                last = int(number) if is_last else last
                await message.ack()
                if last is not None and len(seen) == last + 1:
                    break
        await changing
        count = await publishing
        assert count >= 300
        assert sorted(seen) == list(range(count))
        # Whatever came twice says so itself.
        assert all(counts == sorted(set(counts)) for counts in seen.values())
        assert await _count_when_there_is_a_leader(stream) == count


async def _count_when_there_is_a_leader(stream: Any) -> int:
    async with asyncio.timeout(30):
        while True:
            try:
                return int((await stream.info()).state.messages)
            except (jetspark.RequestTimeout, jetspark.JetStreamUnavailable, jetspark.ServerError):
                await asyncio.sleep(0.1)  # an election swallows requests


@on_both_drivers
async def test_sources_of_dropped_consumers_do_not_pile_up(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        stream = await stream_of(nc, 20)
        await consumer_of(stream)
        for number in range(20):
            consumer = await stream.consumer("c")
            assert numbers(await consumer.fetch(1, timeout=30)) == [number]
            del consumer
        await until(lambda: len(nc._machine.subscriptions.all) <= 4)
