"""Verification of a projection: its bucket against a fresh fold of its history, under live traffic.

The *boundary* is a sequence up to which the bucket has all events. Each key is compared at the boundary, or at the
sequence of its value where the live engine is further. So no engine has to pause, and the answer is the same at any
time.

The history and the bucket are each read once, whatever the number of keys: states of the fold are in memory up to a
limit, and beyond that in a temporary file (:mod:`jetspark.app.replay.scratch_states`). A key that seems to differ may
have been written since the history was read. It is read once more, and its state at the boundary is continued with the
events since; these are read once for all such keys.

Another engine compares keys where it folds them, and returns counts, digests and the first differences.

The preview of a rebuild is the same comparison, for a bucket that another version of the fold may have made.
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
from jetspark.app.replay.comparison import ComparedKeys, Difference, ParkedKey, reaches
from jetspark.app.replay.history import FoldEngine, FoldOptions, History, OnEvents, ignore_events, spec_of
from jetspark.app.replay.live_bucket import await_position, stored_position
from jetspark.app.replay.scratch_states import ScratchStates
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
    from jetspark.lake.reading import ArchiveRoot

__all__ = [
    "FreshStates",
    "RebuildPreview",
    "Verification",
    "VerifyOptions",
    "check_is_complete",
    "contents_of",
    "preview_rebuild",
    "read_states",
    "verify",
    "verify_bucket",
]

# Keys that are read once more, at a time.
RECHECK_KEYS = 10_000
# Differences in ``str()`` of a preview.
MAX_SHOWN = 20

FreshStates = Callable[[int], Awaitable[Mapping[str, Current]]]
"""Returns the states of all keys at a boundary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Options of :func:`verify`."""

    to_seq: int | None = None
    """The boundary; by default the end of the stream, or the position of the bucket if that stays behind."""
    wait_s: float = 10.0
    """How long the live engine may take to reach the boundary."""
    rate: float | None = None
    """Events read each second, at most."""
    cache_keys: int = CACHE.keys
    """States in memory, at most. Others are in a temporary file, in the folder of ``TMPDIR``."""
    cache_bytes: int = CACHE.bytes
    """Bytes of states in memory, at most."""

    def __post_init__(self) -> None:
        if self.to_seq is not None:
            whole("to_seq", self.to_seq, instead="or None for the end of the stream")
        seconds("wait_s", self.wait_s)
        whole("cache_keys", self.cache_keys)
        whole("cache_bytes", self.cache_bytes)


@dataclass(slots=True, kw_only=True)
class Verification:
    """The result of comparing a projection's bucket with a fresh fold of its history."""

    projection: str
    bucket: str
    version: int
    boundary: int
    """The bucket has all events up to this sequence, by its own position."""
    last: int
    """The last sequence of the stream when the comparison began."""
    keys: int = 0
    """Keys with a value, and parked keys."""
    parked: int = 0
    parked_keys: list[ParkedKey] = field(default_factory=list)
    """The first thousand."""
    events: int = 0
    unreadable: int = 0
    """Events that cannot be decoded; every engine leaves them out."""
    digest: str = ""
    """The digest of the bucket."""
    expected_digest: str = ""
    """The digest of the fresh fold; equal to ``digest`` if nothing differs."""
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
    options: VerifyOptions | None = None,
    *,
    on_events: OnEvents = ignore_events,
    fresh: FreshStates | None = None,
    engine: FoldEngine | None = None,
    archive: ArchiveRoot | str | None = None,
) -> Verification:
    """Compare the bucket of a projection with a fresh fold of its history, which is read once.

    Args:
        archive: The root of an archive with the stream: older events come from there.
        on_events: Called with each portion of events that was read.
        fresh: Returns the states at a boundary, where they exist already; by default they are folded here.
        engine: Reads, folds and compares in place of this process; it does not support ``rate``.

    Raises:
        DataLoss: The stream no longer has its first events, so the expected states are unknown; or the projection was
            folded without events that the stream had dropped before they were read.
        UsageError: The bucket was made by another version of the projection, or has not reached ``to_seq``.
    """
    app, options = app.spec, options or VerifyOptions()
    fold = FoldOptions.of(options.rate, engine, on_events, archive)
    spec = spec_of(app, projection, js)
    place = check_version(spec, (await find_bucket(await open_records(js, app.name), spec)).ref)
    position = (await stored_position(js, place.bucket)).position
    if position is not None:
        if position.version:
            check_version(spec, place._replace(version=position.version))
        check_is_complete(position, spec.name, app.stream, place.bucket)
    history = await History.open(js, app, spec, place.bucket, archive=fold.archive)
    boundary = await _boundary(history, place.bucket, options)
    limits = CacheLimits(options.cache_keys, options.cache_bytes)
    return await verify_bucket(history, place.bucket, boundary, fold, limits=limits, fresh=fresh)


