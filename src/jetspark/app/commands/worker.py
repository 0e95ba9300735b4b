"""Serves commands with asyncio: any number of workers share them as one queue group, and are found as a service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetspark.aio.client import Client
from jetspark.aio.context import context_of
from jetspark.aio.message import Message
from jetspark.aio.subscription import Subscription
from jetspark.app.causes import Cause
from jetspark.app.clock import utc_now
from jetspark.app.commands import wire
from jetspark.app.commands.boundaries import BoundaryCache
from jetspark.app.commands.deciding import CommandRequest, Deciding
from jetspark.app.commands.declaring import CommandSpec
from jetspark.app.commands.service import QUEUE_GROUP, Endpoint, ServiceRecord
from jetspark.app.commands.store import CommandStore, stream_end
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.contracts.envelope import decode
from jetspark.app.projections.views import Views
from jetspark.core.events import ConnectionEvent, Disconnected, Reconnected
from jetspark.core.numbers import seconds, whole
from jetspark.core.subjects import matches
from jetspark.core.version import VERSION
from jetspark.errors import (
    CommandFailed,
    ConnectionClosed,
    ContractViolation,
    JetSparkError,
    PermissionDenied,
    RequestTimeout,
    WorkersBusy,
)

if TYPE_CHECKING:
    from jetspark.app.application import App

__all__ = ["CommandOptions", "CommandWorker"]

_logger = logging.getLogger("jetspark.app")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOptions:
    """How a worker serves commands."""

    concurrency: int = 64
    """Commands that are decided at a time; those of one boundary are one after the other."""
    queue: int = 1000
    """Commands that wait for their turn; one more is answered with ``WorkersBusy``."""
    timeout_s: float = 30.0
    """For how long a command is tried whose caller does not say how long it waits."""
    cache_events: int = 100_000
    """Events of boundaries that are remembered, so that the next command on them need not read."""

    def __post_init__(self) -> None:
        whole("concurrency", self.concurrency)
        whole("queue", self.queue, low=0)
        seconds("timeout_s", self.timeout_s)
        whole("cache_events", self.cache_events, low=0)


class _Turns:
    """Commands on the same boundary take turns: in one process they would only disturb each other."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    async def begin(self, boundary: Sequence[str]) -> None:
        """Wait for one's turn; then :meth:`end` has to be called. All wait in the same order, that of the filters."""
        for place, filter in enumerate(boundary):
            lock, users = self._locks.get(filter) or (asyncio.Lock(), 0)
            self._locks[filter] = lock, users + 1
            try:
                await lock.acquire()
            except BaseException:  # also when cancelled: a turn that nobody ends would hold up its boundary for ever
                self._leave(filter)
                self.end(boundary[:place])
                raise

    def end(self, boundary: Sequence[str]) -> None:
        for filter in boundary:
            self._locks[filter][0].release()
            self._leave(filter)

    def _leave(self, filter: str) -> None:
        lock, users = self._locks[filter]
        if users > 1:
            self._locks[filter] = lock, users - 1
        else:
            del self._locks[filter]


class _Doubts:
    """Attached to the connection: what happened to the stream while there was none is not known."""

    def __init__(self, deciding: Deciding) -> None:
        self._deciding = deciding

    def on_event(self, event: ConnectionEvent) -> None:
        if isinstance(event, Disconnected | Reconnected):
            self._deciding.doubt()

    def next_deadline(self) -> float | None:
        return None

    def on_time(self, now: float) -> None:
        pass


