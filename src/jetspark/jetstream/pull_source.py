"""The part of a pull source that does not wait: a puller, its subscription, and how both end.

:mod:`jetspark.jetstream.pull` decides on the requests; the waiting is in each driver's ``source.py``.
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

# Leaving: after this many seconds of silence no message is on its way; and the longest wait for that silence.
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
        """``prefix`` is the API's; ``arrivals`` has the callers that wait; the classes are the driver's own."""
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
            # Bounded by the requests; a bound that drops messages would lose them until their ack_wait is over.
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
        """Give arrived messages to the puller; takes the lock."""
        with self._link.lock, self._link.doubt:
            if self.puller.on_replies(self.state, self._now()):
                self._arrivals.notify_all()

    def leave(self) -> None:
        """Unsubscribe without returning messages: messages on their way are not wanted."""
        self._is_closed = True
        if not self._connection.is_closed:
            unsubscribe(self._link, self.state)

    def _leave_at_once(self) -> None:
        """Leave without waiting, after a cancellation. Messages on their way are redelivered after their ack_wait."""
        if self._connection.is_closed:
            return
        unsubscribe(self._link, self.state)
        with self._link.lock:
            replies = self.puller.release() if self._has_acks else []
            try:
                for reply in replies:
                    self._connection.publish_raw(reply, NAK)
            except BufferFull:
                pass  # these are redelivered after their ack_wait too
            self._link.flush_soon()


class SourceReaderBase(ABC, Generic[J]):
    """The reader of a source's subscription. The connection refers to it, and it refers to its source only weakly: an
    abandoned source can then be collected, and its subscription ends."""

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
        """Read everything for a drain; each driver has its own, because asyncio's is awaited."""


def _sweep(link: DriverLink) -> None:
    """End the subscriptions of collected sources. A finaliser cannot: it may run at any moment, in any thread."""
    for state in link.connection.subscriptions.all:
        if isinstance(state.reader, SourceReaderBase) and state.reader.is_abandoned:
            link.connection.unsubscribe(state)
