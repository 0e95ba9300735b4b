"""Rows of streams, and of listings."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import jetspark
from jetspark import JetSparkError, StreamConfig
from support.operations.table import World, drained, plain, row

ADVISORY = b'{"id":"1","timestamp":"2026-01-01T00:00:00Z","stream":"S","batch":"b","reason":"timeout"}'

plain("JetStream.account_info", lambda w: w.js.account_info())
plain("JetStream.stream", lambda w: w.js.stream(w.name))
plain("Stream.info", lambda w: w.stream.info(subjects_filter=">"))
plain("Stream.update", lambda w: w.stream.update(description=f"{w.number}"))
plain(
    "JetStream.update_stream",
    lambda w: w.js.update_stream(StreamConfig(name=w.name, description=f"{w.number}")),
)


async def _end_spare(w: World) -> None:
    with contextlib.suppress(jetspark.StreamNotFound):
        await w.js.delete_stream(f"{w.name}_{w.number}")


@row("JetStream.create_stream")
async def _(w: World) -> None:
    config = StreamConfig(name=f"{w.name}_{w.number}", storage="memory")
    await w.interrupt(lambda: w.js.create_stream(config))
    await _end_spare(w)


@row("JetStream.create_or_update_stream")
async def _(w: World) -> None:
    config = StreamConfig(name=f"{w.name}_{w.number}", storage="memory")
    await w.interrupt(lambda: w.js.create_or_update_stream(config))
    await _end_spare(w)


@row("JetStream.get_or_create_stream")
async def _(w: World) -> None:
    config = StreamConfig(name=f"{w.name}_{w.number}", storage="memory")
    await w.interrupt(lambda: w.js.get_or_create_stream(config))
    await _end_spare(w)


@row("JetStream.delete_stream")
async def _(w: World) -> None:
    stream = await w.spare_stream()
    ended = await w.interrupt(lambda: w.js.delete_stream(stream.name))
    if ended.is_complete:
        assert stream.name not in list(w.witness.jetstream().stream_names())
    await _end_spare(w)


@row("Stream.delete")
async def _(w: World) -> None:
    stream = await w.spare_stream()
    await w.interrupt(stream.delete)
    await _end_spare(w)


@row("Stream.seal")
async def _(w: World) -> None:
    stream = await w.spare_stream()
    await w.interrupt(stream.seal)
    await _end_spare(w)


@row("Stream.purge", "Stream.delete_message")
async def _(w: World) -> None:
    for number in range(5):
        ack = await w.js.publish(w.subject, b"%d" % number)
    if w.number % 2:
        ended = await w.interrupt(lambda: w.stream.purge(subject=w.subject))
        assert len(await w.stored()) in ((0,) if ended.is_complete else (0, 5))
    else:
        ended = await w.interrupt(lambda: w.stream.delete_message(ack.sequence))
        assert len(await w.stored()) in ((4,) if ended.is_complete else (4, 5))


@row("Stream.step_down")
async def _(w: World) -> None:
    async def act() -> None:
        with contextlib.suppress(JetSparkError):  # a single server has nobody to hand over to
            await w.stream.step_down()

    await w.interrupt(act)


@row("Stream.get_message", "Stream.get_messages", "Stream.get_last_messages")
async def _(w: World) -> None:
    for number in range(5):
        await w.js.publish(w.subject, b"%d" % number)

    async def act() -> None:
        assert (await w.stream.get_message(last_for=w.subject)).data == b"4"
        some = w.stream.get_messages(subject=w.subject)
        async with contextlib.aclosing(some) as messages:
            assert [each.data async for each in messages] == [b"%d" % number for number in range(5)]
        [last] = await w.stream.get_last_messages([w.subject])
        assert last.data == b"4"

    await w.interrupt(act)


def listing(cover: str, call: Callable[[World], Awaitable[AsyncIterator[Any]]]) -> None:
    async def run(w: World) -> None:
        entries = await call(w)
        await w.interrupt(lambda: drained(entries))

    row(cover)(run)


async def _now(iterator: AsyncIterator[Any]) -> AsyncIterator[Any]:
    return iterator


listing("JetStream.streams", lambda w: _now(w.js.streams()))
listing("JetStream.stream_names", lambda w: _now(w.js.stream_names()))
listing("JetStream.kv_names", lambda w: _now(w.js.kv_names()))
listing("JetStream.object_store_names", lambda w: _now(w.js.object_store_names()))
listing("Stream.consumers", lambda w: _now(w.stream.consumers()))
listing("Stream.consumer_names", lambda w: _now(w.stream.consumer_names()))


@row("JetStream.batch_advisories", may_leave="subscriptions")
async def _(w: World) -> None:
    async def act() -> None:
        async with contextlib.aclosing(w.js.batch_advisories(w.name)) as advisories:
            await w.nc.publish(f"$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.{w.name}", ADVISORY)
            async for advisory in advisories:
                assert advisory.batch == "b"
                return

    await w.interrupt(act)
