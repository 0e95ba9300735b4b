"""Reply subjects and the answers to them."""

from __future__ import annotations

import datetime
import json

import pytest

from jetspark.errors import ConfigError, ProtocolError, UsageError
from jetspark.jetstream.acks import (
    ACK,
    ACK_FRAME,
    IN_PROGRESS,
    AckableMessage,
    Metadata,
    nak_payload,
    parse_metadata,
    term_payload,
)

STORED = datetime.datetime(2021, 7, 20, 22, 7, 53, 482533, datetime.UTC)
PLAIN = b"$JS.ACK.ORDERS.billing.2.9808.9811.1626818873482533999.7"
EXPECTED = Metadata("ORDERS", "billing", 2, 9808, 9811, STORED, 7)


def test_the_short_form() -> None:
    assert parse_metadata(PLAIN) == EXPECTED


@pytest.mark.parametrize("more", [b"", b".r4nd0m", b".a.b"])
@pytest.mark.parametrize(("domain", "expected"), [(b"hub", "hub"), (b"_", None)])
def test_the_long_form_with_and_without_a_domain(domain: bytes, expected: str | None, more: bytes) -> None:
    reply = b"$JS.ACK." + domain + b".4cc0unt." + PLAIN.removeprefix(b"$JS.ACK.") + more
    found = parse_metadata(reply)
    assert found.domain == expected
    assert found == Metadata("ORDERS", "billing", 2, 9808, 9811, STORED, 7, expected)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"_INBOX.a.b",
        b"$JS.ACK",
        PLAIN + b".10tokens",
        PLAIN.removesuffix(b".7"),
        PLAIN.replace(b"9808", b"x"),
        PLAIN.replace(b"$JS.ACK", b"$JS.FC"),
        PLAIN.replace(b"1626818873482533999", b"9" * 40),
    ],
)
def test_any_other_subject_is_an_error_that_shows_it(reply: bytes) -> None:
    with pytest.raises(ProtocolError, match="not the reply subject"):
        parse_metadata(reply)


def test_payloads() -> None:
    assert (ACK, IN_PROGRESS) == (b"+ACK", b"+WPI")
    assert ACK_FRAME % b"to" == b"PUB to 4\r\n+ACK\r\n"
    assert nak_payload(None) == b"-NAK"
    assert nak_payload(1.5).startswith(b"-NAK {")
    assert json.loads(nak_payload(1.5).removeprefix(b"-NAK ")) == {"delay": 1_500_000_000}
    assert term_payload(None) == b"+TERM"
    assert term_payload("köln is closed") == "+TERM köln is closed".encode()
    with pytest.raises(ConfigError, match="delay=-1"):
        nak_payload(-1)


def test_metadata_is_read_once_and_only_when_asked_for() -> None:
    message = AckableMessage("orders.1", b"", PLAIN, None, object())
    assert message._metadata is None
    assert message.metadata == EXPECTED
    assert message.metadata is message.metadata


def test_an_answered_message_says_so_and_still_knows_its_metadata() -> None:
    client = object()
    message = AckableMessage("orders.1", b"", PLAIN, None, client)
    assert message._client_to_answer() is client
    was_answered, message._client = message.is_answered, None
    assert (was_answered, message.is_answered) == (False, True)
    with pytest.raises(UsageError, match=r"orders\.1.*already answered"):
        message._client_to_answer()
    assert message.metadata.stream_sequence == 9808
    assert "billing" in repr(message)
