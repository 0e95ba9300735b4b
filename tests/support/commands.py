"""Workers that serve commands, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import jetspark
from jetspark.app import App, AppClient
from support.accounts import bank
from support.processes import start_process


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


WAYS = ("by a worker", "here")
"""Where a command is decided: nobody who calls one can tell."""


@asynccontextmanager
async def deciding(app: App, url: str, way: str, **options: Any) -> AsyncIterator[AppClient]:
    """A client of an application whose commands are decided in one of two ways; the options are those of ``served``."""
    if way == "by a worker":
        async with served(app, url, **options) as client:
            yield client
        return
    await app.apply(url)
    projecting = [asyncio.create_task(app.run(url, only=[*app.projections]))] if app.projections else []
    try:
        async with app.connect(url, decide_here=options.get("serving", True)) as client:
            yield client
    finally:
        for task in projecting:
            task.cancel()
            await asyncio.wait([task])


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


def start_worker(url: str | list[str], app: str, replicas: int = 1) -> BaseProcess:
    """A worker of a bank, in a process of its own."""
    return start_process(_work, url, app, replicas)


def _work(url: str | list[str], app: str, replicas: int) -> None:
    asyncio.run(bank(app, replicas=replicas).run(url, stop_timeout=20.0))
