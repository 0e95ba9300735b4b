"""Threads that share a connection: event handoff though one is interrupted, who writes, who reads. Time is stated."""

from __future__ import annotations

import logging

import pytest

from jetspark.core.connection import Connection
from jetspark.core.dispatcher import Dispatcher
from jetspark.core.events import ConnectionEvent
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import parse_servers
from jetspark.core.transport import GATHER_S, LEASE_S, LINGER_S, MUCH_BYTES, Gathering, Passing, ReadingLease
from jetspark.errors import ConnectionLost

ME, OTHER = 7, 8


class Told:
    """A program that is told of events, and may have them interrupted."""

    def __init__(self) -> None:
        self.connection = Connection(ConnectOptions(), parse_servers("nats://a"), inbox="_INBOX.me", jitter=lambda: 0.5)
        self.passing = Passing(self.connection, Dispatcher(logging.getLogger("jetspark.test"), self.on_event))
        self.events: list[ConnectionEvent] = []
        self.were_under_way: list[tuple[bool, bool]] = []
        self.interrupt: BaseException | None = None

    def happen(self, *reasons: str) -> None:
        for reason in reasons:
            self.connection.attempt_failed(self.connection.pool.servers[0], ConnectionLost(reason), 1)

    def on_event(self, event: ConnectionEvent) -> None:
        self.were_under_way.append((self.passing.is_under_way(ME), self.passing.is_under_way(OTHER)))
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            raise interrupt
        self.events.append(event)

    def pass_on(self, me: int = ME) -> None:
        self.passing.pass_on(me, self.passing.take(me))


def test_what_was_passed_on_is_in_nobodys_hand() -> None:
    told = Told()
    told.happen("one", "two")
    taken = told.passing.take(ME)
    assert told.passing.has_any(ME)
    assert not told.passing.has_any(OTHER)
    assert not told.passing.is_under_way(ME)
    told.passing.pass_on(ME, taken)
    assert told.events == taken
    assert not told.passing.has_any(ME)
    assert told.were_under_way == [(True, False)] * 2  # the program is called by this thread's call of pass_on


def test_nothing_to_take_is_nothing_in_hand() -> None:
    told = Told()
    assert told.passing.take(ME) == []
    assert not told.passing.has_any(ME)


def test_what_an_interrupt_left_in_hand_is_told_by_the_next() -> None:
    told = Told()
    told.happen("one", "two")
    told.interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        told.pass_on()
    assert told.events == []
    assert told.passing.has_any(ME)
    assert not told.passing.is_under_way(ME)  # it is noted, and the call is over
    told.passing.put_back(ME)
    told.passing.forget(ME)
    told.happen("three")
    told.pass_on(OTHER)
    assert [str(event.error) for event in told.events] == ["one", "two", "three"]  # type: ignore[union-attr]
    assert not told.passing.has_any(ME)


def test_what_was_taken_twice_is_put_back_in_order() -> None:
    told = Told()
    told.happen("one")
    told.passing.take(ME)
    told.happen("two")
    told.passing.take(ME)
    told.passing.put_back(ME)
    told.passing.forget(ME)
    told.pass_on()
    assert [str(event.error) for event in told.events] == ["one", "two"]  # type: ignore[union-attr]


# ---- write coalescing ------------------------------------------------------------------------------------------------


class Publishers:
    """They write down when they would have written."""

    def __init__(self) -> None:
        self.gathering = Gathering()
        self.clock_s, self.gathered_bytes = 100.0, 0
        self.written_at: list[float] = []

    def publish(self, size: int, *, every_s: float, times: int) -> None:
        for _ in range(times):
            self.gathered_bytes += size
            if self.clock_s >= self.gathering.until:
                self.gathering.begin(self.clock_s, self.gathered_bytes)
                self.written_at.append(self.clock_s)
                self.gathered_bytes = 0
            self.clock_s += every_s

    def pauses(self) -> list[float]:
        return [after - before for before, after in zip(self.written_at, self.written_at[1:], strict=False)]


@pytest.fixture
def publishers() -> Publishers:
    return Publishers()


def test_messages_with_time_between_them_are_written_at_once(publishers: Publishers) -> None:
    publishers.publish(10 * MUCH_BYTES, every_s=LINGER_S * 1.01, times=20)
    assert len(publishers.written_at) == 20


def test_a_small_stream_is_written_in_short_turns(publishers: Publishers) -> None:
    publishers.publish(MUCH_BYTES // 100, every_s=GATHER_S / 10, times=1000)
    assert max(publishers.pauses()) < 1.2 * GATHER_S
    assert publishers.gathered_bytes  # what is written last by nobody is left to the connection's thread


def test_a_broad_stream_is_written_in_turns_that_grow_and_never_past_the_bound(publishers: Publishers) -> None:
    publishers.publish(MUCH_BYTES // 10, every_s=GATHER_S / 20, times=4000)
    assert publishers.pauses()[0] < publishers.pauses()[1] < publishers.pauses()[2]
    assert LINGER_S <= max(publishers.pauses()) < 1.1 * LINGER_S
    publishers.publish(1, every_s=GATHER_S / 10, times=400)
    assert max(publishers.pauses()[-5:]) < 1.2 * GATHER_S


# ---- reading lease ---------------------------------------------------------------------------------------------------


def test_one_holder_at_a_time() -> None:
    lease = ReadingLease()
    assert lease.take(1, now=100.0)
    assert lease.take(1, now=100.1)  # its holder may ask again
    assert not lease.take(2, now=100.2)
    assert lease.holder == 1
    lease.end()
    assert lease.holder == 0
    assert lease.take(2, now=100.2)


def test_a_holder_that_is_silent_for_too_long_loses_it() -> None:
    lease = ReadingLease()
    lease.take(1, now=100.0)
    lease.lapse(now=100.0 + LEASE_S * 0.99)
    assert lease.holder == 1
    lease.lapse(now=100.0 + LEASE_S)
    assert lease.holder == 0


def test_another_one_takes_it_from_a_silent_holder() -> None:
    lease = ReadingLease()
    lease.take(1, now=100.0)
    assert lease.take(2, now=100.0 + LEASE_S)
    assert lease.holder == 2


def test_a_holder_that_renews_it_keeps_it() -> None:
    lease = ReadingLease()
    lease.take(1, now=100.0)
    lease.renew(now=100.0 + LEASE_S)
    lease.lapse(now=100.0 + LEASE_S * 1.99)
    assert lease.holder == 1
    assert not lease.take(2, now=100.0 + LEASE_S * 1.99)
