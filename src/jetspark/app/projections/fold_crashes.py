"""Events that end the process while projections read or fold them: found by bisection, and not folded any more.

A worker keeps one record for as long as it has the lease, and removes it at an orderly end. If a worker finds one, the
process before died, for whatever reason. A note before every event would cost a write each; so only after a death, and
only up to the stream's end of that moment, the record has what is about to be done:

===========================  =========================================================================================
no record                    folded without notes
a record                     folded in pieces as they come, each noted while its events are read, or applied by a
                             projection
named by a note that is      folded alone, and counted
still there
as many deaths as            applying it parks its keys; where reading it ended the process, it has a dead letter
:data:`FATAL_DEATHS`
===========================  =========================================================================================

So an innocent neighbour is suspected, and never counted. Something else that ends the process, such as a handler in it,
would have to do so twice while this very event is alone. One reader has the lease, and nobody else writes the record;
readers of partitions have none.
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
"""Instead of a projection's name: events are decoded, and projections tell their keys."""

# The death that nobody noted, and the one of the piece.
GROUP_DEATHS = 2
# Two more, alone: one may have had another reason.
FATAL_DEATHS = 4
# How long the mark of a removed record stays in the bucket.
MARK_TTL_S = 3600.0


class FoldDied(Exception):
    """Processes have ended while they read or folded this event, so that is not done again."""

    def __init__(self, deaths: int) -> None:
        super().__init__(f"{deaths} processes ended while they read or applied this event")
        self.deaths = deaths

    def __reduce__(self) -> tuple[type[FoldDied], tuple[int]]:
        return type(self), (self.deaths,)


class _Note(NamedTuple):
    """What was about to be done, by the engine of ``engine``."""

    engine: str
    projection: str
    first: int
    last: int
    deaths: int


class FoldCrashes:
    """The record of one worker's projections, while it has their lease."""

    def __init__(self, records: KeyValue, worker: str) -> None:
        self._records, self._key = records, f"folding.{escape_token(worker)}"
        self._left: list[_Note] = []
        self._now: dict[str, _Note] = {}
        self._created = ""
        self._is_suspicious = False
        self._until: int | None = None

    async def begin(self) -> None:
        """Find out whether the process before died, and leave the record that says so of this one."""
        with suppress(KeyNotFound):
            fields = json.loads((await self._records.get(self._key, direct=False)).value)
            self._created, self._left = fields["created"], [_Note(*each) for each in fields["notes"]]
            self._is_suspicious = True
        await self._store()

    async def end(self) -> None:
        """This process has not died. If this fails, the next one is careful without need."""
        with suppress(JetSparkError):
            await self._records.purge(self._key, ttl=MARK_TTL_S)

    def open(self, beginning: FoldPosition, last_sequence: int, floor: int) -> None:
        """A reading begins at ``floor``; notes of another stream, and of what is stored by now, mean nothing."""
        if self._created != beginning.created:
            self._created, self._left = beginning.created, []
        self._left = [note for note in self._left if note.last > floor]
        if self._until is None:
            self._until = last_sequence if self._is_suspicious else 0

    def is_careful(self, sequence: int) -> bool:
        """Whether what is done with this event has to be noted."""
        return self._until is not None and sequence <= self._until

    def is_named(self, sequences: Sequence[int]) -> bool:
        """Whether a process has died with one of them in its hands."""
        return any(note.first <= each <= note.last for note in self._left for each in sequences)

    @asynccontextmanager
    async def noted(self, engine: str, projection: str, sequences: Sequence[int]) -> AsyncIterator[FoldDied | None]:
        """Note events, which are alone if they are named, for as long as the block lasts; why it must not be done."""
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
        self._now[engine] = _Note(engine, projection, first, last, deaths + 1 if deaths else GROUP_DEATHS)
        await self._store()
        try:
            yield None
        finally:
            del self._now[engine]
        await self._store()

    async def _store(self) -> None:
        fields = {"created": self._created, "notes": [*self._left, *self._now.values()]}
        await self._records.put(self._key, json.dumps(fields).encode())
