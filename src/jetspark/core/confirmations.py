"""Confirmed and denied messages: PINGs that wait for their PONG, and publishes that the server refused.

Confirmed. A server answers in order, so a PONG confirms everything that was sent before its PING.
``Pings.confirmed`` is the number of the last message known to be processed. A liveness PING per interval detects a
server that has stopped answering; when too many of them are unanswered, the session is given up.

Leaving. A server that announces its shutdown (lame duck) is left for another one with no message in doubt. From the
notice on, accepted messages wait for the next session; a PING confirms the messages handed over before; their answers
may arrive for ``LINGER_S``; then the subscriptions end, and the session with the answer to a last PING.

Denied. The server names the subject of a denied publish, not the message. The denial arrives after the answers to
everything processed before it, and before any answer that the missing message causes (a gap, an incomplete batch). A
publisher that misses a message of many therefore looks here (:meth:`DeniedPublishes.since`).

A denial that no call raises is raised by the next flush, or by ``close``. Requests raise their own denials, and so
does every :class:`Claimant` until it is done. The server denies each of many messages to one subject separately, so the
subject counts as reported until the server has confirmed everything published before the report. The connection sends a
PING then: its PONG separates those denials from denials of later messages."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from jetspark.core import frames
from jetspark.core.outbox import Outbox
from jetspark.core.subscription import Subscriptions, SubscriptionState
from jetspark.errors import ConnectionLost, PermissionDenied

__all__ = ["LINGER_S", "MAX_SUBJECTS", "Claimant", "DeniedPublishes", "Leaving", "Pings", "SentPing"]

# ---- confirmed -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SentPing:
    """A PING that was sent, or waits for a session to be sent in."""

    handle: Any
    """The waiter for the answer; None for a liveness ping."""
    published: int
    """How many messages had been published before it: its PONG confirms them."""
    draining: SubscriptionState | None = None
    is_liveness: bool = False
    """Sent to see whether the server is there. Users may send more pings at once than a dead server is allowed."""
    then: Literal["", "linger", "leave"] = ""
    """For a session that is being left: the step that its PONG starts. Empty for all other pings."""
    error: Exception | None = None
    """Why it fails, whatever the server answers: one of the messages it waits for was not sent."""


class Pings:
    """The pings of a connection, in the order of their answers."""

    def __init__(self, interval_s: float, max_outstanding: int) -> None:
        self.confirmed = 0
        """The number of the last message that the server has processed, or that was reported as lost."""
        self.due: float | None = None
        """When the next liveness ping is due; None without a session."""
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
        """Remove and return the answered ping; None for a PONG without a PING."""
        if not self._sent:
            return None
        ping = self._sent.popleft()
        # The maximum, because a ping that was put in front (see `add_first`) may stand for fewer messages than are
        # confirmed already.
        self.confirmed = max(self.confirmed, ping.published)
        return ping

    def take_all(self) -> list[SentPing]:
        """Remove and return every unanswered ping: their session is over."""
        pings, self._sent = self._sent, deque()
        return list(pings)

    def forget(self, handle: Any, *, is_connected: bool) -> None:
        """Drop the waiter of a flush; the ping itself keeps its position if it was sent."""
        for ping in self._sent:
            if ping.handle is handle:
                ping.handle = None  # it stays in its place: the server answers it, and a PONG has no name
        if not is_connected:  # none of these has been sent, and none needs to be
            self._sent = deque(ping for ping in self._sent if ping.handle is not None)

    def fail_from(self, number: int, error: Exception) -> bool:
        """Fail the flushes that wait for this message, because it was not sent. False if no flush waits for it."""
        waiting = [ping for ping in self._sent if ping.published >= number and ping.handle is not None]
        for ping in waiting:
            ping.error = ping.error or error
        return bool(waiting)

    def on_time(self, now: float) -> bool:
        """True if a liveness ping is due. The first call of a session starts the clock.

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
    """A publisher that raises denials of its messages to its own callers."""

    def publishes_to(self, subject: str) -> bool:
        """True if it has published to the subject and still raises denials."""


