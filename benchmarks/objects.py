"""Object store: how fast a large object goes into a bucket, and how fast it comes out, hashed on the way.

Everyone stores or reads the same object in chunks of the same size, in a file, and computes its SHA-256. Two things
bound a put whatever the client does: the hash, 0.3 s for 256 MiB on the machine this was written on, and the server,
which spent more than a third of a second of processor time. The bare contenders copy nothing, make no objects, and
hash in the same thread.

nats-py writes into a file-like object here. Without one it appends every chunk to one bytes object, which for 256 MiB
takes three minutes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.wire import READ_BYTES, dial
from benchmarks.workload import Bar, Contender, Job, Metric, Rounds, Values, Workload, payload_of
from jetspark.aio import connect
from jetspark.blocking import connect as connect_blocking
from jetspark.errors import ConnectionLost
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.objects import (
    DEFAULT_CHUNK_BYTES,
    FAST_WINDOW_BYTES,
    READ_AHEAD_BYTES,
    chunk_subject,
    stream_of,
)

__all__ = ["OBJECT_GET", "OBJECT_PUT"]

MEGABYTES_PER_S = Metric("megabytes_per_s", "MB/s")

OUTSTANDING_ACKS = 2

_ACK = re.compile(rb'\{"type":"ack","seq":([0-9]+),"msgs":([0-9]+)\}')
_FINAL = re.compile(rb'"batch":"[^"]*","count":([0-9]+)')
_LAST_SEQUENCE = re.compile(rb"\r\nNats-Sequence: ([0-9]+)\r\n")


def _bucket(job: Job) -> str:
    return job.subject.replace(".", "-")


def _objects(counts: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Sizes in chunks and names: one to warm up with, one to measure."""
    return zip(counts, ("small", "large"), strict=True)


def _speed(job: Job, rounds: Rounds) -> Values:
    return {"megabytes_per_s": rounds.values()["messages_per_s"] * job.payload_bytes / 1e6}


@contextlib.contextmanager
def _empty(job: Job) -> Iterator[str]:
    """A bucket that has both objects, warm-up and measurement, when the block ends; or that is an error."""
    bucket = _bucket(job)
    with connect_blocking(job.url) as client:
        js = client.jetstream(timeout=30.0)
        js.create_object_store(bucket)
        try:
            yield bucket
            stored = sum(js.stream(stream_of(bucket)).info(subjects_filter=f"$O.{bucket}.C.>").state.subjects.values())
            if stored != job.warmup + job.count:
                raise ConnectionLost(f"{stored} chunks stored of {job.warmup + job.count}")
        finally:
            js.delete_object_store(bucket)


@contextlib.contextmanager
def _filled(job: Job) -> Iterator[str]:
    """A bucket with both objects in it."""
    bucket = _bucket(job)
    with connect_blocking(job.url) as client:
        js = client.jetstream(timeout=30.0)
        try:
            store = js.create_object_store(bucket)
            for count, name in _objects((job.warmup, job.count)):
                store.put(name, payload_of(count * job.payload_bytes))
            yield bucket
        finally:
            js.delete_object_store(bucket)


# ---- in --------------------------------------------------------------------------------------------------------------


def bare_put(job: Job) -> Values:
    """Chunks are sent from where they are, head and tail beside them, as the fast batch allows, and hashed first."""
    with _empty(job) as bucket:
        connection, _ = dial(job.url)
        with connection:
            for number, (count, name) in enumerate(_objects(rounds := Rounds(job)), 1):
                data = memoryview(payload_of(count * job.payload_bytes))
                inbox = f"_INBOX.{bucket}-{name}"
                connection.sendall(f"SUB {inbox}.> {number}\r\n".encode())
                heads = _heads(job, f"PUB {chunk_subject(bucket, name)} {inbox}", count)
                rounds.begin()
                _pump(connection, heads, data, job.payload_bytes)
    return _speed(job, rounds)


