"""The ledger of pull requests: every status, and that nobody ever waits for nothing."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspark.core.subscription import SubscriptionState
from jetspark.errors import ConfigError, ConnectionClosed, ConsumerNotFound, JetStreamUnavailable, ServerError
from jetspark.jetstream import pull
from jetspark.jetstream.acks import AckableMessage, mark_answered
from jetspark.jetstream.pull import Ask, Fetch, Flow, Priority, Puller, PullLimits, Wait

SUBJECT = "$JS.API.CONSUMER.MSG.NEXT.S.c"


def message(number: int = 0, size: int = 10, headers: bytes | None = None) -> AckableMessage:
    reply = b"$JS.ACK.S.c.1.%d.%d.1626818873482533000.0" % (number, number)
    return AckableMessage("s", b"x" * size, reply, headers, None)


def of_size(size: int) -> AckableMessage:
    """One that counts for this many bytes."""
    return message(1, size - pull.size_bytes(message(1, 0)))


def status(ask: Ask, line: str, undelivered: int | None = None, bytes_left: int = 0) -> AckableMessage:
    told = f"Nats-Pending-Messages: {undelivered}\r\nNats-Pending-Bytes: {bytes_left}\r\n"
    pending = "" if undelivered is None else told
    return AckableMessage(ask.reply, b"", None, f"NATS/1.0 {line}\r\n{pending}\r\n".encode(), None)


def puller() -> Puller[AckableMessage]:
    return Puller("_INBOX.1", SUBJECT)


def fetch(
    machine: Puller[AckableMessage], count: int = 1, now: float = 0.0, timeout_s: float = 1.0, **options: Any
) -> Fetch[AckableMessage]:
    """A fetch that waits until it has all of them, or never."""
    options.setdefault("fill", not options.get("no_wait", False))
    return Fetch(machine, count, now=now, timeout_s=timeout_s, **options)


def eager(
    machine: Puller[AckableMessage], count: int = 5, now: float = 0.0, timeout_s: float = 1.0, **options: Any
) -> Fetch[AckableMessage]:
    """A fetch that waits only while there is nothing: the default."""
    return Fetch(machine, count, now=now, timeout_s=timeout_s, **options)


def asked(step: object) -> Ask:
    assert isinstance(step, Ask)
    return step


def body(step: object) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(asked(step).body)
    return result


# ---- a fetch -------------------------------------------------------------------------------------------------------


def test_a_fetch_asks_waits_and_ends_when_it_has_enough() -> None:
    machine = puller()
    reader = fetch(machine, 3, timeout_s=1.0)
    ask = asked(reader.step(0.0, 1))
    assert ask.reply == "_INBOX.1.1"
    assert json.loads(ask.body) == {"batch": 3, "expires": 950_000_000}
    assert reader.step(0.0, 1) == Wait(1.0)
    machine.absorb([message(1), message(2)], 0.1)
    assert not machine.wants_wake()
    assert reader.step(0.1, 1) == Wait(1.0)
    machine.absorb([message(3)], 0.2)
    assert machine.wants_wake()
    assert reader.step(0.2, 1) is None
    assert len(reader.messages) == 3
    assert (machine.owed, machine.outstanding) == (0, 0)


# ---- a fetch that takes what is there ------------------------------------------------------------------------------


def test_a_fetch_asks_in_one_request_for_what_is_there_or_the_first_that_comes() -> None:
    machine = puller()
    reader = eager(machine, 3)
    assert body(reader.step(0.0, 1)) == {"batch": 3, "no_wait": True, "expires": 950_000_000}


def test_a_fetch_is_over_when_the_server_says_that_this_is_all() -> None:
    machine = puller()
    reader = eager(machine, 5)
    ask = asked(reader.step(0.0, 1))
    machine.absorb([message(1), message(2)], 0.1)
    assert isinstance(reader.step(0.1, 1), Wait), "more may be on its way"
    machine.absorb([status(ask, "404 No Messages")], 0.2)
    assert machine.wants_wake()
    assert reader.step(0.2, 1) is None
    assert len(reader.messages) == 2
    assert machine.may_ask_at() <= 0.2, "that this is all is no refusal: the next fetch asks at once"


def test_a_fetch_with_nothing_waits_for_its_request_and_asks_again_when_that_is_refused() -> None:
    machine = puller()
    reader = eager(machine, 5)
    ask = asked(reader.step(0.0, 1))
    assert isinstance(reader.step(0.1, 1), Wait)
    machine.absorb([status(ask, "408 Requests Pending")], 0.2)
    wait = reader.step(0.2, 1)
    assert isinstance(wait, Wait)
    assert wait.until is not None
    assert 0.2 < wait.until < 1.0
    assert body(reader.step(wait.until, 1))["no_wait"] is True


@pytest.mark.parametrize(
    "end", ["409 Leadership Change", "409 Server Shutdown", "408 Request Timeout", "418 ?"], ids=str
)
def test_a_fetch_that_has_some_is_over_when_its_request_ends_for_whatever_reason(end: str) -> None:
    machine = puller()
    reader = eager(machine, 5)
    ask = asked(reader.step(0.0, 1))
    machine.absorb([message(1)], 0.1)
    machine.absorb([status(ask, end)], 0.2)
    assert reader.step(0.2, 1) is None
    assert len(reader.messages) == 1


def test_a_fetch_that_has_some_is_over_when_its_connection_is_lost_or_new() -> None:
    for session in (None, 2):
        machine = puller()
        reader = eager(machine, 5)
        asked(reader.step(0.0, 1))
        machine.absorb([message(1)], 0.1)
        assert reader.step(0.2, session) is None


def test_what_an_earlier_fetch_left_behind_is_returned_at_once() -> None:
    machine = puller()
    machine.absorb([message(1)], 0.0)
    reader = eager(machine, 5)
    assert reader.step(0.0, 1) is None
    assert len(reader.messages) == 1


def test_a_fetch_of_one_keeps_its_place_in_the_queue_of_the_server() -> None:
    assert "no_wait" not in body(eager(puller(), 1).step(0.0, 1))


def test_a_fetch_asks_for_no_more_than_the_server_sends_without_an_ack() -> None:
    assert body(eager(puller(), 5000, max_ack_pending=1000).step(0.0, 1))["batch"] <= 1000
    machine = puller()
    machine.message_bytes = 100.0
    reader = eager(machine, 5000, max_ack_pending=1000)
    assert body(reader.step(0.0, 1))["batch"] == 1000
    machine.absorb([message(number) for number in range(1000)], 0.1)
    assert reader.step(0.1, 1) is None


def test_a_fetch_takes_the_rest_when_the_bytes_did_not_let_it_ask_for_all() -> None:
    machine = puller()
    reader = eager(machine, 100)
    assert body(reader.step(0.0, 1))["batch"] == pull.FIRST_AHEAD
    machine.absorb([message(number) for number in range(pull.FIRST_AHEAD)], 0.1)
    assert machine.wants_wake()
    rest = asked(reader.step(0.1, 1))
    assert json.loads(rest.body) == {"batch": 100 - pull.FIRST_AHEAD, "no_wait": True}, "what is there, and no waiting"
    machine.absorb([message(1), status(rest, "404 No Messages")], 0.2)
    assert reader.step(0.2, 1) is None
    assert len(reader.messages) == pull.FIRST_AHEAD + 1


def wait_until(step: object) -> float:
    assert isinstance(step, Wait)
    assert step.until is not None
    return step.until


def test_a_server_that_does_not_answer_for_the_rest_is_not_waited_for() -> None:
    """A consumer at its ``max_ack_pending`` leaves a request without ``expires`` unanswered."""
    machine = puller()
    reader = eager(machine, 100, timeout_s=60.0)
    asked(reader.step(0.0, 1))
    machine.absorb([message(number) for number in range(pull.FIRST_AHEAD)], 0.1)
    rest = asked(reader.step(0.1, 1))
    now = wait_until(reader.step(0.1, 1))
    machine.on_time(now)
    probe = asked(reader.step(now, 1))
    assert json.loads(probe.body) == {"batch": 1, "expires": pull.PROBE_S * 1e9}
    machine.absorb([status(rest, "404 No Messages"), status(probe, "408 Request Timeout", 1)], now + 0.1)
    assert reader.step(now + 0.1, 1) is None
    assert len(reader.messages) == pull.FIRST_AHEAD
    assert (machine.owed, machine.outstanding) == (0, 0)


def test_a_fetch_that_has_some_asks_the_silent_server_for_the_end_of_its_request() -> None:
    machine = puller()
    reader = eager(machine, 5, timeout_s=60.0)
    ask = asked(reader.step(0.0, 1))
    assert wait_until(reader.step(0.0, 1)) == 2 * pull.HEARTBEAT_S, "there is nothing yet: it waits for the first"
    machine.absorb([message(1)], 5.0)
    assert machine.wants_wake()
    assert wait_until(reader.step(5.0, 1)) == pytest.approx(5.0 + pull.SILENT_S)
    machine.absorb([message(2)], 5.01)
    now = wait_until(reader.step(5.01, 1))
    assert now == pytest.approx(5.01 + pull.SILENT_S), "a message is no silence"
    probe = asked(reader.step(now, 1))
    assert json.loads(probe.body) == {"batch": 1, "expires": pull.PROBE_S * 1e9}
    machine.absorb([status(probe, "408 Request Timeout", 1)], now)
    again = wait_until(reader.step(now, 1))
    assert again == pytest.approx(now + 2 * pull.SILENT_S), "it ended only itself: later once more"
    asked(reader.step(again, 1))
    machine.absorb([message(3), status(ask, "404 No Messages")], again + 0.1)
    assert machine.wants_wake()
    assert reader.step(again + 0.1, 1) is None
    assert len(reader.messages) == 3
    assert (machine.owed, machine.outstanding) == (0, 0), "what the probe brought counts as the request's"


@pytest.mark.parametrize(("last", "until"), [(0.84, 0.84 + pull.SILENT_S), (0.86, 1.0)])
def test_a_request_about_to_expire_is_not_asked_for_its_end(last: float, until: float) -> None:
    machine = puller()
    reader = eager(machine, 5, timeout_s=1.0)
    asked(reader.step(0.0, 1))
    machine.absorb([message(1)], last)
    assert reader.step(last, 1) == Wait(until)


def test_silence_begins_with_the_request() -> None:
    reader = fetch(puller(), 5, now=10.0, timeout_s=30, no_wait=True)
    assert reader.step(10.0, None) == Wait(11.0)
    asked(reader.step(10.5, 1))
    assert reader.step(10.5, 1) == Wait(10.75)


def test_fetches_that_share_a_request_wait_for_its_end() -> None:
    machine = puller()
    first, second = eager(machine, 5, max_bytes=10_000), eager(machine, 5, max_bytes=10_000)
    asked(first.step(0.0, 1))
    machine.absorb([message(1)], 0.1)
    assert isinstance(second.step(0.1, 1), Wait), "more may be on its way"
    machine.absorb([message(2)], 0.1)
    assert isinstance(first.step(0.1, 1), Wait)
    machine.absorb([message(3), message(4)], 0.1)
    assert not machine.wants_wake()
    assert isinstance(first.step(0.1, 1), Wait)
    machine.absorb([message(5)], 0.1)
    assert machine.wants_wake(), "the batch is complete, and no status says so"
    assert (len(first.messages), len(second.messages)) == (3, 1)
    assert second.step(0.1, 1) is None
    assert first.step(0.1, 1) is None


def test_fetches_at_a_time_have_one_request_that_waits() -> None:
    machine = puller()
    first, second = eager(machine, 3), eager(machine, 4)
    ask = asked(first.step(0.0, 1))
    assert isinstance(second.step(0.0, 1), Wait)
    machine.absorb([message(1), status(ask, "404 No Messages")], 0.1)
    assert machine.wants_wake()
    assert first.step(0.1, 1) is None
    assert body(second.step(0.1, 1))["batch"] == 4, "its turn, at once"


def test_a_fetch_whose_messages_another_took_asks_for_itself() -> None:
    machine = puller()
    first, second = eager(machine, 3), eager(machine, 3)
    asked(first.step(0.0, 1))
    assert isinstance(second.step(0.0, 1), Wait)
    machine.absorb([message(1), message(2), message(3)], 0.1)
    assert machine.wants_wake(), "its batch is complete, and no status says so"
    assert second.step(0.1, 1) is None
    assert body(first.step(0.1, 1))["batch"] == 3


def test_a_fetch_takes_the_first_of_what_a_filling_one_waits_for() -> None:
    machine = puller()
    filling, reader = fetch(machine, 100, timeout_s=60.0), eager(machine, 5)
    asked(filling.step(0.0, 1))
    assert isinstance(reader.step(0.0, 1), Wait), "a request waits, so nothing is there"
    machine.absorb([message(1)], 0.1)
    assert machine.wants_wake()


def test_not_to_wait_and_to_fill_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="no_wait=True and fill=True"):
        fetch(puller(), 5, no_wait=True, fill=True)


def test_the_first_request_of_a_fetch_acknowledges_a_message() -> None:
    machine = puller()
    done = AckableMessage("s", b"", b"$JS.ACK.S.c.1.1.1.1.0", None, object())
    reader = eager(machine, 1, acknowledges=done)
    ask = asked(reader.step(0.0, 1))
    assert ask.acknowledges is done
    assert ask.body == b'+NXT {"batch":1,"expires":950000000}'
    mark_answered(done)
    machine.absorb([status(Ask(ask.reply, b""), "409 Leadership Change")], 0.1)
    wait = reader.step(0.1, 1)
    assert isinstance(wait, Wait)
    assert wait.until is not None
    again = asked(reader.step(wait.until, 1))
    assert again.acknowledges is None
    assert not again.body.startswith(b"+NXT")


# ---- a fetch that waits until it is full ---------------------------------------------------------------------------


def test_the_request_ends_before_the_fetch_and_its_408_ends_the_fetch() -> None:
    machine = puller()
    reader = fetch(machine, 3, timeout_s=1.0)
    ask = asked(reader.step(0.0, 1))
    machine.absorb([message(1)], 0.1)
    machine.absorb([status(ask, "408 Request Timeout", 2)], 0.951)
    assert machine.wants_wake()
    assert reader.step(0.951, 1) is None
    assert len(reader.messages) == 1


def test_a_reader_that_keeps_up_for_hours_has_a_bounded_ledger() -> None:
    """It asks again before everything has come, so that there is never a moment at which all is fulfilled."""
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=100))
    now, number, asked_for, received = 0.0, 0, 0, 0
    while number < 20_000:
        step = flow.step(now, 1)
        if isinstance(step, Ask):
            asked_for += body(step)["batch"]
        elif isinstance(step, Wait):
            assert step.until is not None
            assert now < step.until
            some = [message(number + each) for each in range(min(7, asked_for - received))]
            number += len(some)
            received += len(some)
            now += 0.01
            machine.absorb(some, now)
        else:
            assert isinstance(step, int)
            for _ in range(step):
                machine.buffer.popleft()
        assert 0 <= asked_for - received == machine.owed <= 100
        assert machine.outstanding <= pull.MAX_REQUESTS
    assert now > 25  # near the time at which the first request was to end
    # Then the server forgets everything without a word: two heartbeats later it is asked for all of the window.
    machine.buffer.clear()
    step = flow.step(now, 1)
    if isinstance(step, Ask):
        step = flow.step(now, 1)
    assert isinstance(step, Wait)
    assert step.until is not None
    assert step.until <= now + 10.0
    machine.on_time(step.until)
    assert (machine.owed, machine.outstanding) == (0, 0)
    assert body(flow.step(step.until, 1))["batch"] == 100


def test_what_the_server_says_of_a_request_counts_for_that_one_alone_when_older_ones_are_a_part_of_it() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=100, max_bytes=10_000))
    asks: list[Ask] = []
    while len(asks) < pull.MAX_REQUESTS + 5:
        asks.append(machine.ask(flow, 10, now=0.0, expires_s=30.0, max_bytes=1000, is_whole=False))
        machine.absorb([message(size=10) for _ in range(9)], 0.0)
    assert machine.outstanding == pull.MAX_REQUESTS
    owed = machine.owed
    oldest = asks[-pull.MAX_REQUESTS]
    machine.absorb([status(oldest, "409 Message Size Exceeds MaxBytes", 10)], 0.0)
    assert machine.owed == owed - 10
    assert flow.must_empty  # it got nothing: that it was asked for 10, and not for 60, is known
    machine.absorb([status(asks[0], "408 Request Timeout", 10)], 0.0)  # of one that is not known any more
    assert machine.owed == owed - 10


@pytest.mark.parametrize("max_bytes", [1000, None])
def test_a_request_that_older_ones_became_a_part_of_is_struck_with_all_of_them(max_bytes: int | None) -> None:
    machine = puller()
    flow = Flow(machine, PullLimits())
    asks = [
        machine.ask(flow, 10 + number, now=0.0, expires_s=30.0, max_bytes=max_bytes, is_whole=False)
        for number in range(pull.MAX_REQUESTS + 3)
    ]
    owed, owed_bytes = machine.owed, machine.owed_bytes
    assert (machine.outstanding, owed_bytes) == (pull.MAX_REQUESTS, len(asks) * (max_bytes or 0))
    machine.withdraw(asks[3])
    assert machine.owed == owed - (10 + 11 + 12 + 13)
    assert machine.owed_bytes == owed_bytes - 4 * (max_bytes or 0)
    machine.withdraw(asks[4])  # one that none became a part of
    assert machine.owed == owed - (10 + 11 + 12 + 13 + 14)
    assert machine.owed_bytes == owed_bytes - 5 * (max_bytes or 0)


def test_a_request_without_a_bound_of_bytes_leaves_none_to_the_next() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits())
    asks = [
        machine.ask(flow, 1, now=0.0, expires_s=30.0, max_bytes=1000 if number else None, is_whole=False)
        for number in range(pull.MAX_REQUESTS + 1)
    ]
    machine.withdraw(asks[1])
    assert (machine.owed, machine.owed_bytes) == (pull.MAX_REQUESTS - 1, 1000 * (pull.MAX_REQUESTS - 1))


@pytest.mark.parametrize("which", [0, 1])
def test_a_request_that_does_not_wait_and_one_that_does_stay_apart(which: int) -> None:
    machine = puller()
    flow = Flow(machine, PullLimits())
    for number in range(pull.MAX_REQUESTS + 1):
        machine.ask(flow, 1, now=0.0, expires_s=30.0, no_wait=number == which)
    assert machine.outstanding == pull.MAX_REQUESTS + 1


def test_what_a_status_says_of_bytes_counts_and_what_it_does_not_say_is_all_of_them() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits())
    asks = [machine.ask(flow, 10, now=0.0, expires_s=30.0, max_bytes=1000, is_whole=False) for _ in range(3)]
    machine.absorb([status(asks[0], "408 Request Timeout", 4, 300)], 0.1)
    assert (machine.owed, machine.owed_bytes) == (26, 2700)
    machine.absorb([status(asks[1], "408 Request Timeout")], 0.1)
    assert (machine.owed, machine.owed_bytes) == (16, 1700)


def test_requests_of_different_readers_stay_apart() -> None:
    machine = puller()
    readers = [fetch(machine, 1, timeout_s=5.0) for _ in range(pull.MAX_REQUESTS + 5)]
    asks = [asked(reader.step(0.0, 1)) for reader in readers]
    assert machine.outstanding == len(asks)
    for ask in asks:
        machine.absorb([status(ask, "408 Request Timeout", 1)], 0.1)
    assert (machine.owed, machine.outstanding) == (0, 0)


def test_a_long_fetch_wants_heartbeats_and_asks_again_when_they_stay_away() -> None:
    machine = puller()
    reader = fetch(machine, 1, timeout_s=20.05)
    ask = asked(reader.step(0.0, 1))
    assert body(ask) == {"batch": 1, "expires": 20_000_000_000, "idle_heartbeat": 5_000_000_000}
    assert reader.step(0.0, 1) == Wait(10.0)
    machine.absorb([status(ask, "100 Idle Heartbeat")], 5.0)
    assert not machine.wants_wake()
    assert reader.step(5.0, 1) == Wait(15.0)
    machine.on_time(14.9)
    assert machine.outstanding == 1
    machine.on_time(15.0)
    assert body(reader.step(15.0, 1))["expires"] == 5_000_000_000


def test_a_status_of_an_earlier_request_ends_nothing_of_the_present_one() -> None:
    machine = puller()
    early = fetch(machine, 1, timeout_s=0.1)
    old = asked(early.step(0.0, 1))
    early.leave(is_cancelled=True)
    machine.on_time(5.0)
    reader = fetch(machine, 1, now=5.0, timeout_s=1.0)
    asked(reader.step(5.0, 1))
    machine.absorb([status(old, "408 Request Timeout", 1)], 5.1)
    assert (machine.owed, machine.outstanding) == (1, 1)
    assert reader.step(5.1, 1) == Wait(6.0)


def test_late_messages_are_there_for_the_next_fetch() -> None:
    machine = puller()
    early = fetch(machine, 2, timeout_s=1.0)
    asked(early.step(0.0, 1))
    assert early.step(1.0, 1) is None
    early.leave(is_cancelled=False)
    machine.absorb([message(1), message(2)], 1.01)
    reader = fetch(machine, 1, now=2.0)
    assert reader.step(2.0, 1) is None
    assert len(machine.buffer) == 1


def test_a_cancelled_fetch_gives_back_in_order() -> None:
    machine = puller()
    reader = fetch(machine, 3)
    asked(reader.step(0.0, 1))
    first, second, third = message(1), message(2), message(3)
    machine.absorb([first, second], 0.1)
    reader.step(0.1, 1)
    machine.absorb([third], 0.2)
    reader.leave(is_cancelled=True)
    assert list(machine.buffer) == [first, second, third]
    assert (reader.messages, machine.fetches) == ([], [])


def test_what_an_abandoned_request_will_bring_is_not_asked_for_again() -> None:
    machine = puller()
    early = fetch(machine, 1, timeout_s=10.0)
    ask = asked(early.step(0.0, 1))
    early.leave(is_cancelled=True)
    reader = fetch(machine, 1, now=1.0, timeout_s=30.0)
    assert isinstance(reader.step(1.0, 1), Wait)
    machine.absorb([status(ask, "408 Request Timeout", 1)], 10.0)
    assert body(reader.step(10.0, 1))["batch"] == 1


def test_a_request_left_behind_with_another_priority_is_not_relied_on() -> None:
    machine = puller()
    picky = fetch(machine, 5, timeout_s=30.0, priority=Priority(group="g", min_pending=1000))
    asked(picky.step(0.0, 1))
    picky.leave(is_cancelled=True)
    reader = fetch(machine, 2, now=1.0, timeout_s=30.0, priority=Priority(group="g"))
    assert body(reader.step(1.0, 1))["batch"] == 2
    assert isinstance(reader.step(1.0, 1), Wait)
    machine.absorb([message(1), message(2)], 1.1)
    assert reader.step(1.1, 1) is None
    assert len(reader.messages) == 2


@pytest.mark.parametrize("left_behind", [1, 2, 3, 4])
def test_requests_with_another_priority_are_not_counted_on_however_much_they_owe(left_behind: int) -> None:
    machine = puller()
    picky = fetch(machine, left_behind, timeout_s=30.0, priority=Priority(group="g", min_pending=1000))
    asked(picky.step(0.0, 1))
    picky.leave(is_cancelled=True)
    reader = fetch(machine, 3, now=1.0, timeout_s=30.0, priority=Priority(group="g"))
    assert body(reader.step(1.0, 1))["batch"] == 3


def test_two_fetches_ask_for_both_together() -> None:
    machine = puller()
    one, other = fetch(machine, 3), fetch(machine, 4)
    batches = [body(one.step(0.0, 1))["batch"], body(one.step(0.0, 1))["batch"]]
    assert batches == [3, 3]
    assert body(other.step(0.0, 1))["batch"] == 1
    assert isinstance(other.step(0.0, 1), Wait)
    assert machine.wake_at == 3


def test_no_wait_ends_with_its_status_or_when_the_server_says_nothing() -> None:
    for line in ("404 No Messages", "408 Requests Pending"):
        machine = puller()
        reader = fetch(machine, 5, timeout_s=30, no_wait=True)
        ask = asked(reader.step(0.0, 1))
        assert json.loads(ask.body) == {"batch": 5, "no_wait": True}
        machine.absorb([message(1), status(ask, line)], 0.1)
        assert machine.wants_wake()
        assert reader.step(0.1, 1) is None
        assert len(reader.messages) == 1
    machine = puller()
    reader = fetch(machine, 5, timeout_s=30, no_wait=True)
    ask = asked(reader.step(0.0, 1))
    assert reader.step(0.0, 1) == Wait(pull.NO_WAIT_S / 4)
    probe = asked(reader.step(pull.NO_WAIT_S / 4, 1))
    assert reader.step(pull.NO_WAIT_S / 4, 1) == Wait(pull.NO_WAIT_S * 3 / 4)
    machine.absorb([status(ask, "404 No Messages"), status(probe, "408 Request Timeout", 1)], 0.3)
    assert reader.step(0.3, 1) is None
    assert (machine.owed, machine.outstanding) == (0, 0)
    reader = fetch(machine, 5, timeout_s=30, no_wait=True)
    asked(reader.step(0.0, 1))
    machine.on_time(pull.NO_WAIT_S)
    assert reader.step(pull.NO_WAIT_S, 1) is None, "a server that says nothing at all"


def test_no_wait_does_not_wait_for_what_others_asked_for() -> None:
    machine = puller()
    early = fetch(machine, 5, timeout_s=30)
    asked(early.step(0.0, 1))
    early.leave(is_cancelled=True)
    reader = fetch(machine, 1, no_wait=True)
    ask = asked(reader.step(0.1, 1))
    machine.absorb([status(ask, "404 No Messages")], 0.2)
    assert reader.step(0.2, 1) is None


def test_bytes_bound_a_fetch() -> None:
    machine = puller()
    reader = fetch(machine, 10, max_bytes=1000)
    ask = asked(reader.step(0.0, 1))
    assert body(ask)["max_bytes"] == 1000
    machine.absorb([message(1, 400), status(ask, "409 Message Size Exceeds MaxBytes", 9)], 0.1)
    assert reader.step(0.1, 1) is None
    assert len(reader.messages) == 1


def test_bytes_bound_what_a_fetch_takes_from_the_buffer() -> None:
    machine = puller()
    machine.absorb([message(number, 400) for number in range(3)], 0.0)
    reader = fetch(machine, 10, max_bytes=1000)
    assert reader.step(0.0, 1) is None
    assert (len(reader.messages), len(machine.buffer)) == (2, 1)


@pytest.mark.parametrize(("last", "is_over"), [(599, False), (600, True), (601, True)])
def test_a_fetch_is_over_when_its_bytes_are_used_to_the_last(last: int, is_over: bool) -> None:
    machine = puller()
    machine.absorb([of_size(400), of_size(last)], 0.0)
    reader = fetch(machine, 10, max_bytes=1000)
    step = reader.step(0.0, 1)
    assert (step is None) is is_over
    assert len(reader.messages) == (2 if last <= 600 else 1)
    if step is not None:
        assert body(step)["max_bytes"] == 1


@pytest.mark.parametrize(("last", "is_over"), [(599, False), (600, True)])
def test_bytes_that_are_used_up_are_worth_waking_for_though_messages_are_missing(last: int, is_over: bool) -> None:
    machine = puller()
    reader = fetch(machine, 10, max_bytes=1000)
    asked(reader.step(0.0, 1))
    machine.absorb([of_size(400), of_size(last)], 0.1)
    assert (machine.wants_wake(), machine.outstanding == 0) == (is_over, is_over)


def test_bytes_too_few_for_any_message_are_an_error() -> None:
    machine = puller()
    reader = fetch(machine, 10, max_bytes=100)
    ask = asked(reader.step(0.0, 1))
    machine.absorb([status(ask, "409 Message Size Exceeds MaxBytes", 10)], 0.1)
    with pytest.raises(ConfigError, match="max_bytes=100"):
        reader.step(0.1, 1)


def test_bytes_left_over_that_are_too_few_end_a_fetch() -> None:
    machine = puller()
    machine.absorb([message(1, 400)], 0.0)
    reader = fetch(machine, 10, max_bytes=1000)
    ask = asked(reader.step(0.0, 1))
    assert 0 < body(ask)["max_bytes"] < 600
    machine.absorb([status(ask, "409 Message Size Exceeds MaxBytes", 9)], 0.1)
    assert reader.step(0.1, 1) is None
    assert len(reader.messages) == 1


def test_a_fetch_asks_once_however_late_and_no_more_near_its_end() -> None:
    late = fetch(puller(), 1, timeout_s=1.0)
    assert late.step(0.0, None) == Wait(1.0)
    assert isinstance(late.step(0.99, 1), Ask)
    for now, asks_again in ((0.86, True), (0.9, False), (0.95, False)):
        machine = puller()
        reader = fetch(machine, 2, timeout_s=1.0)
        machine.absorb([status(asked(reader.step(0.0, 1)), "408 Request Timeout", 2)], now)
        step = reader.step(now, 1)
        assert isinstance(step, Ask) if asks_again else step is None


def test_a_driver_in_virtual_time_gets_fewer_signs_of_life() -> None:
    machine = puller()
    machine.idle_s, machine.message_bytes = 100.0, 100.0
    assert body(fetch(machine, 1, timeout_s=1000.05).step(0.0, 1))["idle_heartbeat"] == 25_000_000_000
    assert body(fetch(machine, 3, timeout_s=40.05).step(0.0, 1))["idle_heartbeat"] == 10_000_000_000
    assert body(Flow(machine, PullLimits()).step(0.0, 1)) == {
        "batch": 496,
        "expires": 100_000_000_000,
        "idle_heartbeat": 25_000_000_000,
    }
    machine = puller()
    machine.idle_s = 30.0
    assert body(Flow(machine, PullLimits(expires_s=30.0)).step(0.0, 1))["idle_heartbeat"] == 5_000_000_000


@pytest.mark.parametrize("wrong", [{"count": 0}, {"count": 1.5}, {"timeout_s": 0.0}, {"max_bytes": 0}])
def test_a_fetch_of_nothing_makes_no_sense(wrong: dict[str, Any]) -> None:
    name = {"count": "n", "timeout_s": "timeout", "max_bytes": "max_bytes"}[next(iter(wrong))]
    machine = puller()
    with pytest.raises(ConfigError, match=f"^{name}="):
        fetch(machine, **wrong)
    assert machine.fetches == []


# ---- what arrives --------------------------------------------------------------------------------------------------


def inbox(*arrived: AckableMessage, counted: tuple[int, int] = (0, 0)) -> SubscriptionState:
    state = SubscriptionState(1, "_INBOX.1.*", "", max_pending_messages=100, max_pending_bytes=1 << 20)
    state.pending.extend(arrived)
    state.counted_messages, state.counted_bytes = counted
    return state


def test_everything_in_the_inbox_is_taken_once() -> None:
    machine = puller()
    asked(fetch(machine, 3, max_bytes=1000).step(0.0, 1))
    messages = [message(1), message(2)]
    state = inbox(*messages, counted=(2, 300))
    assert not machine.on_replies(state, 7.0)  # the fetch needs three
    assert list(machine.buffer) == messages
    assert (machine.owed, machine.owed_bytes, machine.heard_at) == (1, 700, 7.0)  # the parser has counted
    assert (len(state.pending), state.counted_messages, state.counted_bytes) == (0, 0, 0)
    state.pending.append(message(3))
    assert machine.on_replies(state, 8.0)
    assert machine.owed == 0


def test_bytes_are_counted_here_where_the_parser_has_not_counted_all_messages() -> None:
    machine = puller()
    asked(fetch(machine, 3, max_bytes=1000).step(0.0, 1))
    machine.on_replies(inbox(of_size(200), of_size(300), counted=(1, 300)), 0.1)
    assert machine.owed_bytes == 500


def test_an_inbox_that_has_nothing_is_another_session_or_the_end_and_worth_one_look() -> None:
    machine = puller()
    asked(fetch(machine, 3).step(0.0, 1))
    assert machine.on_replies(inbox(), 0.1)
    assert not machine.wants_wake()
    assert machine.error is None


def test_a_subscription_that_is_over_is_an_error_after_what_it_brought() -> None:
    for error in (None, ConfigError("cut off")):
        machine = puller()
        flow = Flow(machine, PullLimits())
        asked(flow.step(0.0, 1))
        state = inbox(message(1))
        state.is_finished, state.error = True, error
        assert machine.on_replies(state, 0.1)
        assert flow.step(0.1, 1) == 1
        machine.buffer.clear()
        with pytest.raises(type(error) if error else ConnectionClosed, match="cut off" if error else "is over"):
            flow.step(0.2, 1)
    machine = puller()
    machine.error = first = ConfigError("first")
    state = inbox()
    state.is_finished = True
    machine.on_replies(state, 0.1)
    assert machine.error is first


# ---- statuses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "409 Leadership Change",
        "409 Server Shutdown",
        "409 Exceeded MaxWaiting",
        "404 No Messages",
        "408 Requests Pending",
        "423 Nats-Pin-Id mismatch",
        "503",
        "418 I'm a teapot",
        "409 Something New",
    ],
)
def test_these_ask_again_after_a_pause_that_grows(line: str) -> None:
    machine = puller()
    reader = fetch(machine, 1, timeout_s=100)
    now = 0.0
    pauses = []
    for _ in range(8):
        ask = asked(reader.step(now, 1))
        machine.absorb([status(ask, line)], now)
        step = reader.step(now, 1)
        assert isinstance(step, Wait)
        assert step.until is not None
        pauses.append(round(step.until - now, 3))
        now = step.until
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    ask = asked(reader.step(now, 1))
    machine.absorb([message(1)], now)
    assert machine.may_ask_at() < now


@pytest.mark.parametrize("line", ["408 Request Timeout", "409 Batch Completed"])
def test_these_ask_again_at_once(line: str) -> None:
    machine = puller()
    reader = fetch(machine, 5, timeout_s=100)
    ask = asked(reader.step(0.0, 1))
    machine.absorb([message(1), status(ask, line, 4)], 1.0)
    assert body(reader.step(1.0, 1))["batch"] == 4


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        ("409 Exceeded MaxRequestBatch of 5", ConfigError, "MaxRequestBatch of 5"),
        ("409 Exceeded MaxRequestExpires of 1s", ConfigError, "MaxRequestExpires of 1s"),
        ("409 Exceeded MaxRequestMaxBytes of 1000", ConfigError, "MaxRequestMaxBytes of 1000"),
        ("409 Consumer is push based", ServerError, "push based"),
        ("400 Bad Request - heartbeat value too large", ServerError, "heartbeat value too large"),
        ("412 Required Api Level", ServerError, "Required Api Level"),
        ("409 Consumer Deleted", ConsumerNotFound, "10014"),
    ],
)
def test_these_are_errors(line: str, kind: type[Exception], text: str) -> None:
    machine = puller()
    reader = fetch(machine, 1)
    ask = asked(reader.step(0.0, 1))
    machine.absorb([status(ask, line)], 0.1)
    assert machine.wants_wake()
    with pytest.raises(kind, match=text) as raised:
        reader.step(0.1, 1)
    if isinstance(raised.value, ConsumerNotFound):
        assert (raised.value.code, raised.value.err_code) == (404, 10014)
    elif isinstance(raised.value, ServerError):
        assert (raised.value.code, raised.value.err_code) == (int(line[:3]), 0)
    reader.leave(is_cancelled=True)
    assert isinstance(fetch(machine, 1).step(0.2, 1), Ask)  # the next one starts from nothing

    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=10))
    ask = asked(flow.step(0.0, 1))
    machine.absorb([message(1), status(ask, line)], 0.1)
    assert flow.step(0.1, 1) == 1
    machine.buffer.clear()
    with pytest.raises(kind, match=text):
        flow.step(0.2, 1)


@pytest.mark.parametrize(
    ("line", "is_unknown"),
    [
        ("404 No Messages", False),
        ("408 Requests Pending", False),
        ("409 Leadership Change", False),
        ("409 Server Shutdown", False),
        ("409 Exceeded MaxWaiting", False),
        ("409 Something New", True),
        ("418 Leadership Change", True),
        ("405 No Messages", True),
    ],
)
def test_only_a_status_that_nobody_knows_is_logged(
    line: str, is_unknown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    machine = puller()
    ask = asked(fetch(machine, 1, timeout_s=100).step(0.0, 1))
    with caplog.at_level(logging.WARNING, "jetspark.pull"):
        machine.absorb([status(ask, line)], 0.0)
    assert ("unknown status" in caplog.text) is is_unknown
    assert machine.may_ask_at() > 0  # either way it is asked again


def test_a_session_that_begins_ends_the_pause() -> None:
    machine = puller()
    reader = fetch(machine, 1, timeout_s=100)
    machine.absorb([status(asked(reader.step(0.0, 1)), "503")], 0.0)
    assert isinstance(reader.step(0.01, 1), Wait)
    assert isinstance(reader.step(0.01, 2), Ask)
    assert not machine.is_unavailable


def test_an_error_does_not_take_away_messages() -> None:
    machine = puller()
    reader = fetch(machine, 2)
    ask = asked(reader.step(0.0, 1))
    machine.absorb([message(1), status(ask, "409 Consumer Deleted")], 0.1)
    assert reader.step(0.1, 1) is None
    assert len(reader.messages) == 1


def test_nobody_there_is_bearable_for_a_time() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits())
    now = begun = 1000.0
    while machine.error is None:
        step = flow.step(now, 1)
        if isinstance(step, Ask):
            machine.absorb([status(step, "503")], now)
        else:
            assert isinstance(step, Wait)
            assert step.until is not None
            now = step.until
    with pytest.raises(JetStreamUnavailable):
        flow.step(now, 1)
    assert pull.UNAVAILABLE_S <= now - begun < pull.UNAVAILABLE_S + 2
    machine = puller()
    for since, is_over in ((0.0, False), (pull.UNAVAILABLE_S - 0.1, False), (pull.UNAVAILABLE_S, True)):
        ask = machine.ask(flow, 1, now=since, expires_s=30.0)
        machine.absorb([status(ask, "503")], since)
        assert (machine.error is not None) is is_over


def test_a_fetch_whose_whole_time_nobody_was_there_says_so() -> None:
    machine = puller()
    reader = fetch(machine, 1, timeout_s=0.3)
    machine.absorb([status(asked(reader.step(0.0, 1)), "503")], 0.0)
    assert reader.step(0.29, 1) == Wait(0.3)
    with pytest.raises(JetStreamUnavailable):
        reader.step(0.3, 1)


def test_what_is_neither_message_nor_status_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    machine = puller()
    ask = asked(fetch(machine, 1).step(0.0, 1))
    machine.absorb([AckableMessage(ask.reply, b"?", None, None, None)], 0.1)
    assert (machine.owed, len(machine.buffer)) == (1, 0)
    assert "ignored a message without a reply subject or a status" in caplog.text


# ---- sessions ------------------------------------------------------------------------------------------------------


def test_requests_end_with_their_session() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=10))
    asked(flow.step(0.0, 1))
    assert isinstance(flow.step(0.1, None), Wait)
    assert machine.owed == 10
    assert body(flow.step(5.0, 2))["batch"] == 10
    assert isinstance(flow.step(5.0, 2), Wait)


def test_a_fetch_and_a_flow_with_a_bound_of_bytes_ask_again_in_the_next_session() -> None:
    machine = puller()
    reader = fetch(machine, 3, timeout_s=30)
    asked(reader.step(0.0, 1))
    assert isinstance(reader.step(0.1, 1), Wait)
    assert body(reader.step(0.2, 2))["batch"] == 3
    assert (machine.owed, machine.outstanding) == (3, 1)
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=5, max_bytes=1000))
    asked(flow.step(0.0, 1))
    assert isinstance(flow.step(0.1, 1), Wait)
    assert body(flow.step(0.2, 2))["batch"] == 5
    assert (machine.owed, machine.outstanding) == (5, 1)


def test_a_consumer_that_was_deleted_and_made_again_is_asked_anew() -> None:
    machine = puller()
    reader = fetch(machine, 3, timeout_s=30)
    machine.absorb([status(asked(reader.step(0.0, 1)), "409 Consumer Deleted", 3)], 0.1)
    assert (machine.wants_wake(), machine.owed, machine.outstanding) == (True, 0, 0)
    with pytest.raises(ConsumerNotFound):
        reader.step(0.1, 1)
    reader.leave(is_cancelled=False)
    assert body(fetch(machine, 2, now=0.2, timeout_s=30).step(0.2, 1))["batch"] == 2


def test_nothing_is_asked_while_there_is_no_session() -> None:
    machine = puller()
    assert fetch(machine, 1, timeout_s=1.0).step(0.0, None) == Wait(1.0)
    assert Flow(machine, PullLimits()).step(0.0, None) == Wait(None)


def test_a_request_that_was_not_published_is_taken_back() -> None:
    machine = puller()
    machine.withdraw(asked(fetch(machine, 7).step(0.0, 1)))
    assert (machine.owed, machine.outstanding) == (0, 0)


# ---- a flow --------------------------------------------------------------------------------------------------------


def test_a_flow_keeps_its_window_filled() -> None:
    machine = puller()
    machine.message_bytes = 100.0
    flow = Flow(machine, PullLimits(max_messages=100))
    assert body(flow.step(0.0, 1)) == {"batch": 100, "expires": 30_000_000_000, "idle_heartbeat": 5_000_000_000}
    assert flow.step(0.0, 1) == Wait(10.0)
    machine.absorb([message(number) for number in range(60)], 0.1)
    assert flow.step(0.1, 1) == 50  # then 50 are owed or buffered, and it is time to ask
    for _ in range(50):
        machine.buffer.popleft()
    assert body(flow.step(0.2, 1))["batch"] == 50
    assert machine.owed == 90
    assert flow.step(0.2, 1) == 10


def work(flow: Flow[AckableMessage], machine: Puller[AckableMessage], now: float, each_s: float) -> tuple[float, int]:
    """Take everything that is asked for, as soon as it is asked for; returns the time after it, and how much it was."""
    batch = 0
    while not isinstance(step := flow.step(now, 1), Wait):
        if isinstance(step, Ask):
            batch += body(step)["batch"]
            assert machine.owed + len(machine.buffer) <= flow._limits.max_messages
            continue
        assert step is not None
        for _ in range(step):
            machine.buffer.popleft()
        now += step * each_s
    machine.absorb([message(number) for number in range(machine.owed)], now)
    return now, batch


def test_a_reader_that_keeps_up_is_given_more_at_a_time() -> None:
    """Small requests leave the server waiting in between."""
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=3000))
    now, batches = 0.0, []
    for _ in range(8):
        now, batch = work(flow, machine, now, each_s=1e-5)
        batches.append(batch)
    assert (*batches[:2], max(batches)) == (32, 468, 3000)
    assert flow._window == 3000


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize(("size", "expected"), [(1000, 500), (1 << 16, 256), (1 << 20, 16), (9 << 20, 2)])
def test_large_messages_make_the_window_smaller(size: int, expected: int, is_counted: bool) -> None:
    """More than the server keeps for a client is the end of its connection."""
    machine = puller()
    flow = Flow(machine, PullLimits())
    assert body(flow.step(0.0, 1))["batch"] == 32
    some = [of_size(size), of_size(100)]
    machine.absorb(some, 0.0, (2, 2 * size) if is_counted else (0, 0))
    machine.buffer.clear()
    machine._forget_requests()
    assert body(flow.step(0.0, 1))["batch"] == expected


def test_a_window_of_large_messages_grows_again_when_small_ones_follow() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=500))
    machine.absorb([of_size(1 << 20)], 0.0)
    windows = [flow._within_bytes()]
    for _ in range(100):
        machine.absorb([of_size(100)], 0.0)
        windows.append(flow._within_bytes())
    assert (windows[0], windows[-1]) == (16, 500)
    assert windows == sorted(windows)


def test_a_fetch_asks_for_large_messages_some_at_a_time() -> None:
    machine = puller()
    reader = fetch(machine, 100, timeout_s=5.0)
    assert body(reader.step(0.0, 1))["batch"] == 32
    assert isinstance(reader.step(0.0, 1), Wait)
    machine.absorb([of_size(1 << 20)] * 15, 0.1)
    assert not machine.wants_wake()
    machine.absorb([of_size(1 << 20)], 0.1)
    assert machine.wants_wake()
    assert isinstance(reader.step(0.1, 1), Wait)  # 16 are still to come, as many as may be
    machine.absorb([of_size(1 << 20)] * 8, 0.2)
    assert machine.wants_wake()
    assert body(reader.step(0.2, 1))["batch"] == 8
    while machine.owed:
        machine.absorb([of_size(1 << 20)], 0.3)
        if machine.wants_wake():
            while isinstance(reader.step(0.3, 1), Ask):
                assert machine.owed <= 16
    assert reader.step(0.3, 1) is None
    assert len(reader.messages) == 100


def test_a_fetch_that_does_not_wait_asks_again_for_what_it_did_not_dare_to() -> None:
    machine = puller()
    reader = fetch(machine, 40, no_wait=True)
    assert body(reader.step(0.0, 1)) == {"batch": 32, "no_wait": True}
    assert isinstance(reader.step(0.0, 1), Wait)
    machine.absorb([message(number) for number in range(32)], 0.1)
    assert machine.wants_wake()
    ask = asked(reader.step(0.1, 1))
    assert json.loads(ask.body) == {"batch": 8, "no_wait": True}
    machine.absorb([status(ask, "404 No Messages", 8)], 0.2)
    assert reader.step(0.2, 1) is None
    assert len(reader.messages) == 32


def test_fetches_of_large_messages_at_a_time_share_what_may_be_asked_for() -> None:
    machine = puller()
    machine.message_bytes = float(1 << 20)
    readers = [fetch(machine, 20, timeout_s=5.0), fetch(machine, 3, timeout_s=5.0)]
    done, now = set[int](), 0.0
    while len(done) < 2:
        now += 0.01
        for number, reader in enumerate(readers):
            while isinstance(step := reader.step(now, 1), Ask):
                assert machine.owed <= 16
            if step is None and number not in done:
                reader.leave(is_cancelled=False)
                done.add(number)
        if machine.owed:
            machine.absorb([of_size(1 << 20)], now)
        assert now < 5.0
    assert [len(reader.messages) for reader in readers] == [20, 3]


@pytest.mark.parametrize(("owed", "expected"), [(20, 12), (32, 2)])
def test_a_fetch_that_nobody_asks_for_asks_however_much_others_wait_for(owed: int, expected: int) -> None:
    """Their requests may wait for something else, or for longer."""
    machine = puller()
    first = fetch(machine, owed, timeout_s=30.0)
    asked(first.step(0.0, 1))
    assert isinstance(first.step(0.0, 1), Wait)
    assert body(fetch(machine, 20, no_wait=True).step(0.0, 1))["batch"] == expected
    machine = puller()
    asked(fetch(machine, owed, timeout_s=30.0).step(0.0, 1))
    grouped = fetch(machine, 20, timeout_s=30.0, priority=Priority(group="a", min_pending=5))
    assert body(grouped.step(0.0, 1))["batch"] == expected


def test_a_flow_with_a_bound_of_bytes_does_not_guess() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=100, max_bytes=64 << 20))
    assert flow._within_bytes() == 100
    machine.absorb([of_size(1 << 20)], 0.0)
    assert flow._within_bytes() == 100


def test_a_window_is_doubled_from_its_beginning_at_any_time() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=10_000))
    now, windows = 1000.0, []
    for _ in range(8):
        now, _ = work(flow, machine, now, each_s=1e-6)
        windows.append(flow._window)
    assert windows[0] == pull.FIRST_WINDOW
    assert list(dict.fromkeys(windows)) == [500, 1000, 2000, 4000, 8000, 10_000][: len(set(windows))]
    assert len(set(windows)) > 3


def test_a_reader_goes_on_one_by_one_where_asking_is_due_and_not_possible() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=10))
    ask = asked(flow.step(0.0, 1))
    machine.absorb([message(1), message(2), message(3), status(ask, "409 Leadership Change", 7)], 0.1)
    assert flow.step(0.1, 1) == 1  # the server has just refused
    assert flow.step(0.1, None) == 1  # there is no session
    assert body(flow.step(1.0, 1))["batch"] == 7


def test_a_slow_reader_is_given_what_it_takes_in_a_second() -> None:
    """What it does not come to is withheld from others, and its ack_wait is running."""
    machine = puller()
    flow = Flow(machine, PullLimits())
    now, _ = work(flow, machine, 0.0, each_s=0.1)
    for _ in range(3):
        now, batch = work(flow, machine, now, each_s=0.1)
        assert machine.owed + len(machine.buffer) <= 500
    assert batch <= 10
    for _ in range(5):
        now, batch = work(flow, machine, now, each_s=3.0)
    assert batch == 1
    for _ in range(40):
        now, batch = work(flow, machine, now, each_s=1e-5)
    assert batch > 500  # and it recovers


def test_messages_that_come_one_by_one_are_no_reason_for_a_larger_window() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits())
    asked(flow.step(0.0, 1))
    for number in range(3000):
        now = float(number)
        machine.absorb([message(number)], now)
        while not isinstance(step := flow.step(now, 1), Wait):
            if isinstance(step, int):
                machine.buffer.popleft()
                now += 1e-5
            assert machine.owed <= 500


def test_a_window_of_one() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=1))
    assert body(flow.step(0.0, 1))["batch"] == 1
    machine.absorb([message()], 0.1)
    assert flow.step(0.1, 1) == 1
    machine.buffer.clear()
    assert body(flow.step(0.2, 1))["batch"] == 1


def test_bytes_bound_a_flow() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=100, max_bytes=1000))
    ask = asked(flow.step(0.0, 1))
    assert body(ask)["max_bytes"] == 1000
    machine.absorb([message(1, 400), message(2, 400)], 0.1)
    assert flow.step(0.1, 1) == 1  # one request at a time
    machine.absorb([status(ask, "409 Message Size Exceeds MaxBytes", 98)], 0.2)
    assert flow.step(0.2, 1) == 1  # more than half of the bytes are here
    machine.buffer.popleft()
    ask = asked(flow.step(0.3, 1))
    assert 400 < body(ask)["max_bytes"] < 600
    machine.absorb([status(ask, "409 Message Size Exceeds MaxBytes", 99)], 0.4)
    assert flow.step(0.4, 1) == 1  # what is left is too little: it waits until the buffer is empty
    machine.buffer.popleft()
    ask = asked(flow.step(0.5, 1))
    assert body(ask)["max_bytes"] == 1000
    machine.absorb([status(ask, "409 Message Size Exceeds MaxBytes", 100)], 0.6)
    with pytest.raises(ConfigError, match="max_bytes=1000"):
        flow.step(0.6, 1)


def test_a_flow_that_had_to_be_empty_once_asks_again_at_half_of_its_bytes() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=100, max_bytes=1000))
    machine.absorb([of_size(300)], 0.0)
    part = machine.ask(flow, 9, now=0.0, expires_s=30.0, max_bytes=700, is_whole=False)
    machine.absorb([status(part, "409 Message Size Exceeds MaxBytes", 9, 700)], 0.1)
    assert flow.must_empty
    machine.buffer.clear()
    whole = asked(flow.step(0.2, 1))
    assert body(whole)["max_bytes"] == 1000
    machine.absorb([of_size(400), status(whole, "409 Message Size Exceeds MaxBytes", 90, 600)], 0.3)
    assert isinstance(flow.step(0.3, 1), Ask)


def test_a_flow_learns_how_large_its_messages_are() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=20, max_bytes=100_000))
    first = asked(flow.step(0.0, 1))
    assert body(first)["max_bytes"] == 100_000  # nothing is known: one request at a time
    machine.absorb([of_size(250), of_size(200), status(first, "409 Batch Completed", 18, 99_550)], 0.1)
    second = asked(flow.step(0.1, 1))
    assert (body(second)["batch"], body(second)["max_bytes"]) == (18, 2 * 18 * 250)
    machine.buffer.clear()
    machine.absorb([status(second, "409 Batch Completed", 18, 9000)], 0.2)
    assert body(flow.step(0.2, 1))["max_bytes"] == 2 * 20 * 250
    flow = Flow(puller(), PullLimits(max_bytes=pull.SHARES * pull.LARGEST_USUAL_BYTES))
    assert body(flow.step(0.0, 1))["max_bytes"] == pull.LARGEST_USUAL_BYTES


def test_where_bytes_are_short_they_are_counted_after_an_eighth_of_the_buffer() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=100, max_bytes=10_000))
    asked(flow.step(0.0, 1))
    machine.absorb([of_size(100)] * 72, 0.1)
    assert flow.step(0.1, 1) == 9


def test_a_flow_believes_what_a_status_says_is_undelivered_and_asks_for_that_only() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=10))
    first = asked(flow.step(0.0, 1))
    machine.absorb([message(number) for number in range(6)], 0.1)
    assert flow.step(0.1, 1) == 5
    machine.buffer.clear()
    second = asked(flow.step(0.1, 1))
    assert (body(first)["batch"], body(second)["batch"], machine.owed) == (10, 6, 10)
    machine.absorb([status(first, "408 Request Timeout", 4)], 30.0)
    assert (machine.owed, machine.outstanding) == (6, 1)
    assert isinstance(flow.step(30.0, 1), Wait)
    machine.absorb([message(number) for number in range(2)], 30.1)
    machine.buffer.clear()
    assert body(flow.step(30.1, 1))["batch"] == 6


def test_a_request_that_used_its_bytes_to_the_last_is_over() -> None:
    """The server says nothing about it (2.15)."""
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=100, max_bytes=1000))
    asked(flow.step(0.0, 1))
    one = message(1, 500 - len(message(1, 0).raw_reply or b"") - 1)
    machine.absorb([one], 0.1)
    assert machine.outstanding == 1
    machine.absorb([one], 0.2)
    assert (machine.owed, machine.owed_bytes, machine.outstanding) == (0, 0, 0)
    machine.buffer.clear()
    assert body(flow.step(0.3, 1))["max_bytes"] == 1000


def test_bytes_are_counted_as_the_server_does() -> None:
    """In bytes: a subject may have characters of several."""
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=100, max_bytes=1000))
    asked(flow.step(0.0, 1))
    machine.absorb([AckableMessage("ü", b"12345", b"$JS.ACK", b"NATS/1.0\r\n\r\n", None)], 0.1)
    assert machine.owed_bytes == 1000 - 2 - 5 - 7 - 12
    assert pull.size_bytes(machine.buffer[0]) == 2 + 5 + 7 + 12
    assert pull.size_bytes(AckableMessage("ab", b"12345", None, None, None)) == 7


def test_small_messages_do_not_make_a_request_wait_for_the_bytes_of_another() -> None:
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=100, max_bytes=64 << 20))
    assert body(flow.step(0.0, 1))["max_bytes"] == 4 << 20
    for _ in range(4):
        for _ in range(2):
            machine.absorb([message(number) for number in range(25)], 0.1)
            assert flow.step(0.1, 1) == 25
            machine.buffer.clear()
        assert body(flow.step(0.1, 1))["batch"] == 50
        assert machine.outstanding >= 2


class _BoundedServer:
    """Delivers what fits; says what it leaves, but nothing when there is not a byte left (2.15)."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[int]] = {}

    def accept(self, ask: Ask) -> None:
        fields = json.loads(ask.body)
        self.waiting[ask.reply] = [fields["batch"], fields["max_bytes"]]

    def send(self, data_bytes: int) -> list[AckableMessage]:
        """The next message to the request that waits longest, or what ends that one."""
        for reply, left in list(self.waiting.items()):
            one = message(1, data_bytes)
            size = pull.size_bytes(one)
            sent = [one] if size <= left[1] else []
            if sent:
                left[0] -= 1
                left[1] -= size
            if not sent or not left[0] or not left[1]:
                del self.waiting[reply]
            if sent and (left[0] or not left[1]):
                return sent
            pending = f"Nats-Pending-Messages: {left[0]}\r\nNats-Pending-Bytes: {left[1]}\r\n\r\n"
            line = "Batch Completed" if sent else "Message Size Exceeds MaxBytes"
            return [*sent, AckableMessage(reply, b"", None, f"NATS/1.0 409 {line}\r\n{pending}".encode(), None)]
        return []


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(400, 4000),
    st.lists(st.one_of(st.integers(0, 300), st.sampled_from([0, 155, 200])), min_size=1, max_size=200),
    st.integers(1, 30),
)
def test_a_flow_never_has_more_than_its_bounds_and_gets_everything(
    max_messages: int, max_bytes: int, sizes: list[int], at_once: int
) -> None:
    machine = puller()
    flow = Flow(machine, PullLimits(max_messages=max_messages, max_bytes=max_bytes))
    server = _BoundedServer()
    coming, taken = list(sizes), 0
    for _ in range(20 * len(sizes)):
        if taken == len(sizes):
            return
        step = flow.step(0.0, 1)
        if isinstance(step, Ask):
            server.accept(step)
        elif isinstance(step, int):
            taken += step
            for _ in range(step):
                machine.buffer.popleft()
        else:
            assert server.waiting, "it waits for nothing"
            arrived: list[AckableMessage] = []
            for _ in range(at_once):
                some = server.send(coming[0]) if coming else []
                del coming[: len([each for each in some if each.raw_reply])]
                arrived += some
            machine.absorb(arrived, 0.0)
        owed, owed_bytes = (sum(each[place] for each in server.waiting.values()) for place in (0, 1))
        assert len(machine.buffer) + owed <= max_messages
        assert sum(map(pull.size_bytes, machine.buffer)) + owed_bytes <= max_bytes
    raise AssertionError("it came to a standstill")


