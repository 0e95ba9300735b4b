"""Fast ingest: how fast a stream stores a long batch, until its final acknowledgement is in.

Everyone stores every message in a file and knows at the end that all are there, in order. The fast batches obey the
server: as many messages as it wants for an acknowledgement, two of those outstanding. nats-py has no fast ingest; its
``publish_async``, with an acknowledgement for each message, is what its users have. The other clients that do have
fast ingest run in processes of their own, where they are installed, and ask for the same pace as everyone.
"""

from __future__ import annotations

import re
import socket
import uuid
from collections.abc import Callable
from zlib import crc32

from benchmarks.js_publish_async import nats_py
from benchmarks.peers import NATS_JETSTREAM, NATS_JS, Peer
from benchmarks.streams import publishing, publishing_blocking, stream_for
from benchmarks.wire import CHUNK_BYTES, READ_BYTES, dial
from benchmarks.workload import Bar, Contender, Job, Rounds, Values, Workload, payload_of
from jetspark.errors import ConnectionLost

__all__ = ["FAST_INGEST"]

FLOW = 500
OUTSTANDING_ACKS = 2

_ACK = re.compile(rb'\{"type":"ack","seq":([0-9]+),"msgs":([0-9]+)\}')
_FINAL = re.compile(rb'"batch":"[^"]*","count":([0-9]+)')


def bare(job: Job) -> Values:
    """One thread, send and recv in turns, every frame made before the clock starts."""
    return _bare(job, _frames)


def bare_ids(job: Job) -> Values:
    """The same with a message id for each message, so that a repetition is stored once."""
    return _bare(job, _frames_with_ids)


def _bare(job: Job, frames_of: Callable[[Job, str, int], list[bytes]]) -> Values:
    with stream_for(job, allow_batched=True):
        connection, _ = dial(job.url)
        with connection:
            for number, count in enumerate((rounds := Rounds(job)), 1):
                batch = f"_INBOX.{job.subject.replace('.', '-')}-{number}"
                connection.sendall(f"SUB {batch}.> {number}\r\n".encode())
                frames = frames_of(job, batch, count)
                rounds.begin()
                _pump(connection, frames)
    return rounds.values()


def _frames(job: Job, batch: str, count: int) -> list[bytes]:
    head = f"PUB {job.subject} {batch}.{FLOW}.fail.".encode()
    payload = payload_of(job.payload_bytes)
    operations = [0, *[1] * (count - 2), 2] if count > 1 else [2]
    return [
        b"%b%d.%d.$FI %d\r\n%b\r\n" % (head, sequence, operation, len(payload), payload)
        for sequence, operation in enumerate(operations, 1)
    ]


def _frames_with_ids(job: Job, batch: str, count: int) -> list[bytes]:
    """With ids as long as those of the Spark sink."""
    head = f"HPUB {job.subject} {batch}.{FLOW}.fail.".encode()
    payload, source = payload_of(job.payload_bytes), uuid.uuid4().hex
    frames = []
    for sequence in range(1, count + 1):
        operation = 2 if sequence == count else int(sequence > 1)
        message_id = f"{source}:0:0:{sequence}:{crc32(payload):08x}"
        block = b"NATS/1.0\r\nNats-Msg-Id: %b\r\n\r\n" % message_id.encode()
        sizes = len(block), len(block) + len(payload)
        frames.append(b"%b%d.%d.$FI %d %d\r\n%b%b\r\n" % (head, sequence, operation, *sizes, block, payload))
    return frames


