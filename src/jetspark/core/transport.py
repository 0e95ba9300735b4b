"""The part of the drivers' transports that does not wait, and the rules by which threads share one. Pure.

A transport is the driver's half of a connection: socket, clock, waiting. :class:`DriverTransport` has the names that
the event loop's and the threads' have in common; code that needs nothing else is written once, in ``core``,
``jetstream`` and ``publish``. Below are the rules for threads, which are identified by numbers that the caller passes
in; time is an argument.

Event handoff (``Passing``). A thread takes events with the transport's lock and delivers them without it. If the thread
is interrupted in between, the events are still recorded here and go back into the connection. The thread that delivers
them next may repeat an event; no result that a call waits for is lost.

Write coalescing (``Gathering``). A publisher writes a single message at once. Messages that follow within ``GATHER_S``
are buffered, and leave with the next write or when the connection's thread has seen them wait for ``LINGER_S``. Waking
that thread for each message instead makes both threads compete for the interpreter lock, and halved the rate.

Reading lease (``ReadingLease``). One thread at a time reads, for as long as it renews its lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import GeneratorType
from typing import Any, Protocol, TypeAlias

from jetspark.core.connection import Connection
from jetspark.core.dispatcher import Dispatcher
from jetspark.core.subscription import Event, SubscriptionState
from jetspark.errors import JetSparkError

__all__ = [
    "GATHER_S",
    "LEASE_S",
    "LINGER_S",
    "MUCH_BYTES",
    "READ_BYTES",
    "WRITE_AT_BYTES",
    "CountedCrowd",
    "Crowd",
    "DriverTransport",
    "Gathering",
    "InterruptGuard",
    "Passing",
    "ReadingLease",
    "drop_reader",
    "forget",
    "new_inbox",
    "new_name",
    "time_left_s",
    "unsubscribe",
]

# ---- what does not wait ----------------------------------------------------------------------------------------------


# Large enough that a write call costs little per message, small enough that other tasks run soon: at this many bytes
# a publisher writes the buffer. With asyncio it then yields to the loop once, with threads it writes by itself instead
# of leaving it to the connection's thread.
WRITE_AT_BYTES = 64 << 10
# Most bytes in one read: a longer read costs less for each message, up to about this size.
READ_BYTES = 256 << 10

# Errors that a call raises before it has changed anything.
_REFUSED = (JetSparkError, TypeError, ValueError, AttributeError, LookupError)


class InterruptGuard:
    """``with transport.lock, transport.doubt``: when the block is interrupted half-way, the session is given up.

    For threads, where an interrupt may come between any two steps. With asyncio a call into the connection is never
    stopped half-way, and its ``give_up`` does nothing.
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._give_up = give_up

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.after(error)

    def after(self, error: BaseException) -> None:
        """Give up the session after an interrupt; for ``except BaseException`` where a ``with`` would cost too much."""
        if not isinstance(error, _REFUSED):
            self._give_up()


class Crowd(Protocol):
    """Tasks or threads that wait until something has changed; ``Changed`` of the drivers."""

    def notify_all(self) -> None: ...


class CountedCrowd(Crowd, Protocol):
    """A crowd whose size is known, for code that acts only if a task or thread waits."""

    def __len__(self) -> int: ...


class DriverTransport(Protocol):
    """The part of a driver's transport that does not wait."""

    connection: Connection
    dispatcher: Dispatcher
    """Delivers events, errors and deadlines."""
    flush_is_scheduled: bool
    """True if accepted messages will be written soon, without another call."""
    idle_s: float
    """Minimum wait of a pull without messages; for loops in virtual time, where only the polling costs."""

    @property
    def now(self) -> Callable[[], float]: ...

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Guards the connection and its machines where there are threads; nothing where there is a loop."""

    @property
    def doubt(self) -> InterruptGuard: ...

    @property
    def room(self) -> Crowd:
        """Notified when the network may take more, a session has begun, or the connection is closed."""

    def check_caller(self) -> None:
        """Refuse to be used from another event loop.

        Raises:
            UsageError: This is not the loop of ``connect``.
        """

    def flush(self) -> None:
        """Write what the network takes now."""

    def flush_soon(self) -> None:
        """Write buffered messages now, or shortly, together with the next ones."""

    def hand_over(self) -> None:
        """Write a large buffer at once, for a server that may be waiting for the CPU."""

    def set_alarm(self, deadline: float) -> None:
        """Check deadlines at this time: an attached machine has one then."""

    def call_when_there_is_room(self, callback: Callable[[], None]) -> None:
        """Call back, once, when the network may take more."""

    def deliver_events(self) -> None:
        """Deliver the events of preceding calls into the connection. Call it without the lock."""


def time_left_s(deadline: float | None, now: float) -> float | None:
    """Seconds left to wait for room; None without a deadline.

    Raises:
        TimeoutError: The deadline has come.
    """
    if deadline is None:
        return None
    if deadline <= now:
        raise TimeoutError
    return deadline - now


def new_inbox(transport: DriverTransport) -> str:
    """A reply subject that no other request or connection uses."""
    with transport.lock:
        return transport.connection.names.new_inbox()


def new_name(transport: DriverTransport) -> str:
    """A name for something at the server that no other connection uses."""
    with transport.lock:
        return transport.connection.names.new_name()


def forget(transport: DriverTransport, token: str, handle: Any) -> None:
    """Drop a request that no call waits for any more; without a token it was interrupted before it got one."""
    with transport.lock:
        if token:
            transport.connection.requests.forget(token)
        else:
            transport.connection.requests.forget_handle(handle)


def drop_reader(transport: DriverTransport, reader: object) -> None:
    """End the subscriptions of a reader whose call was interrupted or refused; it may have subscribed or not."""
    with transport.lock, transport.doubt:
        for state in [each for each in transport.connection.subscriptions.all if each.reader is reader]:
            transport.connection.unsubscribe(state)
            transport.flush_soon()


def unsubscribe(transport: DriverTransport, subscription: SubscriptionState, max_messages: int = 0) -> None:
    """End a subscription, at once or when it has received ``max_messages`` in all. Without the transport's lock."""
    transport.check_caller()
    with transport.lock, transport.doubt:
        transport.connection.unsubscribe(subscription, max_messages)
        transport.flush_soon()
    transport.deliver_events()


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
