"""What a fast publisher keeps of messages."""

from __future__ import annotations

from typing import Any

import pytest

from jetspark.core.connection import Connection
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import parse_servers
from jetspark.errors import ConfigError, InvalidSubject, PayloadTooLarge
from jetspark.publish.fast_keeping import FastKeeping
from jetspark.publish.outgoing import Item


def _keeping(id_prefix: str | None = None) -> FastKeeping:
    connection = Connection(ConnectOptions(), parse_servers("a"), inbox="_INBOX.me", jitter=lambda: 0.0)
    return FastKeeping(connection, id_prefix)


def _kept(keeping: FastKeeping, *items: Any, position: int = 7) -> list[Item]:
    kept: list[Item] = []
    keeping.keep(items, position, kept)
    return kept


def test_without_ids_messages_stay_as_they_are() -> None:
    keeping = _keeping()
    assert not keeping.has_ids
    assert _kept(keeping, ("s", b"1"), ("s", b"2")) == [("s", b"1"), ("s", b"2")]


def test_data_and_headers_are_made_bytes() -> None:
    kept = _kept(_keeping(), ("s", bytearray(b"1")), ("s", bytearray(b"2"), {"A": "b"}))
    assert kept == [("s", b"1"), ("s", b"2", b"NATS/1.0\r\nA: b\r\n\r\n")]
    assert [type(item[1]) for item in kept] == [bytes, bytes]


def test_an_id_is_the_prefix_and_the_position_with_headers_and_without() -> None:
    keeping = _keeping("me")
    assert keeping.has_ids
    assert _kept(keeping, ("s", b"1"), ("s", b"2")) == [
        ("s", b"1", b"NATS/1.0\r\nNats-Msg-Id: me-7\r\n\r\n"),
        ("s", b"2", b"NATS/1.0\r\nNats-Msg-Id: me-8\r\n\r\n"),
    ]
    first, second = _kept(keeping, ("s", b"1"), ("t", b"2", {"A": "b"}))
    assert first == ("s", b"1", b"NATS/1.0\r\nNats-Msg-Id: me-7\r\n\r\n")
    assert second == ("t", b"2", b"NATS/1.0\r\nA: b\r\nNats-Msg-Id: me-8\r\n\r\n")


def test_an_id_of_the_caller_stays() -> None:
    kept = _kept(_keeping("me"), ("s", b"1", {"Nats-Msg-Id": "mine"}))
    assert kept == [("s", b"1", b"NATS/1.0\r\nNats-Msg-Id: mine\r\n\r\n")]


def test_checked_messages_get_their_ids_all_the_same() -> None:
    kept: list[Item] = []
    _keeping("me").keep([("s", b"1")], 7, kept, are_checked=True)
    assert kept == [("s", b"1", b"NATS/1.0\r\nNats-Msg-Id: me-7\r\n\r\n")]


def test_checked_messages_without_ids_stay_as_they_are_and_their_headers_are_made_bytes() -> None:
    keeping = _keeping()
    kept: list[Item] = []
    keeping.keep([("s", b"1"), ("s", b"2")], 7, kept, are_checked=True)
    keeping.keep([("s", b"3", {"A": "b"})], 9, kept, are_checked=True)
    assert kept == [("s", b"1"), ("s", b"2"), ("s", b"3", b"NATS/1.0\r\nA: b\r\n\r\n")]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (("a b", b""), InvalidSubject),
        (("s", b"x" * (1 << 20) + b"x"), PayloadTooLarge),
        (("s", b"x" * (1 << 20), {"A": "b"}), PayloadTooLarge),
        (("s", "text"), ConfigError),
        (("s", "text", {"A": "b"}), ConfigError),
        ("ab", ConfigError),
        (("s",), ConfigError),
        (7, ConfigError),
    ],
    ids=["subject", "data", "data and headers", "no bytes", "no bytes with headers", "text", "short", "number"],
)
@pytest.mark.parametrize("id_prefix", [None, "me"])
def test_those_before_one_that_can_never_be_sent_are_kept(
    bad: Any, error: type[Exception], id_prefix: str | None
) -> None:
    kept: list[Item] = []
    with pytest.raises(error):
        _keeping(id_prefix).keep([("s", b"1"), bad, ("s", b"3")], 1, kept)
    assert [item[1] for item in kept] == [b"1"]
