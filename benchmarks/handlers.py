"""Handlers of an application: how many events pass through one process, and what order and records cost.

Every measurement has an application of its own, which is FastStream's and the bare loop's stream and consumer too: file
storage, one replica, explicit acks, at most 8192 unacknowledged. It is filled before the clock starts with the same
events, CloudEvents of 400 bytes with 10,000 keys. The clock runs from the call for the last event of the warm-up to the
call for the last one of all; the contenders do nothing in between but to read the event into a class, call a function
that counts, and ack. That all acks have come is checked after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.workload import (
    CPU_PER_MILLION,
    MESSAGES_PER_S,
    Bar,
    Contender,
    Job,
    Metric,
    Stopwatch,
    Values,
    Workload,
)
from jetspark.aio import connect
from jetspark.errors import ConnectionLost
from jetspark.jetstream.kv import KVConfig

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.aio.kv import KeyValue
    from jetspark.app import App

__all__ = ["HANDLER", "HANDLER_ONCE", "bench_app", "encoded_events", "events_of"]

KEYS = 10_000
CONSUMER = "bench"
BATCH = 1000
CONCURRENCY = 16
"""Handlers that run at a time, where that is limited: our default."""
ACKS_PROCESSED_S = 30.0
REMEMBER_S = 7 * 86400.0
"""How long records live: our default."""
TIME = datetime.datetime(2026, 3, 15, 10, 15, 30, tzinfo=datetime.UTC)

US_PER_EVENT = Metric("us_per_event", "µs/event", "lower")


class _Count:
    """Called for each event: starts the clock after the warm-up, and stops it at the end."""

    def __init__(self, job: Job) -> None:
        self._warmup, self._total, self._job = job.warmup, job.warmup + job.count, job
        self._done = 0
        self._watch = Stopwatch()
        self.finished = asyncio.Event()

    def one(self) -> None:
        self._done += 1
        if self._done == self._warmup:
            self._watch = Stopwatch()
        elif self._done == self._total:
            self._watch.stop()
            self.finished.set()

    def values(self) -> Values:
        values = self._watch.values(self._job.count)
        return values | {"us_per_event": 1e6 / values["messages_per_s"]}


def bench_app(job: Job) -> tuple[App, Callable[..., Any]]:
    """An application for this measurement, and the class of its events."""
    from jetspark.app import App, Event

    class Paid(Event, type="order.paid", key="order_id", subject=f"{job.subject}.{{order_id}}.paid"):
        order_id: str
        amount_cents: int
        note: str

    name = _name(job)
    return App(name, stream=name, subjects=[f"{job.subject}.>"], events=[Paid]), Paid


def _name(job: Job) -> str:
    return job.subject.replace(".", "-")


def events_of(job: Job, kind: Callable[..., Any]) -> Iterator[Any]:
    """Every event of warm-up and measurement. The first one's message has a body of ``payload_bytes``, and the others
    differ from it by a few digits."""
    empty = _encoded(job, 0, kind(order_id="o-0", amount_cents=0, note=""))
    note = "x" * max(0, job.payload_bytes - len(empty[1]))
    for number in range(job.warmup + job.count):
        yield kind(order_id=f"o-{number % KEYS}", amount_cents=number, note=note)


def encoded_events(job: Job, kind: Callable[..., Any]) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Subject, body and headers of every event."""
    for number, event in enumerate(events_of(job, kind)):
        yield _encoded(job, number, event)


def _encoded(job: Job, number: int, event: Any) -> tuple[str, bytes, dict[str, str]]:
    from jetspark.app import encode

    return encode(event, id=f"{number:036}", source=f"/{_name(job)}", time=TIME)


@contextlib.asynccontextmanager
async def _filled(job: Job, **options: Any) -> AsyncIterator[tuple[App, _Count]]:
    """An application whose stream has warm-up and measurement in it, with one handler, which counts."""
    app, event = bench_app(job)
    count = _Count(job)

    @app.handler(event, durable=CONSUMER, **options)  # type: ignore[arg-type]  # a class
    async def handle(event: Any) -> None:
        count.one()

    async with _applied(job, app, event):
        yield app, count


@contextlib.asynccontextmanager
async def _applied(job: Job, app: App, event: Callable[..., Any]) -> AsyncIterator[JetStream]:
    await app.apply(job.url)
    async with connect(job.url) as client:
        js = client.jetstream(timeout=30.0)
        try:
            async with js.fast_batch() as fast:
                await fast.add_many(encoded_events(job, event))
            yield js
            await _check_acks(js, app, job)
        finally:
            topology = app.topology()
            for name in [each.name for each in topology.streams] + [f"KV_{each.bucket}" for each in topology.buckets]:
                await js.delete_stream(name)


