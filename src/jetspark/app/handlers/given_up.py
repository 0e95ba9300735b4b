"""Events that the server or another client gives up (``term``, ``max_deliver``) become dead letters.

The server reports each in an advisory, which is lost unless a stream stores it. A stream of the application stores the
advisories about its consumers, whether workers run or not. The workers of a handler share a consumer of that stream,
and acknowledge an advisory when the dead letter is stored.

An advisory is only a hint. A dead letter is written if the event has none, waits for no retry, does not run in this
process, and is not redelivered because its consumer was reset or re-created; and if the stream still has the same
message.
"""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from jetspark.app.clock import idle_s, microseconds
from jetspark.app.contracts.envelope import Decoded
from jetspark.app.handlers.consumers import advisory_consumer
from jetspark.app.handlers.crash_records import ReaderDied
from jetspark.app.handlers.inheritance import FILTERS_EVERY_S, filters_of, watch_filters
from jetspark.app.handlers.lanes import Tries, WorkItem, WorkSource
from jetspark.app.handlers.partitions import copied_from, without_server_headers
from jetspark.app.handlers.procedures import give_up_undelivered
from jetspark.app.handlers.reading import HandlerReading
from jetspark.app.handlers.retry import Reject
from jetspark.app.patience import UNLIMITED_S, patiently
from jetspark.app.stored_events import FailureCause, Origin, StoredEvent
from jetspark.app.topology.names import advisory_consumer_name
from jetspark.core.backoff import Backoff
from jetspark.errors import JetSparkError, MessageNotFound, ProtocolError
from jetspark.jetstream.info import StoredMessage

if TYPE_CHECKING:
    from jetspark.aio.consumer import Consumer
    from jetspark.aio.stream import Stream
    from jetspark.aio.stream_message import JetStreamMessage
    from jetspark.app.handlers.handler_worker import HandlerWorker

__all__ = ["Advisory", "AdvisoryReader", "ConsumerSource", "source_of"]

T = TypeVar("T")

# Advisories at a time; each is a few requests.
PORTION = 32
IDLE_PULL_S = 30.0
PAUSE = Backoff(first_s=0.1, max_s=5.0)
# Polling interval for the end of an event that was given up while it runs here.
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class ConsumerSource:
    """A consumer from which a handler gets events: of its stream, of a partition, or of retries."""

    stream: Stream
    consumer: Consumer
    partition: int | None
    is_retry: bool


@dataclass(frozen=True, slots=True)
class Advisory:
    """The server will not redeliver an event that was not acknowledged."""

    stream: str
    consumer: str
    sequence: int
    reason: str
    time: datetime.datetime

    @classmethod
    def of(cls, data: bytes) -> Advisory:
        """
        Raises:
            ProtocolError: The data is not an advisory.
        """
        try:
            fields = json.loads(data)
            time = datetime.datetime.fromisoformat(fields["timestamp"])
            if time.tzinfo is None:
                raise ValueError(f"timestamp={fields['timestamp']!r} has no zone")
            return cls(
                stream=str(fields["stream"]),
                consumer=str(fields["consumer"]),
                sequence=int(fields["stream_seq"]),
                reason=str(fields.get("reason") or fields["type"].rsplit(".", 1)[-1]),
                time=time,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"not an advisory ({error!r}): {data[:200]!r}") from None


