"""Projections whose keys are shared by several processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from unittest import mock

from support.apps import publish, set_up, until
from support.projections import bank, folded, in_buckets, in_stream, some_events

import jetspark
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, LiveOptions
from jetspark.app.projections.leases import Lease, all_partitions, partition_lease
from jetspark.app.projections.projection_worker import ProjectionWorker
from jetspark.app.replay import RebuildOptions, rebuild, repair_keys, verify
from jetspark.server import NatsServer

OPTIONS = LiveOptions(partitions=4, lease_s=1.0, position_every_s=0.02)


class Process:
    """A worker with a connection of its own."""

    def __init__(self, worker: ProjectionWorker, client: jetspark.Client) -> None:
        self.worker, self._client = worker, client
        self.task = asyncio.create_task(worker.run())

    async def kill(self) -> None:
        """Nothing is stored, and nothing is given back."""
        with mock.patch.object(Lease, "release", mock.AsyncMock()):
            self.task.cancel()
            await asyncio.wait([self.task])
        await self._client.close()

    async def stop(self) -> None:
        await self.worker.stop(self.task, 5.0)
        await self._client.close()


@asynccontextmanager
async def process(server: NatsServer, app: App) -> AsyncIterator[Process]:
    client = await jetspark.connect(server.url)
    specs = list(app.projections.values())
    found = Process(
        ProjectionWorker(app.spec, specs, client.jetstream(), catalogue=app.catalogue, options=OPTIONS), client
    )
    try:
        yield found
    finally:
        with suppress(Exception):
            await found.stop()


async def is_folded(js: JetStream, app: App, buckets: dict[str, str] | None = None) -> bool:
    expected, _ = folded(app, await in_stream(js, app))
    return await in_buckets(js, app, buckets) == expected


async def owners(js: JetStream) -> dict[str, str]:
    entries = (await (await js.kv("bank_projections")).snapshot(["lease.*"])).values()
    return {entry.key: entry.value.decode() for entry in entries if entry.operation == "put"}


async def are_shared(js: JetStream, count: int) -> bool:
    found = await owners(js)
    return len(found) == 4 and len(set(found.values())) == count


async def test_keys_are_shared_by_processes_and_taken_over_without_loss(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    rng = random.Random(3)
    async with process(server, app) as one:
        await publish(js, app, *some_events(rng, 60, accounts=40, is_bad=False))
        await until(lambda: is_folded(js, app))
        await until(lambda: are_shared(js, 1))
        async with process(server, app) as other:
            await until(lambda: are_shared(js, 2))
            await publish(js, app, *some_events(rng, 100, accounts=40, is_bad=False))
            await until(lambda: is_folded(js, app))
            await until(lambda: min(one.worker.counts.stored, other.worker.counts.stored) > 0)
            await one.kill()
            await publish(js, app, *some_events(rng, 60, accounts=40))
            await until(lambda: is_folded(js, app))
            await until(lambda: are_shared(js, 1))
            found = await verify(js, app, "balances")
            assert found.is_equal
            async with app.connect(server.url) as client:
                ack = await client.publish(some_events(rng, 1, is_bad=False)[0])
                await client.view("moves").get("nobody", at_least=ack.sequence)  # the position of the bucket gets there


async def test_a_repair_and_a_swap_reach_every_process(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    rng = random.Random(4)
    async with process(server, app), process(server, app):
        await until(lambda: are_shared(js, 2))
        await publish(js, app, *some_events(rng, 120, accounts=12))
        await until(lambda: is_folded(js, app))
        await repair_keys(js, app, "balances", [f"a{number}" for number in range(12)])
        await publish(js, app, *some_events(rng, 50, accounts=12))
        done = await rebuild(js, app, "balances", RebuildOptions(check=True, swap=True))
        assert done.is_swapped
        await publish(js, app, *some_events(rng, 50, accounts=12))
        await until(lambda: is_folded(js, app, {"balances": "bank_balances_v1"}))
        assert (await verify(js, app, "balances")).is_equal


def test_a_lease_of_a_partition_names_the_others() -> None:
    lease = partition_lease("balances+moves", 2, 3)
    assert lease in all_partitions(lease)
    assert len(set(all_partitions(lease))) == 3
    assert all_partitions("lease.balances") == ["lease.balances"]
