"""A client that leaves nothing on the server of a file."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import jetspark
from jetspark.aio.jetstream import JetStream
from jetspark.server import NatsServer


@pytest.fixture
async def js(server: NatsServer) -> AsyncIterator[JetStream]:
    async with jetspark.connect(server.url) as client:
        js = client.jetstream()
        yield js
        for name in [name async for name in js.stream_names()]:
            await js.delete_stream(name)
