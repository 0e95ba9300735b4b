"""Leaving a server that announced its shutdown (lame duck) for another one, with no message in doubt.

From the notice on, accepted messages wait for the next session; a PING confirms the messages handed over before; their
answers may arrive for ``LINGER_S``; then the subscriptions end, and the session with the answer to a last PING.
"""

from __future__ import annotations

from jetspark.core import frames
from jetspark.core.confirmations import Pings, SentPing
from jetspark.core.outbox import Outbox
from jetspark.core.subscriptions import Subscriptions
from jetspark.errors import ConnectionLost

__all__ = ["LINGER_S", "Leaving"]

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
