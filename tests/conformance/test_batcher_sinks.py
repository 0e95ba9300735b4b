"""Sinks for JetStream against the real server, on both drivers: what is stored, once, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from support.drivers import Awaited, Driver, Recorder, on_both_drivers, until
from support.lossy import LossyProxy
from support.patience import PATIENCE_S
from support.servers import server_with_batch_limits

import jetspark
import jetspark.batcher.aio.jetstream
import jetspark.batcher.aio.sinks
import jetspark.batcher.blocking.jetstream
import jetspark.batcher.blocking.sinks
from jetspark import BatchCutShort, BatchInDoubt, ConfigError, ServerError, StreamConfig, UsageError
from jetspark.batcher.retry import is_retryable
from jetspark.server import NatsCluster, NatsServer

MAX_MESSAGES = 20
LIMITS = f'max_inflight_per_stream: 2, max_msgs: {MAX_MESSAGES}, timeout: "5m"'

_names = iter(f"SINK{number}" for number in range(1_000_000))


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One that allows few and small atomic batches, each for longer than any test takes."""
    with server_with_batch_limits(tmp_path_factory.mktemp("limited"), LIMITS) as server:
        yield server


class Place:
    """A stream, and sinks that write to it in the driver's way."""

    def __init__(self, driver: Driver, js: jetspark.JetStream, stream: Any) -> None:
        self._is_blocking = driver.name == "blocking"
        self.js, self.stream, self.name = js, stream, stream.name

    def _make(self, module: str, kind: str, first: Any, *args: Any, **options: Any) -> Any:
        package = jetspark.batcher.blocking if self._is_blocking else jetspark.batcher.aio
        make = getattr(getattr(package, module), kind)
        if self._is_blocking:
            return Awaited(make(first._target, *args, **options))
        return make(first, *args, **options)

    def _jetstream(self, kind: str, options: dict[str, Any]) -> Any:
        if "to_message" not in options:
            options["subject"] = f"{self.name}.a"
        return self._make("jetstream", kind, options.pop("js", self.js), **options)

    def fast(self, **options: Any) -> Any:
        return self._jetstream("FastIngestSink", options)

    def atomic(self, **options: Any) -> Any:
        return self._jetstream("AtomicSink", options)

    def retry(self, sink: Any, **options: Any) -> Any:
        return self._make("sinks", "RetrySink", sink, **options)

    async def stored(self) -> list[bytes]:
        return [message.data async for message in self.stream.get_messages()]

    async def count(self) -> int:
        return int((await self.stream.info()).state.messages)


@contextlib.asynccontextmanager
async def place(driver: Driver, server: NatsServer, *, timeout: float = 5, **config: Any) -> AsyncIterator[Place]:
    name = next(_names)
    async with driver.connect(server.url, reconnect_wait_s=0.05) as nc:
        js = nc.jetstream(timeout=timeout)
        defaults = {"allow_atomic": True, "allow_batched": True, "allow_direct": True}
        stream = await js.create_stream(StreamConfig(**{"name": name, "subjects": [f"{name}.>"]} | defaults | config))
        yield Place(driver, js, stream)


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def own_id(item: bytes) -> str:
    return f"item-{item.decode()}"


async def crash(server: NatsServer) -> None:
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)


# ---- fast ingest -----------------------------------------------------------------------------------------------------


@on_both_drivers
async def test_a_write_returns_when_all_of_it_is_stored(driver: Driver, server: NatsServer) -> None:
    async with place(driver, server) as here, here.fast() as sink:
        for size in (1, 7, 499, 500, 501, 2_000):
            before = await here.count()
            await sink.write(numbers(0, size))
            assert await here.count() == before + size
        await sink.write([])
        assert sink.publisher.pending == 0


@on_both_drivers
async def test_a_message_is_made_of_an_item(driver: Driver, server: NatsServer) -> None:
    async with place(driver, server) as here:
        name = here.name

        def to_message(item: dict[str, str]) -> Any:
            return f"{name}.{item['to']}", item["text"].encode(), {"Kind": "note"}

        for sink in (here.fast(to_message=to_message), here.atomic(to_message=to_message)):
            await sink.write([{"to": "x", "text": "1"}, {"to": "y", "text": "2"}])
        found = [message async for message in here.stream.get_messages()]
        assert [(each.subject, each.data, each.headers["Kind"]) for each in found] == [
            (f"{name}.x", b"1", "note"),
            (f"{name}.y", b"2", "note"),
        ] * 2


