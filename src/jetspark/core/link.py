"""The calls of both drivers' links that do not wait.

A link is the driver's half of a connection: socket, clock, waiting. Event loop and threads differ behind these names;
code that needs nothing else is written once, in ``core``, ``jetstream`` and ``publish``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from jetspark.core.connection import Connection
from jetspark.core.dispatcher import Dispatcher
from jetspark.core.subscription import SubscriptionState
from jetspark.errors import JetSparkError

__all__ = [
    "READ_BYTES",
    "WRITE_AT_BYTES",
    "CountedCrowd",
    "Crowd",
    "DriverLink",
    "InterruptGuard",
    "drop_reader",
    "forget",
    "new_inbox",
]
__all__ += ["new_name", "time_left_s", "unsubscribe"]

# Large enough that a write call costs little per message, small enough that other tasks run soon: at this many bytes
# a publisher writes the buffer. With asyncio it then yields to the loop once, with threads it writes by itself instead
# of leaving it to the connection's thread.
WRITE_AT_BYTES = 64 << 10
# Most bytes in one read: a longer read costs less for each message, up to about this size.
READ_BYTES = 256 << 10

# Errors that a call raises before it has changed anything.
_REFUSED = (JetSparkError, TypeError, ValueError, AttributeError, LookupError)


class InterruptGuard:
    """``with link.lock, link.doubt``: when the block is interrupted half-way, the session is given up.

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


class DriverLink(Protocol):
    """The part of a driver's link that does not wait."""

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


def new_inbox(link: DriverLink) -> str:
    """A reply subject that no other request or connection uses."""
    with link.lock:
        return link.connection.names.new_inbox()


def new_name(link: DriverLink) -> str:
    """A name for something at the server that no other connection uses."""
    with link.lock:
        return link.connection.names.new_name()


def forget(link: DriverLink, token: str, handle: Any) -> None:
    """Drop a request that no call waits for any more; without a token it was interrupted before it got one."""
    with link.lock:
        if token:
            link.connection.requests.forget(token)
        else:
            link.connection.requests.forget_handle(handle)


def drop_reader(link: DriverLink, reader: object) -> None:
    """End the subscriptions of a reader whose call was interrupted or refused; it may have subscribed or not."""
    with link.lock, link.doubt:
        for state in [each for each in link.connection.subscriptions.all if each.reader is reader]:
            link.connection.unsubscribe(state)
            link.flush_soon()


def unsubscribe(link: DriverLink, subscription: SubscriptionState, max_messages: int = 0) -> None:
    """End a subscription, at once or when it has received ``max_messages`` in all. Without the link's lock."""
    link.check_caller()
    with link.lock, link.doubt:
        link.connection.unsubscribe(subscription, max_messages)
        link.flush_soon()
    link.deliver_events()
