# Generated from aio/runner.py by tools/unasync.py; edit that file.
"""Waiting for machines from threads. :mod:`jetspark.core.driver_base` has the rest of the runners."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from jetspark.blocking.transport import Transport
from jetspark.blocking.waiter import Changed
from jetspark.core.driver_base import PacedRunnerBase, RunnerBase
from jetspark.core.machine import Machine, PacedMachine
from jetspark.core.transport import WRITE_AT_BYTES
from jetspark.errors import BufferFull

__all__ = ["MachineRunner", "PacedRunner"]

M = TypeVar("M", bound=Machine)
P = TypeVar("P", bound=PacedMachine)


class MachineRunner(RunnerBase[M]):
    """Runs one machine; callers wait here until it has changed."""

    _transport: Transport
    changed: Changed

    def __init__(self, transport: Transport, on_step: Callable[[], None], notify_owner: Callable[[], None]) -> None:
        super().__init__(transport, on_step, notify_owner)
        self.changed = Changed(transport.lock)

    def wait(self, deadline: float | None = None, changed: Changed | None = None) -> None:
        """Wait for a step of the machine, or the deadline. ``changed`` is a condition that fewer steps notify."""
        self._transport.check_may_wait("an acknowledgement")
        self._transport.flush()
        self.watch_clock()
        longest_s = self._transport.sleep_s(self.next_deadline(), deadline)
        if not (self.changed if changed is None else changed).wait(longest_s):
            self.due_at = None
            self.step(self.machine.on_time)

    def read_up(self, deadline: float) -> bool:
        """Return at once: the machine reads its replies as they arrive."""
        return True


class PacedRunner(PacedRunnerBase[P], MachineRunner[P]):
    """A runner whose callers also wait for room in the connection's send buffer."""

    def send(self, send: Callable[[float], None]) -> None:
        """Call ``send`` once the connection has room; never raises ``BufferFull``.

        ``send`` receives the time of the successful attempt, from which its deadlines count.
        """
        deadline: float | None = None
        is_flushed = False
        while True:
            try:
                send(self._transport.now())
                break
            except BufferFull:
                is_flushed = not is_flushed
                if is_flushed:  # retry before waiting: the flush may have made room, which notifies no waiter
                    self._transport.flush()
                    continue
                if deadline is None:
                    deadline = self._transport.deadline(self.machine.room_timeout_s)
                self.wait_for_room(deadline)
                self.machine.check()  # the machine may have failed in the meantime
            except BaseException as error:
                self.on_interrupt(error)
                raise
        self.write()

    def write(self) -> None:
        """Flush the send buffer: now if it is large, else soon."""
        if self._connection.out_bytes >= WRITE_AT_BYTES:
            self.write_and_wait()
        elif not self._transport.flush_is_scheduled:
            self._transport.flush_soon()

    def write_and_wait(self) -> None:
        """Flush now, and wait while the network accepts no more, until the machine gives up."""
        if self.machine.failure is not None:
            return
        try:
            self._transport.write_and_wait(self._transport.deadline(self.machine.room_timeout_s), self._has_failed)
        except TimeoutError:
            self.step(self.machine.on_no_room)

    def wait_for_room(self, deadline: float) -> None:
        """Wait until the connection may have room. At the deadline, call the machine's ``on_no_room``."""
        try:
            self._transport.wait_for_room(deadline)
        except TimeoutError:
            self.step(self.machine.on_no_room)
