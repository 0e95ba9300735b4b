"""The table of subscriptions, and what arrives for them; how it looks to a server is in test_connection.py."""

from __future__ import annotations

from jetspark.core.events import SlowConsumer
from jetspark.core.subscription import Event, Ready, Subscriptions, SubscriptionState


def _subscribed(table: Subscriptions, max_pending_messages: int = 100) -> SubscriptionState:
    state = SubscriptionState(
        table.new_sid(), "s", "", max_pending_messages=max_pending_messages, max_pending_bytes=1000
    )
    table.add(state)
    return state


def _receive(table: Subscriptions, data: bytes) -> list[Event]:
    events: list[Event] = []
    table.parser.receive_data(data)
    for subscription in table.parser.touched:
        table.deliver(subscription, events)
    table.parser.touched.clear()
    return events


def test_what_arrives_is_handed_over_and_its_reader_told_once() -> None:
    table = Subscriptions()
    state = _subscribed(table)
    assert _receive(table, b"MSG s 1 1\r\na\r\nMSG s 1 1\r\nb\r\n") == [Ready(state)]
    assert [message.data for message in state.pending] == [b"a", b"b"]


def test_losses_are_told_at_the_beginning_and_at_each_doubling() -> None:
    table = Subscriptions()
    _subscribed(table, max_pending_messages=1)
    told = [_receive(table, b"MSG s 1 1\r\na\r\n")[:-1] for _ in range(9)]
    assert [len(events) for events in told] == [0, 1, 1, 0, 1, 0, 0, 0, 1]
    assert told[1] == [SlowConsumer("s", 1)]
    assert told[8] == [SlowConsumer("s", 8)]


def test_one_that_is_finished_gets_nothing_more_although_the_parser_knew_it() -> None:
    table = Subscriptions()
    state, events = _subscribed(table), list[Event]()
    _receive(table, b"MSG s 1 1\r\na\r\n")
    table.finish(state, events)
    assert (events, table.all, state.is_finished) == ([Ready(state)], [], True)
    assert _receive(table, b"MSG s 1 1\r\nb\r\n") == []
    assert len(state.pending) == 1


def test_the_end_is_told_once_however_often_it_comes() -> None:
    table = Subscriptions()
    state, events = _subscribed(table), list[Event]()
    table.finish(state, events)
    table.finish(state, events)
    assert events == [Ready(state)]


def test_one_that_reached_its_limit_is_not_in_the_table_any_more() -> None:
    table = Subscriptions()
    state = _subscribed(table)
    state.max_messages = 1
    assert _receive(table, b"MSG s 1 1\r\na\r\nMSG s 1 1\r\nb\r\n") == [Ready(state)]
    assert (table.all, len(state.pending)) == ([], 1)


def test_a_new_session_is_told_of_all_with_what_is_left_of_their_limits() -> None:
    table = Subscriptions()
    first, second = _subscribed(table), _subscribed(table)
    second.max_messages = 5
    _receive(table, b"MSG s 2 1\r\na\r\n")
    assert b"".join(table.restore()) == b"SUB s 1\r\nSUB s 2\r\nUNSUB 2 4\r\n"
    assert (first.received_before, second.received_before) == (0, 1)


def test_a_new_session_does_not_go_on_with_half_a_frame_of_the_last() -> None:
    table = Subscriptions()
    state = _subscribed(table)
    assert _receive(table, b"MSG s 1 5\r\nab") == []
    table.begin_session()
    assert _receive(table, b"MSG s 1 1\r\nx\r\n") == [Ready(state)]
    assert [message.data for message in state.pending] == [b"x"]
