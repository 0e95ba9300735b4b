"""Commands on the wire: a request is the command in the envelope of events, a reply is JSON. Pure, except for the log.

An error is answered with the headers ``Nats-Service-Error`` and ``Nats-Service-Error-Code``, as NATS services do, and a
body with the error's class and arguments, from which the caller's side raises the same error.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from jetspark.app.causes import Cause, CauseLike
from jetspark.app.commands.command_spec import Command, CommandReply, CommandSpec
from jetspark.app.commands.decider import CommandRequest
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.contracts.envelope import RawHeaders, decode, encode
from jetspark.app.contracts.foreign_envelopes import header_of
from jetspark.app.contracts.tokens import escape
from jetspark.app.finite_json import check_finite
from jetspark.core.numbers import UINT64
from jetspark.errors import (
    BoundaryConflict,
    CommandFailed,
    CommandInDoubt,
    CommandRefused,
    ContractViolation,
    JetSparkError,
    PayloadTooLarge,
    ProtocolError,
    WorkersBusy,
    WrongVersion,
)

__all__ = [
    "CODES",
    "STORED",
    "answer_priority",
    "command_subject",
    "kind_of",
    "read_expected_version",
    "read_reply",
    "read_request",
    "reply_too_large",
    "time_to_decide",
    "timeout_header",
    "write_error",
    "write_reply",
    "write_request",
    "written_outcome",
]


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

STORED = 2
"""See :func:`answer_priority`."""
DECIDING_PART = 0.8
"""A worker tries for this part of the caller's time-out; the rest is for the request's trip."""
MAX_TEXT = 8192
"""Characters of a text in an error: an answer that is too large for the server would not arrive at all."""
_MAX_VERSION = 20
"""Digits of the largest sequence."""


class _Reply(msgspec.Struct, frozen=True):
    command_id: str
    sequence: int
    events: int
    data: object = None
    is_repeated: bool = False


class _Error(msgspec.Struct, frozen=True):
    error: str
    facts: list[object]


_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_error = msgspec.json.Decoder(_Error).decode


def command_subject(app: str, name: str) -> str:
    """The subject of a command's requests; the application's stream must not store it."""
    return f"cmd.{escape(app)}.{name}"


def write_request(
    command: Command,
    *,
    cause: CauseLike,
    caused_by: str | None,
    source: str,
    time: datetime.datetime,
    expected_version: int | None,
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
    if expected_version is not None:
        headers[EXPECTED_VERSION] = str(expected_version)
    return encoded.data, headers


def timeout_header(timeout_s: float) -> dict[str, str]:
    """Says for how long the caller waits."""
    return {TIMEOUT: f"{timeout_s:g}"}


def time_to_decide(headers: Mapping[str, str], default_s: float) -> float:
    """How long a command is tried after its request has arrived; ``default_s`` if its caller gives no time-out above 0.

    A worker stops before its caller's time-out. After it, the caller may ask again, and another worker may answer that
    the command is refused. If the first worker were still trying, it could store the command after that.
    """
    try:
        wanted_s = float(headers[TIMEOUT]) * DECIDING_PART
    except (KeyError, ValueError):
        return default_s
    # Also false for NaN, a deadline that never comes. A command that runs out of time is not answered, so a time-out
    # of 0 or less, taken for a very short one, would leave its caller without a reply.
    return min(max(wanted_s, 0.001), 3600.0) if wanted_s > 0 else default_s


def read_expected_version(name: str, headers: Mapping[str, str]) -> int | None:
    """
    Raises:
        CommandFailed: What the caller expects cannot be read; decided without it, the command could overwrite.
    """
    text = headers.get(EXPECTED_VERSION)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_VERSION and int(text) <= UINT64):
        raise CommandFailed(name, f"header {EXPECTED_VERSION}: {text[:40]!r}: expected a sequence, 0 or more")
    return int(text)


def read_request(
    spec: CommandSpec,
    commands: Catalogue,
    subject: str,
    data: bytes,
    raw_headers: RawHeaders,
    headers: Mapping[str, str],
) -> CommandRequest:
    """
    Args:
        spec: The command of this subject.
        commands: The readable commands.
        raw_headers: The message's header block; ``headers`` are the same, decoded.

    Raises:
        CommandFailed: The message is another command, or breaks the command's contract.
    """
    try:
        decoded = decode(subject, data, raw_headers, commands)
    except ContractViolation as error:
        raise CommandFailed(spec.name, f"the worker cannot read the command: {error}") from error
    if type(decoded.event) is not spec.kind:
        # Who may call one command need not be allowed to call another, which has other guards besides.
        raise CommandFailed(spec.name, f"{decoded.type!r} came to {subject!r}: send it to its own subject")
    return CommandRequest(
        command=decoded.event,
        cause=Cause(decoded.id, decoded.correlation_id, header_of(headers, "traceparent", "ce-traceparent")),
        expected_version=read_expected_version(spec.name, headers),
    )


def write_reply(reply: CommandReply) -> bytes:
    """
    Raises:
        TypeError, ValueError: The data is not a JSON value.
    """
    data = msgspec.json.encode(_Reply(reply.command_id, reply.sequence, reply.events, reply.data, reply.is_repeated))
    check_finite("the reply", reply.data, data)
    return data


def write_error(error: JetSparkError) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an answer that is one of the errors above."""
    kind = kind_of(error)
    assert kind is not None
    # A refusal may be of a class of the application's own, which the caller need not have.
    facts = [str(getattr(error, "reason", error.args))] if kind is CommandRefused else error.args
    text = " ".join(_fact(facts[0] if kind is CommandRefused else error).split())[:1000]
    body = msgspec.json.encode(_Error(kind.__name__, [_fact(each) for each in facts]))
    return body, {ERROR: text, ERROR_CODE: str(CODES[kind])}


