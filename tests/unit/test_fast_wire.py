"""Frames and answers of fast ingest, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest

from jetspark.core.connection import Connection
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import parse_servers
from jetspark.errors import ConfigError, InvalidSubject, PayloadTooLarge, ProtocolError
from jetspark.publish import fast_wire
from jetspark.publish.fast_wire import FLOW_ACK, FastFrames, FrameKind, check_range, number, place_of
from jetspark.publish.outgoing import Item

BLOCK = b"NATS/1.0\r\nA: 1\r\n\r\n"


def _frames(max_payload: int = 100) -> FastFrames:
    connection = Connection(ConnectOptions(), parse_servers("a"), inbox="_INBOX.me", jitter=lambda: 0.0)
    connection.begin(connection.pool.next()[0])
    connection.receive_data(b'INFO {"server_id":"S","max_payload":%d}\r\n' % max_payload)
    connection.login(None)
    connection.receive_data(b"PONG\r\n")
    frames = FastFrames(connection)
    frames.reply_to("_INBOX.me-1", 7, "ok")
    return frames


ITEMS: list[tuple[Item, bytes]] = [
    (("s.a", b"x"), b"PUB s.a _INBOX.me-1.7.ok.%d.1.$FI 1\r\nx\r\n"),
    (("s.a", b"x", None), b"PUB s.a _INBOX.me-1.7.ok.%d.1.$FI 1\r\nx\r\n"),
    (("s.a", bytearray(b"x")), b"PUB s.a _INBOX.me-1.7.ok.%d.1.$FI 1\r\nx\r\n"),  # type: ignore[list-item]
    (("s.b", b"", {"A": "1"}), b"HPUB s.b _INBOX.me-1.7.ok.%d.1.$FI 18 18\r\n" + BLOCK + b"\r\n"),
    (("s.b", b"xy", BLOCK), b"HPUB s.b _INBOX.me-1.7.ok.%d.1.$FI 18 20\r\n" + BLOCK + b"xy\r\n"),
]


@pytest.mark.parametrize(("item", "expected"), ITEMS)
def test_a_message_is_framed_alike_alone_and_among_others_known_or_not(item: Item, expected: bytes) -> None:
    frames = _frames()
    assert frames.frame(item, 5, FrameKind.APPEND) == expected % 5
    ready: list[bytes] = []
    _frames().build([item, item, item], 8, ready, 1 << 20)
    assert ready == [expected % 9, expected % 10, expected % 11]


def test_a_subject_that_comes_again_is_learned_and_one_that_comes_once_is_not() -> None:
    frames, ready = _frames(), list[bytes]()
    subjects = ["s.a", "s.b", "s.b", "s.c"]
    frames.build([(subject, b"", BLOCK) for subject in subjects], 0, ready, 1 << 20)
    assert list(frames.heads) == ["s.b"]
    assert [frame.split(b" ")[1].decode() for frame in ready] == subjects


@pytest.mark.parametrize("operation", list(FrameKind))
def test_the_operation_is_the_last_number(operation: FrameKind) -> None:
    subject = _frames().frame(("s", b""), 3, operation).split(b" ")[2].decode()
    assert subject == f"_INBOX.me-1.7.ok.3.{operation:d}.$FI"
    assert place_of(subject) == (3, operation)


def test_those_before_one_that_cannot_be_sent_are_ready() -> None:
    wrong: list[tuple[Item, type[Exception]]] = [
        (("a b", b""), InvalidSubject),
        (("s", b"x" * 101), PayloadTooLarge),
        (("s", b"x" * 90, BLOCK), PayloadTooLarge),
        (("unknown", b"x" * 90, BLOCK), PayloadTooLarge),
        (("s", "text"), ConfigError),  # type: ignore[list-item]
        (("s", "text", BLOCK), ConfigError),  # type: ignore[list-item]
        (("unknown", "text", BLOCK), ConfigError),  # type: ignore[list-item]
    ]
    for bad, error in wrong:
        ready: list[bytes] = []
        with pytest.raises(error):
            _frames().build([("s", b"1"), ("s", b"2"), bad, ("s", b"3")], 0, ready, 1 << 20)
        assert len(ready) == 2
        with pytest.raises(error):
            _frames().frame(bad, 1, FrameKind.APPEND)


@pytest.mark.parametrize(("more", "made"), [(-1, 2), (0, 2), (1, 3)])
def test_frames_are_made_until_they_reach_the_bound(more: int, made: int) -> None:
    ready: list[bytes] = []
    size = len(_frames().frame(("s", b"x" * 50), 1, FrameKind.APPEND))
    items = iter([("s", b"x" * 50)] * 5)
    _frames().build(items, 0, ready, 2 * size + more)
    assert (len(ready), len(list(items))) == (made, 5 - made)


def test_what_is_known_of_subjects_has_a_bound_and_is_that_of_one_inbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_wire, "MAX_KNOWN_SUBJECTS", 3)
    frames = _frames()
    heads = frames.heads
    known = []
    for subject in "abcd":
        frames.frame((subject, b""), 1, FrameKind.APPEND)
        known.append("".join(heads))
    assert known == ["a", "ab", "abc", "d"]
    frames.reply_to("_INBOX.me-2", 7, "ok")
    assert frames.heads is heads
    assert b" _INBOX.me-2.7.ok.1.1.$FI " in frames.frame(("d", b""), 1, FrameKind.APPEND)


@pytest.mark.parametrize(
    "subject", ["", "x", "_INBOX.me-1.500.fail.x.1.$FI", "_INBOX.me-1.500.fail.1.-1.$FI", "1.2.$FI"]
)
def test_a_subject_that_is_none_of_ours_has_no_place(subject: str) -> None:
    assert place_of(subject) == (0, 0)


def test_a_plain_acknowledgement_is_read_without_json() -> None:
    found = FLOW_ACK.fullmatch(b'{"type":"ack","seq":12,"msgs":500}')
    assert found is not None
    assert (found[1], found[2]) == (b"12", b"500")
    assert FLOW_ACK.fullmatch(b'{"type":"ack","seq":-1,"msgs":500}') is None


@pytest.mark.parametrize("value", [None, "5", 1.5, True, [5]])
def test_a_number_is_a_number(value: Any) -> None:
    assert number({"seq": 5}, "seq") == 5
    with pytest.raises(ProtocolError, match="'seq'"):
        number({"seq": value}, "seq")


def test_a_range_includes_both_ends() -> None:
    check_range("ack", 0, 0, 3)
    check_range("ack", 3, 0, 3)
    for wrong in (-1, 4):
        with pytest.raises(ProtocolError, match=f"ack of a fast batch for sequence {wrong}: expected 0 to 3"):
            check_range("ack", wrong, 0, 3)
