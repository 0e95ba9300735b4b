"""Sends the commands of a workflow, as a handler: with retries, dead letters, and each answer recorded once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from jetspark.app.commands.command_spec import Command
from jetspark.app.handlers.context import Context
from jetspark.app.handlers.retry import Reject
from jetspark.app.workflows.commands import CommandAnswered, CommandKinds, CommandSent
from jetspark.errors import CommandRefused, ConfigError

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app.commands.command_spec import CommandReply
    from jetspark.app.spec import AppSpec

    Call: TypeAlias = Callable[[JetStream, Command, str, float], Awaitable[CommandReply]]

__all__ = ["SENDING_TIMEOUT_S", "sender_of"]

CALL_TIMEOUT_S = 5.0
"""How long an attempt waits for the answer."""
SENDING_TIMEOUT_S = 2 * CALL_TIMEOUT_S
"""Of the handler; the worker that takes over from one that died waits for as long."""


class _Answer(msgspec.Struct, frozen=True):
    """As it is recorded."""

    refused: str | None = None
    reply: Any = None
    sequence: int = 0


def sender_of(
    app: Callable[[], AppSpec], workflow: str, kinds: CommandKinds, call_command: Call
) -> Callable[..., Coroutine[Any, Any, CommandAnswered | None]]:
    """Return the handler that sends the commands of a workflow.

    Args:
        app: Returns the spec of the application, once everything is declared.
        call_command: Sends a command over a connection, with its id and a time-out.
    """

    async def send_command(event: CommandSent, ctx: Context) -> CommandAnswered | None:
        command = _restored(app(), event)

        async def call() -> _Answer:
            try:
                # The id of the event: sent again, the command is answered as it was decided.
                reply = await call_command(ctx.js, command, ctx.event_id, CALL_TIMEOUT_S)
            except CommandRefused as refusal:
                return _Answer(refused=refusal.reason)
            return _Answer(reply=reply.data, sequence=reply.sequence)

        # The log knows what was decided and not what was refused. So the answer is recorded before anybody is told:
        # after a crash the same command may be decided otherwise, and the run must not be told both.
        answer = await ctx.once("call", call)
        if event.is_awaited:
            fields = msgspec.structs.asdict(answer)
            return kinds.make_answered(event, command_id=ctx.event_id, **fields)
        if answer.refused is not None:
            raise Reject(f"command {event.command!r} was refused, and its run is over: {answer.refused}")
        return None

    send_command.__name__ = send_command.__qualname__ = f"{workflow}-commands"
    return send_command


def _restored(app: AppSpec, event: CommandSent) -> Command:
    spec = app.commands.get(event.command)
    if spec is None:
        raise ConfigError(f"command {event.command!r} is not known any more: app {app.name!r} has to declare it")
    command: Command = spec.kind.__contract__.convert(event.fields)
    return command
