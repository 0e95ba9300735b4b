"""FastPublisherMachine publishing, batch by batch. Time is stated; the server is a list of lines."""

from __future__ import annotations

import json
import re
from operator import attrgetter
from typing import Any, cast

import pytest
from support.readers import SilentReader

from jetspark.core.connection import Connection
from jetspark.core.events import Closed, Disconnected, Reconnected
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import parse_servers
from jetspark.core.transport import WRITE_AT_BYTES
from jetspark.errors import (
    BatchInDoubt,
    BatchPublishDisabled,
    BufferFull,
    ConfigError,
    FeatureUnavailable,
    InvalidSubject,
    JetStreamUnavailable,
    PayloadTooLarge,
    RequestTimeout,
    ServerError,
    UsageError,
    WrongLastSequence,
)
from jetspark.publish.fast_backlog import KEPT_OVERHEAD_BYTES
from jetspark.publish.fast_base import FastPublisherBase
from jetspark.publish.fast_options import FastPublisherKeywords, FastPublisherOptions, Refused
from jetspark.publish.fast_publisher import PIECE_MESSAGES, FastPublisherMachine, _question
from jetspark.publish.outgoing import Item

NOW = 100.0


class Peer:
    """A connection that is up, a publisher on it, and the server's side of the conversation."""

    def __init__(self, *, send_buffer_bytes: int = 8 << 20, info: dict[str, Any] | None = None, **options: Any) -> None:
        info = {"server_id": "S", "max_payload": 100000, **({"jetstream": True} if info is None else info)}
        self._info = b"INFO %b\r\n" % json.dumps(info).encode()
        self.connection = Connection(
            ConnectOptions(send_buffer_bytes=send_buffer_bytes),
            parse_servers("a"),
            inbox="_INBOX.me",
            jitter=lambda: 0.0,
        )
        self.connection.begin(self.connection.pool.next()[0])
        self.connection.receive_data(self._info)
        self.connection.login(None)
        self.connection.data_to_send()
        self.connection.receive_data(b"PONG\r\n")
        self.connection.events()
        self.endless = FastPublisherMachine(self.connection, SilentReader(), FastPublisherOptions(**options), now=NOW)

    def accept(self, *numbers: int, now: float = NOW) -> None:
        self.endless.accept([item(number) for number in numbers], now)

    def pump(self, now: float = NOW) -> list[tuple[int, int, bytes]]:
        """Sequence, operation and payload of what is sent now."""
        while self.endless.pump(now):
            pass
        return self.sent()

    def sent(self) -> list[tuple[int, int, bytes]]:
        data = self.connection.data_to_send()
        found = re.findall(rb"PUB \S+ \S+\.(\d+)\.(\d)\.\$FI [\d ]+\r\n(?:NATS[^\0]*?\r\n\r\n)?(\w*)\r\n", data)
        return [(int(sequence), int(operation), payload) for sequence, operation, payload in found]

    def reconnect(self) -> None:
        """Lose the session and get a new one."""
        self.connection.end("cut")
        self.connection.begin(self.connection.pool.next()[0])
        self.connection.receive_data(self._info)
        self.connection.login(None)
        self.connection.data_to_send()
        self.connection.receive_data(b"PONG\r\n")
        self.connection.events()

    def say(self, *answers: dict[str, Any], place: tuple[int, int] = (1, 1), now: float = NOW) -> None:
        self.hear(*answers, place=place)
        self.endless.on_replies(now)

    def hear(self, *answers: dict[str, Any], place: tuple[int, int] = (1, 1)) -> None:
        """Answers that nobody has looked at yet."""
        batch = self.endless.batch
        assert batch is not None
        inbox = batch.inbox.subscription
        assert inbox is not None
        subject = inbox.subject.removesuffix(">") + f"500.fail.{place[0]}.{place[1]}.$FI"
        for answer in answers:
            data = json.dumps(answer, separators=(",", ":")).encode()
            self.connection.receive_data(b"MSG %b %d %d\r\n%b\r\n" % (subject.encode(), inbox.sid, len(data), data))

    def open(self, msgs: int = 10, now: float = NOW) -> None:
        """The first message is sent and answered, and what may follow is sent."""
        self.pump(now)
        self.say(ack(0, msgs), now=now)
        self.pump(now)


def item(number: int) -> Item:
    return "s.a", b"m%d" % number


def ack(sequence: int, msgs: int) -> dict[str, Any]:
    return {"type": "ack", "seq": sequence, "msgs": msgs}


def gap(first_missing: int, received: int) -> dict[str, Any]:
    return {"type": "gap", "last_seq": first_missing, "seq": received}


def err(sequence: int, err_code: int = 10071) -> dict[str, Any]:
    return {"type": "err", "seq": sequence, "error": {"code": 400, "err_code": err_code, "description": "no"}}


def error(err_code: int) -> dict[str, Any]:
    return {"error": {"code": 400, "err_code": err_code, "description": "no"}, "stream": "S", "seq": 0}


def final(count: int) -> dict[str, Any]:
    return {"stream": "S", "seq": 1000, "batch": "me-2", "count": count}


# ---- the way of a message --------------------------------------------------------------------------------------------


def test_messages_are_sent_in_order_and_forgotten_when_they_are_stored() -> None:
    peer = Peer()
    peer.accept(1, 2, 3)
    assert peer.pump() == [(1, 0, b"m1")]
    peer.say(ack(0, 2))
    assert peer.pump() == [(2, 1, b"m2"), (3, 1, b"m3")]
    peer.say(ack(2, 2))
    endless = peer.endless
    assert (endless.stages.accepted, endless.stages.published, endless.stages.pending) == (3, 2, 1)
    assert endless.stages.unpublished() == [item(3)]


def test_what_the_server_wants_is_made_ready_in_pieces() -> None:
    peer = Peer()
    peer.accept(*range(1, 3 * PIECE_MESSAGES + 1))
    peer.pump()
    peer.say(ack(0, 3 * PIECE_MESSAGES))
    for first in (2, PIECE_MESSAGES + 2):
        assert peer.endless.pump(NOW) is True
        assert [sequence for sequence, _, _ in peer.sent()] == list(range(first, first + PIECE_MESSAGES))
    assert peer.endless.pump(NOW) is True
    assert len(peer.sent()) == PIECE_MESSAGES - 1
    assert peer.endless.pump(NOW) is False


