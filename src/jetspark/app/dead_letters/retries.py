"""Scheduled retries: listing them, having them tried at once, and cancelling them.

A long wait is a server schedule, one message on ``retry.<app>.<handler>.wait.<origin>``, which removes itself when it
fires. Both changes here replace that message by one that is due now, if it is still the last of its subject. So a retry
that fires in the meantime is not changed, and no retry is tried twice.

A cancelled retry is marked, and the worker that gets it writes a dead letter in place of trying again. So at any moment
the event has one owner, and its key stays parked until the dead letter is redriven or discarded.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from jetspark.app.dead_letters.listing import DeadLetterFilter
from jetspark.app.stored_events import PREFIX, StoredEvent
from jetspark.app.topology.names import retry_stream
from jetspark.core.headers import last_value
from jetspark.errors import MessageNotFound, ProtocolError, WrongLastSequence
from jetspark.jetstream.publishing import Expect

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.aio.stream import Stream

__all__ = ["RETRY_FIELDS", "RetryChanges", "StoredRetry", "cancel_retries", "each_retry", "hurry_retries"]

RETRY_FIELDS = ("error", "fingerprint", "key", "sequence", "subject")
# Schedules that are replaced at a time, each with its event in memory.
AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class StoredRetry:
    """A scheduled retry and its place in the retry stream; without the event's own headers and body."""

    event: StoredEvent
    due: datetime.datetime | None
    """None where the schedule cannot be read: something else has written it."""
    subject: str
    revision: int


@dataclass(frozen=True, slots=True)
class RetryChanges:
    """How many scheduled retries were changed."""

    changed: int = 0
    missed: int = 0
    """Retries that fired or were changed in the meantime."""


async def each_retry(js: JetStream, app: str, chosen: DeadLetterFilter) -> AsyncIterator[StoredRetry]:
    """The retries that are scheduled, in the order in which they were stored; none that are stored from now on."""
    stream = await js.stream(retry_stream(app))
    up_to = stream.cached_info.state.last_sequence
    sequence = dict(chosen.where).get("sequence", "*")
    consumer = stream.ordered_consumer(f"retry.{app}.{chosen.handler or '*'}.wait.*.{sequence}.*", headers_only=True)
    if not up_to:
        return
    async with aclosing(cast("AsyncGenerator[Any, None]", consumer.messages(stored_only=True))) as messages:
        async for message in messages:
            revision = message.metadata.stream_sequence
            if revision > up_to:
                return
            with suppress(ProtocolError):  # another program's message
                event = StoredEvent.described(message.raw_headers)
                if chosen.accepts_event(event):
                    yield StoredRetry(event, _due(message.raw_headers), message.subject, revision)


async def hurry_retries(js: JetStream, app: str, chosen: DeadLetterFilter) -> RetryChanges:
    """Have scheduled retries tried now, with the attempts they have left."""
    return await _replace_all(js, app, chosen, {})


async def cancel_retries(js: JetStream, app: str, chosen: DeadLetterFilter) -> RetryChanges:
    """Give scheduled retries up: a worker of their handler writes their dead letters."""
    return await _replace_all(js, app, chosen, {f"{PREFIX}Cancelled": "true"})


async def _replace_all(js: JetStream, app: str, chosen: DeadLetterFilter, mark: dict[str, str]) -> RetryChanges:
    stream, changed, missed = await js.stream(retry_stream(app)), 0, 0
    chunk: list[StoredRetry] = []

    async def replace() -> None:
        nonlocal changed, missed
        results = await asyncio.gather(*(_replace(js, stream, each, mark) for each in chunk))
        changed, missed = changed + results.count(True), missed + results.count(False)
        chunk.clear()

    async for retry in each_retry(js, app, chosen):
        chunk.append(retry)
        if len(chunk) == AT_ONCE:
            await replace()
    await replace()
    return RetryChanges(changed, missed)


async def _replace(js: JetStream, stream: Stream, retry: StoredRetry, mark: dict[str, str]) -> bool:
    """Replace a schedule by one that is due now; False if it has changed since it was listed."""
    try:
        message = await stream.get_message(retry.revision, direct=False)
    except MessageNotFound:
        return False
    headers = message.headers.copy()
    # A time that has passed by the server's clock, wherever this program's clock is.
    headers["Nats-Schedule"] = f"@at {message.timestamp.isoformat().replace('+00:00', 'Z')}"
    headers.update(mark)
    try:
        await js.publish(
            retry.subject, message.data, headers=headers, expect=Expect(last_subject_sequence=retry.revision)
        )
    except WrongLastSequence:
        return False
    return True


def _due(block: bytes | None) -> datetime.datetime | None:
    with suppress(ValueError):
        return datetime.datetime.fromisoformat((last_value(block, "Nats-Schedule") or "").removeprefix("@at "))
    return None
