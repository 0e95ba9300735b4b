"""What an application needs on a server, for tests of its handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from jetspark.aio.jetstream import JetStream
from jetspark.app import App, encode
from jetspark.app.provisioning import apply_topology


async def set_up(js: JetStream, app: App) -> None:
    await apply_topology(js, app)


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
