"""The caller's side of commands: send one to a worker, and get its reply or its error."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from jetspark.aio.client import Client
from jetspark.aio.message import Message
from jetspark.app.causes import Cause, current_cause
from jetspark.app.clock import utc_now
from jetspark.app.commands import wire
from jetspark.app.commands.declaring import Command, CommandReply
from jetspark.core.numbers import UINT64, timeout_of, whole
from jetspark.errors import CommandInDoubt, ConfigError, NoResponders, NoWorkers, RequestTimeout

if TYPE_CHECKING:
    from jetspark.app.client import AppClient

__all__ = ["call_command"]


async def call_command(
    client: AppClient,
    nc: Client,
    command: Command,
    *,
    command_id: str | None,
    expected_version: int | None,
    correlation_id: str | None,
    timeout: float | None,
) -> CommandReply:
    """What :meth:`AppClient.call` does."""
    app = client.app
    name = next((name for name, spec in app.commands.items() if spec.kind is type(command)), None)
    if name is None:
        known = ", ".join(sorted(spec.kind.__name__ for spec in app.commands.values())) or "it has none"
        raise ConfigError(f"{type(command).__name__} is no command of app {app.name!r}: expected one of {known}")
    if command_id == "":
        raise ConfigError("command_id='': expected a text that is new for each command, or None for one of our own")
    if expected_version is not None:
        whole("expected_version", expected_version, low=0, high=UINT64)
    timeout_s = timeout_of(timeout, nc.options.request_timeout_s)
    outer = current_cause.get()
    id = command_id or client.new_id()
    cause = Cause(id, correlation_id or (outer.correlation_id if outer is not None else id), client.child_trace(outer))
    body, headers = wire.write_request(
        command,
        cause=cause,
        caused_by=None if outer is None else outer.id,
        source=app.source,
        time=utc_now(),
        expected_version=expected_version,
        timeout_s=timeout_s,
    )
    subject = wire.command_subject(app.name, name)
    try:
        answer = await _ask(nc, subject, body, headers, timeout_s)
        return wire.read_reply(answer.data, answer.headers)
    except NoResponders:
        raise NoWorkers(app.name, name, subject) from None
    except CommandInDoubt as error:
        raise CommandInDoubt(name, id, timeout_s) from error.__cause__
    except RequestTimeout as error:
        if not error.was_sent:
            raise
        raise CommandInDoubt(name, id, timeout_s) from None


async def _ask(nc: Client, subject: str, body: bytes, headers: dict[str, str], timeout_s: float) -> Message:
    """Send a request, and once more when half of the time has passed: the worker, or the connection, may be gone.

    Twice does no harm, since the command has an id. The first one is still waited for: a worker may only be slow.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    asking = {asyncio.create_task(nc.request(subject, body, headers=headers, timeout=timeout_s))}
    try:
        done, _ = await asyncio.wait(asking, timeout=timeout_s / 2)
        if not done:
            left_s = max(0.001, deadline - asyncio.get_running_loop().time())
            asking.add(asyncio.create_task(nc.request(subject, body, headers=headers, timeout=left_s)))
        while True:
            done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            answered = [task for task in done if task.exception() is None]
            if answered or not asking:
                return (answered or list(done))[0].result()
    finally:
        for task in asking:
            task.cancel()
