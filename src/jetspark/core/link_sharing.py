"""Rules by which threads share one connection: who carries its events, who writes, who reads. Pure.

A thread is a number that is given, and time is an argument.

Event handoff (``Passing``). A thread takes events with the link's lock, and passes them on without it. If it is
interrupted in between, they are found noted here, and put back into the connection. The thread that passes them on then
may tell something twice; nothing that a call waits for is lost.

Write coalescing (``Gathering``). A message that comes alone is written by its publisher at once. Those that follow
sooner than ``GATHER_S`` gather, and leave with the next write or when the connection's thread has seen them wait for
``LINGER_S``. Waking that thread for each of them instead makes the two fight for the interpreter, and halved the rate.

Reading lease (``ReadingLease``). One thread at a time reads, for as long as it shows signs of life.
"""

from __future__ import annotations

import sys

from jetspark.core.connection import Connection
from jetspark.core.dispatcher import Dispatcher, Event

__all__ = ["GATHER_S", "LEASE_S", "LINGER_S", "MUCH_BYTES", "Gathering", "Passing", "ReadingLease"]

# ---- event handoff ---------------------------------------------------------------------------------------------------


class Passing:
    """The events that threads have in hand."""

    def __init__(self, connection: Connection, dispatcher: Dispatcher) -> None:
        self._connection, self._dispatcher = connection, dispatcher
        self._in_hand: dict[int, list[list[Event]]] = {}
        """By thread: a call of the program's may make it take more before the first are passed on."""

    def take(self, me: int) -> list[Event]:
        """With the lock: what happened, for this thread to pass on."""
        events = self._connection.events()
        if events:
            self._in_hand.setdefault(me, []).append(events)
        return events

    def pass_on(self, me: int, events: list[Event]) -> None:
        """Without the lock."""
        self._dispatcher.deliver(events)
        if me in self._in_hand:
            self._in_hand[me].pop()
            if not self._in_hand[me]:
                del self._in_hand[me]

    def has_any(self, me: int) -> bool:
        return me in self._in_hand

    def is_under_way(self, me: int) -> bool:
        """Whether the caller is called by what we have called; what is noted may be left from an interrupted call."""
        if me not in self._in_hand:
            return False
        frame = sys._getframe()
        while (caller := frame.f_back) is not None:
            frame = caller
            if frame.f_code is Passing.pass_on.__code__ and frame.f_locals["self"] is self:
                return True
        return False

    def put_back(self, me: int) -> None:
        """With the lock: have the connection tell the events again that this thread took and could not pass on."""
        for events in reversed(self._in_hand[me]):
            self._connection.put_back(events)

    def forget(self, me: int) -> None:
        """They were put back."""
        self._in_hand.pop(me, None)


# ---- write coalescing ------------------------------------------------------------------------------------------------


GATHER_S = 100e-6
LINGER_S = 1e-3
# Where this much has gathered meanwhile, the next write is put off for twice as long, up to LINGER_S.
MUCH_BYTES = 2 << 10


class Gathering:
    """How long messages gather before one publisher writes them all."""

    def __init__(self) -> None:
        self._pause_s = GATHER_S
        self.until = 0.0
        """From then on a publisher writes, and calls :meth:`begin` before."""

    def begin(self, now: float, gathered_bytes: int) -> None:
        """What has gathered is written now; what follows gathers anew."""
        self._pause_s = min(2 * self._pause_s, LINGER_S) if gathered_bytes >= MUCH_BYTES else GATHER_S
        self.until = now + self._pause_s


# ---- reading lease ---------------------------------------------------------------------------------------------------


# For how long a holder may be silent.
LEASE_S = 1.0


class ReadingLease:
    """One right, and the thread that has it.

    Invariant: one that has a time to run out has a holder; so the time is set first and the holder removed last, and
    what an interrupt leaves undone, time or the next call does.
    """

    def __init__(self) -> None:
        self.holder = 0
        """Its thread, by identifier; 0 for none."""
        self._until = 0.0

    def take(self, me: int, now: float) -> bool:
        """Whether the caller has it from here on. False while another one has it, and has not been silent."""
        if self.holder not in (0, me) and now < self._until:
            return False
        self._until = now + LEASE_S
        self.holder = me
        return True

    def renew(self, now: float) -> None:
        """Its holder is alive."""
        self._until = now + LEASE_S

    def lapse(self, now: float) -> None:
        """Take it from a holder that was silent for too long."""
        if self.holder and now >= self._until:
            self.holder = 0

    def end(self) -> None:
        """Its holder has no use for it any more."""
        self.holder = 0