def test_release_tells_what_to_give_back() -> None:
    machine = puller()
    asked(Flow(machine, PullLimits()).step(0.0, 1))
    machine.absorb([message(1), message(2)], 0.1)
    assert machine.release() == [message(1).raw_reply, message(2).raw_reply]
    assert (len(machine.buffer), machine.owed, machine.outstanding) == (0, 0, 0)


# ---- priority groups -----------------------------------------------------------------------------------------------


def test_a_pin_is_remembered_and_forgotten() -> None:
    machine = puller()
    group = Priority(group="g")
    pinned = message(1, headers=b"NATS/1.0\r\nNats-Pin-Id: p1\r\n\r\n")
    reader = fetch(machine, 1, priority=group)
    assert body(reader.step(0.0, 1)).get("id") is None
    machine.absorb([pinned], 0.1)
    reader.step(0.1, 1)
    reader.leave(is_cancelled=False)
    reader = fetch(machine, 1, now=1.0, priority=group)
    ask = asked(reader.step(1.0, 1))
    assert (body(ask)["group"], body(ask)["id"]) == ("g", "p1")
    machine.absorb([status(ask, "423 Nats-Wrong-Pin-Id", 1)], 1.1)
    assert "id" not in body(reader.step(1.2, 1))


def test_priorities_and_limits_may_be_as_low_and_as_high_as_they_say() -> None:
    for priority in (0, 9):
        assert Priority(group="g", min_pending=1, min_ack_pending=1, priority=priority).priority == priority
    assert PullLimits() == PullLimits(max_messages=8192, max_bytes=None, expires_s=30.0, heartbeat_s=None)
    limits = PullLimits(max_messages=1, max_bytes=1, expires_s=4.0, heartbeat_s=2.0)
    assert (limits.max_bytes, limits.heartbeat_s) == (1, 2.0)
    fetch(puller(), 1, max_bytes=1)


