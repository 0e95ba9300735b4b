"""Waiting for what arrives, with asyncio."""

from __future__ import annotations

import asyncio

from jetspark.aio.transport import Link

__all__ = ["Arrivals"]


class Arrivals:
    """Tasks that wait for the messages of one source."""

    def __init__(self, link: Link) -> None:
        self._loop = link.loop
        self._waiting: list[asyncio.Future[bool]] = []

    def begin(self) -> asyncio.Future[bool]:
        """Begin to wait: from now on :meth:`wake` is heard."""
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiting.append(waiter)
        return waiter

    async def wait(self, waiter: asyncio.Future[bool], until: float | None) -> bool:
        """Whether it was woken before its time was up."""
        timer = None if until is None else self._loop.call_at(until, _time_is_up, waiter)
        try:
            return await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(True)


def _time_is_up(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
