"""The handler's machine: each bound is reached, each order kept. Time is stated."""

from __future__ import annotations

from typing import Any

import pytest

from jetspark.app.handlers.lanes import Lanes, Tries, WorkItem
from jetspark.app.handlers.machine import NAMED_STALLS, Credit, HandlerLimits, HandlerMachine, Stalled
from jetspark.app.handlers.procedures import is_plain
from jetspark.app.handlers.retry import Breaker, Finish, GiveUp, Reject, RetryPolicy, Skip, WaitHere
from jetspark.app.stored_events import (
    FailureCause,
    Origin,
    StoredEvent,
    dead_letter_filter,
    dead_letter_subject,
    escape_line,
    unescape_line,
)
from jetspark.core.headers import Headers, decode, encode, restored
from jetspark.errors import ProtocolError


def machine_of(*, breaker: Breaker | None = None, **limits: Any) -> HandlerMachine:
    return HandlerMachine(HandlerLimits(**limits), RetryPolicy(jitter=0), lambda: 0.0, breaker)


def message(text: str) -> Any:
    """Stands for a message."""
    return text


def receive(machine: HandlerMachine, *keyed: tuple[str | None, int], now: float = 0.0) -> None:
    for key, sequence in keyed:
        assert machine.receive(WorkItem(key, sequence, message(f"message {sequence}"), size_bytes=10), now) == "new"


def taken(machine: HandlerMachine, now: float = 0.0) -> list[int]:
    """Everything that may begin now."""
    found = []
    while (item := machine.take(now)) is not None:
        found.append(item.sequence)
    return found


def item_of(machine: HandlerMachine, sequence: int) -> WorkItem:
    return next(item for item in machine.items if item.sequence == sequence)


def done(machine: HandlerMachine, sequence: int, now: float = 0.0) -> None:
    item = item_of(machine, sequence)
    assert machine.finish(item, None, now) == Finish()
    machine.acknowledged(item)


# ---- lanes ----------------------------------------------------------------------------------------------------------


def test_one_key_runs_one_after_the_other_and_others_beside_it() -> None:
    machine = machine_of()
    receive(machine, ("a", 1), ("b", 2), ("a", 3), (None, 4), (None, 5))
    assert taken(machine) == [1, 2, 4, 5]
    done(machine, 1)
    assert taken(machine) == [3]


def test_a_retry_keeps_its_place_before_later_events_of_its_key() -> None:
    machine = machine_of()
    receive(machine, ("a", 1), ("a", 2), ("b", 3))
    assert taken(machine) == [1, 3]
    item = item_of(machine, 1)
    assert machine.finish(item, OSError(), 0.0) == WaitHere(0.2)
    machine.wait_here(item, 0.2, 0.0)
    assert machine.next_deadline() == 0.2
    assert taken(machine, 0.1) == []
    assert taken(machine, 0.2) == [1]
    assert item.attempts == 2
    done(machine, 1)
    assert taken(machine, 0.2) == [2]


def test_a_redelivery_takes_the_place_of_its_sequence() -> None:
    lanes = Lanes()
    for sequence in (5, 9, 7, 6):
        lanes.add(WorkItem("a", sequence))
    order = []
    while (item := lanes.peek()) is not None:
        lanes.start_first()
        order.append(item.sequence)
        if item.sequence == 5:
            lanes.add(WorkItem("a", 4))  # overtakes nobody who has begun
        lanes.leave(item)
    assert order == [5, 4, 6, 7, 9]
    assert len(lanes) == 0


def test_a_redelivery_waits_behind_the_only_event_that_has_begun() -> None:
    machine = machine_of()
    receive(machine, ("a", 5))
    assert taken(machine) == [5]
    receive(machine, ("a", 4))
    receive(machine, ("a", 6))
    assert taken(machine) == []
    done(machine, 5)
    assert taken(machine) == [4]
    done(machine, 4)
    assert taken(machine) == [6]


def test_keys_take_turns() -> None:
    machine = machine_of(concurrency=1)
    receive(machine, ("a", 1), ("a", 2), ("a", 3), ("b", 4))
    order = []
    while found := taken(machine):
        order += found
        done(machine, found[0])
    assert order == [1, 4, 2, 3]


