"""Storing keys that were folded from their history, in a bucket that a live engine also writes.

**Beside a live engine.** A stored key is folded at least as far as the engine is. If the engine was faster, the
compare-and-set fails; the key is folded to the engine's position, and stored then. The engine's own compare-and-set on
the old revision fails in the same way, and the engine loads the key again.

A parked key needs more: the engine skips its events without a write, so its position may be beyond events that the
repaired state lacks. So a repair writes keys and the engine's position in one atomic batch, with a position no further
than the states. The engine notices, moves back to it, and reads the skipped events
(:mod:`jetspark.app.projections.positions`). After some lost races the engines are paused for a moment.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from jetspark.aio.clock import rng as loop_rng
from jetspark.aio.steps import ProcedureRunner
from jetspark.app.extents import Extent
from jetspark.app.projections.positions import FoldPosition, StoredPosition, position_change, read_position
from jetspark.app.replay.comparison import KeyContent, change_to, reaches
from jetspark.app.replay.history import History, MemoryFold
from jetspark.app.replay.live_bucket import paused_engines, store_atomically
from jetspark.app.replay.replay_records import ReplayJob
from jetspark.errors import BatchInDoubt, Conflict, WrongLastSequence
from jetspark.state.changes import NOTHING, Change, Current, Outcome
from jetspark.state.rounds import MAX_ROUNDS, store_round
from jetspark.state.store import StateBucket, open_bucket

if TYPE_CHECKING:
    from jetspark.app.projections.projection_spec import ProjectionSpec

__all__ = ["KeyRepair"]

# After this many lost races live engines are paused: they write their position many times a second.
ROUNDS_BESIDE = 3
# Longer after each lost race.
PAUSE_S = 0.02
# Keys that are repaired at a time: a batch has room for a thousand messages.
MAX_TOGETHER = 500
MAX_NAMED = 20


class _WantedKeys:
    """The wanted and the current content of keys: a :class:`~jetspark.state.rounds.KeysInHand`."""

    def __init__(self, spec: ProjectionSpec, fold: MemoryFold) -> None:
        self._spec, self._fold = spec, fold
        self._current: dict[str, Current] = {}
        self.position = 0
        """The position of the bucket's engine."""

    def unsure(self) -> list[str]:
        return []

    def reload(self, keys: Iterable[str], loaded: Mapping[str, Current]) -> None:
        self._current = {key: loaded.get(key, NOTHING) for key in keys}

    def take_changes(self) -> list[Change]:
        wanted = (
            change_to(self._spec, key, self._fold.content(key), current, position=self.position)
            for key, current in self._current.items()
        )
        return [change for change in wanted if change is not None]

    def commit(self, changes: Sequence[Change], outcome: Outcome) -> None:
        self._current = {}  # keys in conflict are folded further, and loaded again


class KeyRepair:
    """Stores the keys of a fold that is in memory."""

    def __init__(self, history: History, job: ReplayJob, extent: Extent, fold: MemoryFold) -> None:
        self._history, self._job, self._extent, self._fold = history, job, extent, fold
        self._spec = history.spec
        self._keys = _WantedKeys(history.spec, fold)
        self._runner = ProcedureRunner(history.js)
        self._rng = loop_rng()
        self._bucket: StateBucket

    async def store(self) -> None:
        """Store keys until each one has its wanted content.

        Raises:
            Conflict: Another writer changed keys in every round.
        """
        record = self._job.record
        self._bucket = await self._runner.run(open_bucket(record.bucket))
        written: set[str] = set()
        keys: tuple[str, ...] = tuple(sorted(self._fold.keys))
        async with AsyncExitStack() as stack:
            for attempt in range(MAX_ROUNDS):
                if attempt == ROUNDS_BESIDE:
                    owner = f"{record.id}-{secrets.token_hex(4)}"
                    await stack.enter_async_context(paused_engines(self._job.records, self._spec.name, owner))
                keys = await self._store_once(keys, written)
                record.changed = len(written)
                if not keys:
                    return
                await self._job.save()
                await asyncio.sleep(self._rng.uniform(0.0, PAUSE_S * attempt))
        raise Conflict(self._bucket.name, keys[:MAX_NAMED])

    async def _store_once(self, keys: tuple[str, ...], written: set[str]) -> tuple[str, ...]:
        """One round; returns the keys in conflict."""
        fold, is_repair = self._fold, self._job.record.kind == "repair"
        if is_repair:
            # Fold to the end of the stream before the bucket is read. The engine is hardly ever beyond that, so no
            # event has to be read between the read of the bucket and the write, and the engine has little time to
            # write.
            await fold.advance(self._history, self._extent, max(fold.reached, await self._history.last()))
        # The position first: keys that are loaded after it have all events up to it.
        stored = await self._runner.run(read_position(self._bucket))
        current = await self._runner.run(self._bucket.load_all(keys))
        if not is_repair:
            # A key that the engine has parked since the survey needs a repair.
            parked = {key for key, state in current.items() if KeyContent.of_current(state).parked is not None}
            self._job.record.parked += len(parked)
            keys = tuple(key for key in keys if key not in parked)
        last = max(fold.reached, stored.sequence or 0)
        await fold.advance(self._history, self._extent, last, reaches(current, last))
        self._keys.position = stored.sequence or 0
        self._keys.reload(keys, current)
        changes = self._keys.take_changes()
        if not is_repair:
            conflicts = (await self._runner.run(store_round(self._bucket, self._keys))).conflicts
        else:
            conflicts = await self._store_with_position(changes, stored, last)
        written |= {change.key for change in changes} - set(conflicts)
        return conflicts

    async def _store_with_position(self, changes: list[Change], stored: StoredPosition, last: int) -> tuple[str, ...]:
        """Store keys with a position no further than their states; returns the keys in conflict."""
        for begin in range(0, len(changes), MAX_TOGETHER):
            if stored.position is None:
                beginning = FoldPosition.beginning(self._extent.stream, (await self._history.facts()).created)
                position = beginning._replace(version=self._spec.version)
            else:
                position = stored.position
            some = [*changes[begin : begin + MAX_TOGETHER], position_change(position.repaired(last), stored.revision)]
            try:
                await store_atomically(self._history.js, self._bucket, some)
            except (WrongLastSequence, BatchInDoubt):
                return tuple(change.key for change in changes[begin:])
            if begin + MAX_TOGETHER < len(changes):
                stored = await self._runner.run(read_position(self._bucket))
        return ()
