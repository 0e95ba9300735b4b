"""The caller's side of commands: send one to a worker, or decide it here, and get its reply or its error."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Protocol

from jetspark.aio.context import DriverContext, context_of
from jetspark.aio.message import Message
from jetspark.aio.transport import expire
from jetspark.app.causes import Cause, current_cause
from jetspark.app.clock import utc_now
from jetspark.app.commands import wire
from jetspark.app.commands.command_spec import Command, CommandReply
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
    from jetspark.aio.jetstream import JetStream
    from jetspark.app.causes import CauseLike
    from jetspark.app.commands.local_decider import LocalDecider
    from jetspark.app.spec import AppSpec

__all__ = ["call_command"]

REPEATED_AFTER = 0.5
"""A request without an answer is sent once more after this part of its time-out."""
LOOK_AGAIN_S = 0.02
"""Polling interval of a call that cannot be sent."""


class CallingClient(Protocol):
    """The part of an :class:`AppClient` that calls commands."""

    @property
    def app(self) -> AppSpec: ...

    @property
    def js(self) -> JetStream: ...

    def new_id(self) -> str: ...

    def child_trace(self, cause: CauseLike | None) -> str: ...


async def call_command(
    client: CallingClient,
    command: Command,
    *,
    command_id: str | None,
    expected_version: int | None,
    correlation_id: str | None,
    timeout: float | None,
    here: LocalDecider | None = None,
) -> CommandReply:
    """Implements :meth:`AppClient.call`; ``here`` decides the command in this process, None sends it to a worker."""
    app = client.app
    contract = getattr(type(command), "__contract__", None)
    name = "" if contract is None else contract.type
    if name not in app.commands or app.commands[name].kind is not type(command):
        known = ", ".join(sorted(spec.kind.__name__ for spec in app.commands.values())) or "none declared"
        raise ConfigError(f"{type(command).__name__} is not a command of app {app.name!r}: expected one of {known}")
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
        )

    if here is not None:
        return await here.call(app.commands[name], command, cause, expected_version, timeout_s, write)
    body, headers = write()
    subject = wire.command_subject(app.name, name)
    request = _RepeatedRequest(context, subject, body, headers)
    try:
        answer = await request.answer(timeout_s)
        return wire.read_reply(answer.data, answer.headers)
    except NoResponders:
        if request.was_repeated:  # somebody may have got the first one
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


class _RepeatedRequest:
    """One request, sent once more after half of its time-out: the worker or the connection may be gone.

    A second request is harmless: the command has an id, so it is decided once. But while one worker answers that
    nothing is stored, the other may still decide, and store events a moment later. So such an answer counts only once
    the other one has arrived as well.

    A request carries the remaining time, and the worker stops before it is over. So a request must not wait in a local
    buffer and arrive after its caller has gone and maybe asked again.

    It does the work of ``Client.request`` with a second message; tasks for both would make every call longer.
    """

    def __init__(self, context: DriverContext, subject: str, body: bytes, headers: dict[str, str]) -> None:
        self._context, self._message = context, (subject, body, headers)
        self._what = f"request to {subject!r}"
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Message] = self._loop.create_future()
        self._held: Message | None = None
        """The first of two answers, unless it says that events are stored."""
        self._tokens: list[str] = []
        self._timer: asyncio.TimerHandle

    @property
    def was_repeated(self) -> bool:
        return len(self._tokens) > 1

    async def answer(self, timeout_s: float) -> Message:
        deadline = self._loop.time() + timeout_s
        while not self._send(deadline):
            if self._loop.time() >= deadline:
                raise RequestTimeout(self._what, timeout_s, was_sent=False)
            await asyncio.sleep(LOOK_AGAIN_S)
        # One timer for both moments: most calls end before the first.
        wait_s = (deadline - self._loop.time()) * REPEATED_AFTER
        self._timer = self._loop.call_later(wait_s, self._send_again, deadline, timeout_s)
        try:
            return await self._answer
        finally:
            self._timer.cancel()
            for token in self._tokens:
                self._context.forget(token)

    def _send(self, deadline: float) -> bool:
        """Send the request; False while there is no connection or no room for it, or if no time is left."""
        connection, (subject, body, headers) = self._context.connection, self._message
        left_s = deadline - self._loop.time()
        if left_s <= 0 or not (connection.is_connected or connection.is_closed):
            return False
        headers |= wire.timeout_header(left_s)
        try:
            self._tokens.append(self._context.request_with(self, subject, body, headers))
        except BufferFull:
            return False
        return True

    def _send_again(self, deadline: float, timeout_s: float) -> None:
        is_sent = False
        # If it fails, the first request may still be answered.
        with contextlib.suppress(JetSparkError):
            is_sent = self._send(deadline)
        soon = self._loop.time() + LOOK_AGAIN_S
        if is_sent or soon >= deadline:
            self._timer = self._loop.call_at(deadline, expire, self._answer, self._what, timeout_s)
        else:
            self._timer = self._loop.call_at(soon, self._send_again, deadline, timeout_s)

    # ---- called by the connection -------------------------------------------------------------------------------

    def done(self) -> bool:
        return self._answer.done()

    def set_result(self, message: Message) -> None:
        if self.was_repeated and self._held is None and _weight(message) < wire.STORED:
            self._held = message
        else:
            self._answer.set_result(message if self._held is None else max(message, self._held, key=_weight))

    def set_exception(self, error: Exception) -> None:
        self._answer.set_exception(error)


def _weight(answer: Message) -> int:
    return wire.answer_priority(answer.data, answer.headers)