@pytest.mark.parametrize(
    "wrong",
    [{"max_messages": 0}, {"max_bytes": 0}, {"expires_s": 0.0}, {"heartbeat_s": 0.0}, {"heartbeat_s": 15.01}],
    ids=str,
)
def test_limits_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong)).removesuffix('_s')}="):
        PullLimits(**wrong)


@pytest.mark.parametrize(("timeout_s", "expires_ns"), [(0.2, 180_000_000), (0.4, 360_000_000), (4.0, 3_950_000_000)])
def test_a_request_ends_a_tenth_before_a_short_fetch_and_a_moment_before_a_long_one(
    timeout_s: float, expires_ns: int
) -> None:
    assert body(fetch(puller(), 1, timeout_s=timeout_s).step(0.0, 1))["expires"] == pytest.approx(expires_ns, abs=1)


@pytest.mark.parametrize(
    ("expires_s", "heartbeat_ns"),
    [(30.0, 5_000_000_000), (8.0, 2_000_000_000), (2.0, 500_000_000), (1.99, None)],
)
def test_a_request_that_is_not_short_has_four_heartbeats_or_one_in_five_seconds(
    expires_s: float, heartbeat_ns: int | None
) -> None:
    flow = Flow(puller(), PullLimits(expires_s=expires_s))
    assert body(flow.step(0.0, 1)).get("idle_heartbeat") == heartbeat_ns
    own = Flow(puller(), PullLimits(expires_s=expires_s, heartbeat_s=0.25))
    assert body(own.step(0.0, 1))["idle_heartbeat"] == 250_000_000


