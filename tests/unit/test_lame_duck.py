"""Leaving a server in good order, step by step. Time is stated."""

from __future__ import annotations

import pytest

from jetspark.core.confirmations import LINGER_S, Leaving, Pings
from jetspark.core.outbox import Outbox
from jetspark.core.subscription import Subscriptions, SubscriptionState
from jetspark.errors import ConnectionLost


class Session:
    """The parts that leaving needs, and two messages that were accepted before."""

    def __init__(self) -> None:
        self.outbox, self.pings, self.subscriptions = Outbox(1000, "_INBOX.me.", 1000), Pings(30.0, 2), Subscriptions()
        self.leaving = Leaving(self.outbox, self.pings, self.subscriptions)
        self.outbox.publish("s", b"1")
        self.outbox.publish("s", b"2")

    def pong(self) -> None:
        ping = self.pings.on_pong()
        assert ping is not None
        self.leaving.on_pong(ping)


def test_what_was_accepted_before_is_sent_and_confirmed_and_what_comes_later_waits() -> None:
    session = Session()
    session.leaving.begin()
    session.outbox.publish("s", b"3")
    assert session.outbox._hand_over() == b"PUB s 1\r\n1\r\nPUB s 1\r\n2\r\nPING\r\n"
    assert session.outbox._hand_over() == b""
    session.pong()
    assert session.pings.confirmed == 2
    assert session.outbox.buffered_messages == 1


def test_it_lingers_from_the_first_moment_it_is_told_the_time() -> None:
    session = Session()
    session.leaving.begin()
    assert session.leaving.next_deadline() is None
    session.pong()
    assert session.leaving.next_deadline() == 0.0
    session.leaving.on_time(100.0)
    assert session.leaving.next_deadline() == 100.0 + LINGER_S


def test_then_the_subscriptions_end_and_with_the_last_answer_the_session() -> None:
    session = Session()
    for sid in (4, 7):
        session.subscriptions.add(SubscriptionState(sid, "s", "", max_pending_messages=1, max_pending_bytes=1))
    session.leaving.begin()
    session.outbox._hand_over()
    session.pong()
    session.leaving.on_time(100.0)
    session.leaving.on_time(100.0 + LINGER_S / 2)
    assert session.outbox._hand_over() == b""
    session.leaving.on_time(100.0 + LINGER_S)
    assert session.outbox._hand_over() == b"UNSUB 4\r\nUNSUB 7\r\nPING\r\n"
    assert session.leaving.next_deadline() is None
    with pytest.raises(ConnectionLost, match="has confirmed all it got"):
        session.pong()


def test_the_last_ping_is_answered_before_those_that_wait_for_the_next_session() -> None:
    session = Session()
    session.leaving.begin()
    session.pong()
    session.leaving.on_time(1.0)
    session.leaving.on_time(2.0)
    session.outbox.publish("s", b"3")
    ping = session.pings.on_pong()
    assert ping is not None
    assert (ping.then, ping.published) == ("leave", 2)


def test_a_session_that_is_over_is_not_left_any_more() -> None:
    session = Session()
    session.leaving.begin()
    session.pong()
    session.leaving.reset()
    assert session.leaving.next_deadline() is None
    session.leaving.on_time(100.0)
    assert session.leaving.next_deadline() is None
