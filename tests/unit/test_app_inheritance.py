"""What a worker expects of others, on the model server and in virtual time."""

from __future__ import annotations

import asyncio

from jetspark import ConsumerConfig, StreamConfig, connect
from jetspark.app.handlers.inheritance import settle_inherited
from jetspark.app.handlers.machine import HandlerLimits, HandlerMachine
from jetspark.app.handlers.retry import RetryPolicy
from jetspark.testing import run_in_virtual_time


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
                        settle_inherited(machine, consumer, expected, set, nothing, lambda: None, gives_up=True)
                    )
                    await asyncio.sleep(50)
            for _ in range(3):
                seen.append(machine.lanes.expected)
                await asyncio.sleep(35)
            await settling
            return seen

    assert run_in_virtual_time(main()) == [[1, 2], [2], []]
