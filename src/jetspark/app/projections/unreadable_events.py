"""Dead letters of messages that projections cannot read. Such a message has no key that could become stuck."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jetspark.aio.jetstream import JetStream
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.app.clock import microseconds, utc_now
from jetspark.app.projections.fold_crashes import FoldDied
from jetspark.app.projections.router import Failure
from jetspark.app.stored_events import FailureCause, Origin, StoredEvent, dead_letter_subject, is_too_large
from jetspark.core.headers import readable
from jetspark.errors import JetSparkError, WrongLastSequence
from jetspark.jetstream.publishing import Expect

__all__ = ["HANDLER", "write_unreadable"]

HANDLER = "projections"
"""The handler name in dead letters of projections."""


async def write_unreadable(js: JetStream, app: str, message: JetStreamMessage, failures: Sequence[Failure]) -> None:
    """Store the dead letter of a message, unless it is stored already. There is one for all projections."""
    metadata = message.metadata
    origin = Origin(metadata.stream, metadata.stream_sequence, microseconds(metadata.timestamp))
    error = failures[0].error
    is_death = isinstance(error, FoldDied)
    cause = FailureCause.of_crash(str(error)) if is_death else FailureCause.of(error, is_transient=False)
    names = ", ".join(sorted({name for failure in failures for name in failure.projections}))
    dead_letter = StoredEvent(
        handler=HANDLER,
        key=None,
        origin=origin,
        subject=message.subject,
        data=message.data,
        headers=readable(message.raw_headers),
        attempts=1,
        status="open",
        cause=dataclasses.replace(cause, message=f"{names}: {cause.message}"),
        failed=utc_now().isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    )
    subject = dead_letter_subject(app, HANDLER, None, origin)
    forms = [dead_letter, dead_letter.shortened(), dead_letter.shortened().stripped()]
    while forms:
        each = forms.pop(0)
        try:
            await js.publish(subject, each.data, headers=each.to_headers(), expect=Expect(last_subject_sequence=0))
        except WrongLastSequence:
            pass  # stored before
        except JetSparkError as error:
            if forms and is_too_large(error):
                continue
            raise
        return