class Driver(FastPublisherBase):
    """A driver's publisher, as far as nothing is waited for; its transport writes when it is told to."""

    flush_is_scheduled = False
    due_at = 0.0

    def __init__(self, peer: Peer) -> None:
        self._publisher, self._connection, self._now = peer.endless, peer.connection, lambda: NOW
        self._transport: Any = self
        self._runner: Any = self
        self.writes: list[bytes] = []

    def flush(self) -> None:
        self.writes.append(self._connection.data_to_send())

    def flush_soon(self) -> None:
        self.flush_is_scheduled = True

    def pump(self) -> None:
        self._pump()


def test_the_first_piece_is_written_before_the_next_is_made() -> None:
    peer = Peer()
    driver = Driver(peer)
    data = b"x" * 200
    peer.endless.accept([("s.a", data)] * (3 * PIECE_MESSAGES), NOW)
    driver.pump()
    assert (driver.writes, driver.flush_is_scheduled) == ([], True)  # one message is not written by itself
    driver.flush()
    peer.say(ack(0, 3 * PIECE_MESSAGES))
    driver.pump()
    assert [write.count(data) for write in driver.writes] == [1, PIECE_MESSAGES, PIECE_MESSAGES, PIECE_MESSAGES - 1]


def test_small_pieces_share_a_write() -> None:
    peer = Peer()
    driver = Driver(peer)
    peer.accept(*range(1, 2 * PIECE_MESSAGES + 1))
    driver.pump()
    driver.flush()
    driver.flush_is_scheduled = False
    peer.say(ack(0, 2 * PIECE_MESSAGES))
    driver.pump()
    assert 0 < peer.connection.out_bytes < WRITE_AT_BYTES // 2
    assert (len(driver.writes), driver.flush_is_scheduled) == (1, True)


def test_a_flush_ends_the_batch_because_only_that_tells() -> None:
    peer = Peer()
    peer.accept(1, 2)
    peer.open()
    assert peer.endless.flush_requests.flush() == 2
    assert peer.pump() == [(3, 3, b"")]
    peer.say(final(2))
    assert (peer.endless.stages.published, peer.endless.is_idle) == (2, True)
    peer.accept(3)
    assert peer.pump() == [(1, 0, b"m3")]
    assert peer.endless.batches == 2


def test_closing_accepts_nothing_more_and_stores_what_is_there() -> None:
    peer = Peer()
    peer.accept(1)
    peer.endless.close()
    with pytest.raises(UsageError, match="closed"):
        peer.endless.check()
    peer.open()
    assert not peer.endless.is_idle
    peer.say(final(1))
    assert peer.endless.is_idle


def test_a_publisher_that_was_given_nothing_closes_at_once() -> None:
    peer = Peer()
    peer.endless.close()
    assert peer.pump() == []
    assert peer.endless.is_idle


def test_a_message_that_can_never_be_sent_is_not_accepted_and_those_before_it_are() -> None:
    peer = Peer()
    with pytest.raises(InvalidSubject):
        peer.endless.accept([item(1), ("s a", b""), item(2)], NOW)
    assert peer.endless.stages.unpublished() == [item(1)]
    with pytest.raises(PayloadTooLarge):
        peer.endless.accept([("s.a", b"x" * 100_001)], NOW)
    assert (peer.endless.stages.accepted, peer.endless.stages.pending) == (1, 1)


def test_what_a_message_costs_is_given_back_when_it_is_stored() -> None:
    peer = Peer(max_pending_bytes=2 * (KEPT_OVERHEAD_BYTES + 2), max_pending_messages=10)
    peer.accept(1)
    assert peer.endless.room == 9
    peer.accept(2)
    assert peer.endless.room == 0
    peer.open(msgs=1)
    peer.say(ack(1, 1))
    assert peer.endless.room == 9
    peer = Peer(max_pending_bytes=KEPT_OVERHEAD_BYTES + 3, max_pending_messages=10)
    peer.accept(1)
    assert (peer.endless.room_bytes, peer.endless.room) == (1, 9), "the message that passes it is still accepted"


def test_a_full_buffer_loses_nothing_and_doubles_nothing() -> None:
    peer = Peer(send_buffer_bytes=300)
    peer.accept(1)
    peer.open()
    peer.connection.publish("other", b"x" * 200)
    peer.accept(2, 3, 4)
    with pytest.raises(BufferFull):
        peer.endless.pump(NOW)
    peer.sent()
    assert peer.pump() == [(2, 1, b"m2"), (3, 1, b"m3"), (4, 1, b"m4")]


# ---- the way back ----------------------------------------------------------------------------------------------------


def test_a_batch_cut_short_goes_on_exactly_where_it_ended_and_at_once() -> None:
    peer = Peer()
    peer.accept(1, 2, 3, 4)
    peer.open()
    peer.say(gap(3, 4), final(2))
    assert peer.endless.stages.published == 2
    assert peer.pump() == [(1, 0, b"m3")]
    peer.say(ack(0, 10))
    assert peer.pump() == [(2, 1, b"m4")]
    assert peer.endless.possibly_doubled == 0


@pytest.mark.parametrize("info", [{"jetstream": True, "cluster": "C"}, {}])
def test_where_a_leader_may_change_what_a_cut_batch_has_sent_may_be_stored(info: dict[str, Any]) -> None:
    peer = Peer(info=info)
    peer.accept(1, 2, 3, 4)
    peer.open()
    peer.say(gap(3, 4), final(2))
    assert peer.pump() == [(1, 0, b"m3")]
    assert (peer.endless.possibly_doubled, peer.endless.doubled_news) == (2, 2)
    identified = Peer(info=info, message_ids=True)
    identified.accept(1, 2, 3, 4)
    identified.open()
    identified.say(gap(3, 4), final(2))
    assert identified.endless.possibly_doubled == 0


