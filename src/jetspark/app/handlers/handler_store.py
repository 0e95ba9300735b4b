"""Storage of handlers besides the events: dead letters, schedules, parked keys, attempts. One object for each handler.

Workers perform the steps of :mod:`jetspark.app.handlers.handler_steps` with it; the command line lists, redrives and
discards with it. Everything that is read to decide is read from the leader: a replica may be a moment behind.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import datetime
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import TypeVar

from jetspark.aio.jetstream import JetStream
from jetspark.aio.kv import KeyValue
from jetspark.aio.step_runner import run_steps
from jetspark.aio.stream import Stream
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.app.clock import microseconds, utc_now
from jetspark.app.handlers.handler_steps import (
    AttemptsRecord,
    CloseDeadLetter,
    DropAttempts,
    DropParked,
    DropSeparateBody,
    FindDeadLetter,
    FindRetry,
    NextDeadLetter,
    ParkedRecord,
    ReadAttempts,
    ReadParked,
    RequestRedrive,
    StepAnswer,
    StoreStep,
    WriteAttempts,
    WriteDeadLetter,
    WriteParked,
    WriteSchedule,
)
from jetspark.app.handlers.lanes import WorkItem
from jetspark.app.handlers.partitions import copied_from, without_server_headers
from jetspark.app.handlers.procedures import advance
from jetspark.app.server_clock import server_clock
from jetspark.app.stored_events import (
    CLOSED_TTL_S,
    DeadLetterRef,
    DeadLetterStatus,
    FailureCause,
    Origin,
    StoredEvent,
    dead_letter_filter,
    dead_letter_subject,
    is_too_large,
    separate_body_subject,
)
from jetspark.app.topology.names import dead_letter_stream, escape_token, handler_bucket, retry_stream
from jetspark.core.headers import Headers, last_value, readable
from jetspark.core.step_runner import StepRun, Steps
from jetspark.errors import (
    Conflict,
    JetSparkError,
    KeyExists,
    KeyNotFound,
    MessageNotFound,
    PayloadTooLarge,
    ProtocolError,
    StreamNotFound,
    WrongLastSequence,
)
from jetspark.jetstream.info import StoredMessage
from jetspark.jetstream.publishing import Expect

__all__ = ["HandlerStore", "StoredDeadLetter"]

R = TypeVar("R")

_logger = logging.getLogger("jetspark.app")

# A record of attempts is read at the next delivery, which has to wait for a worker: they may be away for a weekend.
ATTEMPTS_TTL_S = 7 * 86400.0
# Dead letters kept in memory between two steps of an event: at most as many as handlers run, as a rule.
READ_LETTERS = 64
# Notes that are written side by side when much is given back.
NOTES_AT_ONCE = 100
# How long a deleted record's mark stays in the bucket.
MARK_TTL_S = 3600.0


class StoredDeadLetter:
    """A dead letter and its place in the dead-letter stream."""

    __slots__ = ("letter", "revision", "size_bytes", "subject")

    def __init__(self, letter: StoredEvent, subject: str, revision: int, size_bytes: int | None = None) -> None:
        self.letter, self.subject, self.revision = letter, subject, revision
        self.size_bytes = len(letter.data) if size_bytes is None else size_bytes
        """Of the event, also where it was listed without."""

    @property
    def ref(self) -> DeadLetterRef:
        letter = self.letter
        return DeadLetterRef(letter.origin.sequence, self.revision, letter.status, letter.redrives, self.subject)

    @classmethod
    def of(cls, message: StoredMessage) -> StoredDeadLetter:
        """Raises ProtocolError when it is none."""
        return cls(StoredEvent.of(message.headers, message.data), message.subject, message.sequence)

    @classmethod
    def listed(cls, message: JetStreamMessage, *, with_event: bool) -> StoredDeadLetter:
        """From a message of an ordered consumer. Raises ProtocolError when it is not a dead letter."""
        block, sequence = message.raw_headers, message.metadata.stream_sequence
        if with_event:
            return cls(StoredEvent.of(readable(block), message.data), message.subject, sequence)
        # The server says how large the body is that it leaves out.
        size = int(last_value(block, "Nats-Msg-Size") or 0)
        return cls(StoredEvent.described(block), message.subject, sequence, size)


class HandlerStore:
    """The dead letters, schedules and records of one handler."""

    def __init__(
        self, js: JetStream, app: str, handler: str, letters: Stream, retries: Stream, records: KeyValue
    ) -> None:
        self.js, self.app, self.handler = js, app, handler
        self.letters, self.retries, self.records = letters, retries, records
        self.parked_revisions: dict[str, int] = {}
        """What this process knows of parked keys is at least as new."""
        self.parked_names: dict[str, str] = {}
        """Key of a record -> key of its events."""
        self._waiting: dict[str, list[tuple[int, str]]] = {}
        """Dead letters of keys that continue, by the sequences of their events; some may be closed by now."""
        self._read: OrderedDict[str, StoredDeadLetter] = OrderedDict()
        """Dead letters that were read a moment ago, by subject. What is done with one says which revision it means."""

    @classmethod
    async def open(cls, js: JetStream, app: str, handler: str) -> HandlerStore:
        """Raises StreamNotFound when the application was not applied to this server."""
        letters, retries = await asyncio.gather(js.stream(dead_letter_stream(app)), js.stream(retry_stream(app)))
        return cls(js, app, handler, letters, retries, await js.kv(handler_bucket(app)))

    async def server_now(self) -> datetime.datetime:
        """The time by the server's clock, for what several workers compare with theirs."""
        return await server_clock(self.js, self.retries.name).now()

    async def perform(self, step: StoreStep) -> StepAnswer:
        """Perform one step, and return its answer."""
        match step:
            case FindDeadLetter():
                return await self._find_letter(step)
            case WriteDeadLetter():
                return await self._write_letter(step)
            case CloseDeadLetter():
                return await self._close_letter(step)
            case FindRetry():
                return await self._find_retry(step)
            case NextDeadLetter():
                return await self._next_letter(step)
            case ReadParked():
                return await self._read_parked(step)
            case WriteParked():
                return await self._write_parked(step)
            case DropParked():
                return await self._drop_parked(step)
            case ReadAttempts():
                return await self._read_attempts(step)
            case WriteSchedule():
                await self._write_schedule(step)
            case RequestRedrive():
                await self._request_redrive(step)
            case WriteAttempts():
                await self._write_attempts(step)
            case DropAttempts():
                await self._drop_attempts(step)
            case DropSeparateBody():
                await self._drop_apart(step)
        return None

    async def run(self, steps: Steps[StoreStep, R]) -> R:
        """Run a procedure all of whose steps are of the store."""
        return await run_steps(StepRun(steps), self.perform)

    # ---- dead letters -----------------------------------------------------------------------------------------------

    async def all_letters(
        self, *, key: str | None = None, sequence: int | None = None
    ) -> AsyncIterator[StoredDeadLetter]:
        """Every dead letter of the handler that is not closed, or of one key or one event of it, oldest first."""
        subject = dead_letter_filter(self.app, self.handler, key, sequence)
        async for message in self.letters.get_messages(1, subject=subject):
            try:
                stored = StoredDeadLetter.of(message)
            except ProtocolError as error:
                _logger.warning("sequence %d of stream %s: %s", message.sequence, self.letters.name, error)
                continue
            if stored.letter.status != "closed":
                yield stored

    async def letter(self, subject: str) -> StoredDeadLetter | None:
        try:
            stored = StoredDeadLetter.of(await self.letters.get_message(last_for=subject, direct=False))
        except MessageNotFound:
            return None
        self._read[subject] = stored
        if len(self._read) > READ_LETTERS:
            self._read.popitem(last=False)
        return stored

    async def close(self, stored: StoredDeadLetter, how: str) -> bool:
        """Replace a dead letter by a marker; False where it was changed in the meantime."""
        letter = stored.letter
        mark = StoredEvent(
            handler=letter.handler,
            key=letter.key,
            origin=letter.origin,
            subject=letter.subject,
            data=b"",
            headers=Headers({"Jetspark-Closed": how}),
            attempts=letter.attempts,
            status="closed",
            redrives=letter.redrives,
            failed=letter.failed,
            partition=letter.partition,
        )
        if not await self._replace(stored.subject, mark, stored.revision, ttl=CLOSED_TTL_S):
            return False
        if letter.apart is not None:
            await self.letters.purge(subject=separate_body_subject(stored.subject))
        return True

    async def discard(self, stored: StoredDeadLetter) -> bool:
        """Give up a dead letter permanently, and let its key continue; False where it was changed in the meantime."""
        if not await self.close(stored, "discarded"):
            return False
        if stored.letter.key is not None:
            await self.run(advance(stored.letter.key, stored.letter.origin.sequence))
        return True

    async def request(self, stored: StoredDeadLetter) -> None:
        """Have the handler handle a dead letter again; the same request is stored once."""
        subject, again = self.request_for(stored)
        try:
            await self._publish(subject, again, {}, Expect(last_subject_sequence=0))
        except WrongLastSequence:
            pass  # stored before

    def request_for(self, stored: StoredDeadLetter) -> tuple[str, StoredEvent]:
        """Build the request to handle a dead letter again. It is stored only where its subject has no message."""
        letter = stored.letter
        again = StoredEvent(
            handler=letter.handler,
            key=letter.key,
            origin=letter.origin,
            subject=letter.subject,
            data=letter.data,
            headers=letter.headers,
            attempts=0,
            status="open",
            redrives=letter.redrives + 1,
            partition=letter.partition,
            is_body_omitted=letter.is_body_omitted,
            apart=letter.apart,
        )
        return f"{self._retry_subject('redrive', again.partition)}.{again.redrives}.{again.origin.tokens}", again

    async def _find_letter(self, step: FindDeadLetter) -> DeadLetterRef | None:
        stored = await self.letter(self._letter_subject(step.item))
        return stored.ref if stored is not None else None

    async def _write_letter(self, step: WriteDeadLetter) -> bool:
        item = step.item
        now = _now_text()
        letter = self._event_of(item, "open" if step.behind is None else "behind", step.cause, step.behind, now)
        subject = self._letter_subject(item)
        is_stored = await self._replace(subject, letter, step.revision)
        if is_stored and (waiting := self._waiting.get(item.key or "")) is not None:
            bisect.insort(waiting, (item.sequence, subject))
        return is_stored

    async def _close_letter(self, step: CloseDeadLetter) -> bool:
        subject = self._letter_subject(step.item)
        # Nothing is lost with one that is not the last any more: the server refuses to close it.
        stored = self._read.pop(subject, None)
        if stored is None or stored.revision != step.revision:
            stored = await self.letter(subject)
        if stored is None or stored.revision != step.revision or not await self.close(stored, "done"):
            return False
        waiting = self._waiting.get(step.item.key or "")
        if waiting and waiting[0] == (step.item.sequence, subject):
            waiting.pop(0)
        return True

    async def _next_letter(self, step: NextDeadLetter) -> DeadLetterRef | None:
        # Listed once for many: a key may have thousands of dead letters, and they are asked for one by one.
        waiting = self._waiting.get(step.key)
        while waiting:
            _, subject = waiting[0]
            stored = await self.letter(subject)
            if stored is not None and stored.letter.status != "closed":
                return stored.ref
            waiting.pop(0)
        found = sorted([(each.ref.sequence, each.ref) async for each in self.all_letters(key=step.key)], key=_first)
        if not found:
            self._waiting.pop(step.key, None)
            return None
        self._waiting[step.key] = [(sequence, ref.subject) for sequence, ref in found]
        return found[0][1]

    def forget_letters(self) -> None:
        """Another worker may have written dead letters since they were listed here."""
        self._waiting.clear()

    async def _request_redrive(self, step: RequestRedrive) -> None:
        subject, stored = step.letter.subject, self._read.get(step.letter.subject)
        # A request for one that was closed meanwhile is found to be needless by who gets it.
        if stored is None or stored.revision != step.letter.revision:
            stored = await self.letter(subject)
        if stored is not None and stored.letter.status != "closed":
            await self.request(stored)

    async def _replace(self, subject: str, letter: StoredEvent, revision: int, ttl: float | None = None) -> bool:
        headers = {"Nats-Rollup": "sub"}
        if ttl is not None:
            headers["Nats-TTL"] = f"{int(ttl)}s"
        try:
            await self._publish(subject, letter, headers, Expect(last_subject_sequence=revision))
        except WrongLastSequence:
            return False
        return True

    # ---- retries -----------------------------------------------------------------------------------------------

    async def _find_retry(self, step: FindRetry) -> bool:
        item = step.item
        try:
            # Attempts only grow, so the last one tells.
            subject = f"{self._retry_subject('*')}.{_origin(item).tokens}"
            last = await self.retries.get_message(last_for=subject, direct=False)
            known = StoredEvent.of(last.headers, last.data)
        except (MessageNotFound, ProtocolError):
            return False
        return known.attempts > item.carried and known.redrives == item.redrives

    async def _write_schedule(self, step: WriteSchedule) -> None:
        item = step.item
        due = await self.server_now() + datetime.timedelta(seconds=step.seconds)
        headers = {
            "Nats-Schedule": f"@at {due.isoformat().replace('+00:00', 'Z')}",
            "Nats-Schedule-Target": f"{self._retry_subject('due', item.partition)}.{_origin(item).tokens}",
            # Nothing but the schedule itself removes it.
            "Nats-TTL": "never",
        }
        subject = f"{self._retry_subject('wait')}.{_origin(item).tokens}"
        # A listing shows the error; the traceback is for the dead letter.
        cause = dataclasses.replace(step.cause, trace="") if step.cause is not None else None
        await self._publish(subject, self._event_of(item, "open", cause, None, ""), headers, None)

    async def whole(self, event: StoredEvent) -> StoredEvent:
        """An event that was too large to be stored with what is said of it, with its headers and its body.

        ``is_body_omitted`` says of the result whether it is still without: what was not kept apart is in its stream,
        which may have dropped it since.
        """
        if not event.is_body_omitted:
            return event
        if event.apart is not None:
            subject = separate_body_subject(dead_letter_subject(self.app, event.handler, event.key, event.origin))
            with suppress(MessageNotFound):
                return event.whole((await self.letters.get_message(last_for=subject, direct=False)).data)
        try:
            stored = await (await self.js.stream(event.origin.stream)).get_message(event.origin.sequence)
        except (MessageNotFound, StreamNotFound):
            return event
        # Of a partition the time is that of the copy.
        if event.partition is None and microseconds(stored.timestamp) != event.origin.time_us:
            return event  # the stream was made anew, and this is another event
        return dataclasses.replace(event, data=stored.data, headers=stored.headers, is_body_omitted=False)

    async def _publish(self, subject: str, letter: StoredEvent, headers: dict[str, str], expect: Expect | None) -> None:
        if await self._fits(subject, letter, headers, expect):
            return
        short = await self._keep_apart(letter)
        if not await self._fits(subject, short, headers, expect):
            await self._publish_as_it_is(subject, short.stripped(), headers, expect)

    async def _fits(self, subject: str, letter: StoredEvent, headers: dict[str, str], expect: Expect | None) -> bool:
        """Publish it; False if that is more than the server takes."""
        try:
            await self._publish_as_it_is(subject, letter, headers, expect)
        except JetSparkError as error:
            if not is_too_large(error):
                raise
            return False
        return True

    async def _keep_apart(self, letter: StoredEvent) -> StoredEvent:
        """Store the event by itself, where it is not yet; returns what is left to be said of it."""
        subject = separate_body_subject(dead_letter_subject(self.app, letter.handler, letter.key, letter.origin))
        for block in (letter.as_block(), b"") if letter.apart is None and not letter.is_body_omitted else ():
            try:
                # Without headers of its own, so that it is not larger than the event was when it was published.
                await self.js.publish(subject, block + letter.data)
            except PayloadTooLarge:
                continue
            return dataclasses.replace(letter.shortened(), apart=len(block))
        return letter.shortened()

    async def _drop_apart(self, step: DropSeparateBody) -> None:
        await self.letters.purge(subject=separate_body_subject(self._letter_subject(step.item)))

    async def _publish_as_it_is(
        self, subject: str, letter: StoredEvent, headers: dict[str, str], expect: Expect | None
    ) -> None:
        fields = letter.to_headers()
        fields.update(headers)
        await self.js.publish(subject, letter.data, headers=fields, expect=expect)

    # ---- records -----------------------------------------------------------------------------------------------

    async def _read_parked(self, step: ReadParked) -> ParkedRecord | None:
        try:
            entry = await self.records.get(self.parked_key(step.key))
        except KeyNotFound:
            return None
        fields = json.loads(entry.value)
        # Records of keys that were parked before there was "waiting" have the one event as "first".
        waiting = fields["waiting"] if "waiting" in fields else [fields["first"]]
        return ParkedRecord(fields["head"], entry.revision, tuple(waiting))

    async def _write_parked(self, step: WriteParked) -> bool:
        value = json.dumps({"key": step.key, "head": step.head, "waiting": step.waiting}).encode()
        name = self.parked_key(step.key)
        try:
            if step.revision == 0:
                revision = await self.records.create(name, value)
            else:
                revision = await self.records.update(name, value, revision=step.revision)
        except Conflict:
            return False
        self.parked_revisions[step.key] = revision
        self.parked_names[name] = step.key
        return True

    async def _drop_parked(self, step: DropParked) -> bool:
        try:
            await self.records.purge(self.parked_key(step.key), revision=step.revision, ttl=MARK_TTL_S)
        except Conflict:
            return False
        return True

    def parked_key(self, key: str) -> str:
        return f"parked.{self.handler}.{escape_token(key)}"

    async def _read_attempts(self, step: ReadAttempts) -> AttemptsRecord | None:
        try:
            entry = await self.records.get(self._attempts_key(step.item))
        except KeyNotFound:
            return None
        fields = json.loads(entry.value)
        cause = fields.get("cause")
        return AttemptsRecord(fields["attempts"], FailureCause.from_dict(cause) if cause else None)

    async def _write_attempts(self, step: WriteAttempts) -> None:
        item, name = step.item, self._attempts_key(step.item)
        cause = step.cause.to_dict() if step.cause is not None else None
        value = json.dumps({"attempts": item.attempts, "cause": cause}).encode()
        while True:
            try:
                await self.records.create(name, value, ttl=ATTEMPTS_TTL_S)
                return
            except KeyExists:
                pass
            try:
                entry = await self.records.get(name)
                await self.records.update(name, value, revision=entry.revision, ttl=ATTEMPTS_TTL_S)
                return
            except (KeyNotFound, Conflict):
                continue  # another process has it too, or had

    async def note_not_begun(self, items: Sequence[WorkItem]) -> None:
        """Note of those that have not begun here that they have not, before they are given back.

        An event that was delivered before and has no record is taken for one whose worker died while it ran.
        """
        unbegun = [item for item in items if item.attempts == item.carried]
        for start in range(0, len(unbegun), NOTES_AT_ONCE):
            await asyncio.gather(*(self._note_not_begun(item) for item in unbegun[start : start + NOTES_AT_ONCE]))

    async def _note_not_begun(self, item: WorkItem) -> None:
        # One that was delivered before may have begun then. If there is a record, it knows better.
        value = json.dumps({"attempts": item.carried + (item.delivered > 1), "cause": None}).encode()
        with suppress(KeyExists):
            await self.records.create(self._attempts_key(item), value, ttl=ATTEMPTS_TTL_S)

    async def _drop_attempts(self, step: DropAttempts) -> None:
        await self.records.purge(self._attempts_key(step.item), ttl=MARK_TTL_S)

    def _attempts_key(self, item: WorkItem) -> str:
        return f"attempts.{self.handler}.{_origin(item).tokens}"

    # ---- small steps -------------------------------------------------------------------------------------------

    def _letter_subject(self, item: WorkItem) -> str:
        return dead_letter_subject(self.app, self.handler, item.key, _origin(item))

    def _retry_subject(self, what: str, partition: int | None = None) -> str:
        return f"retry.{self.app}.{self.handler}.{what}" + ("" if partition is None else f"-{partition}")

    def _event_of(
        self, item: WorkItem, status: DeadLetterStatus, cause: FailureCause | None, behind: int | None, now: str
    ) -> StoredEvent:
        original: StoredEvent | None = item.original
        message = item.message
        if original is not None:
            subject, headers, data = original.subject, original.headers, original.data
        else:
            subject, headers, data = message.subject, readable(message.raw_headers), message.data
            if item.partition is not None:
                subject = copied_from(message.raw_headers, subject).subject
                headers = without_server_headers(headers)
        return StoredEvent(
            handler=self.handler,
            key=item.key,
            origin=_origin(item),
            subject=subject,
            data=data,
            headers=headers,
            attempts=item.attempts,
            status=status,
            cause=cause,
            behind=behind,
            redrives=item.redrives,
            failed=now,
            partition=item.partition,
            apart=original.apart if original is not None else None,
        )


def _first(pair: tuple[int, DeadLetterRef]) -> int:
    return pair[0]


def _origin(item: WorkItem) -> Origin:
    if item.original is not None:
        return item.original.origin
    message, metadata = item.message, item.message.metadata
    if item.partition is None:
        return Origin(metadata.stream, metadata.stream_sequence, microseconds(metadata.timestamp))
    # The time is that of the copy: the server does not say when the original was stored.
    source = copied_from(message.raw_headers, message.subject)
    return Origin(source.stream, source.sequence, microseconds(metadata.timestamp))


def _now_text() -> str:
    return utc_now().isoformat(timespec="milliseconds").replace("+00:00", "Z")
