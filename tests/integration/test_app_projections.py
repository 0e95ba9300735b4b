"""Live projections on a real server."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator

import pytest
from support.apps import publish, running, set_up, until
from support.projections import bank, folded, in_buckets, in_stream, parked, some_events

import jetspark
from jetspark.aio.jetstream import JetStream
from jetspark.app import App
from jetspark.app.redriving import LetterFilter, read_letters
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


async def is_folded(js: JetStream, app: App) -> bool:
    """Every bucket has what a plain loop over the stream makes."""
    expected, _ = folded(app, await in_stream(js, app))
    return await in_buckets(js, app) == expected


async def test_events_are_folded_into_every_projection(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    events = some_events(random.Random(2), 300)
    await publish(js, app, *events[:150])
    async with running(app, server.url):
        await until(lambda: is_folded(js, app))
        await publish(js, app, *events[150:])
        await until(lambda: is_folded(js, app))
    expected, letters = folded(app, await in_stream(js, app))
    assert await in_buckets(js, app) == expected
    assert parked(expected["balances"])  # some of the events cannot be applied
    found = await read_letters(js, app, LetterFilter())
    assert [each.letter.origin.sequence for each in found] == letters
    assert {each.letter.handler for each in found} == {"projections"}
