"""A driver in virtual time: keeps a :class:`Connection` connected over a simulated network, and breaks it at random.

:class:`SimulatedTransport` replaces the drivers' sockets, timers and tasks by a
:class:`~jetspark.testing.network.Network` and its clock. So the machines of ``core`` and ``publish`` run here as they
do there, byte for byte, and whole minutes of outage cost milliseconds.

States of a transport, and who moves them::

    closed ──open()──> establishing ──session is up──> connected ──wire lost, pings unanswered──> establishing
                            └──every server refused at the first try: the program tries again, as programs do

Faults are drawn from the same random generator as everything else: by time, beforehand, and, with ``per_write``, at
each write.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jetspark.core.connection import Connection, Done, Failed, Ready
from jetspark.core.events import ConnectionEvent
from jetspark.core.lifecycle import Converse, Dial, Hangup, Step, establish
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import parse_servers
from jetspark.core.step_runner import Sleep, StepRun
from jetspark.errors import ConnectionLost, JetSparkError, RequestTimeout
from jetspark.testing.network import Network, NetworkTimer, VirtualClock, Wire

__all__ = ["Fault", "FaultPlan", "Faults", "SimulatedTransport"]

# A program whose first connect() fails tries again after a while.
CONNECT_AGAIN_S = 0.2


class SimulatedTransport:
    """Moves bytes between a connection and the network, and passes connection events to its listeners.

    The reader of a subscription is woken when messages have arrived; the handle of a request or a flush is called with
    the result and the error, either of which is None.
    """

    def __init__(self, network: Network, *, name: str, options: ConnectOptions | None = None) -> None:
        """``name`` tells this connection's reply subjects from all others'."""
        self.network, self.clock = network, network.clock
        self.machine = Connection(
            options or ConnectOptions(),
            parse_servers("model"),
            inbox=f"_INBOX.{name}",
            jitter=network.rng.random,
        )
        self.listeners: list[Callable[[ConnectionEvent], None]] = []
        self.wire: Wire | None = None
        self._steps: StepRun[Step, None] | None = None
        self._converse: Converse | None = None
        self._give_up: NetworkTimer | None = None
        self._timer: NetworkTimer | None = None
        self._is_flush_scheduled = False
        self._waiting_for_room: list[Callable[[], None]] = []
        self._has_been_up = False

    # ---- what the program does ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to connect, and stay connected from then on."""
        if self.machine.is_closed:
            return
        self._steps = StepRun(establish(self.machine, None, None, is_first=not self._has_been_up))
        self.clock.after(0.0, self._advance)

    def close(self) -> None:
        self.machine.close()
        self._steps = self._converse = None
        self._hang_up()
        self.deliver_events()
        self._wake_publishers()

    def deliver_events(self) -> None:
        """Deliver the events of a call into the machine, and schedule its output."""
        for event in self.machine.events():
            match event:
                case Ready(subscription):
                    if subscription.reader is not None:
                        subscription.reader.wake()
                case Done(handle, result):
                    handle(result, None)
                case Failed(handle, error):
                    handle(None, error)
                case _:
                    for listener in list(self.listeners):
                        listener(event)
        if self.machine.out_bytes:
            self.schedule_flush()

    def schedule_flush(self) -> None:
        """Write after all other events of this moment."""
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self.clock.after(0.0, self.flush)

    def flush(self) -> None:
        self._is_flush_scheduled = False
        if self.wire is not None and not self.wire.is_full:
            data = self.machine.data_to_send()
            if data:
                self.wire.write(data)
                if not self.wire.is_full:
                    self._wake_publishers()

    def call_when_there_is_room(self, call: Callable[[], None]) -> None:
        """Call back on the next change: room, a session, or the end of the connection."""
        self._waiting_for_room.append(call)

    def _wake_publishers(self) -> None:
        waiting, self._waiting_for_room = self._waiting_for_room, []
        for call in waiting:
            call()

    # ---- a session's life --------------------------------------------------------------------------------------

    def _advance(self, problem: Exception | None = None) -> None:
        """Perform the next step of the connecting generator."""
        steps = self._steps
        if steps is None:
            return
        steps.error = problem
        try:
            steps.advance()
        except JetSparkError:
            self._steps = None
            self.clock.after(CONNECT_AGAIN_S, self.open)
            return
        match steps.step:
            case None:
                self._up()
            case Sleep(seconds):
                self.clock.after(seconds, self._advance)
            case Hangup():
                self._hang_up()
                self.clock.after(0.0, self._advance)
            case Dial():
                self.clock.after(next(self.network.delays()), self._dial)
            case Converse() as step:
                self._converse = step
                self._give_up = self.clock.after(self.machine.options.connect_timeout_s, self._out_of_patience)
                self.flush()
                self._check_conversation()
            case step:
                raise AssertionError(f"not simulated: {step}")

    def _dial(self) -> None:
        if self._steps is None:
            return
        try:
            self.wire = self.network.dial(self._on_data, self._on_lost, self._on_room)
        except OSError as error:
            self._advance(error)
        else:
            self._advance()

    def _check_conversation(self) -> None:
        """End the conversation if it is complete, or if the wire is gone."""
        converse = self._converse
        if converse is not None and (self.wire is None or converse.is_done()):
            self._end_conversation(None if self.wire is not None else ConnectionLost("the connection was dropped"))

    def _out_of_patience(self) -> None:
        if self._converse is not None:
            self._end_conversation(RequestTimeout(self._converse.what, self.machine.options.connect_timeout_s))

    def _end_conversation(self, problem: Exception | None) -> None:
        self._converse = None
        if self._give_up is not None:
            self._give_up.cancel()
        self._advance(problem)

    def _up(self) -> None:
        self._steps = None
        self._has_been_up = True
        self.flush()
        self._wake_publishers()
        self.machine.on_time(self.clock.now)
        self._arm_timer()
        self.deliver_events()

    def _hang_up(self) -> None:
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.hang_up()
        if self._timer is not None:
            self._timer.cancel()

    # ---- events of the wire --------------------------------------------------------------------------------------

    def _on_data(self, data: bytes) -> None:
        try:
            self.machine.receive_data(data)
        except JetSparkError as error:
            self._on_lost(str(error))
            return
        self._check_conversation()
        self.deliver_events()

    def _on_lost(self, reason: str) -> None:
        self._hang_up()
        if self._converse is not None:
            self._check_conversation()
            return
        if self.machine.is_closed or self._steps is not None:
            return
        self.machine.end(reason)
        self._wake_publishers()
        self.deliver_events()
        self.open()

    def _on_room(self) -> None:
        self.flush()
        self._wake_publishers()

    def _arm_timer(self) -> None:
        deadline = self.machine.next_deadline()
        if deadline is not None:
            self._timer = self.clock.at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        try:
            self.machine.on_time(self.clock.now)
        except JetSparkError as error:
            self._on_lost(str(error))
            return
        self._arm_timer()
        self.deliver_events()


