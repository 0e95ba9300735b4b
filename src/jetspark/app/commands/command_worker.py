"""Serves commands with asyncio: any number of workers share them as one queue group, and are listed as a NATS service.

:class:`RequestServer` reads each request, passes it to :mod:`~jetspark.app.commands.command_runner`, and sends the
reply or the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING

from jetspark.aio.client import Client
from jetspark.aio.context import DriverContext, context_of
from jetspark.aio.message import Message
from jetspark.aio.subscription import Subscription
from jetspark.app.clock import utc_now
from jetspark.app.commands import wire
from jetspark.app.commands.command_runner import CommandOptions, CommandRun, CommandRunner
from jetspark.app.commands.command_spec import CommandReply, CommandSpec
from jetspark.app.commands.reply_rule import ReplyRule
from jetspark.app.commands.service import QUEUE_GROUP, Endpoint, ServiceRecord
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.denial_watch import DenialWatch
from jetspark.core.version import VERSION
from jetspark.errors import (
    BufferFull,
    CommandFailed,
    ConnectionClosed,
    JetSparkError,
    PayloadTooLarge,
    PermissionDenied,
    ProtocolError,
)

if TYPE_CHECKING:
    from jetspark.app.spec import AppSpec

__all__ = ["CommandWorker", "RequestServer"]

_logger = logging.getLogger("jetspark.app")

# Longest wait until the server stops sending requests; a disconnected server sends none.
DRAIN_S = 5.0


class CommandWorker:
    """The commands of an application in this process."""

    def __init__(
        self,
        app: AppSpec,
        specs: Sequence[CommandSpec],
        client: Client,
        *,
        catalogue: Catalogue,
        options: CommandOptions | None = None,
    ) -> None:
        self._app, self._specs, self._client = app, specs, client
        self._js = client.jetstream()
        self._context = context_of(self._js)
        self._catalogue, self._options = catalogue, options or CommandOptions()
        self._commands = Catalogue(*(spec.kind for spec in specs))
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._denials = DenialWatch(self._context.transport.dispatcher, self._needs, self._fail)
        self._subscriptions: list[Subscription] = []
        self.service = ServiceRecord(
            name=app.name,
            id=secrets.token_hex(11),
            version=app.version,
            description=f"Commands of app {app.name}.",
            metadata={"jetspark": VERSION, "stream": app.stream},
            started=utc_now(),
            endpoints=[],
        )
        self._runner: CommandRunner | None = None
        self._is_open = False
        self.replies = ReplyRule(app.name, [client.options.inbox_prefix, *app.inbox_prefixes])

    # ---- life --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until :meth:`stop` is called or the task is cancelled.

        Raises:
            PermissionDenied: This user may not subscribe to a command.
        """
        self._denials.attach()
        try:
            await self._open()
            self._is_open = True
            await self._ended
        finally:
            self._denials.detach()
            if self._runner is not None:
                await self._runner.close()

    async def stop(self, runners: asyncio.Task[None], timeout: float) -> None:
        """Stop taking commands, finish those in progress within ``timeout`` seconds, and end."""
        deadline = self._loop.time() + timeout
        with contextlib.suppress(JetSparkError):
            # The server stops sending; requests that it has already sent are taken.
            await asyncio.gather(*(each.drain(min(DRAIN_S, max(0.1, timeout))) for each in self._subscriptions))
        if self._runner is not None:
            await self._runner.finish(max(0.0, deadline - self._loop.time()))
        if not self._ended.done():
            self._ended.set_result(None)
        # A start that waits for the server is not waited for.
        await asyncio.wait([runners], timeout=max(1.0, deadline - self._loop.time()) if self._is_open else 0.0)
        if not runners.done():
            runners.cancel()
            await asyncio.wait([runners])

    async def _open(self) -> None:
        app = self._app
        self._runner = await CommandRunner.open(app, self._js, catalogue=self._catalogue, options=self._options)
        serving = RequestServer(self._context, self._commands, self._runner, self.replies)
        for spec in self._specs:
            endpoint = Endpoint(spec.name.replace(".", "_"), wire.command_subject(app.name, spec.name))
            self.service.endpoints.append(endpoint)
            # Not a subscription with a callback: its task would take twice its turn in the loop for each request.
            self._subscriptions.append(
                self._context.take(endpoint.subject, partial(serving.take, spec, endpoint), queue=QUEUE_GROUP)
            )
        for subject, verb in self.service.subjects().items():
            self._subscriptions.append(await self._client.subscribe(subject, callback=self._answerer(verb)))
        await self._client.flush()
        if self._ended.done():
            return  # a subscription was denied
        _logger.info("app %s: serving %d commands as service %s", app.name, len(self._specs), self.service.id)

    def _needs(self, denied: PermissionDenied) -> bool:
        return denied.operation == "subscribe" and any(
            each.subject == denied.subject for each in self.service.endpoints
        )

    def _fail(self, error: PermissionDenied) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    def _answerer(self, verb: str) -> Callable[[Message], Coroutine[object, object, None]]:
        async def answer(message: Message) -> None:
            reply, runner = message.reply, self._runner
            if not reply or runner is None:
                return
            if self.replies.allows(reply, runner.stored):
                await message.respond(self.service.answer(verb))
            else:
                self.replies.refuse(message.subject, reply, self._loop.time())

        return answer


