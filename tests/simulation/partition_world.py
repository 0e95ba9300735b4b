"""Several worker processes of one application on the model server, in virtual time: killed, cut off, stopped, replaced.

Everything but the network, the server and the clock is the real thing. A *process* is a run of the application whose
connections can be cut for good: a kill lets nothing more out of it. One that is cut off for a while continues to run
handlers, as a process does whose network is gone, and comes back as a zombie. One that is stopped runs nothing, as
after SIGSTOP or on a machine with too much to do; then it finds in its socket what the server has sent before and
since. Faults come one by one, or several within a moment: a partition may move on while it is being taken over.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import json
import logging
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from unittest import mock

from jetspark.aio.connector import connect
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.app import App, Context, Event, Reject, Retry, RetryIn, Skip
from jetspark.app.dead_letters.redriving import DeadLetterFilter, read_dead_letters, run_redrive
from jetspark.app.handlers.consumers import consumers_of
from jetspark.app.handlers.handler_worker import HandlerWorker
from jetspark.app.provisioning import apply_topology
from jetspark.app.workers import run_app
from jetspark.errors import HandlerStalled, JetSparkError
from jetspark.jetstream.config import StreamConfig
from jetspark.testing.model import Delivery
from jetspark.testing.network import Network
from jetspark.testing.virtual_loop import VirtualLoop, model_network

URL = "nats://model:4222"
STREAM = "SIM"
RETRIES = "SIM_RETRY"
PARTITIONED = "SIM_h_PARTITIONS"
PARTITIONS = 4
# A partition that is handed on is let go of within this time, and an event that is expected is looked for.
LET_GO_S = 3.0


class Happened(Event, type="happened", key="name", subject="sim.{name}.happened"):
    name: str
    number: int


class Process:
    """One worker process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_dead = False
        self.is_cut_off = False
        self.is_silent = False
        self.is_stopped = False
        self.returned_at = 0.0
        """When its last absence ended."""
        self.wires: list[Any] = []
        self.sessions: set[int] = set()
        """The numbers of its connections at the server."""
        self.task: asyncio.Task[None] | None = None
        self.worker: HandlerWorker | None = None
        self.odd: dict[str, float] = {}
        """What it holds without reason, and since when."""
        self._held: list[tuple[Any, tuple[Any, ...], contextvars.Context | None]] = []
        """What would have run while it was stopped."""

    def __repr__(self) -> str:
        return f"process {self.number}"

    @property
    def is_away(self) -> bool:
        """Whether the server and this process hear nothing of each other."""
        return self.is_cut_off or self.is_silent or self.is_stopped

    def guard(self, callback: Any, context: contextvars.Context | None) -> Any:
        """The same call, which waits while the process is stopped."""

        def call(*args: Any) -> None:
            if self.is_stopped:
                self._held.append((callback, args, context))
            else:
                callback(*args)

        return call

    def resume(self) -> None:
        """Run what was held, in its order, and what has become due."""
        self.is_stopped, held, self._held = False, self._held, []
        for callback, args, context in held:
            asyncio.get_running_loop().call_soon(callback, *args, context=context)


CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class ProcessLoop(VirtualLoop):
    """Knows which process opens a connection, and runs nothing of one that is stopped."""

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(_guarded(callback, context), *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, _guarded(callback, context), *args, context=context)

    async def create_connection(self, protocol_factory: Any, *args: Any, **options: Any) -> Any:
        process = CURRENT.get()
        if process is not None and (process.is_dead or process.is_cut_off):
            raise ConnectionRefusedError("this process reaches nobody")
        transport, protocol = await super().create_connection(protocol_factory, *args, **options)
        if process is not None:
            process.wires.append(transport._wire)
            process.sessions.add(transport._wire.client)
        return transport, protocol


def _guarded(callback: Any, context: contextvars.Context | None) -> Any:
    process = CURRENT.get() if context is None else context.get(CURRENT)
    return callback if process is None else process.guard(callback, context)


