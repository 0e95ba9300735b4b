"""What an application needs on a server, for tests of its handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from jetspark import ConsumerConfig, KVConfig, StreamConfig
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, encode


async def set_up(js: JetStream, app: App) -> None:
    await js.create_or_update_stream(
        StreamConfig(name=app.stream, subjects=list(app.subjects), allow_direct=True, storage="memory")
    )
    await js.create_or_update_stream(
        StreamConfig(
            name=app.dead_letter_stream,
            subjects=[f"dlq.{app.name}.>"],
            allow_direct=True,
            allow_rollup=True,
            allow_message_ttl=True,
            storage="memory",
        )
    )
    retries = await js.create_or_update_stream(
        StreamConfig(
            name=app.retry_stream,
            subjects=[f"retry.{app.name}.>"],
            allow_direct=True,
            allow_rollup=True,
            allow_message_ttl=True,
            allow_message_schedules=True,
            storage="memory",
        )
    )
    await js.create_or_update_kv(KVConfig(bucket=app.handler_bucket, limit_marker_ttl_s=60, storage="memory"))
    stream = await js.stream(app.stream)
    for spec in app.handlers.values():
        shared: dict[str, Any] = {"durable_name": spec.durable, "ack_wait_s": spec.ack_wait_s}
        filters = [kind.__contract__.subject.filter for kind in spec.events]  # type: ignore[attr-defined]
        await stream.create_or_update_consumer(ConsumerConfig(filter_subjects=filters, **shared))
        waits = f"retry.{app.name}.{spec.durable}"
        await retries.create_or_update_consumer(
            ConsumerConfig(filter_subjects=[f"{waits}.due.>", f"{waits}.redrive.>"], **shared)
        )


async def publish(js: JetStream, app: App, *events: Any) -> None:
    import datetime

    for number, event in enumerate(events):
        now = datetime.datetime.now(datetime.UTC)
        encoded = encode(event, id=f"{app.name}-{now.timestamp()}-{number}", source=app.source, time=now)
        await js.publish(encoded.subject, encoded.data, headers=encoded.headers)


@asynccontextmanager
async def running(app: App, url: str, **options: Any) -> AsyncIterator[asyncio.Task[None]]:
    """The application's workers, for as long as the block lasts; an error of theirs is raised at its end."""
    task = asyncio.create_task(app.run(url, **({"stop_timeout": 5.0} | options)))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
