"""Live projections in virtual time: the real workers and the real client, on a model server and a network that fails.

One seed is one run. Workers are killed anywhere, the server and its connections too, streams lose their leaders,
replicas fall behind and answer with what was, and two engines may work at a time. The checkers look at each message of
each bucket at the moment when it is stored:

* every value that is stored is what a plain loop over the first events makes of its key, and no later one is behind an
  earlier one;
* a position is never ahead of what is stored before it;
* in the end every key has all of its events, and every message that cannot be read has one letter.

What is right is said by :mod:`support.oracle`, which uses nothing of the product.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

from support.oracle import BankOracle
from support.projections import bank, cells, in_model, some_events

from jetspark.aio.client import Client
from jetspark.aio.connector import connect
from jetspark.app import App, encode
from jetspark.app.clock import utc_now
from jetspark.app.projections.leases import Lease
from jetspark.app.projections.live_options import LiveCounts, LiveOptions
from jetspark.app.projections.projection_worker import ProjectionWorker
from jetspark.app.projections.state_header import position_key
from jetspark.app.provisioning import apply_topology
from jetspark.core.headers import Headers
from jetspark.errors import ConnectionLost, JetSparkError, NoServersAvailable
from jetspark.jetstream.kv import operation_of
from jetspark.state.changes import MARK_HEADER, SEQUENCE_HEADER
from jetspark.testing.model.store import ModelMessage
from jetspark.testing.virtual_loop import model_network, run_in_virtual_time

URL = "nats://model:4222"
FIRST = "w0-1"


class Reckless(ProjectionWorker):
    """Has a lease of its own, and so never stands by."""

    @property
    def name(self) -> str:
        return f"{super().name}+{self._owner}"


class ProjectionWorld:
    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.rng = random.Random(seed)
        self.network = model_network(seed)
        replicas = self.rng.choice([1, 3])
        self.app = bank(has_lookups=seed % 10 == 6, replicas=replicas)
        self.replicated = ["BANK"] if replicas == 3 else []
        """Streams whose leaders go, and of which a replica may fall behind."""
        for spec in self.app.projections.values():
            object.__setattr__(spec.bucket, "history", 64)  # for the checkers
            object.__setattr__(spec.bucket, "replicas", self.rng.choice([1, 3]))
            if spec.bucket.replicas == 3:
                self.replicated.append(f"KV_{spec.bucket.bucket}")
        self.events = some_events(self.rng, self.rng.choice([20, 60, 120]), accounts=self.rng.choice([2, 6, 30]))
        self._first_number = 0
        """That the id of the first event has."""
        self.has_faults = faults
        self.kind = self.rng.choice([ProjectionWorker, Reckless])
        self.options = LiveOptions(
            batch=self.rng.choice([1, 5, 50_000]),
            batch_wait_s=self.rng.choice([0.0, 0.002, 0.1]),
            cache_keys=self.rng.choice([1, 4, 1000]),
            position_every_s=self.rng.choice([0.01, 0.1, 1.0]),
            lease_s=self.rng.choice([1.0, 3.0]),
            partitions=3 if seed % 10 == 7 else 1,
            apart_after=(2, 20, 20_000)[seed % 3],
            batch_bytes=(100, 5_000, 1 << 20)[seed % 7 % 3],
        )
        self.patience_s = 600.0
        self.held_replicas = 0
        self._oracle, self._folded_through = BankOracle(), 0
        self.wrong: list[str] = []
        """What the checkers have found."""
        self.kills = self.looks = self.conflicts = self.restarts = self.joins = 0
        self._lags = seed % 4 == 1
        """The first worker begins with one projection: the others are far behind when they begin."""
        self._killed: set[bytes] = set()

    def run(self) -> None:
        release = Lease.release

        async def release_alive(lease: Lease) -> None:
            if lease._owner not in self._killed:
                await release(lease)

        with mock.patch.object(Lease, "release", release_alive):
            run_in_virtual_time(self._main(), self.network)

    # ---- what happens ------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        async with connect(URL, name="set-up") as client:
            await apply_topology(client.jetstream(), self.app)
        for name, spec in self.app.projections.items():
            store = self.network.front.model.stream(f"KV_{spec.bucket.bucket}").store
            store.watchers.append(BucketChecker(self, name, spec.bucket.bucket))
        publishing = asyncio.create_task(self._publish())
        workers = [asyncio.create_task(self._work(number)) for number in range(self.rng.choice([1, 2, 3]))]
        troubles = [asyncio.create_task(each) for each in (self._trouble(), self._hold_replicas())]
        try:
            await self._until_done(publishing, [*workers, *troubles])
        finally:
            tasks = [publishing, *troubles, *workers]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        self.check()

    async def _publish(self) -> None:
        with suppress(ConnectionLost):  # of unconfirmed messages: each was sent until it was confirmed
            await self._publish_all()

    async def _publish_all(self) -> None:
        async with await self._connect("publisher") as client:
            js = client.jetstream()
            for number, event in enumerate(self.events, self._first_number):
                encoded = encode(event, id=f"e{number}", source="/bank", time=utc_now())
                while True:
                    with suppress(JetSparkError):
                        await js.publish(encoded.subject, encoded.data, headers=encoded.headers, timeout=2.0)
                        break
                if self.rng.random() < 0.3:
                    await asyncio.sleep(self.rng.choice([0.0, 0.01, 0.5]))

    async def _work(self, number: int) -> None:
        """A process that is started again whenever it was killed."""
        life = 0
        while True:
            life += 1
            owner = f"w{number}-{life}"
            task = asyncio.create_task(self._process(owner))
            is_first = self._lags and owner == FIRST
            is_killed = (self.has_faults and self.rng.random() < 0.7) or is_first
            if not is_killed:
                try:
                    await task
                finally:
                    task.cancel()
                return
            life_s = self.rng.choice([0.01, 0.05, 0.3, 2.0]) * self.rng.random()
            await asyncio.wait([task], timeout=5.0 if is_first else life_s)
            if task.done():
                task.result()
            self.kills += 1
            self._killed.add(owner.encode())
            for wire in self._wires_of(owner):
                self.network.cut(wire)
            task.cancel()
            await asyncio.wait([task])

    async def _process(self, owner: str) -> None:
        before = set(self.network.wires)
        async with await self._connect(owner) as client:
            self._own[owner] = [wire for wire in self.network.wires if wire not in before]
            specs = list(self.app.projections.values())
            worker = self.kind(
                self.app.spec,
                specs[:1] if self._lags and owner == FIRST else specs,
                client.jetstream(),
                catalogue=self.app.catalogue,
                options=self.options,
                owner=owner,
            )
            self.counts = worker.counts
            try:
                await worker.run()
            finally:
                self.conflicts += worker.counts.conflicts
                self.restarts += worker.counts.restarts
                self.joins += worker.counts.joins

    async def _connect(self, name: str) -> Client:
        while True:
            with suppress(NoServersAvailable):
                return await connect(URL, name=name, request_timeout_s=2.0)
            await asyncio.sleep(0.1)

    _own: dict[str, list[Any]]
    counts: LiveCounts
    """Of the worker that began last."""

    def _wires_of(self, owner: str) -> list[Any]:
        return [wire for wire in self._own.get(owner, []) if wire in self.network.wires]

    async def _trouble(self) -> None:
        rng, network = self.rng, self.network
        for _ in range(rng.choice([0, 2, 6]) if self.has_faults else 0):
            await asyncio.sleep(rng.choice([0.02, 0.2, 1.0]) * rng.random())
            match rng.randrange(5 if self.replicated else 3):
                case 0:
                    network.cut()
                case 1:
                    network.kill_server(rng.choice([0.1, 3.0]))
                case 2:
                    network.refuse(rng.choice([0.1, 2.0]))
                case 3:
                    network.lose_leader(rng.choice(self.replicated), rng.choice([0.1, 2.0]))
                case 4:
                    stream = rng.choice(self.replicated)
                    network.slow_down(stream, rng.choice([0.1, 2.0]), apply_s=rng.choice([0.01, 0.3]))

    async def _hold_replicas(self) -> None:
        """Again and again one replica of a bucket takes over nothing for a while, and answers all the same."""
        while buckets := [each for each in self.replicated if each != "BANK"]:
            seconds = self.rng.choice([0.05, 0.5, 3.0])
            self.network.hold_replica(self.rng.choice(buckets), seconds)
            self.held_replicas += 1
            await asyncio.sleep(seconds * 2 * self.rng.random())

    async def _until_done(self, publishing: asyncio.Task[None], others: list[asyncio.Task[None]]) -> None:
        async with asyncio.timeout(self.patience_s):
            while True:
                await asyncio.sleep(0.2)
                for task in (publishing, *others):
                    if task.done():
                        task.result()
                self.check()
                if publishing.done() and self.is_done():
                    return

    # ---- the checkers ------------------------------------------------------------------------------------------

    def check(self) -> None:
        assert not self.wrong, self.wrong[0]

    def is_done(self) -> bool:
        tables, dead_letters = in_model(self.network, self.app)
        oracle = self.oracle()
        are_equal = all(cells(table) == oracle.tables[name] for name, table in tables.items())
        return are_equal and dead_letters == oracle.dead_letters

    def oracle(self) -> BankOracle:
        """What the events make that the stream has now."""
        messages = self.network.front.model.messages(self.app.stream)
        new = [each for each in messages if self._is_next(each.sequence)]
        return self._oracle.fold((each.sequence, each.subject, each.data, 0) for each in new)

    def _is_next(self, sequence: int) -> bool:
        is_next, self._folded_through = sequence > self._folded_through, max(sequence, self._folded_through)
        return is_next


class BucketChecker:
    """Sees every message of a bucket at the moment when it is stored."""

    def __init__(self, world: ProjectionWorld, name: str, bucket: str) -> None:
        self._world, self._name, self._prefix = world, name, f"$KV.{bucket}."
        self._sequences: dict[str, int] = {}
        self._parked: set[str] = set()

    def on_removed(self, message: ModelMessage) -> None:
        """The bucket keeps so many of a key."""

    def on_stored(self, message: ModelMessage) -> None:
        self._world.looks += 1
        key = message.subject.removeprefix(self._prefix)
        oracle = self._world.oracle()
        if key == position_key():
            self._check_position(json.loads(message.data)["sequence"], oracle)
        elif not key.startswith(position_key()):
            self._check_value(key, message, oracle.past.get((self._name, key), {}))

    def _check_value(self, key: str, message: ModelMessage, past: dict[int, bytes | None]) -> None:
        """It is what a plain loop makes of the first events of its key, and not behind the one before."""
        headers = message.headers or Headers()
        sequence = int(headers.get(SEQUENCE_HEADER) or 0)
        value = message.data if operation_of(headers) == "put" else None
        if past.get(sequence, b"nothing") != value:
            self._tell(f"key {key} at {sequence}: {value!r}, expected {past.get(sequence, b'nothing')!r}")
        before = self._sequences.get(key, 0)
        if sequence < before:
            self._tell(f"key {key} went back to {sequence} from {before}")
        self._sequences[key] = sequence
        if " parked " in (headers.get(MARK_HEADER) or ""):
            self._parked.add(key)

    def _check_position(self, position: int, oracle: BankOracle) -> None:
        for (name, key), values in oracle.past.items():
            if name != self._name:
                continue
            needed = max(each for each in values if each <= position)
            if self._sequences.get(key, 0) < needed:
                self._tell(f"at position {position}, but key {key} at {self._sequences.get(key, 0)}, not {needed}")
            cell = oracle.tables[name].get(key)
            if cell and cell.parked_at and cell.parked_at <= position and key not in self._parked:
                self._tell(f"at position {position}, but key {key} is not parked")

    def _tell(self, what: str) -> None:
        self._world.wrong.append(f"{self._name}: {what}")


class LateWorld(ProjectionWorld):
    """One projection has a history, and goes on with it; then another one begins at the first event."""

    def __init__(self, seed: int, history: int) -> None:
        super().__init__(seed, faults=False)
        self._own = {}
        self._history = history
        self.events = some_events(self.rng, history + 50, is_bad=False)
        self.kind = ProjectionWorker
        self.options = LiveOptions(batch=10, position_every_s=0.01, apart_after=20)
        self.writes: list[tuple[str, int]] = []
        """Each value that was stored: of which projection, and the sequence that it has."""

    async def _main(self) -> None:
        async with connect(URL, name="set-up") as client:
            await apply_topology(client.jetstream(), self.app)
        for name, spec in self.app.projections.items():
            self.network.front.model.stream(f"KV_{spec.bucket.bucket}").store.watchers.append(Writes(self, name))
        events, self.events = self.events, self.events[: self._history]
        self._lags = True
        first = asyncio.create_task(self._process(FIRST))
        await self._publish()
        await self._until(lambda: any(name == "balances" and at > self._history - 5 for name, at in self.writes))
        await end(first)
        self.events, self._first_number = events[self._history :], self._history
        await self._publish()
        both = asyncio.create_task(self._process("w0-2"))
        await self._until(lambda: self.is_done() and self.counts.joins > 0)
        await end(both)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(self.patience_s):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.2)


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


class Writes:
    """Notes the order in which values are stored."""

    def __init__(self, world: LateWorld, name: str) -> None:
        self._world, self._name = world, name

    def on_removed(self, message: ModelMessage) -> None:
        """The bucket keeps so many of a key."""

    def on_stored(self, message: ModelMessage) -> None:
        sequence = (message.headers or Headers()).get(SEQUENCE_HEADER)
        if sequence is not None:
            self._world.writes.append((self._name, int(sequence)))


def world_of(seed: int, **options: Any) -> ProjectionWorld:
    world = ProjectionWorld(seed, **options)
    world._own = {}
    return world


__all__ = ["App", "LateWorld", "ProjectionWorld", "world_of"]
