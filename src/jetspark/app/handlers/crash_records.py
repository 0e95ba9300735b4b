"""Messages that end the process while they are read: told apart from their neighbours, counted, and not read any more.

Code of the application runs while a message is read: upcasts, ``__post_init__``, a ``key=`` that is a function. When it
ends the process (a segmentation fault, a kernel that is out of memory), the server delivers the message to the next
process, which ends as well. A note has to be written before the message is read, and one for each message would cost as
much as handling it. So only messages that were delivered before are suspected:

==========================  ==========================================================================================
delivered for the first     read without a note
time
delivered before            one record names all of those that were pulled together; it is purged when they are read
named by a record that is   read alone: the record names this message and no other, with one death more
still there
as many deaths as the       not read: the dead letter has the message as it is
handler has attempts
==========================  ==========================================================================================

So an innocent neighbour is suspected, and never counted: only a message that is read alone adds to its own deaths. The
first delivery and the one in a group count as two, whatever the policy says, and it takes a third to know which one it
was. A record that was left is purged when suspected messages are read after its own are settled, or after a week.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from jetspark.app.handlers.retry import Reject
from jetspark.errors import Conflict, JetSparkError

if TYPE_CHECKING:
    from jetspark.aio.kv import KeyValue
    from jetspark.jetstream.info import ConsumerInfo

__all__ = ["CrashRecords", "ReaderDied", "spans_of"]

# The delivery before, which nobody noted, and the one of the group.
GROUP_DEATHS = 2
# Fewer do not tell a message from its neighbours.
MIN_DEATHS = 3
# As long as records of attempts: the next delivery has to wait for a worker, and they may be away for a weekend.
RECORD_TTL_S = 7 * 86400.0
# How long the mark of a purged record stays in the bucket.
MARK_TTL_S = 3600.0


class ReaderDied(Reject):
    """Every process that began to read this message has ended, so it is not read any more."""

    def __init__(self, deaths: int) -> None:
        super().__init__(
            f"{deaths} processes ended while they read this event: its upcasts, its __post_init__ or key= ended them. "
            "It was not decoded again; redrive it once the code can read it"
        )
        self.deaths = deaths

    def __reduce__(self) -> tuple[type[ReaderDied], tuple[int]]:
        return type(self), (self.deaths,)


_Spans: TypeAlias = tuple[tuple[int, int], ...]


class _Record(NamedTuple):
    """Messages that a reader was about to read: sequences of the consumer's stream, first and last of each run."""

    spans: _Spans
    deaths: int

    def names(self, sequence: int) -> bool:
        return any(first <= sequence <= last for first, last in self.spans)


class CrashRecords:
    """The records of one consumer, while suspected messages of it are read.

    ``where`` tells consumers of the handler apart; ``suspected`` are the messages to be read now.
    """

    def __init__(
        self, records: KeyValue, handler: str, where: str, attempts: int, suspected: Iterable[tuple[int, int]]
    ) -> None:
        self._records, self._prefix = records, f"reading.{handler}.{where}"
        self._limit = max(MIN_DEATHS, attempts)
        self._group = _Record(tuple(suspected), GROUP_DEATHS)
        self._left: list[_Record] = []
        self._created = ""
        self._named: _Record | None = None
        self._written: tuple[str, int] | None = None

    async def load(self, info: ConsumerInfo) -> None:
        """Take in what readers left that have died; what is settled by now is removed."""
        # A consumer that was re-created may be of a stream that was, and has other messages under the same sequences.
        self._created = info.created.isoformat() if info.created is not None else ""
        floor, seen = info.ack_floor.stream_sequence, set[_Spans]()
        found = []
        for key, entry in (await self._records.snapshot([f"{self._prefix}.*"])).items():
            fields = json.loads(entry.value)
            spans = tuple((first, last) for first, last in fields["spans"])
            found.append((_Record(spans, fields["deaths"]), fields["created"], key, entry.revision))
        # One for each message, however many processes have ended: a snapshot has at most 1024 keys.
        for record, created, key, revision in sorted(found, key=lambda each: -each[0].deaths):
            is_settled = all(last <= floor for _, last in record.spans)
            if is_settled or created != self._created or record.spans in seen:
                with suppress(Conflict):
                    await self._records.purge(key, revision=revision, ttl=MARK_TTL_S)
            else:
                seen.add(record.spans)
                self._left.append(record)

    def deaths(self, sequence: int) -> int:
        """How many processes may have ended while they read it; 0 if it is not suspected more than others."""
        return max((record.deaths for record in self._left if record.names(sequence)), default=0)

    def died(self, sequence: int) -> ReaderDied | None:
        """Why the message must not be read."""
        deaths = self.deaths(sequence)
        return ReaderDied(deaths) if deaths >= self._limit else None

    async def note(self, sequence: int) -> None:
        """Store that this message is read next: alone, or as one of the group."""
        deaths = self.deaths(sequence)
        record = _Record(((sequence, sequence),), deaths + 1) if deaths else self._group
        if record == self._named:
            return
        value = json.dumps({"created": self._created, "spans": record.spans, "deaths": record.deaths}).encode()
        key, revision = self._written or (f"{self._prefix}.{secrets.token_hex(8)}", 0)
        self._written = None  # if the answer is lost, another record is written, and this one says the same
        if revision:
            revision = await self._records.update(key, value, revision=revision, ttl=RECORD_TTL_S)
        else:
            revision = await self._records.create(key, value, ttl=RECORD_TTL_S)
        self._written, self._named = (key, revision), record

    async def close(self) -> None:
        """All of it is read, or given back. If this fails, what is delivered again is read alone."""
        if self._written is not None:
            with suppress(JetSparkError):
                await self._records.purge(self._written[0], ttl=MARK_TTL_S)


def spans_of(sequences: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run of sequences that follow each other."""
    spans: list[tuple[int, int]] = []
    for sequence in sorted(sequences):
        if spans and spans[-1][1] + 1 == sequence:
            spans[-1] = spans[-1][0], sequence
        else:
            spans.append((sequence, sequence))
    return spans