class AdvisoryReader:
    """Writes the dead letters of one handler's events that were given up."""

    def __init__(self, worker: HandlerWorker, advisories: Consumer, sources: list[ConsumerSource]) -> None:
        self._worker, self._advisories, self._log = worker, advisories, worker.log
        self._sources = {(each.stream.name, each.consumer.name): each for each in sources}
        self._reading = HandlerReading(worker.spec, worker.catalogue, keyed=worker.spec.in_order)

    @classmethod
    async def open(cls, worker: HandlerWorker, sources: list[ConsumerSource]) -> AdvisoryReader:
        """Raises StreamNotFound or ConsumerNotFound if the application was not applied to this server."""
        app = worker.app
        stream = await worker.store.js.stream(app.advisories)
        return cls(worker, await stream.consumer(advisory_consumer_name(app.name, worker.spec.name)), sources)

    async def catch_up(self) -> None:
        """Process the advisories that were stored while no worker ran."""
        while found := await self._fetch(PORTION, no_wait=True):
            for message in found:
                await self._process(message)

    async def run(self) -> None:
        """Process advisories until cancelled.

        Raises:
            TopologyDrift: In a group: the filter of the advisories' consumer was narrowed.
        """
        app, spec = self._worker.app, self._worker.spec
        wanted = {self._advisories: filters_of(advisory_consumer(app, spec).config)}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch_filters(app.name, wanted, every_s=FILTERS_EVERY_S))
            while True:
                for message in await self._fetch(1, timeout=idle_s(IDLE_PULL_S)):
                    running = await self._process(message)
                    if running is not None:
                        tasks.create_task(self._wait(message, running))

    async def _fetch(self, count: int, **options: Any) -> list[JetStreamMessage]:
        return await self._patiently("advisories", partial(self._advisories.fetch, count, **options))

    async def _process(self, message: JetStreamMessage) -> WorkItem | None:
        """Write the dead letter of one advisory, if it needs one; or return the item if it runs here."""
        running = None
        try:
            advisory = Advisory.of(message.data)
        except ProtocolError as error:
            self._log.warning("advisory acknowledged unread: %s", error)
        else:
            source = self._sources.get((advisory.stream, advisory.consumer))
            if source is not None:
                what = f"event {advisory.sequence} of {advisory.stream}, which was given up"
                running = await self._patiently(what, partial(self._write_unless_running, message, advisory, source))
        if running is None:
            await message.ack()
        return running

    async def _write_unless_running(
        self, message: JetStreamMessage, advisory: Advisory, source: ConsumerSource
    ) -> WorkItem | None:
        await message.in_progress()  # its ack_wait may be over after the wait
        running = self._running(advisory)
        if running is None:
            # After that many deliveries, reading the event may have ended the processes that got the advisory before.
            deaths = message.metadata.delivered - 1
            died = ReaderDied(deaths) if deaths >= self._worker.spec.retry.attempts else None
            await self._write_dead_letter(advisory, source, died)
        return running

    async def _patiently(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        def log_failure(error: JetSparkError) -> None:
            self._log.warning("%s: %s; retried", what, error)

        return await patiently(ask, patience_s=UNLIMITED_S, pause=PAUSE, on_wait=log_failure)

    async def _wait(self, message: JetStreamMessage, item: WorkItem) -> None:
        """Wait for the end of an item that runs here; if it is not acknowledged then, process the advisory again."""
        while any(each is item for each in self._worker.machine.items):
            await asyncio.sleep(POLL_S)
            await message.in_progress()
        if self._worker.machine.was_acknowledged(item):
            await message.ack()
        else:
            await self._process(message)

    def _running(self, advisory: Advisory) -> WorkItem | None:
        for item in self._worker.machine.items:
            metadata = item.message.metadata
            if (metadata.stream, metadata.stream_sequence) == (advisory.stream, advisory.sequence):
                return item
        return None

    async def _write_dead_letter(self, advisory: Advisory, source: ConsumerSource, died: ReaderDied | None) -> None:
        info = await source.consumer.info()
        if info.delivered.stream_sequence < advisory.sequence or (info.created and info.created > advisory.time):
            return  # it will be redelivered: the consumer was reset or re-created
        try:
            stored = await source.stream.get_message(advisory.sequence, direct=False)
        except MessageNotFound:
            self._log.error(
                "event %d of %s was given up (%s) and is no longer stored; no dead letter can be written",
                advisory.sequence,
                advisory.stream,
                advisory.reason,
            )
            return
        if stored.timestamp > advisory.time:
            return  # a message of an earlier stream of this name
        try:
            item = await self._item(stored, source, died)
        except ProtocolError as error:
            self._log.error(
                "event %d of %s was given up; no dead letter written: %s", advisory.sequence, advisory.stream, error
            )
            return
        if item is None or self._worker.machine.was_acknowledged(item):
            return
        cause = FailureCause("GivenUp", f"by the server or another client: {advisory.reason}", True, "givenup")
        await self._worker.run_steps(give_up_undelivered(self._worker.machine, item, cause))

    async def _item(self, stored: StoredMessage, source: ConsumerSource, died: ReaderDied | None) -> WorkItem | None:
        """The event; None if the handler does not take it. It is not decoded if that has ended processes (``died``).

        Raises:
            ProtocolError: The message is neither a copy nor a retry of an event.
        """
        if source.is_retry:
            original = await self._worker.store.whole(StoredEvent.of(stored.headers, stored.data))
            tries = Tries(source_of(stored.subject), original.attempts, original.redrives)
            item = WorkItem(original.key, original.origin.sequence, tries=tries)
            item.original, item.partition = original, source.partition
            if died is not None:
                item.event = died
            elif original.is_body_omitted:
                item.event = Reject("its body is lost")
            else:
                item.event, _ = self._reading.read(original.subject, original.data, original.headers)
            return item
        origin, subject = Origin(stored.stream, stored.sequence, microseconds(stored.timestamp)), stored.subject
        if source.partition is not None:
            stream, number, subject = copied_from(stored.headers, subject)
            origin = Origin(stream, number, origin.time_us)
        if died is not None:
            event, key = self._reading.unread(died, subject, stored.data, stored.headers)
        else:
            event, key = self._reading.read(subject, stored.data, stored.headers)
        is_other = isinstance(event, Decoded) and event.contract.kind not in self._worker.kinds
        if is_other or not self._worker.is_wanted(subject):
            return None  # the consumer has no filter, or another type has the same subject
        item = WorkItem(key, origin.sequence, event=event)
        item.partition = source.partition
        item.original = StoredEvent(
            handler=self._worker.spec.name,
            key=key,
            origin=origin,
            subject=subject,
            data=stored.data,
            headers=stored.headers if source.partition is None else without_server_headers(stored.headers),
            attempts=0,
            status="open",
            partition=source.partition,
        )
        return item


def source_of(subject: str) -> WorkSource:
    """The source of a message in the retry stream: a scheduled retry, or a requested redrive."""
    return "redrive" if subject.split(".")[3].startswith("redrive") else "retry"
