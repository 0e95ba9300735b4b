"""What users are told when something is not as they think: soon, by name, and with what to do about it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from support.drivers import Driver, on_both_drivers

from jetspark import JetStreamUnavailable
from jetspark.server import NatsServer

# Nothing here may take longer. What it found took 25 seconds and more.
SOON_S = 8.0


@pytest.fixture(scope="module", params=["JetStream off", "no stream"])
def nowhere(request: pytest.FixtureRequest) -> Iterator[NatsServer]:
    """A server that stores nothing that is published to it."""
    with NatsServer(jetstream=request.param == "no stream") as server:
        yield server


# ---- publishing where nothing is stored ------------------------------------------------------------------------------


async def _publish(js: Any) -> None:
    await js.publish("nowhere.a", b"1")


async def _publish_async(js: Any) -> None:
    future = await js.publish_async("nowhere.a", b"1")
    await (future if isinstance(future, asyncio.Future) else future.result())


async def _atomic(js: Any) -> None:
    async with js.atomic_batch() as batch:
        await batch.add("nowhere.a", b"1")
        await batch.add("nowhere.a", b"2")


async def _fast_failing(js: Any) -> None:
    async with js.fast_batch(gap="fail") as batch:
        await batch.add("nowhere.a", b"1")
        await batch.add("nowhere.a", b"2")


async def _fast_with_gaps(js: Any) -> None:
    async with js.fast_batch(gap="ok") as batch:
        await batch.add_many(("nowhere.a", b"1") for _ in range(1000))


async def _fast_of_one(js: Any) -> None:
    async with js.fast_batch() as batch:
        await batch.commit("nowhere.a", b"1")


async def _fast_publisher(js: Any) -> None:
    async with js.fast_publisher() as publisher:
        await publisher.publish("nowhere.a", b"1")


async def _fast_publisher_with_ids(js: Any) -> None:
    async with js.fast_publisher(message_ids=True) as publisher:
        await publisher.publish_many(("nowhere.a", b"1") for _ in range(20_000))  # more than it keeps


PUBLISHERS: list[Callable[[Any], Awaitable[None]]] = [
    _publish,
    _publish_async,
    _atomic,
    _fast_failing,
    _fast_with_gaps,
    _fast_of_one,
    _fast_publisher,
    _fast_publisher_with_ids,
]


@on_both_drivers
async def test_publishers_whose_messages_no_stream_stores_say_so_within_seconds(
    driver: Driver, nowhere: NatsServer
) -> None:
    async with driver.connect(nowhere.url) as nc, asyncio.timeout(SOON_S):
        outcomes = await asyncio.gather(*(publish(nc.jetstream()) for publish in PUBLISHERS), return_exceptions=True)
    told = {publish.__name__: outcome for publish, outcome in zip(PUBLISHERS, outcomes, strict=True)}
    for name, outcome in told.items():
        assert isinstance(outcome, JetStreamUnavailable), (name, outcome)
        assert outcome.subject == "nowhere.a", name
