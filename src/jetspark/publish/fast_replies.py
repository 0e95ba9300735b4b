"""What the server says to a fast batch, read: each answer becomes a value that says what it is about. Pure.

Everything arrives in one inbox and is told apart by its content alone. Errors come in two shapes: "err" is about one
message of a batch that is open, and an error without a type is the answer to a message that never became part of it.
The final acknowledgement has no type, but the batch's id.

Nothing is believed here but the shape: whether the numbers can be true, the batch decides.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from jetspark.core.message import CoreMessage, is_no_responders
from jetspark.errors import ProtocolError, ServerError
from jetspark.jetstream import wire
from jetspark.jetstream.info import PubAck
from jetspark.publish.fast_options import Refusal
from jetspark.publish.fast_wire import FLOW_ACK, number, place_of

__all__ = ["FastReply", "FlowAck", "GapReport", "NobodyListens", "PlainAck", "StrayError", "read_reply"]


class FlowAck(NamedTuple):
    """The server is done with all up to a sequence, and acknowledges after that many messages from now on."""

    sequence: int
    msgs_per_ack: int


class GapReport(NamedTuple):
    """These did not reach the batch."""

    missing: range


class NobodyListens(NamedTuple):
    """No stream took the message with this sequence and this :class:`~jetspark.publish.fast_wire.FrameKind`."""

    sequence: int
    operation: int


class StrayError(NamedTuple):
    """An error that is not about the batch's course: it never opened, is gone, or does not have this message."""

    sequence: int
    operation: int
    error: ServerError


class PlainAck(NamedTuple):
    """A stream stored the message like any other: it knows no batches."""

    stream: str


FastReply: TypeAlias = FlowAck | GapReport | NobodyListens | StrayError | PlainAck | Refusal | PubAck


def read_reply(message: CoreMessage) -> FastReply:
    """
    Raises:
        JetSparkError: It is no answer to a fast batch.
    """
    plain = FLOW_ACK.fullmatch(message.data)
    if plain is not None:
        return FlowAck(int(plain[1]), int(plain[2]))
    if is_no_responders(message):
        return NobodyListens(*place_of(message.subject))
    reply = wire.read_object(message.data)
    error = wire.error_of(reply)
    match reply.get("type"):
        case "ack":
            return FlowAck(number(reply, "seq"), number(reply, "msgs"))
        case "gap":
            # "last_seq" is the first that is missing, and "seq" the one that was received; for a ping, one above it.
            return GapReport(range(number(reply, "last_seq"), number(reply, "seq")))
        case "err" if error is not None:
            return Refusal(number(reply, "seq"), error)
        case _ if error is not None:
            return StrayError(*place_of(message.subject), error)
        case _ if isinstance(reply.get("batch"), str):
            return wire.decode(PubAck, reply)
        case None if isinstance(reply.get("seq"), int):
            return PlainAck(str(reply.get("stream")))
    raise no_answer(message)


def no_answer(message: CoreMessage) -> ProtocolError:
    return ProtocolError(f"an answer to a fast batch that is none: {message.data[:80]!r}")
