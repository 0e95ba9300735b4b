"""Verifying a projection: its bucket against a fresh fold of its history, while live traffic goes on.

There is one boundary: a sequence up to which the bucket says that it has everything. Each key is compared at that
boundary, or where the live engine is beyond it already, at the sequence that its value says; so nothing has to stand
still, and the answer is the same whenever it is asked.

The history is read once, and the bucket is read once, however many keys there are: the states of the fold are in memory
up to a limit, and beyond that in a temporary file (:mod:`jetspark.app.replay.scratch_states`). A key that seems to
differ is read once more before it is reported: it may have been written since the history was read. Its state at the
boundary is continued with its events since the boundary; those events are read once for all such keys.

Another engine compares keys where it folds them, and returns counts, digests and the first differences.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jetspark.aio.steps import ProcedureRunner
from jetspark.app.extents import Extent
from jetspark.app.projections.bucket_refs import check_version, find_bucket, open_records
from jetspark.app.projections.live_states import CACHE, CacheLimits
from jetspark.app.projections.positions import FoldPosition
from jetspark.app.projections.state_header import is_reserved
from jetspark.app.replay.compared import ComparedKeys, ParkedKey
from jetspark.app.replay.contents import Difference, reaches
from jetspark.app.replay.engines import FoldEngine, check_no_rate
from jetspark.app.replay.history import History, OnEvents, spec_of, told_nobody
from jetspark.app.replay.places import await_position, noted_position
from jetspark.app.replay.scratch_states import ScratchStates
from jetspark.app.stream_history import ReadingRate
from jetspark.core.numbers import seconds, whole
from jetspark.errors import DataLoss, UsageError
from jetspark.state.changes import NOTHING, Current, current_of
from jetspark.state.deliveries import delivery
from jetspark.state.lookup import stored_delivery
from jetspark.state.store import load
from jetspark.state.tables import BucketView, open_bucket, snapshot

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app.projections.projection_spec import ProjectionSpec
    from jetspark.app.spec import HasSpec

__all__ = [
    "FreshStates",
    "Verification",
    "check_is_complete",
    "contents_of",
    "read_states",
    "verify",
    "verify_bucket",
]

# Keys that are read once more, at a time.
SETTLE_KEYS = 10_000
# How long a live engine may take to reach the end that the stream had when this began.
WAIT_S = 10.0

FreshStates = Callable[[int], Awaitable[Mapping[str, Current]]]


@dataclass(slots=True, kw_only=True)
class Verification:
    """What a projection's bucket was compared with, and how it differs."""

    projection: str
    bucket: str
    version: int
    boundary: int
    """The bucket has all events up to this one, or says so."""
    last: int
    """The end that the stream had."""
    keys: int = 0
    """That have a value, or are parked."""
    parked: int = 0
    parked_keys: list[ParkedKey] = field(default_factory=list)
    """The first thousand."""
    events: int = 0
    unreadable: int = 0
    """Events that no engine can read, and every engine leaves out."""
    digest: str = ""
    """Of the bucket."""
    expected_digest: str = ""
    """Of the fresh fold; the same where nothing differs."""
    difference_count: int = 0
    differences: list[Difference] = field(default_factory=list)
    """The first thousand."""

    @property
    def is_equal(self) -> bool:
        return not self.difference_count

    def to_dict(self) -> dict[str, Any]:
        return {
            "projection": self.projection,
            "bucket": self.bucket,
            "version": self.version,
            "boundary": self.boundary,
            "last": self.last,
            "keys": self.keys,
            "parked": self.parked,
            "parked_keys": [each._asdict() for each in self.parked_keys],
            "events": self.events,
            "unreadable": self.unreadable,
            "digest": self.digest,
            "expected_digest": self.expected_digest,
            "equal": self.is_equal,
            "difference_count": self.difference_count,
            "differences": [each._asdict() for each in self.differences],
        }

    def __str__(self) -> str:
        behind = f", {self.last - self.boundary} behind the stream" if self.last > self.boundary else ""
        head = (
            f"projection {self.projection} version {self.version}, bucket {self.bucket}: {self.keys} keys "
            f"({self.parked} parked) at sequence {self.boundary}{behind}"
        )
        if self.is_equal:
            return f"{head}: equal to its history, {self.digest}"
        named = len(self.differences)
        listed = f"; the first {named} are listed" if named < self.difference_count else ""
        return f"{head}: {self.difference_count} keys differ from its history{listed}"


