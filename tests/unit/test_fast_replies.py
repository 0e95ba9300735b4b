"""Answers to a fast batch, as the server writes them, and what is read of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jetspark.core.message import CoreMessage
from jetspark.errors import BatchUnknown, JetSparkError, ProtocolError, ServerError
from jetspark.jetstream.info import PubAck
from jetspark.publish.fast_options import Refusal
from jetspark.publish.fast_replies import FlowAck, GapReport, NobodyListens, PlainAck, StrayError, read_reply

ERROR = {"code": 400, "err_code": 10071, "description": "wrong last sequence: 4"}


def _said(reply: Any, place: str = "7.1", headers: bytes | None = None) -> CoreMessage:
    data = reply if isinstance(reply, bytes) else json.dumps(reply, separators=(",", ":")).encode()
    return CoreMessage(f"_INBOX.me.me-1.500.fail.{place}.$FI", data, None, headers, None)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])  # as the server writes it, and as others might
def test_an_acknowledgement_says_how_far_and_how_often(separators: tuple[str, str]) -> None:
    text = json.dumps({"type": "ack", "seq": 12, "msgs": 500}, separators=separators)
    assert read_reply(_said(text.encode())) == FlowAck(12, 500)


def test_a_gap_ends_before_what_was_received() -> None:
    assert read_reply(_said({"type": "gap", "last_seq": 3, "seq": 6})) == GapReport(range(3, 6))


def test_an_error_of_an_open_batch_names_its_message_and_another_one_the_subject() -> None:
    refusal = read_reply(_said({"type": "err", "seq": 4, "error": ERROR}))
    assert isinstance(refusal, Refusal)
    assert (refusal.sequence, refusal.error.err_code) == (4, 10071)
    stray = read_reply(_said({"error": ERROR, "stream": "S", "seq": 0}, "9.2"))
    assert isinstance(stray, StrayError)
    assert (stray.sequence, stray.operation, stray.error.err_code) == (9, 2, 10071)
    assert isinstance(stray.error, ServerError)


def test_an_unknown_batch_is_told_by_the_class_of_its_error() -> None:
    reply = read_reply(_said({"error": {"code": 400, "err_code": 10208, "description": "unknown"}}, "9.4"))
    assert isinstance(reply, StrayError)
    assert isinstance(reply.error, BatchUnknown)


def test_the_final_acknowledgement_has_the_batch_and_a_plain_one_has_not() -> None:
    final = read_reply(_said({"stream": "S", "seq": 100, "batch": "me-1", "count": 7}))
    assert isinstance(final, PubAck)
    assert (final.sequence, final.batch_size) == (100, 7)
    assert read_reply(_said({"stream": "S", "seq": 100})) == PlainAck("S")


def test_a_503_names_the_message_that_nobody_took() -> None:
    assert read_reply(_said(b"", "3.1", b"NATS/1.0 503\r\n\r\n")) == NobodyListens(3, 1)


@pytest.mark.parametrize(
    "reply",
    [
        {"type": "ack", "seq": "12", "msgs": 500},
        {"type": "ack", "seq": True, "msgs": 500},
        {"type": "gap", "seq": 6},
        {"type": "err", "seq": 4},
        {"type": "news", "seq": 4},
        {"stream": "S"},
        [],
        b"",
        b"{",
    ],
    ids=str,
)
def test_what_is_no_answer_raises(reply: Any) -> None:
    with pytest.raises(JetSparkError):
        read_reply(_said(reply))


def test_what_is_no_answer_is_shown_in_part() -> None:
    with pytest.raises(ProtocolError, match=r"that is none: b'\{\"type\":\"news\"") as caught:
        read_reply(_said({"type": "news", "text": "x" * 1000}))
    assert len(str(caught.value)) < 200
