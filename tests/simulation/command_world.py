"""Callers, workers and the model server in virtual time: workers killed, replies lost, leaders and connections gone.

Some callers decide their commands themselves. They lose their patience now and then, and close their clients.

Everything but the network, the server and the clock is the real thing. One seed is one run.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

from support.accounts import Enter, bank
from support.linear import REFUSED, Entry, Operation

from jetspark.app import App, AppClient, Refused, decode
from jetspark.app.provisioning import apply_topology
from jetspark.app.workers import run_app
from jetspark.errors import BoundaryConflict, CommandInDoubt, JetSparkError, NetworkError
from jetspark.testing.network import Publication
from jetspark.testing.virtual_loop import VirtualLoop, VirtualProcess, model_network

URL = "nats://model:4222"


class CommandWorld:
    """One run."""

    def __init__(
        self, seed: int, kind: type[Enter], *, workers: int = 3, callers: int = 5, calls: int = 4, here: int = 0
    ) -> None:
        self.rng = random.Random(seed)
        self.network = model_network(seed)
        self.loop = VirtualLoop(self.network)
        self.app: App = bank("sim", replicas=self.rng.choice((1, 3)))
        self.app.command("ledgers.limited")(kind)
        self.kind, self.callers, self.calls, self.here = kind, callers, calls, here
        self.operations: list[Operation] = []
        self.lost_replies = self.kills = self.conflicts = self.doubts = self.cancelled = self.closed = 0
        self._processes: list[VirtualProcess] = []
        self._workers: list[VirtualProcess] = []
        self._count = workers
        self._losing = self.rng.choice((0.0, 0.05, 0.2))
        self.network.front.gates.append(self._may_pass)

    def run(self) -> None:
        try:
            self.loop.run_until_complete(self._run())
        finally:
            self.loop.close()

    def entries(self) -> list[Entry]:
        """What the stream has of the ledger."""
        found = []
        for message in self.network.front.model.messages(self.app.stream):
            decoded = decode(message.subject, message.data, message.headers, self.app.catalogue)
            found.append(Entry(decoded.causation_id or "", decoded.event.number))
        return found

    # ---- the course of events ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        async with self.app.connect(URL) as client:
            await apply_topology(client.js, self.app)
        for _ in range(self._count):
            self._start_worker()
        faults = asyncio.create_task(self._trouble())
        try:
            async with asyncio.timeout(3600), asyncio.TaskGroup() as callers:
                for number in range(self.callers):
                    callers.create_task(self._call(number))
        finally:
            faults.cancel()
            for process in self._workers:
                process.kill()
            for process in self._processes:
                await process.clean_up()

    def _start_worker(self) -> None:
        process = VirtualProcess(self.loop)
        process.start(self._work())
        self._workers.append(process)
        self._processes.append(process)

    async def _work(self) -> None:
        """A worker, and who starts it again when it could not start."""
        while True:
            try:
                await run_app(self.app.spec, URL, only=(), stop_timeout=1.0)
            except JetSparkError:
                await asyncio.sleep(0.2)

    async def _trouble(self) -> None:
        """Something goes wrong every now and then, and less and less often, so that it ends."""
        for number in range(12):
            await asyncio.sleep(self.rng.uniform(0.005, 0.3) * (1 + number / 4))
            match self.rng.randrange(5):
                case 0 | 1 if self._workers:
                    self._kill(self.rng.choice(self._workers))
                case 2:
                    self.network.cut()
                case 3 if self.app.spec.stream_config.replicas == 3:
                    self.network.lose_leader(self.app.stream, self.rng.uniform(0.1, 3.0))
                case _:
                    self.network.kill_server(self.rng.uniform(0.1, 2.0))
        self._losing = 0.0

    def _kill(self, process: VirtualProcess) -> None:
        self.kills += 1
        process.kill()
        self._workers.remove(process)
        self.loop.call_later(self.rng.uniform(0.1, 1.0), self._start_worker)
        if not self._workers:
            self._start_worker()

    def _may_pass(self, message: Publication) -> bool:
        """Lose some answers of workers: they are the messages to inboxes that no server sends."""
        if message.subject.startswith("_INBOX.") and self.rng.random() < self._losing:
            self.lost_replies += 1
            return False
        return True

    async def _call(self, number: int) -> None:
        is_here = number < self.here
        client = await self._connect(is_here)
        try:
            for count in range(self.calls):
                id = f"c{number}-{count}"
                operation = Operation(id, self.kind(ledger="x", writer=id), self.loop.time())
                self.operations.append(operation)
                for _ in range(self.rng.choice((1, 1, 2))):  # some ask again although they have the answer
                    if is_here and self.rng.random() < 0.5:
                        client = await self._give_up(client, operation)
                    operation.replies.append(await self._answer(client, operation))
                    operation.returned = min(operation.returned, self.loop.time())
                    if REFUSED in operation.replies:
                        break
                await asyncio.sleep(self.rng.uniform(0.0, 0.2))
        finally:
            with contextlib.suppress(NetworkError):  # the server may be gone just now
                await client.__aexit__(None, None, None)

    async def _give_up(self, client: AppClient, operation: Operation) -> AppClient:
        """Call, and do not wait for the answer: cancel the call, or close the client. Returns one that is open."""
        call = asyncio.create_task(client.call(operation.command, command_id=operation.id, timeout=5.0))
        await asyncio.wait([call], timeout=self.rng.choice((0.0, 0.001, 0.01, 0.1)))
        if self.rng.random() < 0.5:
            self.cancelled += call.cancel()
        else:
            with contextlib.suppress(NetworkError):
                await client.__aexit__(None, None, None)
            client = await self._connect(True)
            done, _ = await asyncio.wait([call], timeout=0.0)
            assert done, "a call outlived its client"
            self.closed += isinstance(call.exception(), CommandInDoubt)
        await asyncio.wait([call])
        return client

    async def _connect(self, is_here: bool) -> AppClient:
        client = self.app.connect(URL, decide_here=is_here)
        while True:
            try:
                return await client.__aenter__()
            except NetworkError:
                await asyncio.sleep(0.1)

    async def _answer(self, client: AppClient, operation: Operation) -> Any:
        while True:
            try:
                timeout = self.rng.choice((0.05, 0.5, 5.0))
                reply = await client.call(operation.command, command_id=operation.id, timeout=timeout)
                return reply.data
            except Refused:
                return REFUSED
            except BoundaryConflict:
                self.conflicts += 1
            except NetworkError:  # in doubt, no workers, busy: ask again
                self.doubts += 1
                await asyncio.sleep(self.rng.uniform(0.0, 0.2))
