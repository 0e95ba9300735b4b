"""Storage of a handler's worker besides the events: dead letters, parked keys, schedules, attempts.

It performs the steps of :mod:`jetspark.app.handlers.handler_steps`.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import datetime
import json
from collections.abc import Sequence
from contextlib import suppress

from jetspark.aio.jetstream import JetStream
from jetspark.aio.kv import KeyValue
from jetspark.aio.stream import Stream
from jetspark.app.clock import microseconds, utc_now
from jetspark.app.handlers.dead_letter_box import TOMBSTONE_TTL_S, DeadLetterBox
from jetspark.app.handlers.handler_steps import (
    AttemptsRecord,
    CloseDeadLetter,
    DropAttempts,
    DropSeparateBody,
    FindDeadLetter,
    FindRetry,
    ReadAttempts,
    StepAnswer,
    StoreStep,
    WriteAttempts,
    WriteDeadLetter,
    WriteSchedule,
)
from jetspark.app.handlers.lanes import WorkItem
from jetspark.app.handlers.partitions import copied_from, without_server_headers
from jetspark.app.server_clock import server_clock
from jetspark.app.stored_events import (
    DeadLetterRef,
    DeadLetterStatus,
    FailureCause,
    Origin,
    StoredEvent,
    dead_letter_subject,
    separate_body_subject,
)
from jetspark.app.topology.names import dead_letter_stream, handler_bucket, retry_stream
from jetspark.core.headers import readable
from jetspark.errors import (
    Conflict,
    KeyExists,
    KeyNotFound,
    MessageNotFound,
    ProtocolError,
)

__all__ = ["HandlerStore"]

# A record of attempts is read at the next delivery, and there may be no worker for days.
ATTEMPTS_TTL_S = 7 * 86400.0
# Records that are written at a time when many events are returned.
RECORDS_AT_ONCE = 100


class HandlerStore(DeadLetterBox):
    """The dead letters, schedules and records of one handler."""

    def __init__(
        self, js: JetStream, app: str, handler: str, dead_letters: Stream, retries: Stream, records: KeyValue
    ) -> None:
        super().__init__(js, app, handler, dead_letters, records)
        self.retries, self.records = retries, records

    @classmethod
    async def open(cls, js: JetStream, app: str, handler: str) -> HandlerStore:
        """Raises StreamNotFound when the application was not applied to this server."""
        dead_letters, retries = await asyncio.gather(js.stream(dead_letter_stream(app)), js.stream(retry_stream(app)))
        return cls(js, app, handler, dead_letters, retries, await js.kv(handler_bucket(app)))

    async def server_now(self) -> datetime.datetime:
        """The time by the server's clock, which several workers compare."""
        return await server_clock(self.js, self.retries.name).now()

    async def perform(self, step: StoreStep) -> StepAnswer:
        match step:
            case FindDeadLetter():
                return await self._find_dead_letter(step)
            case WriteDeadLetter():
                return await self._write_dead_letter(step)
            case CloseDeadLetter():
                return await self._close_dead_letter(step)
            case FindRetry():
                return await self._find_retry(step)
            case ReadAttempts():
                return await self._read_attempts(step)
            case WriteSchedule():
                await self._write_schedule(step)
            case WriteAttempts():
                await self._write_attempts(step)
            case DropAttempts():
                await self._drop_attempts(step)
            case DropSeparateBody():
                await self._drop_separate_body(step)
            case _:
                return await super().perform(step)
        return None

    # ---- dead letters -----------------------------------------------------------------------------------------------

    async def _find_dead_letter(self, step: FindDeadLetter) -> DeadLetterRef | None:
        stored = await self.read(self._dead_letter_subject(step.item))
        return stored.ref if stored is not None else None

    async def _write_dead_letter(self, step: WriteDeadLetter) -> bool:
        item = step.item
        now = _now_text()
        dead_letter = self._event_of(item, "open" if step.behind is None else "behind", step.cause, step.behind, now)
        subject = self._dead_letter_subject(item)
        is_stored = await self._replace(subject, dead_letter, step.revision)
        if is_stored and (waiting := self._waiting.get(item.key or "")) is not None:
            bisect.insort(waiting, (item.sequence, subject))
        return is_stored

    async def _close_dead_letter(self, step: CloseDeadLetter) -> bool:
        subject = self._dead_letter_subject(step.item)
        # The cached one may be outdated: then the server refuses to close it.
        stored = self._cached.pop(subject, None)
        if stored is None or stored.revision != step.revision:
            stored = await self.read(subject)
        if stored is None or stored.revision != step.revision or not await self.close(stored, "done"):
            return False
        waiting = self._waiting.get(step.item.key or "")
        if waiting and waiting[0] == (step.item.sequence, subject):
            waiting.pop(0)
        return True

    # ---- retries -----------------------------------------------------------------------------------------------

    async def _find_retry(self, step: FindRetry) -> bool:
        item = step.item
        try:
            # Attempts only grow, so the last message has the most.
            subject = f"{self.retry_subject('*')}.{_origin(item).tokens}"
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
            "Nats-Schedule-Target": f"{self.retry_subject('due', item.partition)}.{_origin(item).tokens}",
            # Only the schedule itself removes it.
            "Nats-TTL": "never",
        }
        subject = f"{self.retry_subject('wait')}.{_origin(item).tokens}"
        # A listing shows the error; the traceback is for the dead letter.
        cause = dataclasses.replace(step.cause, trace="") if step.cause is not None else None
        await self._publish(subject, self._event_of(item, "open", cause, None, ""), headers, None)

    async def _drop_separate_body(self, step: DropSeparateBody) -> None:
        await self.dead_letters.purge(subject=separate_body_subject(self._dead_letter_subject(step.item)))

    # ---- records -----------------------------------------------------------------------------------------------

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
                continue  # another process changed or removed it in between

    async def record_not_begun(self, items: Sequence[WorkItem]) -> None:
        """Record that these items were not started here, before they are returned to the server.

        A redelivered event without a record counts as one whose worker died while it ran.
        """
        unbegun = [item for item in items if item.attempts == item.carried]
        for start in range(0, len(unbegun), RECORDS_AT_ONCE):
            await asyncio.gather(*(self._record_not_begun(item) for item in unbegun[start : start + RECORDS_AT_ONCE]))

    async def _record_not_begun(self, item: WorkItem) -> None:
        # A redelivered event may have been started before. An existing record is more exact.
        value = json.dumps({"attempts": item.carried + (item.delivered > 1), "cause": None}).encode()
        with suppress(KeyExists):
            await self.records.create(self._attempts_key(item), value, ttl=ATTEMPTS_TTL_S)

    async def _drop_attempts(self, step: DropAttempts) -> None:
        await self.records.purge(self._attempts_key(step.item), ttl=TOMBSTONE_TTL_S)

    def _attempts_key(self, item: WorkItem) -> str:
        return f"attempts.{self.handler}.{_origin(item).tokens}"

    # ---- small steps -------------------------------------------------------------------------------------------

    def _dead_letter_subject(self, item: WorkItem) -> str:
        return dead_letter_subject(self.app, self.handler, item.key, _origin(item))

    def _event_of(
        self, item: WorkItem, status: DeadLetterStatus, cause: FailureCause | None, behind: int | None, now: str
    ) -> StoredEvent:
        original = item.original
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


def _origin(item: WorkItem) -> Origin:
    if item.original is not None:
        return item.original.origin
    message, metadata = item.message, item.message.metadata
    if item.partition is None:
        return Origin(metadata.stream, metadata.stream_sequence, microseconds(metadata.timestamp))
    # The time is that of the copy: a copy does not name the time of the original.
    source = copied_from(message.raw_headers, message.subject)
    return Origin(source.stream, source.sequence, microseconds(metadata.timestamp))


def _now_text() -> str:
    return utc_now().isoformat(timespec="milliseconds").replace("+00:00", "Z")
