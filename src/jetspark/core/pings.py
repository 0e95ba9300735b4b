"""PINGs that wait for their PONG: what the server has confirmed, and whether it is still there.

A server answers in order, so a PONG confirms everything that was sent before its PING. ``confirmed`` is the number of
the last message that is known to be processed. Pings of our own, one each interval, find out about a server that has
gone without a word; when too many of those are unanswered, the session is given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from jetspark.core.subscription import SubscriptionState
from jetspark.errors import ConnectionLost

__all__ = ["Pings", "SentPing"]


@dataclass(slots=True)
class SentPing:
    """A PING that was sent, or waits for a session to be sent in."""

    handle: Any
    """Who waits for the answer; None for a ping of our own."""
    published: int
    """How many messages had been published before it: its PONG confirms them."""
    draining: SubscriptionState | None = None
    is_liveness: bool = False
    """Sent to see whether the server is there. Users may send more pings at once than a dead server is allowed."""
    then: Literal["", "linger", "leave"] = ""
    """What its PONG means to a session that we are leaving."""
    error: Exception | None = None
    """Why it fails, whatever the server answers: one of the messages it waits for was not sent."""


class Pings:
    """The pings of a connection, in the order of their answers."""

    def __init__(self, interval_s: float, max_outstanding: int) -> None:
        self.confirmed = 0
        """The number of the last message that the server is known to have processed, or that was lost and told of."""
        self.due: float | None = None
        """When the next ping of our own is sent; None while there is no session."""
        self._interval_s, self._max_outstanding = interval_s, max_outstanding
        self._sent: deque[SentPing] = deque()

    def __iter__(self) -> Iterator[SentPing]:
        return iter(self._sent)

    def add(self, ping: SentPing) -> None:
        self._sent.append(ping)

    def add_first(self, ping: SentPing) -> None:
        """In front: those behind it have not been sent, and will not be before the next session."""
        self._sent.appendleft(ping)

    def on_pong(self) -> SentPing | None:
        """The ping that is answered; None when nothing was asked."""
        if not self._sent:
            return None
        ping = self._sent.popleft()
        # Not the number of this ping alone: one that was put in front (see `add_first`) stands for fewer messages than
        # those that are confirmed already.
        self.confirmed = max(self.confirmed, ping.published)
        return ping

    def take_all(self) -> list[SentPing]:
        """Every ping without an answer; the session is another one."""
        pings, self._sent = self._sent, deque()
        return list(pings)

    def forget(self, handle: Any, *, is_connected: bool) -> None:
        """Nobody waits for this flush any more."""
        for ping in self._sent:
            if ping.handle is handle:
                ping.handle = None  # it stays in its place: the server answers it, and a PONG has no name
        if not is_connected:  # none of these has been sent, and none needs to be
            self._sent = deque(ping for ping in self._sent if ping.handle is not None)

    def fail_from(self, number: int, error: Exception) -> bool:
        """The message of this number was not sent: those who wait for it are told so. False when nobody does."""
        waiting = [ping for ping in self._sent if ping.published >= number and ping.handle is not None]
        for ping in waiting:
            ping.error = ping.error or error
        return bool(waiting)

    def on_time(self, now: float) -> bool:
        """Whether to send a ping of our own now. The first call of a session starts the clock.

        Raises:
            ConnectionLost: The server has left too many unanswered.
        """
        due = self.due
        if due is not None and now < due:
            return False
        if due is not None:
            # Flushes do not count: a program may have a thousand of them under way at a server that is only slow.
            unanswered = sum(ping.is_liveness for ping in self._sent)
            if unanswered >= self._max_outstanding:
                raise ConnectionLost(f"{unanswered} pings without an answer")
        self.due = now + self._interval_s
        return due is not None