def _heads(job: Job, beginning: str, count: int) -> list[bytes]:
    flow = max(1, FAST_WINDOW_BYTES // job.payload_bytes // OUTSTANDING_ACKS)
    operations = [0, *[1] * (count - 2), 2] if count > 1 else [2]
    return [
        f"{beginning}.{flow}.fail.{sequence}.{operation}.$FI {job.payload_bytes}\r\n".encode()
        for sequence, operation in enumerate(operations, 1)
    ]


def _pump(connection: socket.socket, heads: list[bytes], data: memoryview, chunk_bytes: int) -> None:
    digest = hashlib.sha256()
    sent, allowed = 0, 1
    tail = b""
    while True:
        while sent < min(allowed, len(heads)):
            chunk = data[sent * chunk_bytes : (sent + 1) * chunk_bytes]
            digest.update(chunk)
            frame = [memoryview(heads[sent]), chunk, memoryview(b"\r\n")]
            while frame:
                written = connection.sendmsg(frame)
                while frame and written >= len(frame[0]):
                    written -= len(frame.pop(0))
                if frame:
                    frame[0] = frame[0][written:]
            sent += 1
        received = connection.recv(READ_BYTES)
        if not received:
            raise ConnectionLost("the server closed the connection")
        answers = tail + received
        if b'"error"' in answers or b'"gap"' in answers:
            raise ConnectionLost(answers.decode(errors="replace"))
        for sequence, messages in _ACK.findall(answers):
            allowed = int(sequence) + OUTSTANDING_ACKS * int(messages)
        final = _FINAL.search(answers)
        if final is not None:
            if int(final[1]) != len(heads):
                raise ConnectionLost(f"{int(final[1])} stored of {len(heads)}")
            digest.digest()
            return
        tail = answers[-200:]  # an answer that is cut in two; reading one twice does no harm


async def nats_py_put(job: Job) -> Values:
    import nats

    with _empty(job) as bucket:
        client = await nats.connect(job.url)
        store = await client.jetstream(timeout=30).object_store(bucket)
        for count, name in _objects(rounds := Rounds(job)):
            data = payload_of(count * job.payload_bytes)
            rounds.begin()
            await store.put(name, data)
        await client.close()
    return _speed(job, rounds)


async def jetspark_put(job: Job) -> Values:
    with _empty(job) as bucket:
        async with connect(job.url) as client:
            store = await client.jetstream().object_store(bucket)
            for count, name in _objects(rounds := Rounds(job)):
                data = payload_of(count * job.payload_bytes)
                rounds.begin()
                await store.put(name, data)
    return _speed(job, rounds)


async def jetspark_put_plain(job: Job) -> Values:
    with _empty(job) as bucket:
        async with connect(job.url) as client:
            js = client.jetstream()
            await js.update_stream(StreamConfig(name=stream_of(bucket), allow_batched=False))
            store = await js.object_store(bucket)
            for count, name in _objects(rounds := Rounds(job)):
                data = payload_of(count * job.payload_bytes)
                rounds.begin()
                await store.put(name, data)
    return _speed(job, rounds)


def jetspark_blocking_put(job: Job) -> Values:
    with _empty(job) as bucket, connect_blocking(job.url) as client:
        store = client.jetstream().object_store(bucket)
        for count, name in _objects(rounds := Rounds(job)):
            data = payload_of(count * job.payload_bytes)
            rounds.begin()
            store.put(name, data)
    return _speed(job, rounds)


# ---- out -------------------------------------------------------------------------------------------------------------


def bare_get(job: Job) -> Values:
    """One batch of direct gets after the other, each read into memory that is there already, and hashed there."""
    with _filled(job) as bucket:
        with connect_blocking(job.url) as client:
            infos = {info.name: info for info in client.jetstream().object_store(bucket).list()}
        connection, _ = dial(job.url)
        with connection:
            connection.sendall(f"SUB _INBOX.{bucket} 1\r\n".encode())
            for count, name in _objects(rounds := Rounds(job)):
                digest = _read(connection, bucket, chunk_subject(bucket, infos[name].nuid), job.payload_bytes, count)
                rounds.end()
                if digest != hashlib.sha256(payload_of(count * job.payload_bytes)).digest():
                    raise ConnectionLost("that is not the object that was put")
    return _speed(job, rounds)


def _read(connection: socket.socket, bucket: str, subject: str, chunk_bytes: int, wanted: int) -> bytes:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(2 * chunk_bytes + READ_BYTES))
    filled = received = sequence = 0
    while received < wanted:
        batch = min(max(READ_AHEAD_BYTES // chunk_bytes, 1), wanted - received)
        body = json.dumps({"batch": batch, "seq": sequence + 1, "next_by_subj": subject})
        ask = f"PUB $JS.API.DIRECT.GET.{stream_of(bucket)} _INBOX.{bucket} {len(body)}\r\n{body}\r\n"
        connection.sendall(ask.encode())
        is_over = False
        while not is_over:
            count = connection.recv_into(buffer[filled:])
            if not count:
                raise ConnectionLost("the server closed the connection")
            filled += count
            position = 0
            while not is_over:
                beginning = bytes(buffer[position : min(filled, position + 1024)])
                line, found, _ = beginning.partition(b"\r\n")
                if not found:
                    break
                start = position + len(line) + 2
                if not line.startswith(b"HMSG "):  # the server's PING, which it does not mind being ignored
                    position = start
                    continue
                *_, header_text, size_text = line.split(b" ")
                end = start + int(size_text)
                if end + 2 > filled:
                    break
                content = start + int(header_text)
                if content == end:
                    is_over = True  # the end of the batch has a status and no content
                else:
                    digest.update(buffer[content:end])
                    received += 1
                    if (number := _LAST_SEQUENCE.search(bytes(buffer[start:content]))) is None:
                        raise ConnectionLost(f"no sequence in {bytes(buffer[start:content])!r}")
                    sequence = int(number[1])
                position = end + 2
            rest = bytes(buffer[position:filled])
            buffer[: len(rest)] = rest
            filled = len(rest)
    return digest.digest()


async def nats_py_get(job: Job) -> Values:
    import nats

    with _filled(job) as bucket:
        client = await nats.connect(job.url)
        store = await client.jetstream(timeout=30).object_store(bucket)
        for count, name in _objects(rounds := Rounds(job)):
            target: Any = io.BytesIO()
            rounds.begin()
            await store.get(name, writeinto=target)
            rounds.end()
            assert len(target.getbuffer()) == count * job.payload_bytes
        await client.close()
    return _speed(job, rounds)


async def jetspark_get(job: Job) -> Values:
    with _filled(job) as bucket:
        async with connect(job.url) as client:
            store = await client.jetstream().object_store(bucket)
            for count, name in _objects(rounds := Rounds(job)):
                data = await store.get_bytes(name)
                rounds.end()
                assert len(data) == count * job.payload_bytes
                del data  # as much memory as before
    return _speed(job, rounds)


async def jetspark_get_chunks(job: Job) -> Values:
    with _filled(job) as bucket:
        async with connect(job.url) as client:
            store = await client.jetstream().object_store(bucket)
            for _, name in _objects(rounds := Rounds(job)):
                async for _ in store.chunks(name):
                    pass
    return _speed(job, rounds)


def jetspark_blocking_get(job: Job) -> Values:
    with _filled(job) as bucket, connect_blocking(job.url) as client:
        store = client.jetstream().object_store(bucket)
        for count, name in _objects(rounds := Rounds(job)):
            data = store.get_bytes(name)
            rounds.end()
            assert len(data) == count * job.payload_bytes
            del data  # as much memory as before
    return _speed(job, rounds)


OBJECT_PUT = Workload(
    name="object-put",
    what="put one object of 256 MiB, from memory; timed until it is visible",
    count=2048,
    quick_count=64,
    payload_bytes=DEFAULT_CHUNK_BYTES,
    storage="file",
    replicas=1,
    metrics=(MEGABYTES_PER_S,),
    contenders=(
        Contender(name="bare", what="one fast batch, hashed and sent in turns, without metadata", run=bare_put),
        Contender(name="nats-py", what="await put(bytes)", run=nats_py_put, needs="nats"),
        Contender(name="jetspark", what="await put(bytes)", run=jetspark_put, has_uvloop_twin=True),
        Contender(name="jetspark-plain", what="the same, in a bucket without fast ingest", run=jetspark_put_plain),
        Contender(name="jetspark-blocking", what="put(bytes)", run=jetspark_blocking_put),
    ),
    bars=(
        Bar(
            # A bare writer that hashes reaches less than 3 x nats-py on two cores.
            claim="put of 256 MiB, asyncio, is at least 2 x nats-py",
            metric="megabytes_per_s",
            contender="jetspark",
            baseline="nats-py",
            at_least=2.0,
        ),
        Bar(
            claim="put of 256 MiB, asyncio, is at least 0.75 x a bare writer that hashes",
            metric="megabytes_per_s",
            contender="jetspark",
            baseline="bare",
            at_least=0.75,
        ),
    ),
)

OBJECT_GET = Workload(
    name="object-get",
    what="get one object of 256 MiB into memory, checked; timed from the call to its return",
    count=2048,
    quick_count=64,
    payload_bytes=DEFAULT_CHUNK_BYTES,
    storage="file",
    replicas=1,
    metrics=(MEGABYTES_PER_S,),
    contenders=(
        Contender(name="bare", what="direct gets, hashed where they arrive, and dropped", run=bare_get),
        Contender(name="nats-py", what="await get(writeinto=BytesIO)", run=nats_py_get, needs="nats"),
        Contender(name="jetspark", what="await get_bytes()", run=jetspark_get, has_uvloop_twin=True),
        Contender(name="jetspark-chunks", what="async for in chunks()", run=jetspark_get_chunks),
        Contender(name="jetspark-blocking", what="get_bytes()", run=jetspark_blocking_get),
    ),
    bars=(
        Bar(
            claim="get of 256 MiB, asyncio, is at least 5 x nats-py",
            metric="megabytes_per_s",
            contender="jetspark",
            baseline="nats-py",
            at_least=5.0,
        ),
    ),
)
