"""One fast batch, reply by reply; its attempts to open, and silence. Time is stated; the server is a list of lines."""

from __future__ import annotations

import itertools
import json
import pickle
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
from support.readers import SilentReader

from jetspark.core.connection import Connection
from jetspark.core.events import Closed, Disconnected, ErrorReported, Reconnected
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import parse_servers
from jetspark.errors import (
    BatchCutShort,
    BatchInDoubt,
    BatchUnknown,
    BufferFull,
    ConfigError,
    ConnectionClosed,
    ConnectionLost,
    FeatureUnavailable,
    InvalidSubject,
    JetStreamUnavailable,
    PayloadTooLarge,
    PermissionDenied,
    ProtocolError,
    RequestTimeout,
    ServerError,
    TooManyBatches,
    UsageError,
    WrongLastSequence,
)
from jetspark.publish import fast_replies
from jetspark.publish.fast_batch import HOLE_PING_S, FastMachine, FastOpening, FastSilence, FastState
from jetspark.publish.fast_options import FastBatchKeywords, FastBatchOptions, Refusal
from jetspark.publish.outgoing import Item, are_plain, take

NOW = 100.0
A: Item = ("s.a", b"x")


class Peer:
    """A connection that is up, a batch on it, and the server's side of the conversation."""

    def __init__(self, *, send_buffer_bytes: int = 8 << 20, **options: Any) -> None:
        self.connection = Connection(
            ConnectOptions(send_buffer_bytes=send_buffer_bytes),
            parse_servers("a"),
            inbox="_INBOX.me",
            jitter=lambda: 0.0,
        )
        self.connect()
        self.batch = FastMachine(self.connection, SilentReader(), FastBatchOptions(**options))

    def connect(self, max_payload: int = 100_000) -> None:
        self.connection.begin(self.connection.pool.next()[0])
        self.connection.receive_data(b'INFO {"server_id":"S","max_payload":%d}\r\n' % max_payload)
        self.connection.login(None)
        self.connection.data_to_send()
        self.connection.receive_data(b"PONG\r\n")
        self.connection.pool.succeeded()
        self.connection.events()

    def sent(self) -> list[tuple[int, int]]:
        """Sequence and operation of what was sent since the last look."""
        data = self.connection.data_to_send().decode()
        return [(int(a), int(b)) for a, b in re.findall(r" \S+\.(\d+)\.(\d)\.\$FI ", data)]

    def say(self, *answers: dict[str, Any] | bytes, place: tuple[int, int] = (1, 1), now: float = NOW) -> None:
        inbox = self.batch.inbox.subscription
        assert inbox is not None
        subject = inbox.subject.removesuffix(">") + f"500.fail.{place[0]}.{place[1]}.$FI"
        for answer in answers:
            if isinstance(answer, bytes):
                frame = b"HMSG %b %d %d %d\r\n%b\r\n" % (subject.encode(), inbox.sid, len(answer), len(answer), answer)
            else:
                data = json.dumps(answer, separators=(",", ":")).encode()
                frame = b"MSG %b %d %d\r\n%b\r\n" % (subject.encode(), inbox.sid, len(data), data)
            self.connection.receive_data(frame)
        self.batch.on_replies(now)

    def deny(self, subject: str) -> None:
        """The server denies a publish, and the batch is told."""
        self.connection.receive_data(b"-ERR 'Permissions Violation for Publish to \"%b\"'\r\n" % subject.encode())
        for event in self.connection.events():
            if isinstance(event, ErrorReported):
                self.batch.on_event(event, NOW)

    def open(self, msgs: int = 10) -> FastMachine:
        self.batch.start(A, NOW)
        self.say(ack(0, msgs))
        return self.batch

    def add(self, count: int, now: float = NOW) -> None:
        self.batch.sender.add_many([A] * count, now)


NO_RESPONDERS = b"NATS/1.0 503\r\nNats-Subject: s.a\r\n\r\n"


def ack(sequence: int, msgs: int) -> dict[str, Any]:
    return {"type": "ack", "seq": sequence, "msgs": msgs}


def gap(first_missing: int, received: int) -> dict[str, Any]:
    return {"type": "gap", "last_seq": first_missing, "seq": received}


def error(err_code: int, code: int = 400) -> dict[str, Any]:
    return {"error": {"code": code, "err_code": err_code, "description": "no"}, "stream": "S", "seq": 0}


def err(sequence: int, err_code: int = 10071) -> dict[str, Any]:
    return {"type": "err", "seq": sequence, "error": {"code": 400, "err_code": err_code, "description": "no"}}


def final(count: int) -> dict[str, Any]:
    return {"stream": "S", "seq": 1000, "batch": "me-1", "count": count}


# ---- opening ---------------------------------------------------------------------------------------------------------


def test_nothing_follows_the_first_message_before_its_answer() -> None:
    peer = Peer()
    assert (peer.batch.state, peer.batch.sender.room, peer.batch.inbox.batch_id) == (FastState.NEW, 0, "")
    assert peer.batch.is_new
    peer.batch.start(A, NOW)
    assert peer.sent() == [(1, 0)]
    assert (peer.batch.state, peer.batch.sender.room, peer.batch.is_new) == (FastState.OPENING, 0, False)
    was_known = peer.batch.opening.is_stream_known
    peer.say(ack(0, 10))
    assert (was_known, peer.batch.opening.is_stream_known) == (False, True)
    assert (peer.batch.state, peer.batch.sender.due, peer.batch.sender.room) == (FastState.OPEN, 19, 29)


def test_the_inbox_is_subscribed_to_before_the_first_message_leaves() -> None:
    peer = Peer(flow=7, gap="ok")
    peer.batch.start(A, NOW)
    assert peer.connection.data_to_send() == (b"SUB _INBOX.me-1.> 1\r\nPUB s.a _INBOX.me-1.7.ok.1.0.$FI 1\r\nx\r\n")


def test_a_batch_id_of_ones_own_comes_after_the_unique_prefix() -> None:
    peer = Peer(batch_id="mine")
    peer.batch.start(A, NOW)
    assert peer.batch.inbox.batch_id == "mine"
    assert b" _INBOX.me-1.mine.500.fail.1.0.$FI " in peer.connection.data_to_send()


@pytest.mark.parametrize("answer", [NO_RESPONDERS, error(10211, 429), error(10167, 429)])
def test_a_batch_that_could_not_open_for_now_is_tried_again_under_another_id(answer: dict[str, Any] | bytes) -> None:
    peer = Peer()
    peer.batch.start(A, NOW)
    peer.say(answer, place=(1, 0))
    assert (peer.batch.state, peer.batch.sender.sequence, peer.batch.opening.reopen_at) == (
        FastState.NEW,
        0,
        NOW + 0.05,
    )
    assert peer.batch.next_deadline() is None
    assert peer.batch.inbox.subscription is None, "a late answer is for nobody"
    peer.sent()
    peer.batch.start(A, NOW + 0.05)
    assert b"_INBOX.me-2." in peer.connection.data_to_send()
    peer.say(answer, place=(1, 0), now=NOW + 0.06)
    assert peer.batch.opening.reopen_at == NOW + 0.06 + 0.1


def test_a_ping_of_the_attempt_before_that_nobody_took_is_not_looked_into() -> None:
    peer = Peer()
    peer.batch.start(A, NOW)
    peer.say(NO_RESPONDERS, place=(1, 4))
    assert peer.batch.next_deadline() == NOW + 0.1
    peer.say(NO_RESPONDERS, place=(1, 0))
    peer.batch.start(A, NOW + 0.05)
    assert peer.batch.next_deadline() == NOW + 0.05 + 1.0


def test_a_batch_that_opens_late_has_its_whole_time_from_then_on() -> None:
    peer = Peer(timeout=10.0, max_outstanding_acks=1)
    peer.batch.start(A, NOW)
    peer.say(ack(0, 1), now=NOW + 8.0)
    peer.batch.on_time(NOW + 17.9)
    assert peer.batch.failure is None
    peer.batch.on_time(NOW + 18.0)
    assert isinstance(peer.batch.failure, BatchInDoubt)