async def _check_acks(js: JetStream, app: App, job: Job) -> None:
    """Every event was acked, or that is an error."""
    consumer = await (await js.stream(app.stream)).consumer(CONSUMER)
    async with asyncio.timeout(ACKS_PROCESSED_S):
        while (info := await consumer.info()).ack_floor.stream_sequence != job.warmup + job.count:
            if not info.ack_pending:
                raise ConnectionLost(f"{info.ack_floor.stream_sequence} acked of {job.warmup + job.count}")
            await asyncio.sleep(0.01)


async def _run_app(job: Job, app: App, count: _Count) -> Values:
    workers = asyncio.create_task(app.run(job.url))
    finished = asyncio.create_task(count.finished.wait())
    await asyncio.wait([workers, finished], return_when=asyncio.FIRST_COMPLETED)
    finished.cancel()
    workers.cancel()
    await asyncio.wait([workers])
    if not workers.cancelled() and (error := workers.exception()) is not None:
        raise error
    return count.values()


async def loop(job: Job) -> Values:
    """The loop of a program without a framework."""
    import msgspec

    class Paid(msgspec.Struct):
        order_id: str
        amount_cents: int
        note: str

    decoder = msgspec.json.Decoder(_envelope_of(Paid))
    async with _filled(job) as (app, count), connect(job.url) as client:
        consumer = await (await client.jetstream().stream(app.stream)).consumer(CONSUMER)
        async with consumer.messages(max_messages=BATCH) as messages:
            async for message in messages:
                event = decoder.decode(message.data).data
                assert event.order_id
                await message.ack()
                count.one()
                if count.finished.is_set():
                    break
        await client.flush()
    return count.values()


async def faststream(job: Job) -> Values:
    """With msgspec, as we have, which is faster than its default; without its log lines for each message."""
    import msgspec
    from fast_depends.msgspec import MsgSpecSerializer
    from faststream.nats import JStream, NatsBroker, PullSub

    class Paid(msgspec.Struct):
        order_id: str
        amount_cents: int
        note: str

    envelope = _envelope_of(Paid)
    async with _filled(job) as (app, count):
        broker = NatsBroker(job.url, logger=None, serializer=MsgSpecSerializer())

        async def handle(event: Any) -> None:
            assert event.data.order_id
            count.one()

        handle.__annotations__["event"] = envelope
        stream = JStream(name=app.stream, declare=False)
        subject = f"{job.subject}.*.paid"
        subscribe = broker.subscriber(subject, durable=CONSUMER, stream=stream, pull_sub=PullSub(batch_size=BATCH))
        subscribe(handle)
        async with broker:
            await broker.start()
            await count.finished.wait()
    return count.values()


def _envelope_of(kind: type) -> Any:
    import msgspec

    fields = [(name, str) for name in ("specversion", "id", "source", "type", "time", "subject", "correlationid")]
    return msgspec.defstruct("Envelope", [*fields, ("schemaversion", int), ("data", kind)])


async def jetspark(job: Job) -> Values:
    async with _filled(job, in_order=False) as (app, count):
        return await _run_app(job, app, count)


async def jetspark_in_order(job: Job) -> Values:
    async with _filled(job) as (app, count):
        return await _run_app(job, app, count)


async def jetspark_observed(job: Job) -> Values:
    """With an observer that counts; the rows before have none, which is what telemetry costs when it is off."""
    from jetspark.app import AttemptResult, HandlerAttempt, HandlerObserver

    class Counts(HandlerObserver):
        def __init__(self) -> None:
            self.started = self.finished = 0

        def on_started(self, attempt: HandlerAttempt) -> None:
            self.started += 1

        def on_finished(self, attempt: HandlerAttempt, result: AttemptResult) -> None:
            self.finished += 1

    async with _filled(job) as (app, count):
        counts = Counts()
        app.observe(counts)
        values = await _run_app(job, app, count)
        assert counts.started >= job.warmup + job.count
        return values


# ---- effects that happen once --------------------------------------------------------------------------------------


async def jetspark_context(job: Job) -> Values:
    return await _with_context(job, "nothing")


async def jetspark_once(job: Job) -> Values:
    return await _with_context(job, "once")


async def jetspark_transaction(job: Job) -> Values:
    return await _with_context(job, "transaction", idempotent="transaction", bucket=f"{_name(job)}-effects")


async def _with_context(job: Job, effect: str, **options: Any) -> Values:
    from jetspark.app import Context

    app, event = bench_app(job)
    count = _Count(job)

    async def handle(event: Any, ctx: Context) -> None:
        if effect == "once":
            await ctx.once("effect", _nothing)
        elif effect == "transaction":
            await ctx.tx.put(event.order_id, b"paid")
        count.one()

    handle.__annotations__["ctx"] = Context  # which only exists in this function
    app.handler(event, durable=CONSUMER, concurrency=CONCURRENCY, **options)(handle)  # type: ignore[arg-type]
    async with _applied(job, app, event):
        return await _run_app(job, app, count)


