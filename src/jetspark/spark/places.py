"""Where messages were in their stream, as their reply subjects say. Pure.

    $JS.ACK.<stream>.<consumer>.<delivered>.<stream sequence>.<consumer sequence>.<time ns>.<pending>

or the same with domain and account behind ``ACK``, and perhaps more at the end. This is what ``message.metadata`` says,
at a fraction of its cost: every row pays for it. Of many messages at once, the replies are a table with a dot between
columns, and Arrow reads such tables: 0.14 microseconds a row, half of what splitting them takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from jetspark.core.message import CoreMessage
from jetspark.errors import ProtocolError

__all__ = ["Place", "Places", "place", "places"]

_SHORT_TOKENS, _LONG_TOKENS = 9, 11
_STREAM_SEQUENCE, _TIME_NS, _LAST = 5, 7, 8

_reply_of = attrgetter("raw_reply")


class Place(NamedTuple):
    """Of one message."""

    sequence: int
    consumer_sequence: int
    time_ns: int
    pending: int


class Places(NamedTuple):
    """Of many: Arrow arrays of 64-bit integers."""

    sequences: Any
    times_us: Any


def place(message: CoreMessage) -> Place:
    """Where it was.

    Raises:
        ProtocolError: It does not say.
    """
    reply = message.raw_reply or b""
    tokens = reply.split(b".")
    shift = _shift(len(tokens), reply)
    try:
        return Place(*map(int, tokens[_STREAM_SEQUENCE + shift : _LAST + 1 + shift]))
    except ValueError:
        raise _no_place(reply) from None


def places(messages: Sequence[CoreMessage]) -> Places:
    """Where they were. There is at least one, and all have the form of the first.

    Raises:
        ProtocolError: One does not say.
    """
    first = messages[0].raw_reply or b""
    columns = first.count(b".") + 1
    shift = _shift(columns, first)
    wanted = [str(_STREAM_SEQUENCE + shift), str(_TIME_NS + shift)]
    try:
        text = b"\n".join(map(_reply_of, messages))
        table = csv.read_csv(
            pa.BufferReader(text),
            read_options=csv.ReadOptions(
                use_threads=False, block_size=len(text) + 1, column_names=[str(number) for number in range(columns)]
            ),
            parse_options=csv.ParseOptions(delimiter=".", quote_char=False, ignore_empty_lines=False),
            convert_options=csv.ConvertOptions(
                include_columns=wanted, column_types=dict.fromkeys(wanted, pa.int64()), null_values=[]
            ),
        )
    except (TypeError, pa.ArrowInvalid) as error:
        raise ProtocolError(f"not the reply subjects of JetStream messages: {error}") from error
    if len(table) != len(messages):  # an empty line at the end is no line
        raise _no_place(b"")
    sequences, times_ns = (table.column(name).combine_chunks() for name in wanted)
    return Places(sequences, pc.divide(times_ns, 1000))


def _shift(tokens: int, reply: bytes) -> int:
    if tokens == _SHORT_TOKENS:
        return 0
    if tokens < _LONG_TOKENS:
        raise _no_place(reply)
    return 2


def _no_place(reply: bytes) -> ProtocolError:
    return ProtocolError(f"not the reply subject of a JetStream message: {reply[:200]!r}")