@pytest.mark.parametrize(
    "line", ["404 No Messages", "408 Request Timeout", "409 Batch Completed", "409 Message Size Exceeds MaxBytes"]
)
def test_an_answer_that_is_no_refusal_ends_the_pause_of_those_before(line: str) -> None:
    machine = puller()
    refused = asked(fetch(machine, 2, timeout_s=30).step(0.0, 1))
    machine.absorb([status(refused, "409 Leadership Change")], 0.1)
    assert machine.may_ask_at() > 0.1
    machine.fetches.clear()
    reader = fetch(machine, 2, now=0.2, timeout_s=30, no_wait=line.startswith("404"), max_bytes=1000)
    ask = asked(reader.step(0.2, 1))
    machine.absorb([status(ask, line, 1)], 0.21)
    assert machine.may_ask_at() < 0
    again = asked(fetch(machine, 2, now=0.3, timeout_s=30).step(0.3, 1))
    machine.absorb([status(again, "409 Leadership Change")], 0.3)
    assert machine.may_ask_at() == pytest.approx(0.3 + pull.PAUSE.first_s)  # the first again, not the second


def test_a_message_ends_the_pause_too_and_pauses_grow_up_to_a_bound() -> None:
    machine = puller()
    pauses = []
    for number in range(8):
        now = 2.0 * number
        machine.absorb([status(asked(fetch(machine, 2, now=now, timeout_s=5).step(now, 1)), "503")], now)
        machine.fetches.clear()
        pauses.append(round(machine.may_ask_at() - now, 3))
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert machine.is_unavailable
    asked(fetch(machine, 2, now=100.0, timeout_s=5).step(100.0, 1))
    machine.absorb([message(1)], 100.1)
    assert (machine.may_ask_at() < 0, machine.is_unavailable) == (True, False)


