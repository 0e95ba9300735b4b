"""The pace of a fast batch, and what it keeps; single messages are in test_fast.py, with the server's side."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspark.core.connection import Connection
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import parse_servers
from jetspark.publish.fast_options import HIGHEST_FLOW, FastBatchOptions
from jetspark.publish.fast_sending import FastPace, FastSender
from jetspark.publish.outgoing import CHUNK_BYTES, Item


def _sender(acks: int = 2) -> tuple[Connection, FastSender]:
    connection = Connection(ConnectOptions(), parse_servers("a"), inbox="_INBOX.me", jitter=lambda: 0.0)
    connection.begin(connection.pool.next()[0])
    connection.receive_data(b'INFO {"server_id":"S","max_payload":1000000}\r\n')
    connection.login(None)
    connection.data_to_send()
    connection.receive_data(b"PONG\r\n")
    sender = FastSender(connection, FastBatchOptions(max_outstanding_acks=acks))
    sender._frames.reply_to("_INBOX.me-1", 500, "ok")
    sender.take_more(True)
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
    sender.take_more(False)
    assert (sender.room, sender.due, sender.wanted, sender.limit) == (0, 0, 0, 0)


def test_what_is_kept_goes_on_at_its_pace_when_nothing_more_is_taken() -> None:
    connection, sender = _sender(acks=1)
    sender.add_many([("s", b"x")] * 2, 1.0)
    sender.take_more(False)
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