def test_a_batch_in_doubt_is_sent_again_from_the_last_ack_and_counted() -> None:
    peer = Peer()
    peer.accept(1, 2, 3, 4)
    peer.open(msgs=2)
    peer.say(ack(2, 2), error(10208))
    endless = peer.endless
    assert (endless.stages.published, endless.possibly_doubled, endless.doubled_news) == (2, 2, 2)
    assert peer.pump() == []
    assert endless.next_deadline() == NOW + 0.05
    assert peer.pump(NOW + 0.05) == [(1, 0, b"m3")]


def test_with_message_ids_nothing_is_possibly_doubled() -> None:
    peer = Peer(message_ids=True, id_prefix="run")
    peer.accept(1)
    assert peer.endless.pump(NOW) is False
    assert b"Nats-Msg-Id: run-1\r\n" in peer.connection.data_to_send()
    peer.say(ack(0, 2), error(10208))
    assert peer.endless.possibly_doubled == 0
    peer.endless.pump(NOW + 0.05)
    assert b"Nats-Msg-Id: run-1\r\n" in peer.connection.data_to_send()


def test_a_message_with_its_id_may_be_just_as_large_as_the_server_takes() -> None:
    peer = Peer(message_ids=True, id_prefix="run")
    largest = b"x" * (100_000 - len(b"NATS/1.0\r\nNats-Msg-Id: run-2\r\n\r\n"))
    peer.endless.accept([item(1), ("s.a", largest), item(3)], NOW)
    blocks = [kept[2] for kept in peer.endless.stages.unpublished() if len(kept) == 3]
    assert blocks == [b"NATS/1.0\r\nNats-Msg-Id: run-%d\r\n\r\n" % position for position in (1, 2, 3)]
    with pytest.raises(PayloadTooLarge):
        peer.endless.accept([item(4), ("s.a", largest + b"x"), item(6)], NOW)
    assert (peer.endless.stages.accepted, peer.endless.stages.pending) == (4, 4)


def test_an_id_of_the_callers_own_is_kept() -> None:
    peer = Peer(message_ids=True, id_prefix="run")
    peer.endless.accept([("s.a", b"x", {"Nats-Msg-Id": "mine"}), ("s.a", b"x", {"A": "1"})], NOW)
    blocks = [kept[2] for kept in peer.endless.stages.unpublished() if len(kept) == 3]
    assert blocks[0] == b"NATS/1.0\r\nNats-Msg-Id: mine\r\n\r\n"
    assert blocks[1] == b"NATS/1.0\r\nA: 1\r\nNats-Msg-Id: run-2\r\n\r\n"


def test_waiting_doubles_while_nothing_moves_and_begins_anew_when_something_does() -> None:
    peer = Peer()
    peer.accept(1, 2)
    now, waits = NOW, []
    for _ in range(8):
        peer.pump(now)
        peer.say(error(10208), place=(1, 4), now=now)
        deadline = peer.endless.next_deadline()
        assert deadline is not None
        waits.append(round(deadline - now, 3))
        now = deadline
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    peer.pump(now)
    peer.say(ack(0, 1), ack(1, 1), error(10208), now=now)
    deadline = peer.endless.next_deadline()
    assert deadline is not None
    assert deadline - now == pytest.approx(0.05)


# ---- claims and proofs -----------------------------------------------------------------------------------------------


def sent_again(*numbers: int, **options: Any) -> Peer:
    """Messages with ids, sent in a batch that ended in doubt and now in the next."""
    peer = Peer(message_ids=True, id_prefix="run", **options)
    peer.accept(*numbers)
    peer.open(msgs=1)
    peer.say(error(10208))
    peer.open(msgs=2, now=NOW + 0.05)
    return peer


def test_an_acknowledgement_of_what_was_sent_before_proves_nothing() -> None:
    peer = sent_again(1, 2)
    peer.say(ack(2, 2))
    assert peer.endless.stages.published == 0
    assert [each[1] for each in peer.endless.stages.unpublished()] == [b"m1", b"m2"]


def test_an_acknowledgement_of_a_single_message_that_was_sent_before_proves_nothing() -> None:
    peer = sent_again(1)
    peer.say(ack(1, 1))
    assert (peer.endless.stages.published, len(peer.endless.stages.claimed)) == (0, 1)


def test_what_a_batch_left_over_when_the_session_changed_meanwhile_was_sent_before() -> None:
    """The leader it was sent to may still store it, and take the next copy for a duplicate."""
    peer = Peer(message_ids=True)
    peer.accept(1, 2, 3)
    peer.open()
    peer.reconnect()
    peer.say(gap(2, 4), final(1))
    assert peer.endless.stages.published == 1
    peer.open(msgs=2)
    peer.say(ack(2, 2))
    assert (peer.endless.stages.published, len(peer.endless.stages.claimed)) == (1, 2)


def test_something_new_behind_it_proves_what_was_sent_before() -> None:
    peer = Peer(message_ids=True)
    peer.accept(1, 2)
    peer.open(msgs=1)
    peer.say(error(10208))
    peer.accept(3, 4)
    peer.open(msgs=2, now=NOW + 0.05)
    peer.say(ack(2, 2))
    assert peer.endless.stages.published == 0
    peer.say(ack(4, 2))
    assert peer.endless.stages.published == 4
    assert not peer.endless.stages.pending


def test_what_is_claimed_is_sent_again_before_what_was_sent_after_it() -> None:
    peer = sent_again(1, 2, 3, 4)
    peer.say(ack(2, 2))
    peer.say(error(10208))
    assert [each[1] for each in peer.endless.stages.unpublished()] == [b"m1", b"m2", b"m3", b"m4"]
    assert peer.pump(NOW + 1) == [(1, 0, b"m1")]
    peer.say(ack(0, 4), now=NOW + 1)
    assert peer.pump(NOW + 1)[:3] == [(2, 1, b"m2"), (3, 1, b"m3"), (4, 1, b"m4")]