class CommandWorker:
    """The commands of an application in this process."""

    def __init__(
        self,
        app: App,
        specs: Sequence[CommandSpec],
        client: Client,
        *,
        catalogue: Catalogue,
        options: CommandOptions | None = None,
    ) -> None:
        self._app, self._specs, self._client = app, specs, client
        self._js = client.jetstream()
        self._link = context_of(self._js).link
        self._catalogue, self._options = catalogue, options or CommandOptions()
        self._commands = Catalogue(*(spec.kind for spec in specs))
        self._views = Views(app, self._js)
        self._turns, self._places = _Turns(), asyncio.Semaphore(self._options.concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self._loop = asyncio.get_running_loop()
        self.service = ServiceRecord(
            name=app.name,
            id=secrets.token_hex(11),
            version=app.version,
            description=f"Commands of app {app.name}.",
            metadata={"jetspark": VERSION, "stream": app.stream},
            started=utc_now(),
            endpoints=[],
        )
        self._doubts: _Doubts | None = None
        self._watching: asyncio.Task[None] | None = None
        self._deciding: Deciding
        self._store: CommandStore

    # ---- life --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until :meth:`stop` is called or the task is cancelled."""
        try:
            await self._open()
            await self._ended.wait()
        finally:
            if self._doubts is not None:
                self._link.detach(self._doubts)
            tasks = self._tasks if self._watching is None else {*self._tasks, self._watching}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            await self._views.close()

    async def stop(self, runners: asyncio.Task[None], timeout: float) -> None:
        """Take no more commands, decide those that are here for at most ``timeout`` seconds, and end."""
        deadline = self._loop.time() + timeout
        with contextlib.suppress(JetSparkError):
            # The server stops sending, and what it has sent already is taken.
            await asyncio.gather(*(each.drain(max(0.1, timeout)) for each in self._subscriptions))
        while self._tasks and self._loop.time() < deadline:
            await asyncio.wait(self._tasks, timeout=deadline - self._loop.time())
        self._ended.set()
        await asyncio.wait([runners], timeout=max(1.0, deadline - self._loop.time()))
        if not runners.done():
            runners.cancel()
            await asyncio.wait([runners])

    async def _open(self) -> None:
        app, js = self._app, self._js
        stream = await js.stream(app.stream)
        rng = getattr(self._loop, "rng", None) or random.SystemRandom()
        self._store = CommandStore(js, stream, self._views)
        self._deciding = Deciding(
            stream=app.stream,
            end=stream_end(stream.cached_info),
            source=app.source,
            catalogue=self._catalogue,
            projections=app.projections,
            cache=BoundaryCache(self._options.cache_events),
            clock=utc_now,
            random=rng.random,
            random_bits=rng.getrandbits,
        )
        for spec in self._specs:
            endpoint = Endpoint(spec.name.replace(".", "_"), wire.command_subject(app.name, spec.name))
            self.service.endpoints.append(endpoint)
            await self._subscribe(endpoint.subject, self._taker(spec, endpoint), queue=QUEUE_GROUP)
        for subject, verb in self.service.subjects().items():
            await self._subscribe(subject, self._answerer(verb))
        self._doubts = _Doubts(self._deciding)
        self._link.attach(self._doubts)
        self._watching = self._loop.create_task(self._watch_stream())
        await self._client.flush()
        _logger.info("app %s: serving %d commands as service %s", app.name, len(self._specs), self.service.id)

    async def _watch_stream(self) -> None:
        """Hear of it when the stream is deleted, made, or changed."""
        subject = f"$JS.EVENT.ADVISORY.STREAM.*.{self._app.stream}"
        try:
            async with await self._client.subscribe(subject) as advisories:
                async for advisory in advisories:
                    if advisory.subject.split(".")[4] in ("CREATED", "DELETED", "UPDATED"):
                        self._deciding.doubt()
        except PermissionDenied:
            _logger.info(
                "app %s: may not subscribe to %s, and looks at the stream from time to time", self._app.name, subject
            )

    async def _subscribe(
        self, subject: str, callback: Callable[[Message], Coroutine[Any, Any, None]], queue: str = ""
    ) -> None:
        self._subscriptions.append(await self._client.subscribe(subject, queue=queue, callback=callback))

    def _answerer(self, verb: str) -> Callable[[Message], Coroutine[Any, Any, None]]:
        async def answer(message: Message) -> None:
            if message.reply:
                await message.respond(self.service.answer(verb))

        return answer

    # ---- commands ----------------------------------------------------------------------------------------------

    def _taker(self, spec: CommandSpec, endpoint: Endpoint) -> Callable[[Message], Coroutine[Any, Any, None]]:
        async def take(message: Message) -> None:
            if not self._may_answer(message.reply):
                endpoint.count(0.0, None)
                _logger.warning("command %s: not decided, its answer was asked for on %r", spec.name, message.reply)
                return
            waiting = len(self._tasks) - self._options.concurrency
            if waiting >= self._options.queue:
                busy = WorkersBusy(spec.name, max(0, waiting))
                endpoint.count(0.0, busy)
                await self._answer(message, busy)
                return
            task = self._loop.create_task(self._serve(spec, endpoint, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return take

    def _may_answer(self, reply: str | None) -> bool:
        """Whether an answer to this subject reaches a caller, and is no message of the stream, nor to the server.

        A worker may publish more than most callers: a caller must not choose what it publishes, and where.
        """
        return not reply or not (reply.startswith("$") or any(matches(each, reply) for each in self._deciding.stored))

    async def _serve(self, spec: CommandSpec, endpoint: Endpoint, message: Message) -> None:
        began = self._loop.time()
        failed: BaseException | None = None
        try:
            async with asyncio.timeout_at(began + wire.read_timeout(message.headers, self._options.timeout_s)):
                body = wire.write_reply(await self._decide(spec, message))
                if message.reply:
                    await message.respond(body)
                    if len(self._tasks) == 1:
                        self._link.flush()  # now; where there are others, their answers go with it
        except TimeoutError:
            # Nobody waits for an answer any more. Whether it was decided is told to those who ask again.
            failed = RequestTimeout(f"command {spec.name!r}", self._loop.time() - began)
            _logger.debug("command %s: not decided within the caller's time", spec.name)
        except ConnectionClosed as error:
            failed = error
        except Exception as error:
            failed = error
            await self._answer(message, self._told(spec, error))
        endpoint.count(self._loop.time() - began, failed)

    def _told(self, spec: CommandSpec, error: Exception) -> JetSparkError:
        """What the caller is told of an error."""
        if isinstance(error, JetSparkError) and wire.kind_of(error) is not None:
            if isinstance(error, CommandFailed):
                _logger.error("command %s: %s", spec.name, error.reason, exc_info=error.__cause__)
            return error
        _logger.exception("command %s: %s", spec.name, error)
        return CommandFailed(spec.name, f"{type(error).__name__}: {error}")

    async def _answer(self, message: Message, error: JetSparkError) -> None:
        if message.reply:
            body, headers = wire.write_error(error)
            try:
                await message.respond(body, headers=headers)
            except ConnectionClosed:
                return
            except JetSparkError:
                _logger.exception("command: its caller could not be told of %s", type(error).__name__)

    async def _decide(self, spec: CommandSpec, message: Message) -> Any:
        try:
            decoded = decode(message.subject, message.data, message.raw_headers, self._commands)
        except ContractViolation as error:
            raise CommandFailed(spec.name, f"the worker cannot read the command: {error}") from error
        if type(decoded.event) is not spec.kind:
            # Who may call one command need not be allowed to call another, which has other guards besides.
            raise CommandFailed(spec.name, f"{decoded.type!r} came to {message.subject!r}: send it to its own subject")
        request = CommandRequest(
            command=decoded.event,
            cause=Cause(decoded.id, decoded.correlation_id, decoded.traceparent),
            expected_version=wire.read_expected_version(spec.name, message.headers),
        )
        boundary = self._deciding.boundary(spec, request.command)
        # A turn first, then a place: those that wait for one boundary must not hold the places of all the others.
        await self._turns.begin(boundary)
        try:
            async with self._places:
                return await self._store.run(self._deciding.run(spec, request, boundary))
        finally:
            self._turns.end(boundary)
