"""Messages that end the process while they are read: each is identified, its deaths counted, and finally not read.

Code of the application runs while a message is read: upcasts, ``__post_init__``, a ``key=`` that is a function. When it
ends the process (a segmentation fault, a kernel that is out of memory), the server delivers the message to the next
process, which ends as well. A record has to be written before the message is read, and one for each message would cost
as much as handling it. So only messages that were delivered before are suspected:

==========================  ==========================================================================================
delivered for the first     read without a record
time
delivered before            one record names all messages that were pulled together; it is purged when they are read
named by a record that is   read alone: the record names this message and no other, with one death more
still there
as many deaths as the       not read: the dead letter has the message as it is
handler has attempts
==========================  ==========================================================================================

So an innocent neighbour is suspected, and never counted: only a message that is read alone adds to its own deaths. The
first delivery and the one in a group count as two, whatever the policy says, and it takes a third to know which one it
was.

A record does not prove a death: its reader may be alive. A living reader rewrites its record three times per lease. A
reader that finds another reader's record, naming a message that it is about to read itself, polls this record until it
is purged or rewritten, or has stayed unchanged for a whole lease. Only then does it mark the record as dead, by a
compare and set, and only marked records count. A reader that was cut off for a whole lease overwrites the mark when
its connection is back. No clocks are compared and nothing expires on the server: after an outage of the server every
reader has a whole lease to show that it is alive.

A marked record is purged when suspected messages are read after its own were acknowledged; any record expires after a
week.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from jetspark.app.handlers.retry import Reject
from jetspark.app.patience import UNLIMITED_S, patiently
from jetspark.errors import Conflict, JetSparkError, KeyNotFound

if TYPE_CHECKING:
    from jetspark.aio.kv import KeyValue
    from jetspark.jetstream.info import ConsumerInfo

__all__ = ["LEASE_S", "CrashRecords", "ReaderDied", "spans_of"]

# The first delivery, which has no record, and the one of the group.
GROUP_DEATHS = 2
# Fewer do not tell a message from its neighbours.
MIN_DEATHS = 3
# As long as records of attempts: the next delivery has to wait for a worker, and they may be away for a weekend.
RECORD_TTL_S = 7 * 86400.0
# The time that the tombstone of a purged record stays in the bucket.
TOMBSTONE_TTL_S = 3600.0
# A living reader may be silent for this long: its event loop is blocked, or its connection is lost.
LEASE_S = 5.0
RENEWALS = 3
# Polls within a lease. They are counted instead of seconds, because a process that was stopped has polled nothing.
LOOKS = 30
# A purge that takes longer continues in the background.
CLOSE_S = 5.0


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

    created: str
    """Creation time of the consumer: a re-created consumer may have other messages under the same sequences."""
    spans: _Spans
    deaths: int
    is_dead: bool = False

    @classmethod
    def of(cls, value: bytes) -> _Record:
        fields = json.loads(value)
        spans = tuple((first, last) for first, last in fields["spans"])
        return cls(fields["created"], spans, fields["deaths"], fields.get("dead", False))

    def encoded(self) -> bytes:
        fields = {"created": self.created, "spans": self.spans, "deaths": self.deaths, "dead": self.is_dead}
        return json.dumps(fields).encode()

    def names(self, sequence: int) -> bool:
        return any(first <= sequence <= last for first, last in self.spans)

    def overlaps(self, other: _Record) -> bool:
        return any(low <= last and first <= high for first, last in self.spans for low, high in other.spans)


class CrashRecords:
    """The records of one consumer, for one reading of its suspected messages.

    Call :meth:`load`, then :meth:`died` and :meth:`announce` before each message is read, and :meth:`close` or
    :meth:`end` at the end.

    Args:
        records: A bucket with ``limit_marker_ttl_s``.
        handler: The handler's name.
        where: Distinguishes the consumers of the handler.
        attempts: Deaths after which a message is not read any more; fewer than three count as three.
        suspected: The messages to be read now: first and last of each run.
        lease_s: For how long a living reader may be silent.
    """

    def __init__(
        self,
        records: KeyValue,
        handler: str,
        where: str,
        attempts: int,
        suspected: Iterable[tuple[int, int]],
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        self._records, self._prefix, self._lease_s = records, f"reading.{handler}.{where}", lease_s
        self._limit = max(MIN_DEATHS, attempts)
        self._group = _Record("", tuple(suspected), GROUP_DEATHS)
        self._left: list[_Record] = []
        self._key, self._revision = f"{self._prefix}.{secrets.token_hex(8)}", 0
        self._record: _Record | None = None
        """The record to store; the server has confirmed it if ``_is_stored``."""
        self._is_stored = False
        self._lock = asyncio.Lock()
        self._is_over = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def load(self, info: ConsumerInfo) -> None:
        """Read the records of dead readers; wait for up to a lease while a reader may be either alive or dead."""
        self._group = self._group._replace(created=info.created.isoformat() if info.created is not None else "")
        silent = await self._silent()
        for _ in range(LOOKS):
            if not silent:
                break
            await asyncio.sleep(self._lease_s / LOOKS)
            now = await self._silent()
            silent = {key: now[key] for key, (_, revision) in silent.items() if key in now and now[key][1] == revision}
        for key, (record, revision) in silent.items():
            with suppress(Conflict):  # its reader rewrote it, or another reader marked it
                await self._records.update(
                    key, record._replace(is_dead=True).encoded(), revision=revision, ttl=RECORD_TTL_S
                )
        await self._take_in(info.ack_floor.stream_sequence)

    def deaths(self, sequence: int) -> int:
        """Number of processes that may have ended while they read the message; 0 if no record names it."""
        return max((record.deaths for record in self._left if record.names(sequence)), default=0)

    def died(self, sequence: int) -> ReaderDied | None:
        """The error in place of the event if the message must not be read; else None."""
        deaths = self.deaths(sequence)
        return ReaderDied(deaths) if deaths >= self._limit else None

    async def announce(self, sequence: int) -> None:
        """Store that this message is read next: alone, or as one of the group."""
        deaths, group = self.deaths(sequence), self._group
        record = group._replace(spans=((sequence, sequence),), deaths=deaths + 1) if deaths else group
        if self._is_stored and record == self._record:
            await asyncio.sleep(0)  # lets the renewal run
            return
        self._record, self._is_stored = record, False
        if self._keeper is None:  # started before the write: if the answer is lost, the record may be stored
            self._keeper = asyncio.create_task(self._keep())
            _keepers.add(self._keeper)
            self._keeper.add_done_callback(_keepers.discard)
        await self._write()
        self._is_stored = True

    def end(self) -> None:
        """Purge the record in the background, as soon as the server answers: its messages are read, or given back."""
        self._is_over.set()

    async def close(self) -> None:
        """Purge the record, and wait for that for up to ``CLOSE_S``."""
        self.end()
        if self._keeper is not None:
            await asyncio.wait([self._keeper], timeout=CLOSE_S)

    # ---- its own record ----------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Renew the record until its messages are read; then purge it."""
        with suppress(JetSparkError):  # an error that cannot pass: the connection was closed
            while not self._is_over.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._lease_s / RENEWALS):
                        await self._is_over.wait()
                        break
                await patiently(self._write, patience_s=UNLIMITED_S)
            await patiently(partial(self._records.purge, self._key, ttl=TOMBSTONE_TTL_S), patience_s=UNLIMITED_S)

    async def _write(self) -> None:
        async with self._lock:
            while self._record is not None:
                value, self._revision, revision = self._record.encoded(), 0, self._revision
                with suppress(Conflict):
                    if revision:
                        written = await self._records.update(self._key, value, revision=revision, ttl=RECORD_TTL_S)
                    else:
                        written = await self._records.create(self._key, value, ttl=RECORD_TTL_S)
                    self._revision = written
                    return
                # Another reader purged or marked it, or the answer to an earlier write was lost.
                with suppress(KeyNotFound):
                    self._revision = (await self._records.get(self._key)).revision

    # ---- other readers' records ---------------------------------------------------------------------------------

    async def _stored(self) -> dict[str, tuple[_Record, int]]:
        found = await self._records.snapshot([f"{self._prefix}.*"])
        return {key: (_Record.of(entry.value), entry.revision) for key, entry in found.items()}

    async def _silent(self) -> dict[str, tuple[_Record, int]]:
        """Records without a mark that name a message to be read now."""
        stored, group = await self._stored(), self._group
        return {
            key: (record, revision)
            for key, (record, revision) in stored.items()
            if not record.is_dead and record.created == group.created and record.overlaps(group)
        }

    async def _take_in(self, floor: int) -> None:
        """Remember the marked records; purge duplicates and those whose messages are acknowledged."""
        seen = set[_Spans]()
        # One for each message, however many processes have ended: a snapshot has at most 1024 keys.
        for key, (record, revision) in sorted((await self._stored()).items(), key=lambda each: -each[1][0].deaths):
            if not record.is_dead:
                continue
            is_done = all(last <= floor for _, last in record.spans)
            if is_done or record.created != self._group.created or record.spans in seen:
                with suppress(Conflict):
                    await self._records.purge(key, revision=revision, ttl=TOMBSTONE_TTL_S)
            else:
                seen.add(record.spans)
                self._left.append(record)


_keepers: set[asyncio.Task[None]] = set()
"""Strong references: the event loop holds weak ones only."""


def spans_of(sequences: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run of sequences that follow each other."""
    spans: list[tuple[int, int]] = []
    for sequence in sorted(sequences):
        if spans and spans[-1][1] + 1 == sequence:
            spans[-1] = spans[-1][0], sequence
        else:
            spans.append((sequence, sequence))
    return spans