def test_an_end_is_sent_when_what_is_claimed_and_what_is_sent_are_all_that_a_flush_wants() -> None:
    peer = Peer(message_ids=True)
    peer.accept(1, 2, 3, 4)
    peer.open(msgs=2)
    peer.say(error(10208))
    later = NOW + 0.05
    peer.open(msgs=1, now=later)
    for number in (1, 2):
        peer.say(ack(number, 1), now=later)
        sent = peer.pump(later)
        assert sent[0] == (number + 2, 1, b"m%d" % (number + 2))
    assert sent[1:] == [(5, 3, b"")]


def ask_about_the_last(peer: Peer) -> bytes:
    """End the batch, which holds nothing new; returns the question."""
    peer.say(final(2))
    assert peer.endless.stages.published == 0
    peer.endless.pump(NOW)
    return peer.connection.data_to_send()


def test_where_nothing_new_follows_the_stream_is_asked() -> None:
    peer = sent_again(1, 2)
    question = ask_about_the_last(peer)
    # The first of several values of a header counts, so this one comes first; and nothing can be stored.
    head = b"NATS/1.0\r\nNats-Expected-Last-Sequence: 9223372036854775807\r\nNats-Msg-Id: run-2\r\n\r\nm2\r\n"
    assert question.endswith(head)
    assert b".1.2.$FI" in question
    assert peer.endless.batches == 2  # questions are none
    peer.say({"stream": "S", "seq": 7, "duplicate": True, "batch": "me-3", "count": 1}, place=(1, 2))
    assert peer.endless.stages.published == 2
    assert peer.endless.is_idle


def test_in_process_is_asked_again_and_what_is_not_there_is_sent_again() -> None:
    peer = sent_again(1, 2)
    ask_about_the_last(peer)
    peer.accept(3)
    peer.say(ack(1, 2), error(10158), place=(1, 2))
    assert peer.endless.stages.published == 0
    assert peer.pump() == []  # what follows waits for the answer
    peer.endless.pump(NOW + 1)
    assert b"9223372036854775807" in peer.connection.data_to_send()
    peer.say(error(10071), place=(1, 2), now=NOW + 1)
    assert peer.pump(NOW + 1) == [(1, 0, b"m1")]
    peer.say(ack(0, 3), now=NOW + 1)
    assert peer.pump(NOW + 1)[:2] == [(2, 1, b"m2"), (3, 1, b"m3")]
    peer.say(ack(3, 3))
    assert peer.endless.stages.published == 3


def test_a_duplicate_without_a_sequence_proves_nothing() -> None:
    peer = sent_again(1, 2)
    ask_about_the_last(peer)
    peer.say({"stream": "S", "seq": 0, "batch": "me-3", "count": 1}, place=(1, 2))
    assert peer.endless.stages.published == 0


def test_a_question_that_is_too_large_is_asked_without_data() -> None:
    peer = sent_again(1, 2)
    assert b"\r\n\r\nm2\r\n" in ask_about_the_last(peer)
    peer.say(error(10054), place=(1, 2))
    peer.endless.pump(NOW + 1)
    question = peer.connection.data_to_send()
    assert question.endswith(b"Nats-Msg-Id: run-2\r\n\r\n\r\n")


def test_a_question_is_asked_with_its_data_if_the_server_takes_both() -> None:
    block = b"NATS/1.0\r\nNats-Msg-Id: run-2\r\n\r\n"
    question = _question(("s.a", b"data", block), 1000)
    assert len(question) == 3
    assert isinstance(question[2], bytes)
    size = len(question[2]) + len(b"data")
    assert [_question(("s.a", b"data", block), size + more)[1] for more in (-1, 0, 1)] == [b"", b"data", b"data"]


def test_a_question_that_can_never_be_answered_ends_the_publisher() -> None:
    peer = sent_again(1, 2)
    ask_about_the_last(peer)
    peer.say(error(10205), place=(1, 2))
    assert isinstance(peer.endless.failure, BatchPublishDisabled)


def test_a_question_that_is_not_answered_is_what_went_wrong_last() -> None:
    peer = sent_again(1, 2, patience_s=10.0)
    ask_about_the_last(peer)
    peer.say(error(10158), place=(1, 2))
    peer.endless.on_time(NOW + 11.0)
    assert isinstance(peer.endless.failure, BatchInDoubt)
    assert "10158" in str(peer.endless.failure)


def test_a_refusal_behind_what_is_claimed_waits_for_the_proof() -> None:
    peer = sent_again(1, 2, on_refused=lambda refused: None)
    peer.say(ack(1, 1), err(2), final(1))
    assert (peer.endless.stages.published, peer.endless.news) == (0, [])
    assert peer.pump(NOW + 1) == [(1, 2, b"m1")]
    peer.say({"stream": "S", "seq": 7, "duplicate": True, "batch": "me-3", "count": 1}, place=(1, 2))
    assert peer.endless.stages.published == 1
    assert peer.pump(NOW + 1) == [(1, 0, b"m2")]
    peer.say(error(10071))
    assert [entry.position for entry in peer.endless.news] == [2]
    assert peer.endless.stages.published == 2


def test_what_has_no_id_is_stored_each_time_it_is_acknowledged() -> None:
    peer = Peer()
    peer.accept(1, 2)
    peer.open(msgs=1)
    peer.say(error(10208))
    peer.open(msgs=1, now=NOW + 0.05)
    peer.say(ack(1, 1))
    assert peer.endless.stages.published == 1
    assert peer.endless.possibly_doubled == 2


def test_an_id_of_the_callers_own_needs_a_proof_too() -> None:
    peer = Peer()
    peer.endless.accept([("s.a", b"m1"), ("s.a", b"m2", {"Nats-Msg-Id": "mine"})], NOW)
    peer.open(msgs=1)
    peer.say(error(10208))
    peer.open(msgs=2, now=NOW + 0.05)
    peer.say(ack(2, 2))
    assert peer.endless.stages.published == 1


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_refused_message_is_handed_back_and_the_others_go_on() -> None:
    peer = Peer(on_refused=lambda refused: None)
    peer.accept(1, 2, 3)
    peer.open()
    peer.say(err(2), final(1))
    endless = peer.endless
    assert endless.stages.published == 2
    refused = endless.news[0]
    assert isinstance(refused, Refused)
    assert (refused.position, refused.data, type(refused.error)) == (2, b"m2", WrongLastSequence)
    assert (refused.subject, refused.headers) == ("s.a", None)
    assert peer.pump(NOW + 0.05) == [(1, 0, b"m3")]