def test_a_batch_whose_first_message_is_refused_before_it_opens_takes_no_more() -> None:
    peer = Peer()
    peer.batch.start(A, NOW)
    peer.say(err(1))
    peer.say(ack(0, 10))
    assert (peer.batch.state, peer.batch.sender.room) == (FastState.OPEN, 0)


def test_a_batch_that_is_being_committed_takes_no_more() -> None:
    peer = Peer()
    batch = peer.open()
    batch.check()
    batch.commit(A, NOW)
    with pytest.raises(UsageError, match="is being committed"):
        batch.check()


def test_an_end_that_the_connection_refused_is_none() -> None:
    peer = Peer()
    batch = peer.open()
    peer.connection.close()
    with pytest.raises(ConnectionClosed):
        batch.end(NOW)
    assert (batch.messages, batch.state) == (1, FastState.OPEN)


def test_trying_to_open_ends_with_the_timeout_and_the_reason() -> None:
    peer = Peer(timeout=1.0)
    peer.batch.start(A, NOW)
    peer.say(error(10211, 429), now=NOW + 1.0)
    assert isinstance(peer.batch.failure, TooManyBatches)
    with pytest.raises(TooManyBatches):
        peer.batch.check()


def test_a_first_message_that_is_refused_ends_the_batch_with_its_error() -> None:
    peer = Peer()
    peer.batch.start(A, NOW)
    peer.say(ack(0, 10), error(10071))
    assert isinstance(peer.batch.failure, ServerError)
    assert [each.sequence for each in peer.batch.losses.errors] == [1]
    assert peer.batch.stored == 0


@pytest.mark.parametrize("gap_mode", ["fail", "ok"])
@pytest.mark.parametrize("is_only", [False, True])
def test_a_server_that_takes_the_first_message_for_a_plain_one_is_too_old(gap_mode: Any, is_only: bool) -> None:
    peer = Peer(gap=gap_mode)
    peer.batch.start(A, NOW, is_only=is_only)
    peer.say({"stream": "S", "seq": 8})
    with pytest.raises(FeatureUnavailable, match=r"fast ingest needs nats-server 2\.14 or newer.*stored the first"):
        peer.batch.check()
    assert peer.batch.acknowledged == 1
    assert peer.batch.next_deadline() is None


def test_a_single_message_may_be_start_and_commit_at_once() -> None:
    peer = Peer()
    peer.batch.start(A, NOW, is_only=True)
    assert peer.sent() == [(1, 2)]
    assert peer.batch.is_opening
    peer.say(final(1))
    assert (peer.batch.failure, peer.batch.stored, peer.batch.acknowledged) == (None, 1, 1)


# ---- pace ------------------------------------------------------------------------------------------------------------


def test_so_many_acks_of_the_present_size_are_wanted_and_one_more_is_taken() -> None:
    peer = Peer(max_outstanding_acks=3)
    batch = peer.open(msgs=5)
    assert (peer.batch.sender.due, batch.sender.room) == (14, 19)
    peer.add(14)
    assert (peer.batch.sender.due, batch.sender.room) == (0, 5)
    peer.say(ack(5, 5))
    assert (peer.batch.sender.due, batch.sender.room) == (5, 10)
    peer.say(ack(10, 2))  # the server wants us slower: nothing is taken back, less is given
    assert (peer.batch.sender.due, batch.sender.room) == (1, 3)
    peer.say(ack(15, 100))
    assert (peer.batch.sender.due, batch.sender.room) == (300, 400)


def test_what_comes_early_is_kept_and_sent_once_in_order_when_it_is_wanted() -> None:
    peer = Peer()
    batch = peer.open(msgs=4)
    peer.add(7)
    peer.add(1)
    batch.sender.add(A, NOW)
    assert batch.sender.add_some(iter([A] * 100), NOW)
    assert (batch.sender.sequence, batch.sender.sent, batch.sender.room) == (12, 8, 0)
    assert peer.sent() == [(1, 0)] + [(number, 1) for number in range(2, 9)]
    peer.say(ack(0, 2))  # slower now
    assert peer.sent() == []
    peer.say(ack(4, 3))
    assert peer.sent() == [(9, 1), (10, 1)]
    assert (batch.sender.sequence, batch.sender.sent, batch.sender.room) == (12, 10, 1)
    peer.say(ack(8, 3))
    assert peer.sent() == [(11, 1), (12, 1)]
    peer.add(2)
    assert peer.sent() == [(13, 1), (14, 1)]


def test_a_piece_is_sent_as_far_as_it_is_wanted_and_kept_beyond() -> None:
    peer = Peer()
    batch = peer.open(msgs=4)
    peer.add(10)
    assert peer.sent() == [(1, 0)] + [(number, 1) for number in range(2, 9)]
    peer.say(ack(4, 4), ack(8, 4))
    assert peer.sent() == [(9, 1), (10, 1), (11, 1)]
    assert batch.sender.room == 9


def test_what_is_kept_is_bounded_in_bytes_too() -> None:
    peer = Peer()
    batch = peer.open(msgs=100)
    large: Item = ("s.a", b"x" * 90_000)
    peer.add(199)
    for _ in range(3):
        assert batch.sender.room
        batch.sender.add(large, NOW)
    assert batch.sender.room == 0
    peer.say(ack(100, 100))
    assert batch.sender.room == 197
    batch.sender.add_many([large] * 90, NOW)
    assert batch.sender.room == 107


def test_a_full_buffer_does_not_keep_back_what_was_accepted() -> None:
    peer = Peer(send_buffer_bytes=100)
    batch = peer.open(msgs=1)
    peer.sent()
    batch.sender.add(A, NOW)
    batch.sender.add(A, NOW)
    assert peer.sent() == [(2, 1)]
    peer.connection.publish("s.b", b"x" * 200)
    with pytest.raises(BufferFull):
        peer.connection.publish("s.b", b"")
    peer.say(ack(1, 1))
    assert peer.sent() == [(3, 1)]


def test_what_is_kept_ends_with_the_batch() -> None:
    peer = Peer()
    batch = peer.open(msgs=2)
    peer.add(5)
    batch.fail(OSError("no"))
    assert (batch.sender._early, batch.sender.wanted, batch.sender.limit) == ([], 0, 0)


def test_nobody_is_asked_about_a_batch_that_has_not_begun_or_is_over() -> None:
    peer = Peer()
    peer.batch.ping(NOW)
    assert peer.sent() == []
    batch = peer.open(msgs=2)
    peer.sent()
    batch.ping(NOW)
    assert [operation for _, operation in peer.sent()] == [4]
    batch.fail(OSError("no"))
    batch.ping(NOW)
    assert peer.sent() == []


def test_a_batch_whose_inbox_has_ended_is_in_doubt() -> None:
    peer = Peer()
    batch = peer.open(msgs=2)
    assert batch.inbox.subscription is not None
    peer.connection.unsubscribe(batch.inbox.subscription)
    batch.on_replies(NOW)
    assert isinstance(batch.failure, BatchInDoubt)


def test_a_connection_that_takes_nothing_leaves_the_batch_in_doubt() -> None:
    peer = Peer(timeout=7)
    batch = peer.open(msgs=2)
    batch.on_no_room(NOW)
    assert isinstance(batch.failure, BatchInDoubt)
    cause = batch.failure.__cause__
    assert isinstance(cause, RequestTimeout)
    assert (cause.timeout_s, cause.was_sent) == (7, False)


def test_what_came_before_a_session_was_lost_counts() -> None:
    peer = Peer()
    batch = peer.open(msgs=2)
    peer.add(3)
    inbox = batch.inbox.subscription
    assert inbox is not None
    data = json.dumps(ack(2, 2), separators=(",", ":")).encode()
    subject = inbox.subject.removesuffix(">").encode() + b"500.fail.2.1.$FI"
    peer.connection.receive_data(b"MSG %b %d %d\r\n%b\r\n" % (subject, inbox.sid, len(data), data))
    batch.on_event(Disconnected("a", "cut", 4, 0, 4), NOW)
    assert batch.acknowledged == 2


