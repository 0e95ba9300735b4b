"""The steps of workers, as a server sees them: which message on the wire is which step of which handler.

The names are those of :mod:`jetspark.app.handlers.handler_steps`, and some more for what handlers do themselves:

==================  ================================================================================================
``RunHandler``      the handler's own code; nothing on the wire
``Publish``         an event that a handler publishes or returns
``ClaimEffect``     ``ctx.once`` is about to call its function
``RecordEffect``    ``ctx.once`` has called it, and notes the result
``Commit``          effects of ``ctx.tx`` and the mark that the event is done
``Acknowledge``     the event is done, its retry is scheduled, or its dead letter is stored
``InProgress``      it is still worked on
==================  ================================================================================================
"""

from __future__ import annotations

import json
from typing import Literal, NamedTuple, TypeAlias

from jetspark.app.application import App
from jetspark.app.stored_events import PREFIX
from jetspark.errors import ConfigError
from jetspark.testing.network import Publication

__all__ = ["STEPS", "SeenStep", "StepMoment", "StepReader", "parse_moment"]

StepMoment: TypeAlias = Literal["before", "after"]

STEPS = (
    "RunHandler",
    "Publish",
    "ClaimEffect",
    "RecordEffect",
    "Commit",
    "WriteParked",
    "DropParked",
    "WriteAttempts",
    "DropAttempts",
    "WriteSchedule",
    "WriteDeadLetter",
    "CloseDeadLetter",
    "RequestRedrive",
    "Acknowledge",
    "InProgress",
)
_ACKS = {b"": "Acknowledge", b"+ACK": "Acknowledge", b"+WPI": "InProgress"}
_EFFECTS = {"claimed": "ClaimEffect", "done": "RecordEffect", "unusable": "RecordEffect"}


class SeenStep(NamedTuple):
    """A step, and whose it is; None where the message does not tell."""

    name: str
    handler: str | None


def parse_moment(at: str) -> tuple[StepMoment, str]:
    """``before WriteDeadLetter``, ``after RunHandler`` and the like.

    Raises:
        ConfigError: There is no such step.
    """
    when, _, name = at.partition(" ")
    if when not in ("before", "after") or name not in STEPS:
        raise ConfigError(f"at={at!r}: expected 'before' or 'after' and one of {', '.join(STEPS)}")
    return ("before" if when == "before" else "after"), name


class StepReader:
    """Knows the steps of an application's handlers by their subjects."""

    def __init__(self, app: App) -> None:
        self._handlers = {
            (place.stream, place.name): (place.config.metadata or {}).get("jetspark-handler")
            for place in app.topology().consumers
        }
        self._bucket = f"$KV.{app.spec.handler_bucket}."
        self._dead_letters = f"dlq.{app.name}."
        self._retries = f"retry.{app.name}."
        self._transactions = {f"$KV.{spec.bucket}.": spec.name for spec in app.handlers.values() if spec.bucket}

    def read(self, message: Publication) -> SeenStep | None:
        """What a message of a worker is; None for what is no step, such as a request for information."""
        subject = message.subject
        if subject.startswith("$JS.ACK."):
            return self._ack(subject.split("."), message.data)
        if subject.startswith(self._bucket):
            return _record(subject.removeprefix(self._bucket).split("."), message)
        if subject.startswith(self._dead_letters):
            is_closed = _header(message, f"{PREFIX}Status") == "closed"
            return SeenStep("CloseDeadLetter" if is_closed else "WriteDeadLetter", subject.split(".")[2])
        if subject.startswith(self._retries):
            _, _, handler, what, *_ = subject.split(".")
            return SeenStep("WriteSchedule", handler) if what == "wait" else SeenStep("RequestRedrive", handler)
        for prefix, handler in self._transactions.items():
            if subject.startswith(prefix) and _header(message, "Nats-Batch-Commit"):
                return SeenStep("Commit", handler)
        is_event = not subject.startswith(("$", "_")) and _header(message, "Nats-Msg-Id") is not None
        return SeenStep("Publish", None) if is_event else None

    def _ack(self, tokens: list[str], data: bytes) -> SeenStep | None:
        name = _ACKS.get(data)
        if name is None:
            return None
        # With a domain and an account there are two tokens more before the stream.
        stream, consumer = tokens[2:4] if len(tokens) == 9 else tokens[4:6]
        return SeenStep(name, self._handlers.get((stream, consumer)))


def _record(tokens: list[str], message: Publication) -> SeenStep | None:
    kind, handler = tokens[0], tokens[1] if len(tokens) > 1 else None
    is_removal = bool(_header(message, "KV-Operation"))
    if kind == "parked":
        return SeenStep("DropParked" if is_removal else "WriteParked", handler)
    if kind == "attempts":
        return SeenStep("DropAttempts" if is_removal else "WriteAttempts", handler)
    if kind == "once" and not is_removal:
        name = _EFFECTS.get(json.loads(message.data)["state"])
        return None if name is None else SeenStep(name, handler)
    return None


def _header(message: Publication, name: str) -> str | None:
    return None if message.headers is None else message.headers.get(name)
