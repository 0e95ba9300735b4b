"""The partitions that a worker reads: its share among all workers, which changes when workers join or leave.

A worker that loses a partition stops pulling, returns the events that have not begun, and gives up its pin. Events that
run are finished there; the next reader holds back later events of their keys. A worker that gains a partition pulls at
once, and receives messages when the server has pinned it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from jetspark.app.handlers.given_up import ConsumerSource
from jetspark.app.handlers.inheritance import tidy_copies
from jetspark.app.handlers.intake import Intake
from jetspark.app.handlers.partitions import assign, partition_consumer
from jetspark.app.topology.names import partition_stream
from jetspark.core.backoff import Backoff
from jetspark.errors import JetSparkError

if TYPE_CHECKING:
    from jetspark.aio.consumer import Consumer
    from jetspark.aio.stream import Stream
    from jetspark.app.handlers.handler_worker import HandlerWorker
    from jetspark.app.handlers.record_watch import Members

__all__ = ["PartitionReaders"]

REBALANCE_PAUSE = Backoff(first_s=0.1, max_s=2.0)


class PartitionReaders:
    """The partitions of a handler that this worker reads."""

    def __init__(self, worker: HandlerWorker, members: Members, partitions: int) -> None:
        self._worker, self._members, self._partitions = worker, members, partitions
        self._readers: dict[int, Intake] = {}
        self._stream: Stream
        self._consumers: list[Consumer] = []
        self._retries: list[Consumer] = []
        self._beating: asyncio.Task[None] | None = None
        self._tidying: asyncio.Task[None] | None = None

    @property
    def intakes(self) -> list[Intake]:
        return list(self._readers.values())

    @property
    def sources(self) -> list[ConsumerSource]:
        """All consumers of the handler, of events and of retries, including the partitions of other workers."""
        retries = self._worker.store.retries
        return [
            *(
                ConsumerSource(self._stream, each, number, is_retry=False)
                for number, each in enumerate(self._consumers)
            ),
            *(ConsumerSource(retries, each, number, is_retry=True) for number, each in enumerate(self._retries)),
        ]

    async def open(self) -> None:
        """Raises StreamNotFound or ConsumerNotFound if the application was not applied to this server."""
        worker = self._worker
        self._stream = await worker.store.js.stream(partition_stream(worker.app.name, worker.spec.name))
        names = [partition_consumer(worker.spec.durable, each) for each in range(self._partitions)]
        self._consumers = [await self._stream.consumer(name) for name in names]
        self._retries = [await worker.store.retries.consumer(name) for name in names]

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Read this worker's share of the partitions, until cancelled."""
        self._beating = tasks.create_task(self._beat())
        changed, failures = self._worker.records.changed, 0
        while not self._worker.is_stopping:
            changed.clear()
            try:
                await self._rebalance(tasks)
                failures = 0
            except JetSparkError as error:
                failures += 1
                self._worker.log.warning("partitions: rebalancing failed (%s); retried", error)
                await asyncio.sleep(REBALANCE_PAUSE.wait_s(failures))
                continue
            await changed.wait()

    async def leave(self) -> None:
        """Hand on all partitions: events that have not begun are returned, events that run are finished here."""
        self.end()
        await asyncio.gather(*(self._hand_on(partition) for partition in list(self._readers)))
        await self._members.leave()

    def end(self) -> None:
        """Stop the heartbeat and the removal of old copies."""
        for task in (self._beating, self._tidying):
            if task is not None:
                task.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._members.beat_s)
            try:
                await self._members.beat()
            except JetSparkError as error:
                self._worker.log.warning("heartbeat failed (%s); sent again in %.1f s", error, self._members.beat_s)

    async def _rebalance(self, tasks: asyncio.TaskGroup) -> None:
        # This worker counts even if its record has expired, because it was away for a moment.
        wanted = set(assign({*self._members.alive, self._members.id}, self._partitions)[self._members.id])
        await asyncio.gather(*(self._hand_on(each) for each in list(self._readers) if each not in wanted))
        for partition in sorted(wanted - self._readers.keys()):
            reader = Intake(self._worker, self._stream, self._consumers[partition], self._retries[partition], partition)
            self._readers[partition] = reader
            await reader.start(tasks)
        if 0 in self._readers and self._tidying is None:
            self._tidying = tasks.create_task(tidy_copies(self._stream, self._consumers))
        elif 0 not in self._readers and self._tidying is not None:
            self._tidying.cancel()
            self._tidying = None

    async def _hand_on(self, partition: int) -> None:
        reader = self._readers.pop(partition, None)
        if reader is not None:
            await reader.hand_on()