def test_a_batch_that_moves_has_its_whole_time_again() -> None:
    peer = Peer(timeout=30)
    batch = peer.open(msgs=2)
    peer.add(3)
    peer.say(ack(2, 2), now=NOW + 20)
    assert batch._silence.gives_up_at(batch.sender.sent_at) == NOW + 50
    peer.say(ack(2, 2), now=NOW + 25)  # the same once more is no step
    assert batch._silence.gives_up_at(batch.sender.sent_at) == NOW + 50


def test_the_end_comes_after_what_is_kept() -> None:
    for is_commit in (True, False):
        peer = Peer()
        batch = peer.open(msgs=2)
        peer.add(5)
        if is_commit:
            batch.commit(A, NOW)
        else:
            batch.end(NOW)
        peer.sent()
        assert (batch.state, batch.sender.room, batch.sender.sent) == (FastState.COMMITTING, 0, 4)
        peer.say(ack(2, 2))
        assert peer.sent() == [(5, 1), (6, 1)]
        peer.say(ack(4, 2))
        [(sequence, operation)] = peer.sent()
        assert (sequence, operation in (2, 3)) == (7, True)
        peer.say(final(batch.messages))
        assert (batch.failure, batch.stored, batch.sender.sent) == (None, batch.messages, 7)


def test_an_end_the_server_made_before_ours_was_sent_is_not_ours() -> None:
    peer = Peer(gap="ok")
    batch = peer.open(msgs=2)
    peer.add(5)
    batch.commit(A, NOW)
    peer.say(final(4))
    assert isinstance(batch.failure, BatchInDoubt)


def test_what_is_kept_is_not_sent_any_more_when_something_was_lost() -> None:
    peer = Peer()
    batch = peer.open(msgs=2)
    peer.add(5)
    peer.sent()
    peer.say(ack(2, 2), gap(3, 4))
    assert peer.sent() == []
    assert (batch.sender.room, batch.messages, batch.sender.sent) == (0, 6, 4)
    peer.say(final(2))
    assert isinstance(batch.failure, BatchCutShort)
    assert batch.stored == 2


def test_what_is_kept_is_sent_by_one_who_leaves() -> None:
    for commits in (False, True):
        peer = Peer()
        batch = peer.open(msgs=2)
        peer.add(5)
        if commits:
            batch.commit(A, NOW)
        peer.sent()
        batch.abandon(NOW)
        assert peer.sent() == [(5, 1), (6, 1), (7, 2 if commits else 3)]


def test_what_is_kept_was_not_under_way_when_the_session_was_lost() -> None:
    peer = Peer(gap="ok")
    batch = peer.open(msgs=2)
    peer.add(5)
    batch.on_event(Disconnected("a", "cut", 4, 0, 4), NOW)
    assert batch.losses.doubts == [range(1, 5)]


def test_a_server_that_says_nothing_is_not_excused_by_what_comes_early() -> None:
    peer = Peer(timeout=2.0)
    batch = peer.open(msgs=2)
    peer.add(3)
    peer.sent()
    batch.sender.add(A, NOW + 1.5)
    batch.on_time(NOW + 1.5)
    assert peer.sent() == [(4, 4)]
    batch.on_time(NOW + 2.0)
    assert isinstance(batch.failure, BatchInDoubt)


def test_an_ack_covers_those_that_were_lost_before_it_and_none_goes_back() -> None:
    peer = Peer()
    batch = peer.open(msgs=5)
    peer.add(9)
    peer.say(ack(10, 5))
    assert batch.acknowledged == 10
    peer.say(ack(5, 5))
    assert (batch.acknowledged, batch.stored) == (10, 10)


def test_a_refused_message_makes_room_like_a_stored_one() -> None:
    peer = Peer(gap="ok", flow=1, max_outstanding_acks=1)
    batch = peer.open(msgs=1)
    assert peer.batch.sender.due == 0
    peer.say(err(1))
    assert peer.batch.sender.due == 1
    assert batch.losses.news == [Refusal(1, batch.losses.errors[0].error)]


def test_a_gap_makes_room_too() -> None:
    peer = Peer(gap="ok")
    batch = peer.open(msgs=2)
    peer.add(3)
    assert peer.batch.sender.due == 0
    peer.say(gap(2, 4))
    assert peer.batch.sender.due == 3
    assert batch.losses.gaps == [range(2, 4)]


def test_what_cannot_be_sent_uses_up_no_sequence() -> None:
    peer = Peer()
    batch = peer.open()
    with pytest.raises(InvalidSubject):
        batch.sender.add(("s a", b""), NOW)
    with pytest.raises(PayloadTooLarge):
        batch.sender.add(("s.a", b"x" * 100_001), NOW)
    batch.sender.add(A, NOW)
    assert batch.sender.sequence == 2


def test_add_many_sends_those_before_the_one_that_cannot_be_sent() -> None:
    peer = Peer()
    batch = peer.open()
    peer.sent()
    with pytest.raises(InvalidSubject):
        batch.sender.add_many([A, A, ("s a", b""), A], NOW)
    assert peer.sent() == [(2, 1), (3, 1)]
    assert batch.sender.sequence == 3


def test_a_full_buffer_takes_nothing_and_forgets_nothing() -> None:
    peer = Peer(send_buffer_bytes=100)
    batch = peer.open()
    peer.sent()
    batch.sender.add(("s.a", b"x" * 50), NOW)
    with pytest.raises(BufferFull):
        batch.sender.add_many([("s.a", b"x" * 50)] * 3, NOW)
    assert (batch.sender.sequence, peer.sent()) == (2, [(2, 1)])


def test_headers_travel_and_the_dangerous_one_does_not() -> None:
    peer = Peer()
    batch = peer.open()
    peer.sent()
    batch.sender.add(("s.a", b"x", {"A": "1"}), NOW)
    assert b"HPUB s.a _INBOX.me-1.500.fail.2.1.$FI 18 19\r\nNATS/1.0\r\nA: 1\r\n\r\nx\r\n" in (
        peer.connection.data_to_send()
    )
    with pytest.raises(ConfigError, match="Nats-Expected-Last-Msg-Id"):
        batch.sender.add(("s.a", b"x", {"Nats-Expected-Last-Msg-Id": "a"}), NOW)


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_a_commit_is_complete_when_the_count_is() -> None:
    peer = Peer()
    batch = peer.open()
    peer.add(3)
    batch.commit(A, NOW)
    assert peer.sent()[-1] == (5, 2)
    peer.say(final(5), place=(4, 1))  # on a replicated stream it may come for another message
    assert (batch.failure, batch.acknowledged, batch.stored) == (None, 5, 5)
    with pytest.raises(UsageError, match="committed"):
        batch.check()
    assert peer.connection.data_to_send() == b"UNSUB 1\r\n"


def test_an_end_is_no_message() -> None:
    peer = Peer()
    batch = peer.open()
    batch.end(NOW)
    assert peer.sent()[-1] == (2, 3)
    assert batch.messages == 1
    peer.say(final(1))
    assert (batch.failure, batch.stored) == (None, 1)


def test_a_gap_ends_a_batch_in_mode_fail_after_what_is_stored() -> None:
    peer = Peer()
    batch = peer.open()
    peer.add(8)
    peer.say(gap(4, 6))
    assert batch.sender.room == 0
    assert not batch.is_ended
    peer.say(final(3))
    assert isinstance(batch.failure, BatchCutShort)
    assert (batch.failure.stored, batch.stored) == (3, 3)
    assert "4 to 5 were lost" in str(batch.failure)


