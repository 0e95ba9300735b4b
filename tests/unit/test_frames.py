from __future__ import annotations

import json

from jetspark.core import frames


def test_connect_is_one_line_of_json_whatever_the_values() -> None:
    fields = {"name": 'quote " and\r\nline break é', "verbose": False, "protocol": 1}
    wire = frames.connect(fields)
    assert wire.startswith(b"CONNECT {")
    assert wire.endswith(b"}\r\n")
    assert wire.count(b"\n") == 1
    assert json.loads(wire.removeprefix(b"CONNECT ")) == fields


def test_publishes_carry_address_size_and_payload() -> None:
    assert frames.PUB % (b"a", 2, b"hi") == b"PUB a 2\r\nhi\r\n"
    assert frames.PUB % (b"a r", 0, b"") == b"PUB a r 0\r\n\r\n"
    block = b"NATS/1.0\r\n\r\n"
    assert frames.HPUB % (b"a r", 12, 14, block, b"hi") == b"HPUB a r 12 14\r\nNATS/1.0\r\n\r\nhi\r\n"


def test_the_ends_of_control_lines_are_right_for_every_size_and_remembered_up_to_a_bound() -> None:
    ends = type(frames.LINE_ENDS)()
    for size in range(2 * frames.MAX_KNOWN_SIZE):
        assert ends[size] == ends[size] == b"%d\r\n" % size
    assert ends[64 << 20] == b"67108864\r\n"
    assert len(ends) == frames.MAX_KNOWN_SIZE + 1


def test_subscriptions_carry_subject_queue_and_id() -> None:
    assert frames.sub("a.>", "", 7) == b"SUB a.> 7\r\n"
    assert frames.sub("é", "q", 8) == b"SUB \xc3\xa9 q 8\r\n"


def test_unsubscribing_is_at_once_or_after_so_many() -> None:
    assert frames.unsub(7) == b"UNSUB 7\r\n"
    assert frames.unsub(7, 3) == b"UNSUB 7 3\r\n"


def test_pings_and_pongs_are_whole_lines() -> None:
    assert (frames.PING, frames.PONG) == (b"PING\r\n", b"PONG\r\n")


def test_messages_that_were_put_together_are_told_apart() -> None:
    first = frames.PUB % (b"a.b", 7, b"PUB \r\n1")
    second = frames.HPUB % (b"c _INBOX.1", 12, 13, b"NATS/1.0\r\n\r\n", b"x")
    third = frames.HPUB % (b"d", 12, 12, b"NATS/1.0\r\n\r\n", b"")
    fourth = frames.PUB % (b"e reply", 0, b"")
    assert list(frames.published(first + second + third + fourth)) == [
        frames.Published(first, b"a.b", b"", 7),
        frames.Published(second, b"c", b"_INBOX.1", 13),
        frames.Published(third, b"d", b"", 12),
        frames.Published(fourth, b"e", b"reply", 0),
    ]
