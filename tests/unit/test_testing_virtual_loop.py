"""The real asyncio client on the model server, in virtual time."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

import jetspark
from jetspark import ConsumerConfig, KVConfig, StreamConfig
from jetspark.testing import VirtualLoop, VirtualProcess, model_network, run_in_virtual_time


def loop() -> VirtualLoop:
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualLoop)
    return running


def test_a_day_passes_in_no_time() -> None:
    async def main() -> float:
        began = loop().time()
        await asyncio.sleep(86_400)
        return loop().time() - began

    began = time.monotonic()
    assert run_in_virtual_time(main()) == pytest.approx(86_400)
    assert time.monotonic() - began < 60


def test_messages_come_again_until_they_are_acknowledged() -> None:
    async def main() -> list[tuple[bytes, int]]:
        async with jetspark.connect("nats://model") as nc:
            js = nc.jetstream()
            stream = await js.create_stream(StreamConfig(name="S", subjects=["s.>"]))
            for number in range(3):
                await js.publish("s.a", b"%d" % number)
            consumer = await stream.create_consumer(ConsumerConfig(durable_name="c", ack_wait_s=3600))
            seen = []
            for _ in range(3):
                for message in await consumer.fetch(10, timeout=5):
                    seen.append((message.data, message.metadata.delivered))
                    if message.metadata.delivered == 2 or message.data == b"0":
                        await message.ack()
                await asyncio.sleep(3601)
            return seen

    assert run_in_virtual_time(main()) == [(b"0", 1), (b"1", 1), (b"2", 1), (b"1", 2), (b"2", 2)]


def test_buckets_watches_transactions_and_ordered_reading_work() -> None:
    async def main() -> None:
        async with jetspark.connect("nats://model") as nc:
            js = nc.jetstream()
            kv = await js.create_kv(KVConfig(bucket="b", history=3))
            revision = await kv.put("a", b"1")
            await kv.update("a", b"2", revision=revision)
            with pytest.raises(jetspark.Conflict):
                await kv.update("a", b"3", revision=revision)
            await kv.put("b", b"x")
            await kv.delete("b")
            async with kv.transaction() as tx:
                await tx.put("c", b"3")
                await tx.put("d", b"4")
            assert [key async for key in kv.keys()] == ["a", "c", "d"]  # noqa: SIM118
            assert [entry.value for entry in await kv.history("a")] == [b"1", b"2"]
            assert {key: entry.value for key, entry in (await kv.snapshot(["a", "c"])).items()} == {
                "a": b"2",
                "c": b"3",
            }
            stream = await js.create_stream(StreamConfig(name="S", subjects=["s.>"], allow_batched=True))
            async with js.fast_publisher(message_ids=True) as publisher:
                for number in range(1000):
                    await publisher.publish("s.a", b"%d" % number)
            count = 0
            async for message in stream.ordered_consumer(start_sequence=1).messages():
                assert message.data == b"%d" % count
                count += 1
                if count == 1000:
                    break

    run_in_virtual_time(main())


def test_a_killed_server_comes_back_with_what_it_has_stored() -> None:
    async def main() -> list[int]:
        async with jetspark.connect("nats://model") as nc:
            js = nc.jetstream()
            await js.create_stream(StreamConfig(name="S", subjects=["s.>"]))
            first = await js.publish("s.a", b"1", msg_id="1")
            loop().network.kill_server(5)
            await asyncio.sleep(1)
            with pytest.raises(jetspark.NetworkError):
                await js.publish("s.a", b"2", msg_id="2", timeout=2)
            await asyncio.sleep(20)
            return [first.sequence, (await js.publish("s.a", b"2", msg_id="2")).sequence]

    assert run_in_virtual_time(main()) == [1, 2]


def test_the_same_seed_is_the_same_course_of_events() -> None:
    async def main() -> list[float]:
        async with jetspark.connect("nats://model", request_timeout_s=60) as nc:
            js = nc.jetstream()
            await js.create_stream(StreamConfig(name="S", subjects=["s.>"]))
            times = []
            for number in range(20):
                await js.publish("s.a", b"%d" % number)
                times.append(loop().time())
            return times

    first, again, other = (run_in_virtual_time(main(), model_network(seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_waiting_for_what_never_happens_is_an_error() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="never happens"):
        run_in_virtual_time(main())


def test_the_model_offers_no_tls() -> None:
    async def main() -> None:
        async with jetspark.connect("tls://model", connect_timeout_s=1):
            pass

    with pytest.raises(jetspark.JetSparkError, match="does not offer TLS"):
        run_in_virtual_time(main())


def test_nothing_of_a_killed_process_runs() -> None:
    done: list[str] = []

    async def work() -> None:
        async with jetspark.connect("nats://model") as nc:
            try:
                js = nc.jetstream()
                await js.create_stream("S")
                await js.publish("S", b"one")
                await nc.publish("S", b"two")
                done.append("begun")
                await asyncio.sleep(10)
                done.append("slept")
            finally:
                done.append("farewell")
                await nc.publish("S", b"farewell")

    async def main() -> None:
        process = VirtualProcess(loop())
        task = process.start(work())
        async with jetspark.connect("nats://model") as nc:
            await asyncio.sleep(1.0)
            process.kill()
            await asyncio.sleep(1000)
            assert done == ["begun"]
            assert not task.done()
            assert (await (await nc.jetstream().stream("S")).info()).state.messages == 2  # what was written arrived
            assert loop().network.front.sessions == 1
            await process.clean_up()
            assert done == ["begun", "farewell"]
            assert task.done()
            assert (await (await nc.jetstream().stream("S")).info()).state.messages == 2

    run_in_virtual_time(main())


def test_a_process_that_kills_itself_gets_no_further() -> None:
    done: list[str] = []

    async def work(process: list[VirtualProcess]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(count())
            await asyncio.sleep(1.5)
            process[0].kill()
            await asyncio.get_running_loop().create_future()

    async def count() -> None:
        while True:
            done.append("tick")
            await asyncio.sleep(1.0)

    async def main() -> None:
        process = [VirtualProcess(loop())]
        process[0].start(work(process))
        await asyncio.sleep(100)
        assert done == ["tick", "tick"]
        await process[0].clean_up()

    run_in_virtual_time(main())


@pytest.mark.parametrize("seed", range(5))
def test_no_timer_begins_before_its_time(seed: int) -> None:
    """One that did would find nothing to do, be set again for the same time, and time would stand still."""
    rng, early = random.Random(seed), list[float]()

    async def wait(loop: asyncio.AbstractEventLoop, when: float) -> None:
        due = loop.create_future()
        loop.call_at(when, due.set_result, None)
        await due
        if loop.time() < when:
            early.append(when - loop.time())

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(100):
                moment = loop.time() + rng.uniform(0, 20)
                for after_s in (0.0, 3e-7, 6e-7, 2e-6):
                    tasks.create_task(wait(loop, moment + after_s))
                await asyncio.sleep(rng.uniform(0, 0.01))

    run_in_virtual_time(main())
    assert early == []
