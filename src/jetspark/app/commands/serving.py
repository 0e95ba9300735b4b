"""Serves requests for commands that come over the network: reads them, has them decided, and sends the answers.

What happens in between is :mod:`~jetspark.app.commands.command_runner`.
"""

from __future__ import annotations

import asyncio
import logging

from jetspark.aio.context import DriverContext
from jetspark.aio.message import Message
from jetspark.app.commands import wire
from jetspark.app.commands.answering import ReplyRule
from jetspark.app.commands.command_runner import CommandRun, CommandRunner
from jetspark.app.commands.command_spec import CommandReply, CommandSpec
from jetspark.app.commands.service import Endpoint
from jetspark.app.commands.telling import cannot_be_sent, written_outcome
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.errors import BufferFull, CommandFailed, ConnectionClosed, PayloadTooLarge

__all__ = ["Serving"]

_logger = logging.getLogger("jetspark.app")


class _Served(CommandRun):
    """One request."""

    __slots__ = ("_endpoint", "_serving", "message")

    def __init__(
        self, serving: Serving, spec: CommandSpec, endpoint: Endpoint, message: Message, began: float, deadline: float
    ) -> None:
        super().__init__(serving.runner, spec, began, deadline)
        self._serving, self._endpoint, self.message = serving, endpoint, message

    def on_end(self, outcome: CommandReply | Exception) -> None:
        self._serving.count(self._endpoint, self.began, outcome if isinstance(outcome, Exception) else None)
        # Nobody is told of a time that is over, or over a connection that is.
        if self.message.reply and not isinstance(outcome, TimeoutError | ConnectionClosed):
            self._serving.answer(self.spec, self.message, outcome)

    def on_left(self) -> None:
        self._serving.count(self._endpoint, self.began, None)


class Serving:
    """What a worker does with the requests that reach it."""

    def __init__(self, context: DriverContext, commands: Catalogue, runner: CommandRunner, replies: ReplyRule) -> None:
        self._context, self._commands, self.runner = context, commands, runner
        self._replies = replies
        self._loop = asyncio.get_running_loop()

    def take(self, spec: CommandSpec, endpoint: Endpoint, message: Message) -> None:
        """Serve a request."""
        now, headers = self._loop.time(), message.headers
        # Before it is decided: a command must not have effects that its caller cannot be told of.
        if message.reply and not self._replies.allows(message.reply, self.runner.stored):
            self._replies.refuse(message.subject, message.reply, now)
            self.count(endpoint, now, CommandFailed(spec.name, f"its reply subject is {message.reply!r}"))
            return
        deadline = now + wire.time_to_decide(headers, self.runner.options.timeout_s)
        self.runner.start(
            _Served(self, spec, endpoint, message, now, deadline),
            lambda: wire.read_request(
                spec, self._commands, message.subject, message.data, message.raw_headers, headers
            ),
        )

    def count(self, endpoint: Endpoint, began: float, error: Exception | None) -> None:
        """Note that a request is over."""
        endpoint.count(self._loop.time() - began, error)

    def answer(self, spec: CommandSpec, message: Message, outcome: CommandReply | Exception) -> None:
        """Send a reply or an error to the caller."""
        try:
            try:
                self._respond(message, *written_outcome(spec, outcome))
            except PayloadTooLarge as large:
                self._respond(message, *written_outcome(spec, cannot_be_sent(spec, large)))
        except ConnectionClosed:
            pass
        except Exception:
            _logger.exception("command %s: its caller could not be answered", spec.name)

    def _respond(self, message: Message, body: bytes, headers: dict[str, str] | None) -> None:
        try:
            self._context.send_reply(message.reply or "", body, headers, at_once=self.runner.is_alone)
        except BufferFull:
            self.runner.spawn(message.respond(body, headers=headers))