def test_a_refusal_ends_a_batch_in_mode_fail_with_its_reason() -> None:
    peer = Peer()
    batch = peer.open()
    peer.add(8)
    peer.say(err(4))
    assert batch.sender.room == 0
    peer.say(final(3))
    assert isinstance(batch.failure, BatchCutShort)
    assert "no (code 400, err_code 10071)" in batch.failure.reason
    assert (batch.acknowledged, batch.stored) == (3, 3)


def test_a_refusal_is_the_reason_of_the_gap_it_made() -> None:
    peer = Peer()
    batch = peer.open()
    peer.add(8)
    peer.say(gap(4, 6), err(4), final(3))
    assert isinstance(batch.failure, BatchCutShort)
    assert isinstance(batch.failure.__cause__, WrongLastSequence)


def test_a_final_acknowledgement_that_counts_none_says_so_by_leaving_it_out() -> None:
    peer = Peer()
    batch = peer.open()
    peer.add(2)
    peer.say({"stream": "S", "seq": 1000, "batch": "me-1"})
    assert isinstance(batch.failure, BatchCutShort)
    assert (batch.failure.stored, batch.stored) == (0, 0)


@pytest.mark.parametrize(
    ("said", "place", "cause", "may_pass"),
    [
        (err(4), (4, 1), WrongLastSequence, False),  # refused again however often it is sent
        (error(10054), (4, 1), ServerError, False),  # too large
        (error(10077, 503), (4, 1), ServerError, True),  # the stream is full
        (NO_RESPONDERS, (4, 1), type(None), True),  # a leader was elected
        (gap(4, 6), (6, 1), type(None), True),  # lost on the way
    ],
    ids=["wrong sequence", "too large", "full", "nobody listens", "lost"],
)
def test_a_batch_that_was_cut_short_may_pass_if_what_ended_it_may(
    said: Any, place: tuple[int, int], cause: type, may_pass: bool
) -> None:
    peer = Peer()
    batch = peer.open()
    peer.add(8)
    peer.say(said, place=place)
    peer.say(final(3))
    failure = batch.failure
    assert isinstance(failure, BatchCutShort)
    assert type(failure.__cause__) is cause
    assert failure.may_pass is may_pass


def test_a_batch_that_was_cut_short_for_want_of_permission_does_not_pass() -> None:
    peer = Peer()
    batch = peer.open()
    peer.add(1)
    batch.sender.add(("s.b", b""), NOW)
    peer.sent()
    peer.deny("s.b")
    peer.deny("s.b")
    assert peer.sent() == [(3, 4)]  # asked at once, and not for each of many denied messages
    assert not batch.is_ended
    peer.say(gap(3, 4), final(2))
    assert isinstance(batch.failure, PermissionDenied)
    assert (batch.failure.subject, batch.failure.may_pass, batch.stored) == ("s.b", False, 2)
    assert isinstance(batch.failure.__cause__, BatchCutShort)
    assert batch.failure.__cause__.stored == 2


def test_a_batch_that_the_server_says_is_whole_is_not_ended_by_a_denial_of_before() -> None:
    peer = Peer()
    batch = peer.open()
    batch.sender.add(("s.b", b""), NOW)
    peer.deny("s.b")  # of a message published before the batch, by a user who was allowed to in the meantime
    batch.end(NOW)
    peer.say(final(2))
    assert (batch.failure, batch.stored) == (None, 2)


def test_a_denied_message_of_a_batch_with_gaps_ends_it_and_everything_else_is_stored() -> None:
    peer = Peer(gap="ok")
    batch = peer.open()
    batch.sender.add(("s.b", b""), NOW)
    peer.deny("s.b")
    peer.say(gap(2, 3))
    assert batch.state is FastState.COMMITTING
    with pytest.raises(PermissionDenied, match=r"s\.b"):
        batch.check()
    peer.say(final(3))
    assert isinstance(batch.failure, PermissionDenied)
    assert (batch.stored, batch.losses.gaps) == (1, [range(2, 3)])


def test_a_lost_end_that_lost_no_message_is_no_failure() -> None:
    peer = Peer()
    batch = peer.open()
    peer.add(1)
    batch.end(NOW)
    peer.say(gap(3, 4), final(2))  # what a ping finds: only the end itself is missing
    assert (batch.failure, batch.losses.gaps, batch.stored) == (None, [], 2)


def test_a_commit_that_was_lost_in_mode_ok_is_followed_by_an_end() -> None:
    peer = Peer(gap="ok")
    batch = peer.open()
    batch.commit(A, NOW)
    peer.sent()
    peer.say(gap(2, 3))
    assert peer.sent() == [(3, 3)]
    peer.say(final(2))
    assert (batch.failure, batch.losses.gaps, batch.stored) == (None, [range(2, 3)], 1)


def test_mode_ok_counts_what_is_neither_lost_nor_refused() -> None:
    peer = Peer(gap="ok")
    batch = peer.open()
    peer.add(8)
    peer.say(gap(3, 5), err(6))
    assert batch.stored == 0  # nobody knows yet
    batch.end(NOW)
    peer.say(final(9))
    assert (batch.failure, batch.stored) == (None, 6)


def test_a_batch_the_server_forgot_is_in_doubt_from_the_last_ack_on() -> None:
    peer = Peer()
    batch = peer.open(msgs=2)
    peer.add(3)
    peer.say(ack(2, 2), error(10208))
    failure = batch.failure
    assert isinstance(failure, BatchInDoubt)
    assert isinstance(failure.__cause__, BatchUnknown)
    assert failure.stored == 2
    assert pickle.loads(pickle.dumps(failure)).stored == 2


def test_a_message_too_large_for_the_stream_is_looked_into_soon() -> None:
    peer = Peer()
    batch = peer.open()
    batch.sender.add(A, NOW)
    peer.sent()
    peer.say(error(10054), place=(2, 1))
    assert batch.sender.room == 0
    assert batch.next_deadline() == NOW + 0.1
    batch.on_time(NOW + 0.1)
    assert peer.sent() == [(2, 4)]
    peer.say(gap(2, 3), final(1))
    assert isinstance(batch.failure, BatchCutShort)
    assert [(each.sequence, each.error.err_code) for each in batch.losses.errors] == [(2, 10054)]


def test_a_leader_that_is_gone_leaves_a_hole_that_a_ping_measures() -> None:
    peer = Peer(gap="ok")
    batch = peer.open()
    peer.add(2)
    peer.sent()
    peer.say(NO_RESPONDERS, place=(3, 1))
    assert batch.sender.room > 0  # in mode ok it goes on
    batch.on_time(NOW + 0.1)
    assert peer.sent() == [(3, 4)]
    peer.say(NO_RESPONDERS, place=(3, 4), now=NOW + 0.2)
    assert batch.next_deadline() == pytest.approx(NOW + 0.3)


def test_a_batch_ended_by_the_server_in_mode_ok_is_in_doubt() -> None:
    peer = Peer(gap="ok")
    batch = peer.open()
    peer.say(final(1))
    assert isinstance(batch.failure, BatchInDoubt)
    assert batch.failure.stored == 0


@pytest.mark.parametrize("missing", [range(1, 1), range(1, 2)])
def test_the_first_message_may_be_lost_too(missing: range) -> None:
    peer = Peer(gap="ok")
    batch = peer.open()
    peer.add(2)
    peer.say(gap(missing.start, missing.stop))
    assert (batch.failure, batch.losses.gaps) == (None, [missing] if missing else [])


@pytest.mark.parametrize("answer", [{"type": "ack", "seq": 1}, {"what": 1}, {"type": "gap", "seq": 3}])
def test_an_answer_that_makes_no_sense_leaves_the_batch_in_doubt(answer: dict[str, Any]) -> None:
    peer = Peer()
    batch = peer.open()
    peer.say(answer)
    assert isinstance(batch.failure, BatchInDoubt)
    assert isinstance(batch.failure.__cause__, ProtocolError)


