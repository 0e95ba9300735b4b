"""Core subscribing: how fast messages reach the program that reads them.

A helper process publishes as fast as the server takes it, the same for everyone. Nothing paces it, because core NATS
has no back-pressure and a pace would hide the fast readers' speed; instead no message may be dropped: the server
holds up to its ``max_pending`` for a connection, and both clients' own bounds are raised above the count. Messages
that do not arrive make the measurement an error, not a smaller number.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import asdict

from benchmarks.helper import FEED_SUBJECT
from benchmarks.peers import NATS_C
from benchmarks.wire import READ_BYTES, dial
from benchmarks.workload import Bar, Contender, Job, Rounds, Values, Workload
from jetspark.aio import Message, connect
from jetspark.blocking import connect as connect_blocking

__all__ = ["CORE_SUBSCRIBE"]

NO_BOUND = 1 << 30


def _order(job: Job, count: int) -> bytes:
    """The request that makes the helper publish ``count`` messages."""
    return f"{job.subject} {count} {job.payload_bytes}".encode()


def bare(job: Job) -> Values:
    connection, _ = dial(job.url)
    with connection:
        connection.sendall(f"SUB {job.subject} 1\r\n".encode())
        for count in (rounds := Rounds(job)):
            order = _order(job, count)
            connection.sendall(b"PUB %b %d\r\n%b\r\n" % (FEED_SUBJECT.encode(), len(order), order))
            _read(connection, count)
    return rounds.values()


def _read(connection: socket.socket, count: int) -> bytes:
    """The least a reader of any message can do: find each line's end, know its size, slice out the payload, count.

    Remembering what a line says is a third faster here than reading the number each time.
    """
    payload = data = b""
    received = 0
    sizes: dict[bytes, int] = {}
    while received < count:
        data += connection.recv(READ_BYTES)
        position, length, find = 0, len(data), data.find
        while (end_of_line := find(b"\r\n", position)) > 0:
            line = data[position:end_of_line]
            size = sizes.get(line)
            if size is None:
                if line[:4] != b"MSG ":  # the server's PING, which it does not mind being ignored
                    position = end_of_line + 2
                    continue
                size = sizes[line] = int(line[line.rfind(b" ") :])
            start = end_of_line + 2
            end = start + size
            if end + 2 > length:
                break
            payload = data[start:end]
            received += 1
            position = end + 2
        data = data[position:]
    return payload


async def nats_py(job: Job) -> Values:
    import nats
    from nats.aio.msg import Msg

    client = await nats.connect(job.url)
    received = wanted = 0
    done: asyncio.Future[None]

    async def count_one(message: Msg) -> None:
        nonlocal received
        received += 1
        if received == wanted:
            done.set_result(None)

    await client.subscribe(job.subject, cb=count_one, pending_msgs_limit=NO_BOUND, pending_bytes_limit=NO_BOUND)
    await client.flush()
    for count in (rounds := Rounds(job)):
        received, wanted, done = 0, count, asyncio.get_running_loop().create_future()
        await client.publish(FEED_SUBJECT, _order(job, count))
        await done
    await client.close()
    return rounds.values()


async def nats_py_iterator(job: Job) -> Values:
    import nats

    client = await nats.connect(job.url)
    subscription = await client.subscribe(job.subject, pending_msgs_limit=NO_BOUND, pending_bytes_limit=NO_BOUND)
    await client.flush()
    messages = subscription.messages
    for count in (rounds := Rounds(job)):
        received = 0
        await client.publish(FEED_SUBJECT, _order(job, count))
        async for _ in messages:
            received += 1
            if received == count:
                break
    await client.close()
    return rounds.values()


def nats_c(job: Job) -> Values:
    return NATS_C.measure(asdict(job) | {"work": "core-subscribe", "feed": FEED_SUBJECT})


async def jetspark(job: Job) -> Values:
    async with connect(job.url, max_pending_messages=NO_BOUND, max_pending_bytes=NO_BOUND) as client:
        subscription = await client.subscribe(job.subject)
        await client.flush()
        for count in (rounds := Rounds(job)):
            received = 0
            await client.publish(FEED_SUBJECT, _order(job, count))
            async for _ in subscription:
                received += 1
                if received == count:
                    break
    return rounds.values()


async def jetspark_callback(job: Job) -> Values:
    received = wanted = 0
    done: asyncio.Future[None]

    def count_one(message: Message) -> None:
        nonlocal received
        received += 1
        if received == wanted:
            done.set_result(None)

    async with connect(job.url, max_pending_messages=NO_BOUND, max_pending_bytes=NO_BOUND) as client:
        await client.subscribe(job.subject, callback=count_one)
        await client.flush()
        for count in (rounds := Rounds(job)):
            received, wanted, done = 0, count, asyncio.get_running_loop().create_future()
            await client.publish(FEED_SUBJECT, _order(job, count))
            await done
    return rounds.values()


def jetspark_blocking(job: Job) -> Values:
    with connect_blocking(job.url, max_pending_messages=NO_BOUND, max_pending_bytes=NO_BOUND) as client:
        subscription = client.subscribe(job.subject)
        client.flush()
        for count in (rounds := Rounds(job)):
            received = 0
            client.publish(FEED_SUBJECT, _order(job, count))
            for _ in subscription:
                received += 1  # noqa: SIM113 - the same loop as its asynchronous twin's
                if received == count:
                    break
    return rounds.values()


CORE_SUBSCRIBE = Workload(
    name="core-subscribe",
    what="count messages that another process publishes; timed from asking for them to the last one",
    count=300_000,
    quick_count=2_000,
    contenders=(
        Contender(name="bare", what="recv, find the line, know its size, slice the payload", run=bare),
        Contender(name="nats-py", what="callback, its fastest form", run=nats_py, needs="nats", has_uvloop_twin=True),
        Contender(name="nats-py-iterator", what="async for", run=nats_py_iterator, needs="nats"),
        Contender(name="nats.c", what="C client, callback", run=nats_c, needs=NATS_C),
        Contender(name="jetspark", what="async for", run=jetspark, has_uvloop_twin=True),
        Contender(name="jetspark-callback", what="callback", run=jetspark_callback),
        Contender(name="jetspark-blocking", what="for", run=jetspark_blocking),
    ),
    bars=(
        Bar(
            claim="core subscribe, asyncio, is at least 4 x nats-py",
            metric="messages_per_s",
            contender="jetspark",
            baseline="nats-py",
            at_least=4.0,
        ),
        Bar(
            claim="core subscribe, asyncio, is at least 0.8 x a bare reader",
            metric="messages_per_s",
            contender="jetspark",
            baseline="bare",
            at_least=0.8,
        ),
    ),
)