def test_an_event_that_is_expected_late_still_comes_first() -> None:
    machine = machine_of()
    receive(machine, ("a", 5), ("b", 6))
    machine.expect("a", 3, now=0.0)
    machine.expect("b", 6, now=0.0)  # it is here already, and waits for nothing
    assert taken(machine) == [6]
    receive(machine, ("a", 3))
    assert taken(machine) == [3]
    done(machine, 3)
    assert taken(machine) == [5]


def test_an_item_begins_with_nothing_known_of_it() -> None:
    received, wrong = message("received"), ValueError("not readable")
    item = WorkItem("a", 7, received, wrong)
    assert (item.message, item.event, item.partition) == (received, wrong, None)
    assert (item.size_bytes, item.delivered, item.attempts, item.carried, item.redrives) == (0, 1, 0, 0, 0)
    assert (item.touched_at, item.heard_at, item.generation) == (0.0, 0.0, 0)
    assert not any((item.is_behind, item.is_checked, item.is_taken, item.is_timed_out))
    assert WorkItem("a", 7, tries=Tries(attempts=2)).carried == 2


def test_a_message_of_the_retry_stream_is_another_one_for_each_attempt_and_redrive() -> None:
    def identity(**how: Any) -> Any:
        return WorkItem("a", 7, tries=Tries(**how)).identity

    assert identity(attempts=1, redrives=1) == identity()
    different = [
        identity(),
        identity(source="retry", attempts=1),
        identity(source="retry", attempts=2),
        identity(source="retry", attempts=2, redrives=1),
        identity(source="redrive", attempts=2, redrives=1),
    ]
    assert len(set(different)) == len(different)
    assert identity(source="retry", attempts=1) == identity(source="retry", attempts=1)


def test_an_expected_event_holds_back_later_ones_of_its_key_only() -> None:
    machine = machine_of()
    machine.expect("a", 3, now=0.0)
    machine.expect("a", 4, now=0.0)
    receive(machine, ("a", 7), ("b", 8))
    assert taken(machine) == [8]
    receive(machine, ("a", 3))
    assert taken(machine) == [3]
    done(machine, 3)
    assert taken(machine) == []
    machine.lanes.gone(4)
    machine.lanes.gone(4)
    assert taken(machine) == [7]
    done(machine, 7)
    assert len(machine.lanes) == 1  # b
    machine.expect("c", 9, now=0.0)
    machine.lanes.gone(9)
    assert len(machine.lanes) == 1


def test_room_is_made_for_what_everything_held_waits_for() -> None:
    machine = machine_of(max_messages=2, ack_wait_s=30.0)
    machine.expect("a", 1, now=0.0)
    receive(machine, ("a", 2), ("a", 3))
    assert machine.credit().messages == 0
    assert machine.surplus(29.0) == []
    assert machine.next_deadline() == 5.0  # to say in_progress
    assert [item.sequence for item in machine.surplus(30.0)] == [3]
    assert machine.credit().messages == 1
    receive(machine, ("a", 1))
    assert taken(machine) == [1]
    assert machine.surplus(100.0) == []  # one is running
    done(machine, 1)
    assert taken(machine) == [2]
    done(machine, 2)
    receive(machine, ("a", 4))
    assert taken(machine) == []  # 3 was given back, and comes first
    assert machine.lanes.expected == [3]


def test_room_is_made_again_when_what_came_instead_was_new() -> None:
    machine = machine_of(max_messages=3, ack_wait_s=30.0)
    assert machine.surplus(0.0) == []
    machine.expect("a", 1, now=0.0)
    receive(machine, ("a", 2), ("a", 3), ("a", 4))
    assert [item.sequence for item in machine.surplus(30.0)] == [4]
    assert machine.surplus(44.9) == []
    assert [item.sequence for item in machine.surplus(45.0)] == [2, 3]


def test_a_retry_that_is_given_back_for_want_of_room_is_not_waited_for() -> None:
    """Another worker may get it: then this one would wait for it as long as it lives."""
    machine = machine_of(max_messages=2, ack_wait_s=30.0)
    machine.expect("a", 1, now=0.0)
    receive(machine, ("a", 2))
    machine.receive(WorkItem("a", 3, tries=Tries(source="retry", attempts=1)), 0.0)
    assert [item.source for item in machine.surplus(30.0)] == ["retry"]
    machine.lanes.gone(1)
    assert taken(machine) == [2]
    done(machine, 2)
    assert machine.lanes.expected == []
    assert len(machine.lanes) == 0


