from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspark.core.message import CoreMessage
from jetspark.core.subscription import SubscriptionState


def subscription(messages: int = 10, size: int = 1000, **options: Any) -> SubscriptionState:
    return SubscriptionState(1, "a", "", max_pending_messages=messages, max_pending_bytes=size, **options)


def settle(state: SubscriptionState, *payloads: bytes) -> int:
    state.arrived.extend(CoreMessage("a", payload, None, None, None) for payload in payloads)
    # Any chunk is larger than the messages in it.
    return state.accept_arrived(chunk_bytes=sum(20 + len(payload) for payload in payloads))


def take_all(state: SubscriptionState) -> list[bytes]:
    return [state.take().data for _ in range(len(state.pending))]


def test_messages_are_taken_in_the_order_they_arrived() -> None:
    state = subscription()
    assert settle(state, b"1", b"22") == 0
    assert settle(state, b"333") == 0
    assert (state.received, state.dropped, state.pending_bytes) == (3, 0, 6)
    assert take_all(state) == [b"1", b"22", b"333"]
    assert state.pending_bytes == 0
    with pytest.raises(IndexError):
        state.take()


def test_all_messages_can_be_taken_at_once() -> None:
    state = subscription()
    assert state.take_all() == []
    settle(state, b"1", b"22")
    settle(state, b"333")
    assert [message.data for message in state.take_all()] == [b"1", b"22", b"333"]
    assert (len(state.pending), state.take_all()) == (0, [])


def test_the_bound_in_messages_is_reached_exactly() -> None:
    state = subscription(messages=3)
    assert settle(state, b"1", b"2", b"3") == 0
    assert settle(state, b"4") == 1
    assert (len(state.pending), state.received, state.dropped) == (3, 4, 1)
    assert state.take().data == b"1"
    assert settle(state, b"5", b"6") == 1
    assert take_all(state) == [b"2", b"3", b"5"]
    assert (state.received, state.dropped) == (6, 2)


def test_the_bound_in_bytes_is_reached_exactly() -> None:
    state = subscription(size=10)
    assert settle(state, b"x" * 10) == 0
    assert settle(state, b"y") == 1
    assert settle(state, b"") == 0
    assert state.pending_bytes == 10
    state.take()
    assert settle(state, b"z" * 9, b"zz", b"z") == 1
    assert take_all(state) == [b"", b"z" * 9, b"z"]
    assert (state.received, state.dropped, state.pending_bytes) == (6, 2, 0)


def test_the_bound_in_bytes_is_kept_over_many_chunks_that_are_far_below_it() -> None:
    state = subscription(messages=1000, size=1000)
    assert [settle(state, b"x" * 100) for _ in range(12)] == [0] * 10 + [1, 1]
    assert state.pending_bytes == 1000
    for _ in range(3):
        state.take()
    assert [settle(state, b"x" * 100) for _ in range(4)] == [0, 0, 0, 1]
    assert state.pending_bytes == 1000


def test_a_new_subscription_is_nothing_special() -> None:
    state = subscription()
    assert (state.is_inbox, state.follows_sessions, state.is_finished, state.is_slow) == (False,) * 4
    assert (state.received, state.received_before, state.dropped, state.max_messages) == (0,) * 4
    assert (state.message_class, state.error, state.answer_runs) == (None, None, None)


def test_one_burst_over_the_bound_keeps_what_fits() -> None:
    state = subscription(messages=2)
    assert settle(state, b"1", b"2", b"3", b"4", b"5") == 3
    assert take_all(state) == [b"1", b"2"]
    assert (state.received, state.dropped) == (5, 3)


def test_a_message_larger_than_the_bound_is_dropped_and_the_next_one_is_not() -> None:
    state = subscription(size=10)
    assert settle(state, b"x" * 11) == 1
    assert settle(state, b"y") == 0
    assert take_all(state) == [b"y"]


