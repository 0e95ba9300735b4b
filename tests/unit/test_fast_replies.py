"""Answers to a fast batch: where they arrive, what is read of them, and losses, checked against sets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.connections import connected
from support.readers import SilentReader

from jetspark.core.connection import Connection
from jetspark.core.message import CoreMessage
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import parse_servers
from jetspark.core.subscription import Done, Failed
from jetspark.errors import (
    BatchUnknown,
    ConnectionClosed,
    JetSparkError,
    PermissionDenied,
    ProtocolError,
    ServerError,
    UsageError,
)
from jetspark.jetstream.info import PubAck
from jetspark.publish import fast_replies
from jetspark.publish.fast_options import Refusal
from jetspark.publish.fast_replies import (
    FLOW_ACK,
    FastDenials,
    FastInbox,
    FastLosses,
    FlowAck,
    GapReport,
    NobodyListens,
    PlainAck,
    StrayError,
    check_range,
    number,
    position_of,
    read_reply,
)


def _inbox(batch_id: str | None = None) -> tuple[Connection, FastInbox]:
    connection = Connection(ConnectOptions(), parse_servers("a"), inbox="_INBOX.me", jitter=lambda: 0.0)
    return connection, FastInbox(connection, SilentReader(), batch_id)


def test_each_opening_has_a_subject_and_an_id_of_its_own() -> None:
    connection, inbox = _inbox()
    assert (inbox.batch_id, inbox.subscription) == ("", None)
    assert inbox.open() == "_INBOX.me-1"
    first = inbox.subscription
    assert first is not None
    assert (inbox.batch_id, first.subject) == ("me-1", "_INBOX.me-1.>")
    assert inbox.open() == "_INBOX.me-2"
    assert first.is_finished
    assert connection.subscriptions.all == [inbox.subscription]


def test_an_id_that_is_given_stays_and_the_subject_is_another_one_all_the_same() -> None:
    _, inbox = _inbox("mine")
    assert inbox.batch_id == "mine"
    assert [inbox.open(), inbox.open()] == ["_INBOX.me-1.mine", "_INBOX.me-2.mine"]
    assert inbox.batch_id == "mine"


def test_no_answer_is_dropped_and_none_is_worth_remembering() -> None:
    connection, inbox = _inbox()
    inbox.open()
    assert inbox.subscription is not None
    assert inbox.subscription.is_inbox
    assert inbox.subscription.max_pending_messages > connection.options.max_pending_messages


def test_closing_drops_interest_and_keeps_the_id() -> None:
    connection, inbox = _inbox()
    inbox.open()
    inbox.close()
    inbox.close()
    assert (inbox.subscription, connection.subscriptions.all, inbox.batch_id) == (None, [], "me-1")


def test_a_connection_that_is_closed_has_nothing_to_drop() -> None:
    connection, inbox = _inbox()
    inbox.open()
    connection.close()
    inbox.close()
    assert inbox.subscription is None
    with pytest.raises(ConnectionClosed):
        inbox.open()


# ---- reading ---------------------------------------------------------------------------------------------------------


ERROR = {"code": 400, "err_code": 10071, "description": "wrong last sequence: 4"}


def _said(reply: Any, place: str = "7.1", headers: bytes | None = None) -> CoreMessage:
    data = reply if isinstance(reply, bytes) else json.dumps(reply, separators=(",", ":")).encode()
    return CoreMessage(f"_INBOX.me.me-1.500.fail.{place}.$FI", data, None, headers, None)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])  # as the server writes it, and as others might
def test_an_acknowledgement_says_how_far_and_how_often(separators: tuple[str, str]) -> None:
    text = json.dumps({"type": "ack", "seq": 12, "msgs": 500}, separators=separators)
    assert read_reply(_said(text.encode())) == FlowAck(12, 500)


def test_a_gap_ends_before_what_was_received() -> None:
    assert read_reply(_said({"type": "gap", "last_seq": 3, "seq": 6})) == GapReport(range(3, 6))


def test_an_error_of_an_open_batch_names_its_message_and_another_one_the_subject() -> None:
    refusal = read_reply(_said({"type": "err", "seq": 4, "error": ERROR}))
    assert isinstance(refusal, Refusal)
    assert (refusal.sequence, refusal.error.err_code) == (4, 10071)
    stray = read_reply(_said({"error": ERROR, "stream": "S", "seq": 0}, "9.2"))
    assert isinstance(stray, StrayError)
    assert (stray.sequence, stray.operation, stray.error.err_code) == (9, 2, 10071)
    assert isinstance(stray.error, ServerError)


def test_an_unknown_batch_is_told_by_the_class_of_its_error() -> None:
    reply = read_reply(_said({"error": {"code": 400, "err_code": 10208, "description": "unknown"}}, "9.4"))
    assert isinstance(reply, StrayError)
    assert isinstance(reply.error, BatchUnknown)


def test_the_final_acknowledgement_has_the_batch_and_a_plain_one_has_not() -> None:
    final = read_reply(_said({"stream": "S", "seq": 100, "batch": "me-1", "count": 7}))
    assert isinstance(final, PubAck)
    assert (final.sequence, final.batch_size) == (100, 7)
    assert read_reply(_said({"stream": "S", "seq": 100})) == PlainAck("S")


def test_a_503_names_the_message_that_nobody_took() -> None:
    assert read_reply(_said(b"", "3.1", b"NATS/1.0 503\r\n\r\n")) == NobodyListens(3, 1)


@pytest.mark.parametrize(
    "reply",
    [
        {"type": "ack", "seq": "12", "msgs": 500},
        {"type": "ack", "seq": True, "msgs": 500},
        {"type": "gap", "seq": 6},
        {"type": "err", "seq": 4},
        {"type": "news", "seq": 4},
        {"stream": "S"},
        [],
        b"",
        b"{",
    ],
    ids=str,
)
def test_what_is_no_answer_raises(reply: Any) -> None:
    with pytest.raises(JetSparkError):
        read_reply(_said(reply))


def test_what_is_no_answer_is_shown_in_part() -> None:
    with pytest.raises(ProtocolError, match=r"not an answer to a fast batch: b'\{\"type\":\"news\"") as caught:
        read_reply(_said({"type": "news", "text": "x" * 1000}))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "subject", ["", "x", "_INBOX.me-1.500.fail.x.1.$FI", "_INBOX.me-1.500.fail.1.-1.$FI", "1.2.$FI"]
)
def test_a_subject_that_is_none_of_ours_has_no_place(subject: str) -> None:
    assert position_of(subject) == (0, 0)


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


# ---- losses ----------------------------------------------------------------------------------------------------------


REFUSED = ServerError(400, 10071, "no")


def _flat(ranges: list[range]) -> list[int]:
    return [number for each in ranges for number in each]


def test_a_message_is_reported_once_by_whichever_report_came_first() -> None:
    losses = FastLosses()
    losses.add_refusal(Refusal(3, REFUSED))
    losses.add_gap(range(2, 6), 9)
    losses.add_refusal(Refusal(4, REFUSED))
    losses.add_gap(range(2, 8), 9)
    assert losses.gaps == [range(2, 3), range(4, 6), range(6, 8)]
    assert [each.sequence for each in losses.errors] == [3]
    assert losses.news == [losses.errors[0], *losses.gaps]


def test_an_end_is_no_message() -> None:
    losses = FastLosses()
    losses.ends.add(4)
    losses.add_gap(range(3, 5), 4)
    losses.add_refusal(Refusal(4, REFUSED))
    losses.lose_session(2, 4)
    assert (losses.gaps, losses.errors, losses.doubts) == ([range(3, 4)], [], [])
    assert losses.stored(4) == 2
    assert losses.explain(range(3, 5))


def test_what_was_under_way_when_a_session_was_lost_is_in_doubt_until_it_is_reported() -> None:
    losses = FastLosses()
    losses.lose_session(2, 6)
    losses.lose_session(2, 8)
    assert _flat(losses.doubts) == [3, 4, 5, 6, 7, 8]
    losses.lose_session(8, 8)
    losses.add_gap(range(5, 7), 8)
    assert _flat(losses.doubts) == [3, 4, 7, 8]
    assert not losses.explain(range(3, 4))
    assert losses.stored(8) == 2
    losses.begin_again()
    assert losses.doubts == []


def test_the_reports_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_replies, "MAX_REPORTS", 2)
    losses = FastLosses()
    for sequence in (1, 2):
        losses.add_refusal(Refusal(sequence, REFUSED))
        losses.add_gap(range(10 * sequence, 10 * sequence + 1), 100)
    with pytest.raises(UsageError, match="more than 2 losses"):
        losses.add_refusal(Refusal(3, REFUSED))
    with pytest.raises(UsageError, match="more than 2 losses"):
        losses.add_gap(range(50, 51), 100)


_REPORTS = st.lists(
    st.one_of(
        st.tuples(st.just("gap"), st.integers(1, 12), st.integers(1, 12)),
        st.tuples(st.just("refused"), st.integers(1, 12), st.just(0)),
        st.tuples(st.just("lost session"), st.integers(0, 12), st.integers(0, 12)),
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(_REPORTS, st.sets(st.integers(10, 12), max_size=2))
def test_whatever_is_reported_the_sets_are_right(reports: list[tuple[str, int, int]], ends: set[int]) -> None:
    losses = FastLosses()
    losses.ends.update(ends)
    gone: set[int] = set()
    unheard: set[int] = set()
    for kind, first, second in reports:
        if kind == "gap":
            losses.add_gap(range(first, second), 12)
            gone |= set(range(first, second)) - ends
        elif kind == "refused":
            losses.add_refusal(Refusal(first, REFUSED))
            gone |= {first} - ends
        else:
            losses.lose_session(first, second)
            # Those up to an earlier loss were acknowledged since, or are in doubt already.
            start = max(first + 1, max(unheard, default=0) + 1)
            unheard |= set(range(start, second + 1))
    told = _flat(losses.gaps) + [each.sequence for each in losses.errors]
    assert sorted(told) == sorted(gone)
    assert set(_flat(losses.doubts)) == unheard - gone - ends
    assert losses.stored(12) == len(set(range(1, 13)) - gone - unheard - ends)
    assert losses.explain(range(1, 13)) is (set(range(1, 13)) <= gone | ends)


def test_a_refusal_of_the_last_message_sent_is_in_no_gap() -> None:
    losses = FastLosses()
    losses.add_refusal(Refusal(4, REFUSED))
    losses.add_gap(range(3, 5), 4)
    assert losses.gaps == [range(3, 4)]


# ---- denials ---------------------------------------------------------------------------------------------------------


def _denials() -> tuple[Connection, FastDenials]:
    connection = connected()
    return connection, FastDenials(connection, {"s.a", "s.b"}.__contains__)


def _deny(connection: Connection, *subjects: str) -> None:
    for subject in subjects:
        connection.receive_data(b"-ERR 'Permissions Violation for Publish to \"%b\"'\r\n" % subject.encode())


def _subject(denied: PermissionDenied | None) -> str | None:
    return None if denied is None else denied.subject


def test_a_denial_is_found_when_it_is_of_a_subject_of_the_batch_and_came_since_it_began() -> None:
    connection, denials = _denials()
    _deny(connection, "s.a")
    assert (denials.has_asked, _subject(denials.first()), _subject(denials.news())) == (False, "s.a", "s.a")
    denials.has_asked = True
    denials.begin()
    assert (denials.has_asked, denials.first(), denials.news()) == (False, None, None)
    _deny(connection, "other", "s.b", "s.a")
    assert (_subject(denials.first()), _subject(denials.news()), denials.news()) == ("s.b", "s.b", None)


@pytest.mark.parametrize(("is_over", "told"), [(False, Done), (True, Failed)])
def test_a_flush_tells_of_a_denial_once_the_batch_is_over(is_over: bool, told: type[Done | Failed]) -> None:
    connection, denials = _denials()
    denials.begin()
    if is_over:
        denials.end()
    connection.publish("s.a", b"")
    connection.flush("flush")
    _deny(connection, "s.a")
    connection.receive_data(b"PONG\r\n")
    assert [type(event) for event in connection.events() if isinstance(event, Done | Failed)] == [told]
