"""Where the answers to a fast batch arrive."""

from __future__ import annotations

import pytest
from support.readers import SilentReader

from jetspark.core.connection import Connection
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import parse_servers
from jetspark.errors import ConnectionClosed
from jetspark.publish.fast_inbox import FastInbox


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