class World:
    """One run: events, processes, faults, and what the checkers have seen."""

    sharing: ClassVar[dict[str, Any]] = {"partitions": PARTITIONS, "takeover_s": 5.0}

    def __init__(self, seed: int, *, events: int = 80, keys: int = 8) -> None:
        self.rng = random.Random(seed)
        # The slow one stretches what is a moment otherwise, and brings a long answer bit by bit, so that faults come in
        # the middle of it.
        slow: dict[str, Any] = {"delay_s": (0.001, 0.1), "piece_bytes": 500}
        self.network: Network = model_network(seed, **self.rng.choice([{}, slow]))
        self.log: list[str] = []
        rng = self.rng
        names = [f"k{rng.randrange(keys)}" for _ in range(events)]
        self.order: dict[str, list[int]] = defaultdict(list)
        self.events = [Happened(name=name, number=number) for number, name in enumerate(names)]
        for event in self.events:
            self.order[event.name].append(event.number)
        self.trouble: dict[int, list[str]] = {}
        for number in range(events):
            if rng.random() < 0.05:
                self.trouble[number] = ["reject"] * 1000
            elif rng.random() < 0.3:
                self.trouble[number] = rng.choices(["error", "later", "much later", "slow", "skip"], k=2)
        self.is_mended = False
        self.violations: list[str] = []
        self.done: set[int] = set()
        self.skipped: set[int] = set()
        self.effects: dict[int, set[str]] = defaultdict(set)
        self.running: dict[int, tuple[Process, float]] = {}
        self.deliveries: dict[int, tuple[int, set[int]]] = {}
        """How often the server has delivered each event of a partition, and the sessions that it was last sent to."""
        self.retried: set[int] = set()
        """Those that were delivered from the retry stream, too."""
        self.is_transaction = rng.random() < 0.5
        self.kills = self.cuts = self.silences = self.stops = self.zombies = 0
        self.processes: list[Process] = []
        self._count = 0
        self._absences: list[asyncio.Task[None]] = []
        self._saved: dict[tuple[str, str], Any] = {}

    def note(self, text: str) -> None:
        self.log.append(f"{self.network.clock.now % 100000:9.3f} {text}")

    # ---- the application ---------------------------------------------------------------------------------------

    def app(self) -> App:
        app = App("sim", stream=StreamConfig(name=STREAM, subjects=["sim.>"], replicas=3))
        options: dict[str, Any] = {"idempotent": "transaction", "bucket": "sums"} if self.is_transaction else {}

        @app.handler(
            Happened,
            durable="h",
            ack_wait_s=6.0,
            timeout=4.0,
            concurrency=3,
            max_messages=16 * PARTITIONS,
            retry=Retry(attempts=30, first_s=0.05, max_s=60, in_lane_s=1.0),
            **self.sharing,
            **options,
        )
        async def handle(event: Happened, ctx: Context) -> None:
            await self.handle(event, ctx)

        return app

    async def handle(self, event: Happened, ctx: Context) -> None:
        process = CURRENT.get()
        assert process is not None
        number = event.number
        self.begin(process, event, ctx.delivered)
        try:
            trouble = [] if self.is_mended else self.trouble.get(number, [])
            kind = trouble.pop(0) if trouble else "fine"
            if number in self.skipped:  # the server may forget the acknowledgement; the same event is skipped again
                kind = "skip"
            await asyncio.sleep({"slow": 3.0}.get(kind, self.rng.choice([0.01, 0.3, 1.0])))
            self.check_alive(process)
            if kind == "reject":
                raise Reject("poison")
            if kind == "error":
                raise OSError("away")
            if kind in ("later", "much later"):
                raise RetryIn(0.5 if kind == "later" else self.rng.uniform(2, 20))
            if kind == "skip":
                self.skipped.add(number)
                self.end(process, event, "skipped")
                raise Skip("not ours")
            if self.is_transaction:
                numbers = json.loads(await ctx.tx.get(event.name) or b"[]")
                await ctx.tx.put(event.name, json.dumps(self.counted(numbers, number)).encode())
            else:
                await ctx.once("effect", self.effect, number)
            self.check_alive(process)
            self.end(process, event, "done")
        finally:
            if number in self.running and self.running[number][0] is process:
                del self.running[number]

    def counted(self, numbers: list[int], number: int) -> list[int]:
        return [*numbers, number]

    async def effect(self, number: int, *, idempotency_key: str) -> None:
        self.effects[number].add(idempotency_key)

    def check_alive(self, process: Process) -> None:
        if process.is_dead:  # a killed process does nothing more
            raise asyncio.CancelledError

    # ---- the checkers ------------------------------------------------------------------------------------------

    def on_delivery(self, delivery: Delivery) -> None:
        words = delivery.reply.split(".")
        if words[0] == "$JS" and words[2] in (RETRIES, PARTITIONED):
            number = json.loads(delivery.data)["data"]["number"]
            if words[2] == RETRIES:
                self.retried.add(number)
            else:
                to = {each.session.number for each in self.network.front.interest.find(delivery.subject)}
                self.deliveries[number] = int(words[4]), to

    def is_with_another(self, process: Process, number: int, delivered: int) -> bool:
        """Whether an event of a partition was delivered to another process after that to this one."""
        last, sessions = self.deliveries.get(number, (0, set()))
        return delivered < last and not sessions & process.sessions

    def on_return(self, process: Process, message: JetStreamMessage) -> None:
        """A process returns a message: another one that has it would get it again, and lose the time it has."""
        delivery = message.metadata
        if delivery.stream == PARTITIONED:
            number = json.loads(message.data)["data"]["number"]
            if self.is_with_another(process, number, delivery.delivered):
                self.violate(f"{process} returned {number} after it was delivered again")

    def begin(self, process: Process, event: Happened, delivered: int) -> None:
        self.check_alive(process)
        self.note(f"{process} begins {event.name} {event.number}")
        if self.is_with_another(process, event.number, delivered) and event.number not in self.retried:
            self.violate(f"{event.number} began in {process} after it was delivered again")
        for earlier in self.order[event.name]:
            if earlier < event.number and earlier not in self.done:
                self.violate(f"{event.number} of {event.name} began before {earlier} was done")
        now = self.network.clock.now
        for other, (owner, since) in self.running.items():
            if other in self.order[event.name] and owner is not process and not owner.is_dead:
                # What runs in a process that is away is delivered to another, and runs on when the process is back.
                if not owner.is_away and since > owner.returned_at:
                    self.violate(f"{other} runs in {owner}, and {event.number} began in {process}")
                self.zombies += 1
        self.running[event.number] = process, now

    async def _watch_holding(self) -> None:
        """Each worker, every half second: what holds back a key, and what is in progress, is some reader's affair.

        A key that waits for an event that no reader looks for waits for as long as the process lives. An event whose
        reader has ended is kept in progress here, and nowhere else. The worker's own look for stalls would end both,
        after some time, so that at the end of the run nothing of it is seen.
        """
        while True:
            await asyncio.sleep(0.5)
            for process in self.processes:
                worker, now = process.worker, self.network.clock.now
                if worker is None or worker.is_stopping or process.is_away:
                    continue
                followed = {sequence for reader in worker.intakes for sequence in reader.expected}
                odd = {f"waits for {each}" for each in worker.machine.lanes.expected if each not in followed}
                kept = [each for each in worker.machine.items if not each.is_taken]  # what runs ends here
                odd |= {f"keeps {each}" for each in kept if each.intake not in worker.intakes}
                process.odd = {each: process.odd.get(each, now) for each in odd}
                for each, since in process.odd.items():
                    if now - max(since, process.returned_at) > LET_GO_S:
                        self.violate(f"{process} {each}, which none of its readers does")

    def end(self, process: Process, event: Happened, how: str) -> None:
        self.note(f"{process} has {how} {event.name} {event.number}")
        self.done.add(event.number)

    def violate(self, text: str) -> None:
        """Noted, not raised: the application takes what a handler raises for a failure of the handler."""
        if text not in self.violations:
            self.note(f"VIOLATION: {text}")
            self.violations.append(text)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Tell the checkers of each process's worker, and of the messages that it returns."""
        run, nak = HandlerWorker.run, JetStreamMessage.nak

        async def run_known(worker: HandlerWorker) -> None:
            process = CURRENT.get()
            assert process is not None
            process.worker = worker
            try:
                await run(worker)
            finally:
                process.worker = None

        async def nak_known(message: JetStreamMessage, delay: float | None = None) -> None:
            process = CURRENT.get()
            assert process is not None
            self.on_return(process, message)
            await nak(message, delay)

        with mock.patch.object(HandlerWorker, "run", run_known), mock.patch.object(JetStreamMessage, "nak", nak_known):
            yield

    # ---- processes and their misfortunes -----------------------------------------------------------------------

    def start(self) -> Process:
        self._count += 1
        process = Process(self._count)
        self.processes.append(process)

        async def life() -> None:
            CURRENT.set(process)
            while not process.is_dead:
                try:
                    await run_app(self.app().spec, URL, only=(), stop_timeout=2.0)
                    return
                except HandlerStalled as error:
                    self.violate(f"{process} stalled: {error}")
                    return
                except JetSparkError as error:  # it came up while the server was away: its supervisor starts it again
                    self.note(f"{process} ended: {error}")
                    await asyncio.sleep(1.0)

        process.task = asyncio.create_task(life())
        self.note(f"{process} starts")
        return process

    async def kill(self, process: Process) -> None:
        self.kills += 1
        self.note(f"{process} is killed")
        process.is_dead = True
        self._cut(process)
        assert process.task is not None
        process.task.cancel()
        await asyncio.wait([process.task])

    async def cut_off(self, process: Process, seconds: float) -> None:
        self.cuts += 1
        self.note(f"{process} is cut off for {seconds:.1f} s")
        process.is_cut_off = True
        self._cut(process)
        await asyncio.sleep(seconds)
        process.is_cut_off = False
        process.returned_at = self.network.clock.now

    async def silence(self, process: Process, seconds: float) -> None:
        """Its network loses all packets for a while, and no connection breaks: it arrives late what was sent."""
        self.silences += 1
        self.note(f"{process} is without a network for {seconds:.1f} s")
        process.is_silent = True
        for wire in process.wires:
            wire.silence(seconds)
        await asyncio.sleep(seconds)
        self.note(f"{process} has its network again")
        process.is_silent = False
        process.returned_at = self.network.clock.now

    async def pause(self, process: Process, seconds: float) -> None:
        """As SIGSTOP and SIGCONT do."""
        self.stops += 1
        self.note(f"{process} is stopped for {seconds:.1f} s")
        process.is_stopped = True
        await asyncio.sleep(seconds)
        self.note(f"{process} continues")
        process.returned_at = self.network.clock.now
        process.resume()

    def _cut(self, process: Process) -> None:
        for wire in process.wires:
            if not wire.is_cut:
                self.network.cut(wire)
        process.wires.clear()

    async def stop(self, process: Process) -> None:
        """As SIGTERM does."""
        assert process.task is not None
        self.note(f"{process} is asked to end")
        process.task.cancel()
        await asyncio.wait([process.task])
        process.is_dead = True

    # ---- a run -------------------------------------------------------------------------------------------------

    async def run(self, faults: list[str]) -> None:
        async with connect(URL, name="test") as client:
            js = client.jetstream()
            app = self.app()
            await apply_topology(js, app)
            self.network.front.reply_watchers.append(self.on_delivery)
            alive = [self.start() for _ in range(3)]
            saving = asyncio.create_task(self._save(app))
            watching = asyncio.create_task(self._watch_holding())
            publishing = asyncio.create_task(self._publish(app))
            await asyncio.sleep(1.0)  # for who publishes to connect
            for fault in faults:
                await asyncio.sleep(self.rng.choice([self.rng.uniform(0.0, 0.1), self.rng.uniform(0.2, 6.0)]))
                await self._misfortune(fault, alive)
            await publishing
            saving.cancel()
            await asyncio.gather(*self._absences)
            await self._settle(app)
            self.is_mended = True
            await client.flush(60.0)  # the operator waits until the server is there
            await run_redrive(js, app, DeadLetterFilter())
            await self._settle(app)
            dead_letters = await read_dead_letters(js, app, DeadLetterFilter())
            assert dead_letters == [], dead_letters
            assert not self.violations, self.violations
            assert self.done == set(range(len(self.events))), f"never done: {set(range(len(self.events))) - self.done}"
            if self.is_transaction:
                await self._check_sums(js)
            else:
                assert all(len(keys) == 1 for keys in self.effects.values()), "an effect happened twice"
            watching.cancel()
            for process in alive:
                await self.stop(process)

    async def _publish(self, app: App) -> None:
        async with app.connect(URL) as client:
            for event in self.events:
                # Until the last fault, and so many at a time that keys queue: a fault that comes when everything is
                # done, or when one event is under way, finds nothing.
                await asyncio.sleep(self.rng.choice([0.0, 0.0, 0.0, 0.01, 2.0]))
                while True:
                    try:
                        await client.publish(event, id=f"e{event.number}")
                        break
                    except JetSparkError:
                        await asyncio.sleep(0.5)

    async def _misfortune(self, fault: str, alive: list[Process]) -> None:
        # Who is away for a while comes back by itself, and others have their misfortunes in the meantime.
        present = [each for each in alive if not each.is_away]
        if not present:
            return
        process = self.rng.choice(present)
        if fault == "kill":
            await self.kill(process)
            alive.remove(process)
            await asyncio.sleep(self.rng.choice([0.0, 1.0]))
            alive.append(self.start())
        elif fault == "join":
            alive.append(self.start())
        elif fault == "flap":  # partitions move, and back before they have arrived
            for _ in range(self.rng.randint(1, 3)):
                guest = self.start()
                await asyncio.sleep(self.rng.uniform(0.0, 1.5))
                await self.stop(guest)
        elif fault == "leave" and len(present) > 1:
            await self.stop(process)
            alive.remove(process)
        elif fault == "cut":
            self._begin(self.cut_off(process, self.rng.choice([0.1, 3.0, 12.0])))
        elif fault == "silence":
            self._begin(self.silence(process, self.rng.choice([1.0, 5.0, 9.0, 15.0])))
        elif fault == "pause":
            self._begin(self.pause(process, self.rng.choice([1.0, 4.0, 8.0, 15.0])))
        elif fault == "server":
            self.network.kill_server(self.rng.choice([0.1, 3.0, 7.0]))
            self._go_back()
        elif fault == "leader":
            name = self.rng.choice([STREAM, PARTITIONED])
            self.network.lose_leader(name, self.rng.uniform(0.1, 2.0))

    def _begin(self, absence: Any) -> None:
        self._absences.append(asyncio.ensure_future(absence))

    async def _save(self, app: App) -> None:
        """A server writes from time to time what its consumers have delivered."""
        places = [each for each in consumers_of(app.spec, app.handlers["h"]) if each.stream != app.spec.retry_stream]
        while True:
            for place in places:
                if (consumer := self.network.front.model.consumer(place.stream, place.name)) is not None:
                    state = consumer.pending, consumer.deliveries, consumer.next_sequence, consumer.ack_floor
                    self._saved[place.stream, place.name] = copy.deepcopy(state)
            await asyncio.sleep(0.3)

    def _go_back(self) -> None:
        """One that is killed has forgotten the last moment: it delivers some again, as if for the first time."""
        for place, state in self._saved.items():
            if (consumer := self.network.front.model.consumer(*place)) is not None and self.rng.random() < 0.5:
                pending, deliveries, consumer.next_sequence, consumer.ack_floor = copy.deepcopy(state)
                consumer.pending, consumer.deliveries = pending, deliveries
                consumer.update(consumer.config)

    async def _settle(self, app: App, limit_s: float = 2000.0) -> None:
        model, quiet = self.network.front.model, 0
        until = self.network.clock.now + limit_s
        while quiet < 4:
            await asyncio.sleep(0.5)
            left = self._left(app)
            quiet = 0 if left else quiet + 1
            assert self.network.clock.now < until, f"not settled: {left}"
        assert model is self.network.front.model

    def _left(self, app: App) -> str:
        if not self.network.is_reachable:
            return "the server is away"
        model = self.network.front.model
        for place in consumers_of(app.spec, app.handlers["h"]):
            consumer = model.consumer(place.stream, place.name)
            if consumer is None or consumer.num_pending or consumer.pending:
                return f"{place.name} of {place.stream}: {consumer and list(consumer.pending)}"
        for message in model.messages(app.spec.retry_stream):
            if ".wait." in message.subject:
                return f"{message.subject} is scheduled"
        return ""

    async def _check_sums(self, js: Any) -> None:
        kv = await js.kv("sums")
        for key, numbers in self.order.items():
            try:
                counted = json.loads((await kv.get(key)).value)
            except JetSparkError:
                counted = []
            assert counted == sorted(set(counted)), f"{key} counted {counted}"
            skipped = [each for each in numbers if each not in counted]
            assert all(each in self.skipped for each in skipped), f"{key} counted {counted} of {numbers}"


