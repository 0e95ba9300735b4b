"""Throughput and latency of one client against a given server, a measurement at a time.

Measurements of JetStream use a stream of their own, which is deleted afterwards. Each does a tenth of its work as a
warm-up before the clock starts. Comparisons with other clients are in the repository's `benchmarks/` folder.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

from jetspark.aio import Client, JetStream, Message, connect
from jetspark.errors import ConfigError, JetSparkError
from jetspark.jetstream.config import ConsumerConfig, StreamConfig

__all__ = ["MEASUREMENTS", "BenchSettings", "Measured", "choose", "measure"]

WARMUP_PART = 10
"""The warm-up is the count divided by this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    payload_bytes: int = 128
    storage: Literal["file", "memory"] = "file"
    replicas: int = 1
    """Copies of each message that the stream of a measurement keeps."""
    count: int | None = None
    """Operations of each measurement; its own number if not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Results of one measurement. A figure that was not measured is None; after an ``error`` all of them are."""

    name: str
    count: int
    messages_per_s: float | None = None
    latency_s_p50: float | None = None
    latency_s_p99: float | None = None
    error: str | None = None


Work = Callable[[int], Awaitable[list[float]]]
"""Do that many operations; returns the latency of each in seconds, or nothing if they are not awaited one by one."""


@dataclass(frozen=True, slots=True)
class _BenchRun:
    client: Client
    servers: dict[str, Any]
    """Arguments of ``connect`` for a second connection."""
    settings: BenchSettings
    name: str
    """The subject of this measurement, and the name of its stream."""
    total: int
    """Operations, the warm-up included."""

    @property
    def payload(self) -> bytes:
        return bytes(self.settings.payload_bytes)

    @asynccontextmanager
    async def stream(self, **config: Any) -> AsyncIterator[JetStream]:
        """A context whose stream, of this run's name, is deleted when the block ends."""
        js = self.client.jetstream()
        settings = self.settings
        stream = StreamConfig(
            name=self.name, subjects=[self.name], storage=settings.storage, replicas=settings.replicas, **config
        )
        await js.create_stream(stream)
        try:
            yield js
        finally:
            await js.delete_stream(self.name)


@asynccontextmanager
async def _publish(run: _BenchRun) -> AsyncIterator[Work]:
    async def work(count: int) -> list[float]:
        publish, subject, payload = run.client.publish, run.name, run.payload
        for _ in range(count):
            await publish(subject, payload)
        await run.client.flush(60.0)
        return []

    yield work


@asynccontextmanager
async def _request(run: _BenchRun) -> AsyncIterator[Work]:
    """The responder is this process, too, on a connection of its own."""
    async with connect(**run.servers) as responder:

        async def respond(message: Message) -> None:
            await message.respond(message.data)

        await responder.subscribe(run.name, callback=respond)
        await responder.flush()

        async def request() -> None:
            await run.client.request(run.name, run.payload, timeout=5.0)

        yield _one_by_one(request)


@asynccontextmanager
async def _js_publish(run: _BenchRun) -> AsyncIterator[Work]:
    async with run.stream() as js:

        async def publish() -> None:
            await js.publish(run.name, run.payload)

        yield _one_by_one(publish)


@asynccontextmanager
async def _js_publish_async(run: _BenchRun) -> AsyncIterator[Work]:
    async with run.stream() as js:

        async def work(count: int) -> list[float]:
            await _publish_windowed(js, run, count)
            return []

        yield work


@asynccontextmanager
async def _fast_ingest(run: _BenchRun) -> AsyncIterator[Work]:
    async with run.stream(allow_batched=True) as js:

        async def work(count: int) -> list[float]:
            async with js.fast_batch() as fast:
                await fast.add_many((run.name, run.payload) for _ in range(count))
            return []

        yield work


@asynccontextmanager
async def _pull(run: _BenchRun) -> AsyncIterator[Work]:
    async with run.stream() as js:
        await _publish_windowed(js, run, run.total)
        stream = await js.stream(run.name)
        consumer = await stream.create_consumer(ConsumerConfig(durable_name="bench", ack_policy="explicit"))
        async with consumer.messages() as messages:

            async def work(count: int) -> list[float]:
                received = 0
                async for message in messages:
                    await message.ack()
                    received += 1
                    if received == count:
                        break
                await run.client.flush(60.0)
                return []

            yield work


async def _publish_windowed(js: JetStream, run: _BenchRun, count: int) -> None:
    subject, payload = run.name, run.payload
    acks = [await js.publish_async(subject, payload) for _ in range(count)]
    await js.publish_async_complete(60.0)
    for ack in acks:
        ack.result()


def _one_by_one(operation: Callable[[], Awaitable[None]]) -> Work:
    async def work(count: int) -> list[float]:
        times = []
        for _ in range(count):
            started = perf_counter()
            await operation()
            times.append(perf_counter() - started)
        return times

    return work


@dataclass(frozen=True, slots=True)
class Measurement:
    what: str
    count: int
    begin: Callable[[_BenchRun], AbstractAsyncContextManager[Work]]


MEASUREMENTS: dict[str, Measurement] = {
    "publish": Measurement("core publish, then flush", 200_000, _publish),
    "request": Measurement("one request at a time, answered by a second connection", 2_000, _request),
    "js-publish": Measurement("one publish at a time, each acknowledged", 2_000, _js_publish),
    "js-publish-async": Measurement("windowed publish, until all are acknowledged", 50_000, _js_publish_async),
    "fast-ingest": Measurement("one fast batch, until its final acknowledgement", 100_000, _fast_ingest),
    "pull": Measurement("a pull consumer, each message acknowledged", 50_000, _pull),
}


def choose(names: list[str]) -> dict[str, Measurement]:
    """The named measurements, or all of them.

    Raises:
        ConfigError: A name is unknown.
    """
    if unknown := [name for name in names if name not in MEASUREMENTS]:
        raise ConfigError(f"unknown measurement {', '.join(unknown)}: expected some of {', '.join(MEASUREMENTS)}")
    return {name: each for name, each in MEASUREMENTS.items() if not names or name in names}


async def measure(names: list[str], servers: dict[str, Any], settings: BenchSettings) -> AsyncIterator[Measured]:
    """Measure one after the other. A measurement that the server refuses has an ``error``; the others are still done.

    Args:
        servers: Arguments of :func:`jetspark.connect`.
    """
    chosen = choose(names)
    async with connect(**servers) as client:
        for name, measurement in chosen.items():
            count = settings.count or measurement.count
            warmup = max(1, count // WARMUP_PART)
            run = _BenchRun(client, servers, settings, f"jetspark-bench-{secrets.token_hex(4)}", warmup + count)
            try:
                async with measurement.begin(run) as work:
                    await work(warmup)
                    started = perf_counter()
                    times = sorted(await work(count))
                    elapsed_s = perf_counter() - started
            except JetSparkError as error:
                yield Measured(name=name, count=count, error=str(error))
                continue
            yield Measured(
                name=name,
                count=count,
                messages_per_s=count / elapsed_s,
                latency_s_p50=_percentile(times, 50),
                latency_s_p99=_percentile(times, 99),
            )


def _percentile(ordered: list[float], percent: int) -> float | None:
    """By nearest rank: one of the measured values."""
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else None
