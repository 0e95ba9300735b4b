"""The subscriptions of a connection, which outlive its sessions, and what arrives for them.

A session's bytes are read by a parser of its own, which looks here for every message. It remembers what it found, so
that most messages need no look; what is removed here it has to forget.
"""

from __future__ import annotations

from typing import Any

from jetspark.core import frames
from jetspark.core.dispatcher import Event, Ready
from jetspark.core.events import SlowConsumer
from jetspark.core.message import CoreMessage
from jetspark.core.parser import Parser
from jetspark.core.subscription import SubscriptionState

__all__ = ["Subscriptions"]


class Subscriptions:
    """Every subscription that is not over, by the id it has at the server."""

    def __init__(self, message_class: type[CoreMessage] = CoreMessage, client: Any = None) -> None:
        """``message_class`` is what messages are, unless a subscription says otherwise; ``client`` is for them."""
        self.routes: dict[bytes, SubscriptionState] = {}
        """By id as it stands in a frame: the parser looks here for every message."""
        self._message_class, self._client = message_class, client
        self.parser = Parser(self.routes, message_class, client)
        """Of the present session."""
        self._last_sid = 0

    def begin_session(self) -> None:
        """Bytes of another session follow."""
        self.parser = Parser(self.routes, self._message_class, self._client)

    @property
    def all(self) -> list[SubscriptionState]:
        """A copy: those that are looked at may end meanwhile."""
        return list(self.routes.values())

    def new_sid(self) -> int:
        """An id for the next subscription. None is used twice: messages of the one before may be on their way."""
        self._last_sid += 1
        return self._last_sid

    def add(self, subscription: SubscriptionState) -> None:
        self.routes[b"%d" % subscription.sid] = subscription

    def answering(self, subject: str) -> list[SubscriptionState]:
        """Those whose answers come only if we may publish to the subject."""
        return [each for each in self.routes.values() if each.answers_to == subject]

    def named(self, subject: str, queue: str = "") -> list[SubscriptionState]:
        return [each for each in self.routes.values() if each.subject == subject and each.queue == queue]

    def restore(self) -> list[bytes]:
        """What tells a new session of them, each with what is left of its limit."""
        restored: list[bytes] = []
        for subscription in self.routes.values():
            restored.append(frames.sub(subscription.subject, subscription.queue, subscription.sid))
            subscription.received_before = subscription.received
            if subscription.max_messages:
                left = subscription.max_messages - subscription.received
                restored.append(frames.unsub(subscription.sid, left))
        return restored

    def deliver(self, subscription: SubscriptionState, events: list[Event]) -> None:
        """Hand over what the parser read for it."""
        before = subscription.dropped
        if subscription.settle(self.parser.chunk_bytes):
            # Once at the beginning, then at each doubling: loud enough to notice, quiet enough to survive.
            if not subscription.is_slow or subscription.dropped.bit_length() > before.bit_length():
                events.append(SlowConsumer(subscription.subject, subscription.dropped))
            subscription.is_slow = True
        if subscription.is_finished:
            self._remove(subscription)
        events.append(Ready(subscription))

    def finish(self, subscription: SubscriptionState, events: list[Event]) -> None:
        """Nothing more will arrive for it."""
        subscription.is_finished = True
        # Told once, although an interrupt may have it done twice: the table is the mark.
        if b"%d" % subscription.sid in self.routes:
            events.append(Ready(subscription))
            self._remove(subscription)  # the last step: what was interrupted before it is done again

    def _remove(self, subscription: SubscriptionState) -> None:
        # It may not be there any more: ending may be done twice, after an interrupt.
        if self.routes.pop(b"%d" % subscription.sid, None) is not None:
            self.parser.forget_routes()  # it remembers the subscription of the last message, to look up none
