"""What a bucket's messages say, and how a table is divided among readers."""

from __future__ import annotations

from array import array

import pytest

from jetspark.jetstream.acks import AckableMessage
from jetspark.state.deliveries import count_up_to
from jetspark.state.tables import TablePlan, is_within_transaction, operation, split


def delivered(sequence: int, headers: bytes | None = None) -> AckableMessage:
    reply = b"$JS.ACK.KV_orders.c.1.%d.%d.1700000000123456789.4" % (sequence, sequence - 1)
    return AckableMessage("$KV.orders.a", b"", reply, headers, None)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (None, "put"),
        (b"NATS/1.0\r\nJetSpark-Sequence: 4\r\n\r\n", "put"),
        (b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n", "delete"),
        (b"NATS/1.0\r\nNats-Rollup: sub\r\nKV-Operation: PURGE\r\n\r\n", "purge"),
        (b"NATS/1.0\r\nNats-Marker-Reason: MaxAge\r\n\r\n", "purge"),
    ],
)
def test_headers_tell_what_was_done(headers: bytes | None, expected: str) -> None:
    assert operation(delivered(1, headers=headers)) == expected


@pytest.mark.parametrize(
    ("headers", "is_within"),
    [
        (None, False),
        (b"NATS/1.0\r\nNats-Batch-Id: x\r\nNats-Batch-Sequence: 1\r\n\r\n", True),
        (b"NATS/1.0\r\nNats-Batch-Id: x\r\nNats-Batch-Sequence: 2\r\nNats-Batch-Commit: 1\r\n\r\n", False),
    ],
)
def test_a_transaction_is_over_with_the_message_that_says_so(headers: bytes | None, is_within: bool) -> None:
    assert is_within_transaction(headers) is is_within


def test_a_piece_is_cut_at_the_last_sequence() -> None:
    messages = [delivered(sequence) for sequence in (2, 4, 6)]
    assert [count_up_to(messages, last) for last in range(1, 8)] == [0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("first", "end", "parts"), [(1, 101, 3), (5, 8, 10), (7, 7, 2), (1, 2, 1)])
def test_parts_cover_everything_once(first: int, end: int, parts: int) -> None:
    ranges = split(first, end, parts)
    assert [number for low, high in ranges for number in range(low, high)] == list(range(first, end))
    assert len(ranges) == min(parts, end - first)
    plan = TablePlan(9, array("Q", range(first, end)))
    assert [number for part in plan.parts(parts) for number in part] == list(range(first, end))
