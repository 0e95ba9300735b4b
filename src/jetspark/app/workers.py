"""Running an application: connect, open the lifespans, run handlers and projections, and end in an orderly way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

from jetspark.aio.client import Client
from jetspark.aio.connector import connect
from jetspark.app.client import ConnectArguments
from jetspark.app.commands.command_runner import CommandOptions
from jetspark.app.commands.command_worker import CommandWorker
from jetspark.app.commands.reply_rule import check_inbox_prefixes, check_no_stream_stores
from jetspark.app.handlers.context import open_lifespans
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.app.handlers.handler_worker import HandlerWorker
from jetspark.app.layout import topology_of
from jetspark.app.patience import patiently
from jetspark.app.projections.live_options import LiveOptions
from jetspark.app.projections.projection_worker import ProjectionWorker
from jetspark.app.provisioning import apply_topology, check_for_drift
from jetspark.core.arguments import instance, texts
from jetspark.core.numbers import seconds
from jetspark.errors import ConfigError, JetSparkError, NetworkError

if TYPE_CHECKING:
    from jetspark.app.spec import AppSpec

__all__ = ["run_app"]

T = TypeVar("T")

_logger = logging.getLogger("jetspark.app")

# How long an orderly end waits for each answer of the server; without one, its messages are not sent.
END_S = 5.0
# For a connection whose server does not answer.
AT_ONCE_S = 0.1


class Worker(Protocol):
    """A handler, or projections, in this process."""

    async def run(self) -> None: ...

    async def stop(self, runners: asyncio.Task[None], timeout: float) -> None: ...


async def run_app(
    app: AppSpec,
    servers: str | Sequence[str],
    *,
    only: Collection[str],
    stop_timeout: float,
    apply: bool = False,
    live: LiveOptions | None = None,
    serving: CommandOptions | None = None,
    ended: asyncio.Event | None = None,
    **options: Unpack[ConnectArguments],
) -> None:
    """Run the handlers, projections and commands of an application until cancelled, or until ``ended`` is set."""
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
    ended = ended or asyncio.Event()
    async with AsyncExitStack() as opened:
        # Also while it starts: what a lifespan opened is closed.
        async with _until(ended):
            client = await opened.enter_async_context(_connected(servers, options))
            dependencies = await opened.enter_async_context(open_lifespans(app.lifespans))
        if ended.is_set():
            return
        if commands:
            _check_inboxes(app, client)
        js = client.jetstream()
        prepare = partial(apply_topology, js, app) if apply else partial(check_for_drift, js, app, only)
        # A supervisor starts a worker again, most likely while the server is restarted or elects leaders.
        await _unless(ended, patiently(prepare))
        workers: list[Worker] = []
        if projections:
            workers.append(ProjectionWorker(app, projections, js, catalogue=catalogue, options=live))
        for spec in specs:
            store = await _unless(ended, patiently(partial(HandlerStore.open, js, app.name, spec.name)))
            if store is not None:
                workers.append(HandlerWorker(app, spec, client, store, dependencies))
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
        await _run_workers(workers, client, stop_timeout, ended)
        _logger.info("app %s: ended", app.name)


def _check_inboxes(app: AppSpec, client: Client) -> None:
    """Check that command workers may answer below the inbox prefix of their own connection.

    Raises:
        ConfigError: The prefix is a subject of the server, or a stream of the application would store the replies.
    """
    own = check_inbox_prefixes([client.options.inbox_prefix])
    check_no_stream_stores(own, [(each.name, each.subjects or ()) for each in topology_of(app).streams])


@asynccontextmanager
async def _until(ended: asyncio.Event) -> AsyncIterator[None]:
    """Leave the block, by a cancellation, when the process has to end.

    Not in a task of its own, unlike :func:`_unless`: a lifespan must leave in the same task what it entered before its
    ``yield``, such as a task group.
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


async def _unless(ended: asyncio.Event, work: Coroutine[object, object, T]) -> T | None:
    """The result of the work; None if the process has to end first."""
    task, waiting = asyncio.create_task(work), asyncio.create_task(ended.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        waiting.cancel()
        await asyncio.wait([task, waiting])


@asynccontextmanager
async def _connected(servers: str | Sequence[str], options: ConnectArguments) -> AsyncIterator[Client]:
    """A connection that closes within a few seconds, and does not take the place of what ends the block."""
    client = await connect(servers, **options)
    try:
        yield client
    except BaseException:
        try:
            await _close(client)
        except JetSparkError as failure:
            _logger.warning("closing the connection: %s", failure)
        raise
    await _close(client)


async def _close(client: Client) -> None:
    try:
        await client.close(min(END_S, client.options.drain_timeout_s) if client.is_connected else AT_ONCE_S)
    except NetworkError as error:
        # Acknowledgements may be among the unconfirmed messages: their events are delivered again, as after a crash.
        _logger.warning("connection closed with unconfirmed messages (%s); their events may be delivered again", error)


async def _answers(client: Client) -> bool:
    """True if the server answers within a few seconds."""
    try:
        await client.flush(END_S)
    except JetSparkError as error:
        return not isinstance(error, NetworkError)
    return True


async def _run_workers(workers: list[Worker], client: Client, stop_timeout: float, ended: asyncio.Event) -> None:
    tasks = {asyncio.create_task(worker.run()): worker for worker in workers}
    waiting = asyncio.create_task(ended.wait())
    abandoned = [worker.stalls.abandoned for worker in workers if isinstance(worker, HandlerWorker)]
    ends: list[asyncio.Future[Any]] = [waiting, *tasks, *abandoned]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        stops = [asyncio.create_task(worker.stop(task, stop_timeout)) for task, worker in tasks.items()]
        answering = asyncio.create_task(_answers(client))
        await asyncio.wait(stops)
        is_there = not answering.done() or answering.result()
        answering.cancel()
        await asyncio.wait([answering])
        if not is_there:
            with suppress(JetSparkError):  # it was asked for long enough
                await client.close(AT_ONCE_S)
    # Every error is retrieved: asyncio would print a traceback for each one that is not.
    over: list[asyncio.Future[None]] = [each for each in (*tasks, *abandoned) if each.done() and not each.cancelled()]
    errors = [_single(error) for each in over if (error := each.exception()) is not None]
    if ended.is_set():
        # A worker that ends while the server is away may time out; the process has not failed.
        for passing in [error for error in errors if isinstance(error, NetworkError)]:
            errors.remove(passing)
            _logger.warning("worker end: %s: %s; ignored", type(passing).__name__, passing)
    for other in errors[1:]:
        _logger.error("another worker failed as well: %s", other)
    if errors:
        raise errors[0]


def _single(error: BaseException) -> BaseException:
    """The one error that a group of tasks ended with; all of them, if there are more."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