def test_an_event_that_is_delivered_again_belongs_to_the_reader_that_got_it_last() -> None:
    machine = machine_of()
    first, second = WorkItem("a", 1), WorkItem("a", 1, delivered=2)
    before: Any = "before the partition moved"
    after: Any = "after it came back"
    first.intake, second.intake = before, after
    assert machine.receive(first, 0.0) == "new"
    assert machine.receive(second, 1.0) == "held"
    assert first.intake == after


def test_an_in_progress_counts_from_when_it_was_sent_and_only_if_it_is_confirmed_in_time() -> None:
    machine = machine_of(ack_wait_s=30.0)
    receive(machine, ("a", 1), ("b", 2))
    on_time, late = item_of(machine, 1), item_of(machine, 2)
    machine.heard(on_time, 20.0, 29.0)
    machine.heard(on_time, 10.0, 29.0)  # an earlier one, whose answer came later
    machine.heard(late, 29.0, 30.0)
    assert not machine.has_lapsed(on_time, 49.9)
    assert machine.has_lapsed(on_time, 50.0)
    assert machine.has_lapsed(late, 30.0)


def test_after_a_pause_of_the_process_what_has_not_begun_is_let_go_and_not_said_to_be_in_progress() -> None:
    machine = machine_of(ack_wait_s=30.0, concurrency=1)
    receive(machine, ("a", 1), ("a", 2), ("b", 3))
    assert taken(machine) == [1]
    due = machine.on_time(40.0)
    assert [item.sequence for item in due.progress] == [1]  # it runs
    assert [item.sequence for item in machine.lapsed] == [2, 3]
    assert machine.lanes.expected == [2, 3]
    receive(machine, ("a", 4), now=40.0)
    done(machine, 1)
    assert taken(machine, 40.0) == []  # 2 comes again, here or elsewhere


def test_keys_that_make_no_progress_are_told_with_their_reason_and_for_how_long() -> None:
    machine = machine_of(ack_wait_s=30.0, timeout_s=10.0, concurrency=2)
    patience_s = machine.patience_s
    assert patience_s == 2 * (30.0 + 10.0) + RetryPolicy().in_lane_s
    machine.expect("a", 1, now=0.0)
    receive(machine, ("a", 2), ("a", 3), ("b", 4), ("b", 5), ("c", 6), ("d", 7))
    assert taken(machine) == [4, 6]
    done(machine, 6)
    assert machine.stalled(0.0) == []
    assert machine.stalled(patience_s - 0.1) == []
    found = machine.stalled(patience_s)
    told = [(each.item.sequence, each.reason, each.waits_for, each.seconds) for each in found]
    assert told == [(2, "expected", 1, patience_s), (4, "running", 0, patience_s), (7, "ready", 0, patience_s)]
    assert Stalled.text(found, machine.held) == (
        "3 keys of 5 held events make no progress: event 2 of key 'a' waits for event 1, which was delivered before "
        f"and is not acknowledged (for {patience_s:.0f} s); event 4 of key 'b' is in attempt 1, which has not "
        f"ended (for {patience_s:.0f} s); event 7 of key 'd' may begin, and no runner has taken it "
        f"(for {patience_s:.0f} s)"
    )
    assert Stalled.text(found * 3, 9).endswith("and 4 more")
    machine.lanes.gone(1)
    done(machine, 4)
    assert taken(machine) == [7, 2]  # 5 has to wait for a place
    assert machine.stalled(2 * patience_s) == []  # what stood still has changed
    assert machine.stalled(2 * patience_s + 1) == []


def test_what_waits_for_its_retry_or_for_a_brake_is_not_stalled() -> None:
    machine = machine_of(rate=0.001, burst=1)
    receive(machine, ("a", 1), ("b", 2))
    assert taken(machine) == [1]
    item = item_of(machine, 1)
    machine.finish(item, OSError(), 0.0)
    machine.wait_here(item, 1e6, 0.0)
    for moment in (0.0, 500.0, 1000.0):
        assert machine.stalled(moment) == []
    machine.is_stopping = True
    assert machine.stalled(1500.0) == []


