"""Where a worker's events come from: a consumer of the stream or of one partition, and the one of its retries.

An intake pulls what there is room for, and hands it to the worker's machine. It keeps the order of keys when the reader
changes: what somebody else was given and has not settled is *expected*, and holds back later events of its key. That
is looked up whenever this reader may have missed something: when it begins, after its connection was lost, and, of a
partition, whenever the server has pinned it anew. From the pin on the server delivers to nobody else, so nothing can be
delivered behind its back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jetspark.aio.consumer import Consumer
from jetspark.aio.stream import Stream
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.app.clock import idle_s
from jetspark.app.contracts.envelope import Decoded
from jetspark.app.dead_letters.letters import DeadEvent
from jetspark.app.handlers.given_up import source_of
from jetspark.app.handlers.inheritance import expect_inherited, settle_inherited, tidy_retries
from jetspark.app.handlers.lanes import WorkItem
from jetspark.app.handlers.partitions import PIN_GROUP, copied_from
from jetspark.app.handlers.reading import HandlerReading
from jetspark.app.handlers.retry import Reject
from jetspark.core.backoff import Backoff
from jetspark.core.headers import last_value, readable
from jetspark.errors import (
    ConfigError,
    JetSparkError,
    NetworkError,
    ProtocolError,
    ServerError,
)
from jetspark.jetstream.info import StoredMessage

if TYPE_CHECKING:
    from jetspark.app.handlers.machine import Credit
    from jetspark.app.handlers.room import Hold, Side
    from jetspark.app.handlers.worker import HandlerWorker

__all__ = ["Intake"]

# An idle pull waits this long at the server before it is renewed.
IDLE_PULL_S = 30.0
# The server unpins a reader that has not asked for ``takeover_s``; a pull that waits is not asking (2.15.1).
PULLS_IN_TAKEOVER = 3
# A pull that is refused or not answered is tried again after these waits.
PULL_PAUSE = Backoff(first_s=0.1, max_s=5.0)


class Intake:
    """One reader of a handler: of its stream, or of one partition."""

    def __init__(
        self, worker: HandlerWorker, stream: Stream, consumer: Consumer, retries: Consumer, partition: int | None
    ) -> None:
        self._worker, self._machine, self._spec = worker, worker.machine, worker.spec
        self.stream, self.consumer, self.retry_consumer = stream, consumer, retries
        self.partition = partition
        self._group = None if partition is None else PIN_GROUP
        self._idle_s: dict[Side, float] = {"stream": idle_s(IDLE_PULL_S), "retries": idle_s(IDLE_PULL_S)}
        if partition is not None:
            self._idle_s["stream"] = worker.spec.takeover_s / PULLS_IN_TAKEOVER
        self._tenure: tuple[int, str] | None = None
        """Session and pin for which it is known what has not arrived."""
        self.expected: dict[int, int] = {}
        """What was delivered to others and is not settled: where it was published -> in the consumer's stream."""
        self._settling: asyncio.Task[None] | None = None
        self._has_ended = False
        self._pullers: list[asyncio.Task[None]] = []
        self._others: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()
        self._log = worker.log
        self._read = HandlerReading(worker.spec, worker.catalogue, keyed=worker.spec.in_order).read

    # ---- life --------------------------------------------------------------------------------------------------

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Pull from now on; tasks that fail end the group."""
        if self.partition is None:
            await self._expect(())
        prefix = f"retry.{self._worker.app.name}.{self._spec.name}"
        self._others = [
            tasks.create_task(
                tidy_retries(self._worker.store.retries, self.retry_consumer, prefix, partition=self.partition)
            ),
        ]
        self._pullers = [
            tasks.create_task(self._pull(self.consumer, "stream", self._receive)),
            tasks.create_task(self._pull(self.retry_consumer, "retries", self._receive_retry)),
        ]

    async def stop_pulling(self) -> None:
        """Ask for nothing more. What was asked for and came is given back by :meth:`give_back`."""
        for task in self._pullers:
            task.cancel()
        if self._pullers:
            await asyncio.wait(self._pullers)  # what one has failed with is told by the group of tasks it is part of
        self._pullers = []

    async def end(self) -> None:
        """Stop what runs beside the pulling."""
        self._has_ended = True
        running = [*self._others, *([self._settling] if self._settling is not None else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._others, self._settling = [], None

    async def give_back(self, *, running: bool) -> None:
        """Give back what is held, in the order of the stream, so that it comes again in that order; and the pin.

        What runs is given back only if ``running``: else it goes on, and is settled here.
        """
        try:
            # A request that is still open at the server takes what is given back, or (2.15.1) moves the first of it
            # behind the others. Being asked, the server forgets the requests of those who have left.
            for consumer in (self.consumer, self.retry_consumer):
                await consumer.close()
                await consumer.info()
            items = [item for item in self._machine.items if item.intake is self and (running or not item.is_taken)]
            if not running:
                # All at once: while one is given back, a runner could take the next.
                for item in items:
                    self._let_go(item)
            left = [item for item in items if not item.message.is_answered]
            await self._worker.store.note_not_begun(left)
            for item in left:
                await item.message.nak()
            for sequence in list(self.expected):
                self._machine.lanes.gone(sequence)
            self.expected.clear()
            if self.partition is not None and self._tenure is not None:
                self._tenure = None
                await self.consumer.unpin(PIN_GROUP)
            await self._worker.client.flush()
        except JetSparkError as error:  # disconnected: they come after their ack_wait
            self._log.warning("giving back: %s", error)

    def _let_go(self, item: WorkItem) -> None:
        if item.source != "stream":
            self._worker.room.count_retry(item, -1)
        self._machine.release(item)

    # ---- pulling -----------------------------------------------------------------------------------------------

    async def _pull(self, consumer: Consumer, side: Side, receive: Callable[[JetStreamMessage, float], Any]) -> None:
        worker, failures = self._worker, 0
        # Not patiently: how much to ask for is decided anew, and a worker that stops asks no more.
        while not worker.is_stopping:
            credit = worker.room.free(side, worker.shares)
            if credit.messages <= 0 or credit.bytes <= 0:
                await worker.make_room()
                continue
            try:
                with worker.room.taken(side, credit) as hold:
                    found = await self._fetch(consumer, side, credit, hold)
                    if side == "stream" and (found or self.partition is None):
                        await self._check_tenure(found)
                    now = self._loop.time()
                    for message in found:
                        outcome = receive(message, now)
                        if outcome is not None:
                            await outcome
                failures = 0
            except (NetworkError, ServerError) as error:
                if not error.may_pass:
                    raise
                failures += 1
                self._log.warning("pulling from %s: %s", consumer, error)
                await asyncio.sleep(PULL_PAUSE.wait_s(failures))
                continue
            worker.wake_idle(len(found))
            worker.arm()

    async def _fetch(self, consumer: Consumer, side: Side, credit: Credit, hold: Hold) -> list[JetStreamMessage]:
        group, wait_s = self._group if side == "stream" else None, self._idle_s[side]
        try:
            found = await consumer.fetch(credit.messages, no_wait=True, max_bytes=credit.bytes, group=group)
            if found:
                return found
            hold.resize(credit._replace(messages=1))
            began = self._loop.time()
            found = await consumer.fetch(1, timeout=wait_s, max_bytes=credit.bytes, group=group)
            if self.partition is not None and self._loop.time() - began > wait_s + self._spec.ack_wait_s / 2:
                # This process was stopped meanwhile: what came may be with another reader by now.
                await self._return(found, side)
                return []
            return found
        except ConfigError:  # the next message is larger than what is left
            if self._held():
                hold.resize(credit._replace(messages=0, bytes=0))
                await self._worker.make_room()
                return []
            return await consumer.fetch(1, timeout=wait_s, group=group)

    async def _return(self, found: Sequence[JetStreamMessage], side: Side = "stream") -> None:
        """Give back what came, and was not received."""
        self._tenure = None
        with suppress(JetSparkError):
            if self._worker.is_connected:
                await self._worker.store.note_not_begun([self._unread(message, side) for message in found])
            for message in found:
                await message.nak()

    def _unread(self, message: JetStreamMessage, side: Side) -> WorkItem:
        """What has to be known of a message to count its attempts."""
        original = None if side == "stream" else DeadEvent.of(readable(message.raw_headers), message.data)
        attempts = 0 if original is None else original.attempts
        delivered = message.metadata.delivered
        item = WorkItem(None, 0, message, delivered=delivered, attempts=attempts, partition=self.partition)
        item.original = original
        return item

    async def _check_tenure(self, found: list[JetStreamMessage]) -> None:
        """Look up what others have if this reader may have missed something, before anything of ``found`` is run."""
        pin = "" if self.partition is None else last_value(found[-1].raw_headers, "Nats-Pin-Id") or ""
        if self._tenure == (self._worker.sessions, pin):
            return
        failures = 0
        try:
            while not self._worker.is_stopping:  # not patiently: a worker that stops asks no more
                session = self._worker.sessions
                try:
                    await self._expect(found)
                except (NetworkError, ServerError) as error:
                    if not error.may_pass:
                        raise
                    failures += 1
                    self._log.warning("looking for events that were on their way: %s", error)
                    await asyncio.sleep(PULL_PAUSE.wait_s(failures))
                    continue
                self._tenure = (session, pin)
                return
        except asyncio.CancelledError:
            await self._return(found)
            raise

    # ---- what others have --------------------------------------------------------------------------------------

    async def _expect(self, found: Sequence[JetStreamMessage]) -> None:
        """Have events wait for what was on its way to another reader, or to this one in an earlier session."""
        if not self._spec.in_order:
            self._tenure = (self._worker.sessions, "")
            return
        session = self._worker.sessions
        here = {item.sequence for item in self._machine.items if item.source == "stream"}
        here |= {self._origin_of(message) for message in found}
        expected = await expect_inherited(self._machine, self.consumer, self.stream, self._sequence_and_key, here)
        self.expected |= expected
        if self.partition is not None:
            # Keys that others parked before they settled what is not expected must be known to be parked.
            self._worker.store.forget_letters()
            await self._worker.records.catch_up()
        else:
            self._tenure = (session, "")
        self.settle_expected()

    def note_lapsed(self, item: WorkItem) -> None:
        """The item may be with another reader: wait for what becomes of it."""
        if item.source == "stream":
            self.expect_again(item)
        else:
            self._worker.room.count_retry(item, -1)

    def expect_again(self, item: WorkItem) -> None:
        """The item is not held any more, and its key waits for it, unless another reader looks after the key."""
        if self._has_ended:
            self._machine.lanes.gone(item.sequence)
        elif item.key is not None:
            self.expected[item.sequence] = item.message.metadata.stream_sequence
            self.settle_expected()

    def settle_expected(self) -> None:
        if self.expected and (self._settling is None or self._settling.done()):
            self._settling = self._loop.create_task(
                settle_inherited(
                    self._machine,
                    self.consumer,
                    self.expected,
                    self._held,
                    self._worker.records.catch_up,
                    lambda: self._worker.wake_idle(self._spec.concurrency),
                    gives_up=self.partition is None,
                )
            )

    def _held(self) -> set[Any]:
        return {
            item.identity
            for item in self._machine.items
            if item.intake is self and item.source == "stream" and not item.message.is_answered
        }

    def _origin_of(self, message: JetStreamMessage) -> int:
        if self.partition is None:
            return message.metadata.stream_sequence
        return copied_from(message.raw_headers, message.subject).sequence

    def _sequence_and_key(self, message: StoredMessage) -> tuple[int, str] | None:
        sequence, subject = message.sequence, message.subject
        if self.partition is not None:
            _, sequence, subject = copied_from(message.headers, subject)
        event, key = self._read(subject, message.data, message.headers)
        if key is None or (isinstance(event, Decoded) and event.contract.kind not in self._worker.kinds):
            return None
        return sequence, key

    # ---- receiving ---------------------------------------------------------------------------------------------

    def _receive(self, message: JetStreamMessage, now: float) -> Any:
        tokens = (message.raw_reply or b"").split(b".")
        if len(tokens) == 9:
            delivered, sequence = int(tokens[4]), int(tokens[5])
        else:
            metadata = message.metadata
            delivered, sequence = metadata.delivered, metadata.stream_sequence
        subject = message.subject
        if self.partition is not None:
            _, sequence, subject = copied_from(message.raw_headers, subject)
        if not self._worker.is_wanted(subject):
            return message.ack()  # of others: the consumer has no filter
        event, key = self._read(subject, message.data, message.raw_headers)
        item = WorkItem(
            key,
            sequence,
            message,
            event,
            size_bytes=message.size_bytes,
            delivered=delivered,
            partition=self.partition,
        )
        item.intake = self
        return message.ack() if self._machine.receive(item, now) == "done" else None

    async def _receive_retry(self, message: JetStreamMessage, now: float) -> None:
        try:
            original = DeadEvent.of(readable(message.raw_headers), message.data)
        except ProtocolError as error:
            self._log.error("sequence %d of the retry stream: %s", message.metadata.stream_sequence, error)
            await message.ack()
            return
        original = await self._worker.store.whole(original)
        if original.is_body_omitted:
            event: Any = Reject(
                f"it was too large for its letter, and stream {original.origin.stream} has dropped it: its body is lost"
            )
        else:
            event, _ = self._read(original.subject, original.data, original.headers)
        item = WorkItem(
            original.key,  # under which it was parked, and its letter is found; newer code may see another
            original.origin.sequence,
            message,
            event,
            size_bytes=message.size_bytes,
            delivered=message.metadata.delivered,
            source=source_of(message.subject),
            attempts=original.attempts,
            redrives=original.redrives,
            partition=self.partition,
        )
        item.original, item.intake = original, self
        received = self._machine.receive(item, now)
        if received == "new":
            self._worker.room.count_retry(item, 1)
        elif received == "done":
            await message.ack()