FAULTS = [
    "kill",
    "kill",
    "kill",
    "join",
    "leave",
    "flap",
    "flap",
    "cut",
    "cut",
    "silence",
    "silence",
    "pause",
    "pause",
    "server",
    "server",
    "leader",
]


@contextlib.contextmanager
def seeded(rng: random.Random) -> Iterator[None]:
    """Names and chances from the seed, so that it is the same run each time."""
    token = lambda count: f"{rng.getrandbits(8 * count):0{2 * count}x}"  # noqa: E731
    with (
        mock.patch("jetspark.app.handlers.record_watch.secrets.token_hex", token),
        mock.patch("random.SystemRandom", return_value=rng),
    ):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without thousands of lines about what was broken on purpose."""
    logger = logging.getLogger("jetspark")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def run_world(seed: int, *, count: int = 14, kind: type[World] = World, faults: Sequence[str] = FAULTS) -> World:
    world = kind(seed)
    chosen = world.rng.choices(faults, k=count)
    with (
        quiet(),
        seeded(random.Random(seed)),
        world.watched(),
        asyncio.Runner(loop_factory=lambda: ProcessLoop(world.network)) as runner,
    ):
        try:
            runner.run(world.run(chosen))
        except BaseException:
            print("\n".join(world.log[-120:]))
            raise
    return world
