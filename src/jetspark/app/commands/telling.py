"""What a caller is told of a command, in the form in which it is sent. Pure, but for the log."""

from __future__ import annotations

import logging

from jetspark.app.commands import wire
from jetspark.app.commands.command_spec import CommandReply, CommandSpec
from jetspark.errors import CommandFailed, JetSparkError, PayloadTooLarge

__all__ = ["cannot_be_sent", "written_outcome"]

_logger = logging.getLogger("jetspark.app")


def written_outcome(spec: CommandSpec, outcome: CommandReply | Exception) -> tuple[bytes, dict[str, str] | None]:
    """Body and headers of an answer, which has no headers if it is a reply. An error of the worker's is logged."""
    if not isinstance(outcome, Exception):
        try:
            return wire.write_reply(outcome), None
        except (TypeError, ValueError) as error:
            outcome = error
    return wire.write_error(_told(spec, outcome))


def _told(spec: CommandSpec, error: Exception) -> JetSparkError:
    """What the caller is told of an error."""
    if isinstance(error, JetSparkError) and wire.kind_of(error) is not None:
        if isinstance(error, CommandFailed):
            _logger.error("command %s: %s", spec.name, error.reason, exc_info=error.__cause__)
        return error
    _logger.error("command %s: %s", spec.name, error, exc_info=error)
    return CommandFailed(spec.name, f"{type(error).__name__}: {error}")


def cannot_be_sent(spec: CommandSpec, large: PayloadTooLarge) -> CommandFailed:
    """What the caller is told of a reply that is larger than the server's messages."""
    reason = f"its reply cannot be sent: {large}. Return an id, and let the caller read a view"
    return CommandFailed(spec.name, reason)
