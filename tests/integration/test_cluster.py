"""A real cluster of three: replicated streams, and what a lost or cut off node changes. nats-py is the witness."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from support.patience import PATIENCE_S

from jetspark.errors import ConfigError, UsageError
from jetspark.server import NatsCluster

# Electing a new leader takes the server up to some ten seconds, on a busy machine more.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ELECTION_S = 60.0


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[tuple[Client, JetStreamContext]]:
    async def ignore(_: Exception) -> None:
        """Lost connections are what these tests are about; nats-py would print them."""

    client = await nats.connect(url, error_cb=ignore, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
    try:
        yield client, client.jetstream(timeout=2.0)
    finally:
        await client.close()


async def eventually(attempt: Callable[[], Awaitable[Any]], within_s: float = ELECTION_S) -> Any:
    """Repeat ``attempt`` until it neither fails nor returns something false."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            if answer := await attempt():
                return answer
        except (nats.errors.Error, OSError):
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.05)


def index_of(name: str | None) -> int:
    assert name is not None
    return int(name.rpartition("-")[2])


def peers_of(cluster: NatsCluster, index: int) -> set[str]:
    routes = json.loads(cluster.nodes[index].monitor("/routez")[1])["routes"]
    return {route["remote_name"] for route in routes}


def messages_at(cluster: NatsCluster, index: int) -> int:
    """How many messages of stream S this very node has stored."""
    _, body = cluster.nodes[index].monitor("/jsz?streams=true&accounts=true")
    for account in json.loads(body).get("account_details", ()):
        for stream in account.get("stream_detail", ()):
            if stream["name"] == "S":
                return int(stream["state"]["messages"])
    return 0


async def publish(js: JetStreamContext, count: int) -> None:
    for number in range(count):
        # The id makes a repeated publish after a lost answer harmless.
        identity = {"Nats-Msg-Id": f"{time.monotonic_ns()}-{number}"}

        async def attempt(headers: dict[str, str] = identity) -> Any:
            return await js.publish("s", b"x", headers=headers)

        await eventually(attempt)


async def test_a_replicated_stream_can_be_created_as_soon_as_the_cluster_is_started() -> None:
    async with NatsCluster(3) as cluster:
        assert len(set(cluster.urls)) == 3
        assert cluster.leader in (0, 1, 2)
        async with client_of(cluster.urls[0]) as (_, js):
            created = await js.add_stream(name="S", subjects=["s"], num_replicas=3)
            assert created.cluster is not None
            assert len(created.cluster.replicas or []) == 2
            await publish(js, 10)
        nodes = cluster.nodes
    assert not any(node.is_running for node in nodes)
    assert cluster.nodes == ()


async def test_the_others_go_on_without_a_killed_node_which_then_catches_up() -> None:
    async with NatsCluster(3) as cluster:
        async with client_of(cluster.urls[0]) as (_, js):
            created = await js.add_stream(name="S", subjects=["s"], num_replicas=3)
            assert created.cluster is not None
            victim = index_of(created.cluster.leader)
            await publish(js, 20)
        survivor = (victim + 1) % 3
        async with client_of(cluster.urls[survivor]) as (_, js):
            cluster.nodes[victim].kill()
            await publish(js, 30)
            info = await js.stream_info("S")
            assert info.state.messages == 50
            port = cluster.nodes[victim].port
            await asyncio.to_thread(cluster.nodes[victim].start)
            assert cluster.nodes[victim].port == port
            await asyncio.to_thread(cluster.wait_until_ready)
        assert [messages_at(cluster, index) for index in range(3)] == [50, 50, 50]


async def test_a_whole_cluster_comes_back_on_its_stores(tmp_path: Path) -> None:
    async with NatsCluster(3, store_dir=tmp_path) as cluster:
        urls = cluster.urls
        async with client_of(urls[0]) as (_, js):
            await js.add_stream(name="S", subjects=["s"], num_replicas=3)
            await publish(js, 5)
        await asyncio.to_thread(cluster.stop)
        await asyncio.to_thread(cluster.start)
        assert cluster.urls == urls
    async with NatsCluster(3, store_dir=tmp_path) as again, client_of(again.urls[0]) as (_, js):
        info = await eventually(lambda: js.stream_info("S"))
        assert info.state.messages == 5


async def test_a_cut_off_leader_is_replaced_and_rejoins_with_nothing_lost() -> None:
    async with NatsCluster(3, partitionable=True) as cluster:
        async with client_of(cluster.urls[0]) as (_, js):
            created = await js.add_stream(name="S", subjects=["s"], num_replicas=3)
            assert created.cluster is not None
            lonely = index_of(created.cluster.leader)
            await publish(js, 10)
        for _ in range(2):  # Twice: nodes must not have found a way past the links in between.
            cluster.partition(lonely)
            others = [index for index in range(3) if index != lonely]

            async def is_alone(index: int = lonely) -> bool:
                return not peers_of(cluster, index)

            await eventually(is_alone)
            async with client_of(cluster.urls[lonely]) as (client, js):
                assert client.is_connected  # Clients still reach it; it just cannot get a majority.
                with pytest.raises(nats.errors.Error):
                    await js.publish("s", b"lost", timeout=1.0)
            async with client_of(cluster.urls[others[0]]) as (_, js):
                await publish(js, 10)
                info = await eventually(partial(js.stream_info, "S"))
                assert index_of(info.cluster.leader) in others
                expected = info.state.messages
            assert not peers_of(cluster, lonely)
            cluster.heal(lonely)

            async def is_whole(index: int = lonely, messages: int = expected) -> bool:
                return len(peers_of(cluster, index)) == 2 and messages_at(cluster, index) == messages

            await eventually(is_whole)
            await asyncio.to_thread(cluster.wait_until_ready)
        counts = [messages_at(cluster, index) for index in range(3)]
        assert counts == [30, 30, 30]


async def test_a_node_killed_while_cut_off_comes_back_cut_off_until_healed() -> None:
    async with NatsCluster(3, partitionable=True) as cluster:
        cluster.partition(2)
        await asyncio.to_thread(cluster.nodes[2].kill)
        await asyncio.to_thread(cluster.nodes[2].start)
        await asyncio.to_thread(cluster.wait_until_ready)  # The two that are left.
        assert not peers_of(cluster, 2)
        cluster.heal(2)
        await asyncio.to_thread(cluster.wait_until_ready)
        assert len(peers_of(cluster, 2)) == 2


def test_cutting_takes_a_cluster_made_for_it() -> None:
    with NatsCluster(2) as cluster, pytest.raises(UsageError, match="partitionable=True"):
        cluster.partition(0)
    with NatsCluster(2, partitionable=True) as cluster, pytest.raises(ConfigError, match="index=2: expected 0 to 1"):
        cluster.partition(2)


def test_every_node_ends_when_the_program_is_killed() -> None:
    code = """
        import time
        from jetspark.server import NatsCluster
        cluster = NatsCluster(3, partitionable=True).start()
        print(*(node.pid for node in cluster.nodes), flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        pids = child.stdout.readline().split()
        child.kill()
    assert len(pids) == 3
    deadline = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