def test_too_many_losses_to_remember_end_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_replies, "MAX_REPORTS", 2)
    peer = Peer(gap="ok")
    batch = peer.open()
    peer.add(5)
    peer.say(err(1), err(2), err(3))
    assert len(batch.losses.errors) == 2
    assert isinstance(batch.failure, BatchInDoubt)


def test_leaving_tells_the_server_and_waits_for_nothing() -> None:
    peer = Peer()
    batch = peer.open()
    peer.sent()
    batch.abandon(NOW)
    assert peer.sent() == [(2, 3)]
    assert isinstance(batch.failure, UsageError)


# ---- what the final acknowledgement counts ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, 8, 9])
def test_in_mode_ok_a_final_count_that_leaves_out_messages_nobody_reported_is_not_our_commit(count: int) -> None:
    """The server ended the batch by itself while our commit, message 10, was on its way to it."""
    peer = Peer(gap="ok")
    batch = peer.open()
    peer.add(8)
    batch.commit(A, NOW)
    peer.say(final(count))
    assert isinstance(batch.failure, BatchInDoubt)
    assert batch.stored == count


@pytest.mark.parametrize("is_only", [False, True])
def test_in_mode_ok_a_commit_that_was_refused_is_not_counted_and_the_batch_is_committed(is_only: bool) -> None:
    peer = Peer(gap="ok")
    if is_only:
        peer.batch.start(A, NOW, is_only=True)
    else:
        peer.open().commit(A, NOW)
    batch = peer.batch
    peer.say(err(batch.sender.sequence), final(batch.sender.sequence - 1))
    assert batch.failure is None
    assert batch.stored == batch.messages - 1
    assert [each.sequence for each in batch.losses.errors] == [batch.sender.sequence]


def test_in_mode_ok_the_end_that_an_old_leader_had_confirmed_is_ours_too() -> None:
    """It ended the batch at the first end; the new leader did not know, and a second end was sent."""
    peer = Peer(gap="ok")
    batch = peer.open()
    peer.add(2)
    batch.end(NOW)
    peer.say(gap(4, 5))
    assert peer.sent()[-1] == (5, 3)
    peer.say(final(3))
    assert (batch.failure, batch.stored) == (None, 3)


@pytest.mark.parametrize("gap_mode", ["fail", "ok"])
@pytest.mark.parametrize("count", [-1, 6, 10**30])
def test_a_final_count_of_messages_that_were_never_sent_is_no_answer(count: int, gap_mode: Any) -> None:
    for ends in (False, True):
        peer = Peer(gap=gap_mode)
        batch = peer.open()
        peer.add(3)
        if ends:
            batch.end(NOW)
        peer.say(ack(2, 10), final(count))
        failure = batch.failure
        assert isinstance(failure, BatchInDoubt)
        assert isinstance(failure.__cause__, ProtocolError)
        assert (failure.stored, batch.stored) == ((2, 2) if gap_mode == "fail" else (0, 0))


def test_a_batch_that_is_cut_short_before_its_end_was_sent_counts_all_that_was() -> None:
    peer = Peer()
    batch = peer.open(msgs=2)
    peer.add(5)
    batch.end(NOW)
    assert (batch.sender.sent, batch.sender.sequence) == (4, 7)
    peer.say(final(4))
    assert isinstance(batch.failure, BatchCutShort)
    assert batch.failure.stored == 4


def test_an_error_that_answers_a_ping_or_an_end_is_about_no_message() -> None:
    peer = Peer(gap="ok")
    batch = peer.open()
    peer.add(2)
    peer.say(error(10008, 503), place=(3, 4))
    batch.end(NOW)
    peer.say(error(10077, 503), place=(4, 3))
    assert (batch.losses.errors, batch.losses.news, batch.failure) == ([], [], None)


def test_an_end_is_not_counted_as_a_stored_message_in_mode_fail() -> None:
    for said in (final(3), ack(3, 10)):
        peer = Peer()
        batch = peer.open()
        peer.add(1)
        batch.end(NOW)  # sequence 3, and no message
        peer.say(said)
        assert batch.stored <= 2


@pytest.mark.parametrize("gap_mode", ["fail", "ok"])
@pytest.mark.parametrize(
    "said", [ack(5, 10), ack(-1, 10), gap(2, 6), gap(0, 3), gap(6, 2), err(5), err(0), ack(True, 10)], ids=str
)
def test_an_answer_about_messages_that_were_never_sent_leaves_the_batch_in_doubt(
    said: dict[str, Any], gap_mode: Any
) -> None:
    peer = Peer(gap=gap_mode)
    batch = peer.open()
    peer.add(3)
    peer.say(said)
    assert isinstance(batch.failure, BatchInDoubt)
    assert isinstance(batch.failure.__cause__, ProtocolError)
    assert (batch.losses.gaps, batch.losses.errors, batch.acknowledged) == ([], [], 0)


# ---- time ------------------------------------------------------------------------------------------------------------


def test_silence_is_answered_by_a_ping_with_the_highest_sequence() -> None:
    peer = Peer(ping_after_s=1.0)
    batch = peer.open(msgs=2)
    peer.add(3)
    peer.sent()
    assert batch.next_deadline() == NOW + 1.0
    batch.on_time(NOW + 0.9)
    assert peer.sent() == []
    batch.on_time(NOW + 1.0)
    assert peer.sent() == [(4, 4)]
    assert batch.next_deadline() == NOW + 2.0


def test_a_slow_producer_keeps_its_batch_alive() -> None:
    peer = Peer(keep_alive_s=3.0)
    batch = peer.open()
    peer.sent()
    assert batch.next_deadline() == NOW + 3.0
    batch.on_time(NOW + 3.0)
    assert peer.sent() == [(1, 4)]
    assert batch.next_deadline() == NOW + 6.0


def test_no_progress_for_the_timeout_ends_the_batch_and_answers_are_not_progress() -> None:
    peer = Peer(timeout=5.0)
    batch = peer.open(msgs=2)
    peer.add(3)
    for second in range(1, 5):
        batch.on_time(NOW + second)
        peer.say(ack(0, 2), now=NOW + second)  # what a ping brings: the last ack again
    batch.on_time(NOW + 5.0)
    assert isinstance(batch.failure, BatchInDoubt)
    assert isinstance(batch.failure.__cause__, RequestTimeout)


def test_what_was_read_in_time_counts_even_if_the_clock_is_looked_at_first() -> None:
    peer = Peer(timeout=5.0)
    batch = peer.open(msgs=2)
    peer.add(3)
    inbox = batch.inbox.subscription
    assert inbox is not None
    data = b'{"type":"ack","seq":4,"msgs":2}'
    peer.connection.receive_data(b"MSG _INBOX.me-1.x %d %d\r\n%b\r\n" % (inbox.sid, len(data), data))
    batch.on_time(NOW + 5.0)
    assert (batch.failure, batch.acknowledged) == (None, 4)


def test_a_session_that_is_gone_is_not_pinged_and_the_next_one_is() -> None:
    peer = Peer(timeout=30.0)
    batch = peer.open(msgs=2)
    peer.add(3)
    peer.sent()
    peer.connection.end("cut")
    assert batch.next_deadline() == NOW + 30.0
    peer.connect()
    batch.on_event(Reconnected("a"), NOW + 2.0)
    assert peer.sent() == [(4, 4)]


@pytest.mark.parametrize("way", ["add", "add_many", "add_some"])
def test_the_next_server_bounds_a_message_by_its_own_limit(way: str) -> None:
    def add(size: int) -> None:
        items: list[Item] = [("s.a", b"x" * size), ("s.a", b"x" * size, b"NATS/1.0\r\nA: 1\r\n\r\n")]
        for item in items:
            if way == "add":
                batch.sender.add(item, NOW)
            elif way == "add_many":
                batch.sender.add_many([item], NOW)
            else:
                batch.sender.add_some(iter([item]), NOW)

    peer = Peer(timeout=30.0)
    batch = peer.open(msgs=10)
    add(1_000)
    for limit in (500, 200_000):
        peer.connection.end("cut")
        peer.connect(limit)
        batch.on_event(Reconnected("a"), NOW)
        before = batch.sender.sequence
        with pytest.raises(PayloadTooLarge, match=str(limit)):
            add(limit + 1)
        assert batch.sender.sequence == before
        add(limit - 100)
        assert batch.sender.sequence == before + 2