@on_both_drivers
async def test_writes_under_way_together_keep_one_batch_open_and_their_order(
    driver: Driver, server: NatsServer
) -> None:
    async with place(driver, server) as here, here.fast() as sink:
        free = asyncio.Semaphore(4)

        async def write(number: int) -> None:
            async with free:
                await sink.write(numbers(600 * number, 600 * number + 600))

        await asyncio.gather(*(write(number) for number in range(40)))
        found = await here.stored()
        assert len(found) == 24_000
        # Threads begin in any order; what one write has is together, in order.
        assert found == numbers(0, 24_000) or driver.name == "blocking"
        for at in range(0, 24_000, 600):
            first = int(found[at])
            assert found[at : at + 600] == numbers(first, first + 600)
        assert sink.publisher.batches <= 10  # one at a time it would be forty


@on_both_drivers
async def test_writes_that_wait_for_each_other_in_vain_end_the_batch(driver: Driver, server: NatsServer) -> None:
    # Together they are too few for an acknowledgement.
    async with place(driver, server) as here, here.fast() as sink:
        for _ in range(5):
            async with asyncio.timeout(30):
                await asyncio.gather(*(sink.write([b"x"]) for _ in range(5)))
        assert sink.publisher.batches >= 5  # one for each round, at least
        assert await here.count() == 25


@on_both_drivers
async def test_a_crash_of_the_server_loses_and_doubles_nothing(driver: Driver, own: NatsServer) -> None:
    async with place(driver, own) as here, here.fast(message_ids=True) as sink:
        free = asyncio.Semaphore(4)
        done = 0

        async def write(number: int) -> None:
            nonlocal done
            async with free:
                await sink.write(numbers(300 * number, 300 * number + 300))
            done += 1

        writes = asyncio.gather(*(write(number) for number in range(100)))
        for count in (20, 60):
            await until(lambda: done >= count)  # noqa: B023
            await crash(own)
        await writes
        assert Counter(await here.stored()) == Counter(numbers(0, 30_000))


@on_both_drivers
async def test_writes_that_fail_in_a_crash_are_written_again_and_stored_once(driver: Driver, own: NatsServer) -> None:
    # So impatient that the sink itself gives up, again and again.
    async with place(driver, own) as here:
        sink = here.fast(id_of=own_id, patience_s=0.2)
        retry = here.retry(sink, attempts=100, first_wait_s=0.05, max_wait_s=0.2)
        done = 0

        async def write(first: int) -> None:
            nonlocal done
            for number in range(first, first + 25):
                await retry.write(numbers(100 * number, 100 * number + 100))
                done += 1

        writes = asyncio.gather(*(write(first) for first in (0, 25, 50, 75)))
        await until(lambda: done >= 30)
        await asyncio.to_thread(own.kill)
        publisher = sink.publisher
        await until(lambda: sink.publisher is not publisher)  # the old one gave up, so writes failed
        await asyncio.to_thread(own.start)
        await writes
        await sink.close()
        assert Counter(await here.stored()) == Counter(numbers(0, 10_000))


@on_both_drivers
async def test_a_retry_with_the_same_ids_stores_nothing_twice(driver: Driver, server: NatsServer) -> None:
    async with place(driver, server) as here, here.fast(id_of=own_id) as sink, here.fast(id_of=own_id) as another:
        await sink.write(numbers(0, 1_000))
        await sink.write(numbers(500, 1_500))
        await another.write(numbers(0, 2_000))
        assert await here.stored() == numbers(0, 2_000)


@on_both_drivers
async def test_the_publishers_own_ids_do_not_recognise_a_retry(driver: Driver, server: NatsServer) -> None:
    async with place(driver, server) as here, here.fast(message_ids=True) as sink:
        await sink.write(numbers(0, 10))
        await sink.write(numbers(0, 10))
        assert await here.count() == 20


