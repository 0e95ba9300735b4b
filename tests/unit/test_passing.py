"""Events that several threads carry: each is passed on, also when a thread is interrupted with some in hand."""

from __future__ import annotations

import logging

import pytest

from jetspark.core.connection import Connection
from jetspark.core.dispatcher import Dispatcher
from jetspark.core.events import ConnectionEvent
from jetspark.core.options import ConnectOptions
from jetspark.core.passing import Passing
from jetspark.core.reconnect import parse_servers
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
