"""What a connection tells its driver: answers for those who wait, subscriptions to read, and connection events.

``handle`` is the driver's (a future, a waiter): it was given with the call, comes back here, and is never looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from jetspark.core.events import ConnectionEvent
from jetspark.core.subscription import SubscriptionState

__all__ = ["Done", "Event", "Failed", "Ready"]


@dataclass(slots=True)
class Done:
    """An operation succeeded."""

    handle: Any
    result: Any = None


@dataclass(slots=True)
class Failed:
    """An operation failed."""

    handle: Any
    error: Exception


@dataclass(slots=True)
class Ready:
    """A subscription has messages to read, or is over."""

    subscription: SubscriptionState


Event: TypeAlias = Done | Failed | Ready | ConnectionEvent