async def verify(
    js: JetStream,
    app: HasSpec,
    projection: str,
    *,
    to_seq: int | None = None,
    wait_s: float = WAIT_S,
    rate: float | None = None,
    cache_keys: int = CACHE.keys,
    cache_bytes: int = CACHE.bytes,
    on_events: OnEvents = told_nobody,
    fresh: FreshStates | None = None,
    engine: FoldEngine | None = None,
) -> Verification:
    """Compare the bucket of a projection with a fresh fold of its history, which is read once.

    Args:
        to_seq: The boundary; without, the end of the stream, or how far the bucket is if it does not get there.
        wait_s: How long the live engine may take to get there.
        rate: Events read each second, at most.
        cache_keys, cache_bytes: States kept in memory, at most; the others are in a temporary file without a name, in
            the folder that ``TMPDIR`` says.
        on_events: Is told what was read.
        fresh: Returns the states at a boundary, where somebody has them; by default they are folded here.
        engine: Reads, folds and compares in place of this process; it has no ``rate``.

    Raises:
        DataLoss: The beginning of the stream is gone, so nobody can tell what the bucket should have; or the projection
            was folded without events that the stream had dropped before they were read.
        UsageError: The bucket was made by another version of the projection; or it has not got to ``to_seq``.
    """
    app = app.spec
    check_no_rate(rate, engine)
    if to_seq is not None:
        whole("to_seq", to_seq, instead="or None for the end of the stream")
    seconds("wait_s", wait_s)
    limits = CacheLimits(whole("cache_keys", cache_keys), whole("cache_bytes", cache_bytes))
    pace = ReadingRate(rate)
    spec = spec_of(app, projection, js)
    place = check_version(spec, (await find_bucket(await open_records(js, app.name), spec)).ref)
    position = (await noted_position(js, place.bucket)).position
    if position is not None:
        if position.version:
            check_version(spec, place._replace(version=position.version))
        check_is_complete(position, spec.name, app.stream, place.bucket)
    history = await History.open(js, app, spec, place.bucket)
    boundary = await _boundary(js, history, place.bucket, to_seq, wait_s)
    return await verify_bucket(
        js,
        history,
        spec,
        place.bucket,
        boundary,
        pace=pace,
        limits=limits,
        on_events=on_events,
        fresh=fresh,
        engine=engine,
    )


def check_is_complete(position: FoldPosition, projection: str, stream: str, bucket: str) -> None:
    """
    Raises:
        DataLoss: A bucket was folded without events that the stream had dropped before they were read.
    """
    if position.missed is not None:
        first, last = position.missed
        missed = (
            f"projection {projection!r} (bucket {bucket}) was folded without what the stream had dropped between "
            f"{first} and {last}: its state is incomplete, and cannot be made complete unless the stream is restored"
        )
        raise DataLoss(stream, first, last + 1, missed)


async def _boundary(js: JetStream, history: History, bucket: str, to_seq: int | None, wait_s: float) -> int:
    """Up to where a bucket can be compared.

    Raises:
        UsageError: It has not got to ``to_seq``.
    """
    last = await history.last_event()
    boundary = last if to_seq is None else min(to_seq, last)
    reached = await await_position(js, bucket, boundary, wait_s)
    if reached is None or reached >= boundary:
        return boundary
    if to_seq is not None:
        raise UsageError(
            f"to_seq={to_seq}: bucket {bucket} has got to sequence {reached} only: does a worker run it? "
            f"Expected {reached} at most, or none"
        )
    return reached


async def verify_bucket(
    js: JetStream,
    history: History,
    spec: ProjectionSpec,
    bucket: str,
    boundary: int,
    *,
    pace: ReadingRate | None = None,
    limits: CacheLimits = CACHE,
    on_events: OnEvents = told_nobody,
    fresh: FreshStates | None = None,
    engine: FoldEngine | None = None,
    is_any_version: bool = False,
) -> Verification:
    """Compare a bucket, which has all events up to a boundary, with a fresh fold.

    With ``is_any_version`` the bucket may be of another version of the fold.
    """
    extent = await history.whole()
    version = None if is_any_version else spec.version
    if engine is not None:
        whole = await engine.compare(bucket, boundary, version)
        if whole.difference_count:
            await history.whole(boundary)  # what was removed while it was read is no fault of the bucket
        return _verification(spec, bucket, boundary, extent, whole)
    states = None if fresh is None else await fresh(boundary)
    comparison = _BucketComparison(js, history, spec, bucket, extent, boundary, version)
    with ScratchStates(spec, limits) as scratch:
        if states is None:
            await comparison.fold(scratch, pace, on_events)
        else:
            scratch.begin_all(states)
        await comparison.compare(scratch)
        whole = await comparison.settle(scratch, pace, on_events)
    return _verification(spec, bucket, boundary, extent, whole)


