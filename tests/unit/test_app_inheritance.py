"""What a worker expects of others, on the model server and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from jetspark import ConsumerConfig, StreamConfig, connect
from jetspark.app.handlers.inheritance import await_inherited, expect_inherited
from jetspark.app.handlers.machine import HandlerLimits, HandlerMachine
from jetspark.app.handlers.retry import RetryPolicy
from jetspark.jetstream.info import ConsumerInfo, StoredMessage
from jetspark.testing import run_in_virtual_time

if TYPE_CHECKING:
    from jetspark.app.handlers.inheritance import ReadKey


async def nothing() -> None:
    pass


def test_each_event_that_another_worker_keeps_is_waited_for_by_itself() -> None:
    """One that is expected later, when the first is given up, has its whole time: two ack_waits."""

    async def main() -> list[list[int]]:
        async with connect("nats://model:4222") as client:
            js = client.jetstream()
            stream = await js.create_stream(StreamConfig(name="S", subjects=["s"]))
            consumer = await stream.create_consumer(ConsumerConfig(durable_name="c", ack_wait_s=36_000.0))
            for _ in range(2):
                await js.publish("s", b"")
            assert len(await consumer.fetch(2)) == 2  # another worker, which does nothing
            machine = HandlerMachine(HandlerLimits(ack_wait_s=30.0, timeout_s=5.0), RetryPolicy(), lambda: 0.0)
            expected: dict[int, int] = {}
            seen = []
            for sequence, key in ((1, "a"), (2, "b")):
                machine.expect(key, sequence, asyncio.get_running_loop().time())
                expected[sequence] = sequence
                if sequence == 1:
                    settling = asyncio.create_task(
                        await_inherited(machine, consumer, expected, set, (), nothing, lambda: None, gives_up=True)
                    )
                    await asyncio.sleep(50)
            for _ in range(3):
                seen.append(machine.lanes.expected)
                await asyncio.sleep(35)
            await settling
            return seen

    assert run_in_virtual_time(main()) == [[1, 2], [2], []]


def machine_of() -> HandlerMachine:
    return HandlerMachine(HandlerLimits(ack_wait_s=30.0, timeout_s=5.0), RetryPolicy(), lambda: 0.0)


def test_a_look_up_that_fails_half_way_leaves_no_expectation_behind() -> None:
    """Nothing would ever settle it: it held back its key for as long as the worker lived."""

    async def main() -> None:
        async with connect("nats://model:4222") as client:
            js = client.jetstream()
            stream = await js.create_stream(StreamConfig(name="S", subjects=["s"], allow_direct=True))
            consumer = await stream.create_consumer(ConsumerConfig(durable_name="c", ack_wait_s=36_000.0))
            for _ in range(3):
                await js.publish("s", b"")
            await consumer.fetch(3)  # another worker
            machine, seen = machine_of(), list[int]()

            async def read(message: StoredMessage) -> tuple[int, str]:
                if seen == [1]:
                    raise ConnectionError("lost in the middle")
                seen.append(message.sequence)
                return message.sequence, "a"

            @asynccontextmanager
            async def reading(info: ConsumerInfo) -> AsyncIterator[ReadKey]:
                yield read

            with pytest.raises(ConnectionError):
                await expect_inherited(machine, consumer, stream, reading)
            assert (seen, machine.lanes.expected) == ([1], [])
            seen.append(0)
            assert await expect_inherited(machine, consumer, stream, reading) == {1: 1, 2: 2, 3: 3}
            assert machine.lanes.expected == [1, 2, 3]

    run_in_virtual_time(main())


def test_an_event_counts_as_settled_when_the_floor_has_passed_it_or_all_that_is_pending_is_held() -> None:
    """What is held counts as pending only if the server has delivered it, to this worker alone."""

    async def main() -> None:
        async with connect("nats://model:4222") as client:
            js = client.jetstream()
            stream = await js.create_stream(StreamConfig(name="S", subjects=["s"]))
            consumer = await stream.create_consumer(ConsumerConfig(durable_name="c", ack_wait_s=36_000.0))
            for _ in range(6):
                await js.publish("s", b"")
            first, second, third, fourth, fifth = await consumer.fetch(5)
            machine = machine_of()  # its ack_wait is 30 s
            held, lapsed = set[tuple[int, bool]](), set[int]()
            expected = {1: 1, 3: 3, 5: 5, 6: 6}
            for sequence, key in ((1, "a"), (3, "b"), (5, "c"), (6, "d")):
                machine.expect(key, sequence, asyncio.get_running_loop().time())
            settling = asyncio.create_task(
                await_inherited(
                    machine, consumer, expected, lambda: held, lapsed, nothing, lambda: None, gives_up=False
                )
            )

            async def left_after(seconds: float) -> list[int]:
                await asyncio.sleep(seconds)
                return machine.lanes.expected

            # Two are pending. A restarted server has yet to deliver 7 and 8, which are held from before.
            await second.ack()
            await third.ack()
            await fourth.ack()
            held = {(7, True), (8, True)}
            assert await left_after(100) == [1, 3, 5, 6]
            # Another worker may have acknowledged one that was delivered again; but not all the time.
            held = {(2, False), (4, False)}
            assert await left_after(25) == [1, 3, 5, 6]
            held = {(2, False)}
            assert await left_after(25) == [1, 3, 5, 6]
            await first.ack()  # the floor
            assert await left_after(5) == [5, 6]
            held = {(5, True)}  # in the hands of this worker, as is all that is pending
            assert await left_after(5) == [6]  # it is still to be delivered
            held = set()
            await fifth.ack()
            [sixth] = await consumer.fetch(1)
            assert await left_after(5) == [6]
            await sixth.ack()
            await settling
            assert (machine.lanes.expected, expected) == ([], {})

    run_in_virtual_time(main())


def test_a_floor_that_stays_behind_holds_back_no_key_for_longer_than_an_ack_wait() -> None:
    async def main() -> None:
        async with connect("nats://model:4222") as client:
            js = client.jetstream()
            stream = await js.create_stream(StreamConfig(name="S", subjects=["s"]))
            consumer = await stream.create_consumer(ConsumerConfig(durable_name="c", ack_wait_s=36_000.0))
            for _ in range(3):
                await js.publish("s", b"")
            _, second, _ = await consumer.fetch(3)
            await second.ack()
            machine, expected = machine_of(), {2: 2, 3: 3}
            for sequence, key in ((2, "a"), (3, "b")):
                machine.expect(key, sequence, asyncio.get_running_loop().time())
            held, lapsed = {(1, False)}, {3}  # the first is held for long; the third comes again
            settling = asyncio.create_task(
                await_inherited(
                    machine, consumer, expected, lambda: held, lapsed, nothing, lambda: None, gives_up=False
                )
            )
            await asyncio.sleep(29)
            assert machine.lanes.expected == [2, 3]
            await asyncio.sleep(3)
            assert machine.lanes.expected == [3]
            await asyncio.sleep(100)
            assert machine.lanes.expected == [3]
            held = {(1, False), (3, False)}
            machine.lanes.gone(3)  # it has come
            await settling

    run_in_virtual_time(main())
