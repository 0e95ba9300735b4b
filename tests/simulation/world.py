"""Publishers in a world of their own: the real machines, a model of the server, a network that fails, virtual time.

A world is a seed and a plan. Workloads (this module) produce messages and drive the machines as the drivers do; faults
(:mod:`jetspark.testing.simulation`) break what they use; checkers (:mod:`checkers`) look at what came out, and know of
neither. Every message says whose it is and which, so the stream itself is the evidence.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jetspark.core.events import ConnectionEvent, Disconnected
from jetspark.core.options import ConnectOptions
from jetspark.errors import BufferFull, JetSparkError
from jetspark.jetstream.config import StreamConfig
from jetspark.publish.fast_batch import FastMachine, FastState
from jetspark.publish.fast_options import FastBatchOptions, FastPublisherOptions, Refusal
from jetspark.publish.fast_publisher import FastPublisherMachine
from jetspark.publish.outgoing import CHUNK_MESSAGES, Item
from jetspark.testing import BatchLimits, Delivery, ModelServer
from jetspark.testing.network import Front, Network, NetworkTimer, VirtualClock
from jetspark.testing.simulation import FaultPlan, Faults, SimulatedTransport

STREAM = "EVENTS"
MAX_MESSAGE_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Burst:
    """So many messages become available at once, so long after those before."""

    after_s: float
    messages: int


class Checker(Protocol):
    """Looks at a run after every step of it, and at the end; raises ``Violation``."""

    def look(self, world: World, run: Run) -> None: ...

    def finish(self, world: World, run: Run) -> None: ...


class World:
    """A server, a network, faults, and publishers."""

    def __init__(
        self,
        seed: int,
        *,
        plan: FaultPlan | None = None,
        replicas: int = 1,
        limits: BatchLimits | None = None,
        delay_s: tuple[float, float] | None = None,
        front: type[Front] = Front,
    ) -> None:
        self.seed = seed
        self.is_replicated = replicas > 1
        self.rng = rng = random.Random(seed)
        self.clock = VirtualClock()
        self.model = ModelServer(limits=limits)
        self.model.create_stream(
            StreamConfig(
                name=STREAM,
                subjects=["events.>"],
                allow_batched=True,
                allow_atomic=True,
                replicas=replicas,
                storage="memory",
                max_message_bytes=MAX_MESSAGE_BYTES,
            )
        )
        self.front = front(self.model, self.clock)
        self.network = Network(
            self.front,
            rng,
            delay_s=delay_s or rng.choice([(0.0001, 0.001), (0.001, 0.02), (0.01, 0.2)]),
            max_in_flight_bytes=rng.choice([1 << 10, 8 << 10, 64 << 10]),
            piece_bytes=rng.choice([0, 0, 700, 60]),
        )
        self.faults = Faults(self.network, rng, plan or FaultPlan(kinds=()), stream=STREAM)
        self.runs: list[Run] = []
        self.watches: list[Callable[[World], None]] = []
        """Asked when all is over."""
        self._stored: dict[str, list[int]] = {}
        self._seen: Sequence[Any] = []

    @property
    def has_faults(self) -> bool:
        return bool(self.faults.happened)

    @property
    def had_a_leader_alone(self) -> bool:
        """Whether a leader was cut off from the other replicas."""
        return any(what in ("partition", "cut off leader") for _, what, _ in self.faults.happened)

    def transport(self, name: str, *, send_buffer_bytes: int = 8 << 20) -> SimulatedTransport:
        options = ConnectOptions(send_buffer_bytes=send_buffer_bytes, ping_interval_s=5.0, reconnect_wait_max_s=1.0)
        transport = SimulatedTransport(self.network, name=name, options=options)
        transport.open()
        return transport

    def stored(self, name: str) -> list[int]:
        """The numbers of a run's messages that are in the stream, in its order."""
        # A lost leader may have taken some with it; then all is looked at again.
        messages, seen = self.model.messages(STREAM), self._seen
        if seen and (len(messages) < len(seen) or messages[len(seen) - 1] is not seen[-1]):
            self._stored.clear()
            seen = self._seen = []
        for message in messages[len(seen) :]:
            owner, number, _ = message.data.split(b":", 2)
            self._stored.setdefault(owner.decode(), []).append(int(number))
        self._seen = messages
        return self._stored.get(name, [])

    def run(self) -> None:
        """Let it all happen; then everyone who has a right to judge does."""
        clock = self.clock
        for run in self.runs:
            run.start()
        working_until = max([self.faults.over_at, *(run.produces_until for run in self.runs)])
        clock.run(working_until)
        patience_s = max((run.settles_within_s for run in self.runs), default=0.0)
        clock.run(working_until + patience_s, lambda: all(run.is_over for run in self.runs))
        # What is still in flight when the last one is content may be the message that proves it wrong.
        clock.run(clock.now + 15.0)
        for run in self.runs:
            run.finish()
        for watch in self.watches:
            watch(self)

    def trace(self) -> list[str]:
        """What happened, in words that are the same whenever the same happens."""
        lines = [f"{when - 1000:9.4f} {what} {seconds:.3f}" for when, what, seconds in self.faults.happened]
        lines += [f"{run.name}: {run.describe()}" for run in self.runs]
        lines += [f"{run.name} stored: {self.stored(run.name)}" for run in self.runs]
        return lines


