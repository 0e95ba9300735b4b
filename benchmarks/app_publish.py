"""Publishing events: the cost of encoding them, next to fast ingest of the same bytes encoded beforehand.

Both store the same number of messages of the same size with the same headers in a stream of their own, on file
storage; the clock stops when all are stored. ``bulk`` makes the events, validates them, writes their envelopes, and
survives lost connections; ``add_many`` only sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.handlers import bench_app, encoded_events, events_of
from benchmarks.workload import Bar, Contender, Job, Rounds, Values, Workload
from jetspark.aio import connect
from jetspark.errors import ConnectionLost

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app import App

__all__ = ["APP_PUBLISH"]

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def add_many(job: Job) -> Values:
    """Subjects, bodies and headers as ``bulk`` sends them, all made before the clock starts."""
    app, event = bench_app(job)
    items = [
        (subject, data, f"NATS/1.0\r\nNats-Msg-Id: {headers['Nats-Msg-Id']}\r\ntraceparent: {TRACE}\r\n\r\n".encode())
        for subject, data, headers in encoded_events(job, event)
    ]
    await app.apply(job.url)
    async with connect(job.url) as client:
        js = client.jetstream(timeout=30.0)
        for count, first in zip(rounds := Rounds(job), (0, job.warmup), strict=True):
            async with js.fast_batch() as fast:
                await fast.add_many(items[first : first + count])
        await _check_and_delete(js, app, job)
    return rounds.values()


async def jetspark(job: Job) -> Values:
    app, event = bench_app(job)
    events = list(events_of(job, event))
    await app.apply(job.url)
    async with app.connect(job.url) as client:
        for count, first in zip(rounds := Rounds(job), (0, job.warmup), strict=True):
            async with client.bulk() as bulk:
                await bulk.publish_many(events[first : first + count])
        await _check_and_delete(client.js, app, job)
    return rounds.values()


async def _check_and_delete(js: JetStream, app: App, job: Job) -> None:
    stored = (await (await js.stream(app.stream)).info()).state.messages
    for name in (app.stream, f"KV_{app.spec.schema_bucket}"):
        await js.delete_stream(name)
    if stored != job.warmup + job.count:
        raise ConnectionLost(f"{stored} stored of {job.warmup + job.count}")


APP_PUBLISH = Workload(
    name="app-publish",
    what="store events of an application by fast ingest; timed until the last one is stored",
    count=100_000,
    quick_count=1_000,
    payload_bytes=400,
    storage="file",
    replicas=1,
    baselines=("add-many",),
    contenders=(
        Contender(name="add-many", what="add_many(), bytes made beforehand", run=add_many, needs="msgspec"),
        Contender(name="jetspark", what="bulk().publish_many(events)", run=jetspark, needs="msgspec"),
    ),
    bars=(
        Bar(
            claim="events are published in bulk at least 0.6 x as fast as their bytes alone",
            metric="messages_per_s",
            contender="jetspark",
            baseline="add-many",
            at_least=0.6,
        ),
    ),
)
