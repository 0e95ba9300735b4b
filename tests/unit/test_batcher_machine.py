from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspark.batcher.machine import BatchMachine, Flush, Ticket
from jetspark.batcher.reports import WriteReport
from jetspark.errors import BatcherBroken, BatcherClosed, ConfigError, DroppedOnShutdown, FlushTimeout


def machine(**options: Any) -> BatchMachine[str]:
    return BatchMachine[str](**{"max_batch_size": 3, "max_batch_delay": 0.010, "queue_depth": 4, **options})


def nothing() -> None:
    pass


def busy(**options: Any) -> tuple[BatchMachine[str], Flush[str]]:
    """One whose only slot is taken."""
    it = machine(**options)
    flush = None
    for item in "abc"[: options.get("max_batch_size", 3)]:
        flush = it.add(item, now=100.0)
    assert flush is not None
    assert it.poll(100.0) is None
    return it, flush


def collected() -> tuple[list[BaseException | None], Callable[[BaseException | None], None]]:
    told: list[BaseException | None] = []
    return told, told.append


# ---- triggers --------------------------------------------------------------------------------------------------------


def test_delay_closes_a_batch_that_never_fills() -> None:
    it = machine()
    assert it.add("a", now=100.0) is None
    assert it.next_deadline() == 100.010
    assert it.poll(now=100.009) is None
    assert it.poll(now=100.010) == Flush(["a"], reason="time")
    assert it.next_deadline() == 105.010  # the write's own


def test_the_delay_begins_with_the_first_item_of_a_batch() -> None:
    it = machine()
    it.add("a", now=100.0)
    it.add("b", now=100.009)
    assert it.poll(now=100.010) == Flush(["a", "b"], reason="time")


def test_size_closes_a_batch_with_its_last_item() -> None:
    it = machine()
    assert [it.add(item, now=100.0) for item in "ab"] == [None, None]
    assert it.add("c", now=100.0) == Flush(["a", "b", "c"], reason="size")


def test_a_batch_that_is_full_and_late_goes_for_its_size() -> None:
    it, flush = busy()
    for item in "defg":
        it.add(item, now=100.0)
    it.finish(flush, None, 100.0)
    assert it.poll(now=200.0) == Flush(["d", "e", "f"], reason="size")


def test_bytes_close_a_batch_before_the_item_that_does_not_fit() -> None:
    it = machine(max_batch_bytes=10)
    assert it.add("aaaa", now=100.0) is None
    assert it.add("bbbbb", now=100.0) is None
    assert it.add("cc", now=100.0) == Flush(["aaaa", "bbbbb"], reason="bytes")
    assert it.stats().queue_depth == 1


def test_bytes_close_a_batch_that_is_exactly_full() -> None:
    it = machine(max_batch_bytes=4)
    assert it.add("aaaa", now=100.0) == Flush(["aaaa"], reason="bytes")


def test_an_item_larger_than_a_batch_is_refused_and_its_place_is_free_again() -> None:
    it, flush = busy(max_batch_bytes=10, queue_depth=1)
    ticket = it.ask(1, nothing)
    it.redeem(ticket)
    with pytest.raises(ConfigError, match=r"an item of 11 bytes: expected at most max_batch_bytes=10"):
        it.add("x" * 11, now=100.0)
    assert it.room == 1
    assert it.enqueued == 3
    it.finish(flush, None, 100.0)
    assert it.poll(now=100.0) is None


def test_many_items_are_refused_together_when_one_is_too_large() -> None:
    it = machine(max_batch_bytes=10)
    it.redeem(it.ask(2, nothing))
    with pytest.raises(ConfigError):
        it.add_many(["a", "x" * 11], now=100.0)
    assert it.enqueued == 0
    assert it.room == 3
    it.add("b", now=100.0)
    assert it.poll(now=101.0) == Flush(["b"], reason="time")


def test_a_size_that_is_no_size_is_refused() -> None:
    it = BatchMachine[str](max_batch_size=3, max_batch_delay=1, max_batch_bytes=10, size_of=lambda item: -1)
    with pytest.raises(ConfigError, match="-1 bytes"):
        it.add("a", now=100.0)


# ---- places ----------------------------------------------------------------------------------------------------------


