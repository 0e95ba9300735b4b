from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspark.batcher.config import REASONS, BatcherConfig
from jetspark.batcher.dead_letters import DeadLetter
from jetspark.batcher.machine import BatchMachine, Flush, Ticket, no_room, not_drained, not_flushed
from jetspark.batcher.reports import WriteReport
from jetspark.errors import (
    BatcherBroken,
    BatcherClosed,
    BatcherTimeout,
    ConfigError,
    DroppedOnShutdown,
    FlushTimeout,
)


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
        "batcher 'batcher': the shutdown timed out while the item was being written",
        "batcher 'batcher': the shutdown timed out while the item was waiting",
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
    assert it.reports == [WriteReport(3, 2.5, None, is_counted=True)]
    it.reports.clear()
    it.add("d", now=110.0)
    late = it.poll(now=111.0)
    assert late is not None
    it.overdue(now=116.0)
    [report] = it.reports
    assert (report.items, report.seconds, report.is_counted) == (1, 5.0, True)
    assert isinstance(report.error, FlushTimeout)
    it.finish(late, OSError(), 120.0)
    assert len(it.reports) == 1


def test_what_fails_after_it_was_written_off_is_reported_and_does_not_count_again() -> None:
    it, flush = busy()
    it.close()
    it.write_off()
    error = OSError()
    it.finish(flush, error, 103.0)
    assert it.reports == [WriteReport(3, 3.0, error, is_counted=False)]


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


# ---- accounts --------------------------------------------------------------------------------------------------------


class Sink:
    async def write(self, items: Sequence[str], /) -> None: ...


def test_a_machine_is_what_its_configuration_says() -> None:
    config = BatcherConfig(
        sink=Sink(),
        max_batch_size=2,
        max_batch_delay=0.5,
        queue_depth=3,
        flush_timeout=7.0,
        max_batch_bytes=10,
        size_of=lambda item: 5,
        max_concurrent_flushes=2,
        name="mine",
    )
    it = BatchMachine[str].of(config)
    assert (it.name, it.queue_depth, it.flush_timeout, it.room) == ("mine", 3, 7.0, 2)
    it.add("a", now=100.0)
    assert it.next_deadline() == 100.5
    assert it.add("b", now=100.0) is not None
    it.add("c", now=100.0)
    assert it.add("d", now=100.0) is not None  # the second slot
    assert BatchMachine[str](max_batch_size=1, max_batch_delay=1.0).queue_depth == 1024


def test_what_comes_in_is_counted_however_it_comes() -> None:
    it = machine(slots=2)
    assert it.stats().flushes == dict.fromkeys(REASONS, 0)
    it.redeem(it.ask(4, nothing))
    assert it.add_many(list("abcd"), now=100.0) is not None
    it.reject()
    it.reject()
    stats = it.stats()
    assert (stats.enqueued, stats.in_flight, stats.queue_depth, stats.rejected) == (4, 4, 1, 2)
    assert stats.flushes == {**dict.fromkeys(REASONS, 0), "size": 1}
    it.add("e", now=100.0)
    assert it.append("f") is False  # it would end the batch
    assert it.add("f", now=100.0) == Flush(list("def"), reason="size")
    assert it.stats().flushes["size"] == 2


def test_what_is_appended_takes_a_place() -> None:
    it = machine(max_batch_size=4)
    it.add("a", now=100.0)
    assert it.room == 3
    assert it.append("b")
    assert it.room == 2
    assert it.append("c")
    assert (it.room, it.enqueued) == (1, 3)
    assert not it.append("d")
    with_bytes = machine(max_batch_size=4, max_batch_bytes=10)
    with_bytes.add("a", now=100.0)
    assert not with_bytes.append("b")


def test_bytes_are_counted_anew_for_each_batch() -> None:
    it = machine(max_batch_size=10, max_batch_bytes=6, queue_depth=20)
    for item in ("aaa", "", "bb"):
        assert it.add(item, now=100.0) is None
    flush = it.add("cc", now=100.0)
    assert flush == Flush(["aaa", "", "bb"], reason="bytes")
    it.finish(flush, None, 100.0)
    assert it.poll(now=100.0) is None  # cc alone is no full batch
    assert it.add("ddd", now=100.0) is None
    assert it.add("e", now=100.0) == Flush(["cc", "ddd", "e"], reason="bytes")