class Run:
    """One publisher: produces, sends, is woken by answers, events and time."""

    settles_within_s = 90.0
    """It must be over so long after the last fault and the last message. The longest that can follow on each other: a
    session that has to be found dead and established again, a batch's timeout twice, some hundred windows of one."""

    def __init__(
        self, world: World, name: str, bursts: Sequence[Burst], *, transport: SimulatedTransport | None = None
    ) -> None:
        self.world, self.name, self.clock = world, name, world.clock
        self.bursts = bursts
        self.total = sum(burst.messages for burst in bursts)
        self.available = 0
        self.checkers: list[Checker] = []
        self.transport = transport or world.transport(
            name, send_buffer_bytes=world.rng.choice([4 << 10, 64 << 10, 8 << 20])
        )
        self.transport.listeners.append(self.on_event)
        self.disconnections = 0
        self.has_own_ids = False
        """Every message has an id of the caller's."""
        self.has_headers = False
        """Every third message has a header of the caller's."""
        self.bad: dict[int, str] = {}
        """Numbers of messages the stream will refuse, and why."""
        self._timer: NetworkTimer | None = None
        self._is_stepping = self._waits_for_room = False
        self._room_waits = 0
        world.runs.append(self)

    # ---- what it produces --------------------------------------------------------------------------------------

    @property
    def produces_until(self) -> float:
        return self.clock.now + sum(burst.after_s for burst in self.bursts)

    def start(self) -> None:
        when = self.clock.now
        for burst in self.bursts:
            when += burst.after_s
            self.clock.at(when, lambda count=burst.messages: self._produce(count))  # type: ignore[misc]

    def _produce(self, count: int) -> None:
        self.available += count
        self.settle()

    def item(self, number: int) -> Item:
        """Message ``number``, counted from 1; the same each time it is asked for."""
        padding = (number * 37) % 50
        subject = f"events.{self.name}.{number % 3}"
        match self.bad.get(number):
            case "too large":
                padding = MAX_MESSAGE_BYTES
            case "wrong sequence":
                headers = {"Nats-Expected-Last-Sequence": "999999999"}
                return subject, b"%b:%d:%b" % (self.name.encode(), number, b"x" * padding), headers
        data = b"%b:%d:%b" % (self.name.encode(), number, b"x" * padding)
        if self.has_headers and number % 3 == 0:
            return subject, data, {"Unit": "GiB"}
        return (subject, data, {"Nats-Msg-Id": f"own-{self.name}-{number}"}) if self.has_own_ids else (subject, data)

    # ---- what drives it ----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """The server said something."""
        self.paced.on_replies(self.clock.now)
        self.settle()

    pending_messages = 0

    def read_up(self, deadline: float) -> bool:
        return True

    def on_event(self, event: ConnectionEvent) -> None:
        if isinstance(event, Disconnected):
            self.disconnections += 1
        self.paced.on_event(event, self.clock.now)
        self.settle()

    def _on_timer(self) -> None:
        self._timer = None
        self.paced.on_time(self.clock.now)
        self.settle()

    def settle(self) -> None:
        """After every call into the machine."""
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            self.step()
        except BufferFull:
            if not self._waits_for_room:
                self._waits_for_room = True
                self._room_waits += 1
                self.transport.call_when_there_is_room(self._on_room)
                waits = self._room_waits
                self.clock.after(self.paced.room_timeout_s, lambda: self._on_no_room(waits))
        finally:
            self._is_stepping = False
        if self.transport.machine.out_bytes:
            self.transport.schedule_flush()
        self._watch_clock()
        for checker in self.checkers:
            checker.look(self.world, self)

    def _on_room(self) -> None:
        self._waits_for_room = False
        self.settle()

    def _on_no_room(self, waits: int) -> None:
        """As both drivers: a message does not wait for room for ever."""
        if self._waits_for_room and waits == self._room_waits and not self.is_over:
            self.paced.on_no_room(self.clock.now)
            self.settle()

    def _watch_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.deadline()
        if deadline is not None:
            self._timer = self.clock.at(deadline, self._on_timer)

    def finish(self) -> None:
        for checker in self.checkers:
            checker.finish(self.world, self)

    # ---- what the kinds differ in ------------------------------------------------------------------------------

    paced: Any

    @property
    def is_over(self) -> bool:
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError

    def deadline(self) -> float | None:
        deadline: float | None = self.paced.next_deadline()
        return deadline

    def describe(self) -> str:
        raise NotImplementedError


