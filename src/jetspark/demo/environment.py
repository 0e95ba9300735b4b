"""Where the demo runs: a server of its own, or somebody else's, on which it leaves alone what is there."""

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
"""Of each request: a server that was killed is away for a moment."""


@dataclass(frozen=True, slots=True)
class DemoEnvironment:
    """A server, and a connection to it."""

    url: str
    client: Client
    js: JetStream
    server: NatsServer | None
    """The demo's own, which may be killed; None if it is somebody else's."""


@asynccontextmanager
async def open_environment(app: App, servers: str | None) -> AsyncIterator[DemoEnvironment]:
    """Connect, and remove what was made there at the end, however it comes.

    Raises:
        ConfigError: The server has something by the names that the demo uses; nothing was touched.
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
    """Delete the streams and buckets that say they are the application's; returns their names."""
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
            f"{servers} has {', '.join(sorted(of_others))}, whose names or subjects the demo needs, and which no demo "
            "has made: give --servers another server, or leave it out to start one"
        )
    if of_demos:
        raise ConfigError(
            f"{servers} has {', '.join(sorted(of_demos))}: another demo runs there, or one that was killed has left "
            f"it. `jetspark demo --servers {servers} --remove` removes what a demo has left"
        )