@on_both_drivers
async def test_a_deleted_stream_fails_the_write_and_a_new_one_takes_the_next(
    driver: Driver, server: NatsServer
) -> None:
    async with place(driver, server) as here:
        sink = here.fast(patience_s=0.5)
        await sink.write(numbers(0, 10))
        first = sink.publisher
        await here.js.delete_stream(here.name)
        with pytest.raises(jetspark.JetStreamUnavailable):  # every attempt was answered so: nothing is in doubt
            await sink.write(numbers(10, 20))
        here.stream = await here.js.create_stream(
            StreamConfig(name=here.name, subjects=[f"{here.name}.>"], allow_batched=True, allow_direct=True)
        )
        await sink.write(numbers(20, 30))
        assert sink.publisher is not first
        await sink.close()
        assert await here.stored() == numbers(20, 30)


@on_both_drivers
async def test_a_stream_that_comes_back_in_time_has_everything_that_was_not_stored(
    driver: Driver, server: NatsServer
) -> None:
    async with place(driver, server) as here, here.fast() as sink:
        await sink.write(numbers(0, 10))
        await here.js.delete_stream(here.name)
        writing = asyncio.ensure_future(sink.write(numbers(10, 20)))
        await asyncio.sleep(0.2)
        here.stream = await here.js.create_stream(
            StreamConfig(name=here.name, subjects=[f"{here.name}.>"], allow_batched=True, allow_direct=True)
        )
        async with asyncio.timeout(PATIENCE_S):
            await writing
        assert await here.stored() == numbers(10, 20)


@on_both_drivers
async def test_a_stream_that_does_not_allow_it_says_so_and_is_not_asked_again(
    driver: Driver, server: NatsServer
) -> None:
    async with place(driver, server, allow_batched=False, allow_atomic=False) as here:
        for sink, error in (
            (here.fast(), jetspark.BatchPublishDisabled),
            (here.atomic(), jetspark.AtomicPublishDisabled),
        ):
            async with asyncio.timeout(30):  # a retry would take minutes
                with pytest.raises(error, match="turn it on with"):
                    await here.retry(sink, first_wait_s=60, max_wait_s=60, max_total_s=600).write(numbers(0, 10))
        assert await here.count() == 0
        await here.js.update_stream(StreamConfig(name=here.name, allow_batched=True))
        sink = here.fast()
        await sink.write(numbers(0, 10))
        await sink.close()


@on_both_drivers
async def test_an_item_that_can_never_be_sent_fails_its_batch_before_anything_is(
    driver: Driver, server: NatsServer
) -> None:
    async with place(driver, server) as here, here.fast() as sink:
        good = numbers(0, 700)
        for another in (sink, here.atomic(), here.fast(id_of=lambda item: str(len(item)))):
            with pytest.raises(ConfigError):
                await another.write([*good, b"x" * (2 << 20)])
            with pytest.raises(TypeError, match="to_message"):
                await another.write([*good, "text"])
        nowhere = here.fast(to_message=lambda item: ("not a subject", item))
        with pytest.raises(jetspark.InvalidSubject):
            await nowhere.write(good)
        await sink.write([b"after"])
        assert await here.stored() == [b"after"]


@on_both_drivers
async def test_a_refused_message_fails_its_own_write_for_good_and_others_for_now(
    driver: Driver, server: NatsServer
) -> None:
    async with place(driver, server, max_message_bytes=500) as here:
        sink = here.fast()
        # The server is slow to answer, so both are on their way when it refuses.
        server.pause()
        try:
            first = asyncio.ensure_future(sink.write([b"1", b"x" * 1_000, b"2"]))
            await until(lambda: sink.publisher is not None and sink.publisher.accepted >= 3)
            second = asyncio.ensure_future(sink.write([b"3", b"4"]))
            await until(lambda: sink.publisher.accepted >= 5)
        finally:
            server.resume()
        with pytest.raises(ServerError) as refused:
            await first
        assert refused.value.err_code == 10054
        with pytest.raises(BatchCutShort, match="of another write") as cut:
            await second
        assert cut.value.stored == 0
        assert is_retryable(cut.value)
        assert not is_retryable(refused.value)
        await sink.write([b"3", b"4"])
        await sink.close()
        assert await here.stored() == [b"1", b"3", b"4"]


