"""Core publishing: how fast messages leave, until the server confirms that it has processed the last one."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.peers import NATS_C
from benchmarks.wire import Blast, await_pong, dial
from benchmarks.workload import Bar, Contender, Job, Rounds, Values, Workload, payload_of
from jetspark.aio import connect
from jetspark.blocking import connect as connect_blocking

__all__ = ["CORE_PUBLISH"]

FLUSH_TIMEOUT_S = 60


def bare(job: Job) -> Values:
    connection, _ = dial(job.url)
    blast = Blast(job.subject, payload_of(job.payload_bytes))
    with connection:
        for count in (rounds := Rounds(job)):
            blast.send(connection, count)
            connection.sendall(b"PING\r\n")
            await_pong(connection)
    return rounds.values()


async def nats_py(job: Job) -> Values:
    import nats

    client = await nats.connect(job.url)
    publish, subject, payload = client.publish, job.subject, payload_of(job.payload_bytes)
    for count in (rounds := Rounds(job)):
        for _ in range(count):
            await publish(subject, payload)
        await client.flush(FLUSH_TIMEOUT_S)
    await client.close()
    return rounds.values()


def nats_c(job: Job) -> Values:
    return NATS_C.measure(asdict(job) | {"work": "core-publish"})


async def jetspark(job: Job) -> Values:
    async with connect(job.url) as client:
        publish, subject, payload = client.publish, job.subject, payload_of(job.payload_bytes)
        for count in (rounds := Rounds(job)):
            for _ in range(count):
                await publish(subject, payload)
            await client.flush(FLUSH_TIMEOUT_S)
    return rounds.values()


def jetspark_blocking(job: Job) -> Values:
    with connect_blocking(job.url) as client:
        publish, subject, payload = client.publish, job.subject, payload_of(job.payload_bytes)
        for count in (rounds := Rounds(job)):
            for _ in range(count):
                publish(subject, payload)
            client.flush(FLUSH_TIMEOUT_S)
    return rounds.values()


CORE_PUBLISH = Workload(
    name="core-publish",
    what="publish one by one, then flush; timed from the first call to the server's confirmation",
    count=500_000,
    quick_count=2_000,
    contenders=(
        Contender(name="bare", what="sendall of frames made beforehand, 64 KiB at a time", run=bare),
        Contender(name="nats-py", what="await publish()", run=nats_py, needs="nats", has_uvloop_twin=True),
        Contender(name="nats.c", what="C client, natsConnection_Publish()", run=nats_c, needs=NATS_C),
        Contender(name="jetspark", what="await publish()", run=jetspark, has_uvloop_twin=True),
        Contender(name="jetspark-blocking", what="publish()", run=jetspark_blocking),
    ),
    bars=(
        Bar(
            claim="core publish, asyncio, is at least 2 x nats-py",
            metric="messages_per_s",
            contender="jetspark",
            baseline="nats-py",
            at_least=2.0,
        ),
    ),
)
