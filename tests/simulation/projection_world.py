"""Live projections in virtual time: the real workers and the real client, on a model server and a network that fails.

One seed is one run. Workers are killed anywhere, the server and its connections too, streams lose their leaders, and
two engines may work at a time. The checkers look at what the buckets have, again and again:

* every value that was ever stored is what a plain loop over the first events makes of its key, and no later one is
  behind an earlier one;
* a position is never ahead of what is stored;
* in the end every key has all of its events, and every message that cannot be read has one letter.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest import mock

from support.projections import bank, folded, in_model, some_events

from jetspark.aio.client import Client
from jetspark.aio.connecting import connect
from jetspark.app import App, encode
from jetspark.app.clock import utc_now
from jetspark.app.projections.folding import KeyState, Recorded, Router
from jetspark.app.projections.leases import Lease
from jetspark.app.projections.live import LiveOptions, ProjectionWorker
from jetspark.app.projections.marks import position_key
from jetspark.app.projections.positions import FoldPosition
from jetspark.app.topology.provisioning import apply_topology
from jetspark.core.headers import Headers
from jetspark.errors import ConnectionLost, JetSparkError, NoServersAvailable
from jetspark.jetstream.kv import operation_of
from jetspark.publish.steps import Procedure
from jetspark.state.changes import MARK_HEADER, SEQUENCE_HEADER, Current
from jetspark.state.store import StateBucket
from jetspark.testing.virtual_loop import model_network, run_in_virtual_time

URL = "nats://model:4222"


class Reckless(ProjectionWorker):
    """Has a lease of its own, and so never stands by."""

    @property
    def name(self) -> str:
        return f"{super().name}+{self._owner}"


class ProjectionWorld:
    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.rng = random.Random(seed)
        self.network = model_network(seed)
        self.app = bank(has_lookups=seed % 10 == 6)
        for spec in self.app.projections.values():
            object.__setattr__(spec.bucket, "history", 64)  # for the checkers
            object.__setattr__(spec.bucket, "replicas", self.rng.choice([1, 3]))
        self.events = some_events(self.rng, self.rng.choice([20, 60, 120]), accounts=self.rng.choice([2, 6, 30]))
        self.has_faults = faults
        self.kind = self.rng.choice([ProjectionWorker, Reckless])
        self.options = LiveOptions(
            batch=self.rng.choice([1, 5, 50_000]),
            batch_wait_s=self.rng.choice([0.0, 0.002, 0.1]),
            cache_keys=self.rng.choice([1, 4, 1000]),
            position_every_s=self.rng.choice([0.01, 0.1, 1.0]),
            lease_s=self.rng.choice([1.0, 3.0]),
            partitions=3 if seed % 10 == 7 else 1,
        )
        self.patience_s = 600.0
        self.outdated = 0
        self._folded_through = -1
        self.kills = self.looks = self.conflicts = self.restarts = 0
        self._killed: set[bytes] = set()
        self._seen: dict[tuple[str, str], int] = defaultdict(int)
        self._prefixes: dict[tuple[str, str], dict[int, tuple[bytes | None, str]]] = {}

    def run(self) -> None:
        release, load_all = Lease.release, StateBucket.load_all

        async def release_alive(lease: Lease) -> None:
            if lease._owner not in self._killed:
                await release(lease)

        def load_old(bucket: StateBucket, keys: Sequence[str], **options: Any) -> Procedure[dict[str, Current]]:
            found = yield from load_all(bucket, keys, **options)
            return self._outdated(bucket, found) if bucket.is_replicated else found

        with (
            mock.patch.object(Lease, "release", release_alive),
            mock.patch.object(StateBucket, "load_all", load_old),
        ):
            run_in_virtual_time(self._main(), self.network)

    def _outdated(self, bucket: StateBucket, found: dict[str, Current]) -> dict[str, Current]:
        """What a replica may say that is behind: states that were."""
        if self.rng.random() < 0.7:
            return found
        history: dict[str, list[Current]] = {}
        prefix = f"$KV.{bucket.name}."
        for message in self.network.front.model.messages(f"KV_{bucket.name}"):
            headers = message.headers or Headers()
            value = message.data if operation_of(headers) == "put" else None
            sequence = int(headers.get(SEQUENCE_HEADER) or 0)
            current = Current(value, sequence, message.sequence, None, headers.get(MARK_HEADER))
            history.setdefault(message.subject.removeprefix(prefix), []).append(current)
        self.outdated += 1
        chosen = {key: self.rng.choice([None, *history.get(key, [])]) for key in found}
        return {key: current for key, current in chosen.items() if current is not None}

    # ---- what happens ------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        async with connect(URL, name="set-up") as client:
            await apply_topology(client.jetstream(), self.app)
        publishing = asyncio.create_task(self._publish())
        workers = [asyncio.create_task(self._work(number)) for number in range(self.rng.choice([1, 2, 3]))]
        troubles = asyncio.create_task(self._trouble())
        looking = asyncio.create_task(self._look())
        try:
            await self._until_done(publishing, [*workers, looking])
        finally:
            for task in (publishing, troubles, looking, *workers):
                task.cancel()
            await asyncio.wait([publishing, troubles, looking, *workers])
        self.look()

    async def _publish(self) -> None:
        with suppress(ConnectionLost):  # of unconfirmed messages: each was sent until it was confirmed
            await self._publish_all()

    async def _publish_all(self) -> None:
        async with await self._connect("publisher") as client:
            js = client.jetstream()
            for number, event in enumerate(self.events):
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
            is_killed = self.has_faults and self.rng.random() < 0.7
            if not is_killed:
                try:
                    await task
                finally:
                    task.cancel()
                return
            await asyncio.wait([task], timeout=self.rng.choice([0.01, 0.05, 0.3, 2.0]) * self.rng.random())
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
            worker = self.kind(
                self.app,
                list(self.app.projections.values()),
                client.jetstream(),
                catalogue=self.app.catalogue,
                options=self.options,
                owner=owner,
            )
            try:
                await worker.run()
            finally:
                self.conflicts += worker.counts.conflicts
                self.restarts += worker.counts.restarts

    async def _connect(self, name: str) -> Client:
        while True:
            with suppress(NoServersAvailable):
                return await connect(URL, name=name, request_timeout_s=2.0)
            await asyncio.sleep(0.1)

    _own: dict[str, list[Any]]

    def _wires_of(self, owner: str) -> list[Any]:
        return [wire for wire in self._own.get(owner, []) if wire in self.network.wires]

    async def _trouble(self) -> None:
        rng, network = self.rng, self.network
        streams = ["BANK", *(f"KV_{spec.bucket.bucket}" for spec in self.app.projections.values())]
        for _ in range(rng.choice([0, 2, 6]) if self.has_faults else 0):
            await asyncio.sleep(rng.choice([0.02, 0.2, 1.0]) * rng.random())
            match rng.randrange(5):
                case 0:
                    network.cut()
                case 1:
                    network.kill_server(rng.choice([0.1, 3.0]))
                case 2:
                    network.lose_leader(rng.choice(streams), rng.choice([0.1, 2.0]))
                case 3:
                    network.refuse(rng.choice([0.1, 2.0]))
                case 4:
                    network.slow_down(rng.choice(streams), rng.choice([0.1, 2.0]), apply_s=rng.choice([0.01, 0.3]))

    async def _until_done(self, publishing: asyncio.Task[None], others: list[asyncio.Task[None]]) -> None:
        async with asyncio.timeout(self.patience_s):
            while True:
                await asyncio.sleep(0.2)
                for task in (publishing, *others):
                    if task.done():
                        task.result()
                if publishing.done() and in_model(self.network, self.app) == folded(self.app, self._recorded()):
                    return

    # ---- the checkers ------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self.rng.choice([0.005, 0.05, 0.5]))
            self.look()

    def look(self) -> None:
        self.looks += 1
        self._fold_prefixes()
        for name, spec in self.app.projections.items():
            states: dict[str, int] = {}
            position = 0
            prefix = f"$KV.{spec.bucket.bucket}."
            for message in self.network.front.model.messages(f"KV_{spec.bucket.bucket}"):
                key = message.subject.removeprefix(prefix)
                if key == position_key():
                    position = FoldPosition.decode(message.data).sequence
                if key.startswith(position_key()):
                    continue
                headers = message.headers or Headers()
                sequence = int(headers.get(SEQUENCE_HEADER) or 0)
                value = message.data if operation_of(headers) == "put" else None
                right = self._prefixes[name, key].get(sequence, "nothing")
                assert (value, (headers.get(MARK_HEADER) or "").split(" ")[0]) == right, (
                    f"{name} {key} at {sequence}: {value!r}, expected {right!r}"
                )
                assert sequence >= states.get(key, 0), f"{name} {key} went back to {sequence} from {states[key]}"
                states[key] = sequence
            for (other, key), prefixes in self._prefixes.items():
                if other == name:
                    needed = max((each for each in prefixes if each <= position), default=0)
                    assert states.get(key, 0) >= needed, (
                        f"{name} is at position {position}, but key {key} at {states.get(key, 0)}, not {needed}"
                    )

    def _fold_prefixes(self) -> None:
        """What each key is after each of its events."""
        last = self.network.front.model.last_sequence(self.app.stream)
        if last == self._folded_through:
            return
        self._folded_through = last
        states: dict[tuple[str, str], KeyState] = {}
        self._prefixes = defaultdict(dict)
        router = Router(self.app.projections.values(), self.app.catalogue)
        for message in self._recorded():
            for row in router.route(message).rows:
                place, spec = (row.projection, row.key), self.app.projections[row.projection]
                state = states.setdefault(place, KeyState(spec, row.key, Current(None, 0, 0)))
                self._prefixes[place].setdefault(0, (None, "1"))
                state.apply(spec, row.key, row.sequence, row.event)
                if state.sequence:
                    self._prefixes[place][state.sequence] = (state.value, "1")

    def _recorded(self) -> list[Recorded]:
        return [
            Recorded(each.sequence, each.subject, each.data, each.headers, 0)
            for each in self.network.front.model.messages(self.app.stream)
        ]


def world_of(seed: int, **options: Any) -> ProjectionWorld:
    world = ProjectionWorld(seed, **options)
    world._own = {}
    return world


__all__ = ["App", "ProjectionWorld", "world_of"]
