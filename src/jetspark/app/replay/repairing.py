"""Keys that were folded from their history, on their way into a bucket that a live engine writes, too.

**The live engine goes on meanwhile.** What is stored here is folded at least as far as the engine is. Where the engine
was quicker, the compare-and-set fails, the keys are folded on to where the engine is now, and stored then; the engine's
own compare-and-set on the old revision fails likewise, and it loads the key again. Of a parked key that is not enough:
the engine passes its events by without a write, so it may be beyond some that a repaired state has not. So a repair
writes keys and the engine's position in one atomic batch, the position no further than the states; the engine notices,
goes back there, and reads what it passed by (:mod:`jetspark.app.projections.positions`). After some lost races
the engine is asked to stand still for a moment.
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
from jetspark.app.replay.contents import KeyContent, change_to, reaches
from jetspark.app.replay.history import History, MemoryFold
from jetspark.app.replay.places import standstill, store_together
from jetspark.app.replay.replay_records import RecordKeeper
from jetspark.errors import BatchInDoubt, Conflict, WrongLastSequence
from jetspark.state.changes import NOTHING, Change, Current, Outcome
from jetspark.state.rounds import MAX_ROUNDS, store_round
from jetspark.state.store import StateBucket

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app.projections.projection_spec import ProjectionSpec

__all__ = ["KeyRepair"]

# After this many lost races live engines are asked to stand still: they write their position many times a second.
ROUNDS_BESIDE = 3
# Longer after each lost race.
PAUSE_S = 0.02
# Keys that are repaired at a time: a batch has room for a thousand messages.
MAX_TOGETHER = 500
MAX_NAMED = 20


class _WantedKeys:
    """What keys should hold, and what they have: :class:`~jetspark.state.rounds.KeysInHand`."""

    def __init__(self, spec: ProjectionSpec, fold: MemoryFold) -> None:
        self._spec, self._fold = spec, fold
        self._current: dict[str, Current] = {}
        self.position = 0
        """How far the engine of the bucket is."""

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
        self._current = {}  # those in conflict are folded on, and looked at again


class KeyRepair:
    """See the module."""

    def __init__(
        self,
        js: JetStream,
        bucket: StateBucket,
        history: History,
        extent: Extent,
        spec: ProjectionSpec,
        keeper: RecordKeeper,
        fold: MemoryFold,
    ) -> None:
        self._js, self._bucket, self._history, self._extent, self._spec = js, bucket, history, extent, spec
        self._keeper, self._fold = keeper, fold
        self._keys = _WantedKeys(spec, fold)
        self._runner = ProcedureRunner(js)
        self._rng = loop_rng()

    async def store(self) -> None:
        """Until every key is right.

        Raises:
            Conflict: Others write the keys faster than this.
        """
        record = self._keeper.record
        written: set[str] = set()
        keys: tuple[str, ...] = tuple(sorted(self._fold.keys))
        async with AsyncExitStack() as stack:
            for attempt in range(MAX_ROUNDS):
                if attempt == ROUNDS_BESIDE:
                    owner = f"{record.id}-{secrets.token_hex(4)}"
                    await stack.enter_async_context(standstill(self._keeper.records, self._spec.name, owner))
                keys = await self._store_once(keys, written)
                record.changed = len(written)
                if not keys:
                    return
                await self._keeper.note()
                await asyncio.sleep(self._rng.uniform(0.0, PAUSE_S * attempt))
        raise Conflict(self._bucket.name, keys[:MAX_NAMED])

    async def _store_once(self, keys: tuple[str, ...], written: set[str]) -> tuple[str, ...]:
        """One round; returns the keys that have to be looked at again."""
        fold, is_repair = self._fold, self._keeper.record.kind == "repair"
        if is_repair:
            # To the end of the stream before anything is looked at: the engine is hardly ever beyond then, nothing has
            # to be read between the look and the write, and the engine has little time to write in between.
            await fold.advance(self._history, self._extent, max(fold.reached, await self._history.last()))
        # The position first: what is loaded after it has everything up to it.
        noted = await self._runner.run(read_position(self._bucket))
        current = await self._runner.run(self._bucket.load_all(keys))
        if not is_repair:
            # The engine has parked it meanwhile; then it needs a repair.
            parked = {key for key, state in current.items() if KeyContent.of_current(state).parked is not None}
            self._keeper.record.parked += len(parked)
            keys = tuple(key for key in keys if key not in parked)
        last = max(fold.reached, noted.sequence or 0)
        await fold.advance(self._history, self._extent, last, reaches(current, last))
        self._keys.position = noted.sequence or 0
        self._keys.reload(keys, current)
        changes = self._keys.take_changes()
        if not is_repair:
            conflicts = (await self._runner.run(store_round(self._bucket, self._keys))).conflicts
        else:
            conflicts = await self._store_together(changes, noted, last)
        written |= {change.key for change in changes} - set(conflicts)
        return conflicts

    async def _store_together(self, changes: list[Change], noted: StoredPosition, last: int) -> tuple[str, ...]:
        """Keys, and the position no further than they are; returns those that others were quicker with."""
        for begin in range(0, len(changes), MAX_TOGETHER):
            if noted.position is None:
                beginning = FoldPosition.beginning(self._extent.stream, (await self._history.info()).created)
                position = beginning._replace(version=self._spec.version)
            else:
                position = noted.position
            some = [*changes[begin : begin + MAX_TOGETHER], position_change(position.repaired(last), noted.revision)]
            try:
                await store_together(self._js, self._bucket, some)
            except (WrongLastSequence, BatchInDoubt):
                return tuple(change.key for change in changes[begin:])
            if begin + MAX_TOGETHER < len(changes):
                noted = await self._runner.run(read_position(self._bucket))
        return ()
