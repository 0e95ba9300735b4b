"""Request and reply: how long one request takes, one after the other, to a bare responder in another process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import perf_counter

from benchmarks.helper import ECHO_SUBJECT
from benchmarks.wire import READ_BYTES, dial
from benchmarks.workload import (
    CPU_PER_MILLION,
    Bar,
    Contender,
    Job,
    Metric,
    Stopwatch,
    Values,
    Workload,
    payload_of,
    percentile,
)
from jetspark.aio import connect
from jetspark.blocking import connect as connect_blocking
from jetspark.errors import ConnectionLost

__all__ = ["REQUEST_LATENCY"]


def bare(job: Job) -> Values:
    connection, _ = dial(job.url)
    payload, times = payload_of(job.payload_bytes), []
    with connection:
        connection.sendall(f"SUB {job.subject}.* 1\r\n".encode())
        watch = Stopwatch()
        for number in range(job.warmup + job.count):
            started = perf_counter()
            reply = f"{job.subject}.{number}"
            connection.sendall(f"PUB {ECHO_SUBJECT} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n")
            answer = b"MSG "
            data = connection.recv(READ_BYTES)
            # A PING of the server's may come first; an answer in two pieces would be this small only by accident.
            while answer not in data or not data.endswith(b"\r\n"):
                received = connection.recv(READ_BYTES)
                if not received:
                    raise ConnectionLost("the server closed the connection")
                data += received
            times.append(perf_counter() - started)
            assert reply.encode() in data
        watch.stop()
    return _latencies(job, times, watch)


async def nats_py(job: Job) -> Values:
    import nats

    client = await nats.connect(job.url)
    values = await _one_by_one(job, client.request)
    await client.close()
    return values


async def jetspark(job: Job) -> Values:
    async with connect(job.url) as client:
        return await _one_by_one(job, client.request)


async def _one_by_one(job: Job, request: Callable[..., Awaitable[object]]) -> Values:
    payload, times = payload_of(job.payload_bytes), []
    watch = Stopwatch()
    for _ in range(job.warmup + job.count):
        started = perf_counter()
        await request(ECHO_SUBJECT, payload, timeout=5.0)
        times.append(perf_counter() - started)
    watch.stop()
    return _latencies(job, times, watch)


def jetspark_blocking(job: Job) -> Values:
    payload, times = payload_of(job.payload_bytes), []
    with connect_blocking(job.url) as client:
        watch = Stopwatch()
        for _ in range(job.warmup + job.count):
            started = perf_counter()
            client.request(ECHO_SUBJECT, payload, timeout=5.0)
            times.append(perf_counter() - started)
        watch.stop()
    return _latencies(job, times, watch)


def _latencies(job: Job, times: list[float], watch: Stopwatch) -> Values:
    measured = sorted(times[job.warmup :])
    return watch.values(len(times)) | {
        "latency_s_p50": percentile(measured, 50),
        "latency_s_p99": percentile(measured, 99),
    }


REQUEST_LATENCY = Workload(
    name="request-latency",
    what="one request at a time to a bare responder in another process; each is timed from call to answer",
    count=5_000,
    quick_count=200,
    contenders=(
        Contender(name="bare", what="sendall, recv", run=bare),
        Contender(name="nats-py", what="await request()", run=nats_py, needs="nats", has_uvloop_twin=True),
        Contender(name="jetspark", what="await request()", run=jetspark, has_uvloop_twin=True),
        Contender(name="jetspark-blocking", what="request()", run=jetspark_blocking),
    ),
    metrics=(Metric("latency_s_p50", "s", "lower"), Metric("latency_s_p99", "s", "lower"), CPU_PER_MILLION),
    bars=tuple(
        Bar(
            claim=f"a request, asyncio, takes no longer than nats-py's at {name}",
            metric=f"latency_s_{name}",
            contender="jetspark",
            baseline="nats-py",
            at_most=1.0,
        )
        for name in ("p50", "p99")
    ),
)
