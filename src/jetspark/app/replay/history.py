"""The history of a projection: reading its events from the stream, and folding them in memory.

Another engine (:class:`FoldEngine`) may read and fold in place of this process; :class:`jetspark.spark.ReplayEngine` is
one. All decisions, records and writes beside live engines stay in this process, so a replay does the same on every
engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, TypeAlias

from jetspark.aio.context import context_of
from jetspark.aio.jetstream import JetStream
from jetspark.app.extents import Extent
from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.positions import FoldPosition, start_of
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.router import Failure, KeyRows, Router, recorded
from jetspark.app.replay.comparison import ComparedKeys, KeyContent
from jetspark.app.replay.live_bucket import stored_position
from jetspark.app.stream_history import Portion, ReadingRate, StreamHistory
from jetspark.errors import ConfigError
from jetspark.state.changes import NOTHING, Current

if TYPE_CHECKING:
    from jetspark.app.spec import AppSpec
    from jetspark.lake.reading import ArchiveRoot

__all__ = [
    "Events",
    "FoldEngine",
    "FoldOptions",
    "History",
    "MemoryFold",
    "OnEvents",
    "RangeFold",
    "RangeSurvey",
    "ignore_events",
    "spec_of",
]


class RangeSurvey(NamedTuple):
    """The keys that have events in a range."""

    events: Mapping[str, int]
    """The number of events, by key."""
    last_of: Mapping[str, int]
    """The sequence of the last event, by key."""
    unreadable: int


class RangeFold(NamedTuple):
    """Counts of a range that was folded into a bucket."""

    events: int
    unreadable: int
    changed: int
    """Keys that were stored."""
    parked: int
    """Keys that were parked at an event of the range."""


class FoldEngine(Protocol):
    """Folds one projection."""

    @property
    def archive(self) -> ArchiveRoot | str | None:
        """The archive that it reads from, too."""

    async def compare(self, bucket: str, boundary: int, version: int | None) -> ComparedKeys:
        """Compare a bucket, which has all events up to a boundary, with a fresh fold; nothing is stored.

        A key that is beyond the boundary is compared at the sequence of its value. With ``version`` None, the bucket
        may have been made by any version of the fold.
        """

    async def survey(self, part: Extent, subject: str | None) -> RangeSurvey:
        """The keys of a range; nothing is stored."""

    async def fold_on(self, part: Extent, bases: Mapping[str, Current]) -> Mapping[str, Current]:
        """Fold a range onto the states of some keys, and return the new states; nothing is stored."""

    async def fold_into(self, bucket: str, part: Extent) -> RangeFold:
        """Fold a range into a bucket that has all events before it, and store the new position in the bucket."""


class Events(NamedTuple):
    """A portion of the events of a range, in order."""

    rows: KeyRows
    failures: list[Failure]
    messages: int
    last: int
    """The sequence of the last message that was read."""


OnEvents: TypeAlias = Callable[[Events], Awaitable[None]]
"""Called with each portion of events that was read."""


async def ignore_events(events: Events) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldOptions:
    """How a history is read and folded."""

    pace: ReadingRate = field(default_factory=lambda: ReadingRate(None))
    on_events: OnEvents = ignore_events
    engine: FoldEngine | None = None
    """Reads and folds in place of this process."""
    archive: ArchiveRoot | str | None = None
    """Older events come from there."""

    @classmethod
    def of(
        cls,
        rate: float | None,
        engine: FoldEngine | None = None,
        on_events: OnEvents = ignore_events,
        archive: ArchiveRoot | str | None = None,
    ) -> FoldOptions:
        """
        Raises:
            ConfigError: There is a rate and another engine, which cannot keep it; or the engine has another archive.
        """
        if engine is not None:
            if rate is not None:
                raise ConfigError(
                    f"rate={rate} is not supported with engine=, which folds as fast as it can: leave it out"
                )
            if archive is not None and archive != engine.archive:
                raise ConfigError(f"archive={archive!r}: the engine reads {engine.archive!r}: give it the same archive")
            archive = engine.archive
        return cls(pace=ReadingRate(rate), on_events=on_events, engine=engine, archive=archive)


class History(StreamHistory):
    """The stream of a projection, from its beginning."""

    @classmethod
    async def open(
        cls,
        js: JetStream,
        app: AppSpec,
        spec: ProjectionSpec,
        bucket: str,
        *,
        archive: ArchiveRoot | str | None = None,
        may_be_other_stream: bool = False,
    ) -> Self:
        """Read the first event's sequence from the projection's bucket, if the bucket has it.

        Args:
            may_be_other_stream: The bucket may be of a stream that was deleted, and created again.

        Raises:
            UsageError: The bucket was made of another stream of the same name.
        """
        history = cls(js, app, spec, archive=archive)
        position = (await stored_position(js, bucket)).position
        if position is None:
            return history
        beginning = FoldPosition.beginning(app.stream, (await history.facts()).created)
        if not may_be_other_stream:
            start_of(position, beginning, projection=spec.name, bucket=bucket)
        if (position.stream, position.created) == (beginning.stream, beginning.created):
            history.first_event = position.first_event
        return history

    def __init__(
        self, js: JetStream, app: AppSpec, spec: ProjectionSpec, *, archive: ArchiveRoot | str | None = None
    ) -> None:
        self.spec = spec
        self.router = Router([spec], app.catalogue, owns_stream=app.owns_stream)
        super().__init__(js, app.stream, self.router.filters, self.router.reading, archive=archive)

    async def read(
        self, extent: Extent, *, subject: str | None = None, pace: ReadingRate | None = None
    ) -> AsyncGenerator[Events, None]:
        """The events of a range, in portions.

        Raises:
            DataLoss: Messages of the range were removed while it was read.
            StreamRecreated: The stream was deleted, and created again.
        """
        async with aclosing(self.messages(extent, pace, subject=subject)) as portions:
            async for portion in portions:
                yield self._route(portion)

    def _route(self, portion: Portion) -> Events:
        rows = KeyRows()
        failed = self.router.add_rows(portion.received, portion.sequences, recorded, {self.spec.name: rows})
        failures = [failure for _, found in failed for failure in found]
        return Events(rows, failures, portion.read, portion.last)


class MemoryFold:
    """States of keys in memory, folded on demand."""

    def __init__(self, spec: ProjectionSpec, *, wants: Callable[[str], bool] = lambda key: True) -> None:
        """``wants`` selects the keys to fold; by default every key that has an event."""
        self._spec, self._wants = spec, wants
        self._states: dict[str, KeyState] = {}
        self.reached = 0
        """Every key has its events up to this sequence."""
        self.failures = 0
        self.events = 0
        """Events that were read, those of keys that are not folded included."""

    def begin(self, key: str, base: Current = NOTHING) -> None:
        """Set the state of a key before the events that come next."""
        self._states[key] = KeyState(self._spec, key, base)

    def begin_all(self, states: Mapping[str, Current], reached: int) -> None:
        """Set the states of all keys after the event ``reached``; other keys have no state."""
        for key, state in states.items():
            self.begin(key, state)
        self.reached = reached

    def content(self, key: str) -> KeyContent:
        return KeyContent.of_state(self._states.get(key))

    def has_event(self, key: str) -> bool:
        """True when at least one event of the key was applied, or parked it."""
        state = self._states.get(key)
        return state is not None and bool(state.applied or state.known or state.waiting or state.parked)

    @property
    def keys(self) -> set[str]:
        return set(self._states)

    def forget(self, key: str) -> None:
        self._states.pop(key, None)

    def apply(self, events: Events, last: int, further: Mapping[str, int] | None = None) -> None:
        """Apply events up to the sequence ``last``; for keys in ``further``, up to the sequence there."""
        spec, states = self._spec, self._states
        is_all = events.last <= last
        self.failures += sum(is_all or each.sequence <= last for each in events.failures)
        self.events += len(events.rows) if is_all else sum(row[1] <= last for row in events.rows)
        for key, sequence, event in events.rows:
            if not self._wants(key):
                continue
            if sequence > last and (further is None or sequence > further.get(key, 0)):
                continue
            state = states.get(key)
            if state is None:
                state = states[key] = KeyState(spec, key, NOTHING)
            state.apply(spec, key, sequence, event)

    async def advance(
        self,
        history: History,
        extent: Extent,
        last: int,
        further: Mapping[str, int] | None = None,
        *,
        options: FoldOptions | None = None,
    ) -> None:
        """Continue the fold: every key to ``last``, and keys in ``further`` to the sequence there."""
        options = options or FoldOptions()
        end = max([last, *(further or {}).values()])
        if end <= self.reached:
            return
        # From the events that the keys lack, which may come before the extent: they would never get these otherwise.
        part = await history.between(extent, self.reached + 1, end)
        async with aclosing(history.read(part, pace=options.pace)) as portions:
            async for events in portions:
                self.apply(events, last, further)
                await options.on_events(events)
        self.reached = max(self.reached, last)


def spec_of(app: AppSpec, projection: str, js: JetStream | None = None) -> ProjectionSpec:
    """A projection by its name; with ``js``, with the limits of that server.

    Raises:
        ConfigError: The application has no projection of this name.
    """
    found = app.projections.get(projection)
    if found is None:
        known = ", ".join(sorted(app.projections)) or "none"
        raise ConfigError(f"projection {projection!r}: app {app.name!r} has no projection of this name; it has {known}")
    return found if js is None else found.within(context_of(js).client.max_payload_bytes)
