"""The caller's side of commands: send one to a worker, or decide it here, and get its reply or its error."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from jetspark.aio.context import DriverContext, context_of
from jetspark.aio.message import Message
from jetspark.aio.transport import expire
from jetspark.app.causes import Cause, current_cause
from jetspark.app.clock import utc_now
from jetspark.app.commands import wire
from jetspark.app.commands.declaring import Command, CommandReply
from jetspark.core.numbers import UINT64, timeout_of, whole
from jetspark.errors import (
    BufferFull,
    CommandInDoubt,
    ConfigError,
    JetSparkError,
    NoResponders,
    NoWorkers,
    RequestTimeout,
)

if TYPE_CHECKING:
    from jetspark.app.client import AppClient
    from jetspark.app.commands.here import DecidingHere

__all__ = ["call_command"]


async def call_command(
    client: AppClient,
    command: Command,
    *,
    command_id: str | None,
    expected_version: int | None,
    correlation_id: str | None,
    timeout: float | None,
    here: DecidingHere | None = None,
) -> CommandReply:
    """What :meth:`AppClient.call` does; ``here`` decides the command, if it is given, and a worker otherwise."""
    app = client.app
    contract = getattr(type(command), "__contract__", None)
    name = "" if contract is None else contract.type
    if name not in app.commands or app.commands[name].kind is not type(command):
        known = ", ".join(sorted(spec.kind.__name__ for spec in app.commands.values())) or "it has none"
        raise ConfigError(f"{type(command).__name__} is no command of app {app.name!r}: expected one of {known}")
    _check_text("command_id", command_id, "a text that is new for each command, or None for one of our own")
    _check_text("correlation_id", correlation_id, "a text, or None")
    if expected_version is not None:
        whole("expected_version", expected_version, low=0, high=UINT64)
    context = context_of(client.js)
    timeout_s = timeout_of(timeout, context.client.options.request_timeout_s)
    outer = current_cause.get()
    id = command_id or client.new_id()
    cause = Cause(id, correlation_id or (outer.correlation_id if outer is not None else id), client.child_trace(outer))

    def write() -> tuple[bytes, dict[str, str]]:
        return wire.write_request(
            command,
            cause=cause,
            caused_by=None if outer is None else outer.id,
            source=app.source,
            time=utc_now(),
            expected_version=expected_version,
            timeout_s=timeout_s,
        )

    if here is not None:
        return await here.call(app.commands[name], command, cause, expected_version, timeout_s, write)
    body, headers = write()
    subject = wire.command_subject(app.name, name)
    asking = _Asking(context, subject, body, headers)
    try:
        answer = await asking.answer(timeout_s)
        return wire.read_reply(answer.data, answer.headers)
    except NoResponders:
        if asking.was_repeated:  # somebody may have got the first one
            raise CommandInDoubt(name, id, timeout_s) from None
        raise NoWorkers(app.name, name, subject) from None
    except CommandInDoubt as error:
        raise CommandInDoubt(name, id, timeout_s) from error.__cause__
    except RequestTimeout as error:
        if not error.was_sent:
            raise
        raise CommandInDoubt(name, id, timeout_s) from None


def _check_text(name: str, value: object, expected: str) -> None:
    try:
        if value is None or (isinstance(value, str) and value.encode()):
            return
    except UnicodeEncodeError:
        expected += ", in characters that UTF-8 has"
    raise ConfigError(f"{name}={value!r}: expected {expected}")


class _Asking:
    """One request, which is sent once more when half of its time has passed: the worker or the connection may be gone.

    Twice does no harm, since the command has an id. It is what ``Client.request`` does, with a second message for the
    same answer; tasks for both would make every call longer.
    """

    def __init__(self, context: DriverContext, subject: str, body: bytes, headers: dict[str, str]) -> None:
        self._context, self._message = context, (subject, body, headers)
        self._answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._tokens: list[str] = []
        self._timer: asyncio.TimerHandle

    @property
    def was_repeated(self) -> bool:
        return len(self._tokens) > 1

    async def answer(self, timeout_s: float) -> Message:
        subject, body, headers = self._message
        try:
            self._send()
        except BufferFull:
            return await self._context.client.request(subject, body, headers=headers, timeout=timeout_s)
        # One timer for both moments: hardly a call lives to see the first.
        self._timer = asyncio.get_running_loop().call_later(timeout_s / 2, self._send_again, timeout_s)
        try:
            return await self._answer
        finally:
            self._timer.cancel()
            for token in self._tokens:
                self._context.connection.requests.forget(token)

    def _send(self) -> None:
        self._tokens.append(self._context.connection.request(self._answer, *self._message))
        self._context.link.flush()

    def _send_again(self, timeout_s: float) -> None:
        what = f"request to {self._message[0]!r}"
        self._timer = asyncio.get_running_loop().call_later(timeout_s / 2, expire, self._answer, what, timeout_s)
        # Whatever speaks against it now: the first one is still waited for.
        with contextlib.suppress(JetSparkError):
            self._send()