def test_an_item_that_is_too_large_leaves_its_place_to_the_next_who_waits() -> None:
    it, _ = busy(queue_depth=1, max_batch_bytes=3)
    first, woken = it.ask(1, nothing), []
    it.ask(1, lambda: woken.append("second"))
    it.redeem(first)
    with pytest.raises(ConfigError, match="an item of 4 bytes"):
        it.add_many(["long"], now=100.0)
    assert woken == ["second"]


# ---- places ----------------------------------------------------------------------------------------------------------


def test_a_place_is_given_back_once() -> None:
    for is_redeemed in (False, True):
        it, _ = busy(queue_depth=4)
        ticket = it.ask(2, nothing)
        if is_redeemed:
            it.redeem(ticket)
            assert ticket.is_over
        it.give_back(ticket)
        it.give_back(ticket)
        assert ticket.is_over
        assert it.room == 4
        assert [it.ask(1, nothing).is_granted for _ in range(5)] == [True] * 4 + [False]


def test_who_is_turned_away_by_the_end_has_nothing_to_give_back() -> None:
    it, _ = busy(queue_depth=1)
    it.ask(1, nothing)
    waiting = it.ask(1, nothing)
    it.close()
    assert waiting.is_over
    assert not waiting.is_granted


@pytest.mark.parametrize("depth", [0, 1])
def test_one_place_there_always_is(depth: int) -> None:
    it = machine(queue_depth=depth, max_batch_size=3)
    assert it.ask(1, nothing).is_granted
    with pytest.raises(ConfigError, match="2 items at once"):
        it.ask(2, nothing)


def test_places_are_the_queue_or_what_the_batch_has_left() -> None:
    it = machine(queue_depth=4, max_batch_size=3)
    assert it.ask(4, nothing).is_granted
    assert it.room <= 0  # nobody may add without asking
    assert not it.ask(1, nothing).is_granted
    assert it.room == 0  # somebody waits
    it = machine(queue_depth=1, max_batch_size=5)
    it.add("a", now=100.0)
    it.add("b", now=100.0)
    assert [it.ask(1, nothing).is_granted for _ in range(4)] == [True, True, True, False]
    it = machine(queue_depth=4, max_batch_size=6)
    it.add("a", now=100.0)
    it.ask(2, nothing)
    assert it.room == 6 - 1 - 2


# ---- when ------------------------------------------------------------------------------------------------------------


def test_a_deadline_is_that_of_the_batch_or_of_a_write() -> None:
    it = machine(flush_timeout=5.0)
    assert (it.has_new_deadline, it.next_deadline()) == (False, None)
    it.add("a", now=100.0)
    assert (it.has_new_deadline, it.next_deadline()) == (True, 100.010)
    assert (it.has_new_deadline, it.next_deadline()) == (False, 100.010)
    it.add("b", now=100.005)
    assert (it.has_new_deadline, it.next_deadline()) == (False, 100.010)
    flush = it.add("c", now=100.006)
    assert flush is not None
    it.add("d", now=100.007)
    assert it.next_deadline() == 105.006  # nothing can go before the slot is free
    it.finish(flush, None, 100.1)
    assert it.next_deadline() == pytest.approx(100.017)


def test_the_delay_of_many_begins_with_the_first_and_that_of_the_rest_with_the_batch_before() -> None:
    it = machine(queue_depth=8)
    it.redeem(it.ask(1, nothing))
    assert it.add_many(["a"], now=100.0) is None
    it.redeem(it.ask(1, nothing))
    assert it.add_many(["b"], now=100.005) is None
    assert it.next_deadline() == 100.010
    it.redeem(it.ask(3, nothing))
    flush = it.add_many(list("cde"), now=100.006)
    assert flush is not None
    it.finish(flush, None, 100.007)
    assert it.next_deadline() == pytest.approx(100.016)


# ---- who is told -----------------------------------------------------------------------------------------------------


def test_acks_belong_to_one_write_each() -> None:
    it = machine(max_batch_size=2, slots=3, queue_depth=8)
    told: list[tuple[str, BaseException | None]] = []
    flushes = []
    for item in "abcdef":
        flush = it.add(item, 100.0, lambda error, item=item: told.append((item, error)))  # type: ignore[misc]
        flushes += [flush] if flush is not None else []
    assert [len(flush.acks) for flush in flushes] == [2, 2, 2]
    for flush in flushes:
        it.finish(flush, None, 100.0)
    assert told == [(item, None) for item in "abcdef"]
    it, flush = busy(max_batch_size=2, queue_depth=8)
    (third, third_ack), (fourth, fourth_ack) = collected(), collected()
    for item, ack in (("d", None), ("e", third_ack), ("f", fourth_ack)):
        it.add(item, 100.0, ack)
    it.finish(flush, None, 100.0)
    following = it.poll(now=100.0)
    assert following is not None
    it.finish(following, None, 100.0)
    assert (third, fourth) == ([None], [])  # the next one waits, and so does its ack


