"""Frames of fast ingest, byte by byte; the pace of a batch, and what it keeps. The server is in test_fast_batch.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspark.core.connection import Connection
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import parse_servers
from jetspark.core.subjects import MAX_SUBJECT_BYTES
from jetspark.errors import BufferFull, ConfigError, InvalidSubject, PayloadTooLarge
from jetspark.publish import fast_sending
from jetspark.publish.fast_options import HIGHEST_FLOW, FastBatchOptions
from jetspark.publish.fast_replies import position_of
from jetspark.publish.fast_sending import (
    FastFrames,
    FastPace,
    FastSender,
    FrameKind,
)
from jetspark.publish.outgoing import CHUNK_BYTES, Item

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


def test_a_subject_that_comes_once_has_the_same_bound_as_any_other() -> None:
    ready: list[bytes] = []
    _frames().build([("s" * MAX_SUBJECT_BYTES, b"", BLOCK)], 0, ready, 1 << 20)
    assert len(ready) == 1
    with pytest.raises(InvalidSubject, match="are the most"):
        _frames().build([("s" * (MAX_SUBJECT_BYTES + 1), b"", BLOCK)], 0, ready, 1 << 20)


@pytest.mark.parametrize("operation", list(FrameKind))
def test_the_operation_is_the_last_number(operation: FrameKind) -> None:
    subject = _frames().frame(("s", b""), 3, operation).split(b" ")[2].decode()
    assert subject == f"_INBOX.me-1.7.ok.3.{operation:d}.$FI"
    assert position_of(subject) == (3, operation)


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
    monkeypatch.setattr(fast_sending, "MAX_KNOWN_SUBJECTS", 3)
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


# ---- pace and sending ------------------------------------------------------------------------------------------------


def _sender(acks: int = 2, **options: Any) -> tuple[Connection, FastSender]:
    connection = Connection(ConnectOptions(**options), parse_servers("a"), inbox="_INBOX.me", jitter=lambda: 0.0)
    connection.begin(connection.pool.next()[0])
    connection.receive_data(b'INFO {"server_id":"S","max_payload":1000000}\r\n')
    connection.login(None)
    connection.data_to_send()
    connection.receive_data(b"PONG\r\n")
    sender = FastSender(connection, FastBatchOptions(max_outstanding_acks=acks))
    sender._frames.reply_to("_INBOX.me-1", 500, "ok")
    sender.allow_more(True)
    return connection, sender


def _sent(connection: Connection) -> list[int]:
    return [int(each) for each in re.findall(rb"\.(\d+)\.1\.\$FI ", connection.data_to_send())]


@pytest.mark.parametrize("acks", [1, 2, 3])
def test_so_many_acknowledgements_are_wanted_ahead_of_progress(acks: int) -> None:
    pace = FastPace(acks)
    assert pace.wanted == acks
    pace.change(10)
    assert pace.wanted == 10 * acks
    assert pace.move_to(7)
    assert not pace.move_to(7)
    assert not pace.move_to(3)
    assert pace.wanted == 7 + 10 * acks


@pytest.mark.parametrize(("said", "used"), [(0, 1), (-5, 1), (1, 1), (HIGHEST_FLOW + 1, HIGHEST_FLOW)])
def test_the_pace_has_bounds_whatever_the_server_says(said: int, used: int) -> None:
    pace = FastPace(1)
    pace.change(said)
    assert pace.msgs_per_ack == used


def test_nothing_is_taken_while_the_batch_is_not_open() -> None:
    connection, sender = _sender()
    new = FastSender(connection, FastBatchOptions())
    assert (new.room, new.due, new.wanted, new.limit) == (0, 0, 0, 0)
    new.change_pace(5)
    assert (new.room, new.due, new.wanted, new.limit) == (0, 0, 0, 0)
    sender.allow_more(False)
    assert (sender.room, sender.due, sender.wanted, sender.limit) == (0, 0, 0, 0)


def test_what_is_kept_goes_on_at_its_pace_when_nothing_more_is_taken() -> None:
    connection, sender = _sender(acks=1)
    sender.add_many([("s", b"x")] * 2, 1.0)
    sender.allow_more(False)
    assert (sender.limit, sender.wanted, sender.sent) == (0, 1, 1)
    sender.send_all(1.0)
    assert (_sent(connection), sender.sent, sender.wanted) == ([1, 2], 2, 0)


def test_it_is_known_when_something_was_sent_last() -> None:
    _, sender = _sender()
    sender.add(("s", b"x"), 7.0)
    assert sender.sent_at == 7.0
    sender.add_many([("s", b"x")], 8.0)
    assert sender.sent_at == 8.0
    sender.add(("s", b"x"), 9.0)  # early: it is kept
    assert (sender.sent, sender.sent_at) == (2, 8.0)


def test_nothing_more_is_taken_when_a_whole_chunk_is_kept() -> None:
    _, sender = _sender(acks=1)
    sender.change_pace(5)
    sender.add_many([("s", b"x")] * 5, 1.0)
    frame = len(sender._frames.frame(("s", b"x" * CHUNK_BYTES), 6, 1)) - CHUNK_BYTES
    sender.add(("s", b"x" * (CHUNK_BYTES - frame)), 1.0)
    assert (sender._early_bytes, sender.room) == (CHUNK_BYTES, 0)


def test_what_is_kept_and_dropped_takes_no_room_any_more() -> None:
    _, sender = _sender(acks=1)
    sender.add_many([("s", b"x"), ("s", b"x" * CHUNK_BYTES)], 1.0)
    assert sender.room == 0
    sender.drop_kept()
    assert (sender.room, sender._early_bytes) == (0, 0)
    sender.begin_again()
    sender.allow_more(True)
    assert sender.room > 0


def test_sending_what_is_kept_sends_nothing_where_there_is_none_or_nobody_to_take_it() -> None:
    connection, sender = _sender(acks=1)
    sender.add(("s", b"x"), 1.0)
    sender.send_all(2.0)
    assert (sender.sent_at, _sent(connection)) == (1.0, [1])
    sender.add(("s", b"x"), 3.0)  # early: it is kept
    connection.close()
    sender.send_all(4.0)
    assert (sender.sent, sender.sent_at) == (1, 1.0)


# ---- a connection that is full -------------------------------------------------------------------------------------


def _full() -> tuple[Connection, FastSender]:
    """The first message is sent, and there is no room for another."""
    connection, sender = _sender(send_buffer_bytes=10)
    sender.start(("s", b"x"), "_INBOX.me-1", 1.0, is_only=False)
    sender.allow_more(True)
    sender.change_pace(100)
    return connection, sender


def test_a_message_for_which_there_is_no_room_has_no_sequence() -> None:
    connection, sender = _full()
    adding: list[Callable[[], None]] = [
        lambda: sender.add(("s", b"x"), 2.0),
        lambda: sender.add_many([("s", b"x")] * 2, 2.0),
        lambda: sender.commit(("s", b"x"), 2.0),
    ]
    for add in adding:
        with pytest.raises(BufferFull):
            add()
        assert (sender.sequence, sender.sent, sender.sent_at) == (1, 1, 1.0)
    connection.data_to_send()
    sender.add(("s", b"x"), 3.0)
    assert _sent(connection) == [2]


@pytest.mark.parametrize("say", [lambda sender: sender.ping(), lambda sender: sender.end(2.0)], ids=["ping", "end"])
def test_what_is_no_message_does_not_wait_for_room(say: Callable[[FastSender], None]) -> None:
    connection, sender = _full()
    before = connection.out_bytes
    say(sender)
    assert connection.out_bytes > before


@pytest.mark.parametrize(("waiting_bytes", "may_add"), [(0, True), (100, True), (101, False)])
def test_a_piece_is_added_where_there_is_room_for_the_largest(waiting_bytes: int, may_add: bool) -> None:
    # The last message may pass the bound by its headers and by its data.
    connection, sender = _sender(send_buffer_bytes=CHUNK_BYTES + 2 * 1_000_000 + 100)
    if waiting_bytes:
        connection.publish_frame(b"x" * waiting_bytes)
    assert sender.may_add_some == may_add


def test_through_a_buffer_smaller_than_a_piece_goes_one_at_a_time() -> None:
    connection, sender = _sender(send_buffer_bytes=10)
    assert sender.may_add_some
    connection.publish_frame(b"x")
    assert not sender.may_add_some


def test_data_is_bytes_of_any_kind_and_nothing_else() -> None:
    connection, sender = _sender()
    sender.add(("s", b"x"), 1.0)
    sender.add(("s", bytearray(b"x")), 1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected bytes"):
        sender.add(("s", "text"), 1.0)  # type: ignore[arg-type]
    assert _sent(connection) == [1, 2]


# ---- any order of things -------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from([1, 1000, CHUNK_BYTES])),
            st.tuples(st.just("some"), st.integers(0, 20)),
            st.tuples(st.just("pace"), st.integers(1, 8)),
            st.tuples(st.just("done"), st.integers(0, 5)),
        ),
        max_size=40,
    ),
    st.integers(1, 3),
)
def test_every_sequence_is_sent_once_in_order_and_never_before_it_is_wanted(
    steps: list[tuple[str, int]], acks: int
) -> None:
    connection, sender = _sender(acks)
    seen: list[int] = []
    for kind, number in steps:
        if kind == "add" and sender.room:
            sender.add(("s", b"x" * number), 1.0)
        elif kind == "some":
            left: list[Item] = [("s", b"x")] * number
            sender.add_some(iter(left), 1.0)
        elif kind in ("pace", "done"):  # as a batch does with an answer
            if kind == "pace":
                sender.change_pace(number)
            else:
                sender.move_to(min(sender.sent, sender._pace.progress + number))
            sender.send_wanted(1.0)
        seen += _sent(connection)
        assert seen == list(range(1, sender.sent + 1))
        assert sender.sequence - sender.sent == len(sender._early)
        assert sender._early_bytes == sum(map(len, sender._early)) < 2 * CHUNK_BYTES + 100
        assert not sender._early or sender.sent >= sender.wanted
