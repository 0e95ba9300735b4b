"""The source of a worker's events: a consumer of the stream or of one partition, and the consumer of its retries.

An intake pulls as many messages as there is room for, and passes them to the worker's machine. It keeps the order of
keys when the reader changes: an event that was delivered to another reader and is not acknowledged is *expected*, and
holds back later events of its key. The expected events are looked up whenever this reader may have missed a delivery:
when it starts, after its connection was lost, and, for a partition, whenever the server has pinned this reader again.
From the pin on the server delivers to this reader only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from jetspark.aio.consumer import Consumer
from jetspark.aio.stream import Stream
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.app.clock import idle_s
from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.contracts.envelope import Decoded, RawHeaders
from jetspark.app.handlers.consumers import consumers_of
from jetspark.app.handlers.crash_records import LEASE_S, CrashRecords, spans_of
from jetspark.app.handlers.given_up import source_of
from jetspark.app.handlers.inheritance import (
    FILTERS_EVERY_S,
    await_inherited,
    expect_inherited,
    filters_of,
    tidy_retries,
    watch_filters,
)
from jetspark.app.handlers.lanes import Tries, WorkItem
from jetspark.app.handlers.machine import PROGRESS_PART
from jetspark.app.handlers.partitions import PIN_GROUP, copied_from
from jetspark.app.handlers.reading import HandlerReading
from jetspark.app.handlers.retry import Reject
from jetspark.app.patience import UNLIMITED_S, patiently
from jetspark.app.stored_events import StoredEvent
from jetspark.core.backoff import Backoff
from jetspark.core.headers import last_value, readable
from jetspark.errors import (
    ConfigError,
    JetSparkError,
    NetworkError,
    ProtocolError,
    ServerError,
)
from jetspark.jetstream.info import ConsumerInfo, StoredMessage

if TYPE_CHECKING:
    from jetspark.app.handlers.handler_worker import HandlerWorker
    from jetspark.app.handlers.inheritance import ReadKey
    from jetspark.app.handlers.machine import Credit
    from jetspark.app.handlers.room import Hold, Side

__all__ = ["Intake"]

# An idle pull waits this long at the server before it is renewed, and at most a third of ``ack_wait_s``, because its
# messages count as delivered when it began.
IDLE_PULL_S = 30.0
# A pull that does not wait is answered within this time, or counts as not answered.
QUICK_PULL_S = 1.0
# The server unpins a reader that has not asked for ``takeover_s``; a pull that waits is not asking (2.15.1).
PULLS_IN_TAKEOVER = 3
# A pull that is refused or not answered is tried again after these waits.
PULL_PAUSE = Backoff(first_s=0.1, max_s=5.0)


_Readings: TypeAlias = dict[int, tuple[Decoded | Exception, str | None] | None]
"""Events and keys of messages that were decoded before they are received, by sequence."""


_Delivery: TypeAlias = tuple[int, int]
"""The number of deliveries of a message, and its sequence in its consumer's stream."""


_Receive: TypeAlias = Callable[[JetStreamMessage, _Delivery, float, _Readings], Awaitable[None] | None]


@dataclass(slots=True)
class _Pulled:
    """Messages that were pulled and are not received yet."""

    messages: list[JetStreamMessage]
    heard_at: float
    """The server redelivers them no earlier than ``ack_wait_s`` after this time: it cannot have sent them earlier, or
    has confirmed since then that they are in progress."""
    in_progress_at: float
    """When ``in_progress`` was last sent."""
    came_at: float


