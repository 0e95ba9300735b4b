"""What an application needs on a server, for tests of its handlers."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from jetspark.aio.jetstream import JetStream
from jetspark.app import App, encode
from jetspark.app.provisioning import apply_topology
from support.patience import PATIENCE_S


async def set_up(js: JetStream, app: App) -> None:
    await apply_topology(js, app)


async def publish(js: JetStream, app: App, *events: Any) -> None:
    for number, event in enumerate(events):
        now = datetime.datetime.now(datetime.UTC)
        encoded = encode(event, id=f"{app.name}-{now.timestamp()}-{number}", source=app.source, time=now)
        await js.publish(encoded.subject, encoded.data, headers=encoded.headers)


async def until(condition: Callable[[], Any], timeout: float = PATIENCE_S) -> None:
    """Wait until something is true that nobody announces, such as the state of a consumer."""
    async with asyncio.timeout(timeout):
        while True:
            result = condition()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.05)


async def is_settled(js: JetStream, app: App, name: str) -> bool:
    """Nothing of the handler's is pending, or scheduled."""
    retries = await js.stream(app.spec.retry_stream)
    before = (await retries.info()).state.last_sequence
    for stream in (await js.stream(app.stream), retries):
        info = await (await stream.consumer(name)).info()
        if info.ack_pending or info.pending:
            return False
    waits = await retries.info(subjects_filter=f"retry.{app.name}.{name}.wait.>")
    # An event that went from one of these places to another meanwhile is a new message of the stream of retries.
    return not waits.state.subjects and waits.state.last_sequence == before


@asynccontextmanager
async def running(app: App, url: str | list[str], **options: Any) -> AsyncIterator[asyncio.Task[None]]:
    """The application's workers, for as long as the block lasts; an error of theirs is raised at its end."""
    task = asyncio.create_task(app.run(url, **({"stop_timeout": 5.0} | options)))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