async def _nothing() -> str:
    return "done"


async def two_writes(job: Job) -> Values:
    """The writes of once() for each event, without events and handlers."""

    async def write(bucket: KeyValue, number: int) -> None:
        key = f"once.bench.{number:036}.effect"
        claim = b'{"state":"claimed","owner":"host:1234:abcdef01","until":1e9}'
        revision = await bucket.create(key, claim, ttl=REMEMBER_S)
        await bucket.update(key, b'{"state":"done","result":"done"}', revision=revision, ttl=REMEMBER_S)

    return await _write(job, write)


async def kv_transaction(job: Job) -> Values:
    """The writes of a handler with a transaction for each event."""

    async def write(bucket: KeyValue, number: int) -> None:
        async with bucket.transaction() as tx:
            await tx.create(f"_done.bench.{number:036}", b"{}", ttl=REMEMBER_S)
            await tx.put(f"o-{number % KEYS}", b"paid")

    return await _write(job, write)


async def _write(job: Job, write: Callable[[KeyValue, int], Awaitable[None]]) -> Values:
    count = _Count(job)
    async with connect(job.url) as client:
        js = client.jetstream(timeout=30.0)
        bucket = await js.create_kv(KVConfig(bucket=_name(job), allow_atomic=True, limit_marker_ttl_s=60.0))
        numbers = iter(range(job.warmup + job.count))

        async def some() -> None:
            for number in numbers:
                await write(bucket, number)
                count.one()

        try:
            await asyncio.gather(*(some() for _ in range(CONCURRENCY)))
        finally:
            await js.delete_stream(f"KV_{_name(job)}")
    return count.values()


METRICS = (MESSAGES_PER_S, US_PER_EVENT, CPU_PER_MILLION)

HANDLER = Workload(
    name="handler",
    what="call a handler that does nothing for each event of a stream: decode, call, ack",
    count=60_000,
    quick_count=1_000,
    payload_bytes=400,
    storage="file",
    replicas=1,
    metrics=METRICS,
    baselines=("faststream", "loop", "jetspark"),
    contenders=(
        Contender(name="loop", what="messages(), msgspec, ack(): no framework", run=loop, needs="msgspec"),
        Contender(name="faststream", what="PullSub(1000), msgspec", run=faststream, needs="faststream"),
        Contender(name="jetspark", what="@app.handler(in_order=False)", run=jetspark, needs="msgspec"),
        Contender(name="jetspark-in-order", what="@app.handler, 10,000 keys", run=jetspark_in_order, needs="msgspec"),
        Contender(name="jetspark-observed", what="the same and an observer", run=jetspark_observed, needs="msgspec"),
    ),
    bars=(
        Bar(
            claim="a handler that does nothing is called at least 6 x as often as FastStream's",
            metric="messages_per_s",
            contender="jetspark",
            baseline="faststream",
            at_least=6.0,
        ),
        Bar(
            claim="a handler costs at most 18 µs an event more than a loop without a framework",
            metric="us_per_event",
            contender="jetspark",
            baseline="loop",
            by="difference",
            at_most=18.0,
        ),
        Bar(
            claim="a handler that keeps the order of 10,000 keys is at least 0.7 x as fast as one that does not",
            metric="messages_per_s",
            contender="jetspark-in-order",
            baseline="jetspark",
            at_least=0.7,
        ),
    ),
)

HANDLER_ONCE = Workload(
    name="handler-once",
    what="the same with an effect that happens once for each event, 16 at a time",
    count=2_000,
    quick_count=50,
    payload_bytes=400,
    storage="file",
    replicas=1,
    metrics=METRICS,
    baselines=("two-writes", "kv-transaction", "jetspark"),
    contenders=(
        Contender(name="two-writes", what="kv.create() and kv.update(), no events", run=two_writes),
        Contender(name="kv-transaction", what="two keys, no events", run=kv_transaction),
        Contender(name="jetspark", what="a context, no effect", run=jetspark_context, needs="msgspec"),
        Contender(name="jetspark-once", what="ctx.once()", run=jetspark_once, needs="msgspec"),
        Contender(name="jetspark-transaction", what="ctx.tx.put()", run=jetspark_transaction, needs="msgspec"),
    ),
    bars=(
        Bar(
            claim="a handler with once() is at least 0.7 x as fast as the two writes that it makes",
            metric="messages_per_s",
            contender="jetspark-once",
            baseline="two-writes",
            at_least=0.7,
        ),
        Bar(
            claim="a handler with a transaction is at least 0.7 x as fast as that transaction",
            metric="messages_per_s",
            contender="jetspark-transaction",
            baseline="kv-transaction",
            at_least=0.7,
        ),
    ),
)
