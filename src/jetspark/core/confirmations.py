"""Messages that the server has confirmed, and those it has denied: PINGs that wait for their PONG, and denials.

Confirmed. A server answers in order, so a PONG confirms everything that was sent before its PING.
``Pings.confirmed`` is the number of the last message that is known to be processed. Pings of our own, one each
interval, find out about a server that has gone without a word; when too many of those are unanswered, the session is
given up.

Denied. The server names the subject of a denied publish, not the message. It says so on the connection, behind
everything that it had processed before, and in front of whatever it says because of the message that is missing (a gap,
a batch that is incomplete). So a publisher of many messages looks here when one of them is missing
(:meth:`DeniedPublishes.since`).

A denial that no call raises is told by the next flush, or by ``close``. Requests raise theirs, and so does every
:class:`Claimant` until it is over. The server denies each of many messages to one subject by itself, so a subject
counts as told until the server has confirmed all that was published when it was last told. The connection sends a PING
then: its PONG separates those denials from the denials of messages that are published later.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from jetspark.core.subscription import SubscriptionState
from jetspark.errors import ConnectionLost, PermissionDenied

__all__ = ["MAX_SUBJECTS", "Claimant", "DeniedPublishes", "Pings", "SentPing"]

# ---- confirmed -------------------------------------------------------------------------------------------------------


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


# ---- denied ----------------------------------------------------------------------------------------------------------


T = TypeVar("T")

# How many subjects are remembered. A batch needs one of its own, and looks for it soon.
MAX_SUBJECTS = 100


class Claimant(Protocol):
    """Tells its callers of denials by itself."""

    def publishes_to(self, subject: str) -> bool:
        """Whether it has published to the subject, and raises a denial of it: it does so until it is over."""


class DeniedPublishes:
    """The denied publishes of one connection."""

    def __init__(self) -> None:
        self.count = 0
        """How many there have been."""
        # Not a WeakSet: in threads a batch begins without the lock, and iterating over that one would fail.
        self._claimants: set[weakref.ref[Claimant]] = set()
        self._last: dict[str, tuple[int, PermissionDenied]] = {}
        """The latest of each subject, the oldest first."""
        self._told: dict[str, int] = {}
        """Up to which message of the connection the denials of a subject are told."""

    def watch(self, claimant: Claimant) -> None:
        """The claimant tells its callers, for as long as it exists and is not over."""
        self._claimants.add(weakref.ref(claimant, self._claimants.discard))

    def leave(self, claimant: Claimant, count: int, published: int) -> bool:
        """The claimant is over; whether messages to its subjects were denied after the first ``count`` denials.

        Then it has told its callers of all that is published so far to these subjects.
        """
        self._claimants.discard(weakref.ref(claimant))
        denied = [
            subject for subject, (number, _) in self._last.items() if number > count and claimant.publishes_to(subject)
        ]
        for subject in denied:
            _put(self._told, subject, published)
        return bool(denied)

    def add(self, error: PermissionDenied, *, is_told: bool, published: int, confirmed: int) -> bool:
        """Note a denial; whether it is told by something else than a flush.

        Args:
            is_told: Some request raises it.
            published: The number of the last message published.
            confirmed: The number of the last message that the server has confirmed.
        """
        subject = error.subject
        self.count += 1
        _put(self._last, subject, (self.count, error))
        claimants = [claimant for each in tuple(self._claimants) if (claimant := each()) is not None]
        if is_told or any(claimant.publishes_to(subject) for claimant in claimants):
            _put(self._told, subject, published)
            return True
        return confirmed < self._told.get(subject, 0)

    def since(self, count: int, publishes_to: Callable[[str], bool]) -> PermissionDenied | None:
        """The first denial of one's own subjects after the first ``count`` denials; a new error for each caller."""
        if count == self.count:  # nearly always
            return None
        for number, error in self._last.values():
            if number > count and publishes_to(error.subject):
                return PermissionDenied(error.operation, error.subject)
        return None


def _put(known: dict[str, T], subject: str, value: T) -> None:
    known.pop(subject, None)
    known[subject] = value
    if len(known) > MAX_SUBJECTS:
        del known[next(iter(known))]
