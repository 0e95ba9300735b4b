"""Rows of connections, subscriptions and messages."""

from __future__ import annotations

import contextlib
from functools import partial

from support.operations.table import A_WHILE_S, World, accepted_by, plain, row


@row("connect", starts_threads=True)
async def _(w: World) -> None:
    async def act() -> None:
        async with await w.connect() as nc:
            await nc.flush()

    await w.interrupt(act)


@row("Client.publish")
async def _(w: World) -> None:
    sent: list[bytes] = []

    async def act() -> None:
        for number in range(30):
            await w.nc.publish(w.subject, b"%d" % number)
            sent.append(b"%d" % number)
        await w.nc.flush()

    ended = await w.interrupt(act)
    accepted_by(w, ended, sent, await w.stored())


plain("Client.request", lambda w: w.nc.request("$JS.API.INFO"))
plain("Client.flush", lambda w: w.nc.flush())


@row("Client.request_many")
async def _(w: World) -> None:
    async def act() -> None:
        async with contextlib.aclosing(w.nc.request_many("$JS.API.INFO", max_messages=1)) as answers:
            async for _ in answers:
                pass

    await w.interrupt(act)


@row("Client.subscribe", "Subscription.unsubscribe", may_leave="subscriptions threads", starts_threads=True)
async def _(w: World) -> None:
    async def act() -> None:
        callback = (lambda message: None) if w.number % 2 else None
        async with await w.nc.subscribe(w.subject, callback=callback, max_messages=3):
            await w.nc.flush()

    await w.interrupt(act)


async def _leaving(w: World, leave: str) -> None:
    """Closing that is interrupted can be done again, and what was published is sent or reported."""
    nc = await w.connect()
    js = nc.jetstream()
    read: list[bytes] = []
    await nc.subscribe(f"{w.subject}.in", callback=lambda message: read.append(message.data))
    for number in range(10):
        await nc.publish(f"{w.subject}.in", b"%d" % number)
    futures = [await js.publish_async(w.subject, b"%d" % number) for number in range(10)]
    await w.interrupt(lambda: getattr(nc, leave)())
    await nc.close()
    assert nc.is_closed
    acked = 0
    for future in futures:
        assert future.done()
        acked += future.exception() is None
    stored = await w.stored()
    assert acked <= len(stored), (acked, stored)


@row("Client.close", starts_threads=True)
async def _(w: World) -> None:
    await _leaving(w, "close")


@row("Client.drain", starts_threads=True)
async def _(w: World) -> None:
    await _leaving(w, "drain")


@row("Subscription.next")
async def _(w: World) -> None:
    subscription = await w.nc.subscribe(w.subject)
    read: list[bytes] = []

    async def act() -> None:
        for number in range(10):
            await w.nc.publish(w.subject, b"%d" % number)
            read.append((await subscription.next(A_WHILE_S)).data)

    ended = await w.interrupt(act)
    await w.nc.publish(w.subject, b"last")
    while (data := (await subscription.next(A_WHILE_S)).data) != b"last":
        read.append(data)
    stored = await w.stored()
    assert [each for each in stored if each in read] == read
    if not w.has_lost_session:
        assert len(stored) - 1 - len(read) <= (w.slack if ended.was_interrupted else 0), (stored, read)
    await subscription.unsubscribe()


@row("Subscription.drain")
async def _(w: World) -> None:
    for number in range(3):
        subscription = await w.nc.subscribe(f"{w.subject}.{number}")
        await w.nc.publish(f"{w.subject}.{number}", b"x")
        await w.nc.flush()
        await subscription.next(A_WHILE_S)
        await w.interrupt(partial(subscription.drain, A_WHILE_S))
        await subscription.unsubscribe()


@row("Message.respond")
async def _(w: World) -> None:
    async with await w.nc.subscribe(f"ask.{w.subject}") as questions:
        await w.nc.publish(f"ask.{w.subject}", b"?", reply=w.subject)
        question = await questions.next(A_WHILE_S)
        ended = await w.interrupt(lambda: question.respond(b"!"))
    accepted_by(w, ended, [b"!"] if ended.is_complete else [], await w.stored())