@on_both_drivers
async def test_a_closed_sink_has_stored_everything_and_takes_no_more(driver: Driver, server: NatsServer) -> None:
    async with place(driver, server) as here:
        async with here.fast() as sink:
            await sink.write(numbers(0, 10))
        with pytest.raises(UsageError, match="closed"):
            await sink.write(numbers(10, 20))
        await sink.close()
        never_used = here.fast()
        await never_used.close()
        with pytest.raises(UsageError, match="closed"):
            await never_used.write(numbers(10, 20))
        assert await here.count() == 10


@on_both_drivers
async def test_the_publisher_is_told_what_the_sink_is(driver: Driver, server: NatsServer) -> None:
    async with place(driver, server) as here:
        for options, message in (
            ({"id_prefix": "x"}, "id_of"),
            ({"speed": 1}, "unknown fast publisher option"),
            ({"linger_s": -1}, "linger_s=-1"),
        ):
            with pytest.raises(ConfigError, match=message):
                here.fast(**options)
        # So few may be pending that a write has to wait for the server several times.
        async with here.fast(max_pending_messages=30, flow=10) as sink:
            await sink.write(numbers(0, 1_000))
            assert await here.stored() == numbers(0, 1_000)


# A thread cannot be cancelled.
@pytest.mark.parametrize("driver", ["asyncio", "uvloop"], indirect=True)
@pytest.mark.parametrize("kind", ["fast", "atomic"])
@on_both_drivers
async def test_a_cancelled_write_may_be_stored_and_is_stored_once_with_ids(
    driver: Driver, server: NatsServer, kind: str
) -> None:
    async with place(driver, server) as here:
        sink = getattr(here, kind)(id_of=own_id)
        # After any number of steps of the loop, from the first to beyond the last.
        for steps in range(60):
            batch = numbers(20 * steps, 20 * steps + 20)
            task = asyncio.ensure_future(sink.write(list(batch)))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await sink.write(batch)
        assert Counter(await here.stored()) == Counter(numbers(0, 1_200))


# ---- atomic ----------------------------------------------------------------------------------------------------------


def test_bounds_of_the_atomic_sink_are_checked(server: NatsServer) -> None:
    with jetspark.blocking.connect(server.url) as client:
        for options, message in (({"max_messages": 0}, "max_messages=0"), ({"doubt_s": -1}, "doubt_s=-1")):
            with pytest.raises(ConfigError, match=message):
                jetspark.batcher.blocking.jetstream.AtomicSink(client.jetstream(), "s", **options)  # type: ignore[arg-type]


async def batches_of(here: Place) -> list[int]:
    """How many messages each atomic batch has that is stored, in order."""
    ids = [message.headers["Nats-Batch-Id"] async for message in here.stream.get_messages()]
    return list(Counter(ids).values())


@on_both_drivers
async def test_a_flush_is_one_atomic_batch(driver: Driver, server: NatsServer) -> None:
    async with place(driver, server) as here:
        sink = here.atomic()
        for size in (1, 2, 1_000):
            await sink.write(numbers(0, size))
        await sink.write([])
        assert await batches_of(here) == [1, 2, 1_000]


@on_both_drivers
async def test_a_flush_larger_than_the_servers_limit_is_several(driver: Driver, server: NatsServer) -> None:
    async with place(driver, server) as here:
        sink = here.atomic()
        await sink.write(numbers(0, 2_500))
        assert await batches_of(here) == [1_000, 1_000, 500]
        assert await here.stored() == numbers(0, 2_500)


@on_both_drivers
async def test_the_limit_the_server_was_given_is_learnt(driver: Driver, limited: NatsServer) -> None:
    async with place(driver, limited) as here:
        sink = here.atomic()
        assert sink.max_messages == 1_000
        await sink.write(numbers(0, 50))
        assert sink.max_messages == MAX_MESSAGES
        await sink.write(numbers(50, 70))
        assert await batches_of(here) == [20, 20, 10, 20]
        assert await here.stored() == numbers(0, 70)