class BatchRun(Run):
    """One fast batch: add, and commit at the end, as ``FastBatch`` does."""

    def __init__(
        self,
        world: World,
        name: str,
        bursts: Sequence[Burst],
        options: FastBatchOptions,
        *,
        commits_with_message: bool = True,
        machine: type[FastMachine] = FastMachine,
        transport: SimulatedTransport | None = None,
    ) -> None:
        super().__init__(world, name, bursts, transport=transport)
        self.options = options
        self.paced = self.batch = machine(self.transport.machine, self, options)
        self.heard: list[tuple[int, int]] = []
        """Progress and messages for each ack, as the server told them since a checker last looked."""
        self._progress = self._msgs_per_ack = 0
        self.sent = 0
        """Messages handed to the machine; equal to the sequence of the last one."""
        self.unheard: list[range] = []
        """Sent, and not acknowledged when a session ended: what was said about them may have been lost on the way."""
        self.reports = Reports(world)
        self.told: list[range | Refusal] = []
        """What the caller's callbacks would have got."""
        self._commits_with_message = commits_with_message
        self._has_left = False

    @property
    def is_over(self) -> bool:
        return self.batch.is_ended or self._has_left

    @property
    def is_waiting_for_server(self) -> bool:
        """There is something to send, or the end to hear, and the batch is not over."""
        batch = self.batch
        if batch.is_ended or batch.is_new:
            return False
        return self.available > self.sent or batch.is_opening or batch.state is FastState.COMMITTING

    def leave_after(self, seconds: float, *, by_dying: bool) -> None:
        """Go before the end: with a word to the server, or with the whole connection."""

        def leave() -> None:
            self._has_left = True
            if by_dying:
                self.transport.close()
            else:
                self.batch.abandon(self.clock.now)
                self.settle()

        self.clock.after(seconds, leave)

    def wake(self) -> None:
        """Listen in, before the machine does."""
        inbox = self.batch.inbox.subscription
        for message in inbox.pending if inbox is not None else ():
            reply = json.loads(message.data or b"{}")
            self.reports.heard += missing_in(message.subject, reply)
            match reply.get("type"):
                case "ack":
                    self._progress, self._msgs_per_ack = max(self._progress, reply["seq"]), reply["msgs"]
                case "err":
                    self._progress = max(self._progress, reply["seq"])
                case "gap":
                    self._progress = max(self._progress, reply["seq"] - 1)
            self.heard.append((self._progress, self._msgs_per_ack))
        super().wake()

    def on_event(self, event: ConnectionEvent) -> None:
        if isinstance(event, Disconnected) and not self.batch.is_ended:
            self.unheard.append(range(self.batch.acknowledged + 1, self.batch.sender.sent + 1))
        super().on_event(event)

    def step(self) -> None:
        batch, now = self.batch, self.clock.now
        self.told += batch.losses.news
        batch.losses.news.clear()
        while not self.is_over and self.available:
            last = self.total - 1 if self._commits_with_message else self.total
            if batch.is_new:
                self.sent = 0
                if batch.opening.reopen_at is not None and now < batch.opening.reopen_at:
                    return
                batch.start(self.item(1), now, is_only=self.total == 1 and self._commits_with_message)
                assert batch.inbox.subscription is not None
                self.reports.follow(batch.inbox.subscription.subject)
                self.sent = 1
                return
            if batch.is_opening or batch.state is not FastState.OPEN:
                return
            count = min(batch.sender.room, self.available - self.sent, last - self.sent)
            if count > 0:
                if self.world.rng.random() < 0.5:
                    batch.sender.add(self.item(self.sent + 1), now)
                    self.sent += 1
                else:
                    batch.sender.add_many([self.item(self.sent + 1 + place) for place in range(count)], now)
                    self.sent += count
                continue
            if self.available == self.total and self.sent == last:
                if self._commits_with_message:
                    batch.commit(self.item(self.total), now)
                    self.sent += 1
                else:
                    batch.end(now)
            return

    def deadline(self) -> float | None:
        if self.batch.is_new and not self._has_left:
            return self.batch.opening.reopen_at
        return self.batch.next_deadline()

    def describe(self) -> str:
        batch = self.batch
        return (
            f"{self.options.gap} {batch.state.value}, sequence {batch.sender.sequence}, "
            f"acknowledged {batch.acknowledged}, gaps {batch.losses.gaps}, "
            f"errors {[each.sequence for each in batch.losses.errors]}, doubts {batch.losses.doubts}, "
            f"ack {batch.ack}, {batch.failure!r}"
        )