def test_an_event_is_stalled_when_its_brake_is_over_and_nothing_begins() -> None:
    machine = machine_of(rate=0.1, burst=1, timeout_s=10.0)
    patience_s = machine.patience_s
    receive(machine, ("a", 1), ("b", 2), ("c", 3))
    assert taken(machine) == [1]  # the next one may begin after 10 s
    assert machine.stalled(10.0) == []
    assert taken(machine, 10.0) == [2]
    done(machine, 1)
    done(machine, 2)
    for moment in (20.0, 20.0 + patience_s - 1):
        assert machine.stalled(moment) == []
    assert [(each.item.sequence, each.reason) for each in machine.stalled(20.0 + patience_s)] == [(3, "ready")]
    machine.forget_stalls()
    assert machine.stalled(20.0 + patience_s) == []


def test_a_batch_may_take_the_time_of_all_its_events() -> None:
    alone, together = (machine_of(batch=size, timeout_s=10.0, ack_wait_s=30.0).patience_s for size in (1, 50))
    assert together - alone == 2 * 50 * 10.0
    machine = machine_of(batch=2)
    receive(machine, *((str(number), number) for number in range(1, 4)))
    assert machine.take(0.0) is not None
    assert machine.oldest_s(7.0) == 7.0
    machine.stalled(0.0)
    assert [each.reason for each in machine.stalled(machine.patience_s)] == ["running"]  # others wait for its end


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_never_more_than_concurrency_run() -> None:
    machine = machine_of(concurrency=2)
    receive(machine, *((None, sequence) for sequence in range(1, 6)))
    assert taken(machine) == [1, 2]
    assert machine.running == 2
    assert machine.finish(item_of(machine, 1), None, 0.0) == Finish()
    assert taken(machine) == []  # it is being settled
    machine.acknowledged(item_of(machine, 1))
    assert taken(machine) == [3]


def test_never_more_than_rate_and_burst_begin() -> None:
    machine = machine_of(concurrency=100, rate=10.0, burst=3)
    receive(machine, *((None, sequence) for sequence in range(1, 20)), now=100.0)
    assert taken(machine, 100.0) == [1, 2, 3]
    assert machine.next_deadline() == pytest.approx(100.1)
    assert taken(machine, 100.05) == []
    assert taken(machine, 100.1) == [4]
    assert taken(machine, 100.35) == [5, 6]
    assert taken(machine, 110.0) == [7, 8, 9]


def test_messages_and_bytes_bound_what_is_pulled() -> None:
    machine = machine_of(max_messages=3, max_bytes=25)
    assert machine.credit() == Credit(3, 25)
    receive(machine, (None, 1), (None, 2))
    assert machine.credit() == Credit(1, 5)
    receive(machine, (None, 3))
    assert machine.credit() == Credit(0, 0)
    taken(machine)
    done(machine, 1)
    assert machine.credit() == Credit(1, 5)
    machine.is_stopping = True
    assert machine.credit() == Credit(0, 0)
    assert machine.take(0.0) is None
    machine = machine_of(max_messages=9, max_bytes=20)
    receive(machine, (None, 1), (None, 2))
    assert (machine.held, machine.held_bytes, machine.credit()) == (2, 20, Credit(0, 0))
    usual = HandlerLimits(concurrency=16, timeout_s=30.0, ack_wait_s=30.0, max_messages=1024, max_bytes=64 << 20)
    assert HandlerLimits() == usual


def test_an_event_is_not_held_twice() -> None:
    machine = machine_of()
    receive(machine, ("a", 1))
    second = message("second")
    again = WorkItem("a", 1, second, delivered=2)
    assert machine.receive(again, 1.0) == "held"
    item = item_of(machine, 1)
    assert (item.message, item.delivered) == (second, 2)
    taken(machine)
    done(machine, 1)
    assert machine.receive(WorkItem("a", 1, delivered=3), 2.0) == "done"
    assert machine.was_acknowledged(again)
    assert not machine.was_acknowledged(WorkItem("a", 2))
    assert machine.receive(WorkItem("a", 1, tries=Tries(source="retry", attempts=1)), 2.0) == "new"


def test_only_the_last_settled_events_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetspark.app.handlers.machine.REMEMBERED", 2)
    machine = machine_of()
    for sequence in (1, 2, 3):
        receive(machine, (None, sequence))
        taken(machine)
        done(machine, sequence)
    assert machine.receive(WorkItem(None, 3, delivered=2), 0.0) == "done"
    assert machine.receive(WorkItem(None, 2, delivered=2), 0.0) == "done"
    assert machine.receive(WorkItem(None, 1, delivered=2), 0.0) == "new"
    # One that comes for the first time is another: the stream was deleted, and counts from 1 again.
    assert machine.receive(WorkItem(None, 2, delivered=1), 0.0) == "new"