def test_one_message_is_worth_waking_a_flow_for() -> None:
    machine = puller()
    asked(Flow(machine, PullLimits()).step(0.0, 1))
    assert not machine.wants_wake()
    machine.absorb([message(1)], 0.1)
    assert machine.wants_wake()


def test_priorities_are_passed_on() -> None:
    machine = puller()
    options = Priority(group="g", min_pending=5, min_ack_pending=6, priority=7)
    found = body(Flow(machine, PullLimits(), options).step(0.0, 1))
    assert {name: found[name] for name in ("group", "min_pending", "min_ack_pending", "priority")} == {
        "group": "g",
        "min_pending": 5,
        "min_ack_pending": 6,
        "priority": 7,
    }


@pytest.mark.parametrize(
    "wrong", [{"min_pending": 1}, {"group": "g", "priority": 10}, {"group": "g", "min_ack_pending": 0}, {"group": 7}]
)
def test_priorities_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Priority(**wrong)


def test_keywords_without_a_group_say_nothing_or_are_refused() -> None:
    assert Priority.of(None, None, None, None) is None
    assert Priority.of("g", 1, 2, 3) == Priority(group="g", min_pending=1, min_ack_pending=2, priority=3)
    with pytest.raises(ConfigError, match="give group= too"):
        Priority.of(None, None, None, 3)


