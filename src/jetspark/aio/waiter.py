"""Waiting of one task for another. The blocking driver's module has the same names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Changed", "Waiter"]

Waiter: TypeAlias = asyncio.Future[Any]
"""A future that its owner resolves with a result or an error."""


class Changed:
    """A condition variable: tasks wait here until another task calls :meth:`notify_all`.

    A cancelled wait is removed in constant time.
    """

    __slots__ = ("_waiters",)

    def __init__(self, lock: object) -> None:
        """``lock`` is the transport's; unused here, while the blocking driver's threads release it during a wait."""
        self._waiters: dict[asyncio.Future[bool], None] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for :meth:`notify_all`; False after ``timeout_s``."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters[waiter] = None
        timer = None if timeout_s is None else loop.call_later(timeout_s, _time_is_up, waiter)
        try:
            return await waiter
        finally:
            if timer is not None:
                timer.cancel()
            self._waiters.pop(waiter, None)

    def call(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, at the next :meth:`notify_all`."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiter.add_done_callback(lambda _: callback())
        self._waiters[waiter] = None

    async def wait_for(self, is_so: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until ``is_so`` returns a true value; False after ``timeout_s``."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while not is_so():
            if not await self.wait(None if deadline is None else deadline - loop.time()):
                return bool(is_so())
        return True

    def notify_all(self) -> None:
        """Wake all waiters, in the order of their arrival."""
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(True)


def _time_is_up(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