def test_a_connection_that_is_closed_leaves_the_batch_in_doubt() -> None:
    peer = Peer()
    batch = peer.open()
    peer.connection.close()
    batch.on_event(Closed(None), NOW)
    assert isinstance(batch.failure, BatchInDoubt)
    assert isinstance(batch.failure.__cause__, ConnectionClosed)
    batch.abandon(NOW)  # harmless


@pytest.mark.parametrize("error", [None, ConnectionLost("no more servers")])
def test_a_batch_hears_of_the_end_of_its_connection_and_why_before_its_inbox_does(error: Exception | None) -> None:
    peer = Peer()
    batch = peer.open()
    batch.on_event(Closed(error), NOW)
    assert isinstance(batch.failure, BatchInDoubt)
    assert str(error or "the connection was closed") in batch.failure.reason
    unused = Peer().batch
    unused.on_event(Closed(error), NOW)
    assert (unused.failure, unused.state) == (None, FastState.NEW)


@pytest.mark.parametrize("event", [Closed(None), Disconnected("a", "cut", 1, 0, 1)])
def test_what_arrived_before_the_connection_was_closed_or_lost_counts(event: Any) -> None:
    peer = Peer()
    batch = peer.open()
    batch.commit(A, NOW)
    inbox = peer.batch.inbox.subscription
    assert inbox is not None
    subject = inbox.subject.removesuffix(">") + "500.fail.2.2.$FI"
    data = json.dumps(final(2)).encode()
    peer.connection.receive_data(b"MSG %b %d %d\r\n%b\r\n" % (subject.encode(), inbox.sid, len(data), data))
    batch.on_event(event, NOW)
    assert (batch.is_ended, batch.failure) == (True, None)


def test_an_error_without_words_is_told_by_its_name() -> None:
    errors: list[tuple[Exception, str]] = [(ConnectionLost("gone"), "gone"), (TimeoutError(), "TimeoutError")]
    for error, said in errors:
        batch = Peer().open()
        batch.fail(error)
        assert isinstance(batch.failure, BatchInDoubt)
        assert said in batch.failure.reason
        assert batch.failure.__cause__ is error


def test_a_lost_session_leaves_no_doubts_in_mode_fail_whose_final_count_says_it_all() -> None:
    peer = Peer()
    batch = peer.open()
    peer.add(3)
    batch.on_event(Disconnected("a", "cut", 1, 0, 1), NOW)
    assert batch.losses.doubts == []


def test_a_first_subject_that_is_forbidden_while_the_batch_is_open_leaves_it_in_doubt_at_once() -> None:
    """Pings and the end of the batch go there too, so the server cannot be asked how far the batch came."""
    peer = Peer()
    batch = peer.open()
    peer.add(3)
    peer.say(ack(2, 10))
    peer.deny("s.a")
    assert isinstance(batch.failure, BatchInDoubt)
    assert (batch.failure.stored, batch.failure.may_pass) == (2, False)
    assert isinstance(batch.failure.__cause__, PermissionDenied)


def test_a_batch_is_not_concerned_by_denials_of_other_subjects() -> None:
    peer = Peer()
    batch = peer.open()
    peer.sent()
    peer.deny("s.other")
    assert (batch.state, batch.failure, peer.sent()) == (FastState.OPEN, None, [])


def test_a_first_message_nobody_listens_to_is_sent_again_for_a_second_and_the_caller_told() -> None:
    peer = Peer(timeout=30.0)
    now, attempts = NOW, 0
    while not peer.batch.is_ended:
        now = peer.batch.opening.reopen_at or NOW
        peer.batch.start(A, now)
        peer.say(NO_RESPONDERS, place=(1, 0), now=now)
        attempts += 1
    assert isinstance(peer.batch.failure, JetStreamUnavailable)
    assert attempts == 6
    assert now == pytest.approx(NOW + 1.0)
    assert (peer.batch.stored, peer.batch.acknowledged) == (0, 0)


def test_a_stream_may_be_waited_for_by_a_single_attempt() -> None:
    peer = Peer(wait_for_stream_s=0.0)
    peer.batch.start(A, NOW)
    peer.say(NO_RESPONDERS, place=(1, 0))
    assert isinstance(peer.batch.failure, JetStreamUnavailable)


@pytest.mark.parametrize("answer", [NO_RESPONDERS, error(10211, 429)], ids=["nobody listens", "too many"])
def test_the_last_attempt_to_open_is_made_when_the_time_is_over_and_not_before(answer: Any) -> None:
    peer = Peer(wait_for_stream_s=0.04, timeout=0.04)
    peer.batch.start(A, NOW)
    peer.say(answer, place=(1, 0))
    assert (peer.batch.state, peer.batch.opening.reopen_at) == (FastState.NEW, NOW + 0.04)
    peer.batch.start(A, NOW + 0.04)
    peer.say(answer, place=(1, 0), now=NOW + 0.04)
    assert isinstance(peer.batch.failure, JetStreamUnavailable | TooManyBatches)


def test_a_stream_that_refused_the_first_message_for_now_is_there_and_has_all_the_time() -> None:
    peer = Peer(timeout=30.0, wait_for_stream_s=1.0)
    peer.batch.start(A, NOW)
    peer.say(error(10211, 429), place=(1, 0))
    assert peer.batch.opening.is_stream_known
    now = NOW
    while not peer.batch.is_ended:
        now = peer.batch.opening.reopen_at or NOW
        peer.batch.start(A, now)
        peer.say(NO_RESPONDERS, place=(1, 0), now=now)
    assert now == NOW + 30.0


def test_why_a_batch_could_not_open_is_not_why_the_next_attempt_is_not_answered() -> None:
    peer = Peer()
    peer.batch.start(A, NOW)
    peer.say(NO_RESPONDERS, place=(1, 0))
    assert isinstance(peer.batch.opening.reopen_error, JetStreamUnavailable)
    peer.batch.start(A, NOW + 0.05)
    assert peer.batch.opening.reopen_error is None


@pytest.mark.parametrize("is_only", [False, True])
def test_a_first_message_without_permission_is_not_sent_again(is_only: bool) -> None:
    peer = Peer()
    peer.batch.start(A, NOW, is_only=is_only)
    peer.deny("s.a")
    assert isinstance(peer.batch.failure, PermissionDenied)
    assert (peer.batch.failure.subject, peer.batch.opening.reopen_at) == ("s.a", None)


def test_a_batch_that_is_opened_again_has_no_doubts_of_the_attempt_before() -> None:
    """The session was lost with the first message under way; the server says later that it took none."""
    peer = Peer(gap="ok")
    peer.batch.start(A, NOW)
    peer.batch.on_event(Disconnected("a", "cut", 1, 0, 1), NOW)
    assert peer.batch.losses.doubts == [range(1, 2)]
    peer.say(error(10211, 429), place=(1, 0))
    assert peer.batch.losses.doubts == []
    peer.batch.start(A, NOW + 0.05)
    peer.say(ack(0, 10), ack(1, 10))
    peer.batch.end(NOW)
    peer.say(final(1))
    assert (peer.batch.failure, peer.batch.stored, peer.batch.losses.doubts) == (None, 1, [])


def test_the_wait_for_a_stream_begins_with_the_first_message_nobody_listens_to() -> None:
    peer = Peer(timeout=30.0)
    peer.batch.start(A, NOW)
    peer.say(error(10211, 429), place=(1, 0), now=NOW + 9.0)
    peer.batch.start(A, NOW + 10.0)
    peer.say(NO_RESPONDERS, place=(1, 0), now=NOW + 10.0)
    assert peer.batch.state is FastState.NEW