# ---- a server that does anything -----------------------------------------------------------------------------------

_STATUSES = [
    "404 No Messages",
    "408 Request Timeout",
    "409 Leadership Change",
    "409 Server Shutdown",
    "409 Exceeded MaxWaiting",
    "423 Nats-Pin-Id mismatch",
    "503",
    "418 ?",
    "100 Idle Heartbeat",
]
_EVENTS = st.one_of(
    st.tuples(st.just("messages"), st.integers(1, 40), st.integers(0, 5)),
    st.tuples(st.just("status"), st.sampled_from(_STATUSES), st.integers(0, 5)),
    st.tuples(st.just("forget"), st.just(0), st.integers(0, 5)),
    st.tuples(st.just("session"), st.just(0), st.just(0)),
    st.tuples(st.just("time"), st.integers(1, 40), st.just(0)),
)


class _Server:
    """Keeps requests as a server does: each with what it still has to deliver; ends any of them as it likes."""

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}
        self.delivered = 0

    def accept(self, ask: Ask) -> None:
        self.waiting[ask.reply] = json.loads(ask.body)["batch"]

    def deliver(self, reply: str, count: int) -> list[AckableMessage]:
        count = min(count, self.waiting[reply])
        self.waiting[reply] -= count
        if not self.waiting[reply]:
            del self.waiting[reply]
        self.delivered += count
        return [message(number) for number in range(count)]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["flow", "fill", "fetch"]), st.lists(_EVENTS, max_size=60), st.integers(1, 50))
