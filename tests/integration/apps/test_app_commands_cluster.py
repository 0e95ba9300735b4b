"""Commands on a cluster whose stream changes its leader, with workers that are killed all the time.

The small version runs always. The large one has 64 callers with ten thousand commands on one boundary, and transfers
between a thousand accounts, with a worker killed every two seconds::

    JETSPARK_MANY_COMMANDS=10000 python -m pytest -s tests/integration/apps/test_app_commands_cluster.py
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from support.accounts import (
    Booked,
    BrokenBooks,
    Enter,
    Entered,
    OpenAccount,
    Transfer,
    bank,
    check_books,
    ledger_model,
)
from support.beside import beside
from support.cluster import create_on_new_cluster, kill_leader
from support.commands import are_serving, served, start_worker
from support.linear import Entry, Operation, check_linearizable

import jetspark
from jetspark import StreamConfig
from jetspark.app import App, AppClient, Refused, decode
from jetspark.errors import JetSparkError
from jetspark.server import NatsCluster

MANY = int(os.environ.get("JETSPARK_MANY_COMMANDS", "0"))
COMMANDS, CALLERS, WORKERS, ACCOUNTS = (MANY, 64, 6, 1000) if MANY else (120, 16, 2, 20)
KILL_EVERY_S = 2.0
LEADER_EVERY_S = 5.0 if MANY else 1.2


class Trouble:
    """Workers that are killed and replaced, and leaders that step down or are killed, until the block ends."""

    def __init__(self, cluster: NatsCluster, app: App, *, kills_nodes: bool = False) -> None:
        self._cluster, self._kills_nodes = cluster, kills_nodes
        self.urls = [node.url for node in cluster.nodes]
        self.app = app
        self.kills = self.elections = self.nodes = 0
        self.has_begun = asyncio.Event()
        """A worker was killed, a leader has stepped down, and one was killed if that is asked for."""
        self._workers: list[BaseProcess] = []
        self._killing: asyncio.Task[None] | None = None
        """Kills a node, and ends when it is back."""
        self._rng = random.Random(5)

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[Trouble]:
        for number in range(WORKERS):
            self._start(number)
        await are_serving(self.urls, self.app.name, WORKERS)
        async with jetspark.connect(self.urls) as nc:
            stream = await nc.jetstream().stream(self.app.stream)
            try:
                async with beside(self._kill_workers(), self._change_leaders(stream)):
                    yield self
            finally:
                for process in self._workers:
                    process.kill()
                    process.join()
                if self._killing is not None:
                    await self._killing  # the next test needs the node, too

    def _start(self, number: int) -> None:
        first = number % 3  # and the others, if that one is dead just now
        self._workers.append(start_worker(self.urls[first:] + self.urls[:first], self.app.name, replicas=3))

    async def _kill_workers(self) -> None:
        while True:
            if MANY:
                await asyncio.sleep(KILL_EVERY_S)
            self._start(self._rng.randrange(3))
            if not MANY:  # on a busy machine a process takes seconds to start, and these are few
                await are_serving(self.urls, self.app.name, WORKERS + 1)
            process = self._workers.pop(0)
            process.kill()
            process.join()
            self.kills += 1
            self._note()

    async def _change_leaders(self, stream: jetspark.Stream) -> None:
        while True:
            await asyncio.sleep(LEADER_EVERY_S)
            with contextlib.suppress(JetSparkError):
                await stream.step_down()
                self.elections += 1
            if self._kills_nodes and (MANY or not self.nodes):
                self._killing = asyncio.create_task(kill_leader(self._cluster, stream))
                await asyncio.shield(self._killing)
                self.nodes += 1
            self._note()

    def _note(self) -> None:
        if self.kills and self.elections and (self.nodes or not self._kills_nodes):
            self.has_begun.set()


async def answered(client: AppClient, command: Any, id: str) -> Any:
    """The reply, however often it has to be asked for."""
    while True:
        try:
            return await client.call(command, command_id=id, timeout=10.0 if MANY else 2.0)
        except (jetspark.NetworkError, jetspark.BoundaryConflict):
            await asyncio.sleep(0.05)


@asynccontextmanager
async def set_up(cluster: NatsCluster, name: str) -> AsyncIterator[tuple[App, AppClient]]:
    app = bank(name, replicas=3)
    urls = [node.url for node in cluster.nodes]
    async with jetspark.connect(urls) as nc:
        await create_on_new_cluster(nc.jetstream(), StreamConfig(name=f"WARM_{name}", replicas=3))
    await app.apply(urls)
    async with app.connect(urls) as client:
        yield app, client
        await client.js.delete_stream(app.stream)  # the next one has the same subjects


@pytest.mark.slow
@pytest.mark.timeout(3000 if MANY else 300)
async def test_callers_of_one_boundary_see_one_order_whatever_dies(cluster: NatsCluster) -> None:
    rng, operations, began = random.Random(11), list[Operation](), time.monotonic()
    async with set_up(cluster, "ledger") as (app, client):
        trouble = Trouble(cluster, app)

        async def caller(number: int) -> None:
            for count in range(COMMANDS // CALLERS):
                if count == COMMANDS // CALLERS // 2:
                    await trouble.has_begun.wait()
                id = f"c{number}-{count}"
                operation = Operation(id, Enter(ledger="x", writer=id), time.monotonic())
                operations.append(operation)
                for _ in range(rng.choice((1, 1, 1, 1, 2))):  # some ask again although they have the answer
                    operation.replies.append((await answered(client, operation.command, id)).data)
                    operation.returned = min(operation.returned, time.monotonic())

        async with trouble.going_on():
            await asyncio.gather(*map(caller, range(CALLERS)))
        took_s = time.monotonic() - began
        entries = []
        async for message in (await client.js.stream(app.stream)).get_messages(1):
            decoded = decode(message.subject, message.data, message.headers, app.catalogue)
            entries.append(Entry(decoded.causation_id or "", decoded.event.number))
    check_linearizable(operations, entries, ledger_model(len(operations) + 1), 0)
    retries = sum(len(each.replies) for each in operations) - len(operations)
    print(
        f"\n{len(entries)} commands of {CALLERS} callers on one boundary in {took_s:.0f} s, {retries} asked again, "
        f"{trouble.kills} workers killed, {trouble.elections} leaders changed: linearizable"
    )
    assert len(entries) == len(operations) == COMMANDS // CALLERS * CALLERS


@pytest.mark.slow
@pytest.mark.timeout(3000 if MANY else 300)
async def test_transfers_keep_the_sum_at_every_sequence_whatever_dies(cluster: NatsCluster) -> None:
    rng, began = random.Random(12), time.monotonic()
    names = [f"a{number}" for number in range(ACCOUNTS)]
    async with set_up(cluster, "transfers") as (app, client):
        trouble = Trouble(cluster, app, kills_nodes=True)

        async def caller(number: int) -> int:
            refused = 0
            for account in names[number::CALLERS]:
                await answered(client, OpenAccount(account=account, cents=100), f"open-{account}")
            await opened.wait()
            for count in range(COMMANDS // CALLERS):
                if count == COMMANDS // CALLERS // 2:
                    await trouble.has_begun.wait()
                source, target = rng.sample(names, 2)
                try:
                    command = Transfer(source=source, target=target, cents=rng.randint(1, 80))
                    await answered(client, command, f"t{number}-{count}")
                except Refused:
                    refused += 1
            return refused

        opened = asyncio.Barrier(CALLERS)
        async with trouble.going_on():
            refused = sum(await asyncio.gather(*map(caller, range(CALLERS))))
        took_s = time.monotonic() - began
        booked = []
        async for message in (await client.js.stream(app.stream)).get_messages(1):
            decoded = decode(message.subject, message.data, message.headers, app.catalogue)
            booked.append(Booked.of(message.sequence, decoded.causation_id or "", decoded.event))
    transfers, total = check_books(booked)
    print(
        f"\n{len(transfers)} transfers between {ACCOUNTS} accounts, {refused} refused, in {took_s:.0f} s, "
        f"{trouble.kills} workers and {trouble.nodes} nodes killed, {trouble.elections} leaders changed: the sum is "
        f"{total}"
    )
    assert total == ACCOUNTS * 100
    assert len(transfers) + refused == COMMANDS // CALLERS * CALLERS


def test_the_check_of_transfers_rejects_what_is_broken() -> None:
    good = [
        Booked(1, "open-a", "a", 100, True),
        Booked(2, "open-b", "b", 100, True),
        Booked(3, "t1", "a", -30, False),
        Booked(4, "t1", "b", 30, False),
        Booked(5, "t2", "b", -130, False),
        Booked(6, "t2", "a", 130, False),
    ]
    assert check_books(good) == ({"t1", "t2"}, 200)
    broken = {
        "is not whole": [*good[:3], *good[4:]],
        "t1 is not whole": [*good[:3], good[3]._replace(sequence=7)],
        "the sum is 199": [*good[:3], good[3]._replace(cents=29), *good[4:]],
        "b has -30": [*good[:4], good[4]._replace(cents=-160), good[5]],
        "decided twice": [*good, *(each._replace(sequence=each.sequence + 4) for each in good[2:4])],
        "or half": good[:5],
    }
    for words, wrong in broken.items():
        with pytest.raises(BrokenBooks, match=words):
            check_books(wrong)


@pytest.mark.slow
async def test_a_replicated_stream_does_not_overlook_a_plain_publish_below_the_wildcards(cluster: NatsCluster) -> None:
    """The server knows what is on its way by name only, so a guard on the wildcards alone may miss one of these."""
    urls = [node.url for node in cluster.nodes]
    async with set_up(cluster, "mixed") as (app, _), served(app, urls[0], workers=2) as client:
        is_over, published, called = False, 0, 0

        async def publish() -> None:
            nonlocal published
            while not is_over:
                await client.publish(Entered(ledger="x", number=0, writer="plain"), timeout=10.0)
                published += 1
                await asyncio.sleep(rng.uniform(0.0, 0.05))

        rng, publishing = random.Random(3), [asyncio.create_task(publish()) for _ in range(2)]
        while published <= 10:  # a slow machine decides many commands before so much is published beside them
            numbers = range(called, called + 40)
            await asyncio.gather(*(answered(client, Enter(ledger="x", writer="w"), f"e-{each}") for each in numbers))
            called += 40
        is_over = True
        await asyncio.gather(*publishing)
        before = 0
        async for message in (await client.js.stream(app.stream)).get_messages(1):
            event = decode(message.subject, message.data, message.headers, app.catalogue).event
            before += 1
            assert event.number in (0, before), (
                f"{event} was decided on {event.number - 1} events, and there were {before - 1}"
            )
    assert before == published + called


@pytest.mark.slow
async def test_a_worker_that_starts_without_a_leader_waits_for_one(cluster: NatsCluster) -> None:
    async with set_up(cluster, "patient") as (app, client):
        alive, *dead = cluster.nodes
        for node in dead:
            await asyncio.to_thread(node.kill)
        running, cancelled = [asyncio.create_task(app.run(alive.url, request_timeout_s=0.5)) for _ in range(2)]
        await asyncio.wait([running, cancelled], timeout=2.0)
        assert not running.done()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        for node in dead:
            await asyncio.to_thread(node.start)
        await asyncio.to_thread(cluster.wait_until_ready)
        await are_serving(alive.url, app.name)
        assert (await answered(client, Enter(ledger="x", writer="w"), "c-1")).data == 1
        running.cancel()
        await asyncio.wait([running])