class _ServedRun(CommandRun):
    """A command that arrived as a request."""

    __slots__ = ("_endpoint", "_serving", "message")

    def __init__(
        self,
        serving: RequestServer,
        spec: CommandSpec,
        endpoint: Endpoint,
        message: Message,
        began: float,
        deadline: float,
    ) -> None:
        super().__init__(serving.runner, spec, began, deadline)
        self._serving, self._endpoint, self.message = serving, endpoint, message

    def on_end(self, outcome: CommandReply | Exception) -> None:
        self._serving.count(self._endpoint, self.began, outcome if isinstance(outcome, Exception) else None)
        # After a time-out or the end of the connection, an answer would not reach the caller.
        if self.message.reply and not isinstance(outcome, TimeoutError | ConnectionClosed):
            self._serving.answer(self.spec, self.message, outcome)

    def on_abandoned(self) -> None:
        self._serving.count(self._endpoint, self.began, None)


class RequestServer:
    """Handles the requests that reach a worker."""

    def __init__(self, context: DriverContext, commands: Catalogue, runner: CommandRunner, replies: ReplyRule) -> None:
        self._context, self._commands, self.runner = context, commands, runner
        self._replies = replies
        self._loop = asyncio.get_running_loop()

    def take(self, spec: CommandSpec, endpoint: Endpoint, message: Message) -> None:
        """Serve a request."""
        now = self._loop.time()
        # Checked before the decision: a command must not have effects that cannot be reported to its caller.
        if message.reply and not self._replies.allows(message.reply, self.runner.stored):
            self._replies.refuse(message.subject, message.reply, now)
            self.count(endpoint, now, CommandFailed(spec.name, f"its reply subject is {message.reply!r}"))
            return
        try:
            headers = message.headers
        except ProtocolError as error:
            failed = CommandFailed(spec.name, str(error))
            self.count(endpoint, now, failed)
            self.answer(spec, message, failed)
            return
        deadline = now + wire.time_to_decide(headers, self.runner.options.timeout_s)
        self.runner.start(
            _ServedRun(self, spec, endpoint, message, now, deadline),
            lambda: wire.read_request(
                spec, self._commands, message.subject, message.data, message.raw_headers, headers
            ),
        )

    def count(self, endpoint: Endpoint, began: float, error: Exception | None) -> None:
        """Count a finished request."""
        endpoint.count(self._loop.time() - began, error)

    def answer(self, spec: CommandSpec, message: Message, outcome: CommandReply | Exception) -> None:
        """Send a reply or an error to the caller."""
        try:
            try:
                self._respond(message, *wire.written_outcome(spec, outcome))
            except PayloadTooLarge as large:
                self._respond(message, *wire.written_outcome(spec, wire.reply_too_large(spec, large)))
        except ConnectionClosed:
            pass
        except Exception:
            _logger.exception("command %s: the answer could not be sent; the caller runs into its time-out", spec.name)

    def _respond(self, message: Message, body: bytes, headers: dict[str, str] | None) -> None:
        try:
            self._context.send_reply(message.reply or "", body, headers, at_once=self.runner.is_alone)
        except BufferFull:
            self.runner.spawn(message.respond(body, headers=headers))