def test_nobody_ever_waits_for_nothing(kind_of_reader: str, events: list[tuple[str, Any, int]], window: int) -> None:
    machine = puller()
    server = _Server()
    now, session, taken = 0.0, 1, 0
    reader: Fetch[AckableMessage] | Flow[AckableMessage] = (
        Flow(machine, PullLimits(max_messages=window))
        if kind_of_reader == "flow"
        else fetch(machine, window, timeout_s=1e6, fill=kind_of_reader == "fill")
    )

    def settle() -> Wait | None:
        nonlocal taken
        for _ in range(10_000):
            try:
                step = reader.step(now, session)
            except JetStreamUnavailable:
                return None
            if isinstance(step, Ask):
                server.accept(step)
            elif isinstance(step, int):
                assert 1 <= step <= len(machine.buffer)
                for _ in range(step):
                    machine.buffer.popleft()
                taken += step
            else:
                return step
        raise AssertionError("it never waits")

    for kind, value, which in [*events, ("time", 0, 0)]:
        wait = settle()
        if wait is None:
            return
        # It has a request at the server, or knows when it will give up believing so, or when it will ask again.
        assert server.waiting or wait.until is not None
        replies = list(server.waiting)
        reply = replies[which % len(replies)] if replies else ""
        if kind == "messages" and reply:
            machine.absorb(server.deliver(reply, value), now)
        elif kind == "status" and reply:
            undelivered = server.waiting[reply] if "408" in value else None
            if not value.startswith("100"):
                del server.waiting[reply]
            machine.absorb([status(Ask(reply, b""), value, undelivered)], now)
        elif kind == "forget" and reply:
            del server.waiting[reply]
        elif kind == "session":
            server.waiting.clear()
            session += 1
        elif kind == "time":
            now += value
            if wait.until is not None and now >= wait.until:
                machine.on_time(now)
    # Once the server behaves, everything it has is delivered within the time a request may be believed in.
    for _ in range(200):
        wait = settle()
        if wait is None:
            return
        if server.waiting:
            return
        assert wait.until is not None
        now = max(now, wait.until)
        machine.on_time(now)
    raise AssertionError("no request ever came")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 5)), max_size=60), st.integers(1, 50))
def test_a_flow_never_has_more_than_its_window_asked_for_and_buffered(
    events: list[tuple[bool, int, int]], window: int
) -> None:
    """With a server that says how much an ended request leaves undelivered."""
    machine = puller()
    server = _Server()
    flow = Flow(machine, PullLimits(max_messages=window))
    for is_end, count, which in events:
        while not isinstance(step := flow.step(0.0, 1), Wait):
            if isinstance(step, Ask):
                server.accept(step)
            else:
                assert step is not None
                for _ in range(step):
                    machine.buffer.popleft()
            assert sum(server.waiting.values()) + len(machine.buffer) <= window
        reply = list(server.waiting)[which % len(server.waiting)]
        if is_end:
            machine.absorb([status(Ask(reply, b""), "408 Request Timeout", server.waiting.pop(reply))], 0.0)
        else:
            machine.absorb(server.deliver(reply, count), 0.0)
