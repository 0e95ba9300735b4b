"""The dead letters of a handler and its parked keys: what operators need, and workers as well.

Everything that a decision depends on is read from the stream's leader: a replica may be behind it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TypeVar

from jetspark.aio.jetstream import JetStream
from jetspark.aio.kv import KeyValue
from jetspark.aio.step_runner import run_steps
from jetspark.aio.stream import Stream
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.app.clock import microseconds
from jetspark.app.handlers.handler_steps import (
    DropParked,
    KeyStep,
    NextDeadLetter,
    ParkedRecord,
    ReadParked,
    RequestRedrive,
    StepAnswer,
    WriteParked,
)
from jetspark.app.handlers.procedures import advance
from jetspark.app.stored_events import (
    CLOSED_TTL_S,
    DeadLetterRef,
    StoredEvent,
    dead_letter_filter,
    dead_letter_subject,
    is_too_large,
    separate_body_subject,
)
from jetspark.app.topology.names import escape_token
from jetspark.core.headers import Headers, last_value, readable
from jetspark.core.step_runner import StepRun, Steps
from jetspark.errors import (
    Conflict,
    JetSparkError,
    KeyNotFound,
    MessageNotFound,
    PayloadTooLarge,
    ProtocolError,
    StreamNotFound,
    WrongLastSequence,
)
from jetspark.jetstream.info import StoredMessage
from jetspark.jetstream.publishing import Expect

__all__ = ["TOMBSTONE_TTL_S", "DeadLetterBox", "StoredDeadLetter"]

R = TypeVar("R")

_logger = logging.getLogger("jetspark.app")

# Dead letters kept in memory between two steps of an event: usually no more than events are handled at a time.
CACHED_DEAD_LETTERS = 64
# The time that the tombstone of a deleted record stays in the bucket.
TOMBSTONE_TTL_S = 3600.0


class StoredDeadLetter:
    """A dead letter and its revision in the dead-letter stream."""

    __slots__ = ("dead_letter", "revision", "size_bytes", "subject")

    def __init__(self, dead_letter: StoredEvent, subject: str, revision: int, size_bytes: int | None = None) -> None:
        self.dead_letter, self.subject, self.revision = dead_letter, subject, revision
        self.size_bytes = len(dead_letter.data) if size_bytes is None else size_bytes
        """The size of the event, also if it was listed without its body."""

    @property
    def ref(self) -> DeadLetterRef:
        dead_letter = self.dead_letter
        return DeadLetterRef(
            dead_letter.origin.sequence, self.revision, dead_letter.status, dead_letter.redrives, self.subject
        )

    @classmethod
    def of(cls, message: StoredMessage) -> StoredDeadLetter:
        """Raises ProtocolError if it is not a dead letter."""
        return cls(StoredEvent.of(message.headers, message.data), message.subject, message.sequence)

    @classmethod
    def listed(cls, message: JetStreamMessage, *, with_event: bool) -> StoredDeadLetter:
        """From a message of an ordered consumer. Raises ProtocolError if it is not a dead letter."""
        block, sequence = message.raw_headers, message.metadata.stream_sequence
        if with_event:
            return cls(StoredEvent.of(readable(block), message.data), message.subject, sequence)
        # The body is left out; the server adds its size as a header.
        size = int(last_value(block, "Nats-Msg-Size") or 0)
        return cls(StoredEvent.described(block), message.subject, sequence, size)


class DeadLetterBox:
    """The dead letters of one handler, and the records of its parked keys.

    If ``records`` is None, the application never had a handler, and no key is parked.
    """

    def __init__(self, js: JetStream, app: str, handler: str, dead_letters: Stream, records: KeyValue | None) -> None:
        self.js, self.app, self.handler = js, app, handler
        self.dead_letters, self._records = dead_letters, records
        self.parked_revisions: dict[str, int] = {}
        """The last revision of each key's record that this process has read or written."""
        self.parked_names: dict[str, str] = {}
        """Key of a record -> key of its events."""
        self._waiting: dict[str, list[tuple[int, str]]] = {}
        """Sequences and subjects of the dead letters of keys that are advanced; some may be closed by now."""
        self._cached: OrderedDict[str, StoredDeadLetter] = OrderedDict()
        """Recently read dead letters by subject. A step that uses one checks its revision."""

    async def perform(self, step: KeyStep) -> StepAnswer:
        match step:
            case ReadParked():
                return await self._read_parked(step)
            case WriteParked():
                return await self._write_parked(step)
            case DropParked():
                return await self._drop_parked(step)
            case NextDeadLetter():
                return await self._next_dead_letter(step)
            case RequestRedrive():
                await self._request_redrive(step)
        return None

    async def run_key_steps(self, steps: Steps[KeyStep, R]) -> R:
        """Perform the steps of a procedure about a key, until it returns."""
        return await run_steps(StepRun(steps), self.perform)

    # ---- dead letters ------------------------------------------------------------------------------------------

    async def all_dead_letters(
        self, *, key: str | None = None, sequence: int | None = None
    ) -> AsyncIterator[StoredDeadLetter]:
        """The dead letters of the handler, of one key or of one event that are not closed, oldest first."""
        subject = dead_letter_filter(self.app, self.handler, key, sequence)
        async for message in self.dead_letters.get_messages(1, subject=subject):
            try:
                stored = StoredDeadLetter.of(message)
            except ProtocolError as error:
                _logger.warning("message %d of %s left out: %s", message.sequence, self.dead_letters.name, error)
                continue
            if stored.dead_letter.status != "closed":
                yield stored

    async def read(self, subject: str) -> StoredDeadLetter | None:
        try:
            stored = StoredDeadLetter.of(await self.dead_letters.get_message(last_for=subject, direct=False))
        except MessageNotFound:
            return None
        self._cached[subject] = stored
        if len(self._cached) > CACHED_DEAD_LETTERS:
            self._cached.popitem(last=False)
        return stored

    async def close(self, stored: StoredDeadLetter, how: str) -> bool:
        """Replace a dead letter by a marker; False if it was changed in the meantime."""
        dead_letter = stored.dead_letter
        mark = StoredEvent(
            handler=dead_letter.handler,
            key=dead_letter.key,
            origin=dead_letter.origin,
            subject=dead_letter.subject,
            data=b"",
            headers=Headers({"Jetspark-Closed": how}),
            attempts=dead_letter.attempts,
            status="closed",
            redrives=dead_letter.redrives,
            failed=dead_letter.failed,
            partition=dead_letter.partition,
        )
        if not await self._replace(stored.subject, mark, stored.revision, ttl=CLOSED_TTL_S):
            return False
        if dead_letter.apart is not None:
            await self.dead_letters.purge(subject=separate_body_subject(stored.subject))
        return True

    async def discard(self, stored: StoredDeadLetter) -> bool:
        """Give up a dead letter permanently, and let its key continue; False if it was changed in the meantime."""
        if not await self.close(stored, "discarded"):
            return False
        if stored.dead_letter.key is not None and self._records is not None:
            await self.run_key_steps(advance(stored.dead_letter.key, stored.dead_letter.origin.sequence))
        return True

    async def request(self, stored: StoredDeadLetter) -> None:
        """Request that the handler handles a dead letter again; the same request is stored once."""
        subject, again = self.request_for(stored)
        try:
            await self._publish(subject, again, {}, Expect(last_subject_sequence=0))
        except WrongLastSequence:
            pass  # the same request was stored before

    def request_for(self, stored: StoredDeadLetter) -> tuple[str, StoredEvent]:
        """Build the request to handle a dead letter again. It is to be stored only if its subject has no message."""
        dead_letter = stored.dead_letter
        again = StoredEvent(
            handler=dead_letter.handler,
            key=dead_letter.key,
            origin=dead_letter.origin,
            subject=dead_letter.subject,
            data=dead_letter.data,
            headers=dead_letter.headers,
            attempts=0,
            status="open",
            redrives=dead_letter.redrives + 1,
            partition=dead_letter.partition,
            is_body_omitted=dead_letter.is_body_omitted,
            apart=dead_letter.apart,
        )
        return f"{self.retry_subject('redrive', again.partition)}.{again.redrives}.{again.origin.tokens}", again

    async def _next_dead_letter(self, step: NextDeadLetter) -> DeadLetterRef | None:
        # A key may have thousands of dead letters. They are listed once, and read one by one.
        waiting = self._waiting.get(step.key)
        while waiting:
            _, subject = waiting[0]
            stored = await self.read(subject)
            if stored is not None and stored.dead_letter.status != "closed":
                return stored.ref
            waiting.pop(0)
        found = [each.ref async for each in self.all_dead_letters(key=step.key)]
        if not found:
            self._waiting.pop(step.key, None)
            return None
        found.sort(key=lambda ref: ref.sequence)
        self._waiting[step.key] = [(ref.sequence, ref.subject) for ref in found]
        return found[0]

    def forget_dead_letters(self) -> None:
        """List dead letters again when they are needed: another worker may have written some."""
        self._waiting.clear()

    async def _request_redrive(self, step: RequestRedrive) -> None:
        subject, stored = step.dead_letter.subject, self._cached.get(step.dead_letter.subject)
        # If it is closed in the meantime, the worker that receives the request acknowledges it without a run.
        if stored is None or stored.revision != step.dead_letter.revision:
            stored = await self.read(subject)
        if stored is not None and stored.dead_letter.status != "closed":
            await self.request(stored)

    async def _replace(self, subject: str, dead_letter: StoredEvent, revision: int, ttl: float | None = None) -> bool:
        headers = {"Nats-Rollup": "sub"}
        if ttl is not None:
            headers["Nats-TTL"] = f"{int(ttl)}s"
        try:
            await self._publish(subject, dead_letter, headers, Expect(last_subject_sequence=revision))
        except WrongLastSequence:
            return False
        return True

    async def whole(self, event: StoredEvent) -> StoredEvent:
        """Read the headers and the body of an event that was too large to be stored with its facts.

        The result still has ``is_body_omitted`` if they were not stored separately and the event left its stream.
        """
        if not event.is_body_omitted:
            return event
        if event.apart is not None:
            subject = separate_body_subject(dead_letter_subject(self.app, event.handler, event.key, event.origin))
            with suppress(MessageNotFound):
                return event.whole((await self.dead_letters.get_message(last_for=subject, direct=False)).data)
        try:
            stored = await (await self.js.stream(event.origin.stream)).get_message(event.origin.sequence)
        except (MessageNotFound, StreamNotFound):
            return event
        # For a partition, the time is that of the copy.
        if event.partition is None and microseconds(stored.timestamp) != event.origin.time_us:
            return event  # the stream was re-created, and this is another event
        return dataclasses.replace(event, data=stored.data, headers=stored.headers, is_body_omitted=False)

    async def _publish(
        self, subject: str, dead_letter: StoredEvent, headers: dict[str, str], expect: Expect | None
    ) -> None:
        if await self._fits(subject, dead_letter, headers, expect):
            return
        short = await self._store_separately(dead_letter)
        if not await self._fits(subject, short, headers, expect):
            await self._publish_as_it_is(subject, short.stripped(), headers, expect)

    async def _fits(
        self, subject: str, dead_letter: StoredEvent, headers: dict[str, str], expect: Expect | None
    ) -> bool:
        """Publish it; False if it is larger than the server accepts."""
        try:
            await self._publish_as_it_is(subject, dead_letter, headers, expect)
        except JetSparkError as error:
            if not is_too_large(error):
                raise
            return False
        return True

    async def _store_separately(self, dead_letter: StoredEvent) -> StoredEvent:
        """Store headers and body of the event by themselves, unless they are; returns the event without them."""
        subject = separate_body_subject(
            dead_letter_subject(self.app, dead_letter.handler, dead_letter.key, dead_letter.origin)
        )
        for block in (
            (dead_letter.as_block(), b"") if dead_letter.apart is None and not dead_letter.is_body_omitted else ()
        ):
            try:
                # The message has no headers, so it is no larger than the event was when it was published.
                await self.js.publish(subject, block + dead_letter.data)
            except PayloadTooLarge:
                continue
            return dataclasses.replace(dead_letter.shortened(), apart=len(block))
        return dead_letter.shortened()

    async def _publish_as_it_is(
        self, subject: str, dead_letter: StoredEvent, headers: dict[str, str], expect: Expect | None
    ) -> None:
        fields = dead_letter.to_headers()
        fields.update(headers)
        await self.js.publish(subject, dead_letter.data, headers=fields, expect=expect)

    # ---- parked keys -------------------------------------------------------------------------------------------

    def parked_key(self, key: str) -> str:
        """The key of the record of a parked key."""
        return f"parked.{self.handler}.{escape_token(key)}"

    async def _read_parked(self, step: ReadParked) -> ParkedRecord | None:
        if self._records is None:
            return None
        try:
            entry = await self._records.get(self.parked_key(step.key))
        except KeyNotFound:
            return None
        fields = json.loads(entry.value)
        return ParkedRecord(fields["head"], entry.revision, tuple(fields["waiting"]))

    async def _write_parked(self, step: WriteParked) -> bool:
        value = json.dumps({"key": step.key, "head": step.head, "waiting": step.waiting}).encode()
        name = self.parked_key(step.key)
        assert self._records is not None
        try:
            if step.revision == 0:
                revision = await self._records.create(name, value)
            else:
                revision = await self._records.update(name, value, revision=step.revision)
        except Conflict:
            return False
        self.parked_revisions[step.key] = revision
        self.parked_names[name] = step.key
        return True

    async def _drop_parked(self, step: DropParked) -> bool:
        assert self._records is not None
        try:
            await self._records.purge(self.parked_key(step.key), revision=step.revision, ttl=TOMBSTONE_TTL_S)
        except Conflict:
            return False
        return True

    def retry_subject(self, what: str, partition: int | None = None) -> str:
        """The subject of the handler's messages of one kind in the retry stream, without the event's origin."""
        return f"retry.{self.app}.{self.handler}.{what}" + ("" if partition is None else f"-{partition}")