def check_is_complete(position: FoldPosition, projection: str, stream: str, bucket: str) -> None:
    """
    Raises:
        DataLoss: The bucket was folded without events that the stream had dropped before they were read.
    """
    if position.missed is not None:
        first, last = position.missed
        missed = (
            f"projection {projection!r} (bucket {bucket}) was folded without what the stream had dropped between "
            f"{first} and {last}: its state is incomplete, and cannot be made complete unless the stream is restored"
        )
        raise DataLoss(stream, first, last + 1, missed)


async def _boundary(history: History, bucket: str, options: VerifyOptions) -> int:
    """The sequence up to which a bucket can be compared.

    Raises:
        UsageError: The bucket has not reached ``to_seq``.
    """
    last, to_seq = await history.last_event(), options.to_seq
    boundary = last if to_seq is None else min(to_seq, last)
    reached = await await_position(history.js, bucket, boundary, options.wait_s)
    if reached is None or reached >= boundary:
        return boundary
    if to_seq is not None:
        raise UsageError(
            f"to_seq={to_seq}: bucket {bucket} has reached only sequence {reached}: does a worker run? Expected "
            f"{reached} or less, or no to_seq"
        )
    return reached


async def verify_bucket(
    history: History,
    bucket: str,
    boundary: int,
    fold: FoldOptions,
    *,
    limits: CacheLimits = CACHE,
    fresh: FreshStates | None = None,
    is_any_version: bool = False,
) -> Verification:
    """Compare a bucket, which has all events up to a boundary, with a fresh fold.

    With ``is_any_version``, another version of the fold may have made the bucket.
    """
    spec, extent = history.spec, await history.whole()
    version = None if is_any_version else spec.version
    if fold.engine is not None:
        found = await fold.engine.compare(bucket, boundary, version)
        if found.difference_count:
            await history.whole(boundary)  # events that were removed during the read are not the bucket's fault
        return _verification(spec, bucket, boundary, extent, found)
    states = None if fresh is None else await fresh(boundary)
    with ScratchStates(spec, limits) as scratch:
        comparison = _BucketComparison(history, bucket, extent, boundary, version, scratch)
        if states is None:
            await comparison.fold(fold)
        else:
            scratch.begin_all(states)
        await comparison.compare()
        found = await comparison.recheck(fold)
    return _verification(spec, bucket, boundary, extent, found)


def _verification(
    spec: ProjectionSpec, bucket: str, boundary: int, extent: Extent, compared: ComparedKeys
) -> Verification:
    return Verification(
        projection=spec.name,
        bucket=bucket,
        version=spec.version,
        boundary=boundary,
        last=extent.last,
        keys=compared.found.keys,
        parked=compared.parked,
        parked_keys=[each._replace(key=spec.key_text(each.key)) for each in compared.parked_keys],
        events=compared.events,
        unreadable=compared.unreadable,
        digest=str(compared.found),
        expected_digest=str(compared.expected),
        difference_count=compared.difference_count,
        differences=[each._replace(key=spec.key_text(each.key)) for each in compared.differences],
    )


async def read_states(js: JetStream, bucket: str) -> dict[str, Current]:
    """A snapshot of every key of a bucket, to compare another engine's bucket with it."""
    runner = ProcedureRunner(js)
    view = await runner.run(open_bucket(bucket))
    return dict(contents_of(view, (await runner.run(snapshot(view))).values()))