def test_acks_of_what_waits_are_told_once_when_it_is_dropped_or_cannot_be_written() -> None:
    it = machine(queue_depth=8)
    told, ack = collected()
    it.add("a", 100.0, ack)
    it.close()
    it.write_off()
    flush = it.poll(now=100.0)
    assert flush is not None
    it.finish(flush, OSError(), 100.0)
    assert [type(error) for error in told] == [DroppedOnShutdown]
    it = machine()
    told, ack = collected()
    it.add("a", 100.0, ack)
    it.fail(cause := ZeroDivisionError())
    [error] = told
    assert error is not None
    assert error.__cause__ is cause


def test_fences_count_what_was_before_them_and_are_told_once() -> None:
    it = machine(max_batch_size=2, slots=2, queue_depth=8)
    first, second = it.add("a", now=100.0), it.add("b", now=100.0)
    assert first is None
    assert second is not None
    woken: list[str] = []
    early = it.fence(lambda: woken.append("early"))
    it.add("c", now=100.0)
    late = it.fence(lambda: woken.append("late"))
    third = it.add("d", now=100.0)
    assert third is not None
    it.finish(third, OSError(), 100.0)
    assert woken == []  # what comes before it is not settled
    it.finish(second, None, 100.0)
    assert (early.ok, early.failed, late.ok, late.failed) == (2, 0, 2, 1)
    assert woken == ["early", "late"]
    last = it.fence(lambda: woken.append("last"))
    assert (last.is_done, last.ok, last.failed) == (True, 0, 0)
    assert woken == ["early", "late", "last"]


def test_a_fence_does_not_wait_for_what_took_too_long_or_was_written_off() -> None:
    it, _ = busy(flush_timeout=5.0)
    fence = it.fence(nothing)
    assert it.overdue(now=104.9) == []
    assert not fence.is_done
    it.overdue(now=105.0)
    assert (fence.is_done, fence.ok, fence.failed) == (True, 0, 3)
    it, _ = busy()
    it.add("d", now=100.0)
    fence = it.fence(nothing)
    it.close()
    it.write_off()
    assert (fence.is_done, fence.failed) == (True, 4)
    assert it.fence(nothing).is_done  # nothing is settled any more


def test_a_write_that_was_written_off_and_takes_too_long_is_reported_once() -> None:
    it, flush = busy(flush_timeout=5.0)
    it.close()
    it.write_off()
    it.overdue(now=106.0)
    [report] = it.reports
    assert (report.items, report.seconds, report.is_counted) == (3, 6.0, False)
    it.finish(flush, OSError(), 120.0)
    assert len(it.reports) == 1


def test_there_are_no_more_writes_when_all_are_done_or_none_can_be() -> None:
    it, flush = busy()
    ends = [it.is_over]
    it.close()
    ends.append(it.is_over)
    it.finish(flush, None, 100.0)
    assert [*ends, it.is_over] == [False, False, True]
    it, _ = busy()
    it.fail(ZeroDivisionError())
    assert it.is_over


def test_errors_of_time_say_what_was_waited_for() -> None:
    it = machine(name="mine")
    for error, words in (
        (no_room(it.name, 3, 0.5), "no room for 3 more in its queue"),
        (not_flushed(it.name, 0.5), "the sink has not written the flushed items"),
        (not_drained(it.name, 0.5), "its sink is not done"),
    ):
        assert isinstance(error, BatcherTimeout)
        assert "mine" in str(error)
        assert words in str(error)


def test_flushes_are_equal_when_they_write_the_same_for_the_same_reason() -> None:
    one, other = Flush(["a"], "size"), Flush(["a"], "size", 7, began_at=3.0, acks=[collected()[1]])
    assert (one.first, one.count, one.end, one.has_outcome, one.is_overdue, one.is_begun) == (
        0,
        1,
        1,
        False,
        False,
        False,
    )
    other.has_outcome = other.is_overdue = other.is_begun = True
    assert one == other
    assert one != Flush(["a"], "time")


# ---- interrupts ------------------------------------------------------------------------------------------------------