@on_both_drivers
async def test_a_flush_is_stored_all_or_none(driver: Driver, server: NatsServer) -> None:
    async with place(driver, server) as here:
        name = here.name
        sink = here.atomic(to_message=lambda item: (f"{name}.{item[0]}", b"", item[1]))
        await sink.write([("x", None)])
        guard = {"Nats-Expected-Last-Subject-Sequence": "77"}
        with pytest.raises(jetspark.WrongLastSequence):
            await sink.write([("y", None), ("x", guard), ("z", None)])
        assert await here.count() == 1


@on_both_drivers
async def test_a_failure_between_the_batches_of_a_flush_says_how_many_items_are_stored(
    driver: Driver, server: NatsServer
) -> None:
    async with place(driver, server) as here:
        name = here.name
        guard = {"Nats-Expected-Last-Subject-Sequence": "77"}

        def to_message(item: bytes) -> Any:
            return f"{name}.{item.decode()}", item, guard if item == b"35" else None

        sink = here.atomic(to_message=to_message, id_of=own_id, max_messages=20)
        with pytest.raises(BatchCutShort) as cut:
            await sink.write(numbers(0, 60))
        assert cut.value.stored == 20
        assert isinstance(cut.value.__cause__, jetspark.WrongLastSequence)
        assert await here.stored() == numbers(0, 20)
        guard["Nats-Expected-Last-Subject-Sequence"] = "0"  # it is as expected now
        await sink.write(numbers(0, 60))
        assert await here.stored() == numbers(0, 60)
        assert await batches_of(here) == [20, 20, 20]


@on_both_drivers
async def test_what_the_stream_knows_by_its_id_stays_and_the_rest_is_stored_together(
    driver: Driver, server: NatsServer
) -> None:
    async with place(driver, server) as here:
        sink = here.atomic(id_of=own_id)
        await sink.write(numbers(0, 30))
        await sink.write(numbers(0, 30))  # all there
        assert await here.count() == 30
        await sink.write(numbers(20, 40))  # some there
        assert await here.stored() == numbers(0, 40)
        assert await batches_of(here) == [30, 10]
        await sink.write([*numbers(40, 45), *numbers(40, 45)])  # twice in one flush
        assert await here.stored() == numbers(0, 45)
        small = here.atomic(id_of=own_id, max_messages=3)
        await small.write([*numbers(45, 50), *numbers(45, 50)])  # twice, in batches of their own
        assert await here.stored() == numbers(0, 50)


@pytest.mark.slow
@on_both_drivers
async def test_a_replicated_stream_knows_ids_just_as_well(driver: Driver, cluster: NatsCluster) -> None:
    async with driver.connect(cluster.urls) as nc:
        js, name = nc.jetstream(timeout=20), next(_names)
        config = StreamConfig(name=name, subjects=[f"{name}.>"], replicas=3, allow_atomic=True, allow_batched=True)
        here = Place(driver, js, await js.create_stream(config))
        atomic = here.atomic(id_of=own_id)
        await atomic.write(numbers(0, 300))
        await atomic.write(numbers(100, 500))
        async with here.fast(id_of=own_id) as fast:
            await fast.write(numbers(300, 2_000))
            await fast.write(numbers(0, 2_000))
        await atomic.write(numbers(1_500, 2_100))
        assert await here.count() == 2_100


@on_both_drivers
async def test_asking_for_ids_needs_no_more_open_batches_than_a_busy_server_has(
    driver: Driver, limited: NatsServer
) -> None:
    async with place(driver, limited) as here:
        sink = here.atomic(id_of=own_id)
        await sink.write(numbers(0, 100))
        retry = here.retry(sink, max_wait_s=0.5)
        await asyncio.gather(*(retry.write(numbers(first, first + 60)) for first in range(0, 100, 20)))
        assert await here.count() == 140
        assert set(await here.stored()) == set(numbers(0, 140))


@on_both_drivers
async def test_ids_that_stay_in_the_way_are_told(driver: Driver, server: NatsServer) -> None:
    async with place(driver, server) as here:
        name = here.name
        # Without an id nobody could say whether the second message is stored.
        sink = here.atomic(
            to_message=lambda item: (f"{name}.a", item, {"Nats-Msg-Id": "one"} if item == b"1" else None)
        )
        await sink.write([b"1"])
        with pytest.raises(jetspark.DuplicateMessageId):
            await sink.write([b"1", b"2"])
        assert await here.stored() == [b"1"]