def test_a_refused_message_is_handed_back_with_its_headers() -> None:
    peer = Peer(on_refused=lambda refused: None)
    peer.endless.accept([("s.a", b"m1", {"A": "b"})], NOW)
    peer.open()
    peer.say(err(1), final(0))
    assert [refused.headers for refused in peer.endless.news] == [b"NATS/1.0\r\nA: b\r\n\r\n"]


def test_a_refusal_nobody_wants_to_hear_of_stops_the_publisher() -> None:
    peer = Peer()
    peer.accept(1, 2, 3)
    peer.open()
    peer.say(err(2), final(1))
    with pytest.raises(WrongLastSequence):
        peer.endless.check()
    assert peer.endless.stages.unpublished() == [item(2), item(3)]
    assert peer.pump(NOW + 10.0) == []
    assert peer.endless.next_deadline() is None


def test_a_stream_that_takes_no_batches_is_not_tried_again() -> None:
    peer = Peer(on_refused=lambda refused: None)
    peer.accept(1)
    peer.pump()
    peer.say(error(10205))
    with pytest.raises(BatchPublishDisabled):
        peer.endless.check()
    assert (peer.endless.stages.published, peer.endless.news) == (0, [])


def test_a_server_too_old_for_batches_gets_the_first_message_once_and_nothing_more() -> None:
    peer = Peer()
    peer.accept(1, 2, 3)
    peer.pump()
    peer.say({"stream": "S", "seq": 8})
    with pytest.raises(FeatureUnavailable, match="fast ingest"):
        peer.endless.check()
    assert (peer.endless.stages.published, len(peer.endless.stages.unpublished())) == (1, 2)
    assert not peer.endless.pump(1e9)


# ---- nobody listens --------------------------------------------------------------------------------------------------


def _nobody_listens(peer: Peer, since: float, until: float) -> float:
    """The server says so to every first message, until that time or the publisher's end; when that was."""
    now = since
    while now <= until and peer.endless.failure is None:
        if peer.pump(now):
            batch = peer.endless.batch
            assert batch is not None
            assert batch.inbox.subscription is not None
            subject = batch.inbox.subscription.subject.removesuffix(">") + "500.fail.1.0.$FI"
            frame = b"HMSG %b %d 16 16\r\nNATS/1.0 503\r\n\r\n\r\n" % (subject.encode(), batch.inbox.subscription.sid)
            peer.connection.receive_data(frame)
            peer.endless.on_replies(now)
        now = max(now + 0.001, peer.endless.next_deadline() or 0.0)
        peer.endless.on_time(now)
    return now


def test_a_publisher_that_never_found_a_stream_soon_says_so_and_keeps_what_it_was_given() -> None:
    peer = Peer()
    peer.accept(1, 2, 3)
    assert _nobody_listens(peer, NOW, NOW + 60.0) < NOW + 1.1
    with pytest.raises(JetStreamUnavailable, match=r"s\.a"):
        peer.endless.check()
    assert peer.endless.stages.unpublished() == [item(1), item(2), item(3)]
    assert peer.endless.possibly_doubled == 0


def test_a_stream_that_is_there_for_sure_is_waited_for_as_long_as_the_caller_says() -> None:
    peer = Peer(wait_for_stream_s=20.0, batch_timeout_s=5.0)
    peer.accept(1)
    assert _nobody_listens(peer, NOW, NOW + 60.0) == pytest.approx(NOW + 20.0, abs=0.1)
    assert isinstance(peer.endless.failure, JetStreamUnavailable)


def test_patience_that_ends_before_a_stream_was_found_leaves_no_doubt() -> None:
    peer = Peer(wait_for_stream_s=1000.0, patience_s=10.0)
    peer.accept(1)
    assert _nobody_listens(peer, NOW, NOW + 60.0) <= NOW + 10.1
    assert isinstance(peer.endless.failure, JetStreamUnavailable)


def test_a_first_message_that_is_sent_again_and_not_answered_may_be_stored() -> None:
    peer = Peer(wait_for_stream_s=1000.0, patience_s=10.0, batch_timeout_s=100.0)
    peer.accept(1)
    _nobody_listens(peer, NOW, NOW)
    assert peer.pump(NOW + 1.0) == [(1, 0, b"m1")]
    peer.endless.on_time(NOW + 11.0)
    assert isinstance(peer.endless.failure, BatchInDoubt)


def test_a_stream_that_refused_the_first_message_for_now_is_one_that_answered() -> None:
    peer = Peer(patience_s=60.0, wait_for_stream_s=1.0, batch_timeout_s=5.0)
    peer.accept(1)
    peer.pump()
    peer.say(error(10211), place=(1, 0))
    _nobody_listens(peer, NOW + 0.05, NOW + 50.0)
    assert peer.endless.failure is None
    _nobody_listens(peer, NOW + 50.0, NOW + 70.0)
    # Every attempt was answered, so nothing is in doubt.
    assert isinstance(peer.endless.failure, JetStreamUnavailable)


@pytest.mark.parametrize("answer", [ack(0, 10), error(10208)], ids=["an ack", "an end in doubt"])
def test_after_an_answer_nobody_listening_is_a_leader_being_elected(answer: dict[str, Any]) -> None:
    peer = Peer(patience_s=60.0)
    peer.accept(1)
    peer.pump()
    peer.say(answer)
    if peer.endless.batch is not None:
        peer.say(error(10208))  # the server was restarted, and has forgotten the batch
    _nobody_listens(peer, NOW + 1.0, NOW + 50.0)
    early = peer.endless.failure
    _nobody_listens(peer, NOW + 50.0, NOW + 70.0)
    assert early is None
    assert isinstance(peer.endless.failure, BatchInDoubt)
    assert "no answer on 's.a'" in str(peer.endless.failure)


