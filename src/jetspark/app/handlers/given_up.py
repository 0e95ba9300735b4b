"""Events that the server or another client gives up (``term``, ``max_deliver``): they end in the dead letters.

The server tells of each in an advisory, a plain message that is gone when nobody stores it. So a stream of the
application stores those about its consumers, whether workers run or not, and the workers of a handler share a consumer
of it: an advisory is acknowledged when the letter is there.

An advisory is a hint, and what is stored decides. A letter is written if the event has none and waits for no retry,
does not run in this process, and does not come again because its consumer was set back or made anew; and if the stream
has the message that it had then.
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
from jetspark.app.handlers.lanes import WorkItem, WorkSource
from jetspark.app.handlers.partitions import copied_from, without_server_headers
from jetspark.app.handlers.procedures import give_up_undelivered
from jetspark.app.handlers.reading import HandlerReading
from jetspark.app.handlers.retry import Reject
from jetspark.app.patience import FOR_EVER_S, patiently
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

__all__ = ["Advisory", "ConsumerSource", "GivenUp", "source_of"]

T = TypeVar("T")

# Advisories at a time; each is a few requests.
PORTION = 32
IDLE_PULL_S = 30.0
PAUSE = Backoff(first_s=0.1, max_s=5.0)
# How often it is looked whether an event is settled that was given up while it ran here.
LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class ConsumerSource:
    """A consumer from which a handler gets events: of its stream, of a partition, or of retries."""

    stream: Stream
    consumer: Consumer
    partition: int | None
    is_retry: bool


@dataclass(frozen=True, slots=True)
class Advisory:
    """That an event will not be delivered again, though nobody has acknowledged it."""

    stream: str
    consumer: str
    sequence: int
    reason: str
    time: datetime.datetime

    @classmethod
    def of(cls, data: bytes) -> Advisory:
        """
        Raises:
            ProtocolError: It is none.
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


class GivenUp:
    """Writes the letters of one handler's events that were given up."""

    def __init__(self, worker: HandlerWorker, advisories: Consumer, sources: list[ConsumerSource]) -> None:
        self._worker, self._advisories, self._log = worker, advisories, worker.log
        self._sources = {(each.stream.name, each.consumer.name): each for each in sources}
        self._reading = HandlerReading(worker.spec, worker.catalogue, keyed=worker.spec.in_order)

    @classmethod
    async def open(cls, worker: HandlerWorker, sources: list[ConsumerSource]) -> GivenUp:
        """Raises StreamNotFound or ConsumerNotFound when the application was not applied to this server."""
        app = worker.app
        stream = await worker.store.js.stream(app.advisories)
        return cls(worker, await stream.consumer(advisory_consumer_name(app.name, worker.spec.name)), sources)

    async def catch_up(self) -> None:
        """Deal with what was said while no worker ran."""
        while found := await self._fetch(PORTION, no_wait=True):
            for message in found:
                await self._settle(message)

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
                    running = await self._settle(message)
                    if running is not None:
                        tasks.create_task(self._wait(message, running))

    async def _fetch(self, count: int, **options: Any) -> list[JetStreamMessage]:
        return await self._patiently("asking what was given up", partial(self._advisories.fetch, count, **options))

    async def _settle(self, message: JetStreamMessage) -> WorkItem | None:
        """Write the letter of one advisory, if it takes one; or return the item that runs here."""
        running = None
        try:
            advisory = Advisory.of(message.data)
        except ProtocolError as error:
            self._log.warning("%s", error)
        else:
            source = self._sources.get((advisory.stream, advisory.consumer))
            if source is not None:
                what = f"sequence {advisory.sequence} of {advisory.stream}"
                running = await self._patiently(what, partial(self._attend, message, advisory, source))
        if running is None:
            await message.ack()
        return running

    async def _attend(self, message: JetStreamMessage, advisory: Advisory, source: ConsumerSource) -> WorkItem | None:
        await message.in_progress()  # after a wait it may be overdue
        running = self._running(advisory)
        if running is None:
            # As often as that, it may have been the reading of the event that ended those who were told before.
            deaths = message.metadata.delivered - 1
            died = ReaderDied(deaths) if deaths >= self._worker.spec.retry.attempts else None
            await self._bury(advisory, source, died)
        return running

    async def _patiently(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        def tell(error: JetSparkError) -> None:
            self._log.warning("%s: %s", what, error)

        return await patiently(ask, patience_s=FOR_EVER_S, pause=PAUSE, on_wait=tell)

    async def _wait(self, message: JetStreamMessage, item: WorkItem) -> None:
        """It runs here, and is settled here as if nothing had happened; unless that does not come to an end."""
        while any(each is item for each in self._worker.machine.items):
            await asyncio.sleep(LOOK_EVERY_S)
            await message.in_progress()
        if self._worker.machine.was_acknowledged(item):
            await message.ack()
        else:
            await self._settle(message)

    def _running(self, advisory: Advisory) -> WorkItem | None:
        for item in self._worker.machine.items:
            metadata = item.message.metadata
            if (metadata.stream, metadata.stream_sequence) == (advisory.stream, advisory.sequence):
                return item
        return None

    async def _bury(self, advisory: Advisory, source: ConsumerSource, died: ReaderDied | None) -> None:
        info = await source.consumer.info()
        if info.delivered.stream_sequence < advisory.sequence or (info.created and info.created > advisory.time):
            return  # it is delivered once more: the consumer was set back, or made anew
        try:
            stored = await source.stream.get_message(advisory.sequence, direct=False)
        except MessageNotFound:
            self._log.error(
                "sequence %d of %s was given up (%s), and is gone", advisory.sequence, advisory.stream, advisory.reason
            )
            return
        if stored.timestamp > advisory.time:
            return  # a message of another stream that had the name
        try:
            item = await self._item(stored, source, died)
        except ProtocolError as error:
            self._log.error("sequence %d of %s: %s", advisory.sequence, advisory.stream, error)
            return
        if item is None or self._worker.machine.was_acknowledged(item):
            return
        cause = FailureCause("GivenUp", f"by the server or another client: {advisory.reason}", True, "givenup")
        await self._worker.run_steps(give_up_undelivered(self._worker.machine, item, cause))

    async def _item(self, stored: StoredMessage, source: ConsumerSource, died: ReaderDied | None) -> WorkItem | None:
        """The event; None for one that the handler does not take. It is not decoded if a reader ``died`` of that.

        Raises:
            ProtocolError: It is no event on its way.
        """
        if source.is_retry:
            original = await self._worker.store.whole(StoredEvent.of(stored.headers, stored.data))
            item = WorkItem(
                original.key,
                original.origin.sequence,
                source=source_of(stored.subject),
                attempts=original.attempts,
                redrives=original.redrives,
                partition=source.partition,
            )
            item.original = original
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
            return None  # the consumer has no filter, or the type is another on the same subject
        item = WorkItem(key, origin.sequence, event=event, partition=source.partition)
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
    """Why a message is in the retry stream: it waited for its turn, or somebody asked for it."""
    return "redrive" if subject.split(".")[3].startswith("redrive") else "retry"