class Intake:
    """One reader of a handler: of its stream, or of one partition."""

    def __init__(
        self, worker: HandlerWorker, stream: Stream, consumer: Consumer, retries: Consumer, partition: int | None
    ) -> None:
        self._worker, self._machine, self._spec = worker, worker.machine, worker.spec
        self.stream, self.consumer, self.retry_consumer = stream, consumer, retries
        self.partition = partition
        self._group = None if partition is None else PIN_GROUP
        longest_s = min(IDLE_PULL_S, worker.spec.ack_wait_s / PROGRESS_PART)
        # Virtual time may stretch idle pulls; no process is stopped in it.
        self._stretch_s = idle_s(longest_s) - longest_s
        self._idle_s: dict[Side, float] = {"stream": idle_s(longest_s), "retries": idle_s(longest_s)}
        if partition is not None:
            self._idle_s["stream"] = min(longest_s, worker.spec.takeover_s / PULLS_IN_TAKEOVER)
        self._pulled: dict[Side, _Pulled] = {}
        """Messages that were pulled and not received yet, while look-ups for them run."""
        self._unanswered: dict[Side, float] = {}
        """The start of the first of the pulls that were not answered in time: the next pull returns their messages."""
        self._tenure: tuple[int, str] | None = None
        """Session and pin for which the expected events were looked up."""
        self.expected: dict[int, int] = {}
        """Unacknowledged events that were delivered to other readers: sequence as published -> sequence in the stream
        of the consumer."""
        self._lapsed: set[int] = set()
        """Expected events that this reader had, and let go of."""
        self._following: asyncio.Task[None] | None = None
        self._has_ended = False
        self._pullers: list[asyncio.Task[None]] = []
        self._others: list[asyncio.Task[None]] = []
        self._tasks: asyncio.TaskGroup | None = None
        self._turn = asyncio.Lock()
        """Held while the intake restarts or ends, because the partition's next reader uses the same consumers."""
        self._loop = asyncio.get_running_loop()
        self._log = worker.log
        self._reading = HandlerReading(worker.spec, worker.catalogue, keyed=worker.spec.in_order)
        self._read = self._reading.read

    # ---- life --------------------------------------------------------------------------------------------------

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start pulling. A task that fails ends the group."""
        self._tasks, self._has_ended = tasks, False
        if self.partition is None:
            await self._expect(())
        app = self._worker.app
        prefix = f"retry.{app.name}.{self._spec.name}"
        declared = {(each.stream, each.name): filters_of(each.config) for each in consumers_of(app, self._spec)}
        wanted = {each: declared[each.stream_name, each.name] for each in (self.consumer, self.retry_consumer)}
        if self.partition is None:  # the consumer may be declared without a filter
            wanted[self.consumer] = tuple(contract_of(kind).subject.filter for kind in self._spec.events)
        self._others = [
            tasks.create_task(
                tidy_retries(self._worker.store.retries, self.retry_consumer, prefix, partition=self.partition)
            ),
            tasks.create_task(watch_filters(app.name, wanted, every_s=FILTERS_EVERY_S * (self._spec.partitions or 1))),
        ]
        self._pullers = [
            tasks.create_task(self._pull(self.consumer, "stream", self._receive)),
            tasks.create_task(self._pull(self.retry_consumer, "retries", self._receive_retry)),
        ]

    async def stop_pulling(self) -> None:
        """Stop pulling. Messages that arrived are returned by :meth:`give_back`."""
        for task in self._pullers:
            task.cancel()
        if self._pullers:
            await asyncio.wait(self._pullers)  # a failure is raised by the group of tasks that it is part of
        self._pullers = []

    async def end(self) -> None:
        """Stop the tasks other than the pulls."""
        self._has_ended = True
        running = [*self._others, *([self._following] if self._following is not None else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._others, self._following = [], None

    async def renew(self, stalled: Sequence[WorkItem]) -> None:
        """Restart for keys without progress: return events that have not begun, and look up expected ones again."""
        async with self._turn:
            if self not in self._worker.intakes:
                return  # the partition was handed on: another reader uses its consumers
            await self._let_all_go()
            for item in stalled:
                for sequence in sorted((item.lane.expected if item.lane is not None else None) or ()):
                    self._machine.lanes.gone(sequence)
            self._tenure = None
            # The partition may have moved on in the meantime, or the worker is to end.
            if self._tasks is not None and self in self._worker.intakes and not self._worker.is_stopping:
                await patiently(partial(self.start, self._tasks), patience_s=UNLIMITED_S)

    async def hand_on(self) -> None:
        """Release the partition; when this returns, this intake no longer uses its consumers."""
        async with self._turn:
            await self._let_all_go()

    async def _let_all_go(self) -> None:
        await self.stop_pulling()  # from here on no event arrives that could pass a returned one of its key
        await self.end()
        await self.give_back(running=False)

    async def give_back(self, *, running: bool) -> None:
        """Return the held events, in the order of the stream so that they are redelivered in that order; and the pin.

        Events that run are returned only if ``running``; otherwise they are finished here.
        """
        items = [item for item in self._machine.items if item.intake is self and (running or not item.is_taken)]
        if not running:
            # Before any request to the server, which may fail: the worker would keep the events in progress that it
            # has not let go of, and expected events no longer arrive here. And all at once: while one is returned, a
            # runner could take the next.
            for item in items:
                self._let_go(item)
        for sequence in self.expected:
            self._machine.lanes.gone(sequence)
        self.expected.clear()
        try:
            # A pull that is still open at the server would receive the returned events, or (2.15.1) move the first of
            # them behind the others. An info request makes the server drop pulls of clients that have left.
            for consumer in (self.consumer, self.retry_consumer):
                await consumer.close()
                await consumer.info()
            left = [item for item in items if not item.message.is_answered]
            await self._worker.store.record_not_begun(left)
            for item in left:
                await self._worker.return_message(item.message, item.heard_at)
            if self.partition is not None and self._tenure is not None:
                self._tenure = None
                await self.consumer.unpin(PIN_GROUP)
            await self._worker.client.flush()
        except JetSparkError as error:
            self._log.warning(
                "events of %s: cannot be returned (%s); redelivered after their ack_wait", self.consumer, error
            )

    def _let_go(self, item: WorkItem) -> None:
        if item.source != "stream":
            self._worker.room.drop_retry(item)
        self._machine.release(item)

    def pulled(self, now: float) -> tuple[int, float]:
        """Number of messages that were pulled and not received yet, and the longest time that one has waited."""
        waiting = [each for each in self._pulled.values() if each.messages]
        return sum(len(each.messages) for each in waiting), max((now - each.came_at for each in waiting), default=0.0)

    # ---- pulling -----------------------------------------------------------------------------------------------

    async def _pull(self, consumer: Consumer, side: Side, receive: _Receive) -> None:
        worker, failures = self._worker, 0
        # Not patiently(): each pull computes its room again, and a stopping worker pulls no more.
        while not worker.is_stopping:
            credit = worker.room.free(side, worker.shares)
            if credit.messages <= 0 or credit.bytes <= 0:
                await worker.make_room()
                continue
            try:
                with worker.room.taken(side, credit) as hold:
                    pulled = self._pulled[side] = await self._fetch(consumer, side, credit, hold)
                    found = pulled.messages
                    if side == "stream" and (found or self.partition is None):
                        await self._check_tenure(pulled)
                    deliveries = [_delivery(message) for message in found]
                    is_suspected = max(deliveries, default=(1, 0))[0] > 1
                    read = await self._read_suspected(consumer, side, pulled) if is_suspected else {}
                    for message, delivery in zip(found, deliveries, strict=False):  # it may have emptied ``found``
                        # The machine lets go of events that another worker may have by now, before they begin.
                        outcome = receive(message, delivery, pulled.heard_at, read)
                        if outcome is not None:
                            await outcome
                failures = 0
            except (NetworkError, ServerError) as error:
                if not error.may_pass:
                    raise
                failures += 1
                self._log.warning("%s: pull failed (%s); retried", consumer, error)
                await asyncio.sleep(PULL_PAUSE.wait_s(failures))
                continue
            finally:
                self._pulled.pop(side, None)
            worker.wake_idle(len(found))
            worker.arm()

    async def _fetch(self, consumer: Consumer, side: Side, credit: Credit, hold: Hold) -> _Pulled:
        wait_s = self._idle_s[side]
        try:
            pulled = await self._ask(
                consumer, side, credit.messages, QUICK_PULL_S, max_bytes=credit.bytes, no_wait=True
            )
            if pulled.messages:
                return pulled
            hold.resize(credit._replace(messages=1))
            return await self._ask(consumer, side, 1, wait_s, max_bytes=credit.bytes)
        except ConfigError:  # the next message is larger than what is left
            if self._held():
                hold.resize(credit._replace(messages=0, bytes=0))
                await self._worker.make_room()
                return _Pulled([], 0.0, 0.0, 0.0)
            return await self._ask(consumer, side, 1, wait_s)

    async def _ask(self, consumer: Consumer, side: Side, count: int, timeout_s: float, **options: Any) -> _Pulled:
        """Fetch messages. They count as delivered when the fetch began, since the process may be stopped during it."""
        began = self._loop.time()
        asked_at = self._unanswered.pop(side, began)
        group = self._group if side == "stream" else None
        found = await consumer.fetch(count, timeout=timeout_s, group=group, **options)
        now = self._loop.time()
        if len(found) < count and now - began >= timeout_s:
            self._unanswered[side] = asked_at  # the network may have been silent for several pulls
        heard_at = min(asked_at + self._stretch_s, now)
        return _Pulled(found, heard_at, heard_at, now)

    async def _keep(self, pulled: _Pulled) -> None:
        """Send ``in_progress`` for the messages if it is due."""
        ack_wait_s = self._spec.ack_wait_s
        if self._loop.time() - pulled.in_progress_at > ack_wait_s / PROGRESS_PART:
            pulled.in_progress_at = self._loop.time()
            sent_at = await self._worker.keep(pulled.messages)
            if sent_at is not None and self._loop.time() - pulled.heard_at < ack_wait_s:
                pulled.heard_at = sent_at

    async def _return(self, pulled: _Pulled, side: Side = "stream") -> None:
        """Return messages that arrived and were not received."""
        self._tenure = None
        found = pulled.messages
        with suppress(JetSparkError):
            if self._worker.is_connected:
                await self._worker.store.record_not_begun([self._unread(message, side) for message in found])
            for message in found:
                await self._worker.return_message(message, pulled.heard_at)

    def _unread(self, message: JetStreamMessage, side: Side) -> WorkItem:
        """The item of a message, with the facts that its attempts are counted by."""
        original = None if side == "stream" else StoredEvent.of(readable(message.raw_headers), message.data)
        attempts = 0 if original is None else original.attempts
        delivered = message.metadata.delivered
        item = WorkItem(None, 0, message, delivered=delivered, tries=Tries(attempts=attempts))
        item.partition = self.partition
        item.original = original
        return item

    async def _check_tenure(self, pulled: _Pulled) -> None:
        """Look up the expected events if this reader may have missed a delivery, before an event of ``pulled`` runs."""
        found = pulled.messages
        pin = "" if self.partition is None else last_value(found[-1].raw_headers, "Nats-Pin-Id") or ""
        if self._tenure == (self._worker.sessions, pin):
            return
        failures = 0
        try:
            async with self._in_progress(pulled):
                while not self._worker.is_stopping:  # not patiently(): a stopping worker asks no more
                    session = self._worker.sessions
                    try:
                        await self._expect(found)
                    except (NetworkError, ServerError) as error:
                        if not error.may_pass:
                            raise
                        failures += 1
                        self._log.warning("%s: cannot look up redelivered events (%s); retried", self.consumer, error)
                        await asyncio.sleep(PULL_PAUSE.wait_s(failures))
                        continue
                    self._tenure = (session, pin)
                    return
        except asyncio.CancelledError:
            await self._return(pulled)
            raise

    # ---- events of other readers -------------------------------------------------------------------------------

    async def _expect(self, found: Sequence[JetStreamMessage]) -> None:
        """Hold back keys with events that were delivered to another reader, or to this one in an earlier session."""
        if not self._spec.in_order:
            self._tenure = (self._worker.sessions, "")
            return
        session = self._worker.sessions
        here: set[Hashable] = {item.sequence for item in self._machine.items if item.source == "stream"}
        here |= {self._origin_of(message) for message in found}
        # A restarted server may report everything after an old ack floor as pending.
        here |= self._machine.acknowledged_before
        reading = partial(self._reading_inherited, here)
        expected = await expect_inherited(self._machine, self.consumer, self.stream, reading)
        self.expected |= expected
        self._lapsed.clear()  # another reader may have got them since
        if self.partition is not None:
            # Before other readers acknowledged the events that are not expected, they may have parked their keys.
            self._worker.store.forget_dead_letters()
            await self._worker.records.catch_up()
        else:
            self._tenure = (session, "")
        self._follow_expected()

    def expect_lapsed(self, item: WorkItem) -> None:
        if item.source == "stream":
            self.expect_again(item)
        else:
            self._worker.room.drop_retry(item)

    def expect_again(self, item: WorkItem) -> None:
        if self._has_ended:
            # The partition may have come back to this worker since.
            reader = next((each for each in self._worker.intakes if each.partition == self.partition), self)
            if reader._has_ended:
                self._machine.lanes.gone(item.sequence)
            else:
                reader.expect_again(item)
        elif item.key is not None:
            self.expected[item.sequence] = item.message.metadata.stream_sequence
            self._lapsed.intersection_update(self.expected)
            self._lapsed.add(item.sequence)
            self._follow_expected()

    def _follow_expected(self) -> None:
        if self.expected and (self._following is None or self._following.done()):
            self._following = self._loop.create_task(
                await_inherited(
                    self._machine,
                    self.consumer,
                    self.expected,
                    self._held,
                    self._lapsed,
                    self._worker.records.catch_up,
                    lambda: self._worker.wake_idle(self._spec.concurrency),
                    gives_up=self.partition is None,
                )
            )

    def _held(self) -> set[tuple[int, bool]]:
        """Messages of the consumer that this worker alone may answer: their sequences, and whether they came for the
        first time."""
        now = self._loop.time()
        return {
            (item.message.metadata.stream_sequence, item.delivered == 1)
            for item in self._machine.items
            if item.intake is self
            and item.source == "stream"
            and not item.message.is_answered
            and not self._machine.has_lapsed(item, now)  # else another worker may have acknowledged it
        }

    def _origin_of(self, message: JetStreamMessage) -> int:
        if self.partition is None:
            return message.metadata.stream_sequence
        return copied_from(message.raw_headers, message.subject).sequence

    @asynccontextmanager
    async def _reading_inherited(self, here: Collection[Hashable], info: ConsumerInfo) -> AsyncIterator[ReadKey]:
        """Yield a function that returns an event's sequence as published and its key, if the handler takes it."""
        suspected = [(info.ack_floor.stream_sequence + 1, info.delivered.stream_sequence)]

        async def sequence_and_key(message: StoredMessage) -> tuple[int, str] | None:
            sequence, subject = message.sequence, message.subject
            if self.partition is not None:
                _, sequence, subject = copied_from(message.headers, subject)
            if sequence in here or not self._worker.is_wanted(subject):
                return None
            event, key = await self._read_announced(crashes, message.sequence, subject, message.data, message.headers)
            if key is None or (isinstance(event, Decoded) and event.contract.kind not in self._worker.kinds):
                return None
            return sequence, key

        async with self._crashes("stream", suspected, info) as crashes:
            yield sequence_and_key

    # ---- messages that may end the process ---------------------------------------------------------------------

    async def _read_suspected(self, consumer: Consumer, side: Side, pulled: _Pulled) -> _Readings:
        """Read the messages that were delivered before: one of them may have ended the process that read it.

        All are read before any is received, so that later messages do not overtake one that takes longer. When the
        worker stops, ``pulled`` is returned to the server and emptied.
        """
        found = pulled.messages
        suspected = [message for message in found if _delivery(message)[0] > 1]
        read: _Readings = {}
        failures = 0
        try:
            async with self._in_progress(pulled):
                while not self._worker.is_stopping:
                    try:
                        suspects = spans_of(_delivery(each)[1] for each in suspected)
                        async with self._crashes(side, suspects, await consumer.info()) as crashes:
                            for message in suspected:
                                sequence = _delivery(message)[1]
                                if sequence not in read:
                                    read[sequence] = await self._read_one(crashes, side, sequence, message)
                        return read
                    except (NetworkError, ServerError) as error:
                        if not error.may_pass:
                            raise
                        failures += 1
                        self._log.warning("%s: cannot check redelivered events (%s); retried", consumer, error)
                        await asyncio.sleep(PULL_PAUSE.wait_s(failures))
        except asyncio.CancelledError:
            await self._return(pulled, side)
            raise
        await self._return(pulled, side)
        found.clear()
        return {}

    async def _read_one(
        self, crashes: CrashRecords, side: Side, sequence: int, message: JetStreamMessage
    ) -> tuple[Decoded | Exception, str | None] | None:
        if side == "retries":
            original = await self._original(message)
            if original is None or original.is_body_omitted:
                return None  # no code of the application runs
            return await self._read_announced(crashes, sequence, original.subject, original.data, original.headers)
        subject, headers = message.subject, message.raw_headers
        if self.partition is not None:
            subject = copied_from(headers, subject).subject
        if not self._worker.is_wanted(subject):
            return None
        return await self._read_announced(crashes, sequence, subject, message.data, headers)

    async def _read_announced(
        self, crashes: CrashRecords, sequence: int, subject: str, data: bytes, headers: RawHeaders
    ) -> tuple[Decoded | Exception, str | None]:
        """Read a suspected message, after a record of it was written; ``sequence`` is that in its consumer's stream."""
        died = crashes.died(sequence)
        if died is not None:
            return self._reading.unread(died, subject, data, headers)
        await crashes.announce(sequence)
        return self._read(subject, data, headers)

    @asynccontextmanager
    async def _crashes(
        self, side: Side, suspected: Iterable[tuple[int, int]], info: ConsumerInfo
    ) -> AsyncIterator[CrashRecords]:
        spec, where = self._spec, side if self.partition is None else f"{side}-{self.partition}"
        records, lease_s = self._worker.store.records, max(LEASE_S, spec.ack_wait_s)
        crashes = CrashRecords(records, spec.name, where, spec.retry.attempts, suspected, lease_s=lease_s)
        try:
            await crashes.load(info)
            yield crashes
        except BaseException:
            crashes.end()
            raise
        await crashes.close()

    @asynccontextmanager
    async def _in_progress(self, pulled: _Pulled) -> AsyncIterator[None]:
        """Keep messages that are not received yet in progress."""

        async def keep() -> None:
            while True:
                await asyncio.sleep(self._spec.ack_wait_s / PROGRESS_PART / 2)
                await self._keep(pulled)

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            keeping.cancel()

    # ---- receiving ---------------------------------------------------------------------------------------------

    def _receive(
        self, message: JetStreamMessage, delivery: _Delivery, now: float, read: _Readings
    ) -> Awaitable[None] | None:
        delivered, sequence = delivery
        known = read.get(sequence)
        subject = message.subject
        if self.partition is not None:
            _, sequence, subject = copied_from(message.raw_headers, subject)
        if not self._worker.is_wanted(subject):
            return message.ack()  # an event of other handlers: the consumer has no filter
        event, key = known or self._read(subject, message.data, message.raw_headers)
        item = WorkItem(key, sequence, message, event, size_bytes=message.size_bytes, delivered=delivered)
        item.intake, item.partition = self, self.partition
        return message.ack() if self._machine.receive(item, now) == "done" else None

    async def _original(self, message: JetStreamMessage) -> StoredEvent | None:
        """The event of a message in the retry stream; None if the message is something else."""
        try:
            return await self._worker.store.whole(StoredEvent.of(readable(message.raw_headers), message.data))
        except ProtocolError as error:
            self._log.error(
                "message %d of the retry stream acknowledged unread: %s", message.metadata.stream_sequence, error
            )
            return None

    async def _receive_retry(self, message: JetStreamMessage, delivery: _Delivery, now: float, read: _Readings) -> None:
        original = await self._original(message)
        if original is None:
            await message.ack()
            return
        delivered, sequence = delivery
        known = read.get(sequence)
        event: Decoded | Exception
        if original.is_cancelled:
            before = "" if original.cause is None else f"; before: {original.cause.error}: {original.cause.message}"
            event = Reject(f"its retry was cancelled{before}")
        elif known is not None:
            event = known[0]
        elif original.is_body_omitted:
            event = Reject(
                f"it was too large for its dead letter, and stream {original.origin.stream} has dropped it: its "
                "body is lost"
            )
        else:
            event, _ = self._read(original.subject, original.data, original.headers)
        item = WorkItem(
            original.key,  # under which it was parked and its dead letter is stored; newer code may find another
            original.origin.sequence,
            message,
            event,
            size_bytes=message.size_bytes,
            delivered=delivered,
            tries=Tries(source_of(message.subject), original.attempts, original.redrives),
        )
        item.original, item.intake, item.partition = original, self, self.partition
        received = self._machine.receive(item, now)
        if received == "new":
            self._worker.room.add_retry(item)
        elif received == "done":
            await message.ack()


def _delivery(message: JetStreamMessage) -> _Delivery:
    tokens = (message.raw_reply or b"").split(b".")
    if len(tokens) == 9:  # faster than the metadata, of which most messages need no more
        return int(tokens[4]), int(tokens[5])
    metadata = message.metadata
    return metadata.delivered, metadata.stream_sequence