@on_both_drivers
async def test_the_search_for_known_ids_has_an_end(
    driver: Driver, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the server compared expectations first: then every id seems unknown.
    import jetspark.batcher.jetstream_sinks as stores

    monkeypatch.setattr(stores, "_id_of", lambda item: f"other-{item[1].decode()}")
    async with place(driver, server) as here:
        sink = here.atomic(id_of=own_id)
        await sink.write(numbers(0, 5))
        async with asyncio.timeout(60):
            with pytest.raises(jetspark.DuplicateMessageId):
                await sink.write(numbers(0, 6))
        assert await here.count() == 5


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("lost", ["to_client", "to_server"])
@on_both_drivers
async def test_a_commit_in_doubt_is_resolved_without_ids(
    driver: Driver, server: NatsServer, lost: Any, size: int
) -> None:
    async with (
        place(driver, server) as here,
        LossyProxy(server.port) as proxy,
        driver.connect(proxy.url, reconnect_wait_s=0.01, on_event=(events := Recorder())) as nc,
    ):
        sink = here.atomic(js=nc.jetstream(timeout=1))
        proxy.lose_from(b"Nats-Batch-Commit", lost)
        writing = asyncio.ensure_future(sink.write(numbers(0, size)))
        await asyncio.sleep(0.3)
        proxy.cut()
        await events.wait_for(jetspark.Reconnected)
        if lost == "to_client":
            await writing
        else:
            with pytest.raises(BatchCutShort, match="had no effect") as cut:
                await writing
            assert cut.value.stored == 0
            await sink.write(numbers(0, size))
        assert await here.stored() == numbers(0, size)


@on_both_drivers
async def test_a_doubt_is_borne_for_so_long_and_then_told(driver: Driver, own: NatsServer) -> None:
    async with (
        place(driver, own) as here,
        LossyProxy(own.port) as proxy,
        driver.connect(proxy.url, reconnect_wait_s=0.01, on_event=(events := Recorder())) as nc,
    ):
        sink = here.atomic(js=nc.jetstream(timeout=0.3), doubt_s=0.5)
        proxy.lose_from(b"Nats-Batch-Commit", "to_client")
        async with asyncio.timeout(60):
            with pytest.raises(BatchInDoubt, match="does not answer"):
                await sink.write(numbers(0, 5))
        proxy.cut()
        await events.wait_for(jetspark.Reconnected)
        assert await here.count() == 5


@on_both_drivers
async def test_atomic_writes_survive_crashes_with_a_retry_and_ids(driver: Driver, own: NatsServer) -> None:
    async with place(driver, own, timeout=2) as here:
        retry = here.retry(here.atomic(id_of=own_id, max_messages=40), attempts=200, first_wait_s=0.05, max_wait_s=0.2)
        done = 0

        async def write(first: int) -> None:
            nonlocal done
            for number in range(first, first + 20):
                await retry.write(numbers(100 * number, 100 * number + 100))
                done += 1

        writes = asyncio.gather(write(0), write(20))
        for count in (8, 24):
            await until(lambda: done >= count)  # noqa: B023
            await crash(own)
        await writes
        assert Counter(await here.stored()) == Counter(numbers(0, 4_000))


@on_both_drivers
async def test_a_write_that_fails_leaves_no_batch_in_the_way_of_others(driver: Driver, limited: NatsServer) -> None:
    async with place(driver, limited) as here:
        name = here.name
        headers = {"Nats-Expected-Last-Subject-Sequence": "0"}
        # The second expectation about one subject is refused here, in the middle of an open batch.
        bad = here.atomic(to_message=lambda item: (f"{name}.x", item, headers))
        for _ in range(10):
            with pytest.raises(ConfigError):
                await bad.write(numbers(0, 3))
        async with asyncio.timeout(60):  # the server would forget them after minutes, and allows two
            await here.atomic().write(numbers(0, 3))
        assert await here.count() == 3
