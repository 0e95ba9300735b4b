"""The part of a pull source that does not wait: a puller, its subscription, and how both end.

:mod:`jetspark.jetstream.pull` decides on the requests; the waiting is in each driver's ``source.py``.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from jetspark.core.subscription import SubscriptionState
from jetspark.core.transport import Crowd, DriverTransport, new_inbox, unsubscribe
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
    """One puller with its subscription. With threads, the transport's lock guards both."""

    def __init__(
        self,
        transport: DriverTransport,
        info: ConsumerInfo,
        prefix: str,
        make_puller: Callable[[str, str], Puller[J]],
        *,
        arrivals: Crowd,
        reader_class: type[SourceReaderBase[J]],
        message_class: type[J],
    ) -> None:
        """``prefix`` is the API's; ``arrivals`` has the callers that wait; the classes are the driver's own."""
        self._transport: DriverTransport = transport
        self._connection, self._now = transport.connection, transport.now
        self._arrivals = arrivals
        self._has_acks = info.config.ack_policy != "none"
        self._is_closed = False
        subject = f"{prefix}.CONSUMER.MSG.NEXT.{info.stream_name}.{info.name}"
        with transport.lock:
            _sweep(transport)
            inbox = new_inbox(transport)
            self.puller = make_puller(inbox, subject)
            self.puller.idle_s = transport.idle_s
            reader = reader_class(transport, self)
            # Bounded by the requests; a bound that drops messages would lose them until their ack_wait is over.
            self.state = reader.state = transport.connection.subscribe(
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
        with self._transport.lock, self._transport.doubt:
            if self.puller.on_replies(self.state, self._now()):
                self._arrivals.notify_all()

    def leave(self) -> None:
        """Unsubscribe without returning messages: messages on their way are not wanted."""
        self._is_closed = True
        if not self._connection.is_closed:
            unsubscribe(self._transport, self.state)

    def _leave_at_once(self) -> None:
        """Leave without waiting, after a cancellation. Messages on their way are redelivered after their ack_wait."""
        if self._connection.is_closed:
            return
        unsubscribe(self._transport, self.state)
        with self._transport.lock:
            replies = self.puller.release() if self._has_acks else []
            try:
                for reply in replies:
                    self._connection.publish_raw(reply, NAK)
            except BufferFull:
                pass  # these are redelivered after their ack_wait too
            self._transport.flush_soon()


class SourceReaderBase(ABC, Generic[J]):
    """The reader of a source's subscription. The connection refers to it, and it refers to its source only weakly: an
    abandoned source can then be collected, and its subscription ends."""

    state: SubscriptionState | None = None

    def __init__(self, transport: DriverTransport, source: SourceBase[J]) -> None:
        self._transport = transport
        self._source = weakref.ref(source)

    @property
    def is_abandoned(self) -> bool:
        return self._source() is None

    def wake(self) -> None:
        source = self._source()
        if source is not None:
            source.on_arrival()
        elif self.state is not None and not self.state.is_finished:
            unsubscribe(self._transport, self.state)

    @property
    def pending_messages(self) -> int:
        source = self._source()
        return len(source.puller.buffer) if source is not None else 0

    @abstractmethod
    def read_up(self, deadline: float) -> Any:
        """Read everything for a drain; each driver has its own, because asyncio's is awaited."""


def _sweep(transport: DriverTransport) -> None:
    """End the subscriptions of collected sources. A finaliser cannot: it may run at any moment, in any thread."""
    for state in transport.connection.subscriptions.all:
        if isinstance(state.reader, SourceReaderBase) and state.reader.is_abandoned:
            transport.connection.unsubscribe(state)
