"""Rules by which threads share one connection: which thread delivers events, writes, and reads. Pure.

Threads are identified by numbers that the caller passes in, and time is an argument.

Event handoff (``Passing``). A thread takes events with the link's lock and delivers them without it. If the thread is
interrupted in between, the events are still recorded here and go back into the connection. The thread that delivers
them next may repeat an event; no result that a call waits for is lost.

Write coalescing (``Gathering``). A publisher writes a single message at once. Messages that follow within ``GATHER_S``
are buffered, and leave with the next write or when the connection's thread has seen them wait for ``LINGER_S``. Waking
that thread for each message instead makes both threads compete for the interpreter lock, and halved the rate.

Reading lease (``ReadingLease``). One thread at a time reads, for as long as it renews its lease.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import GeneratorType
from typing import TypeAlias

from jetspark.core.connection import Connection
from jetspark.core.dispatcher import Dispatcher
from jetspark.core.subscription import Event

__all__ = ["GATHER_S", "LEASE_S", "LINGER_S", "MUCH_BYTES", "Gathering", "Passing", "ReadingLease"]

# ---- event handoff ---------------------------------------------------------------------------------------------------

Delivery: TypeAlias = "GeneratorType[None, None, None]"


class Passing:
    """Events that threads have taken from the connection and not delivered yet."""

    def __init__(self, connection: Connection, dispatcher: Dispatcher) -> None:
        self._connection, self._dispatcher = connection, dispatcher
        self._in_hand: dict[int, list[list[Event]]] = {}
        """By thread. A callback of the program may make its thread take more before the first are delivered."""
        self._deliveries: dict[int, list[Delivery]] = {}
        """By thread, outermost first; each delivers the events of one :meth:`pass_on`."""

    def take(self, me: int) -> list[Event]:
        """With the lock: take the connection's new events, for this thread to deliver."""
        events = self._connection.events()
        if events:
            self._in_hand.setdefault(me, []).append(events)
        return events

    def pass_on(self, me: int, events: list[Event]) -> None:
        """Deliver events, without the lock."""
        delivery = self._deliver(events)
        assert isinstance(delivery, GeneratorType)
        # Finished deliveries are dropped here too: an interrupt can skip the clean-up below.
        outer = [each for each in self._deliveries.get(me, ()) if each.gi_running]
        self._deliveries[me] = [*outer, delivery]
        for _ in delivery:
            pass
        if not outer:
            del self._deliveries[me]
        if me in self._in_hand:
            self._in_hand[me].pop()
            if not self._in_hand[me]:
                del self._in_hand[me]

    def _deliver(self, events: list[Event]) -> Iterator[None]:
        """A generator, because the interpreter records whether it runs: :meth:`is_under_way` reads ``gi_running``.

        A flag or a counter would have to be reset by this thread, and a KeyboardInterrupt can come between any two
        bytecodes, also just before the reset. A generator stops running however its frame is left.
        """
        self._dispatcher.deliver(events)
        yield

    def has_any(self, me: int) -> bool:
        return me in self._in_hand

    def is_under_way(self, me: int) -> bool:
        """True if :meth:`pass_on` is running in this thread, and has called the caller."""
        return any(delivery.gi_running for delivery in self._deliveries.get(me, ()))

    def put_back(self, me: int) -> None:
        """With the lock: return to the connection the events that this thread took and did not deliver."""
        for events in reversed(self._in_hand[me]):
            self._connection.put_back(events)

    def forget(self, me: int) -> None:
        """Drop the record of a thread's events, after :meth:`put_back`."""
        self._in_hand.pop(me, None)


# ---- write coalescing ------------------------------------------------------------------------------------------------


GATHER_S = 100e-6
LINGER_S = 1e-3
# After a pause in which this much has gathered, the next pause is twice as long, up to LINGER_S.
MUCH_BYTES = 2 << 10


class Gathering:
    """How long messages gather before one publisher writes them all."""

    def __init__(self) -> None:
        self._pause_s = GATHER_S
        self.until = 0.0
        """End of the pause: the next publisher calls :meth:`begin` and writes."""

    def begin(self, now: float, gathered_bytes: int) -> None:
        """Start the next pause; the caller writes the gathered bytes now."""
        self._pause_s = min(2 * self._pause_s, LINGER_S) if gathered_bytes >= MUCH_BYTES else GATHER_S
        self.until = now + self._pause_s


# ---- reading lease ---------------------------------------------------------------------------------------------------


# A holder that has not renewed the lease for this long loses it.
LEASE_S = 1.0


class ReadingLease:
    """The exclusive right to read the socket, held by one thread for a limited time.

    Invariant: a lease with a holder has an expiry time. So the time is set first and the holder removed last, and an
    interrupted call leaves a lease that expires or that the next call completes.
    """

    def __init__(self) -> None:
        self.holder = 0
        """Identifier of the holding thread; 0 while the lease is free."""
        self._until = 0.0

    def take(self, me: int, now: float) -> bool:
        """Take or extend the lease; False while another thread holds an unexpired one."""
        if self.holder not in (0, me) and now < self._until:
            return False
        self._until = now + LEASE_S
        self.holder = me
        return True

    def renew(self, now: float) -> None:
        """Extend the lease by ``LEASE_S``."""
        self._until = now + LEASE_S

    def lapse(self, now: float) -> None:
        """Free the lease if it has expired."""
        if self.holder and now >= self._until:
            self.holder = 0

    def end(self) -> None:
        """Free the lease."""
        self.holder = 0