def test_an_item_that_was_taken_over_before_an_interrupt_counts() -> None:
    it = machine(max_batch_bytes=6)
    told, ack = collected()
    it.add("aa", 100.0, ack)
    assert it._sizes is not None
    it._sizes.each.append(2)
    it._waiting.append("bb")  # and its place was not counted
    it.next_deadline()
    assert it.repair() == []
    assert (it.enqueued, it.room, it.has_new_deadline) == (2, 1, True)
    flush = it.add("cc", 100.0)
    assert flush == Flush(["aa", "bb", "cc"], reason="size")
    it.finish(flush, None, 100.0)
    assert told == [None]


def test_what_was_noted_of_an_item_that_was_not_taken_over_is_forgotten() -> None:
    it = machine(max_batch_bytes=6)
    (first, first_ack), (second, second_ack) = collected(), collected()
    it.add("aa", 100.0, first_ack)
    assert it._sizes is not None
    it._sizes.each.append(4)
    it._sizes.total += 4
    it._acks.append((1, second_ack))
    it.repair()
    assert it.add("bb", 100.0) is None
    flush = it.add("c", 100.0)
    assert flush == Flush(["aa", "bb", "c"], reason="size")
    it.finish(flush, None, 100.0)
    assert (first, second) == ([None], [])


def test_acks_that_a_write_has_taken_are_not_told_by_the_next() -> None:
    it = machine(max_batch_size=1, slots=2)
    (first, first_ack), (second, second_ack) = collected(), collected()
    one = it.add("a", 100.0, first_ack)
    it._acks.appendleft((0, first_ack))  # interrupted before it was dropped here
    it._acks.append((1, second_ack))
    it._waiting.append("b")
    assert it.repair() == [one]
    other = it.poll(100.0)
    assert one is not None
    assert other is not None
    assert other.acks == [second_ack]
    one.is_begun = True
    assert it.repair() == [other]
    it.finish(other, None, 100.0)
    assert (first, second) == ([], [None])


def test_tickets_that_were_granted_or_over_are_told_and_leave_the_queue() -> None:
    it, _ = busy(queue_depth=2)
    woken: list[int] = []
    tickets = [Ticket(1, lambda number=number: woken.append(number)) for number in range(4)]  # type: ignore[misc]
    for ticket in tickets:
        it.ask_with(ticket)
    assert [ticket.is_granted for ticket in tickets] == [True, True, False, False]
    it._tickets.appendleft(tickets[0])  # interrupted after it was granted
    tickets[2].is_over = True  # and after it was turned away
    it.repair()
    assert (woken, it.room) == ([0, 2], 0)
    it.give_back(tickets[1])
    assert woken == [0, 2, 3]


@pytest.mark.parametrize("end", ["close", "write_off", "fail"])
def test_an_end_that_was_interrupted_is_brought_to_its_end(end: str) -> None:
    it, flush = busy(queue_depth=1)
    (of_waiting, ack), woken = collected(), list[str]()
    it.add("d", 100.0, ack)
    it.ask(1, lambda: woken.append("ticket"))
    it.fence(lambda: woken.append("fence"))
    it.is_closed = True
    it.is_written_off = end == "write_off"
    it.failure = ZeroDivisionError() if end == "fail" else None
    it.repair()
    assert "ticket" in woken
    assert it.room == 0
    assert [type(error) for error in of_waiting] == {
        "close": [],
        "write_off": [DroppedOnShutdown],
        "fail": [BatcherBroken],
    }[end]
    assert ("fence" in woken) is (end != "close")
    assert flush.has_outcome is (end == "write_off")
    it.repair()
    assert len(of_waiting) <= 1


def test_fences_and_places_that_were_due_are_given_after_an_interrupt() -> None:
    it, flush = busy(queue_depth=1)
    woken: list[str] = []
    it.fence(lambda: woken.append("fence"))
    it.add("d", now=100.0)
    it.ask(1, lambda: woken.append("ticket"))
    del it._running[flush.first]  # finished, and interrupted there
    it.repair()
    assert woken == ["fence", "ticket"]
    assert not it.is_closed


def test_what_is_generic_can_be_made_with_its_type_named() -> None:
    sink = Sink()
    config = BatcherConfig[Sink](sink=sink, max_batch_size=1, max_batch_delay=1.0)
    assert config == BatcherConfig(sink=sink, max_batch_size=1, max_batch_delay=1.0)
    error = ValueError("no")
    assert DeadLetter[str]("item", error, 1.0) == DeadLetter("item", error, 1.0)