@pytest.mark.parametrize(("err_code", "may_pass"), [(10185, False), (10208, True)], ids=["too old", "restarted"])
def test_a_publisher_that_gave_up_says_what_went_wrong_last_and_whether_it_may_pass(
    err_code: int, may_pass: bool
) -> None:
    peer = Peer(patience_s=10.0)
    peer.accept(1, 2)
    peer.open()
    peer.say(error(err_code))
    peer.endless.on_time(NOW + 10.0)
    failure = peer.endless.failure
    assert isinstance(failure, BatchInDoubt)
    assert isinstance(failure.__cause__, BatchInDoubt)
    assert isinstance(failure.__cause__.__cause__, ServerError)
    assert failure.may_pass is may_pass


# ---- time and the connection -----------------------------------------------------------------------------------------


def test_patience_ends_and_what_is_kept_stays_to_be_read() -> None:
    peer = Peer(patience_s=10.0, batch_timeout_s=100.0)
    peer.accept(1)
    peer.pump()
    assert peer.endless.next_deadline() == NOW + 1.0  # the batch wants to ask
    peer.endless.on_time(NOW + 10.0)
    assert isinstance(peer.endless.failure, BatchInDoubt)
    assert "no answer" in peer.endless.failure.reason
    assert peer.endless.failure.stored == 0
    assert peer.endless.stages.unpublished() == [item(1)]
    assert peer.endless.batch is None
    assert (2, 3, b"") in peer.sent(), "the server is told that the batch is over"


def test_a_publisher_that_cannot_open_its_next_batch_says_why_when_its_patience_ends() -> None:
    peer = Peer(patience_s=10.0)
    peer.accept(1)
    peer.open()
    peer.say(error(10208))
    peer.pump(NOW + 1.0)
    peer.say(error(10211), place=(1, 0), now=NOW + 1.0)
    peer.endless.on_time(NOW + 10.0)
    assert isinstance(peer.endless.failure, BatchInDoubt)
    assert "10211" in peer.endless.failure.reason


def test_a_connection_without_room_for_all_of_its_patience_ends_the_publisher() -> None:
    peer = Peer(patience_s=10.0)
    assert peer.endless.room_timeout_s == 10.0
    peer.accept(1)
    peer.endless.on_no_room(NOW + 10.0)
    failure = peer.endless.failure
    assert isinstance(failure, BatchInDoubt)
    assert isinstance(failure.__cause__, RequestTimeout)
    assert not failure.__cause__.was_sent
    peer.endless.on_no_room(NOW + 20.0)
    assert peer.endless.failure is failure


def test_before_the_first_attempt_there_is_only_patience_to_wait_for() -> None:
    peer = Peer(patience_s=10.0)
    peer.accept(1)
    assert peer.endless.next_deadline() == NOW + 10.0


def test_a_batch_that_is_open_and_has_nothing_pending_is_not_idle() -> None:
    peer = Peer()
    peer.accept(1)
    peer.open(msgs=1)
    peer.say(ack(1, 1))
    assert (peer.endless.stages.pending, peer.endless.is_idle) == (0, False)


def test_time_makes_a_batch_ask_and_then_give_up_for_the_next() -> None:
    peer = Peer(batch_timeout_s=2.0)
    peer.accept(1)
    peer.pump()
    peer.endless.on_time(NOW + 1.0)
    assert peer.sent() == [(1, 4, b"")]
    peer.endless.on_time(NOW + 2.0)
    assert (peer.endless.batch, peer.endless.possibly_doubled) == (None, 1)


def test_what_arrived_before_a_session_was_lost_counts() -> None:
    peer = Peer()
    peer.accept(1, 2)
    peer.open()
    peer.hear(ack(2, 2))
    peer.endless.on_event(Disconnected("a", "cut", 1, 0, 1), NOW)
    assert peer.endless.stages.published == 2


def test_patience_begins_anew_with_everything_that_is_stored_however_long_the_publisher_is_busy() -> None:
    peer = Peer(patience_s=10.0, batch_timeout_s=100.0)
    peer.accept(*range(1, 8))
    peer.open(msgs=2)
    for number in range(1, 5):  # it never has nothing to wait for
        now = NOW + 6.0 * number
        peer.say(ack(2 * number, 2), now=now)
        peer.accept(6 + 2 * number, 7 + 2 * number, now=now)
        peer.pump(now)
        assert peer.endless.stages.pending >= 5
        peer.endless.on_time(now + 5.9)
        assert peer.endless.failure is None
    peer.endless.on_time(NOW + 34.0)
    assert isinstance(peer.endless.failure, BatchInDoubt)


def test_a_refused_message_is_progress_too() -> None:
    peer = Peer(patience_s=10.0, batch_timeout_s=100.0, on_refused=lambda refused: None)
    peer.accept(1, 2, 3)
    peer.open()
    peer.say(err(1), final(0), now=NOW + 6.0)
    peer.pump(NOW + 6.0)
    peer.endless.on_time(NOW + 15.9)
    assert (peer.endless.stages.published, peer.endless.failure) == (1, None)
    peer.endless.on_time(NOW + 16.0)
    assert isinstance(peer.endless.failure, BatchInDoubt)


def test_patience_begins_with_something_to_wait_for() -> None:
    peer = Peer(patience_s=10.0)
    assert peer.endless.next_deadline() is None
    peer.accept(1, now=NOW + 1000.0)
    peer.endless.on_time(NOW + 1001.0)
    assert peer.endless.failure is None


def test_a_closed_connection_is_the_end() -> None:
    peer = Peer()
    peer.accept(1)
    peer.open()
    peer.connection.close()
    peer.endless.on_event(Closed(None), NOW)
    assert peer.endless.failure is not None
    assert peer.endless.stages.unpublished() == [item(1)]


@pytest.mark.parametrize(("accepts", "closes", "fails"), [(1, True, True), (0, False, True), (0, True, False)])
def test_a_closed_connection_is_no_failure_for_one_who_closed_and_has_nothing_pending(
    accepts: int, closes: bool, fails: bool
) -> None:
    peer = Peer()
    peer.accept(*range(accepts))
    if closes:
        peer.endless.close()
    peer.endless.on_event(Closed(None), NOW)
    assert (peer.endless.failure is not None) == fails


