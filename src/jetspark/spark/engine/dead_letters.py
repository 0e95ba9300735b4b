"""Dead letters of messages that projections cannot read, and of rows that cannot be written, as a procedure."""

from __future__ import annotations

from collections.abc import Sequence

from jetspark.app.clock import utc_now
from jetspark.app.projections.unreadable_events import HANDLER
from jetspark.app.stored_events import Origin, StoredEvent, dead_letter_subject, is_too_large
from jetspark.core import headers as header_block
from jetspark.core.headers import Headers
from jetspark.errors import JetSparkError, PayloadTooLarge, WrongLastSequence
from jetspark.publish.steps import Connect, Procedure, PublishEach
from jetspark.spark.engine.rows import Unreadable
from jetspark.state.patience import Persistence

__all__ = ["letter_of", "store_letters", "write_letters"]

# Dead letters sent at a time.
BATCH_LETTERS = 500


def letter_of(stream: str, message: Unreadable, *, failed: str = "") -> StoredEvent:
    """The dead letter of a message that could not be read."""
    return StoredEvent(
        handler=HANDLER,
        key=None,
        origin=Origin(stream, message.sequence, message.time_us),
        subject=message.subject,
        data=message.data,
        headers=_headers(message),
        attempts=1,
        status="open",
        cause=message.cause,
        failed=failed,
    )


def write_letters(app: str, stream: str, messages: Sequence[Unreadable], *, patience_s: float) -> Procedure[int]:
    """Store dead letters of messages; see :func:`store_letters`. A message that is too large stays in its stream."""
    failed = utc_now().isoformat(timespec="milliseconds").replace("+00:00", "Z")
    letters = [letter_of(stream, message, failed=failed) for message in messages]
    return store_letters(app, letters, patience_s=patience_s)


def store_letters(
    app: str, letters: Sequence[StoredEvent], *, patience_s: float, has_bodies_elsewhere: bool = True
) -> Procedure[int]:
    """Store dead letters that do not exist yet; returns their number.

    Each dead letter has a subject of its own, which is written only while it is empty. So repeating the call, in any
    engine, stores nothing twice.

    Args:
        has_bodies_elsewhere: A body that is too large for a dead letter may be omitted, because a stream has it.

    Raises:
        JetSparkError: The server refuses a dead letter, or there was no progress for ``patience_s`` seconds.
    """
    written = 0
    for start in range(0, len(letters), BATCH_LETTERS):
        persistence = Persistence(patience_s)
        yield from persistence.progress()
        left = list(letters[start : start + BATCH_LETTERS])
        while left:
            stored, left, reason = yield from _send(app, left, has_bodies_elsewhere)
            written += stored
            if left and reason is not None:
                yield from persistence.pause(reason)
    return written


def _send(
    app: str, letters: list[StoredEvent], may_shorten: bool
) -> Procedure[tuple[int, list[StoredEvent], Exception | None]]:
    """Number of stored dead letters, those to send again, and the error that caused it."""
    try:
        yield Connect()
        errors: list[Exception | None] = yield PublishEach([_item(app, letter) for letter in letters])
    except PayloadTooLarge:
        # The largest is the cause: a message with the headers of a dead letter may exceed the server's limit.
        largest = max(letters, key=lambda letter: len(letter.data))
        if largest.is_body_omitted or not may_shorten:
            raise
        short = largest.shortened()
        return 0, [short if letter is largest else letter for letter in letters], None
    except JetSparkError as error:
        if not error.may_pass:
            raise
        return 0, letters, error
    stored = 0
    left: list[StoredEvent] = []
    reason: Exception | None = None
    for letter, found in zip(letters, errors, strict=True):
        if found is None:
            stored += 1
        elif isinstance(found, WrongLastSequence):
            continue  # stored before, by this or another engine
        elif is_too_large(found) and may_shorten and not letter.is_body_omitted:
            left.append(letter.shortened())
        elif isinstance(found, JetSparkError) and found.may_pass:
            left.append(letter)
            reason = found
        else:
            raise found
    return stored, left, reason


def _item(app: str, letter: StoredEvent) -> tuple[str, bytes, Headers]:
    fields = letter.to_headers()
    fields["Nats-Expected-Last-Subject-Sequence"] = "0"
    return dead_letter_subject(app, letter.handler, letter.key, letter.origin), letter.data, fields


def _headers(message: Unreadable) -> Headers:
    if not message.headers:
        return Headers()
    if not isinstance(message.headers, bytes):
        return header_block.restored(message.headers)
    return header_block.readable(message.headers)
