"""Waiting for machines with asyncio. Everything else that runs them is in :mod:`jetspark.core.driver_base`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from jetspark.aio.transport import Link
from jetspark.aio.waiter import Changed
from jetspark.core.driver_base import PacedRunnerBase, RunnerBase
from jetspark.core.link import WRITE_AT_BYTES
from jetspark.core.machine import Machine, PacedMachine
from jetspark.errors import BufferFull

__all__ = ["MachineRunner", "PacedRunner"]

M = TypeVar("M", bound=Machine)
P = TypeVar("P", bound=PacedMachine)


class MachineRunner(RunnerBase[M]):
    """A runner, and those who wait for its machine."""

    _link: Link
    changed: Changed

    def __init__(self, link: Link, on_step: Callable[[], None], notify_owner: Callable[[], None]) -> None:
        super().__init__(link, on_step, notify_owner)
        self.changed = Changed(link.lock)

    async def wait(self, deadline: float | None = None, changed: Changed | None = None) -> None:
        """Until something has changed, or the deadline; ``changed`` is for those who need not look at every step."""
        self._link.check_may_wait("an acknowledgement")
        self._link.flush()
        self.watch_clock()
        longest_s = self._link.sleep_s(self.next_deadline(), deadline)
        if not await (self.changed if changed is None else changed).wait(longest_s):
            self.due_at = None
            self.step(self.machine.on_time)

    async def read_up(self, deadline: float) -> bool:
        """Answers are read as they come."""
        return True


class PacedRunner(PacedRunnerBase[P], MachineRunner[P]):
    """A runner whose callers also wait for the connection to take what they send."""

    async def send(self, send: Callable[[float], None]) -> None:
        """Hand messages to the connection when it takes them: this never raises ``BufferFull``.

        ``send`` is told the time at which it does; what ages counts from there.
        """
        deadline: float | None = None
        is_flushed = False
        while True:
            try:
                send(self._link.now())
                break
            except BufferFull:
                is_flushed = not is_flushed
                if is_flushed:  # tried again before waiting: where that made room, nobody would tell us
                    self._link.flush()
                    continue
                if deadline is None:
                    deadline = self._link.deadline(self.machine.room_timeout_s)
                await self.wait_for_room(deadline)
                self.machine.check()  # it may be over meanwhile
            except BaseException as error:
                self.on_interrupt(error)
                raise
        await self.write()

    async def write(self) -> None:
        """Have the network take what was sent: now if it is much, else soon."""
        if self._connection.out_bytes >= WRITE_AT_BYTES:
            await self.write_and_wait()
        elif not self._link.flush_is_scheduled:
            self._link.flush_soon()

    async def write_and_wait(self) -> None:
        """Write now; wait while the network takes no more, unless the machine gives up meanwhile."""
        if self.machine.failure is not None:
            return
        try:
            await self._link.write_and_wait(self._link.deadline(self.machine.room_timeout_s), self._has_failed)
        except TimeoutError:
            self.step(self.machine.on_no_room)

    async def wait_for_room(self, deadline: float) -> None:
        """Until the connection may take more, or the machine has given up; at the deadline it does."""
        try:
            await self._link.wait_for_room(deadline)
        except TimeoutError:
            self.step(self.machine.on_no_room)
