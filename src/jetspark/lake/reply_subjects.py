"""Stream sequences and times of many messages, parsed from their reply subjects. Pure.

Does for many messages what :func:`jetspark.state.deliveries.delivery` does for one. The replies form a table with dots
between the columns, which Arrow parses in 0.14 microseconds a row, half the time of splitting them.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import pyarrow as pa

from jetspark.core.message import CoreMessage
from jetspark.errors import ProtocolError
from jetspark.state.deliveries import token_shift

__all__ = ["StreamOffsets", "stream_offsets", "times_us"]

_STREAM_SEQUENCE, _TIME_NS = 5, 7

_reply_of = attrgetter("raw_reply")


class StreamOffsets(NamedTuple):
    """Sequences and times of messages, as Arrow arrays of 64-bit integers."""

    sequences: Any
    times_ns: Any

    @property
    def times_us(self) -> Any:
        return times_us(self.times_ns)


def stream_offsets(messages: Sequence[CoreMessage]) -> StreamOffsets:
    """Sequences and times of at least one message; all replies have the form of the first.

    Raises:
        ProtocolError: A message has no such reply subject.
    """
    # Imported here: most of Spark's Python processes only plan or commit, and these modules take 50 ms to import.
    from pyarrow import csv

    first = messages[0].raw_reply or b""
    columns = first.count(b".") + 1
    shift = token_shift(columns, first)
    wanted = [str(_STREAM_SEQUENCE + shift), str(_TIME_NS + shift)]
    try:
        text = b"\n".join(map(_reply_of, messages))
        table = csv.read_csv(
            pa.BufferReader(text),
            read_options=csv.ReadOptions(
                use_threads=False, block_size=len(text) + 1, column_names=[str(number) for number in range(columns)]
            ),
            parse_options=csv.ParseOptions(delimiter=".", quote_char=False),
            convert_options=csv.ConvertOptions(
                include_columns=wanted, column_types=dict.fromkeys(wanted, pa.int64()), null_values=[]
            ),
        )
    except (TypeError, pa.ArrowInvalid) as error:
        raise ProtocolError(f"not the reply subjects of JetStream messages: {error}") from error
    if len(table) != len(messages):  # Arrow skips empty lines
        raise ProtocolError("a JetStream message without a reply subject")
    sequences, times_ns = (table.column(name).combine_chunks() for name in wanted)
    return StreamOffsets(sequences, times_ns)


def times_us(times_ns: Any) -> Any:
    """Nanoseconds as microseconds; the last three digits are dropped."""
    import pyarrow.compute as pc  # late for the same reason

    return pc.divide(times_ns, 1000)
