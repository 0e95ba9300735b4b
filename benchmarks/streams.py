"""A stream for one measurement: made before the clock starts, checked after it stopped, and gone then."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.workload import Job
from jetspark.aio import connect as connect_aio
from jetspark.aio.jetstream import JetStream
from jetspark.blocking import JetStream as BlockingJetStream
from jetspark.blocking import connect
from jetspark.errors import ConnectionLost, StreamNotFound

if TYPE_CHECKING:
    from jetspark.app import App

__all__ = ["app_stream", "publishing", "publishing_blocking", "stream_for"]


@contextlib.contextmanager
def stream_for(job: Job, **config: Any) -> Iterator[None]:
    """A stream in a file. At the end of the block it must have stored exactly the published messages."""
    name = job.subject.replace(".", "-")
    body = {
        "name": name,
        "subjects": [job.subject],
        "storage": "file",
        "num_replicas": job.replicas,
        "retention": "limits",
    }
    with connect(job.url) as client:
        reply = json.loads(client.request(f"$JS.API.STREAM.CREATE.{name}", json.dumps(body | config).encode()).data)
        if "error" in reply:
            raise ConnectionLost(f"no stream: {reply['error']}")
        try:
            yield
            info = json.loads(client.request(f"$JS.API.STREAM.INFO.{name}").data)
            if info["state"]["messages"] != job.warmup + job.count:
                raise ConnectionLost(f"{info['state']['messages']} stored of {job.warmup + job.count}")
        finally:
            client.request(f"$JS.API.STREAM.DELETE.{name}")


@contextlib.asynccontextmanager
async def publishing(job: Job, **config: Any) -> AsyncIterator[JetStream]:
    """A context of asyncio for the stream of :func:`stream_for`."""
    with stream_for(job, **config):
        async with connect_aio(job.url) as client:
            yield client.jetstream()


@contextlib.contextmanager
def publishing_blocking(job: Job, **config: Any) -> Iterator[BlockingJetStream]:
    """The same in threads."""
    with stream_for(job, **config), connect(job.url) as client:
        yield client.jetstream()


@contextlib.asynccontextmanager
async def app_stream(job: Job, app: App, *, subject: str) -> AsyncIterator[JetStream]:
    """The stream of an application. At the end of the block it must have stored one event on ``subject`` for each
    operation, warm-up included."""
    async with connect_aio(job.url) as client:
        js = client.jetstream(timeout=30.0)
        names = [app.stream, f"KV_{app.spec.schema_bucket}"]
        for name in names:
            with contextlib.suppress(StreamNotFound):
                await js.delete_stream(name)
        await app.apply(job.url)
        try:
            yield js
            found = (await (await js.stream(app.stream)).info(subjects_filter=subject)).state.subjects
            stored = sum((found or {}).values())
            if stored != job.warmup + job.count:
                raise ConnectionLost(f"{stored} stored of {job.warmup + job.count}")
        finally:
            for name in names:
                await js.delete_stream(name)
