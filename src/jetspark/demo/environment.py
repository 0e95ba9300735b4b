"""The server of the demo: its own, or a given one, whose other streams and buckets it does not touch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jetspark.aio.client import Client
from jetspark.aio.connector import connect
from jetspark.app.topology.declared import OWNER
from jetspark.errors import ConfigError
from jetspark.server import NatsServer

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app import App

__all__ = ["DemoEnvironment", "open_environment", "remove_all"]

TIMEOUT_S = 30.0
"""Time limit of each request; long enough for the restart of a killed server."""


@dataclass(frozen=True, slots=True)
class DemoEnvironment:
    """A server, and a connection to it."""

    url: str
    client: Client
    js: JetStream
    server: NatsServer | None
    """The demo's own server, which may be killed; None for a given server."""


@asynccontextmanager
async def open_environment(app: App, servers: str | None) -> AsyncIterator[DemoEnvironment]:
    """Connect; at the end, also after an error, remove the demo's streams and buckets.

    Raises:
        ConfigError: The server already has streams or buckets with the demo's names; nothing was changed.
    """
    if servers is None:
        async with NatsServer() as server, connect(server.url) as client:
            yield DemoEnvironment(server.url, client, client.jetstream(timeout=TIMEOUT_S), server)
        return
    async with connect(servers) as client:
        js = client.jetstream(timeout=TIMEOUT_S)
        await _refuse_what_is_there(js, app, servers)
        try:
            yield DemoEnvironment(servers, client, js, None)
        finally:
            await remove_all(js, app)


async def remove_all(js: JetStream, app: App) -> list[str]:
    """Delete the streams and buckets whose metadata name the application as owner; returns their names."""
    names = [info.config.name async for info in js.streams() if (info.config.metadata or {}).get(OWNER) == app.name]
    for name in names:
        await js.delete_stream(name)
    return names


async def _refuse_what_is_there(js: JetStream, app: App, servers: str) -> None:
    topology = app.topology()
    wanted = {stream.name for stream in topology.streams} | {f"KV_{each.bucket}" for each in topology.buckets}
    subjects = [subject for stream in topology.streams for subject in stream.subjects or ()]
    of_demos = {info.config.name async for info in js.streams() if (info.config.metadata or {}).get(OWNER) == app.name}
    taken = {name async for name in js.stream_names() if name in wanted}
    for subject in subjects:
        taken |= {name async for name in js.stream_names(subject)}
    if of_others := taken - of_demos:
        raise ConfigError(
            f"{servers} has {', '.join(sorted(of_others))}, which the demo did not create, but whose names or subjects "
            "it needs: give --servers another server, or leave it out to start one"
        )
    if of_demos:
        raise ConfigError(
            f"{servers} has {', '.join(sorted(of_demos))}: another demo is running there, or one was killed. "
            f"`jetspark demo --servers {servers} --remove` removes the streams and buckets of a killed demo"
        )