class _BucketComparison:
    """The comparison of a bucket's keys with a fold of their events, in scratch states."""

    def __init__(
        self,
        history: History,
        bucket: str,
        extent: Extent,
        boundary: int,
        version: int | None,
        scratch: ScratchStates,
    ) -> None:
        self._history, self._bucket, self._extent, self._scratch = history, bucket, extent, scratch
        self._boundary, self._version = boundary, version
        self._runner = ProcedureRunner(history.js)
        self._found = ComparedKeys()

    async def fold(self, options: FoldOptions) -> None:
        """Fold the history up to the boundary."""
        part = await self._history.between(self._extent, 1, self._boundary)
        async with aclosing(self._history.read(part, pace=options.pace)) as portions:
            async for events in portions:
                self._scratch.apply(events.rows)
                self._found.events += len(events.rows)
                self._found.unreadable += len(events.failures)
                await options.on_events(events)

    async def compare(self) -> None:
        """Read the bucket. Keys that are written during the read may be missing; :meth:`recheck` reads them again."""
        view = await self._runner.run(open_bucket(self._bucket))
        state = view.info.state
        scan = view.scan(max(1, state.first_sequence), state.last_sequence)
        async with aclosing(self._runner.pieces(scan)) as pieces:
            async for piece in pieces:
                self._scratch.compare(dict(contents_of(view, piece)), self._version)
                await asyncio.sleep(0)

    async def recheck(self, options: FoldOptions) -> ComparedKeys:
        """Read keys that seem to differ once more, continue their states to the bucket's, and add up all keys.

        A key may have been written between the reads of the history and of the bucket, or of two keys.
        """
        end = await self._read_again()
        if end > self._boundary:
            part = await self._history.between(self._extent, self._boundary + 1, end)
            async with aclosing(self._history.read(part, pace=options.pace)) as portions:
                async for events in portions:
                    self._scratch.continue_with(events.rows)
                    await options.on_events(events)
        for keys in self._scratch.items():
            self._found.add_equal((each.key, each.content) for each in keys if each.is_equal)
            others = ComparedKeys()
            for key, content, _, found in sorted(each for each in keys if not each.is_equal):
                others.add(key, content, found, self._version)
            self._found.include(others)
            await asyncio.sleep(0)
        return self._found

    async def _read_again(self) -> int:
        """Read the keys that seem to differ once more; returns the last event that one of them has."""
        end = self._boundary
        for keys in self._scratch.differing(RECHECK_KEYS):
            current = await self._runner.run(load(self._bucket, keys))
            self._scratch.compare({key: current.get(key, NOTHING) for key in keys}, self._version)
            end = max([end, *reaches(current, self._boundary).values()])
        return end


def contents_of(view: BucketView, messages: Iterable[Any]) -> Iterator[tuple[str, Current]]:
    """The projection's keys and their content in messages of its bucket; keys of the engines are left out."""
    for message in messages:
        key = message.subject[len(view.prefix) :]
        if not is_reserved(key):
            yield key, current_of(stored_delivery(message.subject, delivery(message).sequence, message))


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildPreview:
    """The differences between the bucket in use and a rebuild."""

    old_version: int
    """The version of the fold that made the bucket; 0 if unknown."""
    extent: Extent
    """The range that a rebuild reads."""
    comparison: Verification
    """``found`` is the bucket in use, ``expected`` the result of a rebuild."""

    def to_dict(self) -> dict[str, Any]:
        reads = {"stream": self.extent.stream, "first": self.extent.first, "last": self.extent.last}
        return {"old_version": self.old_version, "reads": reads, **self.comparison.to_dict()}

    def __str__(self) -> str:
        found = self.comparison
        lines = [
            f"rebuild of projection {found.projection} version {found.version}; bucket {found.bucket} in use is of "
            f"version {self.old_version or '?'}, at sequence {found.boundary}",
            f"reads {self.extent}: all of it is there",
            f"would change {found.difference_count} keys; the bucket has {found.keys}"
            if found.difference_count
            else f"would change none of {found.keys} keys",
        ]
        lines += [f"  {each.key}: {each.found} -> {each.expected}" for each in found.differences[:MAX_SHOWN]]
        if found.difference_count > MAX_SHOWN:
            lines.append(f"  and {found.difference_count - MAX_SHOWN} more")
        return "\n".join(lines)


async def preview_rebuild(
    js: JetStream,
    app: HasSpec,
    projection: str,
    *,
    rate: float | None = None,
    engine: FoldEngine | None = None,
    archive: ArchiveRoot | str | None = None,
) -> RebuildPreview:
    """Compare the bucket in use with a fresh fold by this code; nothing is written.

    Args:
        rate: Events read each second, at most.
        engine: Reads, folds and compares in place of this process; it does not support ``rate``.
        archive: The root of an archive with the stream: older events come from there.

    Raises:
        DataLoss: The stream no longer has its first events.
    """
    app, fold = app.spec, FoldOptions.of(rate, engine, archive=archive)
    spec = spec_of(app, projection, js)
    bucket = (await find_bucket(await open_records(js, app.name), spec)).ref.bucket
    history = await History.open(js, app, spec, bucket, archive=fold.archive, may_be_other_stream=True)
    extent = await history.whole()
    position = (await stored_position(js, bucket)).position
    boundary = 0 if position is None else min(position.sequence, extent.last)
    found = await verify_bucket(history, bucket, boundary, fold, is_any_version=True)
    version = 0 if position is None else position.version
    return RebuildPreview(old_version=version, extent=extent, comparison=found)
