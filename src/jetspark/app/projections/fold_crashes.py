"""Finds events that crash the process while projections read or fold them, and excludes them.

A worker keeps one record while it has the lease, and removes it at an orderly end. A worker that finds a record knows
that its predecessor died, for whatever reason. Saving every event before it is folded would cost a write each. So the
record names the next events only after a death, and only up to the end of the stream at that time:

===========================  =========================================================================================
no record                    folded without being saved first
a record                     folded in pieces as they arrive; the record names the piece while it is read or applied
named by a left-over entry   folded alone, and the death is counted
:data:`FATAL_DEATHS` deaths  not read or applied again: if reading crashed, a dead letter is written; if applying
                             crashed, its keys become stuck
===========================  =========================================================================================

An innocent event of the same piece is suspected, and then cleared. Another cause, such as a handler in the same
process, would have to end the process twice while exactly this event is folded alone. Only the owner of the lease
writes the record; workers with partitions have no record.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from jetspark.aio.kv import KeyValue
from jetspark.app.projections.positions import FoldPosition
from jetspark.app.topology.names import escape_token
from jetspark.errors import JetSparkError, KeyNotFound

__all__ = ["READING", "FoldCrashes", "FoldDied"]

READING = ""
"""Stands for a projection's name while events are decoded and routed to keys."""

# The first death, before which nothing was saved, and the death with the piece.
GROUP_DEATHS = 2
# Two more with the event alone: one of them may have had another cause.
FATAL_DEATHS = 4
# How long the delete marker of a removed record stays in the bucket.
MARK_TTL_S = 3600.0


class FoldDied(Exception):
    """Several processes ended while they read or folded this event; it is excluded now."""

    def __init__(self, deaths: int) -> None:
        super().__init__(f"{deaths} processes ended while they read or applied this event")
        self.deaths = deaths

    def __reduce__(self) -> tuple[type[FoldDied], tuple[int]]:
        return type(self), (self.deaths,)


class _Entry(NamedTuple):
    """The events that ``engine`` is about to read or apply."""

    engine: str
    projection: str
    first: int
    last: int
    deaths: int


class FoldCrashes:
    """The crash record of one worker's projections."""

    def __init__(self, records: KeyValue, worker: str) -> None:
        self._records, self._key = records, f"folding.{escape_token(worker)}"
        self._left: list[_Entry] = []
        self._now: dict[str, _Entry] = {}
        self._created = ""
        self._is_suspicious = False
        self._until: int | None = None

    async def begin(self) -> None:
        """Load the record of a predecessor that died, and create the record of this process."""
        with suppress(KeyNotFound):
            fields = json.loads((await self._records.get(self._key, direct=False)).value)
            self._created, self._left = fields["created"], [_Entry(*each) for each in fields["notes"]]
            self._is_suspicious = True
        await self._store()

    async def end(self) -> None:
        """Remove the record at an orderly end. If that fails, the next process is only slower for a while."""
        with suppress(JetSparkError):
            await self._records.purge(self._key, ttl=MARK_TTL_S)

    def open(self, beginning: FoldPosition, last_sequence: int, floor: int) -> None:
        """An engine starts after ``floor``: entries of another stream, and of events stored since, are dropped."""
        if self._created != beginning.created:
            self._created, self._left = beginning.created, []
        self._left = [entry for entry in self._left if entry.last > floor]
        if self._until is None:
            self._until = last_sequence if self._is_suspicious else 0

    def is_careful(self, sequence: int) -> bool:
        """True if this event must be saved before it is read or applied."""
        return self._until is not None and sequence <= self._until

    def is_named(self, sequences: Sequence[int]) -> bool:
        """True if a process died while it read or applied one of these events."""
        return any(entry.first <= each <= entry.last for entry in self._left for each in sequences)

    @asynccontextmanager
    async def recorded(self, engine: str, projection: str, sequences: Sequence[int]) -> AsyncIterator[FoldDied | None]:
        """Save the events while the block runs; yields the reason if they must be excluded. Named events come alone."""
        first, last = sequences[0], sequences[-1]
        named = (
            each.deaths
            for each in self._left
            if each.projection == projection and each.first <= first and last <= each.last
        )
        deaths = max(named, default=0)
        if deaths >= FATAL_DEATHS:
            yield FoldDied(deaths)
            return
        self._now[engine] = _Entry(engine, projection, first, last, deaths + 1 if deaths else GROUP_DEATHS)
        await self._store()
        try:
            yield None
        finally:
            del self._now[engine]
        await self._store()

    async def _store(self) -> None:
        fields = {"created": self._created, "notes": [*self._left, *self._now.values()]}
        await self._records.put(self._key, json.dumps(fields).encode())
