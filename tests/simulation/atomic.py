"""Atomic batches in virtual time: the operations' driver, and their checker. The API they ask is in :mod:`api`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from simulation.checkers import Judge, Violation
from simulation.world import STREAM, Burst, Run, World

from jetspark.core.headers import Headers
from jetspark.core.message import CoreMessage
from jetspark.core.step_runner import Sleep
from jetspark.errors import BatchInDoubt, BufferFull, JetSparkError, JetStreamUnavailable, NoResponders, RequestTimeout
from jetspark.jetstream.operations import LEADERLESS_RETRIES, LEADERLESS_WAIT_S, Api, Request
from jetspark.publish.atomic import AtomicMachine
from jetspark.testing.network import NODES, Publication

# So long after the last fault every session is up, a leader is heard, and what is applied late is applied.
CALM_AFTER_S = 30.0


@dataclass(slots=True)
class Sent:
    """A batch that was tried."""

    machine: AtomicMachine
    numbers: range
    began: float
    failure: Exception | None = None


class AtomicRun(Run):
    """Batch after batch; what became of those in doubt is asked until it is known, or cannot be."""

    def __init__(self, world: World, name: str, bursts: list[Burst], *, machine: type[AtomicMachine] = AtomicMachine):
        super().__init__(world, name, bursts)
        self.checkers.append(AllOrNothing())
        self.batches: list[Sent] = []
        self._class = machine
        self._script: Generator[Request | Sleep, Any, None] | None = None
        self._timeout_s = 2.0
        self._is_over = False

    paced: Any = None
    settles_within_s = 600.0

    @property
    def is_over(self) -> bool:
        return self._is_over

    def start(self) -> None:
        self._script = self._live()
        self._go(lambda script: next(script))

    def _live(self) -> Generator[Request | Sleep, Any, None]:
        rng, number = self.world.rng, 1
        while not self.transport.machine.is_connected:
            yield Sleep(0.05)
        for burst in self.bursts:
            yield Sleep(burst.after_s)
            machine = self._class(
                self.transport.machine,
                Api(),
                f"{self.name}-{number}",
                ack_first=rng.random() < 0.8,
                ack_every=rng.choice([None, None, 3]),
                timeout_s=self._timeout_s,
                jitter=rng.random,
            )
            began = self.clock.now
            batch = Sent(machine, range(number, number + burst.messages), began)
            self.batches.append(batch)
            try:
                yield from self._send(machine, batch.numbers, ends_with_message=rng.random() < 0.5)
            except JetSparkError as error:
                batch.failure = error
                yield from machine.leave(failed=True)
            number += burst.messages
            for _ in range(8):
                if machine.outcome != "unknown":
                    break
                # Before the commit has arrived perhaps, and while leaders change.
                yield Sleep(rng.choice([0.0, 0.01, 0.5, 3.0]))
                yield from self._resolve(machine, began)
        yield Sleep(max(0.0, self.world.faults.over_at + CALM_AFTER_S - self.clock.now))
        for batch in self.batches:
            if batch.machine.outcome == "unknown":
                yield from self._resolve(batch.machine, batch.began)

    def _resolve(self, machine: AtomicMachine, began: float) -> Generator[Request | Sleep, Any, None]:
        try:
            yield from machine.resolve(self.clock.now - began)
        except BatchInDoubt:
            pass  # not now, or never

    def _send(
        self, machine: AtomicMachine, numbers: range, *, ends_with_message: bool
    ) -> Generator[Request | Sleep, Any, None]:
        last = numbers[-1] if ends_with_message else 0
        for number in numbers:
            item = self.item(number)
            headers = item[2] if len(item) == 3 and not isinstance(item[2], bytes) else None
            if number == last:
                yield from machine.commit(item[0], item[1], headers)
            elif machine.wants_ack:
                yield from machine.ask(item[0], item[1], headers)
            else:
                while True:
                    try:
                        machine.add(item[0], item[1], headers)
                        break
                    except BufferFull:
                        yield Sleep(0.05)
                self.transport.schedule_flush()
                if self.world.rng.random() < 0.2:
                    yield Sleep(self.world.rng.choice([0.0, 0.01, 1.0, 11.0]))
        if not last:
            yield from machine.commit()

    # ---- what the drivers' ``_run`` does -----------------------------------------------------------------------

    def _go(self, advance: Callable[[Generator[Request | Sleep, Any, None]], Request | Sleep]) -> None:
        assert self._script is not None
        try:
            step = advance(self._script)
        except StopIteration:
            self._is_over = True
            return
        if isinstance(step, Sleep):
            self.clock.after(step.seconds, lambda: self._go(lambda script: script.send(None)))
        else:
            self._ask(step, LEADERLESS_RETRIES if step.may_be_leaderless else 0)
        self.transport.deliver_events()

    def _ask(self, request: Request, retries: int) -> None:
        connection = self.transport.machine
        if request.is_silent:
            try:
                connection.publish(request.subject, request.data, headers=request.headers)
            except BufferFull as error:
                refused = error
                self._go(lambda script: script.throw(refused))
                return
            self.transport.schedule_flush()
            self.clock.after(0.0, lambda: self._go(lambda script: script.send(None)))
            return

        def answered(message: CoreMessage | None, error: Exception | None) -> None:
            timer.cancel()
            if isinstance(error, NoResponders) and retries:
                self.clock.after(LEADERLESS_WAIT_S, lambda: self._ask(request, retries - 1))
                return
            if isinstance(error, NoResponders):
                error = JetStreamUnavailable(request.subject)
            if error is not None:
                problem = error
                self._go(lambda script: script.throw(problem))
            else:
                self._go(lambda script: script.send(message))

        def out_of_patience() -> None:
            connection.requests.forget(token)
            self._go(lambda script: script.throw(RequestTimeout(request.subject, self._timeout_s)))

        try:
            token = connection.request(answered, request.subject, request.data, request.headers)
        except BufferFull:
            self.transport.call_when_there_is_room(lambda: self._ask(request, retries))
            return
        except JetSparkError as error:
            refused_at_once = error
            self._go(lambda script: script.throw(refused_at_once))
            return
        timer = self.clock.after(self._timeout_s, out_of_patience)
        self.transport.schedule_flush()

    # ---- nothing is paced --------------------------------------------------------------------------------------

    def on_event(self, event: Any) -> None:
        """Requests outlive sessions by themselves."""

    def step(self) -> None:
        """The script goes on by itself."""

    def deadline(self) -> float | None:
        return None

    def describe(self) -> str:
        return ", ".join(
            f"{batch.machine.id} {batch.numbers} {batch.machine.outcome} {batch.failure!r}" for batch in self.batches
        )


class Saboteur:
    """Lets leaders and sessions move at the worst moments: at a commit, and while somebody finds out about one."""

    def __init__(self, world: World, *, at_commits: float, at_questions: float) -> None:
        """The chances that something happens."""
        self._world, self._at_commits, self._at_questions = world, at_commits, at_questions
        world.front.watchers.append(self.on_published)

    def on_published(self, message: Publication) -> None:
        faults, clock, rng = self._world.faults, self._world.clock, self._world.rng
        headers = Headers() if message.headers is None else message.headers
        is_question = "Nats-Expected-Last-Sequence" in headers or message.subject.startswith("$JS.API.")
        is_commit = "Nats-Batch-Commit" in headers and not is_question
        chance = self._at_commits if is_commit else self._at_questions if is_question else 0.0
        front = self._world.front
        if is_question and chance and front.is_parted(message.client):
            chance = 0.1 if message.subject.startswith("$JS.API.") else 0.5
        if not chance or clock.now >= faults.over_at or rng.random() >= chance:
            return
        kinds = [("cut",), ("part",), ("slow", "cut"), ("slow", "part"), ("cut", "part")]
        if front.fork is not None and is_question:
            kinds = [("join",), ("join",), ("cut", "join"), ("cut",), ("slow", "part")]  # another answers the next one
        elif front.fork is not None and not front.is_parted(message.client):
            kinds = [("cross",), ("slow", "cross")]
        kind = rng.choice(kinds)
        faults.happened.append((clock.now, " ".join(kind), 0.0))  # type: ignore[arg-type]
        for each in kind:
            # A commit meets it; a question is answered before.
            clock.after(0.0, partial(self._do, each, message.client)) if is_question else self._do(each, message.client)

    def _do(self, kind: str, client: int) -> None:
        network, clock, rng = self._world.network, self._world.clock, self._world.rng
        match kind:
            case "slow":
                network.slow_down(STREAM, rng.uniform(0.0, 1.0), apply_s=rng.choice([1.0, 4.0, 8.0]))
            case "cut":
                network.cut_client(client)
            case "cross":  # over to the side that has not heard of what was just sent
                network.cut_client(client)
                self._world.front.next_node = self._world.front.parted_node
            case "join":
                self._world.front.join()
            case "part":
                seconds, drop = rng.choice([2.0, 5.0, 10.0]), rng.choice([0, 0, 20])
                part = partial(network.partition, STREAM, seconds, without_s=rng.uniform(0.0, 1.0), drop=drop)
                clock.after(rng.choice([0.0, 0.001, 0.5, 2.0]), part)


class Crossing:
    """One batch is committed on one side of a partition and asked about on the other, or on both in turn.

    The commit may take long to be applied. At some question the partition ends, or the session crosses it.
    """

    def __init__(self, world: World) -> None:
        self._world, rng = world, world.rng
        self._starts_over_there = rng.random() < 0.7
        self._apply_s = rng.choice([0.0, 4.0, 8.0, 12.0])
        self._questions = 0
        self._moves_at = rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 1000, 1000, 1000, 1000])
        self._joins = rng.random() < 0.5
        self._is_committed = False
        world.front.watchers.append(self.on_published)
        world.network.partition(STREAM, 20.0, without_s=0.01)
        if rng.random() < 0.3:
            # The next leader is cut off before it has heard from the first one.
            world.clock.after(0.3, partial(world.network.partition, STREAM, 20.0, without_s=0.01))
        world.front.next_node = NODES - 1  # never the one that is cut off

    def on_published(self, message: Publication) -> None:
        world = self._world
        headers = Headers() if message.headers is None else message.headers
        is_question = "Nats-Expected-Last-Sequence" in headers or message.subject.startswith("$JS.API.")
        if is_question:
            self._questions += 1
            if self._questions == self._moves_at:
                world.clock.after(0.0, world.front.join if self._joins else partial(self._cross, message.client))
        elif headers.get("Nats-Batch-Commit") in ("1", "eob") and not self._is_committed:
            self._is_committed = True
            world.network.slow_down(STREAM, 0.0, apply_s=self._apply_s)
            if self._starts_over_there:
                self._cross(message.client)
            else:
                world.network.cut_client(message.client)
                world.front.next_node = (world.front.parted_node + 1) % NODES

    def _cross(self, client: int) -> None:
        front = self._world.front
        here = front.is_parted(client)
        self._world.network.cut_client(client)
        front.next_node = (front.parted_node + 1) % NODES if here else front.parted_node


class AllOrNothing(Judge):
    """A batch is stored as a whole, in one piece and in order, or not at all; and as its outcome says, for ever."""

    def finish(self, world: World, run: Run) -> None:
        assert isinstance(run, AtomicRun)
        if not run.is_over:
            raise Violation(f"{run.name}: not over, long after everything was well; {run.describe()}")
        places: dict[int, list[int]] = {}
        for message in world.model.messages(STREAM):
            owner, number, _ = message.data.split(b":", 2)
            if owner.decode() == run.name:
                places.setdefault(int(number), []).append(message.sequence)
        for batch in run.batches:
            stored = [place for number in batch.numbers for place in places.get(number, ())]
            if stored and stored != list(range(stored[0], stored[0] + len(batch.numbers))):
                raise Violation(f"{run.name}: stored in part: {batch.numbers} at {stored}; {run.describe()}")
            outcome = batch.machine.outcome
            if outcome == "stored":
                ack = batch.machine.ack
                if not stored or ack is None or ack.sequence != stored[-1]:
                    raise Violation(f"{run.name}: said to be stored: {batch.numbers} {ack}; {run.describe()}")
            elif outcome == "not stored" and stored:
                raise Violation(f"{run.name}: said not to be stored: {batch.numbers} at {stored}; {run.describe()}")
            elif outcome == "open":
                raise Violation(f"{run.name}: never ended: {batch.numbers}; {run.describe()}")
            elif outcome == "unknown" and batch.machine._first_has_arrived:
                raise Violation(
                    f"{run.name}: unknown, long after everything was well: {batch.numbers}; {run.describe()}"
                )
