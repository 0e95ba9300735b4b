"""Waiting for what arrives, with asyncio."""

from __future__ import annotations

from jetspark.aio.transport import Link
from jetspark.aio.waiter import Changed

__all__ = ["Arrivals"]


class Arrivals:
    """Tasks that wait for the messages of one source."""

    def __init__(self, link: Link) -> None:
        self._changed, self._now = Changed(link.lock), link.now
        self.notify_all = self._changed.notify_all

    def begin(self) -> float:
        """Begin to wait. Nothing can happen between this and :meth:`wait`: one thread does both."""
        return self._now()

    async def wait(self, began_at: float, until: float | None) -> bool:
        """Whether it was woken before its time was up."""
        return await self._changed.wait(None if until is None else until - began_at)
