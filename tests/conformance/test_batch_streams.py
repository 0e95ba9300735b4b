"""What batches ask of a stream's configuration, and what mirrors and sources make of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.drivers import Driver, on_both_drivers
from support.patience import PATIENCE_S

from jetspark import JetSparkError, ServerError, StreamConfig, StreamSource

_names = iter(f"B{number}" for number in range(1_000_000))


async def new_stream(js: Any, **config: Any) -> Any:
    name = next(_names)
    usual: dict[str, Any] = {"name": name, "subjects": [f"{name}.>"], "allow_direct": True}
    return await js.create_stream(StreamConfig(**(usual | config)))


@pytest.mark.parametrize(("option", "level"), [("allow_atomic", "2"), ("allow_batched", "4")])
@on_both_drivers
async def test_each_kind_is_switched_on_and_off_by_updates_and_requires_its_api_level(
    driver: Driver, url: str, option: str, level: str
) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        for value in (True, False, True):
            info = await stream.update(**{option: value})
            assert bool(getattr(info.config, option)) is value
        assert info.config.metadata["_nats.req.level"] == level


@on_both_drivers
async def test_both_kinds_may_be_on_at_the_same_time(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js, allow_atomic=True, allow_batched=True)
        async with js.atomic_batch() as batch, js.fast_batch() as fast:
            await batch.add(f"{stream.name}.a", b"atomic")
            await fast.add(f"{stream.name}.a", b"fast")
        assert batch.outcome == "stored"
        assert fast.stored == 1
        assert sorted([message.data async for message in stream.get_messages()]) == [b"atomic", b"fast"]


@on_both_drivers
async def test_asynchronous_persistence_excludes_atomic_batches_and_allows_fast_ones(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        with pytest.raises(ServerError, match="async persist mode is not supported with atomic batch publish"):
            await new_stream(js, persist_mode="async", allow_atomic=True)
        stream = await new_stream(js, persist_mode="async", allow_batched=True)
        with pytest.raises(ServerError, match="async persist mode"):
            await stream.update(allow_atomic=True)
        async with js.fast_batch() as fast:
            await fast.add_many([(f"{stream.name}.a", b"x")] * 2000)
        assert fast.stored == 2000


@pytest.mark.parametrize(("option", "err_code"), [("allow_atomic", 10198), ("allow_batched", 10209)])
@on_both_drivers
async def test_a_mirror_takes_no_batches_of_its_own(driver: Driver, url: str, option: str, err_code: int) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        wrong: dict[str, Any] = {option: True}
        mirror = StreamConfig(name=next(_names), mirror=StreamSource(name=stream.name), **wrong)
        with pytest.raises(ServerError) as caught:
            await js.create_stream(mirror)
        assert caught.value.err_code == err_code


@on_both_drivers
async def test_copies_in_mirrors_and_sourcing_streams_have_no_trace_of_the_batch(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js, allow_atomic=True, allow_batched=True)
        mirror = await js.create_stream(
            StreamConfig(name=next(_names), mirror=StreamSource(name=stream.name), allow_direct=True)
        )
        sourcing = await new_stream(js, sources=[StreamSource(name=stream.name)], allow_atomic=True, allow_batched=True)
        async with js.atomic_batch() as batch:
            await batch.add(f"{stream.name}.a", b"1", headers={"Color": "red"}, msg_id="one")
            await batch.add(f"{stream.name}.b", b"2")
        assert batch.ack.batch_size == 2
        async with js.atomic_batch() as own:  # a stream with sources may have batches of its own
            await own.add(f"{sourcing.name}.a", b"own")
        for copy, count in ((mirror, 2), (sourcing, 3)):
            messages = await _messages(copy, count)
            copies = [message for message in messages if message.data != b"own"]
            assert [message.data for message in copies] == [b"1", b"2"]
            assert copies[0].headers["Color"] == "red"
            assert copies[0].headers["Nats-Msg-Id"] == "one"
            assert not [name for message in copies for name in message.headers if name.startswith("Nats-Batch-")]


async def _messages(stream: Any, count: int) -> list[Any]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                found = [message async for message in stream.get_messages()]
            except JetSparkError:
                found = []
            if len(found) == count:
                return found
            await asyncio.sleep(0.05)
