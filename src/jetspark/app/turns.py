"""A mutex for each boundary or entity, and a semaphore for all decisions, each with a fast path that does not wait.
Within one process, simultaneous decisions on the same boundary would only make each other fail."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

__all__ = ["DecisionSlots", "Turns"]


class DecisionSlots:
    """At most this many commands are decided at a time; the others wait, in the order of asking."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    def try_take(self) -> bool:
        """A place, if there is one at once; then :meth:`give_back` has to be called."""
        if self._free == 0:
            return False
        self._free -= 1
        return True

    async def take(self) -> None:
        if not self.try_take():
            await _in_line(self._waiting, self.give_back)

    def give_back(self) -> None:
        if not _pass_on(self._waiting):
            self._free += 1


class Turns:
    """A mutex for each name: commands use their boundary's, changes their entities'."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The waiting tasks of each name that is taken."""

    def try_begin(self, names: Sequence[str]) -> bool:
        """Have one's turn, if that is possible at once; then :meth:`end` has to be called."""
        waiting = self._waiting
        for name in names:
            if name in waiting:
                return False
        for name in names:
            waiting[name] = deque()
        return True

    async def begin(self, names: Sequence[str]) -> None:
        """Wait for one's turn; then :meth:`end` has to be called. Names are sorted, so that all wait in one order."""
        for place, name in enumerate(names):
            if name not in self._waiting:
                self._waiting[name] = deque()
                continue
            try:
                await _in_line(self._waiting[name], partial(self._leave, name))
            except BaseException:  # also when cancelled: a turn that nobody ends would hold up the others for ever
                self.end(names[:place])
                raise

    def end(self, names: Sequence[str]) -> None:
        for name in names:
            self._leave(name)

    def _leave(self, name: str) -> None:
        if not _pass_on(self._waiting[name]):
            del self._waiting[name]


async def _in_line(line: deque[asyncio.Future[None]], give_back: Callable[[], None]) -> None:
    """Wait for the handover. A task that is cancelled at that very moment hands over to the next."""
    ours: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    line.append(ours)
    try:
        await ours
    except BaseException:
        if ours.done() and not ours.cancelled():
            give_back()
        elif ours in line:
            line.remove(ours)
        raise


def _pass_on(line: deque[asyncio.Future[None]]) -> bool:
    """Wake the first task that still waits."""
    while line:
        first = line.popleft()
        if not first.done():
            first.set_result(None)
            return True
    return False