def _verification(
    spec: ProjectionSpec, bucket: str, boundary: int, extent: Extent, whole: ComparedKeys
) -> Verification:
    return Verification(
        projection=spec.name,
        bucket=bucket,
        version=spec.version,
        boundary=boundary,
        last=extent.last,
        keys=whole.found.keys,
        parked=whole.parked,
        parked_keys=[each._replace(key=spec.key_text(each.key)) for each in whole.parked_keys],
        events=whole.events,
        unreadable=whole.unreadable,
        digest=str(whole.found),
        expected_digest=str(whole.expected),
        difference_count=whole.difference_count,
        differences=[each._replace(key=spec.key_text(each.key)) for each in whole.differences],
    )


async def read_states(js: JetStream, bucket: str) -> dict[str, Current]:
    """What every key of a bucket has, as of one moment; another engine's bucket can be compared with it."""
    runner = ProcedureRunner(js)
    view = await runner.run(open_bucket(bucket))
    return dict(contents_of(view, (await runner.run(snapshot(view))).values()))


class _BucketComparison:
    """The keys of a bucket, and what their events make of them."""

    def __init__(
        self,
        js: JetStream,
        history: History,
        spec: ProjectionSpec,
        bucket: str,
        extent: Extent,
        boundary: int,
        version: int | None,
    ) -> None:
        self._history, self._spec, self._bucket, self._extent = history, spec, bucket, extent
        self._boundary, self._version = boundary, version
        self._runner = ProcedureRunner(js)
        self._whole = ComparedKeys()

    async def fold(self, scratch: ScratchStates, pace: ReadingRate | None, on_events: OnEvents) -> None:
        """Fold the history, up to the boundary."""
        part = await self._history.between(self._extent, 1, self._boundary)
        async with aclosing(self._history.read(part, pace=pace)) as portions:
            async for events in portions:
                scratch.apply(events.rows)
                self._whole.events += len(events.rows)
                self._whole.unreadable += len(events.failures)
                await on_events(events)

    async def compare(self, scratch: ScratchStates) -> None:
        """Read the bucket. Keys that are written meanwhile may not come, and are looked at again."""
        view = await self._runner.run(open_bucket(self._bucket))
        state = view.info.state
        scan = view.scan(max(1, state.first_sequence), state.last_sequence)
        async with aclosing(self._runner.pieces(scan)) as pieces:
            async for piece in pieces:
                scratch.compare(dict(contents_of(view, piece)), self._version)
                await asyncio.sleep(0)

    async def settle(self, scratch: ScratchStates, pace: ReadingRate | None, on_events: OnEvents) -> ComparedKeys:
        """Read keys that seem to differ once more, continue their states to what the bucket has, and add up all keys.

        A key may have been written between the reading of the history and of the bucket, or of two keys.
        """
        end = await self._look_again(scratch)
        if end > self._boundary:
            part = await self._history.between(self._extent, self._boundary + 1, end)
            async with aclosing(self._history.read(part, pace=pace)) as portions:
                async for events in portions:
                    scratch.continue_with(events.rows)
                    await on_events(events)
        for keys in scratch.items():
            self._whole.take_equal((each.key, each.content) for each in keys if each.is_equal)
            others = ComparedKeys()
            for key, content, _, found in sorted(each for each in keys if not each.is_equal):
                others.take(key, content, found, self._version)
            self._whole.include(others)
            await asyncio.sleep(0)
        return self._whole

    async def _look_again(self, scratch: ScratchStates) -> int:
        """Read the keys that seem to differ once more; returns how far they are."""
        end = self._boundary
        for keys in scratch.differing(SETTLE_KEYS):
            current = await self._runner.run(load(self._bucket, keys))
            scratch.compare({key: current.get(key, NOTHING) for key in keys}, self._version)
            end = max([end, *reaches(current, self._boundary).values()])
        return end


def contents_of(view: BucketView, messages: Iterable[Any]) -> Iterator[tuple[str, Current]]:
    """Messages of a bucket as keys of the projection with what they have; engines' own notes are left out."""
    for message in messages:
        key = message.subject[len(view.prefix) :]
        if not is_reserved(key):
            yield key, current_of(stored_delivery(message.subject, delivery(message).sequence, message))