def test_leaving_ends_the_open_batch() -> None:
    peer = Peer()
    peer.accept(1)
    peer.open()
    peer.endless.abandon(NOW)
    assert peer.sent() == [(2, 3, b"")]
    assert peer.endless.batch is None


@pytest.mark.parametrize("opens", [False, True])
def test_one_who_left_sends_nothing_whatever_the_server_says(opens: bool) -> None:
    peer = Peer()
    peer.accept(*range(1, 41))
    if opens:
        peer.open(msgs=10)
    else:
        peer.pump()
    inbox = peer.endless.batch.inbox.subscription if peer.endless.batch else None
    peer.endless.abandon(NOW)
    assert [operation for _, operation, _ in peer.sent()] == [3]
    left = peer.endless.stages.unpublished()
    assert left == [item(number) for number in range(1, 41)]
    assert inbox is not None
    data = json.dumps(ack(20, 10)).encode()
    peer.connection.receive_data(b"MSG _INBOX.me.x %d %d\r\n%b\r\n" % (inbox.sid, len(data), data))
    for later in (0.0, 1.0, 100.0, 1000.0):
        peer.endless.on_replies(NOW + later)
        peer.endless.on_time(NOW + later)
        assert peer.pump(NOW + later) == []
        assert peer.endless.next_deadline() is None
    assert peer.endless.stages.unpublished() == left
    with pytest.raises(UsageError, match=r"unpublished\(\) has 40 messages"):
        peer.accept(41)


def test_one_who_leaves_sends_nothing_that_the_server_had_not_wanted() -> None:
    peer = Peer()
    peer.accept(*range(1, 31))
    peer.open(msgs=4)  # eight are wanted
    peer.endless.abandon(NOW)
    assert [(sequence, operation) for sequence, operation, _ in peer.sent()] == [(9, 3)]
    assert len(peer.endless.stages.unpublished()) == 30


@pytest.mark.parametrize(
    "options",
    [
        {"max_pending_messages": 0},
        {"max_pending_bytes": 0},
        {"patience_s": 0},
        {"batch_timeout_s": -1},
        {"flow": 0},
        {"id_prefix": "a"},
        {"wait_for_stream_s": -1},
        {"on_refused": 5},
        {"speed": 1},
    ],
)
def test_options_are_checked_and_unknown_ones_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        FastPublisherOptions.of(False, cast(FastPublisherKeywords, options))


def test_ids_are_wanted_or_not_and_their_prefix_is_a_text() -> None:
    with pytest.raises(ConfigError, match="message_ids=1"):
        FastPublisherOptions(message_ids=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="id_prefix=5"):
        FastPublisherOptions(message_ids=True, id_prefix=5)  # type: ignore[arg-type]


# ---- what simulation found -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"max_pending_messages": 3}, {"max_pending_bytes": 3 * (KEPT_OVERHEAD_BYTES + 2)}])
def test_a_publisher_that_is_full_before_the_next_ack_is_due_does_not_wait_for_it(limits: dict[str, Any]) -> None:
    """With the defaults: 500 messages for each ack, 64 MiB pending, so any payload beyond 134 kB."""
    peer = Peer(**limits)
    peer.accept(1, 2, 3)
    peer.pump()
    peer.say(ack(0, 500))
    assert peer.pump()[:2] == [(2, 1, b"m2"), (3, 1, b"m3")]
    assert peer.endless.room == 0
    assert peer.pump(NOW + 1.0) or peer.endless.batch is None or peer.endless.batch.state.value == "committing"


def test_a_publisher_that_is_full_does_not_end_a_batch_whose_next_ack_is_on_its_way() -> None:
    peer = Peer(max_pending_messages=2)
    peer.accept(1, 2)
    peer.pump()
    peer.say(ack(0, 1))
    assert (peer.endless.room, peer.pump()) == (0, [(2, 1, b"m2")])
    peer.say(ack(1, 1))
    assert (peer.endless.room, peer.endless.batches) == (1, 1)


@pytest.mark.parametrize(("pending", "acks", "flow"), [(9, 2, 3), (2, 3, 1), (100_000, 1, 500)])
def test_acknowledgements_come_before_there_is_no_room(pending: int, acks: int, flow: int) -> None:
    options = FastPublisherOptions(max_pending_messages=pending, max_outstanding_acks=acks, flow=500)
    assert options.batch_options(is_stream_known=False).flow == flow


def test_a_new_session_asks_where_the_batch_stands_and_means_nothing_without_one() -> None:
    peer = Peer()
    peer.endless.on_event(Reconnected("a"), NOW)
    peer.accept(1, 2)
    peer.open()
    peer.endless.on_event(Reconnected("a"), NOW + 1)
    assert peer.sent() == [(2, 4, b"")]


def test_a_publisher_that_is_left_is_left_even_with_nothing_pending() -> None:
    peer = Peer()
    was_left = peer.endless.is_left
    peer.endless.abandon(NOW)
    assert (was_left, peer.endless.is_left) == (False, True)
    with pytest.raises(UsageError):
        peer.accept(1)


def test_refused_messages_in_a_row_are_handed_back_without_waiting() -> None:
    peer = Peer(on_refused=lambda refused: None)
    peer.accept(*range(1, 11))
    for number in range(1, 9):
        assert peer.pump(NOW)[-1][2] == b"m%d" % number
        peer.say(ack(0, 500), error(10071), now=NOW)
    assert peer.endless.stages.published == 8


def test_a_batch_that_cannot_open_for_want_of_room_does_not_keep_the_clock_spinning() -> None:
    peer = Peer(send_buffer_bytes=200)
    peer.accept(1)
    peer.pump()
    peer.say(error(10211))
    peer.sent()
    peer.connection.publish("other", b"x" * 180)
    with pytest.raises(BufferFull):
        peer.endless.pump(NOW + 0.05)
    peer.endless.on_time(NOW + 0.05)
    deadline = peer.endless.next_deadline()
    assert deadline is not None
    assert deadline > NOW + 0.05


