from __future__ import annotations

import pytest

from jetspark.core.headers import Headers, Status
from jetspark.core.message import CoreMessage
from jetspark.errors import ProtocolError, UsageError


def message(reply: bytes | None = None, headers: bytes | None = None) -> CoreMessage:
    return CoreMessage("a.b", b"hello", reply, headers, None)


def test_subject_and_data_are_as_received() -> None:
    assert (message().subject, message().data) == ("a.b", b"hello")


def test_the_reply_subject_is_text_and_empty_when_there_is_none() -> None:
    assert message("é".encode()).reply == message("é".encode()).reply_subject() == "é"
    assert message().reply == message(b"").reply == ""


def test_answering_a_message_that_wants_no_answer_is_an_error_that_says_so() -> None:
    with pytest.raises(UsageError, match=r"'a\.b' has no reply subject"):
        message().reply_subject()


def test_a_reply_subject_that_is_not_utf_8_is_kept_like_such_a_subject() -> None:
    odd = message(b"r\xff")
    assert odd.reply == "r\udcff"
    assert "r" in repr(odd)


def test_headers_are_decoded_once_and_empty_when_there_are_none() -> None:
    received = message(headers=b"NATS/1.0\r\nA: 1\r\n\r\n")
    assert received.headers == {"A": "1"}
    assert received.headers is received.headers
    plain = message()
    assert plain.headers == Headers()
    assert plain.headers is plain.headers


def test_the_size_counts_headers_and_data() -> None:
    assert message(headers=b"NATS/1.0\r\nA: 1\r\n\r\n").size_bytes == 18 + len(message().data)


def test_the_status_is_read_without_the_headers() -> None:
    assert message(headers=b"NATS/1.0 503 No Responders\r\n\r\n").status == Status(503, "No Responders")
    assert message(headers=b"NATS/1.0\r\nA: 1\r\n\r\n").status is None
    assert message().status is None


def test_reading_the_headers_leaves_the_status_readable() -> None:
    received = message(headers=b"NATS/1.0 100 Idle\r\nA: 1\r\n\r\n")
    assert received.headers == {"A": "1"}
    assert received.status == Status(100, "Idle")


def test_damaged_headers_are_an_error_for_the_reader_only_when_read() -> None:
    damaged = message(headers=b"garbage")
    assert damaged.data == b"hello"
    with pytest.raises(ProtocolError):
        damaged.headers  # noqa: B018


def test_the_repr_shows_the_size_and_not_the_payload() -> None:
    assert repr(message()) == "<Message subject='a.b', 5 bytes>"
    assert repr(message(b"r")) == "<Message subject='a.b', reply='r', 5 bytes>"
