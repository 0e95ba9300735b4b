"""Running an application: connect, open the lifespans, run handlers and projections, and end in an orderly way."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

from jetspark.aio.connecting import connect
from jetspark.app.commands.running import CommandOptions
from jetspark.app.commands.worker import CommandWorker
from jetspark.app.connecting import ConnectArguments
from jetspark.app.dead_letters.store import HandlerStore
from jetspark.app.handlers.context import open_lifespans
from jetspark.app.handlers.worker import HandlerWorker
from jetspark.app.patience import patiently
from jetspark.app.projections.live import LiveOptions
from jetspark.app.projections.worker import ProjectionWorker
from jetspark.app.topology.provisioning import apply_topology, check_for_drift
from jetspark.core.arguments import instance, texts
from jetspark.core.numbers import seconds
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.app.application import App

__all__ = ["run_app"]

T = TypeVar("T")

_logger = logging.getLogger("jetspark.app")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Worker(Protocol):
    """A handler, or projections, in this process."""

    async def run(self) -> None: ...

    async def stop(self, runners: asyncio.Task[None], timeout: float) -> None: ...


async def run_app(
    app: App,
    servers: str | Sequence[str],
    *,
    only: Collection[str],
    stop_timeout: float,
    apply: bool = False,
    live: LiveOptions | None = None,
    serving: CommandOptions | None = None,
    **options: Unpack[ConnectArguments],
) -> None:
    """Run the handlers, projections and commands of an application until cancelled, or until SIGTERM or Ctrl-C."""
    known = {**app.handlers, **app.projections, **app.commands}
    seconds("stop_timeout", stop_timeout)
    if live is not None:
        instance("live", live, LiveOptions)
    unknown = sorted(set(texts("only", only, "a list of names")) - set(known))
    if unknown:
        raise ConfigError(f"only={unknown}: expected some of {', '.join(sorted(known)) or 'no handlers'}")
    specs = [spec for spec in app.handlers.values() if not only or spec.name in only]
    projections = [spec for spec in app.projections.values() if not only or spec.name in only]
    commands = [spec for spec in app.commands.values() if not only or spec.name in only]
    if not specs and not projections and not commands:
        raise ConfigError(f"app {app.name!r} has no handlers, no projections and no commands to run")
    options.setdefault("name", f"{app.name} handlers")
    catalogue = app.catalogue
    catalogue.check()
    ended = asyncio.Event()
    # Signals count from here on, also while it starts: what a lifespan opened is closed.
    async with _on_signal(ended), AsyncExitStack() as opened:
        async with _until(ended):
            client = await opened.enter_async_context(connect(servers, **options))
            dependencies = await opened.enter_async_context(open_lifespans(app.lifespans))
        if ended.is_set():
            return
        js = client.jetstream()
        prepare = apply_topology if apply else check_for_drift
        # A supervisor starts a worker again, most likely while the server is restarted or elects leaders.
        await _unless(ended, patiently(lambda: prepare(js, app)))
        workers: list[Worker] = []
        if projections:
            workers.append(ProjectionWorker(app, projections, js, catalogue=catalogue, options=live))
        for spec in specs:
            store = await _unless(ended, patiently(partial(HandlerStore.open, js, app.name, spec.name)))
            if store is not None:
                workers.append(HandlerWorker(app, spec, client, store, dependencies, catalogue=catalogue))
        if commands:
            workers.append(CommandWorker(app, commands, client, catalogue=catalogue, options=serving))
        if ended.is_set():
            return
        names = [
            *(each.name for each in specs),
            *(each.name for each in projections),
            *(each.name for each in commands),
        ]
        _logger.info("app %s: running %s", app.name, ", ".join(names))
        await _run_workers(workers, stop_timeout, ended)
        _logger.info("app %s: ended", app.name)


@asynccontextmanager
async def _until(ended: asyncio.Event) -> AsyncIterator[None]:
    """Leave the block when the process is asked to end, by a cancellation.

    Not a task of its own, as :func:`_unless` has: what a lifespan enters before its ``yield``, such as a task group, it
    has to leave in the same task.
    """
    task = asyncio.current_task()
    assert task is not None
    is_ours = False

    async def cancel() -> None:
        nonlocal is_ours
        await ended.wait()
        is_ours = True
        task.cancel()

    waiting = asyncio.create_task(cancel())
    try:
        yield
        waiting.cancel()
        await asyncio.sleep(0)  # where a cancellation is raised that came with the end of the block
    except asyncio.CancelledError:
        if not is_ours or task.uncancel():
            raise
    finally:
        waiting.cancel()


async def _unless(ended: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work returns; None if the process is asked to end before."""
    task, waiting = asyncio.create_task(work), asyncio.create_task(ended.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        waiting.cancel()
        await asyncio.wait([task, waiting])


async def _run_workers(workers: list[Worker], stop_timeout: float, ended: asyncio.Event) -> None:
    tasks = {asyncio.create_task(worker.run()): worker for worker in workers}
    waiting = asyncio.create_task(ended.wait())
    try:
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        stops = [asyncio.create_task(worker.stop(task, stop_timeout)) for task, worker in tasks.items()]
        await asyncio.wait(stops)
    # All of them are asked: asyncio would print a page for each error that nobody has seen.
    errors = [_single(error) for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    for other in errors[1:]:
        _logger.error("another worker has ended as well: %s", other)
    if errors:
        raise errors[0]


def _single(error: BaseException) -> BaseException:
    """The one error that a group of tasks ended with; all of them, if there are more."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def _on_signal(ended: asyncio.Event) -> AsyncIterator[None]:
    """Set the event when the process is asked to end; only the main thread can be asked."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for number in _SIGNALS:
        loop.add_signal_handler(number, ended.set)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