def test_it_ends_after_max_messages_and_ignores_what_comes_too_many() -> None:
    state = subscription()
    state.max_messages = 3
    settle(state, b"1", b"2")
    assert (state.is_finished, state.received) == (False, 2)
    assert settle(state, b"3", b"4", b"5") == 0
    assert (state.is_finished, state.received, state.dropped) == (True, 3, 0)
    assert settle(state, b"6") == 0
    assert state.arrived == []
    assert take_all(state) == [b"1", b"2", b"3"]
    assert state.received == 3


def test_dropped_messages_count_towards_max_messages() -> None:
    state = subscription(messages=1)
    state.max_messages = 3
    assert settle(state, b"1", b"2", b"3", b"4") == 2
    assert state.is_finished
    assert (state.received, state.dropped) == (3, 2)


def test_a_finished_subscription_takes_nothing_and_can_still_be_read() -> None:
    state = subscription()
    settle(state, b"1")
    state.is_finished = True
    assert settle(state, b"2") == 0
    assert (state.received, take_all(state)) == (1, [b"1"])


def test_it_is_slow_until_half_of_the_messages_are_read() -> None:
    state = subscription(messages=4)
    settle(state, b"1", b"2", b"3", b"4")
    state.is_slow = True
    state.take()
    settle(state, b"5")
    assert state.is_slow
    for _ in range(3):
        state.take()
    settle(state, b"6")
    assert not state.is_slow


def test_half_of_the_bytes_or_messages_is_half_empty() -> None:
    for messages, size in ((1000, 100), (2, 1000)):
        state = subscription(messages=messages, size=size)
        settle(state, b"x" * 50)
        state.is_slow = True
        settle(state)
        assert not state.is_slow
        settle(state, b"x")
        state.is_slow = True
        settle(state)
        assert state.is_slow


def test_it_is_slow_until_half_of_the_bytes_are_read() -> None:
    state = subscription(messages=1000, size=100)
    settle(state, b"x" * 45, b"x" * 45, b"x" * 5)
    state.is_slow = True
    settle(state, b"x")
    assert state.is_slow
    state.take()
    settle(state, b"")
    assert state.is_slow
    state.take()
    settle(state, b"")
    assert not state.is_slow


def test_headers_count_towards_the_bound_in_bytes() -> None:
    state = subscription(messages=1000, size=1000)
    block = b"NATS/1.0\r\nA: %b\r\n\r\n" % (b"x" * 400)
    state.arrived.extend(CoreMessage("a", b"", None, block, None) for _ in range(10))
    assert state.accept_arrived(chunk_bytes=10_000) == 8
    for _ in range(2):
        assert state.take().headers["A"] == "x" * 400
    assert state.pending_bytes == 0


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 6), max_size=6) | st.integers(1, 5), max_size=20),
    st.integers(1, 8),
    st.integers(1, 20),
    st.integers(0, 30),
)
def test_whatever_happens_the_numbers_add_up(
    steps: list[list[int] | int], messages: int, size: int, max_messages: int
) -> None:
    state = subscription(messages, size)
    state.max_messages = max_messages
    sent = taken = dropped = 0
    for step in steps:
        if isinstance(step, int):
            for _ in range(min(step, len(state.pending))):
                state.take()
                taken += 1
        else:
            sent += len(step)
            dropped += settle(state, *(b"x" * length for length in step))
        assert len(state.pending) <= messages
        assert state.pending_bytes == sum(len(each.data) for each in state.pending) <= size
        assert state.arrived == []
        assert state.dropped == dropped
        assert state.received == taken + len(state.pending) + dropped == min(sent, max_messages or sent)
        assert state.is_finished == (0 < max_messages <= sent)


def test_nothing_is_counted_before_it_came_nor_of_what_comes_too_late() -> None:
    state = subscription()
    assert (state.counted_messages, state.counted_bytes) == (0, 0)
    assert (state.is_inbox, state.follows_sessions, state.ends_with_session) == (False, False, False)
    state.counted_messages = 2  # as a parser does that has just read them
    state.is_finished = True
    assert settle(state, b"1", b"2") == 0
    assert (state.counted_messages, len(state.arrived), len(state.pending)) == (0, 0, 0)
