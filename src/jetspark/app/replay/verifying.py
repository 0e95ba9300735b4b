"""Verifying a projection: its bucket against a fresh fold of its history, while live traffic goes on.

There is one boundary: a sequence up to which the bucket says that it has everything. Each key is compared at that
boundary, or where the live engine is beyond it already, at the sequence that its value says; so nothing has to stand
still, and the answer is the same whenever it is asked. Keys are taken in slices of their order when there are many,
each with a pass over the history, so memory does not grow with the bucket. Another engine compares keys where it folds
them, and returns counts, digests and the first differences.

A key that seems to differ is read once more before it is reported: it may have been written while the bucket was read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jetspark.aio.steps import ProcedureRunner
from jetspark.app.projections.buckets import check_version, find_place, open_records
from jetspark.app.projections.marks import is_reserved
from jetspark.app.projections.positions import FoldPosition
from jetspark.app.replay.compared import ComparedKeys, ParkedKey
from jetspark.app.replay.contents import Difference, compare, cut_keys, reaches
from jetspark.app.replay.engines import FoldEngine, check_no_rate
from jetspark.app.replay.history import History, MemoryFold, OnEvents, ReadingRate, spec_of, told_nobody
from jetspark.app.replay.places import await_position, noted_position
from jetspark.app.replay.ranges import Extent
from jetspark.core.numbers import seconds, whole
from jetspark.errors import DataLoss, UsageError
from jetspark.state.changes import NOTHING, Current, current_of
from jetspark.state.deliveries import delivery
from jetspark.state.lookup import stored_delivery
from jetspark.state.store import load
from jetspark.state.tables import BucketView, open_bucket, snapshot

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app.application import App
    from jetspark.app.projections.declaring import ProjectionSpec

__all__ = ["SLICE_KEYS", "FreshStates", "Verification", "contents_of", "read_states", "verify", "verify_bucket"]

SLICE_KEYS = 200_000
"""Keys whose states are held at a time, twice."""
# How long a live engine may take to reach the end that the stream had when this began.
WAIT_S = 10.0

ALL_KEYS: tuple[str, str | None] = ("", None)

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
    app: App,
    projection: str,
    *,
    to_seq: int | None = None,
    wait_s: float = WAIT_S,
    rate: float | None = None,
    slice_keys: int = SLICE_KEYS,
    on_events: OnEvents = told_nobody,
    fresh: FreshStates | None = None,
    engine: FoldEngine | None = None,
) -> Verification:
    """Compare the bucket of a projection with a fresh fold of its history.

    Args:
        to_seq: The boundary; without, the end of the stream, or how far the bucket is if it does not get there.
        wait_s: How long the live engine may take to get there.
        rate: Events read each second, at most.
        slice_keys: Keys held in memory at a time.
        on_events: Is told what was read.
        fresh: Returns the states at a boundary, where somebody has them; by default they are folded here.
        engine: Reads, folds and compares in place of this process; it has no ``rate``.

    Raises:
        DataLoss: The beginning of the stream is gone, so nobody can tell what the bucket should have; or the projection
            was folded without events that the stream had dropped before they were read.
        UsageError: The bucket was made by another version of the projection; or it has not got to ``to_seq``.
    """
    check_no_rate(rate, engine)
    if to_seq is not None:
        whole("to_seq", to_seq, instead="or None for the end of the stream")
    seconds("wait_s", wait_s)
    whole("slice_keys", slice_keys)
    pace = ReadingRate(rate)
    spec = spec_of(app, projection, js)
    place = check_version(spec, (await find_place(await open_records(js, app.name), spec)).place)
    position = (await noted_position(js, place.bucket)).position
    if position is not None:
        if position.version:
            check_version(spec, place._replace(version=position.version))
        _check_is_complete(position, spec.name, app.stream, place.bucket)
    history = await History.open(js, app, spec, place.bucket)
    boundary = await _boundary(js, history, place.bucket, to_seq, wait_s)
    return await verify_bucket(
        js,
        history,
        spec,
        place.bucket,
        boundary,
        pace=pace,
        slice_keys=slice_keys,
        on_events=on_events,
        fresh=fresh,
        engine=engine,
    )


def _check_is_complete(position: FoldPosition, projection: str, stream: str, bucket: str) -> None:
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
    slice_keys: int = SLICE_KEYS,
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
    slices = [ALL_KEYS] if states is not None else await _slices(js, bucket, slice_keys)
    whole = ComparedKeys()
    for low, high in slices:
        part = _Slice(js, history, spec, bucket, extent, (low, high), is_small=len(slices) == 1)
        part.version = version
        await part.fold(boundary, pace, on_events, states)
        await part.settle(boundary)
        whole.include(part.compared())
        whole.events, whole.unreadable = part.events, part.unreadable  # each slice reads all of it
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
    return {key: current async for key, current in _entries(js, bucket, is_small=True)}


async def _slices(js: JetStream, bucket: str, size: int) -> Sequence[tuple[str, str | None]]:
    """Ranges of keys that fit memory one by one."""
    if (await (await js.kv(bucket)).stream_info()).state.messages <= size:
        return [ALL_KEYS]
    return cut_keys({key async for key, _ in _entries(js, bucket, is_small=False)}, size)


class _Slice:
    """The keys from one to another: as the bucket has them, and as a fresh fold makes them."""

    def __init__(
        self,
        js: JetStream,
        history: History,
        spec: ProjectionSpec,
        bucket: str,
        extent: Extent,
        keys: tuple[str, str | None],
        *,
        is_small: bool,
    ) -> None:
        self._js, self._history, self._spec, self._bucket, self._extent = js, history, spec, bucket, extent
        self._is_small = is_small
        self.version: int | None = spec.version
        """That all of it has to be of."""
        self._low, self._high = keys
        self._found: dict[str, Current] = {}
        self._fold = MemoryFold(spec, wants=self._wants)
        self._states: Mapping[str, Current] | None = None

    def _wants(self, key: str) -> bool:
        return self._low <= key and (self._high is None or key < self._high)

    async def fold(
        self, boundary: int, pace: ReadingRate | None, on_events: OnEvents, states: Mapping[str, Current] | None
    ) -> None:
        async for key, current in _entries(self._js, self._bucket, is_small=self._is_small):
            if self._wants(key):
                self._found[key] = current
        self._states = states
        if states is not None:
            self._fold.begin_all(states, boundary)
        further = reaches(self._found, boundary)
        await self._fold.advance(self._history, self._extent, boundary, further, pace=pace, on_events=on_events)

    async def settle(self, boundary: int) -> None:
        """Look again at keys that differ: they may have been written between the reading of one and of another."""
        suspects = {each.key for each in self._differences(self._found.keys() | self._fold.keys)}
        if not suspects:
            return
        current = await ProcedureRunner(self._js).run(load(self._bucket, sorted(suspects)))
        again = MemoryFold(self._spec, wants=suspects.__contains__)
        if self._states is not None:
            again.begin_all({key: self._states[key] for key in suspects if key in self._states}, boundary)
        further = reaches(current, boundary)
        await again.advance(self._history, self._extent, boundary, further)
        for key in suspects:
            self._fold.adopt(key, again)
            self._found[key] = current.get(key, NOTHING)

    def _differences(self, keys: Iterable[str]) -> list[Difference]:
        version, fold, found = self.version, self._fold, self._found
        compared = (compare(key, fold.content(key), found.get(key, NOTHING), version) for key in keys)
        return [each for each in compared if each is not None]

    def compared(self) -> ComparedKeys:
        found, fold = self._found, self._fold
        result = ComparedKeys()
        for key in sorted(found.keys() | fold.keys):
            result.take(key, fold.content(key), found.get(key, NOTHING), self.version)
        return result

    @property
    def events(self) -> int:
        return self._fold.events

    @property
    def unreadable(self) -> int:
        return self._fold.failures


async def _entries(js: JetStream, bucket: str, *, is_small: bool) -> AsyncIterator[tuple[str, Current]]:
    """The keys of a bucket with what they have, markers of deleted keys included.

    A small bucket is read as of one moment. Of a large one, keys that are written meanwhile may not come.
    """
    runner = ProcedureRunner(js)
    view = await runner.run(open_bucket(bucket))
    if is_small:
        for entry in contents_of(view, (await runner.run(snapshot(view))).values()):
            yield entry
        return
    state = view.info.state
    async with aclosing(runner.pieces(view.scan(max(1, state.first_sequence), state.last_sequence))) as pieces:
        async for piece in pieces:
            for entry in contents_of(view, piece):
                yield entry


def contents_of(view: BucketView, messages: Iterable[Any]) -> Iterator[tuple[str, Current]]:
    """Messages of a bucket as keys of the projection with what they have; engines' own notes are left out."""
    for message in messages:
        key = message.subject[len(view.prefix) :]
        if not is_reserved(key):
            yield key, current_of(stored_delivery(message.subject, delivery(message).sequence, message))
