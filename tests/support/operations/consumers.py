"""Rows of consumers and of acknowledgements."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import jetspark
from jetspark import ConsumerConfig, JetSparkError
from support.operations.table import A_WHILE_S, World, row


@row(
    "Stream.create_consumer",
    "Stream.update_consumer",
    "Stream.create_or_update_consumer",
    "Stream.get_or_create_consumer",
)
async def _(w: World) -> None:
    config = ConsumerConfig(name=f"c{w.number}", filter_subjects=[w.subject], inactive_threshold_s=60)

    async def act() -> None:
        await w.stream.create_consumer(config)
        await w.stream.update_consumer(config)
        await w.stream.create_or_update_consumer(config)
        await w.stream.get_or_create_consumer(config)

    await w.interrupt(act)
    with contextlib.suppress(jetspark.ConsumerNotFound):
        await w.stream.delete_consumer(f"c{w.number}")


@row("Stream.consumer", "Stream.delete_consumer")
async def _(w: World) -> None:
    consumer = await w.consumer(0)

    async def act() -> None:
        await w.stream.consumer(consumer.name)
        await w.stream.delete_consumer(consumer.name)

    await w.interrupt(act)
    with contextlib.suppress(jetspark.ConsumerNotFound):
        await w.stream.delete_consumer(f"c{w.number}")


@row("Consumer.info", "Consumer.pause", "Consumer.resume", "Consumer.reset", "Consumer.delete")
async def _(w: World) -> None:
    consumer = await w.consumer(3)

    async def act() -> None:
        await consumer.info()
        await consumer.pause(datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1))
        await consumer.resume()
        await consumer.reset()
        await consumer.delete()

    await w.interrupt(act)
    with contextlib.suppress(jetspark.ConsumerNotFound):
        await consumer.delete()


@row("Consumer.unpin", "Consumer.step_down")
async def _(w: World) -> None:
    consumer = await w.consumer(0)

    async def act() -> None:
        with contextlib.suppress(JetSparkError):  # there is no group, and nobody to hand over to
            await consumer.unpin("jobs")
        with contextlib.suppress(JetSparkError):
            await consumer.step_down()

    await w.interrupt(act)
    await consumer.delete()


async def _rest(w: World, consumer: Any, got: list[bytes]) -> list[bytes]:
    """Receive and acknowledge the other messages, returned ones included."""
    while True:
        message = await consumer.next(timeout=0.15)
        if message is not None:
            got.append(message.data)
            await message.ack()
        elif not (await consumer.info()).pending:  # else the machine is busy
            break
    await consumer.close()
    return got


@row("Consumer.fetch", "Consumer.next", "Consumer.close")
async def _(w: World) -> None:
    consumer = await w.consumer(20)
    got: list[bytes] = []

    async def act() -> None:
        for size, fill in ((1, False), (3, True), (6, False)):
            for message in await consumer.fetch(size, timeout=A_WHILE_S, fill=fill):
                got.append(message.data)
                await message.ack()
        message = await consumer.next(timeout=A_WHILE_S)
        got.append(message.data)
        message = await consumer.next(timeout=A_WHILE_S, ack=message)
        got.append(message.data)
        await message.ack()
        await consumer.close()

    ended = await w.interrupt(act)
    await w.js.publish(f"{w.name}.fence")
    got = await _rest(w, consumer, got)
    # A blocking fetch may be interrupted when it has taken its messages from the buffer: they come again later. An
    # asyncio one is interrupted only where it waits, and keeps what it has for the next.
    lost = {b"%d" % number for number in range(20)} - set(got)
    assert len(lost) <= (6 if ended.was_interrupted and w.is_blocking else 0), lost
    assert len(got) - len(set(got)) <= 6
    await consumer.delete()


@row("Consumer.batches")
async def _(w: World) -> None:
    consumer = await w.consumer(20)
    got: list[bytes] = []

    async def act() -> None:
        async with contextlib.aclosing(consumer.batches(6, expires=A_WHILE_S)) as batches:
            async for messages in batches:
                for message in messages:
                    got.append(message.data)
                    await message.ack()
                if len(got) == 20:
                    return

    ended = await w.interrupt(act)
    got = await _rest(w, consumer, got)
    lost = {b"%d" % number for number in range(20)} - set(got)
    # Those of the list in hand: they come again when their ack_wait is over.
    assert len(lost) <= (6 if ended.was_interrupted else 0), lost
    await consumer.delete()


@row("Consumer.messages", "Messages.close")
async def _(w: World) -> None:
    consumer = await w.consumer(20)
    got: list[bytes] = []

    async def act() -> None:
        async with consumer.messages(max_messages=8) as messages:
            async for message in messages:
                got.append(message.data)
                await message.ack()
                if len(got) == 20:
                    return

    ended = await w.interrupt(act)
    got = await _rest(w, consumer, got)
    lost = {b"%d" % number for number in range(20)} - set(got)
    assert len(lost) <= (8 if ended.was_interrupted else 0), lost
    await consumer.delete()


@row("Consumer.pushed_messages", "PushMessages.close")
async def _(w: World) -> None:
    consumer = await w.consumer(10, deliver_subject=f"to.{w.subject}", ack_policy="explicit")
    got: list[bytes] = []

    async def act() -> None:
        async with consumer.pushed_messages() as messages:
            async for message in messages:
                got.append(message.data)
                await message.ack()
                if len(got) == 10:
                    return

    await w.interrupt(act)
    await consumer.delete()


@row("OrderedConsumer.messages")
async def _(w: World) -> None:
    for number in range(10):
        await w.js.publish(w.subject, b"%d" % number)
    got: list[bytes] = []

    async def act() -> None:
        async with contextlib.aclosing(w.stream.ordered_consumer(w.subject).messages()) as messages:
            async for message in messages:
                got.append(message.data)
                if len(got) == 10:
                    return

    await w.interrupt(act)
    assert got == [b"%d" % number for number in range(len(got))]


@row(
    "JetStreamMessage.ack",
    "JetStreamMessage.ack_sync",
    "JetStreamMessage.nak",
    "JetStreamMessage.in_progress",
    "JetStreamMessage.term",
)
async def _(w: World) -> None:
    consumer = await w.consumer(5)
    messages = await consumer.fetch(4, timeout=A_WHILE_S)
    done: list[str] = []

    async def act() -> None:
        await messages[0].in_progress()
        await messages[0].ack()
        done.append("ack")
        await messages[1].ack_sync(A_WHILE_S)
        done.append("ack_sync")
        await messages[2].term("no")
        done.append("term")
        await messages[3].nak()

    await w.interrupt(act)
    await w.js.publish(f"{w.name}.fence")
    await consumer.info()
    await consumer.close()
    # 0 as long as nothing is acknowledged.
    floor = max((await consumer.info()).ack_floor.stream_sequence - messages[0].metadata.stream_sequence + 1, 0)
    assert floor >= len(done), (floor, done)
    await consumer.delete()
