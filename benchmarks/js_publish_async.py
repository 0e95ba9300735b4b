"""Windowed publishing to JetStream: how fast messages are stored, until the last acknowledgement is in.

Every contender has the same guarantee: each message is stored in a file and acknowledged on its own, and up to
``WINDOW`` of them are under way at a time. A stream of its own, made before the clock starts, keeps the measurements
apart; an acknowledgement that does not come, or is an error, makes the measurement an error.
"""

from __future__ import annotations

import socket
from dataclasses import asdict

from benchmarks.peers import NATS_C
from benchmarks.streams import stream_for
from benchmarks.wire import CHUNK_BYTES, READ_BYTES, dial
from benchmarks.workload import Bar, Contender, Job, Rounds, Values, Workload, payload_of
from jetspark.aio import connect
from jetspark.aio.publisher import WindowedPublisher
from jetspark.blocking import connect as connect_blocking
from jetspark.blocking.publisher import WindowedPublisher as BlockingPublisher
from jetspark.errors import ConnectionLost
from jetspark.publish.window import WindowOptions

__all__ = ["JS_PUBLISH_ASYNC"]

# The default of nats-py, and ours.
WINDOW = 4000
TIMEOUT_S = 60.0


def bare(job: Job) -> Values:
    """One thread, send and recv in turns, the window kept by counting the acknowledgements' first words."""
    with stream_for(job):
        connection, _ = dial(job.url)
        with connection:
            inbox = f"_INBOX.{job.subject}"
            connection.sendall(f"SUB {inbox}.* 1\r\n".encode())
            frame = b"PUB %b %b.%%d %d\r\n%b\r\n" % (
                job.subject.encode(),
                inbox.encode(),
                job.payload_bytes,
                payload_of(job.payload_bytes),
            )
            first = 0
            for count in (rounds := Rounds(job)):
                frames = [frame % number for number in range(first, first + count)]
                rounds.begin()
                _pump(connection, frames, inbox.encode())
                rounds.end()
                first += count
    return rounds.values()


def _pump(connection: socket.socket, frames: list[bytes], inbox: bytes) -> None:
    per_chunk = max(1, CHUNK_BYTES // len(frames[0]))
    sent = acked = 0
    tail = b""
    mark = b"MSG " + inbox
    while acked < len(frames):
        while sent < len(frames) and sent - acked < WINDOW:
            end = min(sent + per_chunk, acked + WINDOW)
            connection.sendall(b"".join(frames[sent:end]))
            sent = min(end, len(frames))
        data = connection.recv(READ_BYTES)
        if not data:
            raise ConnectionLost("the server closed the connection")
        if b'"error"' in data:
            raise ConnectionLost(data.decode(errors="replace"))
        data = tail + data
        acked += data.count(mark)
        tail = data[1 - len(mark) :]  # one that is cut in two is counted when its second half is there


async def nats_py(job: Job) -> Values:
    import nats

    with stream_for(job):
        client = await nats.connect(job.url)
        js = client.jetstream(publish_async_max_pending=WINDOW)
        subject, payload = job.subject, payload_of(job.payload_bytes)
        for count in (rounds := Rounds(job)):
            futures = [await js.publish_async(subject, payload) for _ in range(count)]
            await js.publish_async_completed()
            rounds.end()
            for future in futures:
                future.result()
        await client.close()
    return rounds.values()


def nats_c(job: Job) -> Values:
    with stream_for(job):
        return NATS_C.measure(asdict(job) | {"work": "publish-async", "window": WINDOW})


async def jetspark(job: Job) -> Values:
    with stream_for(job):
        async with connect(job.url) as client:
            publisher = WindowedPublisher(client, WindowOptions(max_outstanding=WINDOW))
            publish, subject, payload = publisher.publish, job.subject, payload_of(job.payload_bytes)
            for count in (rounds := Rounds(job)):
                futures = [await publish(subject, payload) for _ in range(count)]
                await publisher.complete(TIMEOUT_S)
                rounds.end()
                for future in futures:
                    future.result()
    return rounds.values()


def jetspark_blocking(job: Job) -> Values:
    with stream_for(job), connect_blocking(job.url) as client:
        publisher = BlockingPublisher(client, WindowOptions(max_outstanding=WINDOW))
        publish, subject, payload = publisher.publish, job.subject, payload_of(job.payload_bytes)
        for count in (rounds := Rounds(job)):
            futures = [publish(subject, payload) for _ in range(count)]
            publisher.complete(TIMEOUT_S)
            rounds.end()
            for future in futures:
                future.result()
    return rounds.values()


JS_PUBLISH_ASYNC = Workload(
    name="js-publish-async",
    what="publish one by one with up to 4000 unacknowledged; timed from the first call to the last acknowledgement",
    count=100_000,
    quick_count=2_000,
    contenders=(
        Contender(name="bare", what="frames made beforehand, send and recv in turns", run=bare),
        Contender(name="nats-py", what="await publish_async()", run=nats_py, needs="nats", has_uvloop_twin=True),
        Contender(name="nats.c", what="C client, js_PublishAsync()", run=nats_c, needs=NATS_C),
        Contender(name="jetspark", what="await publish_async()", run=jetspark, has_uvloop_twin=True),
        Contender(name="jetspark-blocking", what="publish_async()", run=jetspark_blocking),
    ),
    storage="file",
    replicas=1,
    baselines=("nats-py", "bare", "nats.c"),
    bars=(
        Bar(
            claim="windowed publishing, asyncio, is at least 2 x nats-py",
            metric="messages_per_s",
            contender="jetspark",
            baseline="nats-py",
            at_least=2.0,
        ),
        Bar(
            claim="windowed publishing, asyncio, is at least 0.8 x the C client",
            metric="messages_per_s",
            contender="jetspark",
            baseline="nats.c",
            at_least=0.8,
        ),
    ),
)