def test_an_open_batch_has_all_its_time_when_nobody_listens_any_more() -> None:
    peer = Peer(timeout=30.0)
    batch = peer.open(msgs=2)
    peer.add(3)
    for seconds in (1.0, 5.0, 20.0):
        peer.say(NO_RESPONDERS, place=(4, 4), now=NOW + seconds)
    assert batch.failure is None


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"gap": "maybe"},
        {"flow": 0},
        {"flow": 65536},
        {"max_outstanding_acks": 4},
        {"timeout": 0},
        {"keep_alive_s": -1},
        {"wait_for_stream_s": -1},
        {"wait_for_stream_s": float("nan")},
        {"batch_id": "a.b"},
        {"batch_id": ""},
        {"batch_id": "x" * 65},
        {"on_gap": 5},
        {"on_error": "text"},
        {"speed": 1},
    ],
)
def test_options_are_checked_and_unknown_ones_named(options: dict[str, Any]) -> None:
    gap, others = options.get("gap", "fail"), {name: value for name, value in options.items() if name != "gap"}
    with pytest.raises(ConfigError, match=next(iter(options))):
        FastBatchOptions.of(gap, cast(FastBatchKeywords, others))


# ---- what simulation found -------------------------------------------------------------------------------------------


def test_a_gap_that_is_reported_twice_is_missing_once() -> None:
    """A new leader knows only what was stored, and reports again what the old one had reported."""
    peer = Peer(gap="ok")
    batch = peer.open()
    peer.add(5)
    peer.say(gap(3, 5))
    peer.say(gap(3, 6))
    assert (batch.losses.gaps, batch.losses.news) == ([range(3, 5), range(5, 6)], [range(3, 5), range(5, 6)])
    batch.end(NOW)
    peer.say(final(6))
    assert batch.stored == 3  # 1, 2 and 6


@pytest.mark.parametrize("said", [err(3), error(10054)], ids=["refused", "too large"])
def test_a_refused_message_that_a_gap_covers_is_reported_once(said: dict[str, Any]) -> None:
    """A message too large for the stream does not reach the batch; a new leader does not know of earlier refusals."""
    peer = Peer(gap="ok")
    batch = peer.open()
    peer.add(5)
    peer.say(said, place=(3, 1))
    peer.say(gap(2, 6))
    assert [each.sequence for each in batch.losses.errors] == [3]
    assert batch.losses.gaps == [range(2, 3), range(4, 6)]
    assert len(batch.losses.news) == 3
    batch.end(NOW)
    peer.say(final(6))
    assert batch.stored == 2  # 1 and 6


@pytest.mark.parametrize("said", [err(3), error(10054)], ids=["refused", "too large"])
def test_a_message_is_refused_once_however_often_the_server_says_so(said: dict[str, Any]) -> None:
    peer = Peer(gap="ok")
    batch = peer.open()
    peer.add(5)
    peer.say(said, said, place=(3, 1))
    assert [each.sequence for each in batch.losses.errors] == [3]
    assert len(batch.losses.news) == 1


def test_what_was_reported_in_the_end_is_in_doubt_no_more() -> None:
    peer = Peer(gap="ok")
    batch = peer.open(msgs=4)
    peer.add(6)
    peer.sent()
    peer.say(ack(1, 4))
    batch.on_event(Disconnected("a", "cut", 7, 0, 7), NOW)
    assert batch.losses.doubts == [range(2, 8)]
    peer.say(err(3), gap(6, 8), ack(7, 4))
    assert batch.losses.doubts == [range(2, 3), range(4, 6)]
    batch.end(NOW)
    peer.say(final(7))
    assert (batch.stored, batch.losses.gaps) == (1, [range(6, 8)])
    assert batch.losses.doubts == [range(2, 3), range(4, 6)]


def test_an_end_of_the_batch_is_not_in_doubt() -> None:
    peer = Peer(gap="ok")
    batch = peer.open(msgs=4)
    peer.add(1)
    batch.end(NOW)
    batch.on_event(Disconnected("a", "cut", 3, 0, 3), NOW)
    assert batch.losses.doubts == [range(1, 3)]


@pytest.mark.parametrize(
    "again",
    [[(3, 5)], [(3, 5), (3, 5)], [(2, 8)], [(4, 5), (3, 4)], [(3, 9), (2, 3)], [(6, 8), (2, 3), (6, 8)]],
    ids=str,
)
def test_however_often_and_in_whatever_pieces_gaps_are_reported_each_message_is_missing_once(
    again: list[tuple[int, int]],
) -> None:
    peer = Peer(gap="ok")
    batch = peer.open()
    peer.add(9)
    for first_missing, received in [(3, 5), *again]:
        peer.say(gap(first_missing, received))
    missing = [sequence for each in batch.losses.gaps for sequence in each]
    assert sorted(missing) == sorted(set(missing))
    assert set(missing) == {3, 4}.union(*(range(*each) for each in again))
    assert [sequence for each in batch.losses.news if isinstance(each, range) for sequence in each] == missing


def test_a_lost_end_in_mode_ok_is_not_counted_as_stored() -> None:
    peer = Peer(gap="ok")
    batch = peer.open()
    peer.add(1)
    batch.end(NOW)  # sequence 3, lost; a ping finds out
    peer.say(gap(3, 4))
    assert peer.sent()[-1] == (4, 3)
    peer.say(final(3))
    assert batch.stored == 2


def test_a_loss_that_was_reported_to_a_broken_session_is_not_taken_for_stored() -> None:
    """Message 2 was refused, or lost before 3; the server says so once, into a connection that is gone by then."""
    peer = Peer(gap="ok")
    batch = peer.open(msgs=4)
    peer.add(3)
    peer.sent()
    peer.connection.end("cut")
    batch.on_event(Disconnected("a", "cut", 4, 0, 4), NOW)
    peer.connect()
    batch.on_event(Reconnected("a"), NOW + 1.0)
    peer.say(ack(4, 4), now=NOW + 1.1)
    batch.end(NOW + 1.2)
    peer.say(final(4), now=NOW + 1.3)
    is_certain = batch.failure is None and batch.stored == 4
    assert not is_certain


def test_a_lost_acknowledgement_is_covered_by_the_next() -> None:
    peer = Peer(gap="fail")
    batch = peer.open(msgs=10)
    peer.add(18)
    assert peer.batch.sender.due == 1
    peer.say(ack(10, 10))
    peer.add(11)
    assert peer.batch.sender.due == 0
    peer.say(ack(30, 10))  # the one for 20 was lost
    assert (batch.acknowledged, peer.batch.sender.due) == (30, 20)


def test_a_message_dropped_for_coming_too_fast_is_found_by_asking() -> None:
    peer = Peer(gap="ok")
    batch = peer.open()
    peer.add(2)
    peer.sent()
    peer.say(error(10167, 429), place=(3, 1))
    deadline = batch.next_deadline()
    assert deadline is not None
    batch.on_time(deadline)
    assert peer.sent() == [(3, 4)]
    peer.say(gap(3, 4), ack(0, 10))
    assert batch.losses.gaps == [range(3, 4)]
    assert batch.losses.errors == []


def test_what_is_taken_from_an_iterable_is_bounded_by_messages_and_bytes() -> None:
    items = iter([("a", b"x" * 40)] * 100)
    chunk: list[Any] = []
    take(items, chunk, 10, 1000)
    assert len(chunk) == 10
    take(items, chunk, 100, 100)
    assert len(chunk) == 13  # the third one passes the bound
    take(items, chunk, 1000, 1 << 20)
    assert len(chunk) == 100


def test_an_iterable_that_fails_leaves_what_it_gave() -> None:
    def failing() -> Iterator[Any]:
        yield ("a", b"1")
        raise ValueError("broken")

    chunk: list[Any] = []
    with pytest.raises(ValueError, match="broken"):
        take(failing(), chunk, 10, 1000)
    assert chunk == [("a", b"1")]


