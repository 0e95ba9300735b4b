"""Where pulled messages arrive, but for the waiting: a puller, its subscription, and what becomes of both.

What to ask for and when is decided in :mod:`jetspark.jetstream.pull`; waiting is each driver's own, in ``source.py``.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from jetspark.core.link import Crowd, DriverLink, new_inbox, unsubscribe
from jetspark.core.subscription import SubscriptionState
from jetspark.errors import BufferFull
from jetspark.jetstream.acks import NAK, AckableMessage
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.pull import Puller

__all__ = ["LEAVING_S", "QUIET_S", "SourceBase", "SourceReaderBase"]

J = TypeVar("J", bound=AckableMessage)

# Leaving: after this many seconds of silence nothing is under way; and the longest that is waited for that.
QUIET_S = 0.01
LEAVING_S = 1.0


class SourceBase(Generic[J]):
    """One puller with its subscription. With threads, the link's lock guards both."""

    def __init__(
        self,
        link: DriverLink,
        info: ConsumerInfo,
        prefix: str,
        make_puller: Callable[[str, str], Puller[J]],
        *,
        arrivals: Crowd,
        reader_class: type[SourceReaderBase[J]],
        message_class: type[J],
    ) -> None:
        """``prefix`` is that of the API; ``arrivals`` are those who wait, and the classes the driver's own."""
        self._link: DriverLink = link
        self._connection, self._now = link.connection, link.now
        self._arrivals = arrivals
        self._has_acks = info.config.ack_policy != "none"
        self._is_closed = False
        subject = f"{prefix}.CONSUMER.MSG.NEXT.{info.stream_name}.{info.name}"
        with link.lock:
            _sweep(link)
            inbox = new_inbox(link)
            self.puller = make_puller(inbox, subject)
            self.puller.idle_s = link.idle_s
            reader = reader_class(link, self)
            # Bounded by what is asked for; a bound that drops would lose messages until their ack_wait is over.
            self.state = reader.state = link.connection.subscribe(
                f"{inbox}.*",
                is_unbounded=True,
                reader=reader,
                message_class=message_class,
                answers_to=subject,
                follows_sessions=True,
            )

    @property
    def session(self) -> int | None:
        connection = self._connection
        return connection.sessions if connection.is_connected else None

    def on_arrival(self) -> None:
        """Have the puller take what has arrived; takes the lock."""
        with self._link.lock, self._link.doubt:
            if self.puller.on_replies(self.state, self._now()):
                self._arrivals.notify_all()

    def leave(self) -> None:
        """Unsubscribe, with nothing to give back: what is on its way is not wanted."""
        self._is_closed = True
        if not self._connection.is_closed:
            unsubscribe(self._link, self.state)

    def _leave_at_once(self) -> None:
        """Cancelled while leaving: wait for nothing. What is still on its way comes again after its ack_wait."""
        if self._connection.is_closed:
            return
        unsubscribe(self._link, self.state)
        with self._link.lock:
            replies = self.puller.release() if self._has_acks else []
            try:
                for reply in replies:
                    self._connection.publish_raw(reply, NAK)
            except BufferFull:
                pass  # then these come again after their ack_wait, too
            self._link.flush_soon()


class SourceReaderBase(ABC, Generic[J]):
    """The reader of a source's subscription. The connection keeps it, and it must not keep the source: a source that
    nobody uses any more has to go, and its subscription with it."""

    state: SubscriptionState | None = None

    def __init__(self, link: DriverLink, source: SourceBase[J]) -> None:
        self._link = link
        self._source = weakref.ref(source)

    @property
    def is_abandoned(self) -> bool:
        return self._source() is None

    def wake(self) -> None:
        source = self._source()
        if source is not None:
            source.on_arrival()
        elif self.state is not None and not self.state.is_finished:
            unsubscribe(self._link, self.state)

    @property
    def pending_messages(self) -> int:
        source = self._source()
        return len(source.puller.buffer) if source is not None else 0

    @abstractmethod
    def read_up(self, deadline: float) -> Any:
        """Whether all is read, as a drain asks: each driver's own, because one of them awaits it."""


def _sweep(link: DriverLink) -> None:
    """End the subscriptions of sources that are gone; a garbage collector tells nobody at a time that would suit."""
    for state in link.connection.subscriptions.all:
        if isinstance(state.reader, SourceReaderBase) and state.reader.is_abandoned:
            link.connection.unsubscribe(state)
