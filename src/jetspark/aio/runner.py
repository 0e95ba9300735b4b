"""Running machines with asyncio: everything between a :class:`~jetspark.core.machine.Machine` and the event loop.

One runner runs one machine. It is the reader of the machine's inbox, it is attached to the link while the machine has
something to hear of or to wait for, and its owner's callers wait in it. After each call into the machine it does the
same: tell the owner, wake the callers, write what the machine sent by itself, and look when the next deadline is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from jetspark.aio.transport import WRITE_AT_BYTES, Link
from jetspark.aio.waits import Waits
from jetspark.core.events import ConnectionEvent
from jetspark.core.machine import Machine, PacedMachine
from jetspark.errors import BufferFull

__all__ = ["MachineRunner", "PacedRunner"]

M = TypeVar("M", bound=Machine)
P = TypeVar("P", bound=PacedMachine)


class MachineRunner(Generic[M]):
    """Wakes one machine by answers, events and time, and wakes those who wait for it."""

    machine: M

    def __init__(self, link: Link, on_step: Callable[[], None]) -> None:
        """``on_step`` is the owner's: called after each call into the machine, before its callers go on."""
        self._link, self._connection = link, link.connection
        self._on_step = on_step
        self.changed = Waits()
        """Those who wait for the machine."""
        self.due_at: float | None = None
        """When the machine is called at the latest; None while no alarm is set for it."""

    def run(self, machine: M) -> M:
        """This is the machine. It is given by a call of its own, because it is made with the runner as its reader."""
        self.machine = machine
        return machine

    def attach(self) -> None:
        """Hear of connection events and of time from now on."""
        self._link.attach(self)

    def detach(self) -> None:
        self._link.detach(self)
        self.due_at = None  # a deadline that nobody watches

    def step(self, call: Callable[[float], None]) -> None:
        """Call into the machine, with the time."""
        try:
            call(self._link.now())
        except Exception as error:  # a mistake of ours: nobody must wait for what never comes
            self.machine.fail(error)
            raise
        finally:
            self.settle()

    def settle(self) -> None:
        """After every call into the machine."""
        self._on_step()
        self.changed.wake()
        if self.due_at is None:  # else an alarm is set, and early enough: an answer moves the deadline away
            self.watch_clock()

    def watch_clock(self) -> None:
        """Have the link call us at the machine's deadline. An alarm that is early enough stays: it is set anew then."""
        deadline = self.machine.next_deadline()
        if deadline is not None:
            self.wake_at(deadline)

    def wake_at(self, moment: float) -> None:
        """Have the link call us then, or earlier."""
        if self.due_at is None or moment < self.due_at:
            self.due_at = moment
            self._link.set_alarm(moment)

    async def wait(self) -> None:
        """Until something has changed."""
        self._link.flush()
        self.watch_clock()
        await self.changed.wait()

    # ---- the link tells us -------------------------------------------------------------------------------------

    def on_event(self, event: ConnectionEvent) -> None:
        self.step(partial(self.machine.on_event, event))

    def next_deadline(self) -> float | None:
        return self.due_at

    def on_time(self, now: float) -> None:
        self.due_at = None
        self.step(self.machine.on_time)

    # ---- the reader of the machine's inbox ---------------------------------------------------------------------

    def wake(self) -> None:
        """The server said something."""
        self.step(self.machine.on_replies)

    @property
    def pending_messages(self) -> int:
        return 0

    async def read_up(self, deadline: float) -> bool:
        """Answers are read as they come."""
        return True


class PacedRunner(MachineRunner[P]):
    """A runner whose callers also wait for the connection to take what they send."""

    def __init__(self, link: Link, on_step: Callable[[], None]) -> None:
        super().__init__(link, on_step)
        self._short_of_room = Waits()
        """Those who wait for the connection, and not for the machine; it wakes them when it gives up."""

    def settle(self) -> None:
        super().settle()
        self.watch_clock()  # a hole that is noticed brings the deadline nearer
        if self.machine.failure is not None:
            self._short_of_room.wake()
        out_bytes = self._connection.out_bytes
        if out_bytes >= WRITE_AT_BYTES:
            self._link.hand_over()
        elif out_bytes:
            self._link.flush_soon()

    async def send(self, send: Callable[[float], None]) -> None:
        """Hand messages to the connection when it takes them: this never raises ``BufferFull``.

        ``send`` is told the time at which it does; what ages counts from there.
        """
        deadline: float | None = None
        while True:
            try:
                send(self._link.now())
                break
            except BufferFull:
                self._link.flush()
                if deadline is None:
                    deadline = self._link.deadline(self.machine.room_timeout_s)
                await self.wait_for_room(deadline)
                self.machine.check()  # it may be over meanwhile
        await self.write()

    async def write(self) -> None:
        """Have the network take what was sent: now if it is much, else when this step of the loop is over."""
        if self._connection.out_bytes >= WRITE_AT_BYTES:
            await self.write_and_wait()
        elif not self._link.flush_is_scheduled:
            self._link.flush_soon()

    async def write_and_wait(self) -> None:
        """Write now; wait while the network takes no more, unless the machine gives up meanwhile."""
        if self.machine.failure is not None:
            return
        try:
            await self._link.write_and_wait(self._link.deadline(self.machine.room_timeout_s), self._short_of_room)
        except TimeoutError:
            self.step(self.machine.on_no_room)

    async def wait_for_room(self, deadline: float) -> None:
        """Until the connection may take more, or the machine has given up; at the deadline it does."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._link.wait_for_room(self._short_of_room)
        except TimeoutError:
            self.step(self.machine.on_no_room)
