"""Who leads, and what happens to those who do."""

from __future__ import annotations

import asyncio

import jetspark
from jetspark.app import App
from jetspark.server import NatsCluster, NatsServer


async def leader(of: jetspark.Stream | jetspark.Consumer) -> str:
    """Wait for one; its name."""
    async with asyncio.timeout(60):
        while True:
            try:
                info = await of.info()
                if info.cluster is not None and info.cluster.leader:
                    return info.cluster.leader
            except (jetspark.RequestTimeout, jetspark.JetStreamUnavailable, jetspark.ServerError):
                pass
            await asyncio.sleep(0.1)


async def create_on_new_cluster(js: jetspark.JetStream, config: jetspark.StreamConfig) -> jetspark.Stream:
    """On a busy machine a leader takes a node for offline (10005) until it hears of it again."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await js.create_stream(config)
            except (jetspark.RequestTimeout, jetspark.JetStreamUnavailable, jetspark.ServerError):
                await asyncio.sleep(0.2)


async def apply_on_new_cluster(app: App, urls: list[str]) -> None:
    """As :func:`create_on_new_cluster`, everything that an application declares."""
    async with asyncio.timeout(90):
        while True:
            try:
                await app.apply(urls)
                return
            except jetspark.JetSparkError as error:
                if not error.may_pass:
                    raise
                await asyncio.sleep(0.3)


async def leading_node(cluster: NatsCluster, of: jetspark.Stream | jetspark.Consumer) -> NatsServer:
    name = await leader(of)
    [node] = [node for node in cluster.nodes if node.config.server_name == name]
    return node


async def kill_leader(cluster: NatsCluster, stream: jetspark.Stream) -> None:
    """With SIGKILL; it is back when this returns."""
    node = await leading_node(cluster, stream)
    await asyncio.to_thread(node.kill)
    await bring_back(cluster, node)


async def bring_back(cluster: NatsCluster, node: NatsServer) -> None:
    await asyncio.sleep(0.5)
    await asyncio.to_thread(node.start)
    await asyncio.to_thread(cluster.wait_until_ready)
