"""A condition variable for the messages of one source, with asyncio."""

from __future__ import annotations

from jetspark.aio.transport import Transport
from jetspark.aio.waiter import Changed

__all__ = ["MessageCondition"]


class MessageCondition:
    """Tasks that wait for the messages of one source."""

    def __init__(self, transport: Transport) -> None:
        self._changed, self._now = Changed(transport.lock), transport.now
        self.notify_all = self._changed.notify_all

    def begin(self) -> float:
        """Return the time at which the wait begins. No wake-up is lost before :meth:`wait`: the loop runs both calls
        without a switch between them."""
        return self._now()

    async def wait(self, began_at: float, until: float | None) -> bool:
        """Wait for a message; True when woken before ``until``, on the loop's clock."""
        return await self._changed.wait(None if until is None else until - began_at)