def test_an_event_that_is_released_or_waits_does_not_run() -> None:
    machine = machine_of()
    receive(machine, (None, 1), (None, 2), (None, 3))
    assert taken(machine) == [1, 2, 3]
    first, second, third = machine.items
    machine.release(first)
    assert (machine.running, machine.held, first.is_taken) == (2, 2, False)
    machine.wait_here(second, 5.0, 0.0)
    assert (machine.running, machine.held, second.is_taken) == (1, 2, False)
    machine.release(second)
    assert (machine.running, machine.held) == (1, 1)
    machine.acknowledged(third)
    assert (machine.running, machine.held, third.is_taken) == (0, 0, False)
    assert machine.on_time(1000.0).timed_out == []  # there is nothing to cancel
    assert machine.next_deadline() is None


def test_those_that_wait_keep_their_order_when_one_of_them_is_released() -> None:
    machine = machine_of(ack_wait_s=1000.0)
    receive(machine, *((None, sequence) for sequence in range(1, 8)))
    taken(machine)
    items = {item.sequence: item for item in machine.items}
    for sequence, seconds in ((1, 1.0), (2, 5.0), (3, 2.0), (4, 6.0), (5, 7.0), (6, 3.0), (7, 4.0)):
        machine.wait_here(items[sequence], seconds, 0.0)
    assert machine.next_deadline() == 1.0
    machine.release(items[1])
    assert machine.next_deadline() == 2.0
    assert machine.take(2.5) is items[3]
    machine.release(items[6])
    assert taken(machine, 10.0) == [7, 2, 4, 5]


def test_what_is_due_can_be_released() -> None:
    machine = machine_of(concurrency=1)
    receive(machine, (None, 1), (None, 2))
    first, second = machine.items
    for item in (first, second):
        assert machine.take(0.0) is item
        machine.wait_here(item, 1.0, 0.0)
    assert machine.take(2.0) is first
    machine.release(second)  # it is due, and there was no room to run it
    machine.acknowledged(first)
    assert machine.take(2.0) is None
    assert (machine.held, machine.running) == (0, 0)


@pytest.mark.parametrize(
    ("how", "is_expected"),
    [({"key": "a"}, True), ({"key": None}, False), ({"key": "a", "tries": Tries("retry", 1)}, False)],
)
@pytest.mark.parametrize("waits", [False, True])
def test_an_item_that_may_be_with_another_worker_is_let_go(how: dict[str, Any], is_expected: bool, waits: bool) -> None:
    machine = machine_of(ack_wait_s=30.0)
    item = WorkItem(sequence=1, size_bytes=10, **how)
    machine.receive(item, 0.0)
    if waits:
        assert machine.take(0.0) is item
        machine.wait_here(item, 1.0, 0.0)
    assert not machine.has_lapsed(item, 29.9)
    assert machine.has_lapsed(item, 30.0)
    assert machine.take(30.0) is None
    assert machine.lapsed == [item]
    assert (machine.held, machine.held_bytes, machine.running) == (0, 0, 0)
    assert machine.lanes.expected == ([1] if is_expected else [])
    receive(machine, ("a", 2), now=31.0)
    assert taken(machine, 31.0) == ([] if is_expected else [2])


def test_an_item_that_was_delivered_again_is_ours_again() -> None:
    machine = machine_of(ack_wait_s=30.0)
    receive(machine, ("a", 1))
    assert machine.receive(WorkItem("a", 1, delivered=2), 20.0) == "held"
    assert machine.on_time(25.0).progress == []
    assert taken(machine, 45.0) == [1]


# ---- time -----------------------------------------------------------------------------------------------------------


def test_what_is_held_for_long_is_in_progress_and_what_runs_for_long_is_cancelled() -> None:
    machine = machine_of(ack_wait_s=30.0, timeout_s=12.0)
    receive(machine, ("a", 1), ("a", 2))
    assert taken(machine) == [1]
    assert machine.next_deadline() == 5.0
    assert machine.on_time(5.0).progress == []
    assert machine.next_deadline() == 10.0
    due = machine.on_time(10.0)
    assert [item.sequence for item in due.progress] == [1, 2]
    assert due.timed_out == []
    due = machine.on_time(12.0)
    assert [item.sequence for item in due.timed_out] == [1]
    assert item_of(machine, 1).is_timed_out
    assert due.progress == []
    assert machine.on_time(12.5).timed_out == []
    assert machine.next_deadline() == 15.0
    assert machine.on_time(15.0).progress == []  # the server was told at 10
    assert len(machine.on_time(20.0).progress) == 2


