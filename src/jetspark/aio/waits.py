"""Tasks that wait for the same thing."""

from __future__ import annotations

import asyncio

__all__ = ["Waits"]


class Waits:
    """The waits for one thing. One that is cancelled leaves nothing behind, in the same time however many there are."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self) -> asyncio.Future[None]:
        """A wait that nobody gives up."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        return waiter

    async def wait(self, other: Waits | None = None) -> None:
        """Until it has happened, or the other thing has."""
        waiter = self.add()
        if other is not None:
            other._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)
            if other is not None:
                other._waiters.pop(waiter, None)

    def wake(self) -> None:
        """It has happened: all go on, in the order they came."""
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
