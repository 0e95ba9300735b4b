"""Workers that serve commands, for tests."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jetspark
from jetspark.app import App, AppClient
from support.accounts import bank


@asynccontextmanager
async def served(app: App, url: str, workers: int = 1, **options: Any) -> AsyncIterator[AppClient]:
    """A client of an application that has this many workers."""
    await app.apply(url)
    tasks = [asyncio.create_task(app.run(url, **({"stop_timeout": 5.0} | options))) for _ in range(workers)]
    try:
        await are_serving(url, app.name, workers)
        async with app.connect(url) as client:
            yield client
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error


async def are_serving(url: str | list[str], name: str, workers: int = 1) -> None:
    """Wait until that many workers answer for the service."""
    async with asyncio.timeout(60), jetspark.connect(url) as nc:
        while True:
            try:
                answers = nc.request_many(f"$SRV.PING.{name}", timeout=2.0, max_messages=workers)
                if len([answer async for answer in answers]) == workers:
                    return
            except jetspark.NoResponders:
                await asyncio.sleep(0.05)


_FORKING = multiprocessing.get_context("forkserver")
# A process that has everything imported, and is copied for each worker: a Python that starts anew takes a second.
_FORKING.set_forkserver_preload(["support.accounts", "jetspark.app.running", "jetspark.aio.client"])


def start_worker(url: str | list[str], app: str, replicas: int = 1) -> multiprocessing.process.BaseProcess:
    """A worker of a bank, in a process of its own."""
    process = _FORKING.Process(target=_work, args=(url, app, replicas), daemon=True)
    process.start()
    return process


def _work(url: str | list[str], app: str, replicas: int) -> None:
    asyncio.run(bank(app, replicas=replicas).run(url, stop_timeout=20.0))