def test_the_first_that_is_held_sets_the_time_to_look_at_all() -> None:
    machine = machine_of(ack_wait_s=30.0)
    receive(machine, ("a", 1))
    receive(machine, ("a", 2), now=4.0)
    assert machine.next_deadline() == 5.0


def test_what_has_ended_is_not_cancelled() -> None:
    machine = machine_of(ack_wait_s=300.0, timeout_s=2.0)
    receive(machine, (None, 1), (None, 2), now=0.0)
    assert taken(machine) == [1, 2]
    assert machine.next_deadline() == 2.0
    first, second = machine.items
    assert machine.on_time(2.0).timed_out == [first, second]
    machine.restart_clock(first, 3.0)
    machine.restart_clock(second, 3.0)
    assert not any((first.is_timed_out, second.is_timed_out))
    machine.finish(first, None, 4.0)
    machine.dismiss(second)
    assert machine.on_time(9.0).timed_out == []
    machine.restart_clock(first, 10.0)
    assert machine.on_time(12.0).timed_out == [first]
    machine.finish(first, None, 12.0)
    assert not first.is_timed_out


def test_a_clock_that_begins_again_does_not_hide_one_that_ends_before() -> None:
    machine = machine_of(ack_wait_s=300.0, timeout_s=10.0)
    receive(machine, (None, 1))
    assert taken(machine, 0.0) == [1]
    receive(machine, (None, 2))
    assert taken(machine, 1.0) == [2]
    machine.restart_clock(item_of(machine, 1), 5.0)
    assert machine.next_deadline() == 11.0
    assert [item.sequence for item in machine.on_time(11.0).timed_out] == [2]


def test_nothing_is_due_that_could_not_begin() -> None:
    machine = machine_of(ack_wait_s=300.0, timeout_s=100.0, concurrency=1)
    receive(machine, (None, 1), (None, 2))
    item = machine.take(0.0)
    assert item is not None
    machine.wait_here(item, 3.0, 0.0)
    assert machine.next_deadline() == 3.0
    assert taken(machine, 1.0) == [2]
    assert machine.next_deadline() == 50.0  # no room: to say in_progress is next
    machine.acknowledged(item_of(machine, 2))
    assert machine.next_deadline() == 3.0
    machine.is_stopping = True
    assert machine.next_deadline() == 50.0


def test_the_time_of_a_look_up_is_not_the_handlers() -> None:
    machine = machine_of(timeout_s=10.0)
    receive(machine, ("a", 1))
    taken(machine)
    machine.restart_clock(item_of(machine, 1), 4.0)
    assert machine.on_time(13.0).timed_out == []
    assert len(machine.on_time(14.0).timed_out) == 1
    machine.restart_clock(item_of(machine, 1), 20.0)  # run once more, after a batch that took too long
    assert len(machine.on_time(30.0).timed_out) == 1


def test_the_breaker_opens_after_failures_in_a_row_and_tries_one() -> None:
    machine = machine_of(breaker=Breaker(failures=2, open_s=10.0), concurrency=5)
    receive(machine, *((None, sequence) for sequence in range(1, 8)))
    assert taken(machine) == [1, 2, 3, 4, 5]
    for sequence, error in ((1, OSError()), (2, Reject("bad")), (3, OSError())):
        item = item_of(machine, sequence)
        decided = machine.finish(item, error, 1.0)
        if isinstance(decided, WaitHere):
            machine.wait_here(item, decided.seconds, 1.0)
        else:
            assert decided == GiveUp(is_transient=False)
            machine.acknowledged(item)
    assert machine.is_open
    assert taken(machine, 5.0) == []
    assert machine.next_deadline() == 5.0
    assert taken(machine, 11.0) == [1]  # the trial
    assert taken(machine, 11.0) == []
    done(machine, 1, 11.0)
    assert not bool(machine.is_open)
    assert taken(machine, 11.0) == [3, 6, 7]