# ---- faults ----------------------------------------------------------------------------------------------------------

Fault: TypeAlias = Literal["cut", "cut all", "refuse", "kill", "leader", "cut off leader", "partition", "slow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """The kinds of faults, their rate and their duration."""

    kinds: Sequence[Fault] = ("cut", "cut", "cut all", "refuse", "kill")
    """Drawn with equal probability: name one twice to double its rate. The last four need replicas."""
    every_s: float = 2.0
    """The mean time between two faults."""
    per_write: float = 0.0
    """The probability of a fault at each write of a client, so that faults occur under load."""
    for_s: float = 20.0
    """Seconds after which no more faults begin."""
    outage_s: tuple[float, float] = (0.05, 4.0)
    """Shortest and longest duration of a refusal, a stop, and the time without a leader."""
    max_drop: int = 20
    """The most unacknowledged messages that a lost leader takes with it."""


class Faults:
    """Draws faults and schedules them."""

    def __init__(self, network: Network, rng: random.Random, plan: FaultPlan, *, stream: str) -> None:
        self.happened: list[tuple[float, Fault, float]] = []
        """The time, kind and duration of each fault so far."""
        self.over_at: float = network.clock.now
        """The end of the last fault."""
        self._network, self._rng, self._plan, self._stream = network, rng, plan, stream
        clock: VirtualClock = network.clock
        when, end = clock.now, clock.now + plan.for_s
        self._end = end
        if plan.kinds and plan.per_write:
            network.on_write = self._on_write
            self.over_at = end + plan.outage_s[1]
        while plan.kinds and (when := when + rng.expovariate(1 / plan.every_s)) < end:
            kind, seconds = rng.choice(plan.kinds), rng.uniform(*plan.outage_s)
            self.over_at = max(self.over_at, when + seconds)
            clock.at(when, lambda kind=kind, seconds=seconds: self._happen(kind, seconds))  # type: ignore[misc]

    def _on_write(self) -> None:
        rng, plan, clock = self._rng, self._plan, self._network.clock
        if clock.now < self._end and rng.random() < plan.per_write:
            kind, seconds = rng.choice(plan.kinds), rng.uniform(*plan.outage_s)
            # Delayed, so that some of the data is on its way by then.
            clock.after(next(self._network.delays()), lambda: self._happen(kind, seconds))

    def _happen(self, kind: Fault, seconds: float) -> None:
        network, rng = self._network, self._rng
        self.happened.append((network.clock.now, kind, seconds))
        match kind:
            case "cut":
                network.cut()
            case "cut all":
                for wire in network.wires:
                    wire.cut()
            case "refuse":
                network.refuse(seconds)
            case "kill":
                network.kill_server(seconds)
            case "leader":
                drop, is_silent = rng.randint(0, self._plan.max_drop), rng.random() < 0.5
                network.lose_leader(self._stream, seconds, drop=drop, is_silent=is_silent)
            case "cut off leader":
                network.cut_off_leader(self._stream, seconds, without_s=rng.uniform(0.0, 1.0))
            case "partition":
                # A leader that is cut off stays leader until the others reach it again.
                drop, without_s = rng.randint(0, self._plan.max_drop), rng.uniform(0.0, min(seconds, 2.0))
                network.partition(self._stream, seconds, without_s=without_s, drop=drop)
            case "slow":
                network.slow_down(self._stream, seconds, apply_s=rng.choice([0.05, 1.0, 4.0]))