def _pump(connection: socket.socket, frames: list[bytes]) -> None:
    per_chunk = max(1, CHUNK_BYTES // len(frames[0]))
    sent, allowed = 0, 1
    tail = b""
    while True:
        while sent < min(allowed, len(frames)):
            end = min(sent + per_chunk, allowed)
            connection.sendall(b"".join(frames[sent:end]))
            sent = min(end, len(frames))
        data = connection.recv(READ_BYTES)
        if not data:
            raise ConnectionLost("the server closed the connection")
        data = tail + data
        if b'"error"' in data or b'"gap"' in data:
            raise ConnectionLost(data.decode(errors="replace"))
        for sequence, messages in _ACK.findall(data):
            allowed = int(sequence) + OUTSTANDING_ACKS * int(messages)
        final = _FINAL.search(data)
        if final is not None:
            if int(final[1]) != len(frames):
                raise ConnectionLost(f"{int(final[1])} stored of {len(frames)}")
            return
        tail = data[-200:]  # an answer that is cut in two; reading one twice does no harm


def nats_js(job: Job) -> Values:
    return _elsewhere(NATS_JS, job)


def nats_js_add(job: Job) -> Values:
    return _elsewhere(NATS_JS, job, one_by_one=True)


def nats_jetstream(job: Job) -> Values:
    return _elsewhere(NATS_JETSTREAM, job)


def _elsewhere(peer: Peer, job: Job, **how: bool) -> Values:
    # Their own defaults are an acknowledgement for every 10 and every 100 messages, which would measure the waiting.
    request = {
        "url": job.url,
        "subject": job.subject,
        "payload": payload_of(job.payload_bytes).decode(),
        "counts": [job.warmup, job.count],
        "flow": FLOW,
        "outstanding_acks": OUTSTANDING_ACKS,
        **how,
    }
    with stream_for(job, allow_batched=True):
        return peer.measure(request)


async def jetspark(job: Job) -> Values:
    async with publishing(job, allow_batched=True) as js:
        subject, payload = job.subject, payload_of(job.payload_bytes)
        for count in (rounds := Rounds(job)):
            async with js.fast_batch() as fast:
                await fast.add_many((subject, payload) for _ in range(count))
    return rounds.values()


async def jetspark_add(job: Job) -> Values:
    async with publishing(job, allow_batched=True) as js:
        subject, payload = job.subject, payload_of(job.payload_bytes)
        for count in (rounds := Rounds(job)):
            async with js.fast_batch() as fast:
                for _ in range(count):
                    await fast.add(subject, payload)
    return rounds.values()


async def publish_async_ids(job: Job) -> Values:
    """Windowed publishing with the publisher's guarantee: a message that is sent again is stored once."""
    async with publishing(job) as js:
        subject, payload, source = job.subject, payload_of(job.payload_bytes), uuid.uuid4().hex
        for part, count in enumerate(rounds := Rounds(job)):
            futures = [await js.publish_async(subject, payload, msg_id=f"{source}-{part}-{n}") for n in range(count)]
            await js.publish_async_complete()
            rounds.end()
            for future in futures:
                future.result()
    return rounds.values()


async def jetspark_publisher(job: Job) -> Values:
    async with publishing(job, allow_batched=True) as js:
        subject, payload = job.subject, payload_of(job.payload_bytes)
        for count in (rounds := Rounds(job)):
            async with js.fast_publisher(message_ids=True) as publisher:
                await publisher.publish_many((subject, payload) for _ in range(count))
    return rounds.values()


def jetspark_blocking(job: Job) -> Values:
    with publishing_blocking(job, allow_batched=True) as js:
        subject, payload = job.subject, payload_of(job.payload_bytes)
        for count in (rounds := Rounds(job)):
            with js.fast_batch() as fast:
                fast.add_many((subject, payload) for _ in range(count))
    return rounds.values()


def jetspark_blocking_add(job: Job) -> Values:
    with publishing_blocking(job, allow_batched=True) as js:
        subject, payload = job.subject, payload_of(job.payload_bytes)
        for count in (rounds := Rounds(job)):
            with js.fast_batch() as fast:
                for _ in range(count):
                    fast.add(subject, payload)
    return rounds.values()


FAST_INGEST = Workload(
    name="fast-ingest",
    what="one long batch, paced by the server; timed from the first call to the final acknowledgement",
    count=200_000,
    quick_count=5_000,
    contenders=(
        Contender(name="bare", what="frames made beforehand, send and recv in turns", run=bare),
        Contender(name="bare-ids", what="the same with message ids", run=bare_ids),
        Contender(name="nats-py", what="await publish_async(), no fast ingest", run=nats_py, needs="nats"),
        Contender(name="nats.js", what="JavaScript, batch.add(), awaited by the window", run=nats_js, needs=NATS_JS),
        Contender(name="nats.js-add", what="JavaScript, await batch.add()", run=nats_js_add, needs=NATS_JS),
        Contender(name="nats-jetstream", what="await fast.add()", run=nats_jetstream, needs=NATS_JETSTREAM),
        Contender(name="jetspark", what="await fast.add_many(generator)", run=jetspark, has_uvloop_twin=True),
        Contender(name="jetspark-add", what="await fast.add()", run=jetspark_add, has_uvloop_twin=True),
        Contender(name="jetspark-publisher", what="fast_publisher, with message ids", run=jetspark_publisher),
        Contender(name="publish_async-ids", what="await publish_async(msg_id=), for comparison", run=publish_async_ids),
        Contender(name="jetspark-blocking", what="fast.add_many(generator)", run=jetspark_blocking),
        Contender(name="jetspark-blocking-add", what="fast.add()", run=jetspark_blocking_add),
    ),
    storage="file",
    replicas=1,
    baselines=("nats-py", "bare", "publish_async-ids"),
    bars=(
        Bar(
            claim="fast ingest, asyncio, add_many, is at least 0.9 x a pre-framed bare writer",
            metric="messages_per_s",
            contender="jetspark",
            baseline="bare",
            at_least=0.9,
        ),
        Bar(
            claim="fast ingest, asyncio, add_many, is at least 4 x nats-py's publish_async",
            metric="messages_per_s",
            contender="jetspark",
            baseline="nats-py",
            at_least=4.0,
        ),
        Bar(
            claim="fast ingest, asyncio, one by one, is at least 0.75 x a pre-framed bare writer",
            metric="messages_per_s",
            contender="jetspark-add",
            baseline="bare",
            at_least=0.75,
        ),
        Bar(
            claim="the fast publisher, with message ids, is at least 1.5 x publish_async with message ids",
            metric="messages_per_s",
            contender="jetspark-publisher",
            baseline="publish_async-ids",
            at_least=1.5,
        ),
    ),
)