def kind_of(error: Exception) -> type[JetSparkError] | None:
    """The class of errors below which this one can be sent; None for errors that cannot."""
    return next((kind for kind in type(error).__mro__ if kind in CODES), None)


def _fact(value: object) -> Any:
    """A fact of an error as JSON has it: what the application raised may be anything, and the caller waits for it."""
    if isinstance(value, list | tuple):
        return [_fact(each) for each in value]
    if value is None or isinstance(value, int | float):
        return value
    text = str(value).encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."


def read_reply(data: bytes, headers: Mapping[str, str]) -> CommandReply:
    """
    Raises:
        JetSparkError: The error that the worker answered with; ``ProtocolError`` if the message is not a worker's
            answer.
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
        raise ProtocolError(
            f"{data[:200]!r} is not an answer to a command: another program is subscribed to its subject"
        ) from error


def answer_priority(data: bytes, headers: Mapping[str, str]) -> int:
    """Rank an answer; of two answers to one command the higher one counts. ``STORED`` if events are stored, 1 if the
    outcome is unknown, 0 if nothing is stored.
    """
    if ERROR_CODE in headers:
        return int(headers[ERROR_CODE] == str(CODES[CommandInDoubt]))
    try:
        return STORED if _decode_reply(data).events else 0
    except msgspec.MsgspecError:
        return 0


_logger = logging.getLogger("jetspark.app")


def written_outcome(spec: CommandSpec, outcome: CommandReply | Exception) -> tuple[bytes, dict[str, str] | None]:
    """Body and headers of an answer, which has no headers if it is a reply. An error of the worker's is logged."""
    if not isinstance(outcome, Exception):
        try:
            return write_reply(outcome), None
        except (TypeError, ValueError) as error:
            outcome = error
    return write_error(_answerable(spec, outcome))


def _answerable(spec: CommandSpec, error: Exception) -> JetSparkError:
    """The error to send to the caller."""
    if isinstance(error, JetSparkError) and kind_of(error) is not None:
        if isinstance(error, CommandFailed):
            _logger.error("command %s: %s", spec.name, error.reason, exc_info=error.__cause__)
        return error
    _logger.error("command %s: %s", spec.name, error, exc_info=error)
    return CommandFailed(spec.name, f"{type(error).__name__}: {error}")


def reply_too_large(spec: CommandSpec, large: PayloadTooLarge) -> CommandFailed:
    """The error for a reply that exceeds the server's largest message."""
    reason = f"its reply cannot be sent: {large}. Return an id, and let the caller read a view"
    return CommandFailed(spec.name, reason)