def test_while_the_sink_is_busy_the_queue_takes_its_depth_and_no_more() -> None:
    it, _ = busy()
    assert it.room == 4
    for item in "defg":
        it.add(item, now=100.0)
    assert it.room == 0
    assert not it.ask(1, nothing).is_granted


def test_a_batch_larger_than_the_queue_still_fills() -> None:
    it = machine(max_batch_size=10, queue_depth=1)
    assert [it.add(item, now=100.0) for item in "abcdefghi"] == [None] * 9
    assert it.add("j", now=100.0) == Flush(list("abcdefghij"), reason="size")
    assert it.room == 1


def test_whoever_waits_is_served_in_order_and_not_overtaken_by_smaller_requests() -> None:
    it, flush = busy()
    for item in "defg":
        it.add(item, now=100.0)
    woken: list[str] = []
    large = it.ask(4, lambda: woken.append("large"))
    small = it.ask(1, lambda: woken.append("small"))
    it.finish(flush, None, 100.0)
    flush = it.poll(now=100.0) or flush  # d, e, f go, and g waits: three places, but four are wanted first
    assert it.poll(now=100.0) is None
    assert (large.is_granted, small.is_granted, it.room) == (False, False, 0)
    it.finish(flush, None, 100.0)
    flush = it.poll(now=200.0) or flush  # g
    assert it.poll(now=200.0) is None
    assert woken == ["large"]
    it.redeem(large)
    assert it.add_many(list("hijk"), now=200.0) is None
    it.finish(flush, None, 100.0)
    assert it.poll(now=200.0) == Flush(list("hij"), reason="size")
    assert it.poll(now=200.0) is None
    assert woken == ["large", "small"]


def test_a_granted_place_is_kept_until_it_is_used() -> None:
    it, _ = busy(queue_depth=1)
    ticket = it.ask(1, nothing)
    assert ticket.is_granted
    assert it.room == 0
    assert not it.ask(1, nothing).is_granted
    it.redeem(ticket)
    assert it.room == 1
    it.add("d", now=100.0)
    assert it.room == 0


def test_a_place_given_back_goes_to_the_next() -> None:
    it, _ = busy(queue_depth=1)
    first, woken = it.ask(1, nothing), []
    second = it.ask(1, lambda: woken.append("second"))
    it.give_back(first)
    it.give_back(first)
    assert second.is_granted
    assert woken == ["second"]


def test_a_request_given_back_before_it_was_granted_is_forgotten() -> None:
    it, flush = busy(queue_depth=1)
    it.add("d", now=100.0)
    ticket = it.ask(1, nothing)
    it.give_back(ticket)
    it.finish(flush, None, 100.0)
    assert it.poll(now=100.0) is None
    assert not ticket.is_granted
    assert it.room == 2


def test_more_than_the_queue_can_ever_hold_is_refused_at_once() -> None:
    it = machine()
    with pytest.raises(ConfigError, match=r"5 items at once: expected at most queue_depth=4"):
        it.ask(5, nothing)


def test_many_items_go_in_as_many_batches_as_there_are_slots() -> None:
    it = machine(slots=2, queue_depth=8)
    it.redeem(it.ask(8, nothing))
    assert it.add_many(list("abcdefgh"), now=100.0) == Flush(list("abc"), reason="size")
    assert it.poll(now=100.0) == Flush(list("def"), reason="size")
    assert it.poll(now=100.0) is None
    assert it.stats().queue_depth == 2


# ---- writes ----------------------------------------------------------------------------------------------------------


def test_every_item_is_counted_once_however_its_write_ends() -> None:
    it, flush = busy()
    assert it.stats().in_flight == it.held == 3
    it.finish(flush, None, 100.0)
    assert (it.stats().flushed_ok, it.stats().in_flight, it.held) == (3, 0, 0)
    assert it.poll(now=100.0) is None
    it.add("d", now=100.0)
    failed = it.poll(now=200.0)
    assert failed is not None
    failed.items.clear()  # the list is the sink's
    it.finish(failed, OSError(), 100.0)
    assert (it.stats().flushed_fail, it.stats().in_flight) == (1, 0)


def test_a_batch_is_a_list_of_its_own() -> None:
    it, flush = busy()
    it.add("d", now=100.0)
    assert flush.items == ["a", "b", "c"]
    flush.items.clear()
    it.finish(flush, None, 100.0)
    assert it.poll(now=200.0) == Flush(["d"], reason="time")


