"""What waits for the network, without a connection around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jetspark.core import outbox
from jetspark.core.connection import Connection
from jetspark.core.frames import PONG
from jetspark.core.options import ConnectOptions
from jetspark.core.outbox import Outbox
from jetspark.core.reconnect import Server
from jetspark.errors import BufferFull, ConnectionClosed, InvalidSubject, PayloadTooLarge

FRAME = b"PUB a 3\r\nabc\r\n"
ROOM = outbox.MIN_CONTROL_ROOM_BYTES


def new(send_buffer_bytes: int = 1000, max_payload_bytes: int = 100) -> Outbox:
    return Outbox(send_buffer_bytes, "_INBOX.me.", max_payload_bytes)


Publish = Callable[[Outbox], None]
WAYS: dict[str, Publish] = {
    "publish": lambda box: box.publish("a", b"abc"),
    "publish_raw": lambda box: box.publish_raw(b"a", b"abc"),
    "publish_frame": lambda box: box.publish_frame(FRAME),
    "publish_frames": lambda box: box.publish_frames([FRAME]),
}


# ---- every way to publish --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_publish_counts_and_keeps_the_message(way: str) -> None:
    box = new()
    for number in (1, 2):
        WAYS[way](box)
        assert (box.published, box.buffered_messages, box.out_bytes) == (number, number, number * len(FRAME))
    assert box._hand_over() == 2 * FRAME
    assert (box.published, box.buffered_messages, box.out_bytes) == (2, 0, 0)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_publish_is_bounded_to_the_byte(way: str) -> None:
    box = new(send_buffer_bytes=2 * len(FRAME))
    WAYS[way](box)
    WAYS[way](box)
    with pytest.raises(BufferFull):
        WAYS[way](box)
    assert (box.published, box.out_bytes) == (2, 2 * len(FRAME))
    assert box._hand_over() == 2 * FRAME


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_publish_lets_a_message_larger_than_the_buffer_through_an_empty_one(way: str) -> None:
    box = new(send_buffer_bytes=1)
    WAYS[way](box)
    with pytest.raises(BufferFull):
        WAYS[way](box)
    assert box._hand_over() == FRAME


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_publish_is_refused_by_a_closed_connection(way: str) -> None:
    connection = Connection(ConnectOptions(), [Server("a", 4222)], inbox="_INBOX.me", jitter=lambda: 0.0)
    connection.close()
    with pytest.raises(ConnectionClosed):
        WAYS[way](connection)
    assert (connection.published, connection.out_bytes) == (0, 0)


@pytest.mark.parametrize("subject", [[], {}, None, b"a", 5])
def test_what_is_no_text_is_no_subject(subject: Any) -> None:
    box = new()
    with pytest.raises(InvalidSubject):
        box.publish(subject)
    with pytest.raises(InvalidSubject):
        box.address(subject)
    assert (box.published, box.out_bytes) == (0, 0)


def test_a_payload_may_be_as_large_as_the_server_says() -> None:
    box = new(max_payload_bytes=3)
    assert box.payload(b"abc") == b"abc"
    assert box.payload(b"ab", header_bytes=1) == b"ab"
    with pytest.raises(PayloadTooLarge):
        box.payload(b"abcd")


# ---- commands --------------------------------------------------------------------------------------------------------


def check_that_the_whole_room_is_free(box: Outbox) -> None:
    box._send_command(bytes(ROOM))
    box._check_control_room()
    box._send_command(b"+")
    with pytest.raises(BufferFull) as failure:
        box._check_control_room()
    assert (failure.value.buffered_bytes, failure.value.limit_bytes) == (ROOM + 1, ROOM)


def test_commands_are_bounded_to_the_byte_until_they_are_taken_or_their_session_ends() -> None:
    box = new()
    check_that_the_whole_room_is_free(box)
    box._hand_over()
    check_that_the_whole_room_is_free(box)
    box._keep_messages()
    check_that_the_whole_room_is_free(box)
    box.hold_back()
    box._hand_over()  # the last words
    box._keep_messages()
    check_that_the_whole_room_is_free(box)


def test_answers_to_pings_have_their_room_again_once_the_last_words_are_taken() -> None:
    box = new()
    box.hold_back()
    for _ in range(2):
        for _ in range(ROOM // len(PONG)):
            box._send_command(PONG)
        box._check_control_room()
        assert len(box._hand_over()) == ROOM - ROOM % len(PONG)
        assert box._control_bytes == 0


def test_what_begins_a_session_is_counted_and_comes_first() -> None:
    box = new()
    box.publish("a", b"abc")
    box._send_first([b"SUB a 1\r\n", b"SUB b 2\r\n"])
    assert box.out_bytes == len(b"SUB a 1\r\nSUB b 2\r\n" + FRAME)
    assert box._hand_over() == b"SUB a 1\r\nSUB b 2\r\n" + FRAME


# ---- leaving a session -----------------------------------------------------------------------------------------------


def test_a_session_is_being_left_from_the_first_of_its_last_words_to_its_end() -> None:
    box = new()
    states = [box.is_leaving]
    box.hold_back()
    states.append(box.is_leaving)
    box._keep_messages()
    states.append(box.is_leaving)
    assert states == [False, True, False]


# ---- a server that accepts less --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_leaving", [False, True])
def test_what_a_server_has_no_room_for_is_named_by_its_number_among_all_messages(is_leaving: bool) -> None:
    box = new()
    box.publish("sent", b"")
    box._hand_over()
    box.publish("waits", b"")
    if is_leaving:
        box.hold_back()  # what waits is for the session that we are leaving
    box.publish("fits", bytes(10))
    box.publish("large", bytes(11))
    [(number, message)] = box._allow_payload(10)
    assert (number, message.subject) == (4, b"large")
    box._keep_messages()
    assert box._hand_over() == b"PUB waits 0\r\n\r\nPUB fits 10\r\n%b\r\n" % bytes(10)
    with pytest.raises(PayloadTooLarge):
        box.publish("large", bytes(11))


def test_as_much_room_as_before_or_more_drops_nothing() -> None:
    box = new(max_payload_bytes=5)
    box.publish_raw(b"a", b"an answer of ours is not measured")
    assert box._allow_payload(5) == []
    assert box._allow_payload(6) == []
    assert box._hand_over() == b"PUB a 33\r\nan answer of ours is not measured\r\n"
    box.publish("a", b"123456")
