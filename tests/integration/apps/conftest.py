"""A server for the applications of a file, and a client that leaves nothing on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

import jetspark
from jetspark.aio.jetstream import JetStream
from jetspark.server import NatsServer


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture
async def js(server: NatsServer) -> AsyncIterator[JetStream]:
    async with jetspark.connect(server.url) as client:
        js = client.jetstream()
        yield js
        for name in [name async for name in js.stream_names()]:
            await js.delete_stream(name)
