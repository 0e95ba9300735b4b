"""Reading the events of a projection from its stream, range by range, and folding them in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

from jetspark.aio.context import context_of
from jetspark.aio.jetstream import JetStream
from jetspark.app.extents import Extent
from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.positions import FoldPosition, start_of
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.router import Failure, KeyRows, Router
from jetspark.app.replay.contents import KeyContent
from jetspark.app.replay.places import noted_position
from jetspark.app.stream_history import Portion, ReadingRate, StreamHistory, recorded
from jetspark.errors import ConfigError
from jetspark.state.changes import NOTHING, Current

if TYPE_CHECKING:
    from jetspark.app.spec import AppSpec

__all__ = [
    "Events",
    "History",
    "MemoryFold",
    "OnEvents",
    "spec_of",
    "told_nobody",
]


class Events(NamedTuple):
    """Some of the events of a range, in order."""

    rows: KeyRows
    failures: list[Failure]
    messages: int
    last: int
    """Of the last message; everything up to it was read."""


OnEvents: TypeAlias = Callable[[Events], Awaitable[None]]
"""Is told what was read."""


async def told_nobody(events: Events) -> None:
    """Nobody wants to know."""


class History(StreamHistory):
    """The stream of a projection, from its beginning."""

    @classmethod
    async def open(
        cls, js: JetStream, app: AppSpec, spec: ProjectionSpec, bucket: str, *, is_anew: bool = False
    ) -> Self:
        """With the first event, as far as the bucket of the projection knows it.

        Args:
            is_anew: The states are made anew. Then the bucket may be of a stream that was deleted since.

        Raises:
            UsageError: The bucket was made of another stream of the same name.
        """
        history = cls(js, app, spec)
        position = (await noted_position(js, bucket)).position
        if position is None:
            return history
        beginning = FoldPosition.beginning(app.stream, (await history.info()).created)
        if not is_anew:
            start_of(position, beginning, projection=spec.name, bucket=bucket)
        if (position.stream, position.created) == (beginning.stream, beginning.created):
            history.first_event = position.first_event
        return history

    def __init__(self, js: JetStream, app: AppSpec, spec: ProjectionSpec) -> None:
        self.router = Router([spec], app.catalogue, owns_stream=app.owns_stream)
        super().__init__(js, app.stream, self.router.filters, self.router.reading)

    async def read(
        self, extent: Extent, *, subject: str | None = None, pace: ReadingRate | None = None
    ) -> AsyncGenerator[Events, None]:
        """The events of a range, in portions.

        Raises:
            DataLoss: Some of it went away while it was read.
            StreamRecreated: The stream is another one by now.
        """
        async with aclosing(self.messages(extent, pace, subject=subject)) as portions:
            async for portion in portions:
                yield self._route(portion)

    def _route(self, portion: Portion) -> Events:
        [name] = self.router.specs
        rows = KeyRows()
        failed = self.router.add_rows(portion.received, portion.sequences, recorded, {name: rows})
        failures = [failure for _, found in failed for failure in found]
        return Events(rows, failures, portion.read, portion.last)


class MemoryFold:
    """States of keys in memory, each folded as far as it is asked for, and never stored by this."""

    def __init__(self, spec: ProjectionSpec, *, wants: Callable[[str], bool] = lambda key: True) -> None:
        """``wants`` says which keys are folded; by default every key that an event comes for."""
        self._spec, self._wants = spec, wants
        self._states: dict[str, KeyState] = {}
        self.reached = 0
        """Every key has its events up to this sequence."""
        self.failures = 0
        self.events = 0
        """Up to the sequences that were asked for, those of keys that are not wanted included."""

    def begin(self, key: str, base: Current = NOTHING) -> None:
        """Begin a key with a state that it had."""
        self._states[key] = KeyState(self._spec, key, base)

    def begin_all(self, states: Mapping[str, Current], reached: int) -> None:
        """Begin with the states that keys had after a sequence; others had none."""
        for key, state in states.items():
            self.begin(key, state)
        self.reached = reached

    def content(self, key: str) -> KeyContent:
        return KeyContent.of_state(self._states.get(key))

    def has_event(self, key: str) -> bool:
        """Whether an event of the key was taken."""
        state = self._states.get(key)
        return state is not None and bool(state.applied or state.known or state.waiting or state.parked)

    @property
    def keys(self) -> set[str]:
        return set(self._states)

    def forget(self, key: str) -> None:
        self._states.pop(key, None)

    def adopt(self, key: str, other: MemoryFold) -> None:
        """Take a key as another fold has it."""
        self._states.pop(key, None)
        if key in other._states:
            self._states[key] = other._states[key]

    def take(self, events: Events, last: int, further: Mapping[str, int] | None = None) -> None:
        """Apply events up to the sequence ``last``; of the keys in ``further`` up to a later one."""
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
        pace: ReadingRate | None = None,
        on_events: OnEvents = told_nobody,
    ) -> None:
        """Fold on from where this is, every key to ``last``, and those in ``further`` to their own sequence."""
        end = max([last, *(further or {}).values()])
        if end <= self.reached:
            return
        # Not from the beginning of the extent: a key may lack events before it, and would never get them.
        part = await history.between(extent, self.reached + 1, end)
        async with aclosing(history.read(part, pace=pace)) as portions:
            async for events in portions:
                self.take(events, last, further)
                await on_events(events)
        self.reached = max(self.reached, last)


def spec_of(app: AppSpec, projection: str, js: JetStream | None = None) -> ProjectionSpec:
    """A projection by its name; with ``js`` as it is folded on that server.

    Raises:
        ConfigError: There is no such projection.
    """
    found = app.projections.get(projection)
    if found is None:
        known = ", ".join(sorted(app.projections)) or "none"
        raise ConfigError(f"projection {projection!r}: app {app.name!r} has none of this name; it has {known}")
    return found if js is None else found.within(context_of(js).client.max_payload_bytes)