@pytest.mark.parametrize(
    ("error", "begins"),
    [(None, [3, 4]), (Skip("nothing"), [3, 4]), (Reject("the event's own fault"), [3]), (OSError(), [])],
)
def test_a_trial_closes_the_breaker_or_lets_another_try_or_opens_it_again(
    error: Exception | None, begins: list[int]
) -> None:
    machine = machine_of(breaker=Breaker(failures=1, open_s=10.0), ack_wait_s=300.0)
    receive(machine, *((None, sequence) for sequence in (1, 2, 3, 4)))
    failed = machine.take(0.0)
    assert failed is not None
    machine.finish(failed, OSError(), 0.0)
    machine.acknowledged(failed)
    assert taken(machine, 5.0) == []
    assert machine.next_deadline() == 10.0
    trial = machine.take(10.0)
    assert trial is not None
    assert taken(machine, 10.0) == []
    machine.finish(trial, error, 10.0)
    machine.acknowledged(trial)
    assert taken(machine, 10.0) == begins


def test_the_breaker_costs_no_tokens() -> None:
    machine = machine_of(breaker=Breaker(failures=1, open_s=10.0), rate=0.01, burst=3, ack_wait_s=300.0)
    receive(machine, *((None, sequence) for sequence in range(1, 6)))
    failed = machine.take(0.0)
    assert failed is not None
    machine.finish(failed, OSError(), 0.0)
    machine.acknowledged(failed)
    for now in (1.0, 2.0, 3.0, 4.0):
        machine._begin_at = 0.0
        assert machine.take(now) is None
    trial = machine.take(10.0)
    assert trial is not None
    machine.finish(trial, None, 10.0)
    assert taken(machine, 10.0) == [3]  # three in all


def test_a_token_that_was_waited_for_is_not_waited_for_again() -> None:
    machine = machine_of(rate=10.0, burst=1, concurrency=1, ack_wait_s=300.0, timeout_s=200.0)
    receive(machine, (None, 1), (None, 2), (None, 3), now=100.0)
    assert taken(machine, 100.0) == [1]
    done(machine, 1, 100.0)
    assert taken(machine, 100.0) == []
    assert machine.next_deadline() == pytest.approx(100.1)
    assert taken(machine, 100.1) == [2]
    done(machine, 2, 100.1)
    assert machine.next_deadline() == 150.0  # something may begin, and nobody knows that it may not


def test_events_of_a_parked_key_are_put_behind_it_and_earlier_ones_are_not() -> None:
    machine = machine_of()
    machine.park("a", 5)
    receive(machine, ("a", 4), ("a", 5), ("a", 6))
    item = machine.take(0.0)
    assert item is not None
    assert not item.is_behind
    assert not is_plain(machine, item)
    done(machine, 4)
    item = machine.take(0.0)
    assert item is not None
    assert not item.is_behind
    done(machine, 5)
    item = machine.take(0.0)
    assert item is not None
    assert item.is_behind
    assert item.attempts == 0
    machine.dismiss(item)
    machine.acknowledged(item)
    machine.unpark("a")
    machine.unpark("a")
    receive(machine, ("a", 7))
    item = machine.take(0.0)
    assert item is not None
    assert is_plain(machine, item)


def test_an_attempt_that_has_failed_has_no_time_out() -> None:
    machine = machine_of(timeout_s=5.0)
    receive(machine, ("a", 1), ("b", 2))
    early, late = machine.take(0.0), machine.take(0.0)
    assert early is not None
    assert late is not None
    machine.finish(early, OSError(), 1.0)
    assert machine.on_time(5.0).timed_out == [late]
    assert late.is_timed_out
    machine.finish(late, OSError(), 5.0)
    assert not late.is_timed_out


def test_an_acknowledged_event_of_the_stream_is_known_by_its_sequence() -> None:
    machine = machine_of()
    receive(machine, ("a", 7))
    taken(machine)
    done(machine, 7)
    assert machine.acknowledged_before == {7}


def test_stalls_are_measured_from_when_they_were_first_seen() -> None:
    machine = machine_of(concurrency=1)
    receive(machine, ("a", 1), now=10.0)
    assert machine.oldest_s(15.0) == 5.0
    assert machine.stalled(20.0) == []
    [stalled] = machine.stalled(20.0 + machine.patience_s)
    assert stalled.seconds == machine.patience_s
    assert "more" not in Stalled.text([stalled] * NAMED_STALLS, 5)


