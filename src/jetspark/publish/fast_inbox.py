"""Where the answers to a fast batch arrive, and the id it has by that. Pure."""

from __future__ import annotations

from jetspark.core.connection import Connection
from jetspark.core.machine import Reader
from jetspark.core.subscription import SubscriptionState

__all__ = ["FastInbox"]


class FastInbox:
    """A subscription for one batch alone, so that interest can be dropped as soon as the batch is over."""

    def __init__(self, machine: Connection, owner: Reader, batch_id: str | None) -> None:
        """``owner`` is woken when something arrived; ``batch_id`` is the caller's choice, if there is one."""
        self.batch_id = batch_id or ""
        """Empty before the first message, unless the caller gave one."""
        self.subscription: SubscriptionState | None = None
        """None before the first message, and when the batch is over."""
        self._machine, self._owner = machine, owner
        self._given_id = batch_id

    def open(self) -> str:
        """Subscribe, anew if need be; returns the prefix of reply subjects, which ends with the batch's id."""
        self.close()
        prefix, batch_id = self._machine.names.new_batch()
        if self._given_id is not None:
            prefix, batch_id = f"{prefix}.{batch_id}", self._given_id
        # No more can arrive than was asked for: an answer a message at the very most.
        self.subscription = self._machine.subscribe(
            f"{prefix}.{batch_id}.>", is_unbounded=True, is_inbox=True, reader=self._owner
        )
        self.batch_id = batch_id
        return f"{prefix}.{batch_id}"

    def close(self) -> None:
        """Drop interest; right at any time."""
        subscription, self.subscription = self.subscription, None
        if subscription is not None and not subscription.is_finished and not self._machine.is_closed:
            self._machine.unsubscribe(subscription)
