"""The table of a connection's subscriptions, which outlives its sessions."""

from __future__ import annotations

from jetspark.core import frames
from jetspark.core.subscription import SubscriptionState

__all__ = ["Subscriptions"]


class Subscriptions:
    """Every subscription that is not over, by the id it has at the server."""

    def __init__(self) -> None:
        self.routes: dict[bytes, SubscriptionState] = {}
        """By id as it stands in a frame: the parser looks here for every message."""
        self._last_sid = 0

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

    def remove(self, subscription: SubscriptionState) -> bool:
        """False when it was not there: ending may be done twice, after an interrupt."""
        return self.routes.pop(b"%d" % subscription.sid, None) is not None

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
