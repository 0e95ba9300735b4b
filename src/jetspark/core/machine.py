"""The contract between what decides and what waits.

``core``, ``jetstream`` and ``publish`` decide; ``aio`` and ``blocking`` wait. They meet in two protocols:

* :class:`Machine` is run by a driver's ``MachineRunner`` (``runner.py``). It has state, never waits, and takes the time
  as an argument. The driver calls ``on_replies`` when the machine's inbox has messages, ``on_event`` for an event of
  the connection, and ``on_time`` at ``next_deadline``. After each call it wakes the callers that wait, writes the
  messages that the machine has published, and reads the next deadline.
* :class:`Reader` is the connection's view of the owner of a subscription. ``wake`` is called when messages have arrived
  or no more will come; a drain uses ``pending_messages`` and ``read_up``.

A machine is the idiom of the data plane: many messages, and the next step depends on the last arrival. For a sequence
of requests (the control plane) a generator is simpler; see ``docs/architecture.md``.
"""

from __future__ import annotations

from typing import Any, Protocol

from jetspark.core.events import ConnectionEvent

__all__ = ["Attached", "Machine", "PacedMachine", "Reader"]


class Machine(Protocol):
    """A state machine that a driver runs: it decides and never waits. Calls are made with the driver's lock, if any."""

    def on_replies(self, now: float) -> None:
        """Read everything that has arrived in the inbox. Without an inbox, or without news, nothing happens."""

    def on_event(self, event: ConnectionEvent, now: float) -> None:
        """Handle an event of the connection: a session ended or began, an error was reported, the connection closed."""

    def next_deadline(self) -> float | None:
        """When :meth:`on_time` wants to be called next, seen from now; None while there is nothing to wait for.

        Every other call may change it, so a driver asks again after each.
        """

    def on_time(self, now: float) -> None:
        """Time has passed. It may be called early or late, and without a deadline: the machine looks by itself."""

    def fail(self, error: Exception) -> None:
        """Give up after an unexpected error in a call, and fail all waiting callers."""


class PacedMachine(Machine, Protocol):
    """A machine that sends at the server's pace, and whose callers therefore wait for room."""

    failure: Exception | None
    """The reason for giving up; None while the machine works, or after it ended normally."""

    @property
    def room_timeout_s(self) -> float:
        """How long a message may wait for room in the connection's buffer."""

    def on_no_room(self, now: float) -> None:
        """The connection took nothing for ``room_timeout_s``: give up."""

    def check(self) -> None:
        """Check that callers may continue.

        Raises:
            JetSparkError: The machine gave up, or is done.
        """


class Attached(Protocol):
    """A listener of a driver's transport: it gets the connection's events, and is called at its deadline.

    Drivers call it without their lock, so that it may call the program back.
    """

    def on_event(self, event: ConnectionEvent) -> None:
        """Handle an event of the connection; called before the program's own ``on_event``."""

    def next_deadline(self) -> float | None:
        """When :meth:`on_time` is wanted; None for never. Called with the driver's lock, if it has one."""

    def on_time(self, now: float) -> None:
        """The moment of ``next_deadline`` has come."""


class Reader(Protocol):
    """The owner of a subscription, as the connection sees it."""

    def wake(self) -> None:
        """Messages are pending, a session that the subscription follows has begun, or no more will arrive.

        Called once for all messages of a chunk, without the driver's lock. An exception is reported and ends nothing
        else.
        """

    @property
    def pending_messages(self) -> int:
        """Received, and not handed to the program: what a drain that ran out of time calls unread."""

    def read_up(self, deadline: float) -> Any:
        """For a drain, once the server sends no more: return when everything received is read, or at the deadline.

        The answer is whether it is read: a ``bool`` in the blocking driver, an awaitable of one in asyncio's. A reader
        whose messages may stay unread, because they are answers or are delivered again, says True at once.
        """
