"""The timeline of a run: each event that it has taken, and the decision of that step, as they were stored.

The record of a run describes each of its last steps: which event was taken, when, which timers were set and ended, and
how many events the step has stored. Those are in the stream directly behind the record of that step, since all of it
was one batch, and each step has the sequence of the record before it. So they are read by their sequences, without a
search.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.contracts.envelope import Decoded, decode
from jetspark.app.workflows.command_events import CommandSent
from jetspark.app.workflows.workflow_spec import RunRecord, StepRecord
from jetspark.errors import ContractViolation, MessageNotFound

if TYPE_CHECKING:
    from jetspark.aio.stream import Stream
    from jetspark.jetstream.info import StoredMessage

__all__ = ["read_timeline"]

AT_A_TIME = 64
"""Messages that are read at a time."""


async def read_timeline(
    stream: Stream, catalogue: Catalogue, record: RunRecord, revision: int
) -> AsyncIterator[dict[str, object]]:
    """The steps of a run, oldest first, as far as it remembers them; see :meth:`WorkflowRuns.timeline`.

    Args:
        revision: The revision of the record.
    """
    described = {note.sequence for note in record.steps}
    steps = [StepRecord(sequence) for sequence in record.events if sequence not in described]
    steps += [*record.steps[:-1], *(msgspec.structs.replace(each, revision=revision) for each in record.steps[-1:])]
    wanted = {sequence for note in steps for sequence in (note.sequence, *note.stored)}
    messages = await _read(stream, sorted(wanted - {0}))
    for note in steps:
        taken = messages.get(note.sequence)
        if taken is None and not note.revision:
            continue  # the stream no longer has the event, and the record does not describe the step
        yield _shown_step(note, None if taken is None else _Stored(taken, catalogue).shown, messages, catalogue)


async def _read(stream: Stream, sequences: Iterable[int]) -> dict[int, StoredMessage]:
    """The messages with these sequences that the stream still has."""
    found: dict[int, StoredMessage] = {}
    places = asyncio.Semaphore(AT_A_TIME)

    async def read_one(sequence: int) -> None:
        async with places:
            try:
                found[sequence] = await stream.get_message(sequence)
            except MessageNotFound:
                return

    tasks = [asyncio.create_task(read_one(sequence)) for sequence in sequences]
    try:
        await asyncio.gather(*tasks)  # raises one error, where a group of tasks would raise a group of errors
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
    return found


def _shown_step(
    note: StepRecord, taken: Mapping[str, object] | None, messages: Mapping[int, StoredMessage], catalogue: Catalogue
) -> dict[str, object]:
    nothing = {"sequence": note.sequence, "time": None, "type": None, "id": None, "data": None}
    fields = {**(taken or nothing), "fired": note.fired, "by_hand": note.by_hand, "decided": None}
    if note.revision:
        stored = [_Stored(messages[each], catalogue) for each in note.stored if each in messages]
        fields["decided"] = {
            "time": _time(note.time),
            "status": note.status,
            "reason": note.reason,
            "events": [each.shown for each in stored if each.command is None],
            "commands": [each.command for each in stored if each.command is not None],
            "timers": {name: _time(due) for name, due in note.timers.items()},
            "cancels": list(note.cancels),
        }
    return fields


class _Stored:
    """An event in the stream."""

    def __init__(self, message: StoredMessage, catalogue: Catalogue) -> None:
        self._message = message
        self._decoded: Decoded | None = None
        self._problem = ""
        try:
            self._decoded = decode(message.subject, message.data, message.headers, catalogue)
        except ContractViolation as error:
            self._problem = f"cannot be read: {error}"

    @property
    def shown(self) -> dict[str, object]:
        decoded = self._decoded
        return {
            "sequence": self._message.sequence,
            "time": _time(self._message.timestamp),
            "type": None if decoded is None else decoded.type,
            "id": None if decoded is None else decoded.id,
            "data": self._problem if decoded is None else msgspec.to_builtins(decoded.event),
        }

    @property
    def command(self) -> dict[str, object] | None:
        """The command, if the event stores one."""
        if self._decoded is None or not isinstance(self._decoded.event, CommandSent):
            return None
        sent = self._decoded.event
        return {
            "sequence": self._message.sequence,
            "id": self._decoded.id,
            "name": sent.name,
            "command": sent.command,
            "fields": sent.fields,
            "is_awaited": sent.is_awaited,
        }


def _time(moment: datetime.datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")