def test_some_are_taken_as_far_as_the_pace_and_a_piece_allow() -> None:
    peer = Peer(gap="fail")
    batch = peer.open(msgs=500)
    items = iter([A] * 700)
    assert batch.sender.add_some(items, NOW)
    assert batch.sender.sequence == 501
    assert batch.sender.add_some(items, NOW)
    assert not batch.sender.add_some(items, NOW)
    assert batch.sender.sequence == 701


def test_none_are_taken_that_the_connection_might_not_take() -> None:
    peer = Peer(gap="fail")
    batch = peer.open(msgs=500)
    peer.sent()

    def may_add_some() -> bool:
        return batch.sender.may_add_some

    assert may_add_some()
    chunk = b"x" * (batch.sender._max_payload_bytes // 2)
    while may_add_some():
        peer.connection.publish("other", chunk)
    largest = ("s.a", b"x" * batch.sender._max_payload_bytes)
    peer.connection._out.pop()  # one step back: now it may, and then it must
    peer.connection.out_bytes = sum(map(len, peer.connection._out))
    assert may_add_some()
    assert batch.sender.add_some(iter([A] * 400 + [largest] * 100), NOW)


def test_what_came_before_a_bad_item_or_a_broken_iterator_was_sent() -> None:
    def failing() -> Iterator[Any]:
        yield A
        yield A
        raise ValueError("broken")

    peer = Peer(gap="fail")
    batch = peer.open(msgs=500)
    peer.sent()
    with pytest.raises(ValueError, match="broken"):
        batch.sender.add_some(failing(), NOW)
    assert peer.sent() == [(2, 1), (3, 1)]
    left = iter([A, ("bad subject", b""), A])
    with pytest.raises(InvalidSubject):
        batch.sender.add_some(left, NOW)
    assert (peer.sent(), batch.sender.sequence, len(list(left))) == ([(4, 1)], 4, 1)


@pytest.mark.parametrize(
    ("items", "plain"),
    [
        ([], False),
        ([("a", b"x" * 100_000), ("b", b"")], True),
        ([("a", b"x" * 100_001)], False),
        ([("a", b"1"), ("b", b"2", None)], False),
        ([("a", bytearray(b"1"))], False),
        ([["a", b"1"]], False),  # a list may change in the caller's hands
        ([("a",)], False),
        ([("a", b"1"), 5], False),
        ([(["a"], b"1")], False),
        ([("a", b"1"), ("a b", b"1")], False),
    ],
)
def test_plain_messages_are_told_from_all_others(items: list[Any], plain: bool) -> None:
    assert are_plain(Peer().connection, items) is plain


# ---- attempts to open ------------------------------------------------------------------------------------------------


NOBODY = JetStreamUnavailable("s.a")
TOO_MANY = TooManyBatches(429, 10211, "too many inflight")


def _opening(*, timeout: float = 30.0, wait_for_stream_s: float = 1.0) -> FastOpening:
    opening = FastOpening(FastBatchOptions(timeout=timeout, wait_for_stream_s=wait_for_stream_s))
    opening.begin(NOW)
    opening.on_sent()
    return opening


def _waits(opening: FastOpening) -> bool:
    """Whether another attempt is to be made, and why."""
    return opening.reopen_at is not None or opening.reopen_error is not None


def _refuse(opening: FastOpening, error: Exception, *, until: float = 1e9) -> list[float]:
    """When it was tried, as long as it is worth it."""
    now, times = NOW, [NOW]
    while now < until and opening.on_refused(error, now):
        assert opening.reopen_error is error
        assert opening.reopen_at is not None
        now = opening.reopen_at
        times.append(now)
        opening.begin(now)
        opening.on_sent()
        assert not _waits(opening)
    return times


def test_attempts_double_their_distance_and_the_last_is_made_when_time_is_over() -> None:
    times = _refuse(_opening(timeout=4.0), TOO_MANY)
    waits = [after - before for before, after in itertools.pairwise(times)]
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 0.45])
    assert times[-1] == NOW + 4.0


def test_nobody_listening_is_given_less_time_than_a_stream_that_refuses() -> None:
    assert _refuse(_opening(), NOBODY)[-1] == NOW + 1.0
    assert _refuse(_opening(), TOO_MANY)[-1] == NOW + 30.0
    assert not _opening(wait_for_stream_s=0.0).on_refused(NOBODY, NOW)


def test_a_stream_that_has_answered_is_there_and_has_the_longer_of_both_times() -> None:
    for wait_s, until in ((1.0, 30.0), (40.0, 40.0)):
        opening = _opening(wait_for_stream_s=wait_s)
        known = [opening.is_stream_known]
        assert opening.on_refused(TOO_MANY, NOW)
        assert [*known, opening.is_stream_known] == [False, True]
        assert _refuse(opening, NOBODY)[-1] == NOW + until


def test_the_wait_for_a_stream_begins_anew_after_another_answer() -> None:
    opening = _opening(timeout=1.5)
    assert opening.on_refused(NOBODY, NOW)
    assert opening.on_refused(TOO_MANY, NOW + 0.9)
    assert opening.on_refused(NOBODY, NOW + 1.6)
    assert opening.on_refused(NOBODY, NOW + 2.5)
    assert not opening.on_refused(NOBODY, NOW + 2.6)


# ---- silence ---------------------------------------------------------------------------------------------------------


PATIENT = FastBatchOptions(timeout=30.0, ping_after_s=1.0, keep_alive_s=4.0)


def _silence(now: float = 100.0) -> FastSilence:
    silence = FastSilence(PATIENT)
    silence.on_progress(now)
    return silence


def _looks(silence: FastSilence, sent_at: float, *, is_waiting: bool = True, is_connected: bool = True) -> float | None:
    return silence.next_deadline(sent_at, is_waiting=is_waiting, is_connected=is_connected)


def test_a_server_that_owes_an_answer_is_asked_again_and_again_until_the_time_is_over() -> None:
    silence = _silence()
    assert _looks(silence, 110.0) == 111.0
    silence.on_ping(111.0)
    assert _looks(silence, 110.0) == 112.0
    silence.on_ping(139.5)
    assert _looks(silence, 110.0) == silence.gives_up_at(110.0) == 140.0


def test_progress_and_messages_of_ours_begin_the_time_anew() -> None:
    silence = _silence()
    assert silence.gives_up_at(90.0) == 130.0
    assert silence.gives_up_at(105.0) == 135.0
    silence.on_progress(120.0)
    assert silence.gives_up_at(105.0) == 150.0


def test_pings_do_not_begin_the_time_anew() -> None:
    silence = _silence()
    silence.on_ping(129.0)
    assert silence.gives_up_at(100.0) == 130.0


def test_a_batch_that_waits_for_its_caller_is_kept_alive_and_not_given_up() -> None:
    silence = _silence()
    assert _looks(silence, 110.0, is_waiting=False) == 114.0
    silence.on_ping(114.0)
    assert _looks(silence, 110.0, is_waiting=False) == 118.0


def test_without_a_session_nobody_is_asked_but_time_goes_by() -> None:
    silence = _silence()
    silence.on_hole(100.0)
    assert _looks(silence, 110.0, is_connected=False) == 140.0
    assert _looks(silence, 110.0, is_waiting=False, is_connected=False) is None


def test_a_message_that_was_not_taken_is_looked_into_soon_and_once() -> None:
    silence = _silence()
    silence.on_hole(110.0)
    silence.on_hole(110.05)  # the first one counts
    assert _looks(silence, 110.0) == _looks(silence, 110.0, is_waiting=False) == 110.0 + HOLE_PING_S
    silence.on_ping(110.1)
    assert _looks(silence, 110.0) == 111.1


def test_a_batch_that_begins_again_has_no_message_to_look_into() -> None:
    silence = _silence()
    silence.on_hole(110.0)
    silence.begin_again()
    assert _looks(silence, 110.0) == 111.0
