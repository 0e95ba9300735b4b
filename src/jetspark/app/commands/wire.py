"""Commands on the wire: a request is the command in the envelope of events, a reply is JSON. Pure.

An answer that is not a reply has the headers ``Nats-Service-Error`` and ``Nats-Service-Error-Code``, as services of
NATS do, and a body that names the error and its facts, so that it is the same error on the caller's side.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import msgspec

from jetspark.app.causes import CauseLike
from jetspark.app.commands.declaring import Command, CommandReply
from jetspark.app.contracts.envelope import encode
from jetspark.app.contracts.tokens import escape
from jetspark.errors import (
    BoundaryConflict,
    CommandFailed,
    CommandInDoubt,
    CommandRefused,
    JetSparkError,
    ProtocolError,
    WorkersBusy,
    WrongVersion,
)

__all__ = ["CODES", "command_subject", "read_reply", "read_timeout", "write_error", "write_reply", "write_request"]

EXPECTED_VERSION = "Jetspark-Expected-Version"
TIMEOUT = "Jetspark-Timeout"
ERROR = "Nats-Service-Error"
ERROR_CODE = "Nats-Service-Error-Code"

CODES: dict[type[JetSparkError], int] = {
    CommandRefused: 422,
    WrongVersion: 412,
    BoundaryConflict: 409,
    WorkersBusy: 429,
    CommandFailed: 500,
    CommandInDoubt: 504,
}
"""The errors that a worker answers with, and their codes."""

_BY_NAME = {kind.__name__: kind for kind in CODES}


class _Reply(msgspec.Struct, frozen=True):
    command_id: str
    sequence: int
    events: int
    data: Any = None
    is_repeated: bool = False


class _Error(msgspec.Struct, frozen=True):
    error: str
    facts: list[Any]


_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_error = msgspec.json.Decoder(_Error).decode


def command_subject(app: str, name: str) -> str:
    """Where a command is sent; outside of the application's stream, which would store it."""
    return f"cmd.{escape(app)}.{name}"


def write_request(
    command: Command,
    *,
    cause: CauseLike,
    caused_by: str | None,
    source: str,
    time: datetime.datetime,
    expected_version: int | None,
    timeout_s: float,
) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request; ``cause`` is the command itself, ``caused_by`` the id of what led to it.

    Raises:
        InvalidEvent: A field has a value that its type does not allow.
    """
    encoded = encode(
        command,
        id=cause.id,
        source=source,
        time=time,
        correlation_id=cause.correlation_id,
        causation_id=caused_by,
        traceparent=cause.traceparent,
    )
    headers = {name: value for name, value in encoded.headers.items() if name != "Nats-Msg-Id"}
    headers[TIMEOUT] = f"{timeout_s:g}"
    if expected_version is not None:
        headers[EXPECTED_VERSION] = str(expected_version)
    return encoded.data, headers


def read_timeout(headers: Mapping[str, str], default_s: float) -> float:
    """For how long the caller waits."""
    try:
        return min(max(float(headers.get(TIMEOUT) or default_s), 0.001), 3600.0)
    except ValueError:
        return default_s


def read_expected_version(headers: Mapping[str, str]) -> int | None:
    text = headers.get(EXPECTED_VERSION)
    return int(text) if text is not None and text.isdigit() else None


def write_reply(reply: CommandReply) -> bytes:
    """
    Raises:
        TypeError, ValueError: Its data is nothing that JSON has.
    """
    return msgspec.json.encode(_Reply(reply.command_id, reply.sequence, reply.events, reply.data, reply.is_repeated))


def write_error(error: JetSparkError) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an answer that is one of the errors above."""
    text = " ".join(str(error).split())[:1000]
    body = msgspec.json.encode(_Error(type(error).__name__, list(error.args)))
    return body, {ERROR: text, ERROR_CODE: str(CODES[type(error)])}


def read_reply(data: bytes, headers: Mapping[str, str]) -> CommandReply:
    """
    Raises:
        JetSparkError: What the worker answered with; ``ProtocolError`` if it is no answer of a worker.
    """
    try:
        if ERROR_CODE not in headers:
            found = _decode_reply(data)
            return CommandReply(
                command_id=found.command_id,
                sequence=found.sequence,
                events=found.events,
                data=found.data,
                is_repeated=found.is_repeated,
            )
        failed = _decode_error(data)
        raise _BY_NAME[failed.error](*failed.facts)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise ProtocolError(f"{data[:200]!r} is no answer to a command: something else is subscribed to it") from error
