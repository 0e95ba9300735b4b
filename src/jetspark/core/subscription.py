"""One subscription's state: what arrived and was not yet read, how much may be waiting, when it ends."""

from __future__ import annotations

from collections import deque
from typing import Any

from jetspark.core.message import CoreMessage

__all__ = ["SubscriptionState"]


class SubscriptionState:
    """Messages between the network and their reader, within bounds.

    ``arrived`` is the parser's, filled while it reads a chunk; :meth:`settle` moves it to ``pending``, from which the
    reader takes. What does not fit is dropped, counted in ``dropped`` and reported as an event: NATS core has no way
    to ask a publisher to slow down, so the choice is between dropping here and being cut off by the server.

    The subscription is over when ``is_finished`` (nothing more will arrive) and ``pending`` is empty. ``error`` says
    why, if it was not the reader's own wish.
    """

    __slots__ = (
        "answers_to",
        "arrived",
        "dropped",
        "error",
        "handle",
        "is_finished",
        "is_slow",
        "max_messages",
        "max_pending_bytes",
        "max_pending_messages",
        "pending",
        "pending_bytes",
        "queue",
        "received",
        "received_before",
        "sid",
        "subject",
    )

    def __init__(
        self,
        sid: int,
        subject: str,
        queue: str,
        *,
        max_pending_messages: int,
        max_pending_bytes: int,
        answers_to: str = "",
        handle: Any = None,
    ) -> None:
        self.sid = sid
        self.subject = subject
        self.queue = queue
        self.max_pending_messages = max_pending_messages
        self.max_pending_bytes = max_pending_bytes
        self.answers_to = answers_to
        self.handle = handle
        """The driver's object, handed back in events; never looked at here."""
        self.arrived: list[CoreMessage] = []
        self.pending: deque[CoreMessage] = deque()
        self.pending_bytes = 0
        self.received = 0
        self.received_before = 0
        """How many of those before the present session: the server counts only since its SUB."""
        self.dropped = 0
        self.max_messages = 0
        """End after so many received in all; 0 is without end."""
        self.is_finished = False
        self.is_slow = False
        self.error: Exception | None = None

    def settle(self) -> int:
        """Take over what arrived; returns how many messages had to be dropped."""
        arrived = self.arrived
        if self.is_finished:
            arrived.clear()
            return 0
        if self.max_messages:
            # The server counts too; but after a reconnect both counted from different beginnings.
            del arrived[self.max_messages - self.received :]
        self.received += len(arrived)
        arrived_bytes = sum([message.size_bytes for message in arrived])
        dropped = 0
        if (
            len(self.pending) + len(arrived) <= self.max_pending_messages
            and self.pending_bytes + arrived_bytes <= self.max_pending_bytes
        ):
            self.pending.extend(arrived)
            self.pending_bytes += arrived_bytes
            # Half empty again: the next loss is a new event, not more of the last one.
            if (
                self.is_slow
                and len(self.pending) * 2 <= self.max_pending_messages
                and self.pending_bytes * 2 <= self.max_pending_bytes
            ):
                self.is_slow = False
        else:
            dropped = self._settle_one_by_one(arrived)
            self.dropped += dropped
        arrived.clear()
        if self.max_messages and self.received >= self.max_messages:
            self.is_finished = True
        return dropped

    def _settle_one_by_one(self, arrived: list[CoreMessage]) -> int:
        dropped = 0
        for message in arrived:
            size = message.size_bytes
            if len(self.pending) >= self.max_pending_messages or self.pending_bytes + size > self.max_pending_bytes:
                dropped += 1
            else:
                self.pending.append(message)
                self.pending_bytes += size
        return dropped

    def take(self) -> CoreMessage:
        """The oldest message; raises ``IndexError`` when none is waiting."""
        message = self.pending.popleft()
        self.pending_bytes -= message.size_bytes
        return message