class DeniedPublishes:
    """The denied publishes of one connection."""

    def __init__(self) -> None:
        self.count = 0
        """How many there have been."""
        # Not a WeakSet: in threads a batch begins without the lock, and iterating over that one would fail.
        self._claimants: set[weakref.ref[Claimant]] = set()
        self._last: dict[str, tuple[int, PermissionDenied]] = {}
        """The latest of each subject, the oldest first."""
        self._reported: dict[str, int] = {}
        """By subject: the number of the last message whose denials count as reported."""

    def watch(self, claimant: Claimant) -> None:
        """Leave denials to the claimant, until :meth:`leave` or until it is garbage-collected."""
        self._claimants.add(weakref.ref(claimant, self._claimants.discard))

    def leave(self, claimant: Claimant, count: int, published: int) -> bool:
        """End a claim; True if messages to the claimant's subjects were denied after the first ``count`` denials.

        These denials count as reported for all messages published so far to these subjects.
        """
        self._claimants.discard(weakref.ref(claimant))
        denied = [
            subject for subject, (number, _) in self._last.items() if number > count and claimant.publishes_to(subject)
        ]
        for subject in denied:
            _put(self._reported, subject, published)
        return bool(denied)

    def add(self, error: PermissionDenied, *, is_raised: bool, published: int, confirmed: int) -> bool:
        """Record a denial; True if another call than a flush raises it.

        Args:
            is_raised: A request raises it.
            published: The number of the last message published.
            confirmed: The number of the last message that the server has confirmed.
        """
        subject = error.subject
        self.count += 1
        _put(self._last, subject, (self.count, error))
        claimants = [claimant for each in tuple(self._claimants) if (claimant := each()) is not None]
        if is_raised or any(claimant.publishes_to(subject) for claimant in claimants):
            _put(self._reported, subject, published)
            return True
        return confirmed < self._reported.get(subject, 0)

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


# ---- leaving ---------------------------------------------------------------------------------------------------------


# Time for answers to confirmed messages, before the server is left: publishers are held back for it. Without it the
# last acknowledgements of a stream with three replicas were missed.
LINGER_S = 0.25


class Leaving:
    """The last steps of a session, in order; :meth:`reset` when it is over."""

    def __init__(self, outbox: Outbox, pings: Pings, subscriptions: Subscriptions) -> None:
        self._outbox, self._pings, self._subscriptions = outbox, pings, subscriptions
        self._goodbye_at: float | None = None
        """When lingering ends; 0 until the next call of :meth:`on_time`, which has the time."""

    def begin(self) -> None:
        """Leave for another server as soon as this one has confirmed and answered all messages handed over."""
        self._outbox.hold_back()
        self._outbox.send_last([frames.PING])
        self._pings.add(SentPing(None, self._outbox.published, then="linger"))

    def on_pong(self, ping: SentPing) -> None:
        """
        Raises:
            ConnectionLost: The PONG was that of the last PING.
        """
        if ping.then == "linger":
            self._goodbye_at = 0.0
        elif ping.then == "leave":
            raise ConnectionLost("the server is about to shut down, and has confirmed all it got")

    def next_deadline(self) -> float | None:
        return self._goodbye_at

    def on_time(self, now: float) -> None:
        if self._goodbye_at == 0.0:  # a PONG set it, and bytes come without the time
            self._goodbye_at = now + LINGER_S
        elif self._goodbye_at is not None and now >= self._goodbye_at:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        """End what the server holds for us: it then delivers to others of our queue groups, and pull requests end."""
        self._outbox.send_last([*(frames.unsub(each.sid) for each in self._subscriptions.all), frames.PING])
        self._goodbye_at = None
        self._pings.add_first(SentPing(None, self._outbox.published_at_leaving, then="leave"))

    def reset(self) -> None:
        """The session is over."""
        self._goodbye_at = None
