"""Fast ingest on three nodes: leaders step down and die under it, and what is stored stays exact."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.cluster import bring_back, create_on_new_cluster, leading_node
from support.drivers import Driver, on_both_drivers

import jetspark
from jetspark import StreamConfig
from jetspark.server import NatsCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Sent at full speed, which takes some seconds: the first faults come meanwhile.
MESSAGES = 30_000
FAULTS = {"step-down": 6, "kill": 2}


async def _stored(stream: Any, expected: int) -> list[int]:
    stored: list[int] = []
    async with asyncio.timeout(60):
        while len(stored) < expected:  # any replica may answer, and one may be a moment behind
            stored = [int(message.data) async for message in stream.get_messages()]
    return stored


@contextlib.asynccontextmanager
async def _meanwhile(work: Any) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _step_down_now_and_then(stream: Any, count: list[int]) -> None:
    while True:
        await asyncio.sleep(0.5)
        with contextlib.suppress(jetspark.JetSparkError):
            await stream.step_down()
            count[0] += 1


async def _kill_leader_twice(cluster: NatsCluster, stream: Any, count: list[int]) -> None:
    while count[0] < FAULTS["kill"]:
        await asyncio.sleep(0.7)
        node = await leading_node(cluster, stream)
        await asyncio.to_thread(node.kill)
        count[0] += 1
        await bring_back(cluster, node)


@pytest.mark.parametrize(
    ("driver", "fault", "message_ids"),
    [
        ("asyncio", "step-down", False),
        ("asyncio", "kill", False),
        ("asyncio", "kill", True),
        ("blocking", "step-down", True),
        ("blocking", "kill", False),
    ],
    indirect=["driver"],
)
@on_both_drivers
async def test_a_fast_publisher_stores_everything_once_and_in_order_whatever_leaders_do(
    driver: Driver, cluster: NatsCluster, fault: str, message_ids: bool
) -> None:
    name = f"FAST_{driver.name}_{fault}_{message_ids}"
    async with driver.connect(cluster.urls) as nc, jetspark.connect(cluster.urls) as admin:
        stream = await admin.jetstream(timeout=20).create_stream(
            StreamConfig(name=name, subjects=[f"{name}.>"], replicas=3, allow_batched=True, allow_direct=True)
        )
        faults = [0]
        if fault == "kill":
            work = _kill_leader_twice(cluster, stream, faults)
        else:
            work = _step_down_now_and_then(stream, faults)
        publisher = nc.jetstream(timeout=5).fast_publisher(message_ids=message_ids)
        positions: list[int] = []
        sent = 0
        async with _meanwhile(work), publisher:
            while sent < MESSAGES or faults[0] < FAULTS[fault]:
                some = 5000 if sent < MESSAGES else 200  # enough is sent: the rest is for the faults to meet
                await publisher.publish_many([(f"{name}.n", b"%d" % number) for number in range(sent, sent + some)])
                sent += some
                positions.append(await _now(publisher.published))
                await asyncio.sleep(0 if sent < MESSAGES else 0.05)
            await publisher.flush()
        assert await _now(publisher.published) == sent
        assert positions == sorted(positions)
        stored = await _stored(stream, sent)
        if publisher.possibly_doubled:  # only where nobody could know, which is counted; ids exclude it
            assert not message_ids
            assert len(stored) - sent <= publisher.possibly_doubled
            stored = list(dict.fromkeys(stored))
        assert stored == list(range(sent))
        await stream.delete()


@pytest.mark.parametrize(
    ("driver", "goes_on"), [("asyncio", True), ("asyncio", False), ("blocking", False)], indirect=["driver"]
)
@on_both_drivers
async def test_a_leader_that_is_cut_off_is_not_believed_what_it_will_lose(
    driver: Driver, divisible: NatsCluster, goes_on: bool
) -> None:
    """It acknowledges what is sent to it again, as duplicates of what it could only propose."""
    async with jetspark.connect(divisible.urls) as admin:
        stream = await create_on_new_cluster(
            admin.jetstream(timeout=5),
            StreamConfig(name="CUT", subjects=["cut.>"], replicas=3, allow_batched=True, allow_direct=True),
        )
        node = await leading_node(divisible, stream)
        place = list(divisible.nodes).index(node)
        sent = 0
        async with (
            driver.connect(node.url) as nc,
            # Several batches are given up before the leader notices, after some ten seconds, that it is alone.
            nc.jetstream(timeout=5).fast_publisher(message_ids=True, batch_timeout_s=2.5) as publisher,
        ):

            async def publish() -> None:
                nonlocal sent
                await publisher.publish_many([("cut.n", b"%d" % number) for number in range(sent, sent + 5)])
                sent += 5

            for _ in range(20):
                await publish()
            await publisher.flush()
            await asyncio.to_thread(divisible.partition, place)
            cut_at = asyncio.get_running_loop().time()
            await publish()
            flushing = asyncio.ensure_future(publisher.flush(timeout=90))
            while asyncio.get_running_loop().time() < cut_at + 12:
                if goes_on:  # else what is sent again has nothing new behind it
                    await publish()
                await asyncio.sleep(0.02)
            await asyncio.to_thread(divisible.heal, place)
            await asyncio.to_thread(divisible.wait_until_ready)
            await flushing
            await publisher.flush(timeout=60)
        assert publisher.possibly_doubled == 0
        assert publisher.batches > 1
        assert await _stored(stream, sent) == list(range(sent))


async def _now(value: Any) -> Any:
    result = value()
    return await result if asyncio.iscoroutine(result) else result
