"""Pulling from a stream: how fast messages reach the program, with nothing to acknowledge and with an ack for each.

Every measurement has a stream of its own on file storage, which it fills before the clock starts: it measures the way
from the server to the program. A client that has to choose the number of messages of a request chooses 4096; with more
the C client was no faster. By default ``messages()`` asks for up to 8192, and an ordered consumer, which shares its
messages with no other reader, for up to 16,384. ``fetch`` asks for the next ones only when its caller has the last: in
between the server waits, and the smaller the request, the more often. ``bare-fetch`` shows the cost of that alone; the
bars are set against ``bare``, whose server never waits. A consumer without acks never has more to do than to send; with
explicit acks every message is acked by itself, and the clock stops only when the server has received the last one; that
its consumer has processed it too is not waited for.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import asdict
from time import monotonic, sleep
from typing import Any, Literal, cast

from benchmarks.peers import NATS_C
from benchmarks.wire import READ_BYTES, dial
from benchmarks.workload import Bar, Contender, Job, Rounds, Values, Workload, payload_of
from jetspark.aio import Client, connect
from jetspark.aio.pull import PullConsumer
from jetspark.blocking import Client as BlockingClient
from jetspark.blocking import connect as connect_blocking
from jetspark.blocking.pull import PullConsumer as BlockingPullConsumer
from jetspark.errors import ConnectionLost
from jetspark.jetstream.config import ConsumerConfig, StreamConfig

__all__ = ["CONSUMER", "JS_PULL", "JS_PULL_ACK", "read_bare"]

BATCH = 4096
ACKS_PROCESSED_S = 30.0
CONSUMER = "bench"

AckPolicy = Literal["none", "explicit"]


@contextlib.contextmanager
def _filled(job: Job, ack_policy: AckPolicy) -> Iterator[str]:
    """The name of a stream with warm-up and measurement in it, and a consumer."""
    name = job.subject.replace(".", "-")
    total = job.warmup + job.count
    with connect_blocking(job.url) as client:
        js = client.jetstream(timeout=30.0)
        stream = js.create_stream(StreamConfig(name=name, subjects=[job.subject], storage="file", allow_batched=True))
        payload = payload_of(job.payload_bytes)
        with js.fast_batch() as fast:  # not blindly: of a million the server drops some when it is pressed too hard
            fast.add_many((job.subject, payload) for _ in range(total))
        stream.create_consumer(ConsumerConfig(durable_name=CONSUMER, ack_policy=ack_policy, max_ack_pending=4 * BATCH))
    try:
        yield name
        if ack_policy == "explicit":
            _check_acks(job, name)
    finally:
        with connect_blocking(job.url) as client:
            client.jetstream(timeout=30.0).delete_stream(name)


def _check_acks(job: Job, stream: str) -> None:
    """Every message was acked, or that is an error: the server has the acks, and has gone through them soon after."""
    deadline = monotonic() + ACKS_PROCESSED_S
    with connect_blocking(job.url) as client:
        consumer = client.jetstream(timeout=30.0).stream(stream).consumer(CONSUMER)
        while (info := consumer.info()).ack_floor.stream_sequence != job.warmup + job.count:
            if monotonic() > deadline:
                raise ConnectionLost(f"{info.ack_floor.stream_sequence} acked of {job.warmup + job.count}")
            sleep(0.01)


@contextlib.asynccontextmanager
async def _consuming(job: Job, ack_policy: AckPolicy) -> AsyncIterator[tuple[Client, PullConsumer]]:
    with _filled(job, ack_policy) as stream:
        async with connect(job.url) as client:
            yield client, await (await client.jetstream().stream(stream)).consumer(CONSUMER)


@contextlib.contextmanager
def _consuming_blocking(job: Job, ack_policy: AckPolicy) -> Iterator[tuple[BlockingClient, BlockingPullConsumer]]:
    with _filled(job, ack_policy) as stream, connect_blocking(job.url) as client:
        yield client, client.jetstream().stream(stream).consumer(CONSUMER)


# ---- nothing to acknowledge ----------------------------------------------------------------------------------------


def bare(job: Job) -> Values:
    """Requests framed beforehand; two are out at any time, so that the server always has one to serve."""
    return _read_bare(job, requests=2)


def bare_fetch(job: Job) -> Values:
    """One request at a time, the next when everything of the last has been read."""
    return _read_bare(job, requests=1)


def _read_bare(job: Job, *, requests: int) -> Values:
    with _filled(job, "none") as stream:
        return read_bare(job, stream, requests=requests)


def read_bare(job: Job, stream: str, *, requests: int = 2, verb: bytes = b"MSG ") -> Values:
    """Read a stream through its consumer ``bench``; ``verb`` begins the frames of its messages."""
    batch = BATCH // requests
    connection, _ = dial(job.url)
    body = json.dumps({"batch": batch, "expires": 60_000_000_000}).encode()
    ask = b"PUB $JS.API.CONSUMER.MSG.NEXT.%b.%b bench.inbox.%b %d\r\n%b\r\n" % (
        stream.encode(),
        CONSUMER.encode(),
        stream.encode(),
        len(body),
        body,
    )
    with connection:
        connection.sendall(b"SUB bench.inbox.%b 1\r\n" % stream.encode())
        connection.sendall(ask * requests)
        data, wanted = b"", batch
        received = 0
        for count in (rounds := Rounds(job)):
            received -= count
            payload = b""
            while received < 0:
                chunk = connection.recv(READ_BYTES)
                if not chunk:
                    raise ConnectionLost("the server closed the connection")
                data += chunk
                position, length, find = 0, len(data), data.find
                while (end_of_line := find(b"\r\n", position)) > 0:
                    line = data[position:end_of_line]
                    if line[:4] != verb:  # the server's PING, which it does not mind being ignored
                        position = end_of_line + 2
                        continue
                    start = end_of_line + 2
                    end = start + int(line[line.rfind(b" ") :])
                    if end + 2 > length:
                        break
                    payload = data[start:end]
                    received += 1
                    wanted -= 1
                    position = end + 2
                    if not wanted:
                        connection.sendall(ask)
                        wanted = batch
                data = data[position:]
            assert payload
    return rounds.values()


async def nats_py(job: Job) -> Values:
    with _filled(job, "none") as stream:
        client, subscription = await _nats_py_consumer(job, stream)
        for count in (rounds := Rounds(job)):
            received = 0
            while received < count:
                received += len(await subscription.fetch(min(BATCH, count - received), timeout=30))
        await client.close()
    return rounds.values()


def nats_c(job: Job) -> Values:
    with _filled(job, "none") as stream:
        return NATS_C.measure(_c_request(job, stream, "pull"))


async def jetspark(job: Job) -> Values:
    async with _consuming(job, "none") as (_client, consumer), consumer.messages() as messages:
        for count in (rounds := Rounds(job)):
            received = 0
            async for _ in messages:
                received += 1
                if received == count:
                    break
    return rounds.values()


async def jetspark_fetch(job: Job) -> Values:
    async with _consuming(job, "none") as (_client, consumer):
        for count in (rounds := Rounds(job)):
            received = 0
            while received < count:
                received += len(await consumer.fetch(min(BATCH, count - received), timeout=30))
    return rounds.values()


def jetspark_blocking_messages(job: Job) -> Values:
    with _consuming_blocking(job, "none") as (_client, consumer), consumer.messages() as messages:
        for count in (rounds := Rounds(job)):
            for received, _ in enumerate(messages, 1):
                if received == count:
                    break
    return rounds.values()


def jetspark_blocking(job: Job) -> Values:
    with _consuming_blocking(job, "none") as (_client, consumer):
        for count in (rounds := Rounds(job)):
            received = 0
            while received < count:
                received += len(consumer.fetch(min(BATCH, count - received), timeout=30))
    return rounds.values()


async def jetspark_ordered(job: Job) -> Values:
    with _filled(job, "none") as stream:
        async with connect(job.url) as client:
            messages = (await client.jetstream().stream(stream)).ordered_consumer().messages()
            for count in (rounds := Rounds(job)):
                received = 0
                async for _ in messages:
                    received += 1
                    if received == count:
                        break
            await cast("AsyncGenerator[object, None]", messages).aclose()
    return rounds.values()


def jetspark_blocking_ordered(job: Job) -> Values:
    with _filled(job, "none") as stream, connect_blocking(job.url) as client:
        messages = client.jetstream().stream(stream).ordered_consumer().messages()
        for count in (rounds := Rounds(job)):
            for received, _ in enumerate(messages, 1):
                if received == count:
                    break
    return rounds.values()


# ---- an ack for each -----------------------------------------------------------------------------------------------


async def nats_py_ack(job: Job) -> Values:
    with _filled(job, "explicit") as stream:
        client, subscription = await _nats_py_consumer(job, stream)
        for count in (rounds := Rounds(job)):
            received = 0
            while received < count:
                messages = await subscription.fetch(min(BATCH, count - received), timeout=30)
                for message in messages:
                    await message.ack()
                received += len(messages)
            await client.flush()
        await client.close()
    return rounds.values()


def nats_c_ack(job: Job) -> Values:
    with _filled(job, "explicit") as stream:
        return NATS_C.measure(_c_request(job, stream, "pull-ack"))


async def jetspark_ack(job: Job) -> Values:
    async with _consuming(job, "explicit") as (client, consumer), consumer.messages() as messages:
        for count in (rounds := Rounds(job)):
            received = 0
            async for message in messages:
                await message.ack()
                received += 1
                if received == count:
                    break
            await client.flush()
    return rounds.values()


async def jetspark_fetch_ack(job: Job) -> Values:
    async with _consuming(job, "explicit") as (client, consumer):
        for count in (rounds := Rounds(job)):
            received = 0
            while received < count:
                messages = await consumer.fetch(min(BATCH, count - received), timeout=30)
                for message in messages:
                    await message.ack()
                received += len(messages)
            await client.flush()
    return rounds.values()


def jetspark_blocking_ack(job: Job) -> Values:
    with _consuming_blocking(job, "explicit") as (client, consumer):
        for count in (rounds := Rounds(job)):
            received = 0
            while received < count:
                messages = consumer.fetch(min(BATCH, count - received), timeout=30)
                for message in messages:
                    message.ack()
                received += len(messages)
            client.flush()
    return rounds.values()


async def _nats_py_consumer(job: Job, stream: str) -> tuple[Any, Any]:
    import nats

    client = await nats.connect(job.url)
    return client, await client.jetstream().pull_subscribe_bind(CONSUMER, stream)


def _c_request(job: Job, stream: str, work: str) -> dict[str, Any]:
    return asdict(job) | {"work": work, "stream": stream, "consumer": CONSUMER, "batch": BATCH}


JS_PULL = Workload(
    name="js-pull",
    what="read a stream with a pull consumer without acks; timed from the first request to the last message",
    count=1_000_000,
    quick_count=2_000,
    storage="file",
    replicas=1,
    baselines=("nats-py", "bare", "nats.c", "jetspark"),
    contenders=(
        Contender(name="bare", what="two framed requests out, find the line, slice the payload", run=bare),
        Contender(name="bare-fetch", what="one framed request out at a time", run=bare_fetch),
        Contender(  # at 20 thousand/s it would take three quarters of the whole time
            name="nats-py", what="fetch(4096)", run=nats_py, needs="nats", count_divisor=10, has_uvloop_twin=True
        ),
        Contender(name="nats.c", what="C client, natsSubscription_Fetch(4096)", run=nats_c, needs=NATS_C),
        Contender(name="jetspark", what="async for in messages()", run=jetspark, has_uvloop_twin=True),
        Contender(name="jetspark-fetch", what="fetch(4096)", run=jetspark_fetch),
        Contender(name="jetspark-blocking", what="fetch(4096)", run=jetspark_blocking),
        Contender(name="jetspark-blocking-messages", what="for in messages()", run=jetspark_blocking_messages),
        Contender(name="jetspark-ordered", what="async for in an ordered consumer", run=jetspark_ordered),
        Contender(name="jetspark-ordered-blocking", what="for in an ordered consumer", run=jetspark_blocking_ordered),
    ),
    bars=(
        Bar(
            claim="reading in order, asyncio, is at least 0.9 x messages()",
            metric="messages_per_s",
            contender="jetspark-ordered",
            baseline="jetspark",
            at_least=0.9,
        ),
        Bar(
            claim="pull without acks, asyncio, is at least 8 x nats-py",
            metric="messages_per_s",
            contender="jetspark",
            baseline="nats-py",
            at_least=8.0,
        ),
        Bar(
            claim="pull without acks, asyncio, is at least 0.8 x a bare reader",
            metric="messages_per_s",
            contender="jetspark",
            baseline="bare",
            at_least=0.8,
        ),
        Bar(
            claim="pull without acks, blocking, is at least 0.8 x a bare reader",
            metric="messages_per_s",
            contender="jetspark-blocking",
            baseline="bare",
            at_least=0.8,
        ),
        Bar(
            claim="pull without acks, asyncio, is at least as fast as the C client",
            metric="messages_per_s",
            contender="jetspark",
            baseline="nats.c",
            at_least=1.0,
        ),
        Bar(
            claim="pull without acks, blocking, is at least as fast as the C client",
            metric="messages_per_s",
            contender="jetspark-blocking",
            baseline="nats.c",
            at_least=1.0,
        ),
    ),
)

JS_PULL_ACK = Workload(
    name="js-pull-ack",
    what="read a stream with a pull consumer and ack each message; timed until the server has the last ack",
    count=60_000,
    quick_count=2_000,
    storage="file",
    replicas=1,
    baselines=("nats-py", "nats.c"),
    contenders=(
        Contender(name="nats-py", what="fetch(4096)", run=nats_py_ack, needs="nats", has_uvloop_twin=True),
        Contender(name="nats.c", what="C client, natsSubscription_Fetch(4096)", run=nats_c_ack, needs=NATS_C),
        Contender(name="jetspark", what="async for in messages()", run=jetspark_ack, has_uvloop_twin=True),
        Contender(name="jetspark-fetch", what="fetch(4096)", run=jetspark_fetch_ack),
        Contender(name="jetspark-blocking", what="fetch(4096)", run=jetspark_blocking_ack),
    ),
    bars=(
        Bar(
            claim="pull with an ack each, asyncio, is at least 5 x nats-py",
            metric="messages_per_s",
            contender="jetspark",
            baseline="nats-py",
            at_least=5.0,
        ),
        Bar(
            claim="pull with an ack each, asyncio, is at least as fast as the C client",
            metric="messages_per_s",
            contender="jetspark",
            baseline="nats.c",
            at_least=1.0,
        ),
    ),
)
