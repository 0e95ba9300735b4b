"""The subscriptions of a connection, which outlive its sessions, and their delivery.

Each session has a parser of its own, which looks up the subscription of every message here. It caches the results, so
that most messages need no lookup; a removed subscription has to be removed from the cache as well.
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
        """``message_class`` is the class of messages unless a subscription has its own; ``client`` is passed to
        them."""
        self.routes: dict[bytes, SubscriptionState] = {}
        """By id as it stands in a frame; the parser reads it for every message."""
        self._message_class, self._client = message_class, client
        self.parser = Parser(self.routes, message_class, client)
        """The parser of the present session."""
        self._last_sid = 0

    def begin_session(self) -> None:
        """Prepare for the bytes of another session."""
        self.parser = Parser(self.routes, self._message_class, self._client)

    @property
    def all(self) -> list[SubscriptionState]:
        """A copy, because a subscription may end during the iteration."""
        return list(self.routes.values())

    def new_sid(self) -> int:
        """An id for the next subscription. An id is never reused: messages of its last owner may still arrive."""
        self._last_sid += 1
        return self._last_sid

    def add(self, subscription: SubscriptionState) -> None:
        self.routes[b"%d" % subscription.sid] = subscription

    def answering(self, subject: str) -> list[SubscriptionState]:
        """The subscriptions whose answers come only if we may publish to the subject."""
        return [each for each in self.routes.values() if each.answers_to == subject]

    def named(self, subject: str, queue: str = "") -> list[SubscriptionState]:
        return [each for each in self.routes.values() if each.subject == subject and each.queue == queue]

    def restore(self) -> list[bytes]:
        """The commands that restore them in a new session, each with the rest of its message limit."""
        restored: list[bytes] = []
        for subscription in self.routes.values():
            restored.append(frames.sub(subscription.subject, subscription.queue, subscription.sid))
            subscription.received_before = subscription.received
            if subscription.max_messages:
                left = subscription.max_messages - subscription.received
                restored.append(frames.unsub(subscription.sid, left))
        return restored

    def deliver(self, subscription: SubscriptionState, events: list[Event]) -> None:
        """Hand over the messages that the parser read for it."""
        before = subscription.dropped
        if subscription.accept_arrived(self.parser.chunk_bytes):
            # Once at the beginning, then at each doubling: loud enough to notice, quiet enough to survive.
            if not subscription.is_slow or subscription.dropped.bit_length() > before.bit_length():
                events.append(SlowConsumer(subscription.subject, subscription.dropped))
            subscription.is_slow = True
        if subscription.is_finished:
            self._remove(subscription)
        events.append(Ready(subscription))

    def finish(self, subscription: SubscriptionState, events: list[Event]) -> None:
        """End a subscription: nothing more will arrive for it. A second call, after an interrupt, completes the
        first."""
        subscription.is_finished = True
        # The table decides, so that an event is sent once although an interrupt may repeat this.
        if b"%d" % subscription.sid in self.routes:
            events.append(Ready(subscription))
            self._remove(subscription)  # the last step: an interrupt before it repeats all of this

    def _remove(self, subscription: SubscriptionState) -> None:
        # It may be missing already: ending is repeated after an interrupt.
        if self.routes.pop(b"%d" % subscription.sid, None) is not None:
            self.parser.forget_routes()  # it caches the subscription of recent lines