@pytest.mark.parametrize("asks", ["flush_requests.flush", "close"])
def test_the_end_follows_the_last_message_at_once(asks: str) -> None:
    peer = Peer()
    peer.accept(1, 2, 3)
    attrgetter(asks)(peer.endless)()
    peer.pump()
    peer.say(ack(0, 500))
    assert peer.pump() == [(2, 1, b"m2"), (3, 1, b"m3"), (4, 3, b"")]


def test_a_copy_that_is_still_being_replicated_is_waited_for_and_not_refused() -> None:
    peer = Peer(message_ids=True)
    peer.accept(1, 2)
    peer.pump()
    peer.say(ack(0, 500), error(10158))
    assert peer.endless.failure is None
    assert peer.pump(NOW) == []
    deadline = peer.endless.next_deadline()
    assert deadline is not None
    assert [sent[2] for sent in peer.pump(deadline)] == [b"m1"]


def test_a_slow_producer_is_not_given_up_while_the_server_owes_it_nothing() -> None:
    peer = Peer(patience_s=5.0)
    now = NOW
    peer.accept(1)
    peer.pump(now)
    peer.say(ack(0, 500), now=now)
    for number in range(2, 40):
        now += 1.0
        peer.accept(number)
        peer.pump(now)
        peer.endless.on_time(now)
        assert peer.endless.failure is None
    peer.endless.flush_requests.flush()
    peer.pump(now)  # from here on it owes the final acknowledgement
    peer.endless.on_time(now + 4.9)
    assert peer.endless.failure is None
    peer.endless.on_time(now + 5.1)
    assert peer.endless.failure is not None


@pytest.mark.parametrize("prefix", ["", " a", "a\r\nEvil: 1"])
def test_a_prefix_that_would_break_a_header_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="id_prefix="):
        FastPublisherOptions(message_ids=True, id_prefix=prefix)


# ---- waiting for a position without ending the batch -----------------------------------------------------------------


def test_a_position_is_waited_for_without_an_end_while_more_is_accepted() -> None:
    peer = Peer()
    peer.accept(1, 2, 3)
    peer.open(msgs=10)
    peer.endless.flush_requests.request(3, NOW, linger_s=0.002)
    assert peer.endless.next_deadline() == NOW + 0.002
    peer.accept(4, now=NOW + 0.001)
    assert peer.pump(NOW + 0.001) == [(4, 1, b"m4")]
    peer.endless.on_time(NOW + 0.0025)
    assert peer.pump(NOW + 0.0025) == []
    peer.accept(*range(5, 11), now=NOW + 0.003)
    peer.pump(NOW + 0.003)
    peer.say(ack(10, 10), now=NOW + 0.004)
    assert peer.endless.stages.published == 10
    deadline = peer.endless.next_deadline()
    assert deadline is None or deadline > NOW + 1  # nothing is left to linger for
    peer.endless.on_time(NOW + 1)
    assert peer.pump(NOW + 1) == []  # the acknowledgement told, so nothing has to be ended


def test_the_batch_is_ended_when_nothing_was_accepted_for_a_while() -> None:
    peer = Peer()
    peer.accept(1, 2, 3)
    peer.open(msgs=10)
    peer.endless.flush_requests.request(3, NOW, linger_s=0.002)
    assert peer.pump(NOW + 0.001) == []
    peer.endless.on_time(NOW + 0.002)
    assert peer.pump(NOW + 0.002) == [(4, 3, b"")]
    peer.say(final(3), now=NOW + 0.003)
    assert peer.endless.stages.published == 3


def test_the_batch_is_not_ended_while_an_acknowledgement_is_on_its_way() -> None:
    peer = Peer()
    peer.accept(*range(1, 13))
    peer.open(msgs=10)
    peer.endless.flush_requests.request(12, NOW, linger_s=0.002)
    peer.endless.on_time(NOW + 0.002)
    assert peer.pump(NOW + 0.002) == []  # the one of the tenth has to come first
    assert peer.endless.next_deadline() == pytest.approx(NOW + 0.004)
    peer.say(ack(10, 10), now=NOW + 0.003)
    peer.endless.on_time(NOW + 0.004)
    assert peer.pump(NOW + 0.004) == [(13, 3, b"")]


def test_lingering_goes_on_while_the_batch_is_not_open_or_has_enough_for_an_acknowledgement() -> None:
    peer = Peer()
    peer.accept(1)
    peer.pump()
    peer.endless.flush_requests.request(1, NOW, 0.5)
    peer.endless.on_time(NOW + 0.6)
    peer.say(ack(0, 10), now=NOW + 0.6)
    assert peer.pump(NOW + 0.6) == []
    peer = Peer()
    peer.accept(1, 2)
    peer.open(msgs=2)
    peer.endless.flush_requests.request(2, NOW, 0.5)
    peer.endless.on_time(NOW + 0.5)
    assert peer.pump(NOW + 0.5) == []


def test_a_publisher_that_is_full_when_the_server_wants_just_one_more_ends_the_batch() -> None:
    peer = Peer(max_pending_messages=3)
    peer.accept(1, 2, 3)
    peer.pump()
    peer.say(ack(0, 2))
    assert peer.pump() == [(2, 1, b"m2"), (3, 1, b"m3"), (4, 3, b"")]


def test_without_lingering_the_batch_is_ended_at_once() -> None:
    peer = Peer()
    peer.accept(1, 2, 3)
    peer.open(msgs=10)
    peer.endless.flush_requests.request(2, NOW, linger_s=0)
    assert peer.pump() == [(4, 3, b"")]


def test_a_batch_that_is_not_open_yet_is_not_ended() -> None:
    peer = Peer()
    peer.accept(1)
    peer.pump()
    peer.endless.flush_requests.request(1, NOW, linger_s=0.002)
    peer.endless.on_time(NOW + 0.002)
    assert peer.pump(NOW + 0.002) == []
    peer.say(ack(0, 10), now=NOW + 0.003)
    peer.endless.on_time(NOW + 0.004)
    assert peer.pump(NOW + 0.004) == [(2, 3, b"")]