# Errors of this kind are about the batch, not about the message they answer.
_ABOUT_THE_BATCH = frozenset({10185, 10205, 10206, 10207, 10208, 10211})


def missing_in(subject: str, reply: dict[str, Any]) -> list[int]:
    """Which sequences a reply on this subject says are not stored."""
    match reply:
        case {"type": "gap", "last_seq": first, "seq": received}:
            return list(range(first, received))
        case {"type": "err", "seq": sequence}:
            return [sequence]
        case {"error": {"err_code": number}} if number not in _ABOUT_THE_BATCH:
            return [int(subject.rsplit(".", 3)[1])]
    return []


class Reports:
    """What the server said about missing messages of one batch, and what of it arrived."""

    def __init__(self, world: World) -> None:
        self.said: list[int] = []
        self.heard: list[int] = []
        self._inbox = ""
        world.front.reply_watchers.append(self._on_said)

    def follow(self, inbox: str) -> None:
        """The batch was opened, perhaps again: this is where it listens."""
        self._inbox = inbox.removesuffix(">")
        self.said.clear()
        self.heard.clear()

    def _on_said(self, said: Delivery) -> None:
        if self._inbox and said.subject.startswith(self._inbox):
            self.said += missing_in(said.subject, json.loads(said.data or b"{}"))


class EndlessRun(Run):
    """An endless publisher: accept, flush now and then, close, as ``FastPublisher`` does."""

    def __init__(
        self,
        world: World,
        name: str,
        bursts: Sequence[Burst],
        options: FastPublisherOptions,
        *,
        flushes_every: int = 0,
        accepts_one_by_one: bool = True,
        machine: type[FastPublisherMachine] = FastPublisherMachine,
    ) -> None:
        super().__init__(world, name, bursts)
        self.options = options
        self.set_machine(machine)
        self.refused: dict[int, str] = {}
        # With little room every message may be a batch of its own: two round trips, and a keep-alive before its end.
        self.settles_within_s = Run.settles_within_s + 1.0 * self.total
        self._flushes_every, self._accepts_one_by_one = flushes_every, accepts_one_by_one
        self.has_left = False

    def set_machine(self, machine: type[FastPublisherMachine]) -> None:
        """Begin with a machine of this kind, and with the present options."""
        self.paced = self.endless = machine(self.transport.machine, self, self.options, now=self.clock.now)

    def leave_after(self, seconds: float) -> None:
        """Go before the end, without waiting for anything."""

        def leave() -> None:
            self.has_left = True
            self.endless.abandon(self.clock.now)
            self.settle()

        self.clock.after(seconds, leave)

    @property
    def is_over(self) -> bool:
        endless = self.endless
        if self.has_left:
            return True
        return endless.failure is not None or (endless.stages.accepted == self.total and endless.is_idle)

    def step(self) -> None:
        endless, now = self.endless, self.clock.now
        accepted = endless.stages.accepted
        while not self.has_left and endless.failure is None and accepted < self.available and (room := endless.room):
            count = min(self.available - accepted, 1 if self._accepts_one_by_one else room, CHUNK_MESSAGES)
            endless.accept([self.item(accepted + 1 + place) for place in range(count)], now)
            accepted = endless.stages.accepted
            if self._flushes_every and accepted % self._flushes_every == 0:
                endless.flush_requests.flush()
        if accepted == self.total and self.available == self.total:
            endless.close()
        try:
            while endless.pump(now):
                pass
        finally:
            for refused in endless.news:
                self.refused[refused.position] = str(refused.error)
            endless.news.clear()

    def describe(self) -> str:
        endless = self.endless
        return (
            f"accepted {endless.stages.accepted}, published {endless.stages.published}, batches {endless.batches}, "
            f"possibly doubled {endless.possibly_doubled}, refused {self.refused}, pending {endless.stages.pending}, "
            f"{endless.failure!r}"
        )


def some_bursts(rng: random.Random, *, messages: int, pauses: Sequence[float]) -> list[Burst]:
    """Messages in bursts of any size, with these pauses between them."""
    bursts = []
    while messages:
        count = rng.randint(1, messages) if rng.random() < 0.7 else messages
        bursts.append(Burst(rng.choice(pauses), count))
        messages -= count
    return bursts


__all__ = ["STREAM", "BatchRun", "Burst", "Checker", "EndlessRun", "JetSparkError", "Run", "World", "some_bursts"]