# ---- dead letters ---------------------------------------------------------------------------------------------------


def failure() -> Exception:
    try:
        raise ValueError("no such card\r\n  é")
    except ValueError as error:
        return error


def letter_of(**changes: Any) -> StoredEvent:
    fields: dict[str, Any] = {
        "handler": "billing",
        "key": " a b\n",
        "origin": Origin("ORDERS", 7, 1_700_000_000_000_001),
        "subject": "orders.o-1.paid",
        "data": b"{}",
        "headers": Headers({"Nats-Msg-Id": "evt-1", "traceparent": "00-a", "many": ["x", "y"]}),
        "attempts": 3,
        "status": "open",
        "cause": FailureCause.of(failure(), is_transient=False),
        "redrives": 2,
        "failed": "2026-01-01T00:00:00Z",
    }
    return StoredEvent(**(fields | changes))


@pytest.mark.parametrize("changes", [{}, {"key": None, "cause": None, "status": "behind", "behind": 3}, {"key": ""}])
def test_a_dead_letter_is_read_as_it_was_written(changes: dict[str, Any]) -> None:
    dead_letter = letter_of(**changes)
    headers = decode(encode(dead_letter.to_headers()))
    assert not any(name.lower().startswith("nats-") for name in headers)
    assert StoredEvent.of(headers, b"{}") == dead_letter


@pytest.mark.parametrize(
    "pairs",
    [
        [("Größe", "1"), ("Nats-Msg-Id", "x")],
        [("a b", "1"), ("A", "2"), ("a b", "3")],
        [("A", "1\r2"), ("B", "3\n4"), ("C", "\udcff")],
        [("Jetspark-Dlq-Behind", "x"), ("jetspark-dlq-status", "closed"), ("Jetspark-Dlq-Headers", "A: b")],
        [("Jetspark-Origin-Nats-TTL", "1s"), ("NATS-ttl", "2s")],
    ],
    ids=lambda pairs: pairs[0][0],
)
def test_a_dead_letter_has_the_headers_of_its_event_whatever_they_are(pairs: list[tuple[str, str]]) -> None:
    dead_letter = letter_of(headers=restored(pairs))
    headers = decode(encode(dead_letter.to_headers()))
    assert not any(name.lower().startswith("nats-") for name in headers)
    assert StoredEvent.of(headers, b"{}") == dead_letter


def test_what_is_no_dead_letter_is_told_so() -> None:
    with pytest.raises(ProtocolError, match="not a dead letter"):
        StoredEvent.of(Headers(), b"")
    headers = letter_of().to_headers()
    headers["Jetspark-Dlq-Status"] = "lost"
    with pytest.raises(ProtocolError, match="expected open, behind or closed"):
        StoredEvent.of(headers, b"")
    for name, value in (("Behind", "x"), ("Attempts", "many"), ("Reason", "\\x"), ("Key", "\\")):
        headers = letter_of().to_headers()
        headers[f"Jetspark-Dlq-{name}"] = value
        with pytest.raises(ProtocolError, match="not a dead letter"):
            StoredEvent.of(headers, b"")


def test_a_fingerprint_is_that_of_the_place_and_the_type() -> None:
    first, second = FailureCause.of(failure(), is_transient=True), FailureCause.of(failure(), is_transient=False)
    assert first.fingerprint == second.fingerprint != FailureCause.of(ValueError("x"), is_transient=True).fingerprint
    assert first.error == "ValueError"
    assert FailureCause.from_dict(first.to_dict()) == first
    assert FailureCause.of(None, is_transient=True) == FailureCause.of_crash()


def test_a_dead_letter_has_a_subject_of_its_own() -> None:
    origin = Origin("ORDERS", 7, 12)
    assert dead_letter_subject("orders", "billing", "o.1", origin) == "dlq.orders.billing.o=2E1.ORDERS.7.12"
    assert dead_letter_subject("orders", "billing", None, origin) != dead_letter_subject(
        "orders", "billing", "", origin
    )
    assert dead_letter_filter("orders") == "dlq.orders.*.*.*.*.*"
    assert dead_letter_filter("orders", "billing", "o.1") == "dlq.orders.billing.o=2E1.*.*.*"
    for text in ("", " x", "a\r\nb", "é\\n", "\udc80"):
        assert unescape_line(escape_line(text)) == text
