"""The contract between what decides and what waits.

``core``, ``jetstream`` and ``publish`` decide; ``aio`` and ``blocking`` wait. They meet in two protocols:

* :class:`Machine` is what a driver runs, by the ``MachineRunner`` of its ``runner.py``. It has state, never waits, and
  is told the time. A driver calls ``on_replies`` when its inbox has messages, ``on_event`` when something happened to
  the connection, and ``on_time`` when the moment of ``next_deadline`` has come. After each of them it wakes the callers
  that wait, writes what the machine has published, and asks for the next deadline.
* :class:`Reader` is what a connection knows of the owner of a subscription. ``wake`` says that there are messages, or
  that no more will come; ``pending_messages`` and ``read_up`` are what a drain asks.

A machine is the data plane's idiom: many messages, and what happens next depends on what arrives. Where a sequence of
questions is the point (the control plane), a generator is simpler; see ``docs/architecture.md``.
"""

from __future__ import annotations

from typing import Any, Protocol

from jetspark.core.events import ConnectionEvent

__all__ = ["Attached", "Machine", "PacedMachine", "Reader"]


class Machine(Protocol):
    """What a driver runs: it decides, and never waits. Every call is made with the driver's lock, where it has one."""

    def on_replies(self, now: float) -> None:
        """Read everything that has arrived in the inbox. Without an inbox, or without news, nothing happens."""

    def on_event(self, event: ConnectionEvent, now: float) -> None:
        """Something happened to the connection: a session ended or began, an error was reported, all is over."""

    def next_deadline(self) -> float | None:
        """When :meth:`on_time` wants to be called next, seen from now; None while there is nothing to wait for.

        Every other call may change it, so a driver asks again after each.
        """

    def on_time(self, now: float) -> None:
        """Time has passed. It may be called early or late, and without a deadline: the machine looks by itself."""

    def fail(self, error: Exception) -> None:
        """Give up: a call raised what it should not, and nobody must wait for what never comes."""


class PacedMachine(Machine, Protocol):
    """A machine that sends at the server's pace, and whose callers therefore wait for room."""

    failure: Exception | None
    """Why it gave up; None while it may go on, or ended as it should."""

    @property
    def room_timeout_s(self) -> float:
        """How long a message may wait for room in the connection's buffer."""

    def on_no_room(self, now: float) -> None:
        """The connection took nothing for ``room_timeout_s``: give up."""

    def check(self) -> None:
        """Whether callers may go on.

        Raises:
            JetSparkError: The machine gave up, or is done.
        """


class Attached(Protocol):
    """What is attached to a driver's link: it is told what happens to the connection, and when its time has come.

    A driver that has a lock tells without it: what is told may want to call the program back.
    """

    def on_event(self, event: ConnectionEvent) -> None:
        """Something happened to the connection; called before the program's own ``on_event``."""

    def next_deadline(self) -> float | None:
        """When :meth:`on_time` is wanted; None is not at all. Asked with the driver's lock, where it has one."""

    def on_time(self, now: float) -> None:
        """The moment of ``next_deadline`` has come."""


class Reader(Protocol):
    """The owner of a subscription, as the connection knows it."""

    def wake(self) -> None:
        """Messages are pending, a session that the subscription follows has begun, or no more will arrive.

        Called once for all messages of a chunk, without the driver's lock. What it raises is reported and ends nothing.
        """

    @property
    def pending_messages(self) -> int:
        """Received, and not handed to the program: what a drain that ran out of time calls unread."""

    def read_up(self, deadline: float) -> Any:
        """For a drain, once the server sends no more: return when everything received is read, or at the deadline.

        The answer is whether it is read: a ``bool`` in the blocking driver, an awaitable of one in asyncio's. A reader
        whose messages may stay unread, because they are answers or are delivered again, says True at once.
        """
