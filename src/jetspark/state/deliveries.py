"""Stream sequence, consumer sequence and time of a message, parsed from its reply subject. Pure.

    $JS.ACK.<stream>.<consumer>.<delivered>.<stream sequence>.<consumer sequence>.<time ns>.<pending>

or the same with domain and account after ``ACK``, and possibly more tokens at the end. Faster than
``message.metadata``, which has the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jetspark.core.message import CoreMessage
from jetspark.errors import ProtocolError
from jetspark.jetstream.info import StoredMessage

__all__ = ["StreamOffset", "count_up_to", "delivery", "sequence_of", "sequences_of", "token_shift"]

_SHORT_TOKENS, _LONG_TOKENS = 9, 11
_STREAM_SEQUENCE, _LAST = 5, 8


class StreamOffset(NamedTuple):
    """Position of a message in its stream and its consumer."""

    sequence: int
    consumer_sequence: int
    time_ns: int
    pending: int


def delivery(message: CoreMessage) -> StreamOffset:
    """Parse the reply subject of a message.

    Raises:
        ProtocolError: It is not the reply subject of a JetStream message.
    """
    reply = message.raw_reply or b""
    tokens = reply.split(b".")
    shift = token_shift(len(tokens), reply)
    try:
        return StreamOffset(*map(int, tokens[_STREAM_SEQUENCE + shift : _LAST + 1 + shift]))
    except ValueError:
        raise _not_ours(reply) from None


def sequence_of(message: Any) -> int:
    """The stream sequence of a message that a consumer sent, or that was read without one."""
    return message.sequence if isinstance(message, StoredMessage) else delivery(message).sequence


def sequences_of(messages: Sequence[CoreMessage]) -> Sequence[int]:
    """The stream sequences of messages that one consumer sent, in their order, none of them twice.

    Raises:
        ProtocolError: One is not a JetStream message.
    """
    if not messages:
        return ()
    first, last = delivery(messages[0]).sequence, delivery(messages[-1]).sequence
    if last - first == len(messages) - 1:
        return range(first, last + 1)  # they ascend: there is no other way to have as many between the two
    return [delivery(message).sequence for message in messages]


def token_shift(tokens: int, reply: bytes) -> int:
    """How far the numbers of a reply subject are behind those of its short form.

    Raises:
        ProtocolError: It has neither form.
    """
    if tokens == _SHORT_TOKENS:
        return 0
    if tokens < _LONG_TOKENS:
        raise _not_ours(reply)
    return 2


def count_up_to(messages: Sequence[CoreMessage], last: int) -> int:
    """How many of these messages, which are in order, are not beyond the sequence ``last``."""
    low, high = 0, len(messages)
    while low < high:
        middle = (low + high) // 2
        if delivery(messages[middle]).sequence <= last:
            low = middle + 1
        else:
            high = middle
    return low


def _not_ours(reply: bytes) -> ProtocolError:
    return ProtocolError(f"not the reply subject of a JetStream message: {reply[:200]!r}")
