"""Atomic batches of a given size, one after the other: how many messages per second are stored, all or none at a time.

Everyone sends the same frames: the first message of a batch is acknowledged before the rest goes out, the last one
commits, and the next batch begins when the commit is acknowledged. On a file-backed stream without replicas the server
takes some milliseconds for each batch, whatever its size; that is what small batches measure. nats-py has no batches:
its ``publish_async`` stores the same messages one by one.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

from benchmarks.js_publish_async import nats_py
from benchmarks.streams import publishing, publishing_blocking, stream_for
from benchmarks.wire import READ_BYTES, dial
from benchmarks.workload import Bar, Contender, Job, Rounds, Values, Workload, payload_of
from jetspark.errors import ConnectionLost

__all__ = ["ATOMIC_10", "ATOMIC_100", "ATOMIC_1000"]


def _sizes(count: int, size: int) -> list[int]:
    """The sizes of the batches that make up ``count`` messages; the last may be smaller."""
    whole, rest = divmod(count, size)
    return [size] * whole + ([rest] if rest else [])


def _bare(size: int) -> Callable[[Job], Values]:
    def run(job: Job) -> Values:
        """One thread, send and recv in turns, every frame made before the clock starts."""
        with stream_for(job, allow_atomic=True):
            connection, _ = dial(job.url)
            with connection:
                inbox = f"_INBOX.{job.subject}"
                connection.sendall(f"SUB {inbox} 1\r\n".encode())
                number = 0
                for count in (rounds := Rounds(job)):
                    batches = []
                    for each in _sizes(count, size):
                        number += 1
                        batches.append(_frames(job, inbox, f"{job.subject}-{number}".replace(".", "-"), each))
                    rounds.begin()
                    for first, rest in batches:
                        if first:
                            connection.sendall(first)
                            _answer(connection)
                        connection.sendall(rest)
                        if b'"count"' not in (answer := _answer(connection)):
                            raise ConnectionLost(answer.decode(errors="replace"))
        return rounds.values()

    return run


def _frames(job: Job, inbox: str, batch: str, size: int) -> tuple[bytes, bytes]:
    """The first message, and all the others."""
    payload = payload_of(job.payload_bytes)
    made = []
    for sequence in range(1, size + 1):
        headers = f"NATS/1.0\r\nNats-Batch-Id: {batch}\r\nNats-Batch-Sequence: {sequence}\r\n"
        if sequence == size:
            headers += "Nats-Batch-Commit: 1\r\n"
        block = f"{headers}\r\n".encode()
        address = job.subject if 1 < sequence < size else f"{job.subject} {inbox}"
        made.append(
            b"HPUB %b %d %d\r\n%b%b\r\n" % (address.encode(), len(block), len(block) + len(payload), block, payload)
        )
    return (b"", made[0]) if size == 1 else (made[0], b"".join(made[1:]))


def _answer(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\r\n") or data.count(b"\r\n") < 2:
        received = connection.recv(READ_BYTES)
        if not received:
            raise ConnectionLost("the server closed the connection")
        data += received
    if b'"error"' in data:
        raise ConnectionLost(data.decode(errors="replace"))
    return data


def _jetspark(size: int) -> Callable[[Job], Awaitable[Values]]:
    async def run(job: Job) -> Values:
        async with publishing(job, allow_atomic=True) as js:
            message = (job.subject, payload_of(job.payload_bytes))
            for count in (rounds := Rounds(job)):
                for each in _sizes(count, size):
                    async with js.atomic_batch() as batch:
                        await batch.add_many(message for _ in range(each - 1))
                        await batch.commit(*message)
        return rounds.values()

    return run


def _jetspark_add(size: int) -> Callable[[Job], Awaitable[Values]]:
    async def run(job: Job) -> Values:
        async with publishing(job, allow_atomic=True) as js:
            message = (job.subject, payload_of(job.payload_bytes))
            for count in (rounds := Rounds(job)):
                for each in _sizes(count, size):
                    async with js.atomic_batch() as batch:
                        for _ in range(each):
                            await batch.add(*message)
        return rounds.values()

    return run


def _jetspark_blocking(size: int) -> Callable[[Job], Values]:
    def run(job: Job) -> Values:
        with publishing_blocking(job, allow_atomic=True) as js:
            message = (job.subject, payload_of(job.payload_bytes))
            for count in (rounds := Rounds(job)):
                for each in _sizes(count, size):
                    with js.atomic_batch() as batch:
                        batch.add_many(message for _ in range(each - 1))
                        batch.commit(*message)
        return rounds.values()

    return run


def _workload(size: int, count: int, bars: tuple[Bar, ...] = ()) -> Workload:
    return Workload(
        name=f"atomic-{size}",
        what=f"atomic batches of {size} messages, one after the other; timed to the last commit's acknowledgement",
        count=count,
        quick_count=2 * size,
        contenders=(
            Contender(name="bare", what="frames made beforehand, send and recv in turns", run=_bare(size)),
            Contender(name="nats-py", what="await publish_async(), no batches", run=nats_py, needs="nats"),
            Contender(name="jetspark", what="await batch.add_many(generator)", run=_jetspark(size)),
            Contender(name="jetspark-add", what="await batch.add()", run=_jetspark_add(size)),
            Contender(name="jetspark-blocking", what="batch.add_many(generator)", run=_jetspark_blocking(size)),
        ),
        storage="file",
        replicas=1,
        bars=bars,
    )


ATOMIC_10 = _workload(10, 2_000)
ATOMIC_100 = _workload(100, 20_000)
ATOMIC_1000 = _workload(
    1000,
    100_000,
    (
        Bar(
            claim="atomic batches of 1000, asyncio, are at least 0.8 x the same frames from a bare socket",
            metric="messages_per_s",
            contender="jetspark",
            baseline="bare",
            at_least=0.8,
        ),
    ),
)