def test_two_equal_writes_are_told_apart() -> None:
    it = machine(max_batch_size=1, slots=2)
    one, other = it.add("a", now=100.0), it.add("a", now=100.0)
    assert one is not None
    assert other is not None
    it.finish(other, OSError(), 100.0)
    assert it.overdue(now=105.0) == [one]


def test_a_write_that_takes_too_long_fails_at_once_and_keeps_its_slot() -> None:
    it, flush = busy(flush_timeout=5.0)
    assert it.next_deadline() == 105.0
    assert it.overdue(now=104.9) == []
    assert it.overdue(now=105.0) == [flush]
    assert it.overdue(now=106.0) == []
    assert (it.stats().flushed_fail, it.stats().in_flight) == (3, 0)
    it.add("d", now=106.0)
    assert it.poll(now=107.0) is None
    it.finish(flush, None, 100.0)
    assert (it.stats().flushed_fail, it.stats().flushed_ok, it.stats().late_ok) == (3, 0, 3)
    assert it.poll(now=107.0) == Flush(["d"], reason="time")


def test_an_ack_is_told_once_how_the_write_with_its_item_ended() -> None:
    it = machine()
    (first, first_ack), (second, second_ack) = collected(), collected()
    it.add("a", 100.0, first_ack)
    it.add("b", 100.0)
    flush = it.add("c", 100.0)
    it.add("d", 100.0, second_ack)
    assert flush is not None
    it.finish(flush, None, 100.0)
    assert (first, second) == ([None], [])
    late = it.poll(now=101.0)
    assert late is not None
    it.overdue(now=200.0)
    it.finish(late, None, 100.0)
    assert [type(error) for error in second] == [FlushTimeout]


# ---- fences ----------------------------------------------------------------------------------------------------------


def test_a_fence_makes_what_waits_go_and_is_done_when_the_sink_is() -> None:
    it = machine()
    it.add("a", now=100.0)
    woken: list[str] = []
    fence = it.fence(lambda: woken.append("done"))
    flush = it.poll(now=100.0)
    assert flush == Flush(["a"], reason="manual")
    assert not fence.is_done
    it.finish(flush, None, 100.0)
    assert (fence.is_done, fence.ok, fence.failed, woken) == (True, 1, 0, ["done"])


def test_a_fence_before_an_empty_queue_is_done() -> None:
    fence = machine().fence(nothing)
    assert fence.is_done


def test_items_that_come_after_a_fence_do_not_hold_it_up() -> None:
    it, flush = busy()
    fence = it.fence(nothing)
    it.add("d", now=100.0)
    it.finish(flush, OSError(), 100.0)
    assert (fence.is_done, fence.ok, fence.failed) == (True, 0, 3)
    assert it.poll(now=100.0) is None


def test_a_fence_that_nobody_waits_for_is_forgotten() -> None:
    it, flush = busy()
    woken: list[str] = []
    fence = it.fence(lambda: woken.append("done"))
    it.forget(fence)
    it.forget(fence)
    it.finish(flush, None, 100.0)
    assert woken == []


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_closing_makes_what_waits_go_and_refuses_the_rest() -> None:
    it = machine()
    it.add("a", now=100.0)
    it.close()
    assert it.room == 0
    with pytest.raises(BatcherClosed):
        it.ask(1, nothing)
    flush = it.poll(now=100.0)
    assert flush == Flush(["a"], reason="shutdown")
    assert not it.is_drained
    it.finish(flush, None, 100.0)
    assert it.is_drained


def test_closing_turns_away_those_who_wait_and_those_who_were_just_let_in() -> None:
    it, _ = busy(queue_depth=1)
    granted, woken = it.ask(1, nothing), []
    waiting = it.ask(1, lambda: woken.append("waiting"))
    it.close()
    assert woken == ["waiting"]
    for ticket in (granted, waiting):
        with pytest.raises(BatcherClosed):
            it.redeem(ticket)
    assert it.enqueued == 3


def test_what_is_written_off_is_counted_once_and_written_all_the_same() -> None:
    it, flush = busy()
    (of_running, running_ack), (of_waiting, waiting_ack) = collected(), collected()
    flush.acks = [running_ack]
    it.add("d", 100.0, waiting_ack)
    it.close()
    assert it.write_off() == 4
    stats = it.stats()
    assert (stats.dropped_on_shutdown, stats.in_flight, it.held) == (4, 0, 0)
    assert [str(error) for error in (*of_running, *of_waiting)] == [
        "batcher 'batcher': the time of the shutdown was over while the item was being written",
        "batcher 'batcher': the time of the shutdown was over while the item was waiting",
    ]
    assert {type(error) for error in (*of_running, *of_waiting)} == {DroppedOnShutdown}
    it.finish(flush, None, 100.0)
    rest = it.poll(now=100.0)
    assert rest == Flush(["d"], reason="shutdown")
    it.finish(rest, OSError(), 100.0)
    assert it.is_drained
    stats = it.stats()
    assert (stats.enqueued, stats.dropped_on_shutdown, stats.flushed_ok, stats.flushed_fail) == (4, 4, 0, 0)
    assert stats.late_ok == 3
    assert it.write_off() == 0


def test_a_write_begun_after_the_time_was_over_still_has_its_own_time() -> None:
    it, flush = busy(flush_timeout=5.0)
    it.close()
    it.write_off()
    assert it.next_deadline() == 105.0
    assert it.overdue(now=105.0) == [flush]
    assert it.stats().flushed_fail == 0


def test_a_broken_machine_writes_nothing_and_says_why() -> None:
    it = machine()
    told, ack = collected()
    it.add("a", 100.0, ack)
    woken: list[str] = []
    it.fence(lambda: woken.append("fence"))
    cause = ZeroDivisionError()
    it.fail(cause)
    it.fail(OSError())
    assert it.poll(now=200.0) is None
    assert it.room == 0
    with pytest.raises(BatcherBroken) as caught:
        it.check_open()
    assert caught.value.__cause__ is cause
    assert [type(error) for error in told] == [BatcherBroken]
    assert woken == ["fence"]
    assert it.stats().in_flight == it.held == 1


def test_a_ticket_knows_nothing_at_first() -> None:
    ticket = Ticket(2, nothing)
    assert (ticket.count, ticket.is_granted, ticket.is_over) == (2, False, False)


# ---- what there is to tell -------------------------------------------------------------------------------------------


def test_each_write_is_reported_once_with_its_time_and_its_error() -> None:
    it, flush = busy()
    it.finish(flush, None, 102.5)
    assert it.reports == [WriteReport(3, 2.5, None, is_settling=True)]
    it.reports.clear()
    it.add("d", now=110.0)
    late = it.poll(now=111.0)
    assert late is not None
    it.overdue(now=116.0)
    [report] = it.reports
    assert (report.items, report.seconds, report.is_settling) == (1, 5.0, True)
    assert isinstance(report.error, FlushTimeout)
    it.finish(late, OSError(), 120.0)
    assert len(it.reports) == 1


def test_what_fails_after_it_was_written_off_is_reported_and_does_not_count_again() -> None:
    it, flush = busy()
    it.close()
    it.write_off()
    error = OSError()
    it.finish(flush, error, 103.0)
    assert it.reports == [WriteReport(3, 3.0, error, is_settling=False)]


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 8), st.integers(1, 3), st.lists(st.booleans(), max_size=40))
def test_appending_is_adding_without_a_look_at_the_clock(size: int, depth: int, slots: int, ends: list[bool]) -> None:
    """``append`` takes an item or leaves it to ``add``; either way what comes out is the same."""
    options: dict[str, Any] = {"max_batch_size": size, "max_batch_delay": 1.0, "queue_depth": depth, "slots": slots}
    appending, adding = BatchMachine[int](**options), BatchMachine[int](**options)
    for number, ends_one in enumerate(ends):
        now = number / 4
        if adding.room > 0:
            expected = adding.add(number, now)
            found = None if appending.append(number) else appending.add(number, now)
            assert (found and found.items) == (expected and expected.items)
        for machine in (appending, adding):
            if ends_one and machine._running:
                machine.finish(next(iter(machine._running.values())), None, now)
        assert (appending.poll(now) is None) == (adding.poll(now) is None)
        assert appending.stats() == adding.stats()
        assert (appending.room, appending.next_deadline()) == (adding.room, adding.next_deadline())
